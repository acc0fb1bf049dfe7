"""Packed attention against a dense float64 reference; a sequence's bits depend only on the
sequence."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.models import BackboneConfig
from jaxmux.models.attention import AttentionOptions, attend, find_segments, pick_implementation

BLOCK = 64
HEADS, KV_HEADS, SIZE = 4, 2, 8


def row_of(row_len: int, sequences: dict[int, int]) -> np.ndarray:
    """Segment ids [1, row_len] of sequences given as {offset: length}."""
    ids = np.full((1, row_len), -1, np.int32)
    for number, (offset, length) in enumerate(sequences.items()):
        ids[0, offset : offset + length] = number
    return ids


def tensors(rows: int, row_len: int, heads=HEADS, kv_heads=KV_HEADS, seed=0):
    """q, k, v and the cotangent of the output."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, row_len, h, SIZE) for h in (heads, kv_heads, kv_heads, heads)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@lru_cache
def compiled(window: int | None, block: int):
    @jax.jit
    def run(q, k, v, d_out, ids):
        def function(q, k, v):
            segments = find_segments(ids, max_sequences=8)
            return attend(q, k, v, segments, AttentionOptions("xla", block, window))

        out, vjp, finite = jax.vjp(function, q, k, v, has_aux=True)
        return out, finite, *vjp(d_out)

    return run


def run(q, k, v, d_out, ids, window=None, block=BLOCK):
    """Outputs, finite flags, dq, dk, dv as NumPy arrays."""
    return [np.asarray(x) for x in compiled(window, block)(q, k, v, d_out, ids)]


def reference(q, k, v, d_out, ids, window=None):
    """Outputs and gradients in float64, one query at a time; padding is left at zero."""
    q, k, v, d_out = (x.astype(np.float64) for x in (q, k, v, d_out))
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    group = q.shape[2] // k.shape[2]
    for row, t, head in np.ndindex(q.shape[:3]):
        if ids[row, t] < 0:
            continue
        first = 0 if window is None else max(0, t - window + 1)
        seen = [s for s in range(first, t + 1) if ids[row, s] == ids[row, t]]
        keys, values = k[row, seen, head // group], v[row, seen, head // group]
        p = np.exp(keys @ q[row, t, head] / np.sqrt(SIZE))
        p /= p.sum()
        out[row, t, head] = p @ values
        dp = values @ d_out[row, t, head]
        ds = p * (dp - p @ dp) / np.sqrt(SIZE)
        dq[row, t, head] = ds @ keys
        dk[row, seen, head // group] += np.outer(ds, q[row, t, head])
        dv[row, seen, head // group] += np.outer(p, d_out[row, t, head])
    return out, dq, dk, dv


# Whatever the heads, the windows are the same, and the other way round.
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [
        (4, 2, None),
        (6, 1, 1),
        (4, 4, 17),
        *(
            pytest.param(*heads, window, marks=pytest.mark.slow)
            for heads, windows in {(4, 2): (1, 17), (6, 1): (None, 17), (4, 4): (None, 1)}.items()
            for window in windows
        ),
    ],
)
def test_outputs_and_gradients_follow_the_formula(heads, kv_heads, window):
    ids = np.concatenate(
        [row_of(128, {0: 30, 30: 25, 64: 64}), row_of(128, {0: 1}), row_of(128, {0: 128})]
    )
    q, k, v, d_out = tensors(3, 128, heads, kv_heads)
    d_out[ids < 0] = 0
    out, finite, *gradients = run(q, k, v, d_out, ids, window)
    expected, *expected_gradients = reference(q, k, v, d_out, ids, window)
    assert finite.all()
    np.testing.assert_allclose(out[ids >= 0], expected[ids >= 0], rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-5)


def test_the_block_length_changes_rounding_alone():
    ids = row_of(256, {0: 100, 128: 90})
    inputs = tensors(1, 256)
    for one, other in zip(run(*inputs, ids, block=64), run(*inputs, ids, block=256), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_padding_is_finite_even_where_a_whole_row_is_padding():
    ids = np.concatenate([row_of(128, {0: 5}), row_of(128, {})])
    found = run(*tensors(2, 128), ids)
    assert all(np.isfinite(x).all() for x in found)


def test_a_sequence_far_from_zero_keeps_its_precision():
    """Scores near 1e4 would overflow the exponential if their maximum were not subtracted."""
    ids = row_of(64, {0: 64})
    q, k, v, d_out = tensors(1, 64)
    found = run(60 * q, 60 * k, v, d_out, ids)
    assert all(np.isfinite(x).all() for x in found)


def placed(row_len: int, sequence, offset: int, neighbours: dict[int, int], seed: int):
    """A row of random values in which `sequence` (q, k, v and d_out of one row) starts at
    `offset`."""
    length = sequence[0].shape[1]
    arrays = tensors(1, row_len, seed=seed)
    for array, own in zip(arrays, sequence, strict=True):
        array[:, offset : offset + length] = own
    ids = row_of(row_len, dict(sorted({**neighbours, offset: length}.items())))
    return arrays, ids


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("row_len", [256, pytest.param(512, marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [40, 150, 192])
def test_a_sequence_has_the_same_bits_wherever_it_lies_and_beside_whomever(length, row_len, window):
    sequence = tensors(1, length, seed=9)
    results = []
    for offset in {0, 64, row_len - 192}:
        after = -(-(offset + length) // BLOCK) * BLOCK
        neighbours = {after: row_len - after} if after < row_len else {}
        if offset:
            neighbours |= {0: offset}
        for chosen in ({}, neighbours):
            arrays, ids = placed(row_len, sequence, offset, chosen, seed=offset)
            found = run(*arrays, ids, window)
            results.append([x[:, offset : offset + length] for x in found])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


@pytest.mark.long
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 50])
def test_a_sequence_has_the_same_bits_in_any_row_of_a_microbatch(window):
    sequence, results = tensors(1, 100, seed=9), []
    for row in range(3):
        arrays, ids = tensors(3, 512, seed=row), np.repeat(row_of(512, {0: 500}), 3, axis=0)
        own, own_ids = placed(512, sequence, 128, {0: 128}, seed=4)
        for array, replacement in zip((*arrays, ids), (*own, own_ids), strict=True):
            array[row] = replacement[0]
        results.append([x[row, 128:228] for x in run(*arrays, ids, window)])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)


BROKEN, WHOLE = slice(64, 164), [slice(0, 60), slice(192, 256)]
SHARED_ROW = row_of(256, {0: 60, 64: 100, 192: 64})


def assert_others_untouched(healthy, broken):
    names = ("out", "finite", "dq", "dk", "dv")
    for name, one, other in zip(names, healthy, broken, strict=True):
        for sequence in WHOLE:
            np.testing.assert_array_equal(one[:, sequence], other[:, sequence], err_msg=name)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("broken", ["q", "k", "v"])
def test_a_non_finite_sequence_is_reported_and_changes_no_bit_of_others(broken, value):
    inputs = dict(zip(("q", "k", "v", "d_out"), tensors(1, 256), strict=True))
    healthy = run(*inputs.values(), SHARED_ROW)
    inputs[broken] = inputs[broken].copy()
    inputs[broken][0, 70, 1, 3] = value
    found = run(*inputs.values(), SHARED_ROW)
    assert_others_untouched(healthy, found)
    np.testing.assert_array_equal(np.flatnonzero(~found[1][0]), [70])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_cotangent_makes_its_query_nan_and_changes_no_bit_of_others(value):
    q, k, v, d_out = tensors(1, 256)
    healthy = run(q, k, v, d_out, SHARED_ROW)
    d_out[0, 70, 2, 0] = value
    found = run(q, k, v, d_out, SHARED_ROW)
    assert_others_untouched(healthy, found)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found[2]).any(axis=(0, 2, 3))), [70])


@pytest.mark.parametrize(
    "huge", [("q", "k"), ("v",), ("d_out",), ("v", "d_out"), ("q", "k", "v", "d_out")], ids="-".join
)
def test_finite_values_whose_products_overflow_change_no_bit_of_others(huge):
    inputs = dict(zip(("q", "k", "v", "d_out"), tensors(1, 256), strict=True))
    healthy = run(*inputs.values(), SHARED_ROW)
    for name in huge:
        inputs[name] = inputs[name].copy()
        inputs[name][:, BROKEN] *= np.float32(3e37)
    assert all(np.isfinite(x).all() for x in inputs.values())
    assert_others_untouched(healthy, run(*inputs.values(), SHARED_ROW))


@pytest.mark.long
def test_what_cudnn_leaves_unwritten_in_padding_reaches_nothing(monkeypatch):
    """cuDNN writes neither outputs nor gradients of padding, so anything may be there. One row is
    all padding, which has no sequence at all."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    ids = np.concatenate([row_of(128, {3: 40, 50: 60}), np.full((1, 128), -1, np.int32)])
    written = (ids >= 0)[..., None, None]

    @jax.custom_vjp
    def unwritten(q, k, v):
        return jnp.where(written, q, jnp.nan)

    def backward(_, d_out):
        by_keys = d_out[:, :, :KV_HEADS]
        return tuple(jnp.where(written, d, jnp.nan) for d in (d_out, by_keys, by_keys))

    unwritten.defvjp(lambda q, k, v: (unwritten(q, k, v), None), backward)
    monkeypatch.setattr(cudnn, "dot_product_attention", lambda q, k, v, **_: unwritten(q, k, v))
    q, k, v, d_out = (jnp.asarray(x) for x in tensors(2, 128))
    d_out = jnp.where(written, d_out, 0)
    segments, options = find_segments(jnp.asarray(ids), 2), AttentionOptions("cudnn", BLOCK, None)
    out, vjp = jax.vjp(lambda *x: attend(*x, segments, options)[0], q, k, v)
    for found in (out, *vjp(d_out)):
        np.testing.assert_array_equal(np.where(written, 0, found), 0)
    np.testing.assert_array_equal(out, np.where(written, q, 0))
    np.testing.assert_array_equal(vjp(d_out)[0], d_out)


def test_segments_are_found_with_starts_and_lengths():
    ids = np.concatenate([row_of(128, {0: 30, 30: 25, 64: 63}), row_of(128, {})])
    found = find_segments(jnp.asarray(ids), max_sequences=4)
    np.testing.assert_array_equal(found.starts, [[0, 30, 64, 128], [128] * 4])
    np.testing.assert_array_equal(found.lengths, [[30, 25, 63, 0], [0] * 4])
    firsts = np.concatenate([[0] * 30, [30] * 25, np.arange(55, 64), [64] * 63, [127]])
    np.testing.assert_array_equal(found.firsts, [firsts, np.arange(128)])


def test_what_the_short_kernel_cannot_serve_is_refused_with_a_reason():
    ids = row_of(128, {0: 100})

    def call(most: int, window: int | None, row=ids):
        q, k, v, _ = tensors(1, row.shape[1])
        segments = find_segments(jnp.asarray(row), most)
        return attend(q, k, v, segments, AttentionOptions("short", BLOCK, window))

    with pytest.raises(ValueError, match="'short' cannot serve this call.*Hopper"):
        call(1, None)
    with pytest.raises(ValueError, match="a window of 17 tokens"):
        call(1, 17)


def test_off_gpu_attention_is_plain_xla():
    config = BackboneConfig("LlamaForCausalLM", 128, 32, 96, 2, 4, 2, 8)
    assert pick_implementation(config, jnp.dtype(jnp.bfloat16), 64) == "xla"
