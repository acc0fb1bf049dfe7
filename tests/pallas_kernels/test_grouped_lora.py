"""The grouped LoRA linear against its formula, token by token, and its promises of isolation."""

from functools import partial
from itertools import pairwise

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
    joined,
    make_case,
    of_columns,
    pairs,
    poisoned,
    relative_error,
)

from jaxmux.pallas_kernels import slot_sum
from jaxmux.pallas_kernels.counter_dropout import keep_mask, token_counters
from jaxmux.pallas_kernels.grouped_lora import Factors, grouped_lora_linear

CHUNK, WIDTH, OUTPUTS = 8, 12, (10, 6, 12)
MODULES = (0, 2, 5)
LAYERS, LAYER = 5, 3
# Slot 3 owns nothing; two chunks are empty; slot 0's chunks are not adjacent.
CHUNK_SLOT = (0, -1, 2, 0, 1, -1, 1)
RATES = {"no dropout": None, "mixed rates": MIXED_RATES, "rate 0": (0.0,) * SLOTS}

small_case = partial(
    make_case,
    k=WIDTH,
    widths=OUTPUTS,
    rank=4,
    chunk_slot=CHUNK_SLOT,
    chunk_len=CHUNK,
    layers=LAYERS,
)
run = jax.jit(partial(differentiate, layer=LAYER, modules=MODULES))


def reference(case: Case):
    """The formula and its derivatives in float64, one token at a time."""
    wide = jax.tree.map(lambda v: np.asarray(v, np.float64), case)
    tokens = len(wide.x)
    outputs = [np.zeros((tokens, n)) for n in OUTPUTS]
    dx = np.zeros_like(wide.x)
    grads_a = [f.a.copy() for f in wide.accumulators]
    grads_b = [f.b.copy() for f in wide.accumulators]
    kept = [dropout_factors(case, module) for module in MODULES]
    for t in range(tokens):
        slot = int(case.routing.chunk_slot[t // CHUNK])
        for i, p in enumerate(wide.projections):
            if slot < 0:
                continue
            dy, weight = wide.cotangents[i][t], p.weight.values[LAYER]
            factor = kept[i][t]
            scale, (a, b) = wide.routing.scale[slot], (f[LAYER, slot] for f in p.factors)
            dropped = factor * wide.x[t]
            outputs[i][t] = wide.x[t] @ weight + scale * dropped @ a @ b
            dx[t] += weight @ dy + scale * factor * (a @ (b @ dy))
            grads_a[i][LAYER, slot] += scale * np.outer(dropped, b @ dy)
            grads_b[i][LAYER, slot] += scale * np.outer(dropped @ a, dy)
    return outputs, dx, grads_a, grads_b


def dropout_factors(case: Case, module: int) -> np.ndarray:
    """The factor of each input feature of the module: 0 if it is dropped, else 1 / (1 - rate);
    [N, WIDTH]."""
    tokens = len(case.x)
    if case.dropout is None:
        return np.ones((tokens, WIDTH))
    owner = jnp.repeat(jnp.maximum(case.routing.chunk_slot, 0), CHUNK)
    rate = case.dropout.rate[owner]
    counters = token_counters(case.dropout, owner, LAYER, module)
    kept = np.asarray(keep_mask(counters, rate, WIDTH))
    return kept / (1 - np.asarray(rate, np.float64)[:, None])


@pytest.fixture(scope="module", params=RATES.values(), ids=RATES)
def solved(request):
    case = small_case(rates=request.param)
    return case, run(case), reference(case)


@pytest.fixture(scope="module")
def mixed():
    """A case with mixed dropout rates and its results."""
    case = small_case(rates=MIXED_RATES)
    return case, run(case)


def test_outputs_follow_the_formula(solved):
    _, found, (expected, *_) = solved
    for one, wanted in zip(found.outputs, expected, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=2e-5, atol=2e-5)


def test_gradient_of_the_input_follows_the_formula(solved):
    _, found, (_, expected, *_) = solved
    np.testing.assert_allclose(found.dx, expected, rtol=2e-5, atol=5e-5)


def test_derivative_by_an_accumulator_is_the_accumulator_plus_the_gradient(solved):
    _, found, (*_, grads_a, grads_b) = solved
    for one, a, b in zip(found.accumulators, grads_a, grads_b, strict=True):
        np.testing.assert_allclose(one.a, a, rtol=2e-5, atol=1e-4)
        np.testing.assert_allclose(one.b, b, rtol=2e-5, atol=1e-4)


@pytest.mark.long
def test_frozen_weight_and_factors_get_zero_cotangents():
    case = small_case()

    def function(projections):
        return grouped_lora_linear(
            case.x, projections, case.accumulators, case.routing, None, LAYER, MODULES
        )

    @jax.jit
    def gradient(projections):
        return jax.vjp(function, projections)[1]((case.cotangents, case.accumulators))

    (projections,) = gradient(case.projections)
    assert len(jax.tree.leaves(projections)) == 3 * len(OUTPUTS)
    assert not any(np.any(x) for x in jax.tree.leaves(projections))


def test_accumulators_of_absent_slots_and_other_layers_keep_their_bits(solved):
    case, found, _ = solved
    for old, new in pairs(case.accumulators, found.accumulators):
        np.testing.assert_array_equal(new[:, IDLE_SLOT], old[:, IDLE_SLOT])
        np.testing.assert_array_equal(np.delete(new, LAYER, 0), np.delete(old, LAYER, 0))


def test_empty_chunks_are_zeros(solved):
    case, found, _ = solved
    empty = case.is_owned_by(-1)
    assert not any(np.any(y[empty]) for y in (*found.outputs, found.dx))


def test_accumulators_do_not_enter_the_outputs(mixed):
    case, found = mixed
    broken = tuple(Factors(f.a * jnp.nan, f.b * jnp.inf) for f in case.accumulators)
    found_broken = run(case._replace(accumulators=broken))
    assert_same_bits((found.outputs, found.dx), (found_broken.outputs, found_broken.dx))


def test_without_accumulators_the_outputs_are_the_same(mixed):
    case, found = mixed
    outputs, nothing = jax.jit(grouped_lora_linear, static_argnums=6)(
        case.x, case.projections, None, case.routing, case.dropout, LAYER, MODULES
    )
    assert nothing is None
    for one, wanted in zip(outputs, found.outputs, strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-6, atol=1e-6)


def test_dropout_of_one_task_leaves_others_as_without_dropout():
    plain_case = small_case()
    plain, mixed = run(plain_case), run(small_case(rates=(0.5, 0.0, 0.0, 0.0)))
    others = ~plain_case.is_owned_by(0)
    for one, other in zip(plain.outputs, mixed.outputs, strict=True):
        np.testing.assert_allclose(one[others], other[others], rtol=1e-6, atol=1e-6)
        assert np.any(one[~others] != other[~others])


@pytest.mark.long
@pytest.mark.parametrize(
    "boundaries", [pytest.param((0, 32, 64, 96), marks=pytest.mark.slow), (0, 64, 96)], ids=str
)
def test_dropout_of_divided_columns_is_that_of_the_whole_input(boundaries):
    case = small_case(k=96, rates=MIXED_RATES)
    parts = [run(of_columns(case, slice(*ends))) for ends in pairwise(boundaries)]
    for found, wanted in pairs(joined(case, parts), run(case)):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-4)


@pytest.mark.long
def test_half_precision_inputs_give_half_precision_outputs_and_float32_accumulators():
    case = small_case(rates=MIXED_RATES, dtype=jnp.bfloat16)
    factors = jax.tree.map(lambda v: v.astype(jnp.bfloat16), [p.factors for p in case.projections])
    projections = map(lambda p, f: p._replace(factors=f), case.projections, factors)
    rounded = case._replace(projections=tuple(projections))
    found = run(rounded)
    expected, expected_dx, grads_a, grads_b = reference(rounded)
    assert {y.dtype for y in (*found.outputs, found.dx)} == {jnp.dtype(jnp.bfloat16)}
    for one, wanted in zip((*found.outputs, found.dx), (*expected, expected_dx), strict=True):
        assert relative_error(one, wanted) < 0.01
    for one, a, b in zip(found.accumulators, grads_a, grads_b, strict=True):
        assert one.a.dtype == one.b.dtype == jnp.float32
        assert relative_error(one.a, a) < 0.01
        assert relative_error(one.b, b) < 0.01


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("where", ["a", "b", "x", "cotangents", "scale"])
def test_one_broken_task_changes_no_bit_of_the_others(poison, where, mixed):
    case, found = mixed
    broken = run(poisoned(case, where, slot=0, value=poison))
    others = ~case.is_owned_by(0)
    for before, after in zip((*found.outputs, found.dx), (*broken.outputs, broken.dx), strict=True):
        assert_same_bits(before[others], after[others])
    for before, after in pairs(found.accumulators, broken.accumulators):
        assert_same_bits(before[:, 1:], after[:, 1:])
    of_owner = [leaf[LAYER, 0] for leaf in jax.tree.leaves(broken.accumulators)]
    assert not all(np.isfinite(leaf).all() for leaf in of_owner)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_nan_in_an_idle_slot_reaches_nothing(poison, mixed):
    case, found = mixed
    assert_same_bits(found, run(poisoned(case, "factors", IDLE_SLOT, poison)))


def test_a_chunk_gets_the_same_bits_wherever_it_lies_and_beside_whomever(mixed):
    here, found = mixed
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
    found_there = run(there)
    assert_same_bits([y[tokens] for y in found.outputs], list(found_there.outputs))
    assert_same_bits(found.dx[tokens], found_there.dx)
    # Slots 0 and 2 keep the order of their chunks; slot 1's is reversed.
    for before, after in pairs(found.accumulators, found_there.accumulators):
        assert_same_bits(before[:, (0, 2, 3)], after[:, (0, 2, 3)])


def test_unknown_implementation_is_refused_by_name():
    case = small_case()
    with pytest.raises(ValueError, match="'cuda'.*known: .*xla"):
        grouped_lora_linear(
            case.x, case.projections, None, case.routing, None, 0, MODULES, implementation="cuda"
        )


SUMS = {"left fold": slot_sum._left_fold, "select": slot_sum._select_and_reduce}


def slot_sum_inputs(shape=(3, 5)):
    rng = np.random.default_rng(1)
    accumulators = rng.standard_normal((SLOTS, *shape)).astype(np.float32)
    per_chunk = rng.standard_normal((40, *shape)).astype(np.float32)
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


@pytest.mark.parametrize(
    ("add", "shape"),
    [(slot_sum.add_to_slots, (3, 5)), (slot_sum._unrolled_left_fold, ())],
    ids=["on CPU", "numbers elsewhere"],
)
def test_the_sum_is_one_left_fold_however_it_is_split(add, shape):
    accumulators, per_chunk, chunk_slot = slot_sum_inputs(shape)
    expected = accumulators.copy()
    for value, slot in zip(per_chunk, chunk_slot, strict=True):
        if slot >= 0:
            expected[slot] += value
    for pieces in (1, 2, 5, 40):
        total = accumulators
        for values, slots in zip(
            np.split(per_chunk, pieces), np.split(chunk_slot, pieces), strict=True
        ):
            total = jax.jit(add)(total, values, slots)
        np.testing.assert_array_equal(total, expected)
