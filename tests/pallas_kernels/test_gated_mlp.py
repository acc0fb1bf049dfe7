"""The fused MLP against the same MLP made of single linears in float32."""

import jax
import numpy as np
import pytest
from grouped_lora_cases import (
    IDLE_SLOT,
    Case,
    Results,
    assert_close,
    assert_same_bits,
    in_float32,
    interpreted_on_hopper,
    make_mlp_case,
    pairs,
    relative_error,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import gated_mlp, grouped_lora_linear, mosaic_gpu

LAYER = 1
# Slots 1 and 3 own nothing; one chunk is empty; slot 0's chunks are not adjacent.
CHUNK_SLOT = (0, 2, -1, 0)


def mlp_case(d: int, wide: int, chunk_slot=CHUNK_SLOT, slots: int = 4) -> Case:
    return make_mlp_case(d=d, wide=wide, rank=16, chunk_slot=chunk_slot, chunk_len=128, slots=slots)


def differentiate_mlp(mlp, case: Case) -> Results:
    """Output and gradients of `mlp(x, residual, accumulators)`."""
    (out, _), vjp = jax.vjp(mlp, case.x, case.residual, case.accumulators)
    return Results((out,), *vjp((*case.cotangents, case.accumulators)))


@jax.jit
def fused(case: Case) -> Results:
    def mlp(x, residual, accumulators):
        return gated_mlp.grouped_lora_gated_mlp(
            x, case.projections, accumulators, case.routing, LAYER, residual
        )

    return differentiate_mlp(mlp, case)


def expected(case: Case) -> Results:
    """The results of three single linears in float32."""
    return single_linears(in_float32(case))


@jax.jit
def single_linears(case: Case) -> Results:
    def linears(x, which: slice, accumulators, residual=None):
        modules = tuple(range(3))[which]
        arguments = case.projections[which], accumulators[which], case.routing, None, LAYER
        return grouped_lora_linear(x, *arguments, modules, "xla", residual)

    def mlp(x, residual, accumulators):
        (gate, up), first = linears(x, slice(0, 2), accumulators)
        h = jax.nn.silu(gate) * up
        (out,), second = linears(h, slice(2, 3), accumulators, residual)
        return out, (*first, *second)

    return differentiate_mlp(mlp, case)


def assert_owned_rows_are_close(case: Case, found: Results, wanted: Results):
    owned = ~case.is_owned_by(-1)

    def of_owners(results: Results):
        return jax.tree.map(lambda x: x[owned] if x.ndim == 2 else x, results)

    assert_close(of_owners(found), of_owners(wanted))


@pytest.fixture(scope="module")
def solved():
    case = mlp_case(256, 256)
    with interpreted_on_hopper():
        return case, jax.block_until_ready(fused(case))


@pytest.mark.long
def test_output_and_gradients_are_those_of_the_single_linears(solved):
    case, found = solved
    assert_owned_rows_are_close(case, found, expected(case))


def test_empty_chunks_are_zeros(solved):
    case, found = solved
    empty = case.is_owned_by(-1)
    assert not np.any(found.outputs[0][empty]) and not np.any(found.dx[empty])


def test_other_layers_and_idle_slots_keep_the_bits_of_their_accumulators(solved):
    case, found = solved
    for before, after in pairs(case.accumulators, found.accumulators):
        assert_same_bits(before[:LAYER], after[:LAYER])
        assert_same_bits(before[:, IDLE_SLOT], after[:, IDLE_SLOT])


def in_float8(case: Case) -> Case:
    projections = (
        p._replace(weight=FrozenWeight.encoded(p.weight.values, "float8")) for p in case.projections
    )
    return case._replace(projections=tuple(projections))


def assert_float8_results_are_close(found: Results, wanted: Results):
    """Numbers that differ in the last bit of bfloat16 may get other codes in float8."""
    for one, other in pairs(found, wanted):
        assert relative_error(one, other) < 2e-2


@pytest.mark.long
def test_an_mlp_in_float8_is_that_of_single_linears(monkeypatch):
    case = in_float8(mlp_case(256, 256, (2,)))
    monkeypatch.setattr(mosaic_gpu, "is_hopper", lambda: True)
    # The interpreter sees races where float8 operands and the output share their place.
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        found = jax.block_until_ready(fused(case))
    monkeypatch.undo()
    assert_float8_results_are_close(found, single_linears(case))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_the_mlp_of_llama_on_the_gpu(slots):
    chunk_slot = tuple(np.random.default_rng(slots).integers(-1, slots, 64))
    case = mlp_case(4096, 14336, chunk_slot, slots)
    wanted = jax.device_get(expected(case))
    found = jax.device_get(fused(case))
    assert_owned_rows_are_close(case, found, wanted)
    again = jax.device_get(fused(case))
    assert_same_bits(found, again)


@pytest.mark.gpu
def test_the_mlp_of_llama_in_float8_on_the_gpu():
    owners = tuple(np.random.default_rng(0).integers(0, 4, 64))
    case = in_float8(mlp_case(4096, 14336, owners))
    found = jax.device_get(fused(case))
    assert_float8_results_are_close(found, jax.device_get(single_linears(case)))
