"""Products of an activation's rows with the low-rank factor of the task that owns them, for Hopper
GPUs: the rank-r intermediates `scale[t] X A[t]` and `scale[t] dY B[t]^T`.

The kernel is limited by memory bandwidth, so it keeps several stages of loads in flight. In each
thread block one warpgroup loads tiles through TMA and one multiplies them. With dropout, up to two
warpgroups drop and multiply, each its share of the columns. Row tiles have few rows, so that there
is at least one tile for every multiprocessor, and thread blocks share no sum. Factors are
*rank-major*, [r, w]: both operands of a `wgmma` must have the same swizzle, and a tile of rank 16
has the wide swizzle, with which the activation loads fast, only if it is rank-major.
"""

from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu
from ..compilation import traced_once
from .dropout_sm90 import Masks, dropped_tiles, load_counters, mask_operands
from .tiles_sm90 import (
    await_all,
    await_loaded,
    check_chunks,
    check_columns,
    check_ranks,
    claim,
    flat,
    load_unoptimized,
    owner,
    smem_tiles,
    stage_of,
    stages_that_fit,
    store_rank_major,
    warpgroups,
)

# Warpgroups of a thread block. The second and later ones multiply.
LOADER, FIRST_MULTIPLIER = range(2)
# Number of columns of a load that one warpgroup drops and multiplies, with dropout.
DROPPED_COLUMNS = 64


class RowOperands(NamedTuple):
    """A group of operands: an activation and the factors that multiply its rows.

    Attributes:
      z: the activation, half precision.
      factors: rank-major, in the dtype of `z`: B, or A with its last two axes swapped.
      masks: dropout of `z`, with counters for each factor; None for none.
    """

    z: Float[Array, "N w"]
    factors: tuple[Float[Array, "T _ w"], ...]
    masks: Masks | None = None


class RowTiling(NamedTuple):
    """Tile sizes of `row_products`.

    Attributes:
      tile_m: rows of a thread block, a divisor of the chunk's tokens.
      tile_k: columns of one load, a multiple of 64.
      stages: largest number of loads in flight; it is reduced to what fits into shared memory.
    """

    tile_m: int = 64
    tile_k: int = 128
    stages: int = 7


@traced_once("tiling")
def row_products(
    groups: tuple[RowOperands, ...],
    chunk_slot: Int[Array, " chunks"],
    scale: Float[Array, " T"],
    *,
    tiling: RowTiling = RowTiling(),  # noqa: B008
) -> tuple[tuple[Float[Array, "_ N"], ...], ...]:
    """`scale[t] z F[t]^T` for every factor F of every group, rank-major.

    Sums and scaling are float32, and the result is rounded once, to the dtype of `z`. Rows of empty
    chunks (slot -1) are zeros; there `z` is not read. ValueError if the tiling does not divide the
    arrays.

    Args:
      groups: the operands; each `z` is read once for all its factors.
      chunk_slot: int32, owner slot of each chunk.
      scale: float32, factor of each slot's products.
    """
    for group in groups:
        _check_rows(group, chunk_slot, tiling)
    tiles = groups[0].z.shape[0] // tiling.tile_m
    masked = any(group.masks for group in groups)
    multipliers = tiling.tile_k // DROPPED_COLUMNS if masked else 1

    def body(slot_gmem, scale_gmem, groups, *outputs_scratch):
        *outputs, scratch = outputs_scratch
        tile, thread = lax.axis_index("tile"), lax.axis_index("wg")
        slot = owner(slot_gmem, tile, tiles)
        rows = pl.ds(tile * tiling.tile_m, tiling.tile_m)
        block = _Block(tiling, multipliers, groups, outputs, scratch, slot, rows)
        pl.when((thread == LOADER) & (slot >= 0))(lambda: _load_tiles(block))

        @pl.when(thread >= FIRST_MULTIPLIER)
        def _():
            scale = jnp.where(slot < 0, 0.0, scale_gmem[lax.max(slot, 0)])
            _multiply_tiles(block, thread - FIRST_MULTIPLIER, scale)

    return plgpu.kernel(
        body,
        out_type=_row_outputs(groups),
        scratch_types=(_row_scratch(groups, tiling, multipliers),),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="row_products",
        **warpgroups(FIRST_MULTIPLIER + multipliers),
    )(chunk_slot, scale, list(map(_kernel_operands, groups)))


def _kernel_operands(group: RowOperands) -> RowOperands:
    """The group as the kernel reads it: its factors are flat, and its masks are `MaskOperands`."""
    factors, masks = tuple(map(flat, group.factors)), mask_operands(group.masks)
    return group._replace(factors=factors, masks=masks)


def _row_outputs(groups) -> tuple:
    def product(group, factor):
        return jax.ShapeDtypeStruct((factor.shape[1], group.z.shape[0]), group.z.dtype)

    return tuple(tuple(product(group, factor) for factor in group.factors) for group in groups)


class _RowScratch(NamedTuple):
    """Stages of operands: tiles of `z`, to which dropout is applied in place, and of the factors.
    If several warpgroups multiply, also the partial sums of all except the first, by group."""

    z: Any
    factors: Any
    loaded: Any
    consumed: Any
    partial_sums: Any
    summed: Any


def _row_scratch(groups, tiling: RowTiling, multipliers: int) -> _RowScratch:
    dtype = groups[0].z.dtype
    ranks = [[factor.shape[1] for factor in group.factors] for group in groups]
    # The groups share the stages, so there is room for the highest rank of each factor.
    deepest = [max(each) for each in zip_longest(*ranks, fillvalue=0)]
    sums_size = (multipliers - 1) * tiling.tile_m * sum(map(sum, ranks))
    elements = (tiling.tile_m + sum(deepest)) * tiling.tile_k
    reserved = sums_size * jnp.float32.dtype.itemsize // dtype.itemsize
    stages = stages_that_fit(tiling.stages, elements, dtype, reserved)

    def sums_tile(rank: int):
        return plgpu.SMEM((multipliers - 1, tiling.tile_m, rank), jnp.float32)

    scratch = _RowScratch(
        z=smem_tiles((stages, tiling.tile_m, tiling.tile_k), dtype),
        factors=[smem_tiles((stages, rank, tiling.tile_k), dtype) for rank in deepest],
        loaded=plgpu.Barrier(num_arrivals=1 + len(deepest), num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=multipliers, num_barriers=stages),
        partial_sums=None,
        summed=None,
    )
    if multipliers == 1:
        return scratch
    return scratch._replace(
        partial_sums=[list(map(sums_tile, each)) for each in ranks],
        summed=plgpu.Barrier(num_arrivals=multipliers - 1, num_barriers=len(groups)),
    )


class _Block(NamedTuple):
    """The work of one thread block: a tile of rows, which has one owner."""

    tiling: RowTiling
    multipliers: int
    groups: list[RowOperands]
    outputs: list[tuple]
    scratch: _RowScratch
    slot: Any
    rows: Any

    def each_group(self) -> Iterator[tuple[RowOperands, tuple, int]]:
        """Each group with its outputs and the number of its first step. The steps of all groups are
        numbered consecutively."""
        first = 0
        for group, outputs in zip(self.groups, self.outputs, strict=True):
            yield group, outputs, first
            first += self.steps(group)

    def steps(self, group: RowOperands) -> int:
        return group.z.shape[1] // self.tiling.tile_k

    def release(self, step):
        stage = stage_of(self.scratch.consumed, step)
        plgpu.barrier_arrive(self.scratch.consumed.at[stage])


def _load_tiles(block: _Block):
    tile_k, scratch = block.tiling.tile_k, block.scratch
    for group, outputs, first in block.each_group():

        @pl.loop(0, block.steps(group))
        def _step(i, group=group, outputs=outputs, first=first):
            stage, columns = claim(scratch.consumed, first + i), pl.ds(i * tile_k, tile_k)
            loaded = scratch.loaded.at[stage]
            plgpu.copy_gmem_to_smem(group.z.at[block.rows, columns], scratch.z.at[stage], loaded)
            for factor, out, smem in zip(group.factors, outputs, scratch.factors, strict=False):
                rank = out.shape[0]
                owned = factor.at[pl.ds(block.slot * rank, rank), columns]
                plgpu.copy_gmem_to_smem(owned, smem.at[stage, pl.ds(0, rank)], loaded)
            # All groups share the barriers, which expect as many loads as the group with the most
            # factors has. A group with fewer arrives once for each load that it lacks.
            for _ in scratch.factors[len(outputs) :]:
                plgpu.barrier_arrive(loaded)

    await_all(scratch.consumed, sum(map(block.steps, block.groups)))


def _multiply_tiles(block: _Block, multiplier, scale):
    """Computes the products of the rows; each warpgroup sums over its columns of every load."""
    for i, (group, outputs, first) in enumerate(block.each_group()):

        @partial(pl.run_scoped, accs=[_accumulator(block, out) for out in outputs])
        def _scope(accs, i=i, group=group, outputs=outputs, first=first):
            pl.when(block.slot >= 0)(lambda: _multiply_group(block, group, accs, first, multiplier))
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


def _multiply_group(block: _Block, group: RowOperands, accs, first: int, multiplier):
    scratch, tokens = block.scratch, load_counters(group.masks, block.rows)
    width = block.tiling.tile_k // block.multipliers
    part = pl.ds(multiplier * width, width)

    @pl.loop(0, block.steps(group))
    def _step(i):
        stage = await_loaded(scratch.loaded, first + i)
        z = scratch.z.at[stage].at[:, part]
        dropped = (None,) * len(accs)
        if group.masks is not None:
            column = i * block.tiling.tile_k + part.start
            dropped = dropped_tiles(z, group.masks, tokens, block.slot, column)
        for acc, factor, _ in zip(accs, scratch.factors, dropped, strict=False):
            ranks = pl.ds(0, acc.shape[1])
            plgpu.wgmma(acc, z, factor.at[stage].at[ranks, part].transpose((1, 0)))
        # When only this step's products are in flight, the previous step's are complete.
        plgpu.wgmma_wait(len(accs))
        pl.when(i > 0)(lambda: block.release(first + i - 1))

    plgpu.wgmma_wait(0)
    block.release(first + block.steps(group) - 1)


def _hand_over(block: _Block, group: int, sums: list, multiplier):
    for value, smem in zip(sums, block.scratch.partial_sums[group], strict=True):
        smem.at[multiplier - 1][...] = value
    plgpu.barrier_arrive(block.scratch.summed.at[group])


def _total(block: _Block, group: int, sums: list) -> list:
    plgpu.barrier_wait(block.scratch.summed.at[group])
    for other in range(block.multipliers - 1):
        others = [smem.at[other] for smem in block.scratch.partial_sums[group]]
        load = partial(load_unoptimized, layout=plgpu.Layout.WGMMA)
        sums = [value + load(smem) for value, smem in zip(sums, others, strict=True)]
    return sums


def _check_rows(group: RowOperands, chunk_slot, tiling: RowTiling):
    rows, width = group.z.shape
    check_chunks(rows, chunk_slot, "tile_m", tiling.tile_m)
    check_columns(width, "tile_k", tiling.tile_k)
    check_ranks([factor.shape[1] for factor in group.factors])
