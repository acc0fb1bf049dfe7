"""Every implementation of the grouped LoRA linear against the same formula, and the same promises.

On CPU the Mosaic GPU kernels run in the interpreter, which looks for data races; on a GPU (marker
`gpu`) all kernels run as they are.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import (
    IMPLEMENTATIONS,
    Factors,
    Projection,
    Routing,
    grouped_lora_linear,
    mosaic_gpu,
)

SLOTS, LAYERS, LAYER, CHUNK = 4, 2, 1, 128
# Slot 3 owns nothing; one chunk is empty; slot 0's chunks are not adjacent.
OWNERS = (0, 2, -1, 0, 1, 0)


class Case(NamedTuple):
    x: jax.Array
    projections: tuple[Projection, ...]
    sums: tuple[Factors, ...]
    routing: Routing
    dropout: Dropout | None
    gradients: tuple[jax.Array, ...]
    residual: jax.Array | None = None


def make_case(k=256, widths=(256, 512), rank=16, owners=OWNERS, slots=SLOTS, rates=None) -> Case:
    keys = iter(jax.random.split(jax.random.key(len(widths) + rank), 64))
    tokens = CHUNK * len(owners)

    def normal(*shape, dtype=jnp.bfloat16):
        return (0.1 * jax.random.normal(next(keys), shape)).astype(dtype)

    def factors(n):
        return Factors(
            normal(LAYERS, slots, k, rank, dtype=jnp.float32),
            normal(LAYERS, slots, rank, n, dtype=jnp.float32),
        )

    dropout = None
    if rates is not None:
        dropout = Dropout(
            jnp.asarray(rates, jnp.float32),
            jax.random.bits(next(keys), (slots,), jnp.uint32),
            jax.random.bits(next(keys), (tokens,), jnp.uint32),
            jnp.arange(tokens, dtype=jnp.int32) % 11,
        )

    return Case(
        normal(tokens, k),
        tuple(Projection(normal(LAYERS, k, n), factors(n)) for n in widths),
        tuple(factors(n) for n in widths),
        Routing(
            jnp.asarray(owners, jnp.int32), jax.random.uniform(next(keys), (slots,), minval=0.5)
        ),
        dropout,
        tuple(normal(tokens, n) for n in widths),
    )


@partial(jax.jit, static_argnums=0)
def differentiate(implementation: str, case: Case):
    """Outputs, dx and the next accumulators."""

    def forward(x, residual, sums):
        return grouped_lora_linear(
            x,
            case.projections,
            sums,
            case.routing,
            case.dropout,
            LAYER,
            tuple(range(len(case.projections))),
            implementation,
            residual,
        )

    (outputs, _), backward = jax.vjp(forward, case.x, case.residual, case.sums)
    dx, d_residual, sums = backward((case.gradients, case.sums))
    return outputs, (dx, d_residual), sums


def expected(case: Case):
    """The same in float32, by plain XLA."""

    def wide(x):
        return x.astype(jnp.float32)

    wide_case = jax.tree.map(wide, case._replace(sums=None, routing=None, dropout=None))
    return differentiate(
        "xla", wide_case._replace(sums=case.sums, routing=case.routing, dropout=case.dropout)
    )


def with_residual(case: Case) -> Case:
    """One projection alone, added to a residual."""
    residual = case.gradients[0][::-1]
    return case._replace(
        projections=case.projections[:1],
        sums=case.sums[:1],
        gradients=case.gradients[:1],
        residual=residual,
    )


def run(implementation: str, case: Case):
    if jax.default_backend() == "gpu" or implementation != "mosaic_gpu":
        return differentiate(implementation, case)
    with (
        pytest.MonkeyPatch.context() as patch,
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        patch.setattr(mosaic_gpu, "is_hopper", lambda: True)
        found = jax.block_until_ready(differentiate(implementation, case))
    assert not gpu_callbacks.get_races().races_found
    return found


ON_CPU = ("xla", "mosaic_gpu")


@pytest.fixture(
    scope="module",
    params=[
        name if name in ON_CPU else pytest.param(name, marks=pytest.mark.gpu)
        for name in IMPLEMENTATIONS
    ],
)
def implementation(request):
    return request.param


RATES = {"no dropout": None, "dropout": (0.5, 0.0, 0.25, 0.9)}


@pytest.fixture(scope="module", params=RATES.values(), ids=RATES)
def solved(implementation, request):
    case = make_case(rates=request.param)
    return case, run(implementation, case), expected(case)


def test_outputs_and_gradients_follow_the_formula(solved):
    _, found, wanted = solved
    assert_close(found, wanted)


def test_empty_chunks_are_zeros(solved):
    _, (outputs, (dx, _), _), _ = solved
    empty = np.repeat(np.asarray(OWNERS) < 0, CHUNK)
    assert not any(np.any(y[empty]) for y in (*outputs, dx))


def test_other_layers_and_idle_slots_keep_the_bits_of_their_accumulators(solved):
    case, (*_, sums), _ = solved
    for before, after in zip(*map(jax.tree.leaves, (case.sums, sums)), strict=True):
        assert_same_bits(after[:LAYER], before[:LAYER])
        assert_same_bits(after[:, 3], before[:, 3])


def test_rank_that_the_kernels_pad_follows_the_formula(implementation):
    case = make_case(rank=8, widths=(256,))
    assert_close(run(implementation, case), expected(case))


def test_a_residual_is_added_and_gets_the_gradient(implementation):
    case = with_residual(make_case())
    (outputs, (dx, d_residual), _), (wanted, *_) = run(implementation, case), expected(case)
    assert_close(outputs, wanted)
    owned = np.repeat(np.asarray(OWNERS) >= 0, CHUNK)
    assert_same_bits(d_residual[owned], case.gradients[0][owned])
    assert not np.any(outputs[0][~owned]) and not np.any(dx[~owned])


@pytest.mark.parametrize("where", ["x", "gradient", "factors", "idle factors"])
def test_nan_of_one_task_changes_no_bit_of_the_others(where, implementation, solved):
    case, (outputs, (dx, _), sums), _ = solved
    if case.dropout is not None and where != "x":
        pytest.skip("dropout acts on x alone")
    owned = np.repeat(np.asarray(OWNERS) == 0, CHUNK)[:, None]
    if where == "x":
        broken = case._replace(x=jnp.where(owned, jnp.nan, case.x))
    elif where == "gradient":
        poisoned = tuple(jnp.where(owned, jnp.nan, dy) for dy in case.gradients)
        broken = case._replace(gradients=poisoned)
    else:
        slot = 0 if where == "factors" else 3
        poisoned = [
            p._replace(factors=jax.tree.map(lambda f: f.at[:, slot].set(jnp.nan), p.factors))
            for p in case.projections
        ]
        broken = case._replace(projections=tuple(poisoned))
    broken_outputs, (broken_dx, _), broken_sums = run(implementation, broken)
    others = slice(None) if where == "idle factors" else ~owned[:, 0]
    for before, after in zip((*outputs, dx), (*broken_outputs, broken_dx), strict=True):
        assert_same_bits(before[others], after[others])
    slots = slice(0 if where == "idle factors" else 1, None)
    for before, after in zip(*map(jax.tree.leaves, (sums, broken_sums)), strict=True):
        assert_same_bits(before[:, slots], after[:, slots])


# The shapes of the benchmark, odd numbers of tasks, ranks and padding, small and large ranks.
REAL = {
    "one linear": dict(k=4096, widths=(4096,)),
    "up": dict(k=4096, widths=(14336,)),
    "down": dict(k=14336, widths=(4096,)),
    "q/k/v, five tasks": dict(k=4096, widths=(4096, 1024, 1024), slots=5),
    "gate/up": dict(k=4096, widths=(14336, 14336)),
    "rank 8, seven tasks": dict(k=4096, widths=(4096,), rank=8, slots=7),
    "gate/up, rank 64": dict(k=4096, widths=(14336, 14336), rank=64),
    "q/k/v, rank 128": dict(k=4096, widths=(4096, 1024, 1024), rank=128),
    "64 tasks": dict(k=4096, widths=(4096,), slots=64),
    "rank 40": dict(k=1024, widths=(1024,), rank=40),
    "q/k/v, dropout": dict(k=4096, widths=(4096, 1024, 1024), rates=(0.1, 0.0, 0.05, 0.1)),
    "down, dropout": dict(k=14336, widths=(4096,), rates=(0.1,) * 4),
    "rank 72": dict(k=1024, widths=(1024,), rank=72),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL)
def test_real_shapes_on_the_gpu(shape, implementation):
    slots = REAL[shape].get("slots", 4)
    owners = np.random.default_rng(len(shape)).integers(-1, slots, 64)
    case = make_case(**REAL[shape] | dict(owners=tuple(owners), slots=slots))
    wanted = jax.device_get(expected(case))
    # What the outputs are made of must be overwritten, every element.
    poison = [jnp.full(1 << 28, jnp.nan, jnp.float32) for _ in range(8)]
    jax.block_until_ready(poison)
    del poison
    found = jax.device_get(run(implementation, case))
    assert_close(found, wanted)
    again = jax.device_get(run(implementation, case))
    for one, other in zip(*map(jax.tree.leaves, (found, again)), strict=True):
        assert_same_bits(one, other)


def assert_close(found, wanted):
    """Each array within 1e-2 of the reference in norm: what bfloat16 allows."""
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)


def assert_same_bits(one, other):
    np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
