"""Rows of a long activation times the low-rank factor of the task that owns them, at the speed of
memory, for Hopper: the rank-r intermediates `c[t] X A[t]` and `c[t] dY B[t]^T`.

One warpgroup a thread block waits for TMA loads and multiplies; several stages of loads in flight,
not arithmetic, set the pace. Row tiles are low: there is one for every multiprocessor, and no two
blocks share a sum. Factors are *rank-major*, `[r, w]`: the two operands of a `wgmma` share one
swizzle, and only rank-major tiles of rank 16 have the wide swizzle with which the activation loads
fast.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .dropout_sm90 import (
    MaskOperands,
    Masks,
    drop_tile,
    dropped_size,
    load_counters,
    mask_operands,
    with_dropped_tile,
)
from .tiles_sm90 import (
    COMPILER_PARAMS,
    check_chunks,
    check_ranks,
    flat,
    owner,
    stages_that_fit,
    store_rank_major,
    swizzled,
)


class RowJob(NamedTuple):
    """An activation and the factors that multiply its rows.

    Attributes:
      z: [N, w] in half precision.
      factors: [T, r, w] each, in the dtype of `z`: `b` as it is, `a` with its last axes swapped.
      masks: dropout of `z`, with counters per factor; None for none.
    """

    z: Float[Array, "N w"]
    factors: tuple[Float[Array, "T r w"], ...]
    masks: Masks | None = None


class RowTiling(NamedTuple):
    """Tile sizes of `row_products`.

    Attributes:
      tile_m: rows of a thread block, a divisor of the chunk.
      tile_k: columns of one load, a multiple of 64.
      stages: loads in flight, at most; fewer where shared memory ends.
    """

    tile_m: int = 64
    tile_k: int = 128
    stages: int = 7


def row_products(
    jobs: tuple[RowJob, ...],
    chunk_slot: Int[Array, "C"],
    scale: Float[Array, "T"],
    *,
    tiling: RowTiling = RowTiling(),  # noqa: B008
    interpret: Any = None,
) -> tuple[tuple[Float[Array, "r N"], ...], ...]:
    """`scale[t] z F[t]^T` for every factor of every job, rank-major.

    Sums and their scaling are float32, rounded once. Rows of empty chunks (slot -1) are zeros and
    their `z` is not read.

    Args:
      jobs: what to multiply; each `z` is read once for all its factors.
      chunk_slot: int32 [C], owner slot of each chunk of N / C rows.
      scale: float32 [T], factor of each slot's products.
      interpret: see `plgpu.kernel`.

    Returns:
      Per job and factor, the products in the dtype of `z`.

    Raises:
      ValueError: the tiling does not divide the arrays.
    """
    for job in jobs:
        _check_rows(job, chunk_slot, tiling)
    rows = jobs[0].z.shape[0]

    def body(slot_gmem, scale_gmem, jobs, *outputs):
        tile = lax.axis_index("tile")
        slot = owner(slot_gmem, tile, rows // tiling.tile_m)
        scale = jnp.where(slot < 0, 0.0, scale_gmem[lax.max(slot, 0)])
        for job, out in zip(jobs, outputs, strict=True):
            _multiply_rows(tiling, job, out, tile, slot, scale)

    return plgpu.kernel(
        body,
        out_type=_row_outputs(jobs),
        grid=(rows // tiling.tile_m,),
        grid_names=("tile",),
        kernel_name="row_products",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )(chunk_slot, scale, _row_operands(jobs))


class _RowOperands(NamedTuple):
    z: Any
    factors: tuple
    masks: MaskOperands | None


def _row_operands(jobs) -> list[_RowOperands]:
    # A slice of a three-dimensional array does not load: slots become row offsets.
    return [
        _RowOperands(job.z, tuple(flat(f) for f in job.factors), mask_operands(job.masks))
        for job in jobs
    ]


def _row_outputs(jobs) -> tuple:
    def product(job, factor):
        return jax.ShapeDtypeStruct((factor.shape[1], job.z.shape[0]), job.z.dtype)

    return tuple(tuple(product(job, factor) for factor in job.factors) for job in jobs)


def _multiply_rows(tiling: RowTiling, job: _RowOperands, outputs, tile, slot, scale):
    """One row tile of `z` times its owner's factors."""
    dtype = job.z.dtype
    ranks = [out.shape[0] for out in outputs]
    rows = pl.ds(tile * tiling.tile_m, tiling.tile_m)
    load = (tiling.tile_m, tiling.tile_k)

    heights = (tiling.tile_m, *ranks)
    pipeline = partial(
        plgpu.emit_pipeline,
        grid=(job.z.shape[1] // tiling.tile_k,),
        in_specs=[_load_spec((height, tiling.tile_k), dtype) for height in heights],
        max_concurrent_steps=stages_that_fit(
            tiling.stages, sum(heights) * tiling.tile_k, dtype, dropped_size(job.masks, load)
        ),
    )

    def multiply(accs, dropped_smem, counters, index, z_smem, *factors_smem):
        column = index[0] * tiling.tile_k
        for i, (acc, factor) in enumerate(zip(accs, factors_smem, strict=True)):
            left = z_smem
            if job.masks is not None:
                left = dropped_smem
                drop_tile(z_smem, dropped_smem, job.masks, counters[i], slot, column)
            plgpu.wgmma(acc, left, factor.transpose((1, 0)))
        # The buffers of the step before are free once only this step's products are in flight.
        plgpu.wgmma_wait(len(accs))

    def scope(dropped_smem, *accs):
        @pl.when(slot >= 0)
        def _():
            owned = [
                factor.at[pl.ds(slot * rank, rank)]
                for factor, rank in zip(job.factors, ranks, strict=True)
            ]
            counters = load_counters(job.masks, rows)
            pipeline(partial(multiply, accs, dropped_smem, counters))(job.z.at[rows], *owned)

        for acc, out in zip(accs, outputs, strict=True):
            store_rank_major(out.at[:, rows], (acc[...] * scale).astype(dtype))

    def with_dropped(dropped_smem):
        accs = (plgpu.ACC((tiling.tile_m, rank)) for rank in ranks)
        pl.run_scoped(partial(scope, dropped_smem), *accs)

    with_dropped_tile(job.masks, load, dtype, with_dropped)


def _load_spec(shape, dtype):
    return plgpu.BlockSpec(
        shape, lambda step: (0, step), transforms=swizzled(dtype), delay_release=1
    )


def _check_rows(job: RowJob, chunk_slot, tiling: RowTiling):
    rows, width = job.z.shape
    check_chunks(rows, chunk_slot, "tile_m", tiling.tile_m)
    if width % tiling.tile_k or tiling.tile_k % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of tile_k = {tiling.tile_k}, itself a "
            "multiple of 64"
        )
    check_ranks([factor.shape[1] for factor in job.factors])
