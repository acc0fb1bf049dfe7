"""The RMS norm at a residual stream, and the stream's gradient, at the speed of memory, for Hopper.

Blocks of whole rows pass through a ring of buffers in shared memory: bulk copies fill and empty it,
one warpgroup a thread block works on a block of rows in registers, each row spread over all its
threads. What leaves a block of rows takes the place of what came in, so that shared memory holds
little but loads in flight; their number, not arithmetic, sets the pace.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from ..compilation import traced_once

WARPGROUP = 128


class Tiling(NamedTuple):
    """Sizes of a kernel.

    Attributes:
      rows: rows of a block, a divisor of N.
      stages: blocks of rows in flight, at least 2; a thread block's buffers hold as many.
      blocks: thread blocks to launch, at most as many as run at the same time.
    """

    rows: int
    stages: int
    blocks: int


@traced_once("eps", "tiling", "interpret")
def normalize(
    stream: Float[Array, "N d"],
    weight: Float[Array, "d"],
    eps: float,
    *,
    tiling: Tiling,
    interpret: Any = None,
) -> Float[Array, "N d"]:
    """The RMS norm.

    Args:
      stream: in half precision, d a multiple of 256.
      weight: in the dtype of `stream`.
      interpret: see `plgpu.kernel`.
    """

    def norm(weight, stream):
        wide = stream.astype(jnp.float32)
        normed = wide * _across(_rstd(wide, eps), wide.shape, 0)
        return _across(weight, wide.shape, 1) * normed.astype(stream.dtype)

    return _map_rows(norm, "normalize", (stream,), weight, tiling, interpret)


@traced_once("eps", "tiling", "interpret")
def stream_gradient(
    stream: Float[Array, "N d"],
    d_normed: Float[Array, "N d"],
    d_stream: Float[Array, "N d"],
    weight: Float[Array, "d"],
    eps: float,
    *,
    tiling: Tiling,
    interpret: Any = None,
) -> Float[Array, "N d"]:
    """`d_stream` plus what `d_normed` sends back through the norm, rounded once.

    With `y = stream rstd` and `n = weight d_normed` that is `rstd (n - y mean(n y)) + d_stream`.
    Arguments as in `normalize`.
    """

    def gradient(weight, stream, d_normed, d_stream):
        s = stream.astype(jnp.float32)
        n = _across(weight.astype(jnp.float32), s.shape, 1) * d_normed.astype(jnp.float32)
        rstd = _rstd(s, eps)
        # mean(n y) rstd, the factor of the stream itself.
        factor = rstd * rstd * _mean(n * s)
        rstd, factor = (_across(each, s.shape, 0) for each in (rstd, factor))
        return (rstd * (n - factor * s) + d_stream.astype(jnp.float32)).astype(stream.dtype)

    inputs = (stream, d_normed, d_stream)
    return _map_rows(gradient, "stream_gradient", inputs, weight, tiling, interpret)


def _rstd(wide, eps):
    return lax.rsqrt(_mean(wide * wide) + eps)


def _mean(wide):
    return jnp.sum(wide, axis=1) * (1 / wide.shape[1])


def _across(values, shape, axis: int):
    """Values of every row (axis 0) or column (axis 1), repeated along the other axis."""
    return lax.broadcast_in_dim(values, shape, (axis,))


def _map_rows(function, name: str, inputs, weight, tiling: Tiling, interpret):
    """Applies `function(weight, *inputs)`, which maps `[rows, d]` arrays in registers to one of
    that shape, to all blocks of rows.
    """
    rows, width = inputs[0].shape
    dtype = inputs[0].dtype
    if rows % tiling.rows or width % (2 * WARPGROUP) or tiling.stages < 2:
        raise ValueError(
            f"{rows} rows of {width} columns; expected a multiple of {tiling.rows} rows and of 256 "
            f"columns, and at least 2 stages, not {tiling.stages}"
        )

    def body(arrays, weight_gmem, result, buffers, loaded):
        layout = _row_layout(width)
        weight = plgpu.load(weight_gmem, layout=layout.reduce(0), optimized=False)

        def apply(slot):
            values = [plgpu.load(buffer.at[slot], layout=layout) for buffer in buffers]
            buffers[0].at[slot][...] = function(weight, *values)

        _pass_through(arrays, result, buffers, loaded, tiling, apply)

    block = plgpu.SMEM((tiling.stages, tiling.rows, width), dtype)
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), dtype),
        grid=(tiling.blocks,),
        grid_names=("block",),
        scratch_types={
            "buffers": [block] * len(inputs),
            "loaded": plgpu.Barrier(num_arrivals=len(inputs), num_barriers=tiling.stages),
        },
        kernel_name=name,
        interpret=interpret,
    )(inputs, weight)


def _pass_through(inputs, output, buffers, loaded, tiling: Tiling, apply):
    """Passes this thread block's share of the rows through the buffers; `apply(slot)` is called
    with every slot that was filled from the inputs, and leaves in the first buffer's what the
    output gets.
    """
    first, stages = lax.axis_index("block"), jnp.int32(tiling.stages)
    total = inputs[0].shape[0] // tiling.rows
    steps = lax.div(total - first + tiling.blocks - 1, jnp.int32(tiling.blocks))

    def rows(step):
        return pl.ds((first + step * tiling.blocks) * tiling.rows, tiling.rows)

    def load(step, slot):
        @pl.when(step < steps)
        def _():
            for array, buffer in zip(inputs, buffers, strict=True):
                plgpu.copy_gmem_to_smem(
                    array.at[rows(step)],
                    buffer.at[slot],
                    loaded.at[slot],
                    oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
                )

    for i in range(tiling.stages):
        load(jnp.int32(i), i)

    @pl.loop(0, steps)
    def _step(step):
        slot = lax.rem(step, stages)
        plgpu.barrier_wait(loaded.at[slot])
        apply(slot)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffers[0].at[slot], output.at[rows(step)])
        # The stores of the step before had time to leave its slot, which the next load may take.
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        @pl.when(step > 0)
        def _():
            load(step - 1 + stages, lax.rem(step - 1, stages))

    plgpu.wait_smem_to_gmem(0)


def _row_layout(width: int):
    """Every row over all threads of a warpgroup, in the widest vectors that divide it, of at most
    16 bytes.
    """
    vector = next(v for v in (8, 4, 2) if width % (WARPGROUP * v) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((1, WARPGROUP * vector), (WARPGROUP // 4 * vector,), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
