"""The RMS norm of a residual stream and the stream's gradient, for Hopper GPUs.

The kernels are limited by memory bandwidth. Blocks of whole rows pass through stages in shared
memory, which bulk copies fill and empty. The single warpgroup of a thread block computes on a block
of rows in registers, with each row distributed over all threads. The result overwrites its input,
so that shared memory holds as many loads in flight as possible.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from .. import plgpu
from ..compilation import traced_once

WARPGROUP = 128


class Tiling(NamedTuple):
    """Sizes of a kernel.

    Attributes:
      rows: number of rows in a block, a divisor of N.
      stages: number of blocks of rows that a thread block has in flight, at least 2.
      blocks: number of thread blocks to launch, at most as many as run at the same time.
    """

    rows: int
    stages: int
    blocks: int


@traced_once("eps", "tiling")
def normalize(
    stream: Float[Array, "N d"],
    weight: Float[Array, " d"],
    eps: float,
    *,
    tiling: Tiling,
) -> Float[Array, "N d"]:
    """The RMS norm of `api.residual_norm`, in half precision; d is a multiple of 256. `weight` has
    the dtype of `stream`. ValueError if the tiling does not divide the rows, or has fewer than 2
    stages."""

    def norm(weight, stream):
        wide = stream.astype(jnp.float32)
        normed = wide * _across(_rstd(wide, eps), wide.shape, 0)
        return _across(weight, wide.shape, 1) * normed.astype(stream.dtype)

    return _map_rows(norm, "normalize", (stream,), weight, tiling)


@traced_once("eps", "tiling")
def stream_gradient(
    stream: Float[Array, "N d"],
    d_normed: Float[Array, "N d"],
    d_stream: Float[Array, "N d"],
    weight: Float[Array, " d"],
    eps: float,
    *,
    tiling: Tiling,
) -> Float[Array, "N d"]:
    """The gradient of the stream: `d_stream` plus the gradient through the norm, rounded once.

    With `rstd = 1 / sqrt(mean(stream^2) + eps)`, `y = stream rstd` and `n = weight d_normed`, it is
    `rstd (n - y mean(n y)) + d_stream`.

    `stream` is the norm's input and `d_normed` the gradient of its output; `d_stream` is the
    gradient of the stream that the norm returned. All are in one half-precision dtype; d is a
    multiple of 256. ValueError as for `normalize`.
    """

    def gradient(weight, stream, d_normed, d_stream):
        s = stream.astype(jnp.float32)
        n = _across(weight.astype(jnp.float32), s.shape, 1) * d_normed.astype(jnp.float32)
        rstd = _rstd(s, eps)
        # The stream is multiplied by mean(n y) rstd.
        factor = rstd * rstd * _mean(n * s)
        rstd, factor = (_across(each, s.shape, 0) for each in (rstd, factor))
        return (rstd * (n - factor * s) + d_stream.astype(jnp.float32)).astype(stream.dtype)

    inputs = (stream, d_normed, d_stream)
    return _map_rows(gradient, "stream_gradient", inputs, weight, tiling)


def _rstd(wide, eps):
    return lax.rsqrt(_mean(wide * wide) + eps)


def _mean(wide):
    return jnp.sum(wide, axis=1) * (1 / wide.shape[1])


def _across(values, shape, axis: int):
    return lax.broadcast_in_dim(values, shape, (axis,))


def _map_rows(function, name: str, inputs, weight, tiling: Tiling):
    """Applies `function(weight, *inputs)` to all blocks of rows; its inputs and its result are
    [rows, d] arrays in registers."""
    rows, width = inputs[0].shape
    dtype = inputs[0].dtype
    if rows % tiling.rows or width % (2 * WARPGROUP) or tiling.stages < 2:
        raise ValueError(
            f"{rows} rows of {width} columns; expected a multiple of {tiling.rows} rows and of 256 "
            f"columns, and at least 2 stages, not {tiling.stages}"
        )

    def body(arrays, weight_gmem, result, blocks, loaded):
        layout = _row_layout(width)
        weight = plgpu.load(weight_gmem, layout=layout.reduce(0), optimized=False)

        def apply(stage):
            values = [plgpu.load(smem.at[stage], layout=layout) for smem in blocks]
            blocks[0].at[stage][...] = function(weight, *values)

        _pass_through(arrays, result, blocks, loaded, tiling, apply)

    block = plgpu.SMEM((tiling.stages, tiling.rows, width), dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(tiling.blocks,),
        grid_names=("block",),
        scratch_types={
            "blocks": [block] * len(inputs),
            "loaded": plgpu.Barrier(num_arrivals=len(inputs), num_barriers=tiling.stages),
        },
        kernel_name=name,
    )(inputs, weight)


def _pass_through(inputs, output, blocks, loaded, tiling: Tiling, apply):
    """Passes this thread block's share of the rows through the stages in shared memory. `blocks`
    has the stages of each input. `apply(stage)` is called when a stage has been filled from all
    inputs. It overwrites the first input's block, which is then copied to `output`."""
    first, stages = lax.axis_index("block"), jnp.int32(tiling.stages)
    total = inputs[0].shape[0] // tiling.rows
    steps = lax.div(total - first + tiling.blocks - 1, jnp.int32(tiling.blocks))

    def rows(step):
        return pl.ds((first + step * tiling.blocks) * tiling.rows, tiling.rows)

    def load(step, stage):
        @pl.when(step < steps)
        def _():
            for array, smem in zip(inputs, blocks, strict=True):
                plgpu.copy_gmem_to_smem(
                    array.at[rows(step)],
                    smem.at[stage],
                    loaded.at[stage],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

    for i in range(tiling.stages):
        load(jnp.int32(i), i)

    @pl.loop(0, steps)
    def _step(step):
        stage = lax.rem(step, stages)
        plgpu.barrier_wait(loaded.at[stage])
        apply(stage)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(blocks[0].at[stage], output.at[rows(step)])
        # Waits for the previous step's store, so that the next load may overwrite its stage.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(step > 0)
        def _():
            load(step - 1 + stages, lax.rem(step - 1, stages))

    plgpu.wait_smem_to_gmem(0)


def _row_layout(width: int):
    """Distributes every row over all threads of a warpgroup, in vectors of the largest size that
    divides the row, at most 16 bytes."""
    vector = next(v for v in (8, 4, 2) if width % (WARPGROUP * v) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, WARPGROUP * vector), (WARPGROUP // 4 * vector,), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
