"""The interpreter in which kernels are tested finds data races."""

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SIZE = 128


@pytest.mark.parametrize("waits", [True, False])
def test_a_warpgroup_that_does_not_wait_for_another_is_found(waits):
    def body(out, shared, barrier):
        warpgroup = jax.lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def write():
            shared[...] = jnp.ones(SIZE)
            if waits:
                plgpu.barrier_arrive(barrier)

        @pl.when(warpgroup == 1)
        def read():
            if waits:
                plgpu.barrier_wait(barrier)
            out[...] = shared[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((SIZE,), jnp.float32),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((SIZE,), jnp.float32), plgpu.Barrier()],
    )
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        jax.block_until_ready(kernel())
    assert gpu_callbacks.get_races().races_found == (not waits)
