"""Rows of one or several arrays encoded in float8 with one scale for each row, for Hopper GPUs.

The kernel is limited by memory bandwidth. It reads the arrays once, 2 bytes for each number, and
writes a byte for each number and 4 for each row. Thread blocks take rows in turns. A row stays in
shared memory while it is read from there twice: to find its largest magnitude, and to be encoded.
Each warpgroup of a thread block has a share of the columns of every array, with separate stages,
loads and stores. Warpgroups, and their warps, exchange only the largest magnitudes of their shares.

Every thread block reads the folds once and keeps them in registers. If rows are too wide for that,
it reads them twice for each row: 8 more bytes for each number, mostly from the L2 cache.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from .. import plgpu
from ..compilation import traced_once
from ..number_formats import scales_of_largest
from .tiles_sm90 import load_unoptimized, warpgroups

WARPS, LANES = 4, 32
# Most columns of a row for each thread with which the folds fit into registers, beside the other
# values of four warpgroups on a multiprocessor.
COLUMNS_OF_THREAD = 56


class Tiling(NamedTuple):
    """Sizes of the kernel.

    Attributes:
      warpgroups: number of warpgroups that share a row.
      stages: number of rows that a thread block has in flight.
      blocks: number of thread blocks to launch, at most as many as run at the same time.
    """

    warpgroups: int
    stages: int
    blocks: int


@traced_once("tiling")
def encode_rows(
    xs: tuple[Float[Array, "N _"], ...],
    folds: tuple[Float32[Array, " _"], ...] | None,
    *,
    tiling: Tiling,
) -> tuple[tuple[Float8e4m3fn[Array, "N _"], ...], Float32[Array, " N"]]:
    """See `float8_rows.float8_rows`. `xs` are half precision. ValueError if a number of columns is
    not a multiple of 256 for each warpgroup."""
    rows, widths = xs[0].shape[0], tuple(x.shape[1] for x in xs)
    lines = tiling.warpgroups * WARPS
    if any(width % (lines * LANES * 2) for width in widths):
        raise ValueError(
            f"rows of {widths} columns; expected multiples of {lines * LANES * 2} for "
            f"{tiling.warpgroups} warpgroups"
        )
    lengths = tuple(width // lines for width in widths)
    kernel = plgpu.kernel(
        partial(_kernel, tiling),
        out_type=(
            [jax.ShapeDtypeStruct((rows * lines, n), jnp.float8_e4m3fn) for n in lengths],
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        scratch_types=(_scratch(tiling, lengths, xs[0].dtype),),
        grid=(tiling.blocks,),
        grid_names=("block",),
        kernel_name="float8_rows",
        **warpgroups(tiling.warpgroups),
    )
    # One warp takes one line, a part of a row.
    as_lines = [x.reshape(-1, n) for x, n in zip(xs, lengths, strict=True)]
    if folds is not None:
        folds = [fold.reshape(-1, n) for fold, n in zip(folds, lengths, strict=True)]
    codes, scales = kernel(as_lines, folds)
    return tuple(c.reshape(rows, -1) for c in codes), scales


class _Scratch(NamedTuple):
    """For each warpgroup, stages of each array's lines (a line is the part of a row that a warp
    takes) and memory for their codes; the largest magnitude of every line, for two rows in turn;
    and barriers."""

    stages: list
    codes: list
    largest: Any
    loaded: list
    exchanged: Any


def _scratch(tiling: Tiling, lengths, dtype) -> _Scratch:
    groups, stages = tiling.warpgroups, tiling.stages
    return _Scratch(
        stages=[plgpu.SMEM((groups * stages, WARPS, n), dtype) for n in lengths],
        codes=[plgpu.SMEM((groups, WARPS, n), jnp.float8_e4m3fn) for n in lengths],
        largest=plgpu.SMEM((2, groups * WARPS), jnp.float32),
        loaded=[plgpu.Barrier(num_arrivals=1, num_barriers=groups * stages) for _ in lengths],
        exchanged=plgpu.Barrier(num_arrivals=groups),
    )


def _kernel(tiling: Tiling, arrays, folds, codes, scales, scratch: _Scratch):
    thread, first = lax.axis_index("wg"), lax.axis_index("block")
    steps = lax.div(scales.shape[0] - first + tiling.blocks - 1, jnp.int32(tiling.blocks))
    layouts = [_line_layout(array.shape[1]) for array in arrays]
    every = range(len(arrays))

    def row_of(step):
        return first + step * tiling.blocks

    def lines(step):
        return pl.ds((row_of(step) * tiling.warpgroups + thread) * WARPS, WARPS)

    def stage_of(step):
        return thread * tiling.stages + lax.rem(step, jnp.int32(tiling.stages))

    def load(i: int, step):
        @pl.when(step < steps)
        def _():
            plgpu.copy_gmem_to_smem(
                arrays[i].at[lines(step)],
                scratch.stages[i].at[stage_of(step)],
                scratch.loaded[i].at[stage_of(step)],
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

    def load_fold(i: int):
        fold = folds[i].at[pl.ds(thread * WARPS, WARPS)]
        return load_unoptimized(fold, layouts[i])

    width = sum(array.shape[1] for array in arrays)
    is_kept = folds is not None and width // LANES <= COLUMNS_OF_THREAD
    kept = [load_fold(i) for i in every] if is_kept else None

    def values(i: int, step):
        value = plgpu.load(scratch.stages[i].at[stage_of(step)], layout=layouts[i])
        if folds is None:
            return value
        return value.astype(jnp.float32) * (kept[i] if is_kept else load_fold(i))

    def largest_of_line(i: int, step):
        plgpu.barrier_wait(scratch.loaded[i].at[stage_of(step)])
        return jnp.max(jnp.abs(values(i, step)), axis=1).astype(jnp.float32)

    for step in range(tiling.stages):
        for i in every:
            load(i, jnp.int32(step))

    @pl.loop(0, steps)
    def _step(step):
        largest = scratch.largest.at[lax.rem(step, jnp.int32(2))]
        of_lines = reduce(jnp.maximum, [largest_of_line(i, step) for i in every])
        largest.at[pl.ds(thread * WARPS, WARPS)][...] = of_lines
        plgpu.barrier_arrive(scratch.exchanged)
        plgpu.barrier_wait(scratch.exchanged)
        of_row = reduce(jnp.maximum, [largest[i] for i in range(largest.shape[0])])
        scale = scales_of_largest(of_row)

        @pl.when(thread == 0)
        def _():
            scales[row_of(step)] = scale

        for i in every:
            out = scratch.codes[i].at[thread]
            # Waits until the store of the previous row's codes has read this memory.
            plgpu.wait_smem_to_gmem(len(arrays) - 1, wait_read_only=True)
            # Not clipped as in `quantised_rows`: a scale is computed from its row's largest number,
            # so no code is larger than 448, up to rounding.
            out[...] = (values(i, step).astype(jnp.float32) / scale).astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out, codes[i].at[lines(step)])
            load(i, step + tiling.stages)

    plgpu.wait_smem_to_gmem(0)


def _line_layout(length: int):
    """Gives every warp a line. Its lanes load vectors of the largest size that divides the line, at
    most 16 bytes."""
    vector = next(v for v in (8, 4, 2) if length % (LANES * v) == 0)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )
