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
HALVES = slice(0, 256), slice(256, 512)

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


@pytest.fixture(scope="module", params=["residual", "dropout"])
def solved(implementation, request):
    """A case with its results and the wanted ones. The case with dropout has the second half of the
    columns of `whole`, a rank that is padded, and outputs of unequal width."""
    if request.param == "residual":
        case = with_residual(half_precision_case())
    elif implementation == "triton":
        # It refuses dropout of columns that do not begin at 0.
        case = half_precision_case(rank=8, widths=(256, 512), rates=MIXED_RATES)
    else:
        case = of_columns(whole(), HALVES[1])
    return case, run(implementation, case), expected(case)


def whole() -> Case:
    return half_precision_case(k=512, rank=8, widths=(256, 512), rates=MIXED_RATES)


@pytest.mark.long
def test_outputs_and_gradients_follow_the_formula(solved):
    _, found, wanted = solved
    # In empty chunks the gradient of the residual is undefined.
    assert_close(*(results._replace(d_residual=None) for results in (found, wanted)))


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
@pytest.mark.parametrize("solved", ["residual"], indirect=True)
def test_a_residual_gets_the_gradient(solved):
    case, found, _ = solved
    owned = ~case.is_owned_by(-1)
    assert_same_bits(found.d_residual[owned], case.cotangents[0][owned])


# The test of outputs and gradients compares all implementations for the second half.
@pytest.mark.long
@pytest.mark.parametrize("solved", ["dropout"], indirect=True)
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.slow)], indirect=True
)
def test_dropout_of_divided_columns_is_that_of_the_whole_input(implementation, solved):
    other = run(implementation, of_columns(whole(), HALVES[0]))
    assert_close(joined(whole(), [other, solved[1]]), expected(whole()))


# The case with dropout has such a rank and outputs, too.
@pytest.mark.slow
def test_rank_that_is_padded_and_outputs_of_unequal_width_follow_the_formula(implementation):
    case = half_precision_case(rank=8, widths=(256, 512))
    assert_close(run(implementation, case), expected(case))


@pytest.mark.long
@pytest.mark.parametrize(
    "solved", [pytest.param("residual", marks=pytest.mark.slow), "dropout"], indirect=True
)
def test_nan_of_a_task_and_of_an_idle_slot_changes_no_bit_of_the_others(implementation, solved):
    case, found, _ = solved
    broken = poisoned(case, "factors", IDLE_SLOT, np.nan)
    for where in ("x", "cotangents", "factors"):
        broken = poisoned(broken, where, 0, np.nan)
    broken = run(implementation, broken)
    others = ~case.is_owned_by(0)
    for before, after in zip((*found.outputs, found.dx), (*broken.outputs, broken.dx), strict=True):
        assert_same_bits(before[others], after[others])
    for before, after in pairs(found.accumulators, broken.accumulators):
        assert_same_bits(before[:, 1:], after[:, 1:])


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
