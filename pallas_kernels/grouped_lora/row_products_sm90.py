"""Rows of a long activation times the low-rank factor of the task that owns them, at the speed of
memory, for Hopper: the rank-r intermediates `c[t] X A[t]` and `c[t] dY B[t]^T`.

One warpgroup a thread block loads tiles through TMA and one multiplies them; with dropout up to two
do, each drops and multiplies half of the columns. Several stages of loads in flight, not
arithmetic, set the pace. Row tiles are low: there is one for every multiprocessor, and no two
blocks share a sum. Factors are *rank-major*, `[r, w]`: the two operands of a `wgmma` share one
swizzle, and only rank-major tiles of rank 16 have the wide swizzle with which the activation loads
fast.
"""

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..compilation import traced_once
from .dropout_sm90 import MaskOperands, Masks, dropped_tiles, load_counters, mask_operands
from .tiles_sm90 import (
    COMPILER_PARAMS,
    await_all,
    check_chunks,
    check_ranks,
    claim,
    flat,
    owner,
    stage_of,
    stages_that_fit,
    store_rank_major,
    swizzled,
)

# Warpgroups of a thread block. Those from the second on multiply.
LOADER, FIRST_MULTIPLIER = range(2)
# Columns of a load that a warpgroup drops.
DROPPED_COLUMNS = 64


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


@traced_once("tiling", "interpret")
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
    tiles = jobs[0].z.shape[0] // tiling.tile_m
    masked = any(job.masks for job in jobs)
    multipliers = tiling.tile_k // DROPPED_COLUMNS if masked else 1

    def body(slot_gmem, scale_gmem, jobs, *outputs_scratch):
        *outputs, scratch = outputs_scratch
        tile, thread = lax.axis_index("tile"), lax.axis_index("wg")
        slot = owner(slot_gmem, tile, tiles)
        rows = pl.ds(tile * tiling.tile_m, tiling.tile_m)
        block = _Block(tiling, multipliers, jobs, outputs, scratch, slot, rows)
        pl.when((thread == LOADER) & (slot >= 0))(lambda: _load_tiles(block))

        @pl.when(thread >= FIRST_MULTIPLIER)
        def _():
            scale = jnp.where(slot < 0, 0.0, scale_gmem[lax.max(slot, 0)])
            _multiply_tiles(block, thread - FIRST_MULTIPLIER, scale)

    return plgpu.kernel(
        body,
        out_type=_row_outputs(jobs),
        scratch_types=(_row_scratch(jobs, tiling, multipliers),),
        grid=(tiles,),
        grid_names=("tile",),
        num_threads=FIRST_MULTIPLIER + multipliers,
        thread_name="wg",
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


class _RowScratch(NamedTuple):
    """Tiles of one stage each: `z`, dropped in its place, and the factors. And, of each job, the
    sums of all multiplying warpgroups but the first, if there are more.
    """

    z: Any
    factors: Any
    loaded: Any
    consumed: Any
    sums: Any
    summed: Any


def _row_scratch(jobs, tiling: RowTiling, multipliers: int) -> _RowScratch:
    dtype = jobs[0].z.dtype
    ranks = [[factor.shape[1] for factor in job.factors] for job in jobs]
    # The jobs share the stages: of every factor, the widest.
    deepest = [max(each) for each in zip_longest(*ranks, fillvalue=0)]
    sums_size = (multipliers - 1) * tiling.tile_m * sum(map(sum, ranks))
    elements = (tiling.tile_m + sum(deepest)) * tiling.tile_k
    reserved = sums_size * jnp.float32.dtype.itemsize // dtype.itemsize
    stages = stages_that_fit(tiling.stages, elements, dtype, reserved)

    def tiles(height: int):
        return plgpu.SMEM((stages, height, tiling.tile_k), dtype, transforms=swizzled(dtype))

    def partial_sums(rank: int):
        return plgpu.SMEM((multipliers - 1, tiling.tile_m, rank), jnp.float32)

    scratch = _RowScratch(
        z=tiles(tiling.tile_m),
        factors=[tiles(rank) for rank in deepest],
        loaded=plgpu.Barrier(num_arrivals=1 + len(deepest), num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=multipliers, num_barriers=stages),
        sums=None,
        summed=None,
    )
    if multipliers == 1:
        return scratch
    return scratch._replace(
        sums=[list(map(partial_sums, each)) for each in ranks],
        summed=plgpu.Barrier(num_arrivals=multipliers - 1, num_barriers=len(jobs)),
    )


class _Block(NamedTuple):
    """What one thread block works on: a tile of rows, with one owner."""

    tiling: RowTiling
    multipliers: int
    jobs: list[_RowOperands]
    outputs: list[tuple]
    scratch: _RowScratch
    slot: Any
    rows: Any

    def each_job(self) -> Iterator[tuple[_RowOperands, tuple, int]]:
        """The jobs with their outputs and first steps, which count through all jobs."""
        first = 0
        for job, outputs in zip(self.jobs, self.outputs, strict=True):
            yield job, outputs, first
            first += self.steps(job)

    def steps(self, job: _RowOperands) -> int:
        return job.z.shape[1] // self.tiling.tile_k

    def stage(self, step):
        return stage_of(self.scratch.loaded, step)

    def release(self, step):
        plgpu.barrier_arrive(self.scratch.consumed.at[self.stage(step)])


def _load_tiles(block: _Block):
    tile_k, scratch = block.tiling.tile_k, block.scratch
    for job, outputs, first in block.each_job():

        @pl.loop(0, block.steps(job))
        def _step(i, job=job, outputs=outputs, first=first):
            stage, columns = claim(scratch.consumed, first + i), pl.ds(i * tile_k, tile_k)
            loaded = scratch.loaded.at[stage]
            plgpu.copy_gmem_to_smem(job.z.at[block.rows, columns], scratch.z.at[stage], loaded)
            for factor, out, smem in zip(job.factors, outputs, scratch.factors, strict=False):
                rank = out.shape[0]
                owned = factor.at[pl.ds(block.slot * rank, rank), columns]
                plgpu.copy_gmem_to_smem(owned, smem.at[stage, pl.ds(0, rank)], loaded)
            # Other jobs have more factors.
            for _ in scratch.factors[len(outputs) :]:
                plgpu.barrier_arrive(loaded)

    # No barrier may be left with an arrival that nobody waited for.
    await_all(scratch.consumed, sum(map(block.steps, block.jobs)))


def _multiply_tiles(block: _Block, multiplier, scale):
    """The products of the rows, of which this warpgroup sums those of its columns of every load."""
    for i, (job, outputs, first) in enumerate(block.each_job()):

        @partial(pl.run_scoped, accs=[_accumulator(block, out) for out in outputs])
        def _scope(accs, i=i, job=job, outputs=outputs, first=first):
            pl.when(block.slot >= 0)(lambda: _multiply_job(block, job, accs, first, multiplier))
            sums = [acc[...] for acc in accs]
            if block.multipliers > 1:
                pl.when(multiplier > 0)(lambda: _hand_over(block, i, sums, multiplier))

            @pl.when(multiplier == 0)
            def _():
                total = _total(block, i, sums) if block.multipliers > 1 else sums
                for value, out in zip(total, outputs, strict=True):
                    store_rank_major(out.at[:, block.rows], (value * scale).astype(out.dtype))


def _accumulator(block: _Block, out):
    return plgpu.ACC((block.tiling.tile_m, out.shape[0]))


def _multiply_job(block: _Block, job: _RowOperands, accs, first: int, multiplier):
    scratch, tokens = block.scratch, load_counters(job.masks, block.rows)
    width = block.tiling.tile_k // block.multipliers
    part = pl.ds(multiplier * width, width)

    @pl.loop(0, block.steps(job))
    def _step(i):
        stage = block.stage(first + i)
        plgpu.barrier_wait(scratch.loaded.at[stage])
        z = scratch.z.at[stage].at[:, part]
        dropped = (None,) * len(accs)
        if job.masks is not None:
            column = i * block.tiling.tile_k + part.start
            dropped = dropped_tiles(z, job.masks, tokens, block.slot, column)
        for acc, factor, _ in zip(accs, scratch.factors, dropped, strict=False):
            ranks = pl.ds(0, acc.shape[1])
            plgpu.wgmma(acc, z, factor.at[stage].at[ranks, part].transpose((1, 0)))
        # The step before is over once only this step's products are in flight.
        plgpu.wgmma_wait(len(accs))
        pl.when(i > 0)(lambda: block.release(first + i - 1))

    plgpu.wgmma_wait(0)
    block.release(first + block.steps(job) - 1)


def _hand_over(block: _Block, job: int, sums: list, multiplier):
    """Gives this warpgroup's sums to the first."""
    for value, smem in zip(sums, block.scratch.sums[job], strict=True):
        smem.at[multiplier - 1][...] = value
    plgpu.barrier_arrive(block.scratch.summed.at[job])


def _total(block: _Block, job: int, sums: list) -> list:
    """This warpgroup's sums and those of all others."""
    plgpu.barrier_wait(block.scratch.summed.at[job])
    for other in range(block.multipliers - 1):
        others = [smem.at[other] for smem in block.scratch.sums[job]]
        load = partial(plgpu.load, layout=plgpu.Layout.WGMMA, optimized=False)
        sums = [value + load(smem) for value, smem in zip(sums, others, strict=True)]
    return sums


def _check_rows(job: RowJob, chunk_slot, tiling: RowTiling):
    rows, width = job.z.shape
    check_chunks(rows, chunk_slot, "tile_m", tiling.tile_m)
    if width % tiling.tile_k or tiling.tile_k % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of tile_k = {tiling.tile_k}, itself a "
            "multiple of 64"
        )
    check_ranks([factor.shape[1] for factor in job.factors])
