"""Weights are stored as the nearest numbers of their format; numpy computes them in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from jaxmux.pallas_kernels.number_formats import (
    DYNAMIC_MAP,
    FORMATS,
    NF4_TABLE,
    absmax_of_blocks,
    absmax_of_rows,
    decode_absmax,
    encode_absmax,
    encode_blocks,
    quantised_rows,
    row_scales,
)

# A layer has 7 blocks of nf4 in a row and 336 together, so that rows end within groups of 256.
LAYERS, K, N = 2, 448, 48
NAMES = [name for name, number_format in FORMATS.items() if number_format.encode]
ENCODE = {name: jax.jit(FORMATS[name].encode) for name in NAMES}
DECODE = {name: jax.jit(FORMATS[name].decode) for name in NAMES}

ENCODE_ABSMAX, DECODE_ABSMAX = jax.jit(encode_absmax), jax.jit(decode_absmax)

every_format = pytest.mark.parametrize("name", NAMES)


@jax.jit
def encoded_rows(x):
    scales = row_scales(x)
    return quantised_rows(x, scales), scales


@functools.cache
def stack(dtype=jnp.float32) -> jax.Array:
    """Normal weights whose channels have standard deviations from 0.01 to 10."""
    deviations = np.geomspace(0.01, 10, N)
    values = np.random.default_rng(0).standard_normal((LAYERS, K, N)) * deviations
    return jnp.asarray(values, dtype)


def round_trip(name: str, weights) -> np.ndarray:
    return np.float64(DECODE[name](*ENCODE[name](jnp.asarray(weights))))


def assert_same_bits(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def assert_nearest(found, wanted, table, scale, slack=0.0):
    """`found` is as near to `wanted` as any entry of a table times `scale`, within rounding."""
    table, scaled = np.sort(np.float64(table)), wanted / scale
    right = np.clip(np.searchsorted(table, scaled), 1, len(table) - 1)
    best = np.minimum(np.abs(scaled - table[right - 1]), np.abs(scaled - table[right])) * scale
    assert (np.abs(found - wanted) <= best + (1e-6 + slack) * scale * np.abs(table).max()).all()


def blocks_of(weights) -> np.ndarray:
    """Weights [L, k, n] as [L, n, k / 64, 64]."""
    return np.float64(weights).swapaxes(1, 2).reshape(LAYERS, N, K // 64, 64)


def e4m3_numbers() -> np.ndarray:
    """All finite numbers of e4m3; the largest exponent and mantissa stand for NaN."""
    exponents, mantissas = np.arange(1, 16)[:, None], np.arange(8)
    normal = (2.0 ** (exponents - 7) * (1 + mantissas / 8)).ravel()[:-1]
    magnitudes = np.concatenate([mantissas * 2.0**-9, normal])
    return np.concatenate([-magnitudes, magnitudes])


def test_float8_weights_are_the_nearest_multiples_of_the_scale_of_their_channel():
    weights, scale = np.float64(stack()), np.float64(ENCODE["float8"](stack())[1])[:, None]
    assert_nearest(round_trip("float8", stack()), weights, e4m3_numbers(), scale)


def test_the_scale_of_a_channel_in_float8_is_the_one_of_sixteen_with_the_least_squared_error():
    weights, scale = np.float64(stack()), np.float64(ENCODE["float8"](stack())[1])
    least = np.abs(weights).max(axis=1) / 448
    numbers = np.sort(e4m3_numbers())
    midpoints = (numbers[1:] + numbers[:-1]) / 2

    def error(scale):
        found = weights / scale[:, None]
        return ((numbers[np.searchsorted(midpoints, found)] - found) ** 2).sum(1) * scale**2

    errors = np.stack([error(least * 2 ** (i / 16)) for i in range(16)])
    choices = np.log2(scale / least) * 16
    np.testing.assert_allclose(choices, choices.round(), atol=1e-4)
    assert len(np.unique(choices.round())) > 4
    np.testing.assert_allclose(error(scale), errors.min(axis=0), rtol=1e-4)


def test_int8_weights_are_the_nearest_of_255_steps_between_the_largest_of_their_channel():
    weights = np.float64(stack())
    absmax = np.abs(weights).max(axis=1, keepdims=True)
    np.testing.assert_array_equal(ENCODE["int8"](stack())[1], absmax[:, 0])
    assert_nearest(round_trip("int8", stack()), weights, np.arange(-127, 128) / 127, absmax)


def test_nf4_weights_are_the_nearest_of_16_multiples_of_the_largest_of_their_block():
    values, absmax = jax.jit(encode_blocks)(stack())
    blocks = blocks_of(stack())
    np.testing.assert_array_equal(absmax, np.abs(blocks).max(axis=-1))
    assert_nearest(blocks_of(DECODE["nf4"](values, absmax)), blocks, NF4_TABLE, absmax[..., None])


def test_the_first_code_of_a_byte_of_nf4_is_its_upper_half():
    first = np.zeros((64, 1), np.float32)
    first[:3, 0] = 1, -1, 1
    values, absmax = jax.jit(encode_blocks)(first)
    assert values[0, :3].tolist() == [15 * 16 + 0, 15 * 16 + 7, 7 * 16 + 7] and absmax == 1


def test_a_weight_between_two_numbers_of_nf4_gets_the_lower_one():
    ties = np.float32([1, *(NF4_TABLE[1:] + NF4_TABLE[:-1]) / 2]).repeat(4)
    values, absmax = jax.jit(encode_blocks)(ties[:, None])
    found = DECODE["nf4"](values, absmax)[:, 0]
    np.testing.assert_array_equal(found, np.roll(NF4_TABLE, 1).repeat(4))


def test_scales_of_nf4_are_the_nearest_numbers_of_the_map_around_their_mean():
    absmax = np.abs(blocks_of(stack())).max(axis=-1)
    scales = ENCODE["nf4"](stack())[1]
    offset = absmax.mean(axis=(1, 2))
    np.testing.assert_allclose(scales.offset, offset, rtol=2e-7)
    flat = (absmax - offset[:, None, None]).reshape(LAYERS, -1)
    nested = np.stack([np.abs(flat[:, :256]).max(axis=1), np.abs(flat[:, 256:]).max(axis=1)], 1)
    np.testing.assert_allclose(scales.nested, nested, rtol=1e-6)
    found = np.float64(DECODE_ABSMAX(scales)).reshape(LAYERS, -1) - offset[:, None]
    per_scale = np.repeat(nested, 256, axis=1)[:, : flat.shape[1]]
    # A number is looked up by one of 65,536 bins.
    assert_nearest(found, flat, DYNAMIC_MAP, per_scale, slack=1 / 65535)


def test_equal_scales_of_nf4_are_kept():
    scales = jnp.full((3, 100), 0.7, jnp.float32)
    np.testing.assert_array_equal(DECODE_ABSMAX(ENCODE_ABSMAX(scales)), scales)


def test_the_mean_of_scales_is_rounded_once_where_their_sum_is_exact():
    scales = np.random.default_rng(0).integers(0, 1000, (100, 7, 3))
    means = ENCODE_ABSMAX(np.float32(scales)).offset
    np.testing.assert_array_equal(means, np.float32(scales.sum(axis=(1, 2)) / 21))


def test_the_table_of_nf4_holds_quantiles_of_the_normal_distribution():
    tail = 0.9677083
    positive = norm.ppf(np.linspace(tail, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(tail, 0.5, 8)[:-1])
    quantiles = np.sort([*positive, 0, *negative])
    np.testing.assert_allclose(NF4_TABLE, quantiles / quantiles.max(), rtol=1e-6)


def test_the_map_of_scales_has_more_numbers_in_higher_powers_of_ten():
    magnitudes = [
        10.0 ** (power - 6) * (0.1 + 0.9 * (i + 0.5) / 2**power)
        for power in range(7)
        for i in range(2**power)
    ]
    wanted = np.sort([*magnitudes, *np.negative(magnitudes), 0, 1])
    np.testing.assert_allclose(DYNAMIC_MAP, wanted, rtol=2e-7)


@every_format
def test_shapes_and_bytes_are_those_of_the_format(name):
    values, scales = encoded = jax.eval_shape(FORMATS[name].encode, stack(jnp.bfloat16))
    assert FORMATS[name].shape(values) == (LAYERS, K, N)
    assert FORMATS[name].shape(
        jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), values)
    ) == (K, N)
    decoded = jax.eval_shape(FORMATS[name].decode, values, scales)
    assert (decoded.shape, decoded.dtype) == ((LAYERS, K, N), jnp.float32)
    bits = sum(leaf.size * leaf.dtype.itemsize * 8 for leaf in jax.tree.leaves(encoded))
    channels = {"float8": N * (8 * K + 32), "int8": N * (8 * K + 32)}
    blocks = N * K // 64
    nf4 = 4 * N * K + 8 * blocks + 32 * -(-blocks // 256) + 32
    assert bits == LAYERS * channels.get(name, nf4)


@every_format
def test_a_layer_of_a_stack_is_encoded_as_if_alone(name):
    encoded = ENCODE[name](stack())
    decoded = DECODE[name](*encoded)
    for layer in range(LAYERS):
        alone = ENCODE[name](stack()[layer])
        assert_same_bits(jax.tree.map(lambda leaf, layer=layer: leaf[layer], encoded), alone)
        assert_same_bits(decoded[layer], DECODE[name](*alone))


@every_format
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_weights_of_half_precision_are_encoded_like_the_same_in_float32(name, dtype):
    half = stack(dtype)
    assert_same_bits(ENCODE[name](half), ENCODE[name](half.astype(jnp.float32)))


@every_format
def test_decoded_weights_have_the_same_codes(name):
    encoded = ENCODE[name](stack())
    assert_same_bits(ENCODE[name](DECODE[name](*encoded))[0], encoded[0])


@every_format
@pytest.mark.parametrize("magnitude", [0.0, 1e-40, 1e-37])
def test_channels_of_zeros_and_of_almost_zeros_decode_to_about_zero(name, magnitude):
    weights = np.array(stack())
    weights[:, 0, 3], weights[:, 1:, 3] = magnitude, 0
    weights[1, :, 5] = 0
    decoded = round_trip(name, weights)
    # The scale of a block of nf4 is off by as much as larger scales beside it require.
    limit = 0.01 * np.abs(weights).max() if name == "nf4" else 1e-36
    assert (np.abs(decoded[:, 0, 3]) <= limit).all()
    assert (decoded[:, 1:, 3] == 0).all() and (decoded[1, :, 5] == 0).all()
    others = [i for i in range(N) if i not in (3, 5)]
    assert (np.abs(decoded[:, :, others]) > 0).any(axis=1).all()


@pytest.mark.parametrize("name", ["float8", "int8"])
def test_an_outlier_changes_its_own_channel_only(name):
    weights = np.array(stack())
    weights[0, 5, 7] = 1e4
    changed, before = round_trip(name, weights), round_trip(name, stack())
    np.testing.assert_allclose(changed[0, 5, 7], 1e4, rtol=1e-6)
    different = (changed != before).any(axis=1)
    assert np.argwhere(different).tolist() == [[0, 7]]


def test_an_outlier_changes_codes_of_its_own_block_only():
    weights = np.array(stack())
    weights[0, 70, 7] = 1e4
    changed, before = ENCODE["nf4"](jnp.asarray(weights))[0], ENCODE["nf4"](stack())[0]
    assert set(np.argwhere(changed != before)[:, 2]) <= set(range(32, 64))
    assert np.unique(np.argwhere(changed != before)[:, :2], axis=0).tolist() == [[0, 7]]
    np.testing.assert_allclose(round_trip("nf4", weights)[0, 70, 7], 1e4, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "n"),
    [
        (100, 6),
        (32, 3),
        *(pytest.param(*own, marks=pytest.mark.slow) for own in ((352, 48), (96, 5), (2, 1))),
    ],
)
def test_blocks_of_nf4_go_on_from_one_row_to_the_next(k, n):
    """A linear whose rows are put end to end, and padded, has the same blocks in one row."""
    weights = np.random.default_rng(k).standard_normal((LAYERS, k, n)).astype(np.float32)
    ends = np.pad(weights.swapaxes(1, 2).reshape(LAYERS, n * k), ((0, 0), (0, -n * k % 64)))
    values, scales = ENCODE["nf4"](jnp.asarray(weights))
    long_values, long_scales = ENCODE["nf4"](jnp.asarray(ends[:, :, None]))
    assert_same_bits(scales, long_scales)
    assert_same_bits(values.reshape(LAYERS, -1), long_values.reshape(LAYERS, -1)[:, : n * k // 2])
    decoded = DECODE["nf4"](values, scales)
    rows = DECODE["nf4"](long_values, long_scales)[:, : n * k, 0].reshape(LAYERS, n, k)
    assert_same_bits(decoded.swapaxes(1, 2), rows)
    blocks = jax.jit(decode_absmax)(scales)
    for finer in (1, 4):
        of_rows = absmax_of_rows(blocks, values.shape, finer)
        assert of_rows.shape == (LAYERS, n, k // max(2, np.gcd(k, 64) // finer))
        assert_same_bits(DECODE["nf4"](values, of_rows), decoded)
        assert_same_bits(absmax_of_blocks(of_rows[1], k), blocks[1, 0])


def test_nf4_refuses_odd_widths():
    assert 99 % FORMATS["nf4"].least_multiple
    with pytest.raises(ValueError, match="two weights in a byte, .* is 99 wide, which is odd"):
        FORMATS["nf4"].encode(jnp.ones((99, 4)))


def test_decoding_nf4_to_bfloat16_keeps_no_float32_weights():
    encoded = jax.eval_shape(FORMATS["nf4"].encode, stack())
    decode = jax.jit(
        lambda values, scales: FORMATS["nf4"].decode(values, scales).astype("bfloat16")
    )
    temporaries = decode.lower(*encoded).compile().memory_analysis().temp_size_in_bytes
    assert temporaries <= 2 * 4 * LAYERS * N * K // 64


def rows() -> np.ndarray:
    """Rows of activations with an outlier each, the last of which are zero or almost so."""
    x = np.random.default_rng(1).standard_normal((2, 4, K)).astype(np.float32)
    x[..., 11] *= 50
    x[1, 2], x[1, 3] = 0, 1e-35
    return x


def test_rows_of_activations_are_the_nearest_multiples_of_their_own_scale():
    x = np.float64(rows())
    values, scales = encoded_rows(rows())
    wanted = np.maximum(np.abs(x).max(axis=-1) / 448, 1e-30)
    np.testing.assert_allclose(scales, wanted, rtol=2e-7)
    assert values.dtype == jnp.float8_e4m3fn
    decoded = np.float64(values) * np.float64(scales)[..., None]
    assert_nearest(decoded, x, e4m3_numbers(), wanted[..., None])


@pytest.mark.parametrize("value", [1e30, np.nan, np.inf, -np.inf])
def test_a_value_of_a_row_changes_no_other_row(value):
    x = rows()
    before = encoded_rows(x)
    x[0, 1, 3] = value
    values, scales = encoded_rows(x)
    with np.errstate(invalid="ignore"):
        decoded = np.float32(values) * np.float32(scales)[..., None]
    assert np.isnan(decoded[0, 1]).all() != np.isfinite(value)
    others = np.ones(x.shape[:2], bool)
    others[0, 1] = False
    assert np.array_equal(scales[others], before[1][others])
    assert np.array_equal(np.float32(values)[others], np.float32(before[0])[others])


def test_rows_in_bfloat16_are_encoded_like_the_same_in_float32():
    x = jnp.asarray(rows(), jnp.bfloat16)
    assert_same_bits(encoded_rows(x), encoded_rows(x.astype(jnp.float32)))
