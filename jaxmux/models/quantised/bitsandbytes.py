"""Linears that bitsandbytes has quantised to 4 or 8 bits (Dettmers et al. 2022 and 2023)."""

import json
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from jaxmux.pallas_kernels.frozen_weight import PLAIN_FORMATS, FrozenWeight
from jaxmux.pallas_kernels.number_formats import (
    ABSMAX_BLOCK,
    DYNAMIC_MAP,
    NF4_BLOCK,
    NF4_TABLE,
    DoubleQuantised,
    absmax_of_rows,
    unpacked,
)

from .settings import WHAT_TO_DO
from .stored_linear import LinearTensors, StoredLinear

# Beginning of the name of a tensor that holds a JSON object. The name ends in the table of codes.
STATE = "weight.quant_state.bitsandbytes__"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
# The bytes of the codes can be stored in other dtypes, which FSDP in torch needs.
_STORAGE = ("U8", "BF16", "F16", "F32")


class _State(NamedTuple):
    """The JSON object that belongs to a weight of 4 bits.

    Attributes:
      quant_type: "nf4" or "fp4".
      blocksize: number of weights that share a scale.
      dtype: dtype to which decoded weights are rounded.
      nested_blocksize: number of scales that share a scale, if the scales are also quantised.
      nested_offset: number that is added to the scales; None if the scales are not quantised.
    """

    quant_type: str
    blocksize: int
    dtype: str
    nested_blocksize: int
    nested_offset: float | None


def stored_in_8_bits(tensors: LinearTensors) -> StoredLinear:
    """Describes a linear with codes of 8 bits and one scale per output channel. Raises
    BackboneError if a tensor is missing or does not fit the others."""
    n, k = tensors.size
    tensors.require("weight", ("I8",), (n, k))
    tensors.require("SCB", ("F32",), (n,), (1, n), (n, 1))
    if "weight_format" in tensors.parts and tensors.read("weight_format").any():
        raise tensors.refused("weight_format", f"not in the order of rows; {WHAT_TO_DO}")
    return StoredLinear(_int8, tensors.size, ("weight", "SCB"))


def stored_in_4_bits(tensors: LinearTensors) -> StoredLinear:
    """Describes a linear with codes of 4 bits and one scale per block. Raises BackboneError if a
    tensor is missing or does not fit the others."""
    (n, k), state = tensors.size, _state(tensors)
    blocks = math.ceil(n * k / state.blocksize)
    tensors.require("weight", _STORAGE)
    size = math.prod(tensors.shape("weight")) * tensors.dtype("weight").itemsize
    if size != math.ceil(n * k / 2):
        raise tensors.refused("weight", f"has {size} bytes; {n} x {k} codes need {n * k // 2}")
    tensors.require("weight.quant_map", ("F32",), (16,))
    parts = ["weight", "weight.absmax", "weight.quant_map"]
    is_double = state.nested_offset is not None
    tensors.require("weight.absmax", ("U8",) if is_double else ("F32",), (blocks,), (blocks, 1))
    if is_double:
        nested = math.ceil(blocks / state.nested_blocksize)
        tensors.require("weight.nested_absmax", ("F32",), (nested,))
        tensors.require("weight.nested_quant_map", ("F32",), (256,))
        parts += _NESTED
    is_nf4 = state.blocksize == NF4_BLOCK and k % 2 == 0
    is_nf4 &= np.array_equal(tensors.read("weight.quant_map"), NF4_TABLE)
    if is_nf4 and is_double and state.nested_blocksize == ABSMAX_BLOCK:
        # The last bits of the map depend on the machine on which torch computed it.
        is_known = np.array_equal(tensors.read("weight.nested_quant_map"), DYNAMIC_MAP)
        weights = _double_nf4 if is_known else _nf4
    else:
        weights = _nf4 if is_nf4 else _from_table
    rounding = None if state.dtype == "float32" else state.dtype
    return StoredLinear(
        weights, tensors.size, tuple(parts), rounding, nested_block=state.nested_blocksize
    )


def numbers_of(tensors: LinearTensors) -> dict[str, np.ndarray]:
    """The "offset" that is added to the scales of a linear of 4 bits. It is not in a tensor but in
    the JSON object. Raises BackboneError if this object is damaged."""
    return {"offset": np.float32(_state(tensors).nested_offset or 0)}


def _state(tensors: LinearTensors) -> _State:
    states = [part for part in tensors.parts if part.startswith(STATE)]
    if len(states) != 1:
        problem = "is missing" if not states else f"is there {len(states)} times"
        raise tensors.refused(f"{STATE}nf4", problem)
    try:
        facts = json.loads(tensors.read(states[0]).tobytes())
        offset = facts["nested_offset"] if set(_NESTED) & tensors.parts else None
        state = _State(
            facts["quant_type"],
            facts["blocksize"],
            facts["dtype"],
            facts.get("nested_blocksize", ABSMAX_BLOCK),
            None if offset is None else float(offset),
        )
        sizes = (state.blocksize, state.nested_blocksize)
        if any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(f"sizes of blocks {sizes}")
        if state.dtype not in PLAIN_FORMATS:
            raise ValueError(f"dtype {state.dtype!r}")
        if offset is None and set(_NESTED) & tensors.parts:
            raise ValueError("no nested_offset")
        if not math.isfinite(state.nested_offset or 0):
            raise ValueError(f"nested_offset {offset}")
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise tensors.refused(states[0], f"not what bitsandbytes writes ({e!r})") from None
    return state


def _int8(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    return (FrozenWeight(arrays["weight"].T, arrays["SCB"].reshape(-1), "int8"),)


def _double_nf4(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    n, k = stored.size
    codes = arrays["weight.absmax"].reshape(1 if k % NF4_BLOCK else n, -1)
    scales = DoubleQuantised(codes, arrays["weight.nested_absmax"], arrays["offset"])
    values = _bytes(arrays["weight"]).reshape(n, k // 2)
    return (FrozenWeight(values, scales, "nf4", stored.rounding),)


def _nf4(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    n, k = stored.size
    values = _bytes(arrays["weight"]).reshape(n, k // 2)
    scales = _absmax(arrays, stored).reshape(1 if k % NF4_BLOCK else n, -1)
    scales = absmax_of_rows(scales, values.shape)
    return (FrozenWeight(values, scales, "nf4", stored.rounding),)


def _from_table(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    """The weight in float32. A block of weights may extend over several rows."""
    n, k = stored.size
    absmax = _absmax(arrays, stored)
    numbers = arrays["weight.quant_map"][unpacked(_bytes(arrays["weight"]))][: n * k]
    per_weight = jnp.repeat(absmax, -(-numbers.size // absmax.size))[: n * k]
    weights = (numbers * per_weight).reshape(n, k).T
    rounded = FrozenWeight(weights, None, "float32", stored.rounding).decoded()
    return (FrozenWeight.of(rounded),)


def _absmax(arrays: dict[str, Array], stored: StoredLinear) -> Float32[Array, " blocks"]:
    """The scales of blocks. They are decoded like `number_formats.decode_absmax`, but with any
    map."""
    absmax = arrays["weight.absmax"].reshape(-1)
    if "weight.nested_absmax" not in arrays:
        return absmax
    per_code = jnp.repeat(arrays["weight.nested_absmax"], stored.nested_block)[: absmax.size]
    product = arrays["weight.nested_quant_map"][absmax] * per_code
    return jnp.maximum(product, jnp.finfo(jnp.float32).min) + arrays["offset"]


def _bytes(array: Array) -> UInt8[Array, " N"]:
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


def state_of(weight: FrozenWeight, dtype: str) -> dict[str, Any]:
    """The JSON object that bitsandbytes writes beside the nf4 weight of one linear. The weight is
    on the host. `dtype` is the dtype to which bitsandbytes rounds the decoded weight."""
    state = {
        "quant_type": "nf4",
        "blocksize": NF4_BLOCK,
        "dtype": dtype,
        "shape": weight.shape[::-1],
    }
    if isinstance(weight.scales, DoubleQuantised):
        state |= {
            "nested_blocksize": ABSMAX_BLOCK,
            "nested_dtype": "float32",
            "nested_offset": float(weight.scales.offset),
        }
    return state
