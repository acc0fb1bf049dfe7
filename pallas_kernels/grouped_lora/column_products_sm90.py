"""Adds the products of an activation with its rank-r intermediates to the tasks' gradient
accumulators, for Hopper GPUs: `X^T dS` and `S^T dY`.

The kernel is limited by memory bandwidth. Every thread block owns a stripe of columns and visits
all rows in stream order. It holds the accumulators of the current chunk's task in registers. So
there are no atomics, and every task's products are added one after another. One warpgroup loads
tiles through TMA and one multiplies them; with dropout, further warpgroups drop features of a
loaded tile in place before it is multiplied. As in `row_products_sm90`, the other operand of a
product is rank-major.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu
from ..compilation import traced_once
from .dropout_sm90 import (
    Masks,
    Tokens,
    dropped_tiles,
    load_first_column,
    load_raw_counters,
    mask_operands,
)
from .tiles_sm90 import (
    SHARED_MEMORY,
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
    stages_that_fit,
    warpgroups,
)
from .tilings import multiprocessors

# Warpgroups of a thread block. The third and later ones apply dropout.
LOADER, MULTIPLIER, FIRST_DROPPER = range(3)
# Number of rows to which a warpgroup applies dropout at once.
DROPPED_ROWS = 64
# Largest sum of ranks for which the registers of a warpgroup hold a stripe's accumulators and one
# step's products.
DEEPEST = 192


class ColumnOperands(NamedTuple):
    """A group of operands: an activation, the intermediates that multiply its columns, and the
    accumulators of their products.

    Attributes:
      z: the activation, half precision.
      lows: the rank-r intermediates, in the dtype of `z`.
      accumulators: float32, one for each intermediate: [T, w, r] or, if rank-major, [T, r, w].
        Accumulators of all layers, [L, T, …], count as those of L · T slots.
      rank_major: whether the accumulators are rank-major, like the gradient of B.
      masks: dropout of `z`: counters for each intermediate, and a rate for each of the T or L · T
        slots; None for none.
    """

    z: Float[Array, "N w"]
    lows: tuple[Float[Array, "_ N"], ...]
    accumulators: tuple[Float[Array, "*T _ _"], ...]
    rank_major: bool
    masks: Masks | None = None


class ColumnTiling(NamedTuple):
    """Tile sizes of `column_products`.

    Attributes:
      stripe: columns of a thread block, a multiple of 64.
      tile_rows: rows of one load, a divisor of the chunk's tokens and a multiple of 64. Products of
        this many rows are added at a time, so this changes the last bits of the sums.
      stages: largest number of loads in flight; it is reduced to what fits into shared memory.
    """

    stripe: int = 64
    tile_rows: int = 128
    stages: int = 6


def column_products(
    groups: tuple[ColumnOperands, ...],
    chunk_place: Int[Array, " chunks"],
    *,
    tiling: ColumnTiling = ColumnTiling(),  # noqa: B008
) -> tuple[tuple[Float[Array, "*T _ _"], ...], ...]:
    """Adds `z^T low^T`, summed over each slot's chunks, to every accumulator.

    Products of `tile_rows` rows are added one after another in stream order, so the bits of a sum
    depend only on the task's own rows. Slots that own no chunk keep their bits; empty chunks are
    not read. XLA updates the accumulators in place if nothing else uses them.

    Args:
      groups: the operands, all with N rows; one launch serves all groups. Each `z` is read once for
        all its intermediates. With dropout, or with too many ranks for the registers, it is read
        once for each of them.
      chunk_place: int32, index of each chunk's owner in the accumulators, -1 for an empty chunk.
        For accumulators of all layers, the index is `layer * T + slot`.

    Returns:
      For each group, the new accumulators in the shapes of the old ones.
    """
    for group in groups:
        _check_columns(group, chunk_place, tiling)
    return _column_products(
        tuple(group._replace(rank_major=None) for group in groups),
        chunk_place,
        rank_major=tuple(group.rank_major for group in groups),
        tiling=tiling,
        multiprocessors=multiprocessors(),
    )


@traced_once("rank_major", "tiling", "multiprocessors")
def _column_products(
    groups, chunk_place, *, rank_major: tuple[bool, ...], tiling, multiprocessors: int
):
    operands = list(map(_kernel_operands, groups))
    parts, rank_major = zip(
        *(
            (part, flag)
            for each, flag in zip(operands, rank_major, strict=True)
            for part in _parts(each)
        ),
        strict=True,
    )
    stripes = sum(part.z.shape[1] for part in parts) // tiling.stripe
    occupancy = _occupancy(parts, tiling, -(-stripes // multiprocessors))

    def body(place_gmem, parts):
        stripe = lax.axis_index("stripe")
        _multiply_stripe(tiling, occupancy, place_gmem, parts, rank_major, stripe)

    plgpu.kernel(
        body,
        grid=(stripes,),
        grid_names=("stripe",),
        kernel_name="column_products",
        **warpgroups(FIRST_DROPPER + occupancy.droppers),
    )(chunk_place, parts)
    return tuple(
        tuple(
            jax.freeze(new).reshape(old.shape)
            for new, old in zip(refs.accumulators, group.accumulators, strict=True)
        )
        for refs, group in zip(operands, groups, strict=True)
    )


def _kernel_operands(group: ColumnOperands) -> ColumnOperands:
    """The group as the kernel reads it: its accumulators are flat references, and its masks are
    `MaskOperands`. Its `rank_major`, which is not an array, is None and is passed separately."""
    accumulators = tuple(jax.new_ref(flat(each)) for each in group.accumulators)
    return group._replace(accumulators=accumulators, masks=mask_operands(group.masks))


def _parts(group: ColumnOperands) -> list[ColumnOperands]:
    """Splits a group into one for each intermediate if they cannot share a tile of `z`: because
    with dropout their tiles differ, or because registers have no room for all accumulators."""
    if group.masks is None and sum(low.shape[0] for low in group.lows) <= DEEPEST:
        return [group]
    counters = [None] * len(group.lows) if group.masks is None else group.masks.counters
    return [
        group._replace(
            lows=(low,),
            accumulators=(accumulator,),
            masks=group.masks and group.masks._replace(counters=(c,)),
        )
        for low, accumulator, c in zip(group.lows, group.accumulators, counters, strict=True)
    ]


class _Occupancy(NamedTuple):
    """Number of warpgroups of a thread block that apply dropout, and of thread blocks that share a
    multiprocessor."""

    droppers: int
    blocks: int

    def reserved(self, elements: int, dtype) -> int:
        """Number of elements of shared memory to leave to the other blocks. If three stages of
        `elements` would not fit for each block, fewer blocks share the memory."""
        available = SHARED_MEMORY // jnp.dtype(dtype).itemsize
        blocks = max(1, min(self.blocks, available // (3 * elements)))
        return available - available // blocks


def _occupancy(groups: Sequence[ColumnOperands], tiling: ColumnTiling, blocks: int) -> _Occupancy:
    if all(group.masks is None for group in groups):
        return _Occupancy(0, min(blocks, 3))
    # Warpgroups and blocks share the registers, and high ranks need more of them.
    deepest = max(low.shape[0] for group in groups for low in group.lows)
    blocks = min(blocks, 2 if deepest <= 32 else 1)
    is_alone = blocks == 1 and deepest <= 64
    return _Occupancy(2 if is_alone and tiling.tile_rows % (2 * DROPPED_ROWS) == 0 else 1, blocks)


class _Scratch(NamedTuple):
    """Stages of operands and their barriers: tiles of `z`, to which dropout is applied in place,
    and of the intermediates, stacked along the ranks."""

    z: Any
    lows: Any
    loaded: Any
    dropped: Any
    consumed: Any


class _Stripe(NamedTuple):
    """The work of one thread block: the columns of a group from `column` on."""

    group: ColumnOperands
    place_gmem: Any
    column: Any
    tiling: ColumnTiling
    occupancy: _Occupancy
    rank_major: bool

    @property
    def ranks(self) -> list[int]:
        return [low.shape[0] for low in self.group.lows]

    @property
    def stacked(self) -> list[slice]:
        """The range of each intermediate's ranks among the ranks of all intermediates."""
        return [slice(*ends) for ends in pairwise((0, *accumulate(self.ranks)))]

    @property
    def layout(self):
        """The register layout in which accumulators are loaded and stored along their rows."""
        return plgpu.Layout.WGMMA_TRANSPOSED if self.rank_major else plgpu.Layout.WGMMA

    @property
    def tiles(self) -> int:
        return self.group.z.shape[0] // self.tiling.tile_rows

    def rows(self, tile):
        return pl.ds(tile * self.tiling.tile_rows, self.tiling.tile_rows)

    def owner(self, tile):
        return owner(self.place_gmem, tile, self.tiles)


def _multiply_stripe(
    tiling: ColumnTiling, occupancy: _Occupancy, place_gmem, groups, rank_major, index
):
    """Computes the products of one stripe; stripes are numbered through all groups."""
    first = 0
    for group, is_rank_major in zip(groups, rank_major, strict=True):
        count = group.z.shape[1] // tiling.stripe

        @pl.when((index >= first) & (index < first + count))
        def _(group=group, is_rank_major=is_rank_major, first=first):
            column = (index - first) * tiling.stripe
            _multiply_columns(_Stripe(group, place_gmem, column, tiling, occupancy, is_rank_major))

        first += count


def _multiply_columns(stripe: _Stripe):
    thread = lax.axis_index("wg")
    dtype, ranks, tile = stripe.group.z.dtype, stripe.ranks, stripe.tiling.tile_rows
    elements = tile * (stripe.tiling.stripe + sum(ranks))
    reserved = stripe.occupancy.reserved(elements, dtype)
    stages = stages_that_fit(stripe.tiling.stages, elements, dtype, reserved)

    @partial(
        pl.run_scoped,
        z=smem_tiles((stages, tile, stripe.tiling.stripe), dtype),
        lows=smem_tiles((stages, sum(ranks), tile), dtype),
        loaded=plgpu.Barrier(num_arrivals=1 + len(ranks), num_barriers=stages),
        dropped=plgpu.Barrier(num_arrivals=tile // DROPPED_ROWS, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        collective_axes="wg",
    )
    def _scope(**stages):
        scratch = _Scratch(**stages)
        pl.when(thread == LOADER)(lambda: _load_tiles(stripe, scratch))
        pl.when(thread == MULTIPLIER)(lambda: _add_products(stripe, scratch))
        if stripe.group.masks is not None:
            dropper = thread - FIRST_DROPPER
            pl.when(dropper >= 0)(lambda: _drop_tiles(stripe, scratch, dropper))


def _load_tiles(stripe: _Stripe, scratch: _Scratch):
    columns = pl.ds(stripe.column, stripe.tiling.stripe)

    def visit(tile, step):
        is_owned = stripe.owner(tile) >= 0

        @pl.when(is_owned)
        def _():
            stage, rows = claim(scratch.consumed, step), stripe.rows(tile)
            copy = partial(plgpu.copy_gmem_to_smem, barrier=scratch.loaded.at[stage])
            copy(stripe.group.z.at[rows, columns], scratch.z.at[stage])
            for low, ranks in zip(stripe.group.lows, stripe.stacked, strict=True):
                copy(low.at[:, rows], scratch.lows.at[stage, ranks])

        return step + is_owned.astype(jnp.int32)

    steps = lax.fori_loop(0, stripe.tiles, visit, jnp.int32(0))
    await_all(scratch.consumed, steps)


def _drop_tiles(stripe: _Stripe, scratch: _Scratch, dropper):
    masks, droppers = stripe.group.masks, stripe.occupancy.droppers
    first_column = load_first_column(masks)
    starts = [
        (dropper + i) * DROPPED_ROWS
        for i in range(0, stripe.tiling.tile_rows // DROPPED_ROWS, droppers)
    ]

    def load(tile):
        first = stripe.rows(tile).start
        return [load_raw_counters(masks, pl.ds(first + start, DROPPED_ROWS)) for start in starts]

    def drop(tile, carry):
        step, counters = carry
        place = stripe.owner(tile)
        # Loaded one tile ahead, because these loads have a long latency.
        next_counters = load(lax.min(tile + 1, jnp.int32(stripe.tiles - 1)))

        @pl.when(place >= 0)
        def _():
            stage = await_loaded(scratch.loaded, step)
            for start, of_part in zip(starts, counters, strict=True):
                part = scratch.z.at[stage].at[pl.ds(start, DROPPED_ROWS)]
                tokens = [Tokens.of(each, first_column) for each in of_part]
                for _ in dropped_tiles(part, masks, tokens, place, stripe.column):
                    plgpu.barrier_arrive(scratch.dropped.at[stage])

        return step + (place >= 0).astype(jnp.int32), next_counters

    lax.fori_loop(0, stripe.tiles, drop, (jnp.int32(0), load(jnp.int32(0))))


def _add_products(stripe: _Stripe, scratch: _Scratch):
    """Loops over the row tiles. The loop carries the owner of the next tile, which is loaded one
    tile ahead because its load has a long latency; the number of steps so far; the current owner;
    and the owner's accumulators, in registers."""

    def visit(tile, carry):
        place, *state = carry
        next_place = stripe.owner(lax.min(tile + 1, jnp.int32(stripe.tiles - 1)))

        def add(step, place_before, accumulated):
            def change_owner():
                _store_accumulators(stripe, place_before, accumulated)
                return _load_accumulators(stripe, place)

            accumulated = lax.cond(place != place_before, change_owner, lambda: accumulated)
            return step + 1, place, accumulated + _products(stripe, scratch, step)

        return next_place, *lax.cond(place >= 0, add, lambda *state: state, *state)

    zeros = jnp.zeros((stripe.tiling.stripe, sum(stripe.ranks)))
    accumulated = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    carry = stripe.owner(jnp.int32(0)), jnp.int32(0), jnp.int32(-1), accumulated
    _, _, place, accumulated = lax.fori_loop(0, stripe.tiles, visit, carry)
    _store_accumulators(stripe, place, accumulated)


def _products(stripe: _Stripe, scratch: _Scratch, step):
    """Waits for one step's tiles and returns `z^T low^T` of all intermediates, side by side."""
    stage = await_loaded(scratch.loaded, step)
    if stripe.group.masks is not None:
        plgpu.barrier_wait(scratch.dropped.at[stage])

    def multiply(acc):
        z, lows = (tiles.at[stage].transpose((1, 0)) for tiles in (scratch.z, scratch.lows))
        # One product for all intermediates. Even narrow intermediates take as long as reading `z`.
        plgpu.wgmma(acc, z, lows)
        products = acc[...]
        plgpu.barrier_arrive(scratch.consumed.at[stage])
        return products

    return pl.run_scoped(multiply, plgpu.ACC((stripe.tiling.stripe, sum(stripe.ranks))))


def _accumulator_parts(stripe: _Stripe, place) -> list:
    """The [stripe, r] part of each of one owner's accumulators, in global memory."""
    size = stripe.tiling.stripe
    accumulators = zip(stripe.group.accumulators, stripe.ranks, strict=True)
    if stripe.rank_major:
        columns = pl.ds(stripe.column, size)
        return [a.at[pl.ds(place * r, r), columns].transpose((1, 0)) for a, r in accumulators]
    rows = pl.ds(place * stripe.group.z.shape[1] + stripe.column, size)
    return [a.at[rows] for a, _ in accumulators]


def _load_accumulators(stripe: _Stripe, place):
    parts = [load_unoptimized(at, stripe.layout) for at in _accumulator_parts(stripe, place)]
    return plgpu.layout_cast(jnp.concatenate(parts, axis=1), plgpu.Layout.WGMMA)


def _store_accumulators(stripe: _Stripe, place, accumulated):
    @pl.when(place >= 0)
    def _():
        for at, ranks in zip(_accumulator_parts(stripe, place), stripe.stacked, strict=True):
            at[...] = plgpu.layout_cast(accumulated[:, ranks], stripe.layout)


def _check_columns(group: ColumnOperands, chunk_place, tiling: ColumnTiling):
    rows, width = group.z.shape
    check_chunks(rows, chunk_place, "tile_rows", tiling.tile_rows)
    check_columns(width, "stripe", tiling.stripe)
    check_ranks([low.shape[0] for low in group.lows])
