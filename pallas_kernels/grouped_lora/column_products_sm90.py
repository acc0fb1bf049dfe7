"""Adds the products of a long activation with its rank-r intermediates to the accumulators of the
tasks, at the speed of memory, for Hopper: `X^T dS` and `S^T dY`.

Every thread block owns a stripe of columns and walks over all rows in stream order, with the sums
of the task whose chunks pass in registers: no atomics, and one left fold for every task. As in
`row_products_sm90`, what meets the activation is rank-major.
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
    swizzled,
)


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
    stages: int = 5


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
        intermediates.
      chunk_slot: int32 [C], owner slot of each chunk of N / C rows; see `row_products`.
      interpret: see `plgpu.kernel`.

    Returns:
      Per job, the new accumulators in the shapes of the old.

    Raises:
      ValueError: the tiling does not divide the arrays.
    """
    for job in jobs:
        _check_columns(job, chunk_slot, tiling)
    rank_major = [job.rank_major for job in jobs]

    def body(slot_gmem, jobs):
        stripe = lax.axis_index("stripe")
        _multiply_stripe(tiling, slot_gmem, jobs, rank_major, stripe)

    operands = _column_operands(jobs)
    plgpu.kernel(
        body,
        grid=(_stripes(jobs, tiling),),
        grid_names=("stripe",),
        kernel_name="column_products",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )(chunk_slot, operands)
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


def _new_accumulators(jobs, operands: list[_ColumnOperands]) -> tuple:
    return tuple(
        tuple(
            jax.freeze(new).reshape(old.shape)
            for new, old in zip(refs.accumulators, job.accumulators, strict=True)
        )
        for refs, job in zip(operands, jobs, strict=True)
    )


def _stripes(jobs, tiling: ColumnTiling) -> int:
    return sum(job.z.shape[1] for job in jobs) // tiling.stripe


class _Stripe(NamedTuple):
    """What one thread block of the column products works on; `column` is its first."""

    job: _ColumnOperands
    slot_gmem: Any
    column: Any
    tiling: ColumnTiling
    rank_major: bool

    @property
    def ranks(self) -> list[int]:
        return [low.shape[0] for low in self.job.lows]

    @property
    def layout(self):
        """The layout of sums in registers; each stores along the rows of its accumulator."""
        return plgpu.Layout.WGMMA_TRANSPOSED if self.rank_major else plgpu.Layout.WGMMA

    def owner(self, step):
        return owner(self.slot_gmem, step, self.job.z.shape[0] // self.tiling.tile_rows)


class _Buffers(NamedTuple):
    z: Any
    lows: Any
    loaded: Any
    dropped: Any


def _multiply_stripe(tiling: ColumnTiling, slot_gmem, jobs, rank_major, stripe):
    """The products of the stripe of columns with number `stripe`, counted through all jobs."""
    first = 0
    for job, is_rank_major in zip(jobs, rank_major, strict=True):
        count = job.z.shape[1] // tiling.stripe

        @pl.when((stripe >= first) & (stripe < first + count))
        def _(job=job, is_rank_major=is_rank_major, first=first):
            column = (stripe - first) * tiling.stripe
            _multiply_columns(_Stripe(job, slot_gmem, column, tiling, is_rank_major))

        first += count


def _multiply_columns(stripe: _Stripe):
    """Adds the products of one stripe of columns, over all rows, to the owners' accumulators."""
    dtype, ranks, tile = stripe.job.z.dtype, stripe.ranks, stripe.tiling.tile_rows
    shape = (tile, stripe.tiling.stripe)
    elements = tile * (stripe.tiling.stripe + sum(ranks))
    reserved = dropped_size(stripe.job.masks, shape)
    fitting = stages_that_fit(stripe.tiling.stages, elements, dtype, reserved)
    stages = min(stripe.job.z.shape[0] // tile, fitting)

    def with_dropped(dropped):
        pl.run_scoped(
            lambda *buffers: _add_products(stripe, _Buffers(*buffers, dropped), stages),
            plgpu.SMEM((stages, *shape), dtype, transforms=swizzled(dtype)),
            [plgpu.SMEM((stages, rank, tile), dtype, transforms=swizzled(dtype)) for rank in ranks],
            plgpu.Barrier(num_arrivals=1 + len(ranks), num_barriers=stages),
        )

    with_dropped_tile(stripe.job.masks, shape, dtype, with_dropped)


def _add_products(stripe: _Stripe, buffers: _Buffers, stages: int):
    """The loop over the rows. It carries the slot whose chunks pass and, in registers, its sums."""
    steps = stripe.job.z.shape[0] // stripe.tiling.tile_rows

    def step(i, carry):
        stage, slot = lax.rem(i, jnp.int32(stages)), stripe.owner(i)

        def add(slot_before, sums):
            def change_slot():
                _store_sums(stripe, slot_before, sums)
                return _load_sums(stripe, slot)

            sums = lax.cond(slot != slot_before, change_slot, lambda: sums)
            products = _stripe_products(stripe, buffers, i, stage, slot)
            return slot, [total + new for total, new in zip(sums, products, strict=True)]

        carry = lax.cond(slot >= 0, add, lambda *carry: carry, *carry)
        pl.when(i + stages < steps)(lambda: _load_stripe(stripe, buffers, i + stages, stage))
        return carry

    for i in range(stages):
        _load_stripe(stripe, buffers, jnp.int32(i), i)
    zeros = [
        plgpu.layout_cast(jnp.zeros((stripe.tiling.stripe, rank), jnp.float32), stripe.layout)
        for rank in stripe.ranks
    ]
    _store_sums(stripe, *lax.fori_loop(0, steps, step, (jnp.int32(-1), zeros)))


def _load_stripe(stripe: _Stripe, buffers: _Buffers, step, stage):
    """Starts the copies of one step's tiles, unless nobody owns its rows."""
    rows = pl.ds(step * stripe.tiling.tile_rows, stripe.tiling.tile_rows)
    columns = pl.ds(stripe.column, stripe.tiling.stripe)

    @pl.when(stripe.owner(step) >= 0)
    def _():
        copy = partial(plgpu.copy_gmem_to_smem, barrier=buffers.loaded.at[stage])
        copy(stripe.job.z.at[rows, columns], buffers.z.at[stage])
        for low, low_smem in zip(stripe.job.lows, buffers.lows, strict=True):
            copy(low.at[:, rows], low_smem.at[stage])


def _stripe_products(stripe: _Stripe, buffers: _Buffers, step, stage, slot) -> list:
    """Waits for one step's tiles and returns `z^T low^T` of each intermediate."""
    masks, tiling = stripe.job.masks, stripe.tiling
    counters = load_counters(masks, pl.ds(step * tiling.tile_rows, tiling.tile_rows))
    plgpu.barrier_wait(buffers.loaded.at[stage])

    def multiply(*accs):
        for i, (acc, low) in enumerate(zip(accs, buffers.lows, strict=True)):
            z = buffers.z.at[stage]
            if masks is not None:
                z = buffers.dropped
                drop_tile(buffers.z.at[stage], z, masks, counters[i], slot, stripe.column)
            plgpu.wgmma(acc, z.transpose((1, 0)), low.at[stage].transpose((1, 0)))
        return [plgpu.layout_cast(acc[...], stripe.layout) for acc in accs]

    return pl.run_scoped(multiply, *(plgpu.ACC((tiling.stripe, rank)) for rank in stripe.ranks))


def _sums_at(stripe: _Stripe, slot) -> list:
    """The [stripe, r] parts of one slot's accumulators, whose slots are stacked along the rows."""
    width, size = stripe.job.z.shape[1], stripe.tiling.stripe
    if not stripe.rank_major:
        rows = pl.ds(slot * width + stripe.column, size)
        return [accumulator.at[rows] for accumulator in stripe.job.accumulators]
    return [
        accumulator.at[pl.ds(slot * rank, rank), pl.ds(stripe.column, size)].transpose((1, 0))
        for accumulator, rank in zip(stripe.job.accumulators, stripe.ranks, strict=True)
    ]


def _load_sums(stripe: _Stripe, slot) -> list:
    # Loads that count as optimized exist for shared memory only.
    return [plgpu.load(at, layout=stripe.layout, optimized=False) for at in _sums_at(stripe, slot)]


def _store_sums(stripe: _Stripe, slot, sums: list):
    @pl.when(slot >= 0)
    def _():
        for at, value in zip(_sums_at(stripe, slot), sums, strict=True):
            at[...] = value


def _check_columns(job: ColumnJob, chunk_slot, tiling: ColumnTiling):
    rows, width = job.z.shape
    check_chunks(rows, chunk_slot, "tile_rows", tiling.tile_rows)
    if width % tiling.stripe or tiling.stripe % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of stripe = {tiling.stripe}, itself a "
            "multiple of 64"
        )
    check_ranks([low.shape[0] for low in job.lows])
