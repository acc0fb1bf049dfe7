"""The grouped LoRA linear against its formula, token by token, and its promises of isolation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels import slot_sum
from jaxmux.pallas_kernels.counter_dropout import Dropout, keep_mask, token_counters
from jaxmux.pallas_kernels.grouped_lora import Factors, Projection, Routing, grouped_lora_linear

CHUNK = 8
WIDTH, RANK, SLOTS = 12, 4, 4
OUTPUTS = (10, 6, 12)
MODULES = (0, 2, 5)
LAYERS, LAYER = 5, 3
# Slot 3 owns nothing; two chunks are empty; slot 0's chunks are not adjacent.
CHUNK_SLOT = (0, -1, 2, 0, 1, -1, 1)
RATES = {"no dropout": None, "mixed rates": (0.5, 0.0, 0.25, 0.9), "rate 0": (0.0,) * SLOTS}


class Case(NamedTuple):
    x: jax.Array
    projections: tuple[Projection, ...]
    accumulators: tuple[Factors, ...]
    routing: Routing
    dropout: Dropout | None
    cotangents: tuple[jax.Array, ...]


def make_case(rates=None, chunk_slot=CHUNK_SLOT, seed=0) -> Case:
    rng = np.random.default_rng(seed)
    tokens = CHUNK * len(chunk_slot)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def factors(n):
        return Factors(normal(LAYERS, SLOTS, WIDTH, RANK), normal(LAYERS, SLOTS, RANK, n))

    projections = tuple(Projection(normal(LAYERS, WIDTH, n), factors(n)) for n in OUTPUTS)
    accumulators = tuple(map(factors, OUTPUTS))
    routing = Routing(
        jnp.asarray(chunk_slot, jnp.int32), jnp.asarray([2.0, 0.5, 1.0, 4.0], jnp.float32)
    )
    x = normal(tokens, WIDTH)
    cotangents = tuple(normal(tokens, n) for n in OUTPUTS)
    dropout = None
    if rates is not None:
        dropout = Dropout(
            jnp.asarray(rates, jnp.float32),
            jnp.asarray(rng.integers(2**32, size=SLOTS), jnp.uint32),
            jnp.asarray(rng.integers(5, size=tokens), jnp.uint32),
            jnp.asarray(np.arange(tokens) % 11, jnp.int32),
        )
    return Case(x, projections, accumulators, routing, dropout, cotangents)


@jax.jit
def run(case: Case):
    """Outputs, dx, and the next accumulators."""
    outputs, dx, _, accumulators = differentiate(case)
    return outputs, dx, accumulators


def differentiate(case: Case):
    """Outputs, and the cotangents of x, the projections and the accumulators."""

    def function(x, projections, accumulators):
        return grouped_lora_linear(
            x, projections, accumulators, case.routing, case.dropout, LAYER, MODULES
        )

    (outputs, _), vjp = jax.vjp(function, case.x, case.projections, case.accumulators)
    return outputs, *vjp((case.cotangents, case.accumulators))


def reference(case: Case):
    """The formula and its derivatives in float64, one token at a time."""
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), case)
    tokens = len(wide.x)
    outputs = [np.zeros((tokens, n)) for n in OUTPUTS]
    dx = np.zeros_like(wide.x)
    grads_a = [f.a.copy() for f in wide.accumulators]
    grads_b = [f.b.copy() for f in wide.accumulators]
    for t in range(tokens):
        slot = int(case.routing.chunk_slot[t // CHUNK])
        for i, p in enumerate(wide.projections):
            if slot < 0:
                continue
            dy, kernel = wide.cotangents[i][t], p.kernel[LAYER]
            factor = dropout_factors(case, slot, t, MODULES[i])
            scale, (a, b) = wide.routing.scale[slot], (f[LAYER, slot] for f in p.factors)
            dropped = factor * wide.x[t]
            outputs[i][t] = wide.x[t] @ kernel + scale * dropped @ a @ b
            dx[t] += kernel @ dy + scale * factor * (a @ (b @ dy))
            grads_a[i][LAYER, slot] += scale * np.outer(dropped, b @ dy)
            grads_b[i][LAYER, slot] += scale * np.outer(dropped @ a, dy)
    return outputs, dx, grads_a, grads_b


def dropout_factors(case: Case, slot: int, token: int, module: int) -> np.ndarray | float:
    if case.dropout is None:
        return 1.0
    one = case.dropout._replace(
        sample_id=case.dropout.sample_id[token : token + 1],
        position=case.dropout.position[token : token + 1],
    )
    counter = token_counters(one, jnp.asarray([slot]), LAYER, module)
    kept = np.asarray(keep_mask(counter, case.dropout.rate[slot : slot + 1], WIDTH))[0]
    return kept / (1 - float(case.dropout.rate[slot]))


@pytest.fixture(scope="module", params=RATES.values(), ids=RATES)
def solved(request):
    case = make_case(request.param)
    return case, run(case), reference(case)


def test_outputs_follow_the_formula(solved):
    _, (outputs, _, _), (expected, *_) = solved
    for found, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


def test_gradient_of_the_input_follows_the_formula(solved):
    _, (_, dx, _), (_, expected, *_) = solved
    np.testing.assert_allclose(dx, expected, rtol=2e-5, atol=5e-5)


def test_derivative_by_an_accumulator_is_the_accumulator_plus_the_gradient(solved):
    _, (_, _, gradients), (*_, grads_a, grads_b) = solved
    for found, a, b in zip(gradients, grads_a, grads_b, strict=True):
        np.testing.assert_allclose(found.a, a, rtol=2e-5, atol=1e-4)
        np.testing.assert_allclose(found.b, b, rtol=2e-5, atol=1e-4)


def test_frozen_kernel_and_factors_get_zero_cotangents():
    _, _, projections, _ = differentiate(make_case())
    assert not any(np.any(x) for x in jax.tree.leaves(projections))


def test_accumulators_of_absent_slots_and_other_layers_keep_their_bits(solved):
    case, (_, _, gradients), _ = solved
    for before, after in zip(case.accumulators, gradients, strict=True):
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(new[:, 3], old[:, 3])
            np.testing.assert_array_equal(np.delete(new, LAYER, 0), np.delete(old, LAYER, 0))


def test_empty_chunks_are_zeros(solved):
    _, (outputs, dx, _), _ = solved
    empty = np.repeat(np.asarray(CHUNK_SLOT) < 0, CHUNK)
    assert not any(np.any(y[empty]) for y in (*outputs, dx))


def test_accumulators_do_not_enter_the_outputs():
    case = make_case(RATES["mixed rates"])
    poisoned = tuple(Factors(f.a * jnp.nan, f.b * jnp.inf) for f in case.accumulators)
    assert_same_bits(run(case)[:2], run(case._replace(accumulators=poisoned))[:2])


def test_without_accumulators_the_outputs_are_the_same():
    case = make_case(RATES["mixed rates"])
    outputs, nothing = jax.jit(grouped_lora_linear, static_argnums=6)(
        case.x, case.projections, None, case.routing, case.dropout, LAYER, MODULES
    )
    assert nothing is None
    for found, wanted in zip(outputs, run(case)[0], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_dropout_of_one_task_leaves_others_as_without_dropout():
    plain, mixed = run(make_case()), run(make_case((0.5, 0.0, 0.0, 0.0)))
    others = np.repeat(np.asarray(CHUNK_SLOT) != 0, CHUNK)
    for one, other in zip(plain[0], mixed[0], strict=True):
        np.testing.assert_allclose(one[others], other[others], rtol=1e-6, atol=1e-6)
        assert np.any(one[~others] != other[~others])


def test_half_precision_inputs_give_half_precision_outputs_and_float32_accumulators():
    case = make_case(RATES["mixed rates"])

    def half(v):
        return v.astype(jnp.bfloat16)

    x, projections, cotangents = jax.tree.map(half, (case.x, case.projections, case.cotangents))
    rounded = case._replace(x=x, projections=projections, cotangents=cotangents)
    outputs, dx, gradients = run(rounded)
    expected, expected_dx, grads_a, grads_b = reference(rounded)
    assert {y.dtype for y in (*outputs, dx)} == {jnp.dtype(jnp.bfloat16)}
    for found, wanted in zip((*outputs, dx), (*expected, expected_dx), strict=True):
        assert relative_error(found, wanted) < 0.01
    for found, a, b in zip(gradients, grads_a, grads_b, strict=True):
        assert found.a.dtype == found.b.dtype == jnp.float32
        assert relative_error(found.a, a) < 0.01
        assert relative_error(found.b, b) < 0.01


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["a", "b", "x", "cotangent", "scale"])
def test_one_broken_task_changes_no_bit_of_the_others(poison, where):
    case = make_case(RATES["mixed rates"])
    broken = poisoned_case(case, where, slot=0, value=poison)
    others = np.repeat(np.asarray(CHUNK_SLOT) != 0, CHUNK)
    (ys, dx, grads), (ys_broken, dx_broken, grads_broken) = run(case), run(broken)
    assert_same_bits([y[others] for y in ys], [y[others] for y in ys_broken])
    assert_same_bits(dx[others], dx_broken[others])
    for before, after in zip(*map(jax.tree.leaves, (grads, grads_broken)), strict=True):
        assert_same_bits(before[:, 1:], after[:, 1:])
    owner = [leaf[LAYER, 0] for leaf in jax.tree.leaves(grads_broken)]
    assert not all(np.isfinite(leaf).all() for leaf in owner)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_an_idle_slot_reaches_nothing(poison):
    case = make_case(RATES["mixed rates"])
    broken = poisoned_case(poisoned_case(case, "a", 3, poison), "b", 3, poison)
    assert_same_bits(run(case), run(broken))


def poisoned_case(case: Case, where: str, slot: int, value: float) -> Case:
    owned = np.repeat(np.asarray(CHUNK_SLOT) == slot, CHUNK)
    if where == "x":
        return case._replace(x=jnp.where(owned[:, None], value, case.x))
    if where == "cotangent":
        return case._replace(
            cotangents=tuple(jnp.where(owned[:, None], value, dy) for dy in case.cotangents)
        )
    if where == "scale":
        scale = case.routing.scale.at[slot].set(value)
        return case._replace(routing=case.routing._replace(scale=scale))

    def poisoned(p: Projection) -> Projection:
        leaf = getattr(p.factors, where).at[LAYER, slot].set(value)
        return p._replace(factors=p.factors._replace(**{where: leaf}))

    return case._replace(projections=tuple(map(poisoned, case.projections)))


def test_a_chunk_gets_the_same_bits_wherever_it_lies_and_beside_whomever():
    here = make_case((0.5, 0.0, 0.25, 0.9))
    order = np.asarray([6, 2, 5, 0, 3, 1, 4])
    tokens = (order[:, None] * CHUNK + np.arange(CHUNK)).reshape(-1)
    there = here._replace(
        x=here.x[tokens],
        routing=here.routing._replace(chunk_slot=here.routing.chunk_slot[order]),
        dropout=here.dropout._replace(
            sample_id=here.dropout.sample_id[tokens], position=here.dropout.position[tokens]
        ),
        cotangents=tuple(dy[tokens] for dy in here.cotangents),
    )
    (ys, dx, grads), (ys_there, dx_there, grads_there) = run(here), run(there)
    assert_same_bits([y[tokens] for y in ys], ys_there)
    assert_same_bits(dx[tokens], dx_there)
    # Slots 0 and 2 keep the order of their chunks; slot 1's is reversed.
    for before, after in zip(*map(jax.tree.leaves, (grads, grads_there)), strict=True):
        assert_same_bits(before[:, (0, 2, 3)], after[:, (0, 2, 3)])


def test_unknown_implementation_is_refused_by_name():
    case = make_case()
    with pytest.raises(ValueError, match="'cuda'.*known: .*xla"):
        grouped_lora_linear(
            case.x, case.projections, None, case.routing, None, 0, MODULES, implementation="cuda"
        )


SUMS = {"left fold": slot_sum._left_fold, "select": slot_sum._select_and_reduce}


def slot_sum_inputs():
    rng = np.random.default_rng(1)
    accumulators = rng.standard_normal((SLOTS, 3, 5)).astype(np.float32)
    per_chunk = rng.standard_normal((40, 3, 5)).astype(np.float32)
    return accumulators, per_chunk, rng.integers(-1, SLOTS - 1, 40).astype(np.int32)


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
def test_every_chunk_is_added_to_its_owner_and_empty_ones_to_none(add):
    accumulators, per_chunk, chunk_slot = slot_sum_inputs()
    expected = accumulators.astype(np.float64)
    for value, slot in zip(per_chunk, chunk_slot, strict=True):
        if slot >= 0:
            expected[slot] += value
    found = jax.jit(add)(accumulators, per_chunk, chunk_slot)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("add", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_broken_chunk_reaches_its_owner_alone(add, poison):
    accumulators, per_chunk, chunk_slot = slot_sum_inputs()
    broken = np.where((chunk_slot <= 0)[:, None, None], np.float32(poison), per_chunk)
    whole, found = (jax.jit(add)(accumulators, p, chunk_slot) for p in (per_chunk, broken))
    assert_same_bits(whole[1:], found[1:])
    assert not np.isfinite(found[0]).any()


def test_on_cpu_the_sum_is_one_left_fold_however_it_is_split():
    accumulators, per_chunk, chunk_slot = slot_sum_inputs()
    expected = accumulators.copy()
    for value, slot in zip(per_chunk, chunk_slot, strict=True):
        if slot >= 0:
            expected[slot] += value
    add = jax.jit(slot_sum.add_to_slots)
    for pieces in (1, 2, 5, 40):
        total = accumulators
        for values, slots in zip(
            np.split(per_chunk, pieces), np.split(chunk_slot, pieces), strict=True
        ):
            total = add(total, values, slots)
        np.testing.assert_array_equal(total, expected)


def relative_error(found, wanted) -> float:
    found = np.asarray(found, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def assert_same_bits(one, other):
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
