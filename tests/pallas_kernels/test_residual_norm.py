"""The residual norm: every implementation against the reference, the Hopper kernels in interpret
mode, and lowering of real shapes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.pallas_kernels.residual_norm import IMPLEMENTATIONS, mosaic_gpu, residual_norm
from jaxmux.pallas_kernels.residual_norm.kernels_sm90 import Tiling, normalize, stream_gradient

ROWS, EPS = 32, 1e-5
# Widths that are loaded in vectors of 2, 4 and 8 elements; the last needs four vectors a thread.
WIDTHS = (*(pytest.param(width, marks=pytest.mark.slow) for width in (256, 1280)), 1536, 4096)
TILING = Tiling(rows=2, stages=3, blocks=2)
# The last step has too few rows for all blocks; more stages than steps; more blocks than work.
TILINGS = (
    TILING,
    Tiling(rows=4, stages=2, blocks=3),
    Tiling(rows=8, stages=5, blocks=2),
    Tiling(rows=16, stages=2, blocks=3),
)


@pytest.fixture
def on_hopper(monkeypatch, interpret):
    """Lets the Hopper implementation serve calls on CPU, its kernels in interpret mode."""
    monkeypatch.setattr(mosaic_gpu, "is_hopper", lambda: True)


def normals(seed, *shapes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def operands(width, dtype=jnp.bfloat16):
    """A stream, a gradient of the returned stream, and a weight. The sizes of the rows range from
    those for which eps matters to large ones.
    """
    x, d_x, weight = normals(width, (ROWS, width), (ROWS, width), (width,), dtype=jnp.float32)
    size = jnp.logspace(-3, 1, ROWS)[:, None]
    return [array.astype(dtype) for array in (x * size, d_x * size, weight)]


def d_normed_along(x):
    """A gradient of the norm that is correlated with the stream, so that its mean term matters."""
    return (normals(2, x.shape)[0] + jnp.sign(x)).astype(x.dtype)


def rms_norm(x, weight, eps):
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normed.astype(x.dtype)


def gradient(x, weight, cotangents, implementation=None):
    def function(x):
        return residual_norm(x, weight, EPS, implementation)

    return jax.vjp(function, x)[1](cotangents)[0]


def exact_gradient(x, weight, cotangents):
    """The gradient of the reference, in float32."""
    return gradient(*jax.tree.map(jnp.float32, (x, weight, cotangents)), "xla")


def assert_rounded(result, exact, roundings: int):
    """Equal up to one unit in the last place for each rounding."""
    tolerance = roundings * float(jnp.finfo(result.dtype).eps)
    result, exact = (np.asarray(array, np.float32) for array in (result, exact))
    np.testing.assert_allclose(result, exact, rtol=tolerance, atol=tolerance)


def test_reference_has_the_bits_of_rms_norm_and_hands_its_input_through():
    x, d_x, weight = operands(256)
    cotangents = (d_x, d_normed_along(x))
    expected, vjp = jax.vjp(lambda x: (x, rms_norm(x, weight, EPS)), x)
    found = residual_norm(x, weight, EPS, "xla")
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(gradient(x, weight, cotangents, "xla"), *vjp(cotangents))


@pytest.mark.long
def test_weight_is_frozen(on_hopper):
    x, _, weight = operands(256)

    def total(weight, implementation):
        return residual_norm(x, weight, EPS, implementation)[1].astype(jnp.float32).sum()

    for implementation in IMPLEMENTATIONS:
        assert not np.any(jax.grad(total)(weight, implementation))


def assert_kernels_are_right(width, tiling):
    x, d_x, weight = operands(width)
    normed = normalize(x, weight, EPS, tiling=tiling)
    assert_rounded(normed, rms_norm(x, weight, EPS), roundings=2)
    d_normed = d_normed_along(x)
    dx = stream_gradient(x, d_normed, d_x, weight, EPS, tiling=tiling)
    assert_rounded(dx, exact_gradient(x, weight, (d_x, d_normed)), roundings=1)


@pytest.mark.long
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_is_rounded_as_the_reference_and_the_gradient_once(width, interpret):
    assert_kernels_are_right(width, TILING)


@pytest.mark.long
@pytest.mark.parametrize(
    "tiling",
    [pytest.param(own, marks=pytest.mark.slow if own == TILING else ()) for own in TILINGS],
    ids=str,
)
def test_every_row_is_served_once_whatever_the_tiling(tiling, interpret):
    assert_kernels_are_right(256, tiling)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.slow), jnp.float16])
def test_hopper_implementation_is_the_reference(dtype, on_hopper):
    x, d_x, weight = operands(512, dtype)
    stream, normed = residual_norm(x, weight, EPS)
    np.testing.assert_array_equal(stream, x)
    assert_rounded(normed, residual_norm(x, weight, EPS, "xla")[1], roundings=2)
    cotangents = (d_x, d_normed_along(x))
    dx = gradient(x, weight, cotangents)
    assert_rounded(dx, exact_gradient(x, weight, cotangents), roundings=1)


@pytest.mark.long
def test_nan_of_one_row_reaches_no_other(on_hopper):
    x, d_x, weight = operands(1024)
    rows = [3, 17, 18, 20]
    d_normed = d_normed_along(x).at[18, 0].set(jnp.nan)
    x = x.at[3, 5].set(jnp.nan).at[17, 1000].set(jnp.inf)
    d_x = d_x.at[20, 7].set(jnp.nan)
    for implementation in IMPLEMENTATIONS:
        _, normed = residual_norm(x, weight, EPS, implementation)
        dx = gradient(x, weight, (d_x, d_normed), implementation)
        for array, poisoned in ((normed, rows[:2]), (dx, rows)):
            broken = ~np.isfinite(np.asarray(array, np.float32)).all(axis=1)
            assert np.flatnonzero(broken).tolist() == poisoned


def test_errors_name_the_implementations():
    x, _, weight = operands(256)
    with pytest.raises(ValueError, match="unknown implementation 'cuda'.*mosaic_gpu, xla"):
        residual_norm(x, weight, EPS, "cuda")
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        residual_norm(x, weight, EPS, "mosaic_gpu")


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "weight_dtype", "reason"),
    [
        (32, 256, jnp.bfloat16, jnp.bfloat16, None),
        (32, 256, jnp.float32, jnp.float32, "float32"),
        (32, 256, jnp.bfloat16, jnp.float32, "weight float32"),
        (32, 300, jnp.bfloat16, jnp.bfloat16, "300 columns"),
        (32, 16384, jnp.bfloat16, jnp.bfloat16, "16384 columns"),
        (31, 256, jnp.bfloat16, jnp.bfloat16, "31 rows"),
    ],
)
def test_hopper_implementation_refuses_what_it_cannot_serve(
    rows, width, dtype, weight_dtype, reason, h200
):
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    weight = jax.ShapeDtypeStruct((width,), weight_dtype)
    with jax.sharding.use_abstract_mesh(h200):
        refusal = mosaic_gpu.refusal(x, weight)
    assert refusal is None if reason is None else reason in refusal


def test_tilings_that_do_not_fit_are_refused():
    x, _, weight = operands(256)
    for tiling in (TILING._replace(rows=3), TILING._replace(stages=1)):
        with pytest.raises(ValueError, match="32 rows of 256 columns"):
            normalize(x, weight, EPS, tiling=tiling)


@pytest.mark.parametrize(
    "width",
    [4096, *(pytest.param(width, marks=pytest.mark.slow) for width in (1024, 2304, 5120, 8192))],
)
def test_real_shapes_lower_to_one_kernel_each_way_and_no_addition(width, lowered):
    x = jax.ShapeDtypeStruct((8192, width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((width,), jnp.bfloat16)

    def both_ways(x, weight, cotangents):
        outputs, vjp = jax.vjp(lambda x: residual_norm(x, weight, EPS), x)
        return outputs, vjp(cotangents)

    forward = lowered(lambda x, weight: residual_norm(x, weight, EPS), x, weight)
    assert forward.count("custom_call @mosaic_gpu") == 1
    both = lowered(both_ways, x, weight, (x, x))
    assert both.count("custom_call @mosaic_gpu") == 2
    assert "stablehlo.add" not in both
