"""How checkpoints that are quantised already store the weights of linears.

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

import json
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmux.pallas_kernels import number_formats
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.number_formats import (
    DYNAMIC_MAP,
    NF4_BLOCK,
    NF4_TABLE,
    DoubleQuantised,
    Scaled,
)

from .checkpoint_files import CheckpointTensors
from .errors import BackboneError

# Values of quant_method in config.json.
METHODS = ("bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8")
# Values of format in config.json, for compressed-tensors.
COMPRESSIONS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
)
_WHAT_TO_DO = (
    "use the original checkpoint with fine_tune.backbone_format, or let transformers decode this "
    "one and save it (model.dequantize(), model.save_pretrained())"
)
# Dtypes of scales, and to which the library rounds weights then.
_ROUNDING = {"F32": None, "BF16": "bfloat16", "F16": "float16", "F8_E8M0": None}
_STATE = "weight.quant_state."


class Quantisation(NamedTuple):
    """What config.json says of a quantised checkpoint.

    Attributes:
      method: one of `METHODS`.
      block: rows and columns of a weight that share a scale; None if the shapes of scales tell.
    """

    method: str
    block: tuple[int, int] | None = None


class StoredLinear(NamedTuple):
    """How a checkpoint stores the weight of one linear.

    Attributes:
      kind: "nf4", "table" (any other numbers of 4 bits of bitsandbytes), "int8", "packed" or
        "scaled".
      size: n and k, its output and input width.
      parts: the tensors that are read, named as they are behind the name of the linear.
      rounding: see `FrozenWeight.rounding`.
      block: see `Quantisation.block`.
    """

    kind: str
    size: tuple[int, int]
    parts: tuple[str, ...]
    rounding: str | None = None
    block: tuple[int, int] | None = None


def quantisation_of(raw: Mapping[str, Any], where: str) -> Quantisation | None:
    """Reads how a checkpoint is quantised.

    Args:
      raw: the contents of config.json.
      where: name of the file, for errors.

    Returns:
      None if it is not quantised.

    Raises:
      BackboneError: it is quantised in a way that jaxmux cannot read; the message says what to do.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    method = found.get("quant_method", "compressed-tensors" if "format" in found else None)
    if method not in METHODS:
        raise BackboneError(
            f"{where}: quant_method={method!r} is not supported; known: {', '.join(METHODS)}; "
            f"{_WHAT_TO_DO}"
        )
    block = found.get("weight_block_size")
    if method == "compressed-tensors":
        sparsity = (found.get("sparsity_config") or {}).get("format", "dense")
        for format in (found.get("format", "dense"), sparsity):
            if format not in COMPRESSIONS:
                raise BackboneError(
                    f"{where}: compressed-tensors in the format {format!r} is not supported; "
                    f"known: {', '.join(COMPRESSIONS)}; {_WHAT_TO_DO}"
                )
        if found.get("transform_config"):
            raise BackboneError(f"{where}: transform_config is not supported; {_WHAT_TO_DO}")
        groups = (found.get("config_groups") or {}).values()
        blocks = [(group.get("weights") or {}).get("block_structure") for group in groups]
        block = next(filter(None, blocks), None)
    return Quantisation(method, None if block is None else tuple(block))


def kept_linears(
    files: CheckpointTensors,
    quantisation: Quantisation,
    sizes: Mapping[str, tuple[int, int]],
    layers: int,
    backbone_format: str | None,
) -> dict[str, FrozenWeight]:
    """The linears that stay as they are stored: those that are stored alike in all layers, in the
    format that is asked for.

    Args:
      files: the tensors of the checkpoint.
      quantisation: what config.json says.
      sizes: n and k, output and input width of each linear of a layer, by its name.
      layers: number of layers.
      backbone_format: the format; None for any whose products decode the weights.

    Returns:
      By name, shapes, dtypes and format of the weight in one layer.

    Raises:
      BackboneError: as `stored_linear` and `abstract_weights_of`.
    """
    kept = {}
    for module, size in sizes.items():
        first, *others = (
            _forms(files, layer_name(module, layer), size, quantisation) for layer in range(layers)
        )
        if any(other != first for other in others):
            continue
        wanted = [each for each in first if each.format == backbone_format]
        if backbone_format is None:
            wanted = [each for each in first[:1] if not each.is_plain]
        if wanted:
            kept[module] = wanted[0]
    return kept


def layer_name(module: str, layer: int) -> str:
    """The name that a linear of a layer, for example "mlp.up_proj", has in checkpoints."""
    return f"model.layers.{layer}.{module}"


def _forms(
    files: CheckpointTensors, name: str, size: tuple[int, int], quantisation: Quantisation
) -> tuple[FrozenWeight, ...]:
    stored = stored_linear(files, name, size, quantisation)
    return () if stored is None else abstract_weights_of(files, name, stored)


def stored_linear(
    files: CheckpointTensors, name: str, size: tuple[int, int], quantisation: Quantisation
) -> StoredLinear | None:
    """How the weight of a linear is stored.

    Args:
      files: the tensors of the checkpoint.
      name: name of the linear, for example "model.layers.0.mlp.up_proj".
      size: n and k, its output and input width.
      quantisation: what config.json says.

    Returns:
      None if the weight is a tensor of floating-point numbers.

    Raises:
      BackboneError: the tensors are not supported; the message names one.
    """
    parts = {tensor.removeprefix(f"{name}."): tensor for tensor in files.of_module(name)}

    def refused(part: str, reason: str) -> BackboneError:
        return BackboneError(f"{files.folder}: tensor {name}.{part}: {reason}")

    def dtype(part: str, *known: str) -> str:
        if part not in parts:
            raise refused(part, "is missing")
        if (found := files.dtype(parts[part])) not in known:
            raise refused(part, f"numbers of the dtype {found} are not supported; {_WHAT_TO_DO}")
        return found

    def scaled(kind: str, codes: str, scale: str) -> StoredLinear:
        read = (codes, scale, *({"weight_zero_point"} & parts.keys()))
        rounding = _ROUNDING[dtype(scale, *_ROUNDING)]
        return StoredLinear(kind, size, read, rounding, quantisation.block)

    def of_4_bits() -> StoredLinear:
        state = next((part for part in parts if part.startswith(_STATE)), None)
        if state is None:
            raise refused(f"{_STATE}bitsandbytes__nf4", "is missing")
        facts = _facts(files, parts[state])
        own = {"weight", "weight.absmax", "weight.quant_map", state}
        own |= {"weight.nested_absmax", "weight.nested_quant_map"} & parts.keys()
        is_nf4 = facts["quant_type"] == "nf4" and facts["blocksize"] == NF4_BLOCK
        kind = "nf4" if is_nf4 and size[1] % NF4_BLOCK == 0 else "table"
        rounding = None if facts["dtype"] == "float32" else facts["dtype"]
        return StoredLinear(kind, size, tuple(sorted(own)), rounding)

    if "weight_g_idx" in parts:
        raise refused("weight_g_idx", f"groups in another order than columns; {_WHAT_TO_DO}")
    if "weight_packed" in parts:
        dtype("weight_packed", "I32")
        return scaled("packed", "weight_packed", "weight_scale")
    if "weight.absmax" in parts:
        return of_4_bits()
    if "SCB" in parts:
        dtype("weight", "I8")
        return StoredLinear("int8", size, ("weight", "SCB"))
    for scale in ("weight_scale", "weight_scale_inv"):
        if scale in parts:
            dtype("weight", "F8_E4M3", "I8")
            return scaled("scaled", "weight", scale)
    return None


def abstract_weights_of(
    files: CheckpointTensors, name: str, stored: StoredLinear
) -> tuple[FrozenWeight, ...]:
    """Shapes, dtypes and formats in which `read_weights` returns a linear's weight.

    Raises:
      BackboneError: the shapes do not fit together; the message names the linear.
    """
    arrays = {
        part: jax.ShapeDtypeStruct(
            files.shape(f"{name}.{part}"), files.array_dtype(f"{name}.{part}")
        )
        for part in stored.parts
    }
    arrays["offset"] = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        return jax.eval_shape(partial(_weights, stored=stored), arrays)
    except (TypeError, ValueError) as e:
        raise BackboneError(
            f"{files.folder}: the tensors of {name} do not fit together, or not to the sizes in "
            f"config.json, {stored.size[0]} x {stored.size[1]} ({str(e).splitlines()[0]})"
        ) from None


def read_weights(
    files: CheckpointTensors, name: str, stored: StoredLinear
) -> tuple[FrozenWeight, ...]:
    """Reads the weight [k, n] of a linear.

    Args:
      files: the tensors of the checkpoint.
      name: name of the linear.
      stored: the result of `stored_linear`.

    Returns:
      The weight in each format in which it can be kept, or, if there is none, in float32. The first
      one is decoded for products.

    Raises:
      BackboneError: the codes stand for other numbers than those of the format.
    """
    arrays = {part: files.read(f"{name}.{part}") for part in stored.parts}
    if stored.kind == "nf4":
        tables = {"weight.quant_map": NF4_TABLE, "weight.nested_quant_map": DYNAMIC_MAP}
        for part, table in tables.items():
            if part in arrays and not np.array_equal(arrays[part], table):
                raise BackboneError(
                    f"{files.folder}: tensor {name}.{part}: not the numbers of nf4; {_WHAT_TO_DO}"
                )
    state = next((part for part in stored.parts if part.startswith(_STATE)), None)
    facts = {} if state is None else _facts(files, f"{name}.{state}")
    return _weights(arrays | {"offset": np.float32(facts.get("nested_offset", 0))}, stored)


def _facts(files: CheckpointTensors, tensor: str) -> dict[str, Any]:
    """What bitsandbytes writes, as JSON, beside a weight of 4 bits."""
    try:
        facts = json.loads(files.read(tensor).tobytes())
        return {"quant_type": "", "blocksize": 0, "dtype": "float32"} | facts
    except (ValueError, TypeError) as e:
        raise BackboneError(f"{files.folder}: tensor {tensor}: not a JSON object ({e})") from None


@partial(jax.jit, static_argnames="stored")
def _weights(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    n, k = stored.size
    zero = arrays.get("weight_zero_point")
    match stored.kind:
        case "nf4":
            scales = arrays["weight.absmax"].reshape(n, k // NF4_BLOCK)
            if "weight.nested_absmax" in arrays:
                nested = arrays["weight.nested_absmax"]
                scales = DoubleQuantised(scales, nested, arrays["offset"])
            values = _bytes(arrays["weight"]).reshape(n, k // 2)
            return (FrozenWeight(values, scales, "nf4", stored.rounding),)
        case "table":
            return (_from_table(arrays, stored),)
        case "int8":
            codes = _of_shape(arrays["weight"], (n, k)).T
            return (FrozenWeight(codes, _of_shape(arrays["SCB"], (n,)), "int8"),)
        case "packed":
            codes = _unpacked_words(arrays["weight_packed"], k)
            if zero is not None:
                zero = _unpacked_words(zero.T, n).T
            return _in_blocks(codes, arrays["weight_scale"], zero, stored)
        case _:
            codes = _of_shape(arrays["weight"], (n, k))
            return _in_blocks(codes, arrays[stored.parts[1]], zero, stored)


def _from_table(arrays: dict[str, Array], stored: StoredLinear) -> FrozenWeight:
    """A weight in 4 bits, whose blocks go on from one row to the next, in float32."""
    absmax = arrays["weight.absmax"].reshape(1, -1)
    if "weight.nested_absmax" in arrays:
        nested = arrays["weight.nested_absmax"]
        absmax = number_formats.decode_absmax(DoubleQuantised(absmax, nested, arrays["offset"]))
    codes = number_formats.unpacked(_bytes(arrays["weight"]))
    blocks = arrays["weight.quant_map"][codes].reshape(absmax.size, -1) * absmax.reshape(-1, 1)
    weight = FrozenWeight(blocks.reshape(stored.size).T, None, "float32", stored.rounding)
    return FrozenWeight.of(weight.decoded())


def _in_blocks(
    codes: Array, scale: Array, zero: Array | None, stored: StoredLinear
) -> tuple[FrozenWeight, ...]:
    """A weight as codes times scales, and in float8 if that is what it is.

    Args:
      codes: [n, k] in int8 or e4m3, or integers of 4 bits in int4.
      scale: of the whole weight [1], of rows [n] or [n, 1], or of blocks.
      zero: like `scale`.
      stored: how they are stored.
    """

    def of_blocks(array: Array) -> Array:
        """With blocks that divide rows and columns evenly."""
        array = array.reshape(-1, 1) if array.ndim < 2 else array
        for axis, size in enumerate(stored.size):
            blocks, wide = array.shape[axis], stored.block[axis] if stored.block else 0
            if wide and 1 < blocks == -(-size // wide) and size % wide:
                array = jax.lax.slice_in_dim(jnp.repeat(array, wide, axis), 0, size, axis=axis)
            elif size % blocks:
                raise ValueError(f"{blocks} scales for {size} rows or columns")
        return array

    if scale.dtype == jnp.float8_e8m0fnu:
        scale = scale.astype(jnp.float32)
    scales = Scaled(of_blocks(scale), None if zero is None else of_blocks(zero))
    values = codes
    if codes.dtype == jnp.int4:
        values = number_formats.packed((codes.astype(jnp.int8) + 8).astype(jnp.uint8))
    found = [FrozenWeight(values, scales, "scaled", stored.rounding)]
    if codes.dtype == jnp.float8_e4m3fn and scales.scale.shape[1] == 1:
        channels = jnp.broadcast_to(scales.scale[:, 0].astype(jnp.float32), stored.size[:1])
        found.append(FrozenWeight(codes, channels, "float8"))
    return tuple(found)


def _unpacked_words(words: Array, count: int) -> Array:
    """The integers [rows, count] that rows of int32 hold, the lowest bits first. They are stored
    with half their range added."""
    held = _bytes(words).reshape(len(words), -1)
    if (bits := 32 * words.shape[1] // count) == 8:
        return (held[:, :count] ^ 128).view(jnp.int8)
    if bits != 4:
        raise ValueError(f"packed numbers of {bits} bits; known: 4, 8")
    halves = jnp.stack([held & 15, held >> 4], axis=-1).reshape(len(words), -1)[:, :count]
    return (halves.astype(jnp.int8) - 8).astype(jnp.int4)


def _bytes(array: Array) -> Array:
    """The bytes of an array, in one axis. bitsandbytes can store bytes as other dtypes."""
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


def _of_shape(array: Array, shape: tuple[int, ...]) -> Array:
    if array.shape != shape:
        raise ValueError(f"shape {array.shape} where {shape} is needed")
    return array
