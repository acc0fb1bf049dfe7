"""Checkpoints that are quantised already: how they are read, and how they are written.

A linear P has a tensor P.weight and, if it is quantised, further tensors beside it:

  library                    tensors of P                                       stays as
  bitsandbytes, 4 bits       weight, weight.absmax, weight.nested_absmax, ...   nf4
  bitsandbytes, 8 bits       weight, SCB                                        int8
  compressed-tensors         weight, weight_scale, weight_zero_point            scaled, float8
  the same, packed           weight_packed, weight_scale, weight_zero_point     scaled
  fp8 of transformers        weight, weight_scale_inv                           scaled, float8
  fbgemm                     weight, weight_scale                               scaled, float8

Which linears are quantised, and how, is read from the tensors; the lists of exceptions in
config.json are not needed. Weights have the values that the library decodes. They are decoded for
products in the formats nf4, int8 and scaled. In float8 the codes are multiplied as they are, and
activations are rounded too, so this format is taken only where the user asks for it. What no format
can hold (fp4, other sizes of blocks) is decoded when it is read.
"""
