"""The Triton grouped LoRA linear: what it refuses, what it hands its kernels, and, on a GPU, that
it agrees with the plain-XLA implementation and keeps tasks apart.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import Factors, Projection, Routing, base
from jaxmux.pallas_kernels.grouped_lora import triton as implementation

SLOTS, LAYERS, LAYER = 4, 3, 2
# Slot 3 owns nothing; two chunks are empty; slot 0's chunks are not adjacent.
CHUNK_SLOT = (0, -1, 2, 0, 1, -1, 1)
RATES = (0.5, 0.0, 0.25, 0.9)


class Case(NamedTuple):
    x: jax.Array
    projections: tuple[Projection, ...]
    accumulators: tuple[Factors, ...]
    routing: Routing
    dropout: Dropout | None
    cotangents: tuple[jax.Array, ...]


def make_case(
    dtype=jnp.bfloat16, chunk_len=64, k=192, outputs=(128, 64, 320), rank=16, rates=None
) -> Case:
    rng = np.random.default_rng(0)
    tokens = chunk_len * len(CHUNK_SLOT)

    def normal(*shape, dtype=jnp.float32):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    def factors(n):
        return Factors(normal(LAYERS, SLOTS, k, rank), normal(LAYERS, SLOTS, rank, n))

    dropout = None
    if rates is not None:
        dropout = Dropout(
            jnp.asarray(rates, jnp.float32),
            jnp.asarray(rng.integers(2**32, size=SLOTS), jnp.uint32),
            jnp.asarray(rng.integers(5, size=tokens), jnp.uint32),
            jnp.asarray(np.arange(tokens) % 11, jnp.int32),
        )
    return Case(
        normal(tokens, k, dtype=dtype),
        tuple(Projection(normal(LAYERS, k, n, dtype=dtype), factors(n)) for n in outputs),
        tuple(map(factors, outputs)),
        Routing(jnp.asarray(CHUNK_SLOT, jnp.int32), jnp.asarray([2.0, 0.5, 1.0, 4.0])),
        dropout,
        tuple(normal(tokens, n, dtype=dtype) for n in outputs),
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
    assert "triton and jax_triton not installed" in refusal(make_case())


def test_a_device_of_unknown_capability_is_refused_by_name(monkeypatch, on_hopper):
    monkeypatch.setattr(implementation, "compute_capability", lambda device: None)
    kind = jax.local_devices()[0].device_kind
    assert f"device {kind!r}; needs a CUDA GPU of compute capability 8.0" in refusal(make_case())


SERVED = {
    "one module": dict(outputs=(64,)),
    "three modules": dict(rates=RATES),
    "float32": dict(dtype=jnp.float32),
    "float16": dict(dtype=jnp.float16, chunk_len=256),
    "rank 8": dict(rank=8),
    "rank 128": dict(rank=128),
}


@pytest.mark.parametrize("options", SERVED.values(), ids=SERVED)
def test_what_is_served_is_not_refused(options, on_hopper):
    assert refusal(make_case(**options)) is None


REFUSED = {
    "chunk length 32": dict(chunk_len=32),
    r"kernel \[96, 64\]": dict(k=96, outputs=(64,)),
    r"kernel \[64, 96\]": dict(k=64, outputs=(64, 96)),
    "rank 12": dict(rank=12),
    "rank 136": dict(rank=136),
    "4 projections": dict(outputs=(64,) * 4),
    "dtype float8_e4m3fn": dict(dtype=jnp.float8_e4m3fn),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_served_is_refused_with_its_reason(reason, on_hopper):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refusal(make_case(**REFUSED[reason])))


def test_a_kernel_of_another_dtype_than_the_stream_is_refused(on_hopper):
    case = make_case()
    assert "kernel of dtype bfloat16 for a stream of float16" in refusal(
        case._replace(x=case.x.astype(jnp.float16))
    )


def test_projections_of_different_ranks_are_refused(on_hopper):
    one, other = make_case(outputs=(64,)), make_case(outputs=(64,), rank=32)
    assert "different ranks" in refusal(
        one._replace(projections=one.projections + other.projections)
    )


def test_every_slot_walks_its_own_chunks_in_stream_order():
    order, starts = implementation._chunks_by_slot(make_case().routing)
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


@jax.jit
def run(case: Case):
    """Outputs, dx and the next accumulators of the Triton implementation."""
    return differentiate(implementation.grouped_lora_linear_triton, case)


@jax.jit
def run_reference(case: Case):
    return differentiate(base.grouped_lora_linear_xla, case)


def differentiate(function, case: Case):
    modules = tuple(range(len(case.projections)))

    def apply(x, accumulators):
        return function(
            modules, x, case.projections, accumulators, case.routing, case.dropout, LAYER, None
        )

    (outputs, _), vjp = jax.vjp(apply, case.x, case.accumulators)
    return outputs, *vjp((case.cotangents, case.accumulators))


TOLERANCES = {jnp.float32: 2e-5, jnp.float16: 2e-3, jnp.bfloat16: 1.5e-2}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("rates", [None, RATES], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("chunk_len, outputs", [(64, (128, 64, 320)), (256, (512,))])
@pytest.mark.parametrize("rank", [8, 16, 24, 64])
def test_it_agrees_with_plain_xla(dtype, rates, chunk_len, outputs, rank):
    case = make_case(dtype, chunk_len, 192, outputs, rank, rates)
    with jax.default_matmul_precision("highest"):
        expected = run_reference(case)
    for found, wanted in zip(*map(jax.tree.leaves, (run(case), expected)), strict=True):
        assert found.dtype == wanted.dtype
        assert relative_error(found, wanted) < TOLERANCES[dtype]


@pytest.mark.gpu
def test_accumulators_of_absent_slots_and_other_layers_keep_their_bits():
    case = make_case(rates=RATES)
    for before, after in zip(*map(jax.tree.leaves, (case.accumulators, run(case)[2])), strict=True):
        np.testing.assert_array_equal(after[:, 3], before[:, 3])
        np.testing.assert_array_equal(np.delete(after, LAYER, 0), np.delete(before, LAYER, 0))


@pytest.mark.gpu
def test_empty_chunks_are_zeros_whatever_they_hold():
    case = make_case(rates=RATES)
    empty = np.repeat(np.asarray(CHUNK_SLOT) < 0, len(case.x) // len(CHUNK_SLOT))
    outputs, dx, sums = run(case._replace(x=jnp.where(empty[:, None], jnp.nan, case.x)))
    assert not any(np.any(np.asarray(y, np.float32)[empty]) for y in (*outputs, dx))
    assert_same_bits(sums, run(case)[2])


@pytest.mark.gpu
def test_two_runs_give_the_same_bits():
    case = make_case(rates=RATES)
    assert_same_bits(run(case), run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("where", ["factors", "x", "cotangents", "scale"])
def test_one_broken_task_changes_no_bit_of_the_others(poison, where):
    case = make_case(rates=RATES)
    chunk_len = len(case.x) // len(CHUNK_SLOT)
    owned = np.repeat(np.asarray(CHUNK_SLOT) == 0, chunk_len)
    whole, broken = run(case), run(poisoned(case, where, owned, poison))
    for before, after in zip(*map(jax.tree.leaves, (whole[:2], broken[:2])), strict=True):
        assert_same_bits(before[~owned], after[~owned])
    for before, after in zip(*map(jax.tree.leaves, (whole[2], broken[2])), strict=True):
        assert_same_bits(before[:, 1:], after[:, 1:])
    assert not all(np.isfinite(leaf[LAYER, 0]).all() for leaf in jax.tree.leaves(broken[2]))


def poisoned(case: Case, where: str, owned: np.ndarray, value: float) -> Case:
    """Slot 0's factors, scale or rows of a stream become `value`."""
    if where == "scale":
        scale = case.routing.scale.at[0].set(value)
        return case._replace(routing=case.routing._replace(scale=scale))
    if where == "factors":
        projections = tuple(
            p._replace(factors=jax.tree.map(lambda f: f.at[LAYER, 0].set(value), p.factors))
            for p in case.projections
        )
        return case._replace(projections=projections)
    rows = jax.tree.map(lambda v: jnp.where(owned[:, None], value, v), getattr(case, where))
    return case._replace(**{where: jax.tree.map(lambda v: v.astype(case.x.dtype), rows)})


def relative_error(found, wanted) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def assert_same_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
