"""The residual norm: every implementation against the reference, the Hopper kernels in interpret
mode, and lowering of the real shapes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmux.models.layer import rms_norm
from jaxmux.pallas_kernels.residual_norm import IMPLEMENTATIONS, mosaic_gpu, residual_norm
from jaxmux.pallas_kernels.residual_norm.kernels_sm90 import (
    Tiling,
    add_and_normalize,
    normalize,
    stream_gradient,
)

ROWS, EPS = 32, 1e-5
# Widths of vectors of 2, 4 and 8 elements; the last is four times as wide as a warpgroup's vectors.
WIDTHS = (256, 1280, 1536, 4096)
TILING = Tiling(rows=2, stages=3, blocks=2)
# Ends of work: the last round is partial; there are more stages than steps; more blocks than work.
TILINGS = (
    TILING,
    Tiling(rows=4, stages=2, blocks=3),
    Tiling(rows=8, stages=5, blocks=2),
    Tiling(rows=16, stages=2, blocks=3),
)
H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
MESH = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=H200)


@pytest.fixture
def interpret():
    """Interpret mode; a test that uses it fails if a kernel has a data race."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert not gpu_callbacks.get_races().races_found


@pytest.fixture
def on_hopper(monkeypatch, interpret):
    """Lets the Hopper implementation serve calls here, its kernels in interpret mode."""
    monkeypatch.setattr(mosaic_gpu, "is_hopper", lambda: True)
    with plgpu.force_gpu_interpret_mode(interpret):
        yield


def normals(seed, *shapes, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def operands(width, dtype=jnp.bfloat16):
    """A stream and a branch, of rows so small that eps counts to large ones, and a weight."""
    x, branch, weight = normals(width, (ROWS, width), (ROWS, width), (width,), dtype=jnp.float32)
    size = jnp.logspace(-3, 1, ROWS)[:, None]
    return [array.astype(dtype) for array in (x * size, branch * size, weight)]


def d_normed_along(stream):
    """A gradient that has a component along the stream, as has that of a mean."""
    return (normals(2, stream.shape)[0] + jnp.sign(stream)).astype(stream.dtype)


def gradients(x, branch, weight, cotangents, implementation=None):
    def function(x, branch):
        return residual_norm(x, branch, weight, EPS, implementation)

    return jax.vjp(function, x, branch)[1](cotangents)


def exact_gradient(stream, weight, d_stream, d_normed):
    """In float32, by differentiating the reference."""
    wide = [array.astype(jnp.float32) for array in (stream, weight, d_stream, d_normed)]
    stream, weight, *cotangents = wide
    return gradients(stream, None, weight, tuple(cotangents), "xla")[0]


def assert_rounded(result, exact, roundings: int):
    """Equal but for as many last bits as there are roundings, and for what cancels."""
    tolerance = roundings * float(jnp.finfo(result.dtype).eps)
    result, exact = (np.asarray(array, np.float32) for array in (result, exact))
    np.testing.assert_allclose(result, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("with_branch", [True, False])
def test_reference_has_the_bits_of_addition_and_rms_norm(with_branch):
    x, branch, weight = operands(256)
    cotangents = tuple(normals(1, x.shape, x.shape))

    def separate(x, branch):
        stream = x if branch is None else x + branch
        return stream, rms_norm(stream, weight, EPS)

    branch = branch if with_branch else None
    expected, vjp = jax.vjp(separate, x, branch)
    jax.tree.map(np.testing.assert_array_equal, residual_norm(x, branch, weight, EPS), expected)
    found = gradients(x, branch, weight, cotangents)
    jax.tree.map(np.testing.assert_array_equal, found, vjp(cotangents))


def test_weight_is_frozen(on_hopper):
    x, branch, weight = operands(256)

    def total(weight, implementation):
        return residual_norm(x, branch, weight, EPS, implementation)[1].astype(jnp.float32).sum()

    for implementation in IMPLEMENTATIONS:
        assert not np.any(jax.grad(total)(weight, implementation))


@pytest.mark.parametrize("width", WIDTHS)
def test_sum_has_the_bits_of_an_addition_and_its_norm_is_rounded_as_the_reference(width, interpret):
    x, branch, weight = operands(width)
    stream, normed = add_and_normalize(x, branch, weight, EPS, tiling=TILING, interpret=interpret)
    alone = normalize(stream, weight, EPS, tiling=TILING, interpret=interpret)
    np.testing.assert_array_equal(stream, x + branch)
    for result in (normed, alone):
        assert_rounded(result, rms_norm(stream, weight, EPS), roundings=2)


@pytest.mark.parametrize("width", WIDTHS)
def test_gradient_is_that_of_the_reference_rounded_once(width, interpret):
    stream, d_stream, weight = operands(width)
    d_normed = d_normed_along(stream)
    result = stream_gradient(
        stream, d_normed, d_stream, weight, EPS, tiling=TILING, interpret=interpret
    )
    assert_rounded(result, exact_gradient(stream, weight, d_stream, d_normed), roundings=1)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_every_row_is_served_once_whatever_the_tiling(tiling, interpret):
    x, branch, weight = operands(256)
    stream, normed = add_and_normalize(x, branch, weight, EPS, tiling=tiling, interpret=interpret)
    np.testing.assert_array_equal(stream, x + branch)
    assert_rounded(normed, rms_norm(stream, weight, EPS), roundings=2)
    d_normed = d_normed_along(x)
    dx = stream_gradient(x, d_normed, branch, weight, EPS, tiling=tiling, interpret=interpret)
    assert_rounded(dx, exact_gradient(x, weight, branch, d_normed), roundings=1)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("with_branch", [True, False])
def test_hopper_implementation_is_the_reference(with_branch, dtype, on_hopper):
    x, branch, weight = operands(512, dtype)
    branch = branch if with_branch else None
    stream, normed = residual_norm(x, branch, weight, EPS)
    cotangents = (*normals(3, x.shape, dtype=dtype), d_normed_along(x))
    expected_stream, expected = residual_norm(x, branch, weight, EPS, "xla")
    np.testing.assert_array_equal(stream, expected_stream)
    assert_rounded(normed, expected, roundings=2)
    dx, d_branch = gradients(x, branch, weight, cotangents)
    assert_rounded(dx, exact_gradient(stream, weight, *cotangents), roundings=1)
    if with_branch:
        np.testing.assert_array_equal(dx, d_branch)


def test_nan_of_one_row_reaches_no_other(on_hopper):
    x, branch, weight = operands(1024)
    rows = [3, 17, 18]
    x = x.at[3, 5].set(jnp.nan)
    branch = branch.at[17, 1000].set(jnp.inf)
    d_stream, d_normed = normals(4, x.shape, x.shape)
    d_normed = d_normed.at[18, 0].set(jnp.nan)
    for implementation in IMPLEMENTATIONS:
        stream, normed = residual_norm(x, branch, weight, EPS, implementation)
        dx, _ = gradients(x, branch, weight, (d_stream, d_normed), implementation)
        for array, poisoned in ((stream, rows[:2]), (normed, rows[:2]), (dx, rows)):
            broken = ~np.isfinite(np.asarray(array, np.float32)).all(axis=1)
            assert np.flatnonzero(broken).tolist() == poisoned


def test_errors_name_the_implementations():
    x, branch, weight = operands(256)
    with pytest.raises(ValueError, match="unknown implementation 'cuda'.*mosaic_gpu, xla"):
        residual_norm(x, branch, weight, EPS, "cuda")
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        residual_norm(x, branch, weight, EPS, "mosaic_gpu")


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "weight_dtype", "reason"),
    [
        (32, 256, jnp.bfloat16, jnp.bfloat16, None),
        (32, 256, jnp.float32, jnp.float32, "float32"),
        (32, 256, jnp.bfloat16, jnp.float32, "branch and weight"),
        (32, 300, jnp.bfloat16, jnp.bfloat16, "300 columns"),
        (32, 16384, jnp.bfloat16, jnp.bfloat16, "16384 columns"),
        (31, 256, jnp.bfloat16, jnp.bfloat16, "31 rows"),
    ],
)
def test_hopper_implementation_refuses_what_it_cannot_serve(
    rows, width, dtype, weight_dtype, reason
):
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    weight = jax.ShapeDtypeStruct((width,), weight_dtype)
    with jax.sharding.use_abstract_mesh(MESH):
        refusal = mosaic_gpu.refusal(x, x, weight)
    assert refusal is None if reason is None else reason in refusal


def test_tilings_that_do_not_fit_are_refused():
    x, _, weight = operands(256)
    for tiling in (TILING._replace(rows=3), TILING._replace(stages=1)):
        with pytest.raises(ValueError, match="32 rows of 256 columns"):
            normalize(x, weight, EPS, tiling=tiling)


def lowered(function, *shapes) -> str:
    """The module for an H200, made without one; raises where a kernel does not lower."""
    with jax.sharding.use_abstract_mesh(MESH):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("width", [1024, 2048, 2304, 3584, 4096, 5120, 8192])
def test_real_shapes_lower_to_one_kernel_each_way(width):
    stream = jax.ShapeDtypeStruct((8192, width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((width,), jnp.bfloat16)
    arrays = (stream, stream, weight)
    forward = partial(residual_norm, eps=EPS)
    assert lowered(forward, *arrays).count("custom_call @mosaic_gpu") == 1
    assert lowered(lambda x, w: forward(x, None, w), stream, weight).count("@mosaic_gpu") == 1

    def backward(x, branch, weight, cotangents):
        return gradients(x, branch, weight, cotangents, "mosaic_gpu")

    assert lowered(backward, *arrays, (stream, stream)).count("custom_call @mosaic_gpu") == 2
