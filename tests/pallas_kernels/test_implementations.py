"""Every implementation of the grouped LoRA linear against the same formula, and the same promises.

On CPU the Mosaic GPU kernels run in the interpreter, which looks for data races; on a GPU (marker
`gpu`) all kernels run as they are.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import (
    IDLE_SLOT,
    MIXED_RATES,
    Case,
    Results,
    assert_close,
    assert_same_bits,
    differentiate,
    fill_free_memory_with_nan,
    in_float32,
    interpreted_on_hopper,
    joined,
    make_case,
    of_columns,
    pairs,
    poisoned,
    with_residual,
)

from jaxmux.pallas_kernels.grouped_lora import IMPLEMENTATIONS

LAYER = 1
# Slots 1 and 3 own nothing; one chunk is empty; slot 0's chunks are not adjacent.
CHUNK_SLOT = (0, 2, -1, 0)
ON_CPU = ("xla", "mosaic_gpu")
RATES = {"no dropout": None, "dropout": MIXED_RATES}

# The smallest sizes that the Hopper kernels support, because the interpreter is slow.
half_precision_case = partial(
    make_case,
    k=256,
    widths=(256,),
    rank=16,
    chunk_slot=CHUNK_SLOT,
    chunk_len=128,
    dtype=jnp.bfloat16,
    deviation=0.1,
)


@partial(jax.jit, static_argnums=0)
def differentiate_by(implementation: str, case: Case) -> Results:
    return differentiate(case, LAYER, implementation=implementation)


def expected(case: Case) -> Results:
    """The results by plain XLA in float32."""
    return differentiate_by("xla", in_float32(case))


def run(implementation: str, case: Case) -> Results:
    if jax.default_backend() == "gpu" or implementation != "mosaic_gpu":
        return differentiate_by(implementation, case)
    with interpreted_on_hopper():
        return jax.block_until_ready(differentiate_by(implementation, case))


@pytest.fixture(
    scope="module",
    params=[
        name if name in ON_CPU else pytest.param(name, marks=pytest.mark.gpu)
        for name in IMPLEMENTATIONS
    ],
)
def implementation(request):
    return request.param


@pytest.fixture(scope="module", params=RATES.values(), ids=RATES)
def solved(implementation, request):
    case = half_precision_case(rates=request.param)
    return case, run(implementation, case), expected(case)


@pytest.mark.long
def test_outputs_and_gradients_follow_the_formula(solved):
    _, found, wanted = solved
    assert_close(found, wanted)


@pytest.mark.long
def test_empty_chunks_are_zeros(solved):
    case, found, _ = solved
    empty = case.is_owned_by(-1)
    assert not any(np.any(y[empty]) for y in (*found.outputs, found.dx))


@pytest.mark.long
def test_other_layers_and_idle_slots_keep_the_bits_of_their_accumulators(solved):
    case, found, _ = solved
    for before, after in pairs(case.accumulators, found.accumulators):
        assert_same_bits(after[:LAYER], before[:LAYER])
        assert_same_bits(after[:, IDLE_SLOT], before[:, IDLE_SLOT])


@pytest.mark.long
def test_rank_that_is_padded_and_outputs_of_unequal_width_follow_the_formula(implementation):
    case = half_precision_case(rank=8, widths=(256, 512))
    assert_close(run(implementation, case), expected(case))


@pytest.mark.long
def test_dropout_of_divided_columns_is_that_of_the_whole_input(implementation):
    if implementation == "triton":
        pytest.skip("it refuses such calls")
    case = half_precision_case(k=512, rates=MIXED_RATES)
    halves = [of_columns(case, slice(start, start + 256)) for start in (0, 256)]
    assert_close(joined(case, [run(implementation, half) for half in halves]), expected(case))


@pytest.mark.long
def test_a_residual_is_added_and_gets_the_gradient(implementation):
    case = with_residual(half_precision_case())
    found = run(implementation, case)
    assert_close(found.outputs, expected(case).outputs)
    owned = ~case.is_owned_by(-1)
    assert_same_bits(found.d_residual[owned], case.cotangents[0][owned])
    assert not np.any(found.outputs[0][~owned]) and not np.any(found.dx[~owned])


@pytest.mark.long
@pytest.mark.parametrize("slot", [0, IDLE_SLOT], ids=["task", "idle slot"])
def test_nan_of_one_task_changes_no_bit_of_the_others(slot, implementation, solved):
    case, found, _ = solved
    is_idle = slot == IDLE_SLOT
    if is_idle and case.dropout is not None:
        pytest.skip("dropout acts on x alone, of which an idle slot has nothing")
    broken = case
    for where in ("x", "cotangents", "factors"):
        broken = poisoned(broken, where, slot, np.nan)
    broken = run(implementation, broken)
    others = ~case.is_owned_by(slot)
    for before, after in zip((*found.outputs, found.dx), (*broken.outputs, broken.dx), strict=True):
        assert_same_bits(before[others], after[others])
    slots = slice(0 if is_idle else 1, None)
    for before, after in pairs(found.accumulators, broken.accumulators):
        assert_same_bits(before[:, slots], after[:, slots])


# Shapes of the benchmark; odd numbers of tasks, ranks that are padded, small and large ranks.
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
    chunk_slot = tuple(np.random.default_rng(len(shape)).integers(-1, slots, 64))
    case = half_precision_case(**REAL[shape] | dict(chunk_slot=chunk_slot, slots=slots))
    wanted = jax.device_get(expected(case))
    fill_free_memory_with_nan()
    found = jax.device_get(run(implementation, case))
    assert_close(found, wanted)
    again = jax.device_get(run(implementation, case))
    assert_same_bits(found, again)
