"""Each kernel of a program is lowered once, and can be compiled alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import abstract, make_case

from jaxmux.pallas_kernels.compilation import alone, compiled, kernels_of
from jaxmux.pallas_kernels.grouped_lora import grouped_lora_linear
from jaxmux.pallas_kernels.residual_norm import residual_norm

LAYERS, WIDTH = 3, 256


@pytest.fixture(scope="module")
def program(h200):
    """Layers of a norm and two linears of the same shape, and their gradients, lowered for an
    H200."""
    case = make_case(
        k=WIDTH,
        widths=(WIDTH, WIDTH),
        rank=16,
        chunk_slot=(0, 1),
        chunk_len=128,
        layers=LAYERS,
        slots=2,
        dtype=jnp.bfloat16,
    )

    def layers(case, x, weight, accumulators):
        accumulators = list(accumulators)
        for layer in range(LAYERS):
            x, h = residual_norm(x, weight, 1e-5, "mosaic_gpu")
            for p, projection in enumerate(case.projections):
                (h,), (accumulators[p],) = grouped_lora_linear(
                    h,
                    (projection,),
                    (accumulators[p],),
                    case.routing,
                    None,
                    layer,
                    (p,),
                    "mosaic_gpu",
                )
            x = x + h
        return x, accumulators

    def both(case, weight):
        # Under an abstract mesh, the type of an argument differs from that of a computed value, so
        # that a norm of `x` and of `2 x` would be lowered separately.
        out, vjp = jax.vjp(
            lambda x, accumulators: layers(case, x, weight, accumulators),
            2 * case.x,
            case.accumulators,
        )
        return vjp(out)

    arguments = jax.tree.map(lambda x: abstract(*x.shape, dtype=x.dtype), case)
    with jax.sharding.use_abstract_mesh(h200):
        traced = jax.jit(both).trace(arguments, abstract(WIDTH))
        return traced.lower(lowering_platforms=("cuda",))


@pytest.mark.long
def test_equal_calls_are_lowered_once(program):
    # The norm and its gradient; the factors; s and ds, which have the same shapes; y; dx; and one
    # for dA and dB.
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
