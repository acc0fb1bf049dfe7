"""Checkpoints that are already quantised: how they are read, and how they are written.

A linear P has a tensor P.weight and, if it is quantised, further tensors with names that begin with
"P.":

  library                    tensors of P                                       format here
  bitsandbytes, 4 bits       weight, weight.absmax, weight.nested_absmax, ...   nf4
  bitsandbytes, 8 bits       weight, SCB                                        int8
  compressed-tensors         weight, weight_scale, weight_zero_point            scaled, float8
  the same, packed           weight_packed, weight_scale, weight_zero_point     scaled
  fp8 of transformers        weight, weight_scale_inv                           scaled, float8
  fbgemm                     weight, weight_scale                               scaled, float8

The tensors show which linears are quantised, and how; the lists of exceptions in config.json are
not needed. Weights have the same values as when the library decodes them. In the formats nf4, int8
and scaled, products decode the weights. In float8 the codes themselves are multiplied, and
activations are also rounded, so this format is used only if the user asks for it. Weights that no
format can hold (fp4, other sizes of blocks) are decoded when they are read.
"""
