"""What tests of Hopper kernels need where there is no GPU: the interpreter, an abstract H200."""

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu


@pytest.fixture
def interpret():
    """Interpret mode; a test that uses it fails if a kernel has a data race."""
    yield plgpu.InterpretGPUParams(detect_races=True)
    assert not gpu_callbacks.get_races().races_found


@pytest.fixture
def h200() -> jax.sharding.AbstractMesh:
    """A mesh of one H200; kernels can be lowered under it, not run."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)


@pytest.fixture
def lowered(h200):
    """A function that lowers a function for an H200, giving the module; it raises where a kernel
    does not lower or asks for more shared memory than there is."""

    def lower(function, *shapes) -> str:
        with jax.sharding.use_abstract_mesh(h200):
            return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    return lower
