"""Number formats in which frozen weights are stored with scales: float8, int8, nf4 and scaled.

The weight matrix W [k, n] of a linear, or the stack [L, k, n] of all layers, is encoded when it is
loaded, as `values` of 4 or 8 bits and `scales`. Every layer of a stack gets the same numbers as it
would get alone. int8 and nf4 are bit for bit those of bitsandbytes 0.50.2 on the CPU.

- float8: e4m3, one scale for an output channel. Its products can be computed in float8
  (`quantised_rows` encodes activations), and therefore k is the last axis of the values.
- int8: one scale for an output channel (LLM.int8(), Dettmers et al. 2022, section 2.1).
- nf4: 16 quantiles of the normal distribution, one scale for 64 values along k; the scales are
  themselves stored in 8 bits (QLoRA, Dettmers et al. 2023, section 3). If k is no multiple of 64,
  blocks extend over several rows of W^T, and the last block of a layer is padded.
- scaled: integers of 4 or 8 bits or e4m3, one scale for a block of any size. It holds the weights
  of checkpoints that are already quantised; jaxmux encodes no weights in it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float8e4m3fn, Float32, Int8, UInt8

FLOAT8_MAX = 448.0
INT8_MAX = 127.0

# In nf4, this many weights along k share a scale; of scales in 8 bits, this many share a scale.
NF4_BLOCK = 64
ABSMAX_BLOCK = 256

# The weight that a code of nf4 stands for, in a block whose largest weight is 1.
NF4_TABLE = np.float32(
    """
    -1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635
    -0.18477343022823334 -0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725
    0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941
    0.7229568362236023 1.0
    """.split()
)

# The positive numbers of the "dynamic map" of bitsandbytes except 1: for every power of ten from
# 1e-6 to 1, 2^i equally spaced numbers below it, as torch rounds them.
_DYNAMIC_MAGNITUDES = np.float32(
    """
    5.5000004e-07 3.2500002e-06 7.75e-06 2.1249998e-05 4.375e-05 6.625e-05 8.875e-05 0.00015625001
    0.00026875004 0.00038125002 0.00049375003 0.0006062501 0.00071875006 0.00083125 0.0009437501
    0.0012812499 0.00184375 0.00240625 0.00296875 0.0035312497 0.00409375 0.0046562497 0.0052187503
    0.00578125 0.00634375 0.00690625 0.00746875 0.00803125 0.00859375 0.009156249 0.00971875
    0.01140625 0.01421875 0.01703125 0.019843752 0.02265625 0.02546875 0.028281251 0.03109375
    0.03390625 0.036718752 0.03953125 0.042343747 0.04515625 0.04796875 0.05078125 0.05359375
    0.05640625 0.059218753 0.06203125 0.06484375 0.067656256 0.070468746 0.07328125 0.07609375
    0.07890625 0.08171876 0.08453125 0.08734375 0.09015625 0.092968754 0.09578126 0.09859375
    0.107031256 0.12109375 0.13515624 0.14921875 0.16328125 0.17734376 0.19140625 0.20546874
    0.21953125 0.23359375 0.24765624 0.26171875 0.27578127 0.28984374 0.30390626 0.31796873
    0.33203125 0.34609374 0.36015624 0.37421876 0.38828123 0.40234375 0.41640624 0.43046874
    0.44453126 0.45859373 0.47265625 0.4867187 0.50078124 0.5148437 0.5289062 0.54296875 0.5570313
    0.5710938 0.58515626 0.5992187 0.61328125 0.6273438 0.6414063 0.65546876 0.6695312 0.68359375
    0.6976563 0.7117188 0.72578126 0.7398437 0.75390625 0.7679688 0.78203124 0.79609376 0.8101562
    0.82421875 0.8382813 0.85234374 0.86640626 0.8804687 0.89453125 0.9085938 0.92265624 0.93671876
    0.9507812 0.96484375 0.9789063 0.99296874
    """.split()
)
# The number that an 8-bit code of an nf4 scale stands for, in a block whose largest number is 1.
DYNAMIC_MAP = np.float32([*-_DYNAMIC_MAGNITUDES[::-1], 0.0, *_DYNAMIC_MAGNITUDES, 1.0])

# bitsandbytes looks up the 8-bit code of a number in [-1, 1] in a table of this many entries.
_DYNAMIC_BINS = 65536

# Factors by which `encode_float8` multiplies the least scale of a channel, to find the best scale.
_FACTORS = np.float32(2) ** (np.arange(16, dtype=np.float32) / 16)

_SMALLEST_NORMAL = np.finfo(np.float32).tiny


class DoubleQuantised(NamedTuple):
    """The scales of nf4, in 8 bits: `DYNAMIC_MAP[absmax] * nested + offset`.

    Attributes:
      absmax: codes of the largest magnitudes of all blocks of 64 weights, less their mean. If
        blocks extend over several rows, there is one row of codes: [*L, 1, blocks].
      nested: the scale of 256 consecutive codes; those of a layer are counted row by row.
      offset: mean of the largest magnitudes of all blocks of a layer.
    """

    absmax: UInt8[Array, "*L rows blocks"]
    nested: Float32[Array, "*L groups"]
    offset: Float32[Array, "*L"]


class Scaled(NamedTuple):
    """The scales of blocks: a weight is `(code - zero) * scale`, with those of its block.

    Attributes:
      scale: scales of the blocks, in any floating-point dtype. The numbers of blocks divide n and
        k.
      zero: the code that stands for 0; None if it is 0.
    """

    scale: Float[Array, "*L blocks_n blocks_k"]
    zero: Int8[Array, "*L blocks_n blocks_k"] | None


class NumberFormat(NamedTuple):
    """How the weights W [k, n] of a linear, or of a stack [L, k, n], are stored.

    Attributes:
      encode: function from weights [*L, k, n] of any floating-point dtype to (values, scales); None
        if weights are only read in this format.
      decode: function from (values, scales) to float32 weights [*L, k, n], exactly those that are
        stored.
      shape: function from `values` to the shape of the weights, (*L, k, n).
      axes: function from (values, scales) to a similar tree with the names of each array's axes
        except L: "input" or "output" if the axis is divided together with the linear's input or
        output, else None.
      least_multiple: k has to be a multiple of this.
    """

    encode: Callable[[Float[Array, "*L k n"]], tuple[Array, Any]] | None
    decode: Callable[[Array, Any], Float32[Array, "*L k n"]]
    shape: Callable[[Any], tuple[int, ...]]
    axes: Callable[[Any, Any], tuple[Any, Any]]
    least_multiple: int = 1


def row_scales(x: Float[Array, "*N k"]) -> Float32[Array, "*N"]:
    """The scale of each row of activations in float8: `max(max |x| / 448, 1e-30)`."""
    return scales_of_largest(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1))


def scales_of_largest(largest: Float32[Array, "*N"]) -> Float32[Array, "*N"]:
    return jnp.maximum(largest * _reciprocal(FLOAT8_MAX), 1e-30)


def quantised_rows(
    x: Float[Array, "*N k"], scales: Float32[Array, "*N"]
) -> Float8e4m3fn[Array, "*N k"]:
    """`x / scales` in float8. A row that holds a NaN or an infinity, and has its scale from
    `row_scales`, becomes NaN; no other row is changed."""
    return _as_float8(x.astype(jnp.float32) / scales[..., None])


def encode_float8(
    weights: Float[Array, "*L k n"],
) -> tuple[Float8e4m3fn[Array, "*L n k"], Float32[Array, "*L n"]]:
    """Encodes weights in e4m3 with one scale for an output channel.

    Doubling a scale changes only the numbers that are too small for e4m3. With scales in between,
    the numbers of a channel fall closer to or farther from numbers of e4m3. Of 16 scales from the
    least one to twice that, the one with the smallest sum of squared errors is used. For normally
    distributed weights, this sum is 23% smaller than with the least scale in a channel of 64
    weights, and 5% smaller in a channel of 4096.

    Returns:
      values: `W^T / scales`.
      scales: from `max_k |W| / 448` to twice that; 1 for a channel that is zero.
    """
    channels = _channels(weights)
    least = jnp.max(jnp.abs(channels), axis=-1) * _reciprocal(FLOAT8_MAX)
    least = jnp.where(least == 0, 1.0, least)
    scales = least * _best_factors(channels / least[..., None])
    return _as_float8(channels / scales[..., None]), scales


def _best_factors(channels: Float32[Array, "*L n k"]) -> Float32[Array, "*L n"]:
    """For each channel, with numbers up to 448, the factor of its scale with the smallest error.

    Errors are added as integers, so that the sum, and with it the choice, does not depend on the
    order of the terms. An error of e4m3 is at most 16, so the sum does not exceed 2^30.
    """
    resolution = 2**22 / channels.shape[-1]

    def error(factor):
        # Without the barrier, XLA may leave out the conversion to float8 and back.
        codes = lax.optimization_barrier(_as_float8(channels / factor))
        errors = codes.astype(jnp.float32) * factor - channels
        return jnp.sum((errors * errors * resolution).astype(jnp.int32), axis=-1)

    def better(i, best):
        factors, least = best
        factor = jnp.asarray(_FACTORS)[i]
        total = error(factor)
        return jnp.where(total < least, factor, factors), jnp.minimum(total, least)

    ones = jnp.ones(channels.shape[:-1])
    return lax.fori_loop(1, len(_FACTORS), better, (ones, error(1.0)))[0]


def decode_float8(
    values: Float8e4m3fn[Array, "*L n k"], scales: Float32[Array, "*L n"]
) -> Float32[Array, "*L k n"]:
    return jnp.swapaxes(values.astype(jnp.float32) * scales[..., None], -1, -2)


def encode_int8(
    weights: Float[Array, "*L k n"],
) -> tuple[Int8[Array, "*L k n"], Float32[Array, "*L n"]]:
    """Encodes weights in int8 with one scale for an output channel: values `W * 127 / scales`,
    rounded to nearest even, and scales `max_k |W|`, 0 for a channel that is zero."""
    weights = weights.astype(jnp.float32)
    absmax = jnp.max(jnp.abs(weights), axis=-2)
    # bitsandbytes multiplies by the rounded reciprocal, and its codes depend on that.
    factor = (1.0 / absmax) * INT8_MAX
    factor = jnp.where(jnp.isfinite(factor), factor, 0.0)
    return jnp.rint(weights * factor[..., None, :]).astype(jnp.int8), absmax


def decode_int8(
    values: Int8[Array, "*L k n"], scales: Float32[Array, "*L n"]
) -> Float32[Array, "*L k n"]:
    """The weights that `encode_int8` stored: `values * scales / 127`."""
    return values.astype(jnp.float32) * scales[..., None, :] * _reciprocal(INT8_MAX)


def encode_nf4(
    weights: Float[Array, "*L k n"],
) -> tuple[UInt8[Array, "*L n bytes"], DoubleQuantised]:
    """Encodes weights in nf4, blocks of 64 along k: values [*L, n, k / 2], two codes in a byte, the
    first one in the upper half; and doubly quantised scales, see `encode_absmax`. ValueError if k
    is odd."""
    values, absmax = encode_blocks(weights)
    return values, encode_absmax(absmax)


def decode_nf4(
    values: UInt8[Array, "*L n bytes"], scales: DoubleQuantised | Float32[Array, "*L rows blocks"]
) -> Float32[Array, "*L k n"]:
    """The weights that `encode_nf4` stored. `scales` are doubly quantised, or plain float32 from
    `encode_blocks` or `absmax_of_rows`."""
    absmax = decode_absmax(scales) if isinstance(scales, DoubleQuantised) else scales
    absmax = absmax_of_rows(absmax, values.shape)
    codes = unpacked(values)
    codes = codes.reshape(*absmax.shape, codes.shape[-1] // absmax.shape[-1])
    numbers = jnp.asarray(NF4_TABLE).at[codes].get(mode="promise_in_bounds")
    channels = numbers * absmax[..., None]
    return jnp.swapaxes(channels.reshape(*values.shape[:-1], -1), -1, -2)


def encode_blocks(
    weights: Float[Array, "*L k n"],
) -> tuple[UInt8[Array, "*L n bytes"], Float32[Array, "*L rows blocks"]]:
    """Encodes weights in nf4, blocks of 64 along k: values as from `encode_nf4`; and the largest
    magnitude of every block, [*L, n, k / 64]. If k is no multiple of 64: [*L, 1, n k / 64], rounded
    up. ValueError if k is odd."""
    *stack, k, n = weights.shape
    if k % 2:
        raise ValueError(
            f"nf4 stores two weights in a byte, and the input of a linear is {k} wide, which is odd"
        )
    channels = _channels(weights)
    rows = channels.reshape(*stack, *((n, k) if k % NF4_BLOCK == 0 else (1, n * k)))
    padding = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % NF4_BLOCK)]
    blocks = jnp.pad(rows, padding).reshape(*rows.shape[:-1], -1, NF4_BLOCK)
    absmax = jnp.max(jnp.abs(blocks), axis=-1)
    scaled = blocks * (1.0 / jnp.maximum(absmax, _SMALLEST_NORMAL))[..., None]
    codes = _nearest(jnp.clip(scaled, -1.0, 1.0), NF4_TABLE)
    codes = codes.reshape(*rows.shape[:-1], -1)[..., : rows.shape[-1]]
    return packed(codes.reshape(channels.shape)), absmax


def absmax_of_rows(
    absmax: Float32[Array, "*L rows blocks"], shape: tuple[int, ...], finer: int = 1
) -> Float32[Array, "*L n parts"]:
    """The scales of nf4, repeated so that each scale belongs to weights of only one row of W^T.

    `absmax` is from `encode_blocks`, and is returned if k is a multiple of 64. `shape` is the shape
    of the values, [*L, n, k / 2]. For every other k, returns the scale of every g = gcd(k, 64) /
    `finer` consecutive weights of a row, but of at least the 2 weights of a byte: [*L, n, k / g].
    """
    *stack, n, packed_k = shape
    k = 2 * packed_k
    if k % NF4_BLOCK == 0 or absmax.shape[-2:] != (1, -(-n * k // NF4_BLOCK)):
        return absmax
    part = max(2, math.gcd(k, NF4_BLOCK) // finer)
    parts = jnp.repeat(absmax, NF4_BLOCK // part, axis=-1)[..., : n * k // part]
    return parts.reshape(*stack, n, k // part)


def absmax_of_blocks(absmax: Float32[Array, "n parts"], k: int) -> Float32[Array, " blocks"]:
    """The inverse of `absmax_of_rows` for one layer: the scales of blocks, from those of rows of k
    weights."""
    return absmax.reshape(-1)[:: NF4_BLOCK * absmax.shape[-1] // k]


def encode_absmax(
    absmax: Float32[Array, "*L rows blocks"], offset: Float32[Array, "*L"] | None = None
) -> DoubleQuantised:
    """Encodes the scales of nf4, the largest magnitudes of blocks, in 8 bits. `offset` is
    subtracted from them; None for the mean. bitsandbytes subtracts the mean, whose last bit depends
    on the order of the sum."""
    *stack, _, _ = absmax.shape
    flat = absmax.reshape(*stack, -1)
    if offset is None:
        offset = _mean(flat)
    groups = _in_groups(flat - offset[..., None])
    nested = jnp.max(jnp.abs(groups), axis=-1)
    scaled = groups * (1.0 / jnp.maximum(nested, _SMALLEST_NORMAL))[..., None]
    # bitsandbytes divides [-1, 1] into bins, and all numbers of a bin get the code of its center.
    middle = (jnp.clip(scaled, -1.0, 1.0) + 1.0) * 0.5 * (_DYNAMIC_BINS - 1) + 0.5
    codes = jnp.asarray(_codes_of_bins()).at[middle.astype(jnp.int32)].get(mode="clip")
    codes = jnp.where(nested[..., None] == 0, 0, codes).reshape(*stack, -1)
    return DoubleQuantised(codes[..., : flat.shape[-1]].reshape(absmax.shape), nested, offset)


def decode_absmax(scales: DoubleQuantised) -> Float32[Array, "*L rows blocks"]:
    """The largest magnitudes of blocks of weights that `encode_absmax` stored."""
    codes, nested, offset = scales
    *stack, n, blocks = codes.shape
    per_code = jnp.repeat(nested, ABSMAX_BLOCK, axis=-1)[..., : n * blocks]
    numbers = jnp.asarray(DYNAMIC_MAP).at[codes].get(mode="promise_in_bounds")
    product = numbers * per_code.reshape(codes.shape)
    # The maximum changes no number. It prevents that compilers fuse the product and the sum into
    # one operation, which rounds once where bitsandbytes rounds twice.
    return jnp.maximum(product, np.finfo(np.float32).min) + offset[..., None, None]


def decode_scaled(values: Array, scales: Scaled) -> Float32[Array, "*L k n"]:
    """The weights that are stored in blocks, with the scales of the blocks. The codes are
    [*L, n, k] in int8 or e4m3; or uint8 [*L, n, k / 2] with two codes in a byte, the first one in
    the upper half, and 8 added to each code."""
    if values.dtype == jnp.uint8:
        codes = unpacked(values).astype(jnp.float32) - 8
    else:
        codes = values.astype(jnp.float32)
    *stack, n, k = codes.shape
    *_, rows, columns = scales.scale.shape
    blocks = codes.reshape(*stack, rows, n // rows, columns, k // columns)

    def of_blocks(array: Array) -> Float32[Array, "*L rows 1 columns 1"]:
        return array.astype(jnp.float32)[..., :, None, :, None]

    if scales.zero is not None:
        blocks = blocks - of_blocks(scales.zero)
    channels = (blocks * of_blocks(scales.scale)).reshape(*stack, n, k)
    return jnp.swapaxes(channels, -1, -2)


def packed(codes: UInt8[Array, "*N codes"]) -> UInt8[Array, "*N bytes"]:
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)
    return (pairs[..., 0] << 4) | pairs[..., 1]


def unpacked(values: UInt8[Array, "*N bytes"]) -> UInt8[Array, "*N codes"]:
    halves = (values[..., None] >> jnp.array([4, 0], jnp.uint8)) & 15
    return halves.reshape(*values.shape[:-1], -1)


def _channels(weights: Float[Array, "*L k n"]) -> Float32[Array, "*L n k"]:
    return jnp.swapaxes(weights, -1, -2).astype(jnp.float32)


def _reciprocal(number: float) -> np.float32:
    """1 / number in float32. XLA turns division by a constant into a product with the reciprocal;
    an explicit product has the same bits wherever it runs."""
    return np.float32(1) / np.float32(number)


def _as_float8(scaled: Float32[Array, "*N"]) -> Float8e4m3fn[Array, "*N"]:
    # A scale that was rounded down leaves numbers beyond the largest; a mere cast makes them NaN.
    return jnp.clip(scaled, -FLOAT8_MAX, FLOAT8_MAX).astype(jnp.float8_e4m3fn)


def _nearest(numbers: Float32[Array, "*N"], table: np.ndarray) -> UInt8[Array, "*N"]:
    """Index of the nearest entry of a small ascending table; of two equally near, the lower one."""
    midpoints = (table[1:] + table[:-1]) / 2
    return sum((numbers > midpoint).astype(jnp.uint8) for midpoint in midpoints)


@functools.cache
def _codes_of_bins() -> np.ndarray:
    bins = np.arange(_DYNAMIC_BINS, dtype=np.float32)
    middles = np.float32(-1) + np.float32(2) * bins / np.float32(_DYNAMIC_BINS - 1)
    midpoints = (DYNAMIC_MAP[1:] + DYNAMIC_MAP[:-1]) * np.float32(0.5)
    return np.searchsorted(midpoints, middles, side="left").astype(np.uint8)


def _in_groups(flat: Float32[Array, "*L blocks"]) -> Float32[Array, "*L groups 256"]:
    """Groups of 256 numbers; the last group is filled up with zeros."""
    padding = [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % ABSMAX_BLOCK)]
    return jnp.pad(flat, padding).reshape(*flat.shape[:-1], -1, ABSMAX_BLOCK)


def _mean(numbers: Float32[Array, "*L N"]) -> Float32[Array, "*L"]:
    """The mean along the last axis. Adding halves is accurate, with the same bits everywhere."""
    count = numbers.shape[-1]
    while (length := numbers.shape[-1]) > 1:
        half = (length + 1) // 2
        second = jnp.pad(numbers[..., half:], [(0, 0)] * (numbers.ndim - 1) + [(0, length % 2)])
        numbers = numbers[..., :half] + second
    total = numbers[..., 0]
    # XLA would turn division by a constant into a product with the reciprocal, which rounds twice.
    return total / (count + 0.0 * total)


def _transposed_shape(values: Any) -> tuple[int, ...]:
    *stack, n, k = values.shape
    return (*stack, k, n)


def _unpacked_shape(values: Any) -> tuple[int, ...]:
    *stack, n, packed = values.shape
    return (*stack, 2 * packed, n)


def _shape_of_codes(values: Any) -> tuple[int, ...]:
    return _unpacked_shape(values) if values.dtype == jnp.uint8 else _transposed_shape(values)


_TRANSPOSED = ("output", "input")


def _axes_of_nf4(values: Any, scales: Any) -> tuple[Any, Any]:
    if isinstance(scales, DoubleQuantised):
        # A group of 256 scales can belong to several rows, so a weight's parts share groups.
        return (None, None), DoubleQuantised((None, None), (None,), ())
    return _TRANSPOSED, _TRANSPOSED


def _axes_of_blocks(values: Any, scales: Scaled) -> tuple[Any, Any]:
    sizes = scales.scale.shape[-2:]
    axes = tuple(axis if size > 1 else None for axis, size in zip(_TRANSPOSED, sizes, strict=True))
    return _TRANSPOSED, Scaled(axes, None if scales.zero is None else axes)


FORMATS: dict[str, NumberFormat] = {
    "float8": NumberFormat(
        encode_float8, decode_float8, _transposed_shape, lambda *_: (_TRANSPOSED, ("output",))
    ),
    "int8": NumberFormat(
        encode_int8,
        decode_int8,
        lambda values: values.shape,
        lambda *_: (("input", "output"), ("output",)),
    ),
    "nf4": NumberFormat(encode_nf4, decode_nf4, _unpacked_shape, _axes_of_nf4, 2),
    "scaled": NumberFormat(None, decode_scaled, _shape_of_codes, _axes_of_blocks),
}
