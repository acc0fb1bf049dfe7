"""The Triton grouped LoRA linear: what it refuses, the arguments of its kernels and, on a GPU, that
it agrees with the plain-XLA implementation and keeps tasks apart.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import (
    IDLE_SLOT,
    MIXED_RATES,
    SLOTS,
    Case,
    assert_same_bits,
    differentiate,
    make_case,
    pairs,
    poisoned,
    relative_error,
)

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import triton as implementation

LAYERS, LAYER = 3, 2
# Slot 3 owns nothing; two chunks are empty; slot 0's chunks are not adjacent.
CHUNK_SLOT = (0, -1, 2, 0, 1, -1, 1)

triton_case = partial(
    make_case,
    k=192,
    widths=(128, 64, 320),
    rank=16,
    chunk_slot=CHUNK_SLOT,
    chunk_len=64,
    layers=LAYERS,
    dtype=jnp.bfloat16,
)


@pytest.fixture
def on_hopper(monkeypatch):
    """As if both packages and an H100 were here."""
    monkeypatch.setattr(implementation, "find_spec", lambda name: name)
    monkeypatch.setattr(implementation, "compute_capability", lambda device: 90)


def refusal(case: Case) -> str | None:
    return implementation.refusal(case.x, case.projections, case.routing, case.dropout)


def test_missing_packages_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(implementation, "find_spec", lambda name: None)
    assert "triton and jax_triton not installed" in refusal(triton_case())


def test_a_device_of_unknown_capability_is_refused_by_name(monkeypatch, on_hopper):
    monkeypatch.setattr(implementation, "compute_capability", lambda device: None)
    kind = jax.local_devices()[0].device_kind
    assert f"device {kind!r}; needs a CUDA GPU of compute capability 8.0" in refusal(triton_case())


SERVED = {
    "one module": dict(widths=(64,)),
    "three modules": dict(rates=MIXED_RATES),
    "float32": dict(dtype=jnp.float32),
    "float16": dict(dtype=jnp.float16, chunk_len=256),
    "rank 8": dict(rank=8),
    "rank 128": dict(rank=128),
}


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_what_is_served_is_not_refused(options, on_hopper):
    assert refusal(triton_case(**options)) is None


REFUSED = {
    "chunk length 32": dict(chunk_len=32),
    r"weight \[96, 64\]": dict(k=96, widths=(64,)),
    r"weight \[64, 96\]": dict(k=64, widths=(64, 96)),
    "rank 12": dict(rank=12),
    "rank 136": dict(rank=136),
    "4 projections": dict(widths=(64,) * 4),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_is_refused_with_its_reason(reason, on_hopper):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusal(triton_case(**REFUSED[reason])))


def test_a_stream_of_another_dtype_is_refused_by_name(on_hopper):
    case = triton_case()
    x = case.x.astype(jnp.float8_e4m3fn)
    assert "dtype float8_e4m3fn" in refusal(case._replace(x=x))


def test_a_weight_of_another_format_than_the_stream_is_refused(on_hopper):
    case = triton_case()
    assert "weight stored as bfloat16 for a stream of float16" in refusal(
        case._replace(x=case.x.astype(jnp.float16))
    )


def test_a_weight_of_an_unknown_format_is_refused(on_hopper):
    case = triton_case(widths=(64,))
    (projection,) = case.projections
    weight = FrozenWeight(projection.weight.values, None, "fp3")
    assert "unknown weight format 'fp3'" in refusal(
        case._replace(projections=(projection._replace(weight=weight),))
    )


def test_dropout_of_columns_that_do_not_begin_at_0_is_refused(on_hopper):
    case = triton_case(rates=MIXED_RATES)
    dropout = case.dropout._replace(first_column=jnp.int32(64))
    assert "columns of the input do not begin at 0" in refusal(case._replace(dropout=dropout))


def test_projections_of_different_ranks_are_refused(on_hopper):
    one, other = triton_case(widths=(64,)), triton_case(widths=(64,), rank=32)
    assert "different ranks" in refusal(
        one._replace(projections=one.projections + other.projections)
    )


def test_every_slot_walks_its_own_chunks_in_stream_order():
    order, starts = implementation._chunks_by_slot(triton_case().routing)
    assert len(order) == len(CHUNK_SLOT) + 1
    for slot in range(SLOTS):
        owned = [i for i, owner in enumerate(CHUNK_SLOT) if owner == slot]
        assert order[starts[slot] : starts[slot + 1]].tolist() == owned


@pytest.mark.parametrize("rank, padded", [(8, 16), (16, 16), (24, 32), (64, 64), (72, 128)])
def test_ranks_are_padded_to_what_tensor_cores_multiply(rank, padded):
    factors = implementation._pad_rank(jnp.ones((2, rank, 3)), 1)
    assert factors.shape == (2, padded, 3)
    assert factors.sum() == 2 * rank * 3


@pytest.mark.parametrize("capability", implementation.DEVICES)
@pytest.mark.parametrize("columns", [64, 896, 4096, 4864, 14336])
@pytest.mark.parametrize("chunk_len", [64, 128, 192, 512])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tiles_divide_what_they_cover(monkeypatch, capability, columns, chunk_len, dtype):
    monkeypatch.setattr(implementation, "compute_capability", lambda device: capability)
    tiles = implementation._matmul_tiles(chunk_len, columns, dtype)
    assert chunk_len % tiles["TILE_M"] == 0
    assert columns % tiles["TILE_N"] == 0
    assert 64 % tiles["TILE_K"] == 0


run = jax.jit(partial(differentiate, layer=LAYER, implementation="triton"))
run_reference = jax.jit(partial(differentiate, layer=LAYER, implementation="xla"))

TOLERANCES = {jnp.float32: 2e-5, jnp.float16: 2e-3, jnp.bfloat16: 1.5e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rates", [None, MIXED_RATES], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("chunk_len, widths", [(64, (128, 64, 320)), (256, (512,))])
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
def test_it_agrees_with_plain_xla(dtype, rates, chunk_len, widths, rank):
    case = triton_case(dtype=dtype, chunk_len=chunk_len, widths=widths, rank=rank, rates=rates)
    with jax.default_matmul_precision("highest"):
        expected = run_reference(case)
    for found, wanted in pairs(run(case), expected):
        assert found.dtype == wanted.dtype
        assert relative_error(found, wanted) < TOLERANCES[dtype]


@pytest.mark.gpu
def test_accumulators_of_absent_slots_and_other_layers_keep_their_bits():
    case = triton_case(rates=MIXED_RATES)
    for before, after in pairs(case.accumulators, run(case).accumulators):
        np.testing.assert_array_equal(after[:, IDLE_SLOT], before[:, IDLE_SLOT])
        np.testing.assert_array_equal(np.delete(after, LAYER, 0), np.delete(before, LAYER, 0))


@pytest.mark.gpu
def test_empty_chunks_are_zeros_whatever_they_hold():
    case = triton_case(rates=MIXED_RATES)
    found = run(poisoned(case, "x", -1, np.nan))
    empty = case.is_owned_by(-1)
    for y in (*found.outputs, found.dx):
        assert not np.any(np.asarray(y, np.float32)[empty])
    assert_same_bits(found.accumulators, run(case).accumulators)


@pytest.mark.gpu
def test_two_executions_give_the_same_bits():
    case = triton_case(rates=MIXED_RATES)
    assert_same_bits(run(case), run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("where", ["factors", "x", "cotangents", "scale"])
def test_one_broken_task_changes_no_bit_of_the_others(poison, where):
    case = triton_case(rates=MIXED_RATES)
    others = ~case.is_owned_by(0)
    whole, broken = run(case), run(poisoned(case, where, 0, poison))
    for before, after in pairs((whole.outputs, whole.dx), (broken.outputs, broken.dx)):
        assert_same_bits(before[others], after[others])
    for before, after in pairs(whole.accumulators, broken.accumulators):
        assert_same_bits(before[:, 1:], after[:, 1:])
    of_owner = [leaf[LAYER, 0] for leaf in jax.tree.leaves(broken.accumulators)]
    assert not all(np.isfinite(leaf).all() for leaf in of_owner)
