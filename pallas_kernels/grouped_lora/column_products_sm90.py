"""Adds the products of a long activation with its rank-r intermediates to the accumulators of the
tasks, at the speed of memory, for Hopper: `X^T dS` and `S^T dY`.

Every thread block owns a stripe of columns and walks over all rows in stream order, with the sums
of the task whose chunks pass in registers: no atomics, and one left fold for every task. One
warpgroup loads tiles through TMA and one multiplies them; with dropout, others in between drop the
tiles where they lie. As in `row_products_sm90`, what meets the activation is rank-major.
"""

from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from ..compilation import traced_once
from .dropout_sm90 import (
    MaskOperands,
    Masks,
    Tokens,
    dropped_tiles,
    load_raw_counters,
    mask_operands,
)
from .tiles_sm90 import (
    COMPILER_PARAMS,
    SHARED_MEMORY,
    await_all,
    check_chunks,
    check_ranks,
    claim,
    flat,
    owner,
    stage_of,
    stages_that_fit,
    swizzled,
)
from .tilings import multiprocessors

# Warpgroups of a thread block. Those from the third on drop so many rows of a tile at once.
LOADER, MULTIPLIER, FIRST_DROPPER = range(3)
DROPPED_ROWS = 64
# The sums and one step's products of so many columns fit into the registers of a warpgroup.
DEEPEST = 192


class ColumnJob(NamedTuple):
    """An activation, the intermediates that multiply its columns, and where the sums go.

    Attributes:
      z: [N, w] in half precision.
      lows: [r, N] each, in the dtype of `z`.
      accumulators: one per intermediate, float32 [T, w, r] or, if rank-major, [T, r, w]; those of
        several layers as [L, T, …], with the slots of layer l counted from l T.
      rank_major: whether the accumulators are, as the gradient of `b` is.
      masks: dropout of `z`, with counters per intermediate; None for none.
    """

    z: Float[Array, "N w"]
    lows: tuple[Float[Array, "r N"], ...]
    accumulators: tuple[Float[Array, "*T _ _"], ...]
    rank_major: bool
    masks: Masks | None = None


class ColumnTiling(NamedTuple):
    """Tile sizes of `column_products`.

    Attributes:
      stripe: columns of a thread block, a multiple of 64.
      tile_rows: rows of one load, a divisor of the chunk and a multiple of 64. Sums are folded by
        this many rows, so it changes their last bits.
      stages: loads in flight, at most; fewer where shared memory ends.
    """

    stripe: int = 64
    tile_rows: int = 128
    stages: int = 6


def column_products(
    jobs: tuple[ColumnJob, ...],
    chunk_slot: Int[Array, "C"],
    *,
    tiling: ColumnTiling = ColumnTiling(),  # noqa: B008
    interpret: Any = None,
) -> tuple[tuple[Float[Array, "*T _ _"], ...], ...]:
    """Every accumulator plus the sum over each slot's chunks of `z^T low^T`.

    An accumulator's sum is one left fold in stream order over the products of `tile_rows` rows: its
    bits depend on the task's own rows alone. Slots that own no chunk keep their bits; empty chunks
    (slot -1) are not read. XLA updates the accumulators in place where it may.

    Args:
      jobs: what to multiply, all with N rows and in one launch; each `z` is read once for all its
        intermediates, but with dropout or ranks that exceed the registers, once for each.
      chunk_slot: int32 [C], owner slot of each chunk of N / C rows; see `row_products`.
      interpret: see `plgpu.kernel`.

    Returns:
      Per job, the new accumulators in the shapes of the old.

    Raises:
      ValueError: the tiling does not divide the arrays.
    """
    for job in jobs:
        _check_columns(job, chunk_slot, tiling)
    return _column_products(
        tuple(job._replace(rank_major=None) for job in jobs),
        chunk_slot,
        rank_major=tuple(job.rank_major for job in jobs),
        tiling=tiling,
        multiprocessors=multiprocessors(),
        interpret=interpret,
    )


@traced_once("rank_major", "tiling", "multiprocessors", "interpret")
def _column_products(
    jobs, chunk_slot, *, rank_major: tuple[bool, ...], tiling, multiprocessors: int, interpret
):
    operands = _column_operands(jobs)
    parts, rank_major = zip(
        *(
            (part, flag)
            for each, flag in zip(operands, rank_major, strict=True)
            for part in _parts(each)
        ),
        strict=True,
    )
    stripes = sum(part.z.shape[1] for part in parts) // tiling.stripe
    crowd = _crowd(parts, tiling, -(-stripes // multiprocessors))

    def body(slot_gmem, parts):
        stripe = lax.axis_index("stripe")
        _multiply_stripe(tiling, crowd, slot_gmem, parts, rank_major, stripe)

    plgpu.kernel(
        body,
        grid=(stripes,),
        grid_names=("stripe",),
        num_threads=FIRST_DROPPER + crowd.droppers,
        thread_name="wg",
        kernel_name="column_products",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )(chunk_slot, parts)
    return _new_accumulators(jobs, operands)


class _ColumnOperands(NamedTuple):
    z: Any
    lows: tuple
    accumulators: tuple
    masks: MaskOperands | None


def _column_operands(jobs) -> list[_ColumnOperands]:
    return [
        _ColumnOperands(
            job.z,
            job.lows,
            tuple(jax.new_ref(flat(g)) for g in job.accumulators),
            mask_operands(job.masks),
        )
        for job in jobs
    ]


def _parts(job: _ColumnOperands) -> list[_ColumnOperands]:
    """A job as several where its intermediates cannot share a tile of `z`: dropped, it is another
    for each; and the sums of all must fit into registers."""
    if job.masks is None and sum(low.shape[0] for low in job.lows) <= DEEPEST:
        return [job]
    counters = [None] * len(job.lows) if job.masks is None else job.masks.counters
    return [
        _ColumnOperands(job.z, (low,), (sums,), job.masks and job.masks._replace(counters=(c,)))
        for low, sums, c in zip(job.lows, job.accumulators, counters, strict=True)
    ]


def _new_accumulators(jobs, operands: list[_ColumnOperands]) -> tuple:
    return tuple(
        tuple(
            jax.freeze(new).reshape(old.shape)
            for new, old in zip(refs.accumulators, job.accumulators, strict=True)
        )
        for refs, job in zip(operands, jobs, strict=True)
    )


class _Crowd(NamedTuple):
    """How many warpgroups of a thread block drop, and how many blocks share a multiprocessor."""

    droppers: int
    blocks: int

    def reserved(self, elements: int, dtype) -> int:
        """Elements of shared memory for the other blocks, if three loads of so many remain."""
        available = SHARED_MEMORY // jnp.dtype(dtype).itemsize
        blocks = max(1, min(self.blocks, available // (3 * elements)))
        return available - available // blocks


def _crowd(jobs: list[_ColumnOperands], tiling: ColumnTiling, blocks: int) -> _Crowd:
    if all(job.masks is None for job in jobs):
        return _Crowd(0, min(blocks, 3))
    # Droppers, blocks and high ranks share the registers.
    deepest = max(low.shape[0] for job in jobs for low in job.lows)
    blocks = min(blocks, 2 if deepest <= 32 else 1)
    is_alone = blocks == 1 and deepest <= 64
    return _Crowd(2 if is_alone and tiling.tile_rows % (2 * DROPPED_ROWS) == 0 else 1, blocks)


class _Buffers(NamedTuple):
    """Tiles of one stage each: `z`, dropped in its place, and the intermediates, stacked."""

    z: Any
    lows: Any
    loaded: Any
    dropped: Any
    consumed: Any


class _Stripe(NamedTuple):
    """What one of the thread blocks works on; `column` is its first."""

    job: _ColumnOperands
    slot_gmem: Any
    column: Any
    tiling: ColumnTiling
    crowd: _Crowd
    rank_major: bool

    @property
    def ranks(self) -> list[int]:
        return [low.shape[0] for low in self.job.lows]

    @property
    def stacked(self) -> list[slice]:
        """Where each intermediate has its ranks among those of all."""
        return [slice(*ends) for ends in pairwise((0, *accumulate(self.ranks)))]

    @property
    def layout(self):
        """In which accumulators are accessed along their rows."""
        return plgpu.Layout.WGMMA_TRANSPOSED if self.rank_major else plgpu.Layout.WGMMA

    @property
    def tiles(self) -> int:
        return self.job.z.shape[0] // self.tiling.tile_rows

    def rows(self, tile):
        return pl.ds(tile * self.tiling.tile_rows, self.tiling.tile_rows)

    def owner(self, tile):
        return owner(self.slot_gmem, tile, self.tiles)


def _multiply_stripe(tiling: ColumnTiling, crowd: _Crowd, slot_gmem, jobs, rank_major, index):
    """The products of the stripe of columns with a number that counts through all jobs."""
    first = 0
    for job, is_rank_major in zip(jobs, rank_major, strict=True):
        count = job.z.shape[1] // tiling.stripe

        @pl.when((index >= first) & (index < first + count))
        def _(job=job, is_rank_major=is_rank_major, first=first):
            column = (index - first) * tiling.stripe
            _multiply_columns(_Stripe(job, slot_gmem, column, tiling, crowd, is_rank_major))

        first += count


def _multiply_columns(stripe: _Stripe):
    """Adds the products of one stripe of columns, over all rows, to the owners' accumulators."""
    thread = lax.axis_index("wg")
    dtype, ranks, tile = stripe.job.z.dtype, stripe.ranks, stripe.tiling.tile_rows
    elements = tile * (stripe.tiling.stripe + sum(ranks))
    reserved = stripe.crowd.reserved(elements, dtype)
    stages = stages_that_fit(stripe.tiling.stages, elements, dtype, reserved)

    def tiles(*shape: int):
        return plgpu.SMEM((stages, *shape), dtype, transforms=swizzled(dtype))

    @partial(
        pl.run_scoped,
        z=tiles(tile, stripe.tiling.stripe),
        lows=tiles(sum(ranks), tile),
        loaded=plgpu.Barrier(num_arrivals=1 + len(ranks), num_barriers=stages),
        dropped=plgpu.Barrier(num_arrivals=tile // DROPPED_ROWS, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=1, num_barriers=stages),
        collective_axes="wg",
    )
    def _scope(**buffers):
        scratch = _Buffers(**buffers)
        pl.when(thread == LOADER)(lambda: _load_tiles(stripe, scratch))
        pl.when(thread == MULTIPLIER)(lambda: _add_products(stripe, scratch))
        if stripe.job.masks is not None:
            dropper = thread - FIRST_DROPPER
            pl.when(dropper >= 0)(lambda: _drop_tiles(stripe, scratch, dropper))


def _load_tiles(stripe: _Stripe, buffers: _Buffers):
    columns = pl.ds(stripe.column, stripe.tiling.stripe)

    def visit(tile, step):
        is_owned = stripe.owner(tile) >= 0

        @pl.when(is_owned)
        def _():
            stage, rows = claim(buffers.consumed, step), stripe.rows(tile)
            copy = partial(plgpu.copy_gmem_to_smem, barrier=buffers.loaded.at[stage])
            copy(stripe.job.z.at[rows, columns], buffers.z.at[stage])
            for low, ranks in zip(stripe.job.lows, stripe.stacked, strict=True):
                copy(low.at[:, rows], buffers.lows.at[stage, ranks])

        return step + is_owned.astype(jnp.int32)

    steps = lax.fori_loop(0, stripe.tiles, visit, jnp.int32(0))
    # No barrier may be left with an arrival that nobody waited for.
    await_all(buffers.consumed, steps)


def _drop_tiles(stripe: _Stripe, buffers: _Buffers, dropper):
    """Drops this warpgroup's rows of every tile."""
    masks, droppers = stripe.job.masks, stripe.crowd.droppers
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
        # They take long to arrive.
        next_counters = load(lax.min(tile + 1, jnp.int32(stripe.tiles - 1)))

        @pl.when(place >= 0)
        def _():
            stage = stage_of(buffers.loaded, step)
            plgpu.barrier_wait(buffers.loaded.at[stage])
            for start, of_part in zip(starts, counters, strict=True):
                part = buffers.z.at[stage].at[pl.ds(start, DROPPED_ROWS)]
                tokens = [Tokens.of(each) for each in of_part]
                for _ in dropped_tiles(part, masks, tokens, place, stripe.column):
                    plgpu.barrier_arrive(buffers.dropped.at[stage])

        return step + (place >= 0).astype(jnp.int32), next_counters

    lax.fori_loop(0, stripe.tiles, drop, (jnp.int32(0), load(jnp.int32(0))))


def _add_products(stripe: _Stripe, buffers: _Buffers):
    """The loop over the rows. It carries the slot whose chunks pass, its sums in registers, and the
    owner of the next tile, which takes long to arrive."""

    def visit(tile, carry):
        place, *state = carry
        next_place = stripe.owner(lax.min(tile + 1, jnp.int32(stripe.tiles - 1)))

        def add(step, place_before, sums):
            def change_owner():
                _store_sums(stripe, place_before, sums)
                return _load_sums(stripe, place)

            sums = lax.cond(place != place_before, change_owner, lambda: sums)
            return step + 1, place, sums + _products(stripe, buffers, step)

        return next_place, *lax.cond(place >= 0, add, lambda *state: state, *state)

    zeros = jnp.zeros((stripe.tiling.stripe, sum(stripe.ranks)))
    sums = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
    carry = stripe.owner(jnp.int32(0)), jnp.int32(0), jnp.int32(-1), sums
    _, _, place, sums = lax.fori_loop(0, stripe.tiles, visit, carry)
    _store_sums(stripe, place, sums)


def _products(stripe: _Stripe, buffers: _Buffers, step):
    """Waits for one step's tiles and returns `z^T low^T` of all intermediates, side by side."""
    stage = stage_of(buffers.loaded, step)
    plgpu.barrier_wait(buffers.loaded.at[stage])
    if stripe.job.masks is not None:
        plgpu.barrier_wait(buffers.dropped.at[stage])

    def multiply(acc):
        z, lows = (tiles.at[stage].transpose((1, 0)) for tiles in (buffers.z, buffers.lows))
        # One for all: as narrow as they are, it lasts as long as it takes to read `z`.
        plgpu.wgmma(acc, z, lows)
        products = acc[...]
        plgpu.barrier_arrive(buffers.consumed.at[stage])
        return products

    return pl.run_scoped(multiply, plgpu.ACC((stripe.tiling.stripe, sum(stripe.ranks))))


def _sums_at(stripe: _Stripe, place) -> list:
    """The [stripe, r] parts of one slot's accumulators, whose slots are stacked along the rows."""
    size, sums = stripe.tiling.stripe, zip(stripe.job.accumulators, stripe.ranks, strict=True)
    if stripe.rank_major:
        columns = pl.ds(stripe.column, size)
        return [s.at[pl.ds(place * r, r), columns].transpose((1, 0)) for s, r in sums]
    rows = pl.ds(place * stripe.job.z.shape[1] + stripe.column, size)
    return [s.at[rows] for s, _ in sums]


def _load_sums(stripe: _Stripe, place):
    # Loads that count as optimized exist for shared memory only.
    load = partial(plgpu.load, layout=stripe.layout, optimized=False)
    sums = jnp.concatenate([load(at) for at in _sums_at(stripe, place)], axis=1)
    return plgpu.layout_cast(sums, plgpu.Layout.WGMMA)


def _store_sums(stripe: _Stripe, place, sums):
    @pl.when(place >= 0)
    def _():
        for at, ranks in zip(_sums_at(stripe, place), stripe.stacked, strict=True):
            at[...] = plgpu.layout_cast(sums[:, ranks], stripe.layout)


def _check_columns(job: ColumnJob, chunk_slot, tiling: ColumnTiling):
    rows, width = job.z.shape
    check_chunks(rows, chunk_slot, "tile_rows", tiling.tile_rows)
    if width % tiling.stripe or tiling.stripe % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of stripe = {tiling.stripe}, itself a "
            "multiple of 64"
        )
    check_ranks([low.shape[0] for low in job.lows])
