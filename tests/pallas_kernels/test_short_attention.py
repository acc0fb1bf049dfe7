"""Attention of short rows against its formula in float32: outputs, gradients, races, isolation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels import short_attention
from jaxmux.pallas_kernels.short_attention.kernels_sm90 import Heads, backward, forward

ROWS = 2


def starts_of(lengths: list[int], row_len: int) -> np.ndarray:
    """The first token that each token of a row attends to. Padding follows the sequences, and
    attends to itself."""
    starts = np.cumsum([0, *lengths])
    firsts = np.concatenate([np.repeat(starts[:-1], lengths), np.arange(starts[-1], row_len)])
    return firsts.astype(np.int32)


PACKED = [[60, 40, 28], [70, 50]]


class Case:
    """Random arrays. `packed` has the lengths of each row's sequences; it is repeated if there are
    more rows."""

    def __init__(
        self,
        row_len: int,
        groups: int,
        per_group: int,
        size: int,
        rows: int = ROWS,
        packed: list[list[int]] | None = None,
    ):
        rng = np.random.default_rng(row_len + per_group)
        self.heads = Heads(row_len, groups, per_group, size)
        self.rows = rows
        self.firsts = None
        if packed:
            firsts = [starts_of(packed[row % len(packed)], row_len) for row in range(rows)]
            self.firsts = jnp.asarray(np.concatenate(firsts))
        wide, narrow = groups * per_group * size, groups * size

        def normal(width):
            return jnp.asarray(rng.standard_normal((rows * row_len, width)), jnp.bfloat16)

        self.inputs = normal(wide), normal(narrow), normal(narrow)
        self.d_out = normal(wide)

    def reference(self, q, k, v):
        heads = self.heads

        def split(x):
            return x.astype(jnp.float32).reshape(self.rows, heads.row_len, -1, heads.size)

        q, k, v = split(q), *(jnp.repeat(split(x), heads.per_group, axis=2) for x in (k, v))
        scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) * heads.size**-0.5
        seen = np.tril(np.ones((heads.row_len,) * 2, bool))
        if self.firsts is not None:
            firsts = self.firsts.reshape(self.rows, 1, -1, 1)
            seen = seen & (np.arange(heads.row_len) >= firsts)
        p = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("rhqk,rkhd->rqhd", p, v).reshape(len(self.d_out), -1)

    def wanted(self):
        with jax.default_matmul_precision("highest"):
            out, vjp = jax.vjp(self.reference, *self.inputs)
            return out, *vjp(self.d_out.astype(jnp.float32))

    def found(self):
        inputs = *self.inputs, self.firsts
        out, log_total = forward(*inputs, self.heads)
        gradients = backward(*inputs, log_total, self.d_out, self.heads)
        return out, *gradients


def assert_close(found, wanted):
    for name, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other), name


@pytest.mark.long
@pytest.mark.parametrize(
    ("row_len", "groups", "per_group", "size"),
    [
        pytest.param(64, 2, 1, 64, marks=pytest.mark.slow),
        (64, 1, 3, 128),
        pytest.param(128, 1, 1, 128, marks=pytest.mark.slow),
        pytest.param(128, 2, 3, 64, marks=pytest.mark.slow),
    ],
)
def test_outputs_and_gradients_follow_the_formula(row_len, groups, per_group, size, interpret):
    case = Case(row_len, groups, per_group, size)
    assert_close(case.found(), case.wanted())


@pytest.mark.long
@pytest.mark.parametrize(
    ("row_len", "packed"),
    [
        pytest.param(64, [[64], [1, 30, 33]], marks=pytest.mark.slow),
        (128, PACKED),
        pytest.param(128, [[128], []], marks=pytest.mark.slow),
    ],
)
def test_packed_sequences_attend_only_to_themselves(row_len, packed, interpret):
    case = Case(row_len, 1, 2, 64, packed=packed)
    assert_close(case.found(), case.wanted())


@pytest.mark.long
@pytest.mark.parametrize("broken", [3e38, pytest.param(-3e38, marks=pytest.mark.slow)])
def test_overflows_of_a_sequence_change_no_bit_of_its_neighbours(broken, interpret):
    case = Case(128, 1, 1, 64, rows=1, packed=[[30, 50, 40]])
    healthy = case.found()
    victim = (np.arange(128) >= 30) & (np.arange(128) < 80)
    case.inputs = tuple(jnp.where(victim[:, None], broken, x) for x in case.inputs)
    case.d_out = jnp.where(victim[:, None], broken, case.d_out)
    for before, after in zip(healthy, case.found(), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[~victim], np.asarray(after)[~victim])


@pytest.mark.long
def test_a_broken_row_changes_no_bit_of_the_others(interpret):
    case = Case(128, 1, 2, 64, packed=PACKED)
    healthy = case.found()
    broken = np.arange(len(case.d_out)) < 128
    case.inputs = tuple(jnp.where(broken[:, None], jnp.nan, x) for x in case.inputs)
    for before, after in zip(healthy, case.found(), strict=True):
        np.testing.assert_array_equal(np.asarray(before)[~broken], np.asarray(after)[~broken])


@pytest.mark.long
@pytest.mark.parametrize(
    ("row_len", "per_group", "packed"),
    [
        pytest.param(64, 1, False, marks=pytest.mark.slow),
        pytest.param(64, 4, True, marks=pytest.mark.slow),
        (128, 1, True),
        pytest.param(128, 4, False, marks=pytest.mark.slow),
        pytest.param(128, 8, True, marks=pytest.mark.slow),
    ],
)
def test_real_shapes_lower(row_len, per_group, packed, lowered):
    heads = Heads(row_len, 8, per_group, 128)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype)

    wide, narrow = array(8192, 8 * per_group * 128), array(8192, 8 * 128)
    totals = array(8 * per_group, 8192, dtype=jnp.float32)
    inputs = wide, narrow, narrow, array(8192, dtype=jnp.int32) if packed else None
    assert "mosaic_gpu" in lowered(lambda *x: forward(*x, heads), *inputs)
    assert "mosaic_gpu" in lowered(lambda *x: backward(*x, heads), *inputs, totals, wide)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((1, 64, 4, 128), jnp.float32, "float32"),
        ((1, 256, 4, 128), jnp.bfloat16, "rows of 256 tokens"),
        ((1, 64, 4, 96), jnp.bfloat16, "heads of 96"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_a_reason(shape, dtype, reason, h200):
    x = jax.ShapeDtypeStruct(shape, dtype)
    with jax.sharding.use_abstract_mesh(h200):
        assert reason in short_attention.refusal(x, x, x)
        good = jax.ShapeDtypeStruct((1, 64, 4, 128), jnp.bfloat16)
        assert short_attention.refusal(good, good, good) is None
    assert "Hopper" in short_attention.refusal(good, good, good)


@pytest.mark.gpu
@pytest.mark.parametrize("row_len", [64, 128])
@pytest.mark.parametrize("per_group", [1, 4])
@pytest.mark.parametrize("packed", [None, [[20, 25], [64], [3, 50, 7]]])
def test_real_shapes_on_the_gpu(row_len, per_group, packed):
    case = Case(row_len, 8, per_group, 128, rows=8192 // row_len, packed=packed)
    poison = [jnp.full(1 << 28, jnp.nan, jnp.float32) for _ in range(8)]
    jax.block_until_ready(poison)
    del poison

    firsts = None if packed is None else case.firsts.reshape(case.rows, row_len)

    def attention(q, k, v):
        q, k, v = (x.reshape(case.rows, row_len, -1, 128) for x in (q, k, v))
        return short_attention.short_attention(q, k, v, firsts).reshape(len(case.d_out), -1)

    out, vjp = jax.vjp(jax.jit(attention), *case.inputs)
    found = (out, *vjp(case.d_out))
    assert_close(found, case.wanted())
    for one, other in zip(found[1:], vjp(case.d_out), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
