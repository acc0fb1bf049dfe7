"""cuDNN's attention and the kernel for short rows against plain XLA in float32; needs a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.models.attention import AttentionOptions, attend, find_segments

pytestmark = pytest.mark.gpu

ROWS, HEADS, KV_HEADS, SIZE = 3, 8, 2, 64
# Lengths of the sequences in each row, by row length.
PACKED = {
    512: [[100, 28, 250, 64], [512], [64, 64, 1, 130]],
    128: [[25, 7, 60, 16], [128], [64, 16, 1, 30]],
}
DENSE = {512: [[512], [300], [1]], 128: [[128], [70], [1]]}


def _segment_ids(lengths: list[list[int]], row_len: int, gap: int) -> np.ndarray:
    ids = np.full((ROWS, row_len), -1, np.int32)
    for row, sizes in enumerate(lengths):
        start = 0
        for segment, size in enumerate(sizes):
            ids[row, start : start + size] = segment
            start += size + (gap if start + size + gap < row_len else 0)
    return ids


@pytest.mark.parametrize(("lengths", "most"), [(PACKED, 32), (DENSE, 1)])
@pytest.mark.parametrize(
    ("implementation", "row_len", "window"),
    [("cudnn", 512, None), ("cudnn", 512, 48), ("short", 128, None)],
)
def test_it_agrees_with_xla(implementation, row_len, window, lengths, most):
    rng = np.random.default_rng(0)
    shapes = [(ROWS, row_len, h, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, d_out = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    ids = _segment_ids(lengths[row_len], row_len, gap=3)
    d_out = jnp.where((ids >= 0)[..., None, None], d_out, 0)

    def run(implementation, dtype):
        options = AttentionOptions(implementation, 64, window)

        def out_and_gradients(q, k, v, d_out):
            segments = find_segments(jnp.asarray(ids), most)
            out, vjp = jax.vjp(lambda *x: attend(*x, segments, options)[0], q, k, v)
            return out, *vjp(d_out)

        return jax.jit(out_and_gradients)(*(x.astype(dtype) for x in (q, k, v, d_out)))

    with jax.default_matmul_precision("highest"):
        expected = run("xla", jnp.float32)
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), run(implementation, jnp.bfloat16), expected, strict=True
    ):
        keep = (ids >= 0)[..., None, None]
        got, want = (np.where(keep, np.asarray(x, np.float32), 0) for x in (got, want))
        assert np.isfinite(got).all(), name
        assert np.linalg.norm(got - want) <= 1e-2 * np.linalg.norm(want), name


@pytest.mark.parametrize(("implementation", "row_len"), [("cudnn", 512), ("short", 128)])
def test_padding_has_no_gradients(implementation, row_len):
    """Also where a whole row is padding, and where the GPU's memory holds NaNs."""
    rng = np.random.default_rng(2)
    shapes = [(ROWS, row_len, h, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    q, k, v, d_out = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes)
    ids = _segment_ids(PACKED[row_len], row_len, gap=3)
    ids[-1] = -1
    padding = (ids < 0)[..., None, None]
    segments, options = (
        find_segments(jnp.asarray(ids), 32),
        AttentionOptions(implementation, 64, None),
    )

    @jax.jit
    def gradients(q, k, v, d_out):
        return jax.vjp(lambda *x: attend(*x, segments, options)[0], q, k, v)[1](d_out)

    junk = [jnp.full(2**26, jnp.nan) for _ in range(8)]
    jax.block_until_ready(junk)
    del junk
    for name, found in zip("qkv", gradients(q, k, v, jnp.where(padding, 0, d_out)), strict=True):
        np.testing.assert_array_equal(np.where(padding, found, 0), 0, err_msg=name)


@pytest.mark.parametrize("broken", [jnp.nan, jnp.inf, 3e38], ids=["NaN", "inf", "huge"])
@pytest.mark.parametrize(("implementation", "row_len"), [("cudnn", 512), ("short", 128)])
def test_a_broken_segment_changes_no_bit_of_its_neighbours(implementation, row_len, broken):
    rng = np.random.default_rng(1)
    shapes = [(ROWS, row_len, h, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in shapes]
    ids = _segment_ids(PACKED[row_len], row_len, gap=3)
    segments = find_segments(jnp.asarray(ids), 32)
    options = AttentionOptions(implementation, 64, None)
    arrays[3] = jnp.where((ids >= 0)[..., None, None], arrays[3], 0)
    victim = np.zeros_like(ids, bool)
    victim[0] = ids[0] == 1

    @jax.jit
    def run(q, k, v, d_out):
        out, vjp = jax.vjp(lambda *x: attend(*x, segments, options)[0], q, k, v)
        return out, *vjp(d_out)

    healthy = run(*arrays)
    broken_arrays = [
        jnp.where(victim[..., None, None], jnp.asarray(broken, x.dtype), x) for x in arrays
    ]
    keep = (ids >= 0) & ~victim
    for name, got, want in zip(
        ("out", "dq", "dk", "dv"), run(*broken_arrays), healthy, strict=True
    ):
        got, want = (np.asarray(x, np.float32)[keep] for x in (got, want))
        np.testing.assert_array_equal(got, want, err_msg=name)
