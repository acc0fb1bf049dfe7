"""A frozen weight multiplies in both directions, is a pytree, and names unknown formats."""

import functools
from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_cases import (
    MIXED_RATES,
    Case,
    abstract,
    assert_same_bits,
    differentiate,
    interpreted_on_hopper,
    make_case,
    normals,
    pairs,
    poisoned,
    relative_error,
    with_residual,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmux.pallas_kernels.frozen_weight import PLAIN_FORMATS, FrozenWeight, plain_weights
from jaxmux.pallas_kernels.grouped_lora import grouped_lora_linear, mosaic_gpu, triton
from jaxmux.pallas_kernels.number_formats import quantised_rows, row_scales

LAYERS, K, N = 3, 12, 7
KNOWN = "known: bfloat16, float16, float32, float8, int8, nf4"
ENCODED = (pytest.param("int8", marks=pytest.mark.slow), "nf4")


def stack(dtype=jnp.float32) -> FrozenWeight:
    return FrozenWeight.of(normals(np.random.default_rng(0), LAYERS, K, N, dtype=dtype))


def activation(width: int, dtype=jnp.float32):
    return normals(np.random.default_rng(1), 5, width, dtype=dtype)


def in_unknown_format(weight: FrozenWeight) -> FrozenWeight:
    return FrozenWeight(weight.values, jnp.ones(()), "fp3")


def assert_close(found, wanted):
    tolerance = 4 * float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(np.float64(found), wanted, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", PLAIN_FORMATS)
def test_products_are_those_of_the_stored_values(dtype):
    weight, x, dy = stack(dtype).at_layer(1), activation(K, dtype), activation(N, dtype)
    values = np.float64(weight.values)
    y, dx = weight.matmul(x), weight.matmul_transposed(dy)
    assert weight.format == y.dtype == dx.dtype == dtype
    assert_close(y, np.float64(x) @ values)
    assert_close(dx, np.float64(dy) @ values.T)


def test_leading_axes_of_an_activation_are_kept():
    weight, x = stack().at_layer(0), activation(K)
    np.testing.assert_array_equal(weight.matmul(x[None, :, None])[0, :, 0], weight.matmul(x))
    dy = activation(N)
    transposed = weight.matmul_transposed
    np.testing.assert_array_equal(transposed(dy[None, :, None])[0, :, 0], transposed(dy))


def test_the_transposed_product_is_the_gradient_of_the_product():
    weight, x, dy = stack().at_layer(2), activation(K), activation(N)
    _, vjp = jax.vjp(weight.matmul, x)
    np.testing.assert_allclose(vjp(dy)[0], weight.matmul_transposed(dy), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", PLAIN_FORMATS)
def test_results_are_in_the_compute_dtype_whatever_the_format(dtype):
    weight = stack().at_layer(0)
    assert weight.matmul(activation(K, dtype)).dtype == dtype
    assert weight.matmul_transposed(activation(N, dtype)).dtype == dtype


def test_a_wider_result_is_not_rounded_to_the_compute_dtype():
    weight, x = stack(jnp.bfloat16).at_layer(0), activation(K, jnp.bfloat16)
    y = weight.matmul(x, jnp.float32)
    assert y.dtype == jnp.float32
    assert_close(y, np.float64(x) @ np.float64(weight.values))


def test_shape_and_sizes_are_those_of_the_matrix():
    weight = stack()
    assert (weight.shape, weight.at_layer(0).shape) == ((LAYERS, K, N), (K, N))
    assert (weight.input_size, weight.output_size) == (K, N)


def test_a_scan_over_a_stack_and_an_unrolled_loop_see_the_same_layers():
    weight, x = stack(), activation(K)

    def scanned(weight, x):
        return jax.lax.scan(lambda x, layer: (x, layer.matmul(x)), x, weight)[1]

    def indexed(weight, x):
        def step(x, layer):
            return x, weight.at_layer(layer).matmul(x)

        return jax.lax.scan(step, x, jnp.arange(LAYERS))[1]

    unrolled = [weight.at_layer(layer).matmul(x) for layer in range(LAYERS)]
    np.testing.assert_allclose(jax.jit(scanned)(weight, x), unrolled, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.jit(indexed)(weight, x), unrolled, rtol=1e-6, atol=1e-6)


def test_values_are_the_only_leaf_and_the_format_is_static():
    weight = stack(jnp.bfloat16)
    leaves, structure = jax.tree.flatten(weight)
    assert len(leaves) == 1 and leaves[0] is weight.values
    assert jax.tree.unflatten(structure, leaves).format == "bfloat16"
    assert structure != jax.tree.structure(stack())


def test_abstract_weights_have_a_format_and_a_dtype_for_each_leaf():
    weight = jax.eval_shape(lambda: stack(jnp.float16))
    assert weight.format == "float16"
    assert weight.values == abstract(LAYERS, K, N, dtype=jnp.float16)


def test_a_cast_changes_values_and_format():
    weight = stack()
    half = weight.astype(jnp.bfloat16)
    assert half.format == "bfloat16"
    np.testing.assert_array_equal(half.values, weight.values.astype(jnp.bfloat16))


def test_values_of_an_unknown_dtype_are_refused_by_name():
    with pytest.raises(
        ValueError, match="stored as float8_e4m3fn; known: bfloat16, float16, float32"
    ):
        FrozenWeight.of(stack().values.astype(jnp.float8_e4m3fn))


@pytest.mark.parametrize(
    "product",
    [lambda w: w.matmul(activation(K)), lambda w: w.matmul_transposed(activation(N))],
    ids=["matmul", "matmul_transposed"],
)
def test_products_of_an_unknown_format_are_refused_by_name(product):
    weight = in_unknown_format(stack().at_layer(0))
    with pytest.raises(ValueError, match=f"unknown weight format 'fp3'; {KNOWN}"):
        product(weight)


def half_precision_case():
    return make_case(
        k=256, widths=(256,), rank=16, chunk_slot=(0,), chunk_len=128, dtype=jnp.bfloat16
    )


def in_unknown_projections(case):
    (projection,) = case.projections
    return (projection._replace(weight=in_unknown_format(projection.weight)),)


def test_no_implementation_serves_an_unknown_format():
    case = half_precision_case()
    with pytest.raises(ValueError, match=f"unknown weight format 'fp3'; {KNOWN}"):
        grouped_lora_linear(case.x, in_unknown_projections(case), None, case.routing, None, 0, (0,))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_kernels_refuse_a_format_that_is_not_the_streams(dtype, h200, monkeypatch):
    monkeypatch.setattr(triton, "find_spec", lambda name: name)
    monkeypatch.setattr(triton, "compute_capability", lambda device: 90)
    case = half_precision_case()
    (projection,) = case.projections
    other = (projection._replace(weight=projection.weight.astype(dtype)),)
    with jax.sharding.use_abstract_mesh(h200):
        assert mosaic_gpu.refusal(case.x, case.projections, case.routing, None) is None
        reason = mosaic_gpu.refusal(case.x, other, case.routing, None)
    name = jnp.dtype(dtype).name
    assert reason == f"x is bfloat16, weights are stored as {name}"
    reason = triton.refusal(case.x, other, case.routing, None)
    assert reason == f"weight stored as {name} for a stream of bfloat16"


def encoded(format: str, layers: int = LAYERS) -> FrozenWeight:
    values = normals(np.random.default_rng(0), layers, 64, 16, dtype=jnp.float32)
    return FrozenWeight.encoded(values, format)


@pytest.mark.long
@pytest.mark.parametrize("format", ENCODED)
def test_products_with_encoded_weights_are_those_of_the_decoded_weights(format):
    weight, x, dy = encoded(format).at_layer(1), activation(64), activation(16)
    plain = FrozenWeight.of(weight.decoded())
    assert weight.shape == plain.shape
    np.testing.assert_array_equal(weight.matmul(x), plain.matmul(x))
    np.testing.assert_array_equal(weight.matmul_transposed(dy), plain.matmul_transposed(dy))
    y, vjp = jax.vjp(weight.matmul, x)
    np.testing.assert_array_equal(y, plain.matmul(x))
    np.testing.assert_array_equal(vjp(dy)[0], plain.matmul_transposed(dy))


@pytest.mark.long
@pytest.mark.parametrize("format", ENCODED)
def test_kernels_get_one_decoded_layer_in_the_dtype_of_the_stream(format):
    weight, other = encoded(format), stack(jnp.bfloat16)
    x = activation(64, jnp.bfloat16)
    same, (found, kept) = plain_weights(x, (weight, other), 2)
    np.testing.assert_array_equal(same, x)
    assert kept is other
    assert (found.format, found.shape) == ("bfloat16", (1, 64, 16))
    np.testing.assert_array_equal(found.at_layer(2).values, weight.at_layer(2).decoded(x.dtype))


@pytest.mark.long
@pytest.mark.parametrize("format", ENCODED)
def test_decoded_weights_are_not_kept_from_the_forward_to_the_backward_pass(format):
    def temporaries(layers: int) -> int:
        def loss(x, weight):
            for layer in range(layers):
                x = jnp.tanh(weight.matmul(x, layer=layer))
            return x.sum()

        size = 512
        weight = jax.eval_shape(
            lambda: FrozenWeight.encoded(jnp.zeros((layers, size, size)), format)
        )
        compiled = jax.jit(jax.grad(loss)).lower(abstract(8, size), weight).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # A decoded layer has 1 MiB, an activation 16 KiB.
    assert temporaries(6) - temporaries(3) < 2**19


def test_weights_that_a_format_cannot_store_are_refused():
    with pytest.raises(ValueError, match="'nf4'; its rows have to be a multiple of 2"):
        FrozenWeight.encoded(jnp.ones((3, 4)), "nf4")
    with pytest.raises(ValueError, match=f"unknown weight format 'fp3'; {KNOWN}"):
        FrozenWeight.encoded(stack().values, "fp3")


@pytest.mark.long
@pytest.mark.parametrize(
    ("format", "implementation"),
    [
        pytest.param("int8", "xla", marks=pytest.mark.slow),
        ("nf4", "xla"),
        # All implementations get their weights from `plain_weights`.
        pytest.param("nf4", "mosaic_gpu", marks=pytest.mark.slow),
    ],
)
def test_a_linear_with_adapters_is_that_of_the_decoded_weights(format, implementation):
    case = half_precision_case()
    (projection,) = case.projections
    weight = FrozenWeight.encoded(projection.weight.values, format)
    results = []
    for own in (weight, weight.astype(jnp.bfloat16)):
        changed = case._replace(projections=(projection._replace(weight=own),))
        with interpreted_on_hopper() if implementation == "mosaic_gpu" else nullcontext():
            results.append(by(implementation, changed))
    assert_same_bits(*results)


@pytest.mark.long
def test_products_in_float8_are_those_of_encoded_activations():
    weight, x, dy = encoded("float8").at_layer(1), activation(64), activation(16)

    def rows(x):
        """What the codes of rows stand for."""
        scales = row_scales(x)
        return np.float64(quantised_rows(x, scales)) * np.float64(scales)[:, None]

    decoded = np.float64(weight.decoded())
    assert_close(weight.matmul(x), rows(x) @ decoded)
    codes = decoded / np.float64(weight.scales)
    assert_close(weight.matmul_transposed(dy), rows(dy * weight.scales) @ codes.T)
    y, vjp = jax.vjp(weight.matmul, x)
    np.testing.assert_array_equal(y, weight.matmul(x))
    np.testing.assert_array_equal(vjp(dy)[0], weight.matmul_transposed(dy))
    # They are close to those of the weights that were encoded.
    plain = FrozenWeight.of(normals(np.random.default_rng(0), LAYERS, 64, 16, dtype=jnp.float32))
    error = relative_error(weight.matmul(x), plain.at_layer(1).matmul(x))
    assert 0.01 < error < 0.05


@functools.cache
def float8_case(rates=None) -> Case:
    case = make_case(
        k=256,
        widths=(512, 256),
        rank=16,
        chunk_slot=(0, 2, -1),
        chunk_len=128,
        rates=rates,
        dtype=jnp.bfloat16,
        deviation=0.1,
    )
    projections = (
        p._replace(weight=FrozenWeight.encoded(p.weight.values, "float8")) for p in case.projections
    )
    return case._replace(projections=tuple(projections))


@pytest.fixture
def float8_kernels(monkeypatch):
    """Runs the Hopper kernels in the interpreter. It cannot tell stages of an array apart that
    shares its place with another one, so it does not look for data races; how stages are passed on
    is the same for other dtypes, whose tests do."""
    monkeypatch.setattr(mosaic_gpu, "is_hopper", lambda: True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@partial(jax.jit, static_argnums=0)
def differentiate_by(implementation: str, case: Case):
    return differentiate(case, 1, implementation=implementation)


def by(implementation: str, case: Case):
    return jax.block_until_ready(differentiate_by(implementation, case))


# The MLP of test_gated_mlp.py has two projections and a residual, too.
@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(partial(float8_case, MIXED_RATES), id="two projections with dropout"),
        pytest.param(lambda: with_residual(float8_case()), id="a residual"),
    ],
)
def test_float8_kernels_compute_what_plain_xla_computes(case, float8_kernels):
    case = case()
    found, wanted = by("mosaic_gpu", case), by("xla", case)
    empty = case.is_owned_by(-1)
    assert not any(np.any(y[empty]) for y in (*found.outputs, found.dx))
    # The gradient of the residual is undefined there.
    found, wanted = (
        each._replace(d_residual=None if case.residual is None else each.d_residual[~empty])
        for each in (found, wanted)
    )
    for one, other in pairs(found, wanted):
        assert relative_error(one, other) < 5e-3


@pytest.mark.long
@pytest.mark.parametrize("value", [1e4, np.nan])
@pytest.mark.parametrize("where", ["x", "cotangents"])
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]
)
def test_values_of_a_task_change_no_bit_of_another_in_float8(implementation, where, value):
    case = float8_case()
    other = poisoned(case, where, 2, value)
    one, changed = by(implementation, case), by(implementation, other)
    own = case.is_owned_by(0)
    for x, y in pairs((one.outputs, one.dx), (changed.outputs, changed.dx)):
        np.testing.assert_array_equal(x[own], y[own])
    for x, y in pairs(one.accumulators, changed.accumulators):
        np.testing.assert_array_equal(x[:, 0], y[:, 0])
