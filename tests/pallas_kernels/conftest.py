"""Fixtures for tests of Hopper kernels where there is no GPU: the interpreter and an abstract
H200."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

# The tests import `grouped_lora_cases` by its bare name.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def interpret() -> Iterator[None]:
    """Runs kernels in interpret mode; a test that uses this fixture fails if one has a data
    race."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert not gpu_callbacks.get_races().races_found


@pytest.fixture(scope="session")
def h200() -> jax.sharding.AbstractMesh:
    """A mesh of one H200; kernels can be lowered under it, but not run."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)


@pytest.fixture(scope="session")
def lowered(h200):
    """A function that lowers `function` for an H200 and returns the module as text.

    It raises an error if a kernel cannot be lowered or needs more shared memory than there is.
    """

    def lower(function, *shapes) -> str:
        with jax.sharding.use_abstract_mesh(h200):
            return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()

    return lower
