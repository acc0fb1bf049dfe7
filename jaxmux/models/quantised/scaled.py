"""Linears that are stored as codes and scales: by compressed-tensors, and in fp8."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.number_formats import Scaled, packed

from .settings import WHAT_TO_DO, Quantisation
from .stored_linear import LinearTensors, StoredLinear

SCALES = ("weight_scale", "weight_scale_inv")
_ZERO, _ORDER = "weight_zero_point", "weight_g_idx"
# For each dtype of the scales, the dtype to which the library rounds decoded weights.
_ROUNDING = {"F32": None, "BF16": "bfloat16", "F16": "float16", "F8_E8M0": None}
_BITS = (4, 8)


def stored_with_scales(tensors: LinearTensors, quantisation: Quantisation) -> StoredLinear:
    """Describes a linear with codes in int8 or e4m3, one per element of the tensor. Raises
    BackboneError if a tensor is missing or does not fit the others."""
    tensors.require("weight", ("F8_E4M3", "I8"), tensors.size)
    scale = next(part for part in SCALES if part in tensors.parts)
    rounding = _check_scale(tensors, scale, quantisation)
    parts = ("weight", scale)
    if _ZERO in tensors.parts:
        tensors.require(_ZERO, ("I8",), tensors.shape(scale))
        parts += (_ZERO,)
    return StoredLinear(_scaled, tensors.size, parts, rounding, quantisation.block)


def stored_in_words(tensors: LinearTensors, quantisation: Quantisation) -> StoredLinear:
    """Describes a linear with codes of 4 or 8 bits in integers of 32 bits. Raises BackboneError if
    a tensor is missing or does not fit the others."""
    (n, k), part = tensors.size, "weight_packed"
    tensors.require(part, ("I32",), *((n, _words(k, bits)) for bits in _BITS))
    bits = next(bits for bits in _BITS if tensors.shape(part) == (n, _words(k, bits)))
    if bits * k % 8:
        raise tensors.refused(part, f"rows of {k} codes of {bits} bits; {WHAT_TO_DO}")
    rounding = _check_scale(tensors, "weight_scale", quantisation)
    parts = (part, "weight_scale")
    if _ZERO in tensors.parts:
        *_, groups = scales = tensors.shape("weight_scale")
        tensors.require(_ZERO, ("I32", "I8"), (_words(n, bits), groups), scales)
        parts += (_ZERO,)
    if _ORDER in tensors.parts:
        order, groups = tensors.read(_ORDER), tensors.shape("weight_scale")[-1]
        if not (np.array_equal(order, np.arange(k) // (k // groups)) or np.all(order == -1)):
            raise tensors.refused(_ORDER, f"groups in another order than columns; {WHAT_TO_DO}")
    return StoredLinear(_in_words, tensors.size, parts, rounding, quantisation.block)


def _check_scale(tensors: LinearTensors, part: str, quantisation: Quantisation) -> str | None:
    """Checks the scales, and returns the dtype to which the library rounds decoded weights."""
    dtype, shape = tensors.require(part, tuple(_ROUNDING)), tensors.shape(part)
    blocks = shape if len(shape) == 2 else (math.prod(shape), 1)
    for axis, (size, number) in enumerate(zip(tensors.size, blocks, strict=True)):
        wide = quantisation.block[axis] if quantisation.block else 0
        if not number or (size % number and not (wide and number == -(-size // wide))):
            raise tensors.refused(
                part, f"{list(shape)} scales do not divide a weight of {list(tensors.size)}"
            )
    return _ROUNDING[dtype]


def _scaled(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    codes, zero = arrays["weight"], arrays.get(_ZERO)
    scales = _scales(arrays[stored.parts[1]], zero, stored)
    weight = FrozenWeight(codes, scales, "scaled", stored.rounding)
    if codes.dtype != jnp.float8_e4m3fn or zero is not None or scales.scale.shape[1] > 1:
        return (weight,)
    rows = jnp.repeat(scales.scale[:, 0], stored.size[0] // scales.scale.shape[0])
    return weight, FrozenWeight(codes, rows.astype(jnp.float32), "float8")


def _in_words(arrays: dict[str, Array], stored: StoredLinear) -> tuple[FrozenWeight, ...]:
    n, k = stored.size
    words = arrays["weight_packed"]
    bits = next(bits for bits in _BITS if words.shape[1] == _words(k, bits))
    if (zero := arrays.get(_ZERO)) is not None and zero.dtype == jnp.int32:
        zero = _codes(zero.T, n, bits).T.astype(jnp.int8) - 2 ** (bits - 1)
    scales = _scales(arrays["weight_scale"], zero, stored)
    codes = _codes(words, k, bits)
    # In `Scaled`, 8 is added to codes of 4 bits, as in the words.
    values = packed(codes) if bits == 4 else (codes ^ 128).view(jnp.int8)
    return (FrozenWeight(values, scales, "scaled", stored.rounding),)


def _scales(scale: Array, zero: Array | None, stored: StoredLinear) -> Scaled:
    """The scales. If the blocks do not divide rows and columns evenly, each scale is repeated for
    smaller blocks that do."""

    def of_blocks(array: Array) -> Array:
        array = array.reshape(-1, 1) if array.ndim != 2 else array
        for axis, size in enumerate(stored.size):
            number, wide = array.shape[axis], stored.block[axis] if stored.block else size
            if size % wide and 1 < number == -(-size // wide):
                even = math.gcd(wide, size)
                array = jnp.repeat(array, wide // even, axis)
                array = jax.lax.slice_in_dim(array, 0, size // even, axis=axis)
        return array

    if scale.dtype == jnp.float8_e8m0fnu:
        scale = scale.astype(jnp.float32)
    return Scaled(of_blocks(scale), None if zero is None else of_blocks(zero))


def _words(count: int, bits: int) -> int:
    """The number of 32-bit integers that hold `count` codes."""
    return -(-count * bits // 32)


def _codes(words: Array, count: int, bits: int) -> UInt8[Array, "rows N"]:
    """The codes in rows of words, lowest bits first."""
    codes = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(len(words), -1)
    if bits == 4:
        codes = jnp.stack([codes & 15, codes >> 4], axis=-1).reshape(len(words), -1)
    return codes[:, :count]
