"""The fused MLP against the same MLP made of single linears in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmux.pallas_kernels.grouped_lora import (
    Factors,
    Projection,
    Routing,
    gated_mlp,
    grouped_lora_linear,
    mosaic_gpu,
)

LAYERS, LAYER, RANK = 2, 1, 16
# Slot 3 owns nothing; one chunk is empty; slot 0's chunks are not adjacent.
OWNERS = (0, 2, -1, 0, 1)


def make_inputs(d: int, wide: int, owners=OWNERS, slots: int = 4):
    keys = iter(jax.random.split(jax.random.key(d), 64))
    tokens = 128 * len(owners)

    def normal(*shape, dtype=jnp.bfloat16):
        return (0.3 * jax.random.normal(next(keys), shape)).astype(dtype)

    def factors(k, n):
        return Factors(
            normal(LAYERS, slots, k, RANK, dtype=jnp.float32),
            normal(LAYERS, slots, RANK, n, dtype=jnp.float32),
        )

    shapes = ((d, wide), (d, wide), (wide, d))
    projections = tuple(Projection(normal(LAYERS, k, n), factors(k, n)) for k, n in shapes)
    sums = tuple(factors(k, n) for k, n in shapes)
    scale = jax.random.uniform(next(keys), (slots,), minval=0.5)
    routing = Routing(jnp.asarray(owners, jnp.int32), scale)
    return normal(tokens, d), projections, sums, routing, normal(tokens, d), normal(tokens, d)


@jax.jit
def fused(x, projections, sums, routing, residual, gradient):
    def forward(x, residual, sums):
        return gated_mlp.grouped_lora_gated_mlp(x, projections, sums, routing, LAYER, residual)

    (out, _), backward = jax.vjp(forward, x, residual, sums)
    return out, *backward((gradient, sums))


@jax.jit
def of_single_linears(x, projections, sums, routing, residual, gradient):
    def linears(x, which, sums, residual=None):
        modules = tuple(range(3))[which]
        return grouped_lora_linear(
            x, projections[which], sums[which], routing, None, LAYER, modules, "xla", residual
        )

    def forward(x, residual, sums):
        (gate, up), first = linears(x, slice(0, 2), sums)
        (out,), second = linears(jax.nn.silu(gate) * up, slice(2, 3), sums, residual)
        return out, (*first, *second)

    (out, _), backward = jax.vjp(forward, x, residual, sums)
    return out, *backward((gradient, sums))


def expected(inputs):
    x, projections, sums, routing, residual, gradient = inputs
    x, projections, residual, gradient = jax.tree.map(
        lambda v: v.astype(jnp.float32), (x, projections, residual, gradient)
    )
    return of_single_linears(x, projections, sums, routing, residual, gradient)


def assert_close(found, wanted, owners):
    owned = np.repeat(np.asarray(owners) >= 0, 128)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        one, other = (np.asarray(v, np.float32) for v in (one, other))
        if one.ndim == 2:
            one, other = one[owned], other[owned]
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)


@pytest.fixture(scope="module")
def solved():
    inputs = make_inputs(256, 256)
    with (
        pytest.MonkeyPatch.context() as patch,
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
    ):
        patch.setattr(mosaic_gpu, "is_hopper", lambda: True)
        found = jax.block_until_ready(fused(*inputs))
    assert not gpu_callbacks.get_races().races_found
    return inputs, found


def test_output_and_gradients_are_those_of_the_single_linears(solved):
    inputs, found = solved
    assert_close(found, expected(inputs), OWNERS)


def test_empty_chunks_are_zeros(solved):
    _, (out, dx, *_) = solved
    empty = np.repeat(np.asarray(OWNERS) < 0, 128)
    assert not np.any(out[empty]) and not np.any(dx[empty])


def test_other_layers_and_idle_slots_keep_the_bits_of_their_accumulators(solved):
    (_, _, before, *_), (*_, after) = solved
    for one, other in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        np.testing.assert_array_equal(one[:LAYER], other[:LAYER])
        np.testing.assert_array_equal(one[:, 3], other[:, 3])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 4, 16])
def test_the_mlp_of_llama_on_the_gpu(slots):
    owners = tuple(np.random.default_rng(slots).integers(-1, slots, 64))
    inputs = make_inputs(4096, 14336, owners, slots)
    wanted = jax.device_get(expected(inputs))
    found = jax.device_get(fused(*inputs))
    assert_close(found, wanted, owners)
    again = jax.device_get(fused(*inputs))
    for one, other in zip(*map(jax.tree.leaves, (found, again)), strict=True):
        np.testing.assert_array_equal(one, other)
