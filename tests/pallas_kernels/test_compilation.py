"""Kernels are lowered once and can be compiled by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels.compilation import alone, compiled, kernels_of
from jaxmux.pallas_kernels.grouped_lora import Factors, Projection, Routing, grouped_lora_linear
from jaxmux.pallas_kernels.residual_norm import residual_norm

LAYERS, TOKENS, WIDTH, RANK = 3, 256, 256, 16


@pytest.fixture
def program(h200):
    """Layers of a norm and two linears of the same shape, and their gradients, for an H200."""

    def shape(*dimensions, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dimensions, dtype)

    def layers(x, weight, projections, sums, routing):
        for layer in range(LAYERS):
            x, h = residual_norm(x, weight, 1e-5, "mosaic_gpu")
            for p in range(2):
                (h,), (sums[p],) = grouped_lora_linear(
                    h, (projections[p],), (sums[p],), routing, None, layer, (p,), "mosaic_gpu"
                )
            x = x + h
        return x, sums

    def both(x, weight, projections, sums, routing):
        # Under an abstract mesh, arguments are of another type than what is computed from them.
        out, backward = jax.vjp(
            lambda x, sums: layers(x, weight, projections, sums, routing), 2 * x, sums
        )
        return backward(out)

    factors = Factors(
        shape(LAYERS, 2, WIDTH, RANK, dtype=jnp.float32),
        shape(LAYERS, 2, RANK, WIDTH, dtype=jnp.float32),
    )
    arguments = (
        shape(TOKENS, WIDTH),
        shape(WIDTH),
        [Projection(shape(LAYERS, WIDTH, WIDTH), factors)] * 2,
        [factors] * 2,
        Routing(shape(2, dtype=jnp.int32), shape(2, dtype=jnp.float32)),
    )
    with jax.sharding.use_abstract_mesh(h200):
        return jax.jit(both).trace(*arguments).lower(lowering_platforms=("cuda",))


def test_equal_calls_are_lowered_once(program):
    # The norm and its gradient; factors; s and ds, whose shapes are the same; y and dx; dA and dB.
    assert len(kernels_of(program)) == 7


def test_a_kernel_alone_is_the_same_kernel(program):
    for kernel in kernels_of(program):
        lowered = alone.trace(kernel).lower(lowering_platforms=("cuda",))
        assert kernels_of(lowered) == [kernel]


def test_a_function_that_was_lowered_is_not_compiled_again(caplog):
    function = jax.jit(lambda n, x, y: x + n * y, static_argnums=0, donate_argnums=1)
    x, y = jnp.zeros(3), np.ones(3, np.float32)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        compiled(function.lower(2, x, y))
        assert "Finished XLA compilation" in caplog.text
        caplog.clear()
        function(2, x, y)
    assert "Finished XLA compilation" not in caplog.text
