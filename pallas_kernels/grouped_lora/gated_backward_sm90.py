"""The gradients of `silu(gate) * up`, and in the same kernel the five low-rank products of these
gradients and of the activation, for Hopper GPUs.

Every array of N rows is read or written once. One warpgroup loads tiles through TMA; two other
warpgroups compute the results. They overwrite an input with each result in shared memory, where it
is an operand of the products and the source of the TMA store. They go on to the next tile while the
products and stores run. As in `row_products_sm90`, the low-rank operands are rank-major.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu
from ..compilation import traced_once
from .gated_tiles_sm90 import (
    PART,
    check_gated_rank,
    check_width,
    load_float32,
    release,
    sigmoid,
)
from .tiles_sm90 import (
    await_all,
    await_loaded,
    check_chunks,
    claim,
    flat,
    load_unoptimized,
    owner,
    run_warpgroups,
    smem_tiles,
    stage_of,
    stages_that_fit,
    store_rank_major,
    warpgroups,
    write_zeros,
)

# Up to this rank there are enough registers to differentiate a tile during the previous tile's
# products.
RANK_AHEAD = 32


class BackwardTiling(NamedTuple):
    """Tile sizes of `gated_backward`, whose tiles have 64 rows and 128 columns. `stages` is the
    largest number of loads in flight; it is reduced to what fits into shared memory."""

    stages: int = 4


@traced_once("tiling")
def gated_backward(
    gate: Float[Array, "N w"],
    up: Float[Array, "N w"],
    dh: Float[Array, "N w"],
    b: tuple[Float[Array, "T r w"], Float[Array, "T r w"]],
    lows: tuple[Float[Array, "r N"], Float[Array, "r N"], Float[Array, "r N"]],
    accumulators: tuple[Float[Array, "*LT r w"], Float[Array, "*LT r w"], Float[Array, "*LT w r"]],
    chunk_slot: Int[Array, " chunks"],
    chunk_place: Int[Array, " chunks"],
    *,
    tiling: BackwardTiling = BackwardTiling(),  # noqa: B008
) -> tuple[
    tuple[Float[Array, "N w"], Float[Array, "N w"]],
    Float[Array, "2 splits r N"],
    tuple[Float[Array, "*LT r w"], Float[Array, "*LT r w"], Float[Array, "*LT w r"]],
]:
    """The gradients of `h = silu(gate) * up`, and all low-rank products of them and of h.

    With σ the sigmoid of the gate, `dup = dh gate σ` and `dgate = dh up σ (1 + gate (1 - σ))`. Each
    is computed in float32 and rounded once. h is computed again in the same way and not written to
    memory. The products are those of the rounded values. Products of 64 rows are added to an
    accumulator one after another in stream order, so its bits depend only on the task's own rows.
    Slots that own no chunk keep their bits. Rows of empty chunks (slot -1) are zeros; there the
    inputs are not read. XLA updates the accumulators in place if nothing else uses them.

    Args:
      gate: output of `gate_proj`, half precision; the dtype of all inputs but the accumulators.
      up: output of `up_proj`.
      dh: the cotangent of h.
      b: the B factors of `gate_proj` and `up_proj`.
      lows: rank-r intermediates: s of `gate_proj` and of `up_proj`, whose products with dgate and
        dup are the gradients of their B; and ds of `down_proj`, whose product with h is the
        gradient of its A.
      accumulators: float32, those of the three gradients.
      chunk_slot: int32, owner slot of each chunk.
      chunk_place: int32, index of each chunk's owner in the accumulators, -1 for an empty chunk;
        see `column_products`.

    Returns:
      dgate and dup; the products `dgate b[0][t]^T` and `dup b[1][t]^T`, stacked and rank-major, as
      partial sums over the second axis; the new accumulators. The partial sums are rounded to half
      precision, so that half as many bytes are written. There are so many of them that their
      errors average out: their sum is as accurate as an exact sum that is rounded once.
    """
    rows, width = gate.shape
    rank = lows[0].shape[0]
    check_chunks(rows, chunk_slot, "tile rows", PART)
    check_width(width, 2 * PART)
    check_gated_rank(rank)
    refs = tuple(jax.new_ref(flat(each)) for each in accumulators)
    stripes = width // (2 * PART)
    gradients, partial_sums = plgpu.kernel(
        _backward_kernel,
        out_type=(
            (jax.ShapeDtypeStruct(gate.shape, gate.dtype),) * 2,
            jax.ShapeDtypeStruct((2, stripes, rank, rows), gate.dtype),
        ),
        scratch_types=(_backward_scratch(tiling, rank, gate.dtype),),
        grid=(stripes,),
        grid_names=("stripe",),
        kernel_name="gated_backward",
        **warpgroups(3, approx_math=True),
    )(chunk_slot, chunk_place, (gate, up, dh), tuple(map(flat, b)), lows, refs)
    new = (jax.freeze(ref).reshape(old.shape) for ref, old in zip(refs, accumulators, strict=True))
    return gradients, partial_sums, tuple(new)


class _BackwardScratch(NamedTuple):
    """Stages of operands and their barriers: gate, up and dh, which dgate, dup and h overwrite; and
    the three intermediates. Also two tiles of each factor, for the current and the next owner."""

    activations: Any
    lows: Any
    factors: Any
    loaded: Any
    written: Any
    consumed: Any
    factors_loaded: Any
    factors_consumed: Any


class _Stripe(NamedTuple):
    """The work of one thread block: two parts of 64 columns each, over all rows. The fields are the
    kernel's operands, outputs and scratch, and the indices of the thread block and the warpgroup.
    """

    slots: Any
    places: Any
    activations: tuple
    factors: tuple
    lows: tuple
    accumulators: tuple
    gradients: tuple
    partial_sums: Any
    scratch: _BackwardScratch
    index: Any
    thread: Any

    @property
    def rank(self) -> int:
        return self.partial_sums.shape[2]

    @property
    def tiles(self) -> int:
        return self.partial_sums.shape[3] // PART

    @property
    def columns(self):
        return pl.ds(self.index * 2 * PART, 2 * PART)

    @property
    def part(self):
        return pl.ds(self.index * 2 * PART + self.thread * PART, PART)

    def stage(self, step):
        return stage_of(self.scratch.loaded, step)

    def place(self, tile):
        return owner(self.places, tile, self.tiles)

    def is_owned(self, tile):
        inside = (tile >= 0) & (tile < self.tiles)
        return inside & (self.place(jnp.clip(tile, 0, self.tiles - 1)) >= 0)

    def is_ahead(self, tile):
        """Whether a tile is differentiated during the products of the previous tile."""
        return self.is_owned(tile - 1) & self.is_owned(tile) & (self.rank <= RANK_AHEAD)


class _Progress(NamedTuple):
    """The progress of a loop over the row tiles.

    Attributes:
      step: number of tiles with an owner so far.
      spans: number of spans so far; a span is consecutive tiles of the same owner.
      place: the owner of the last of these tiles, as an index in the accumulators.
    """

    step: Int[Array, ""]
    spans: Int[Array, ""]
    place: Int[Array, ""]


def _no_progress() -> _Progress:
    return _Progress(jnp.int32(0), jnp.int32(0), jnp.int32(-1))


def _backward_scratch(tiling: BackwardTiling, rank: int, dtype) -> _BackwardScratch:
    factors = 2 * 2 * rank * 2 * PART
    stages = stages_that_fit(tiling.stages, 3 * PART * (2 * PART + rank), dtype, factors)
    return _BackwardScratch(
        activations=smem_tiles((stages, 3, PART, 2 * PART), dtype),
        lows=smem_tiles((stages, 3, rank, PART), dtype),
        factors=smem_tiles((2, 2, rank, 2 * PART), dtype),
        loaded=plgpu.Barrier(num_arrivals=6, num_barriers=stages),
        written=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        factors_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        factors_consumed=plgpu.Barrier(num_arrivals=2, num_barriers=2),
    )


def _backward_kernel(*arrays):
    stripe = _Stripe(*arrays, lax.axis_index("stripe"), lax.axis_index("wg"))
    run_warpgroups(lambda: _load_tiles(stripe), lambda _: _compute_tiles(stripe))


def _load_tiles(stripe: _Stripe):
    scratch = stripe.scratch

    def load(tile, progress):
        place = stripe.place(tile)

        def load_owned(progress):
            starts_span = place != progress.place
            pl.when(starts_span)(lambda: _load_factors(stripe, tile, progress.spans))
            _load_tile(stripe, tile, progress.step)
            spans = progress.spans + starts_span.astype(jnp.int32)
            return _Progress(progress.step + 1, spans, place)

        return lax.cond(place >= 0, load_owned, lambda progress: progress, progress)

    progress = lax.fori_loop(0, stripe.tiles, load, _no_progress())
    await_all(scratch.consumed, progress.step)
    await_all(scratch.factors_consumed, progress.spans)


def _load_factors(stripe: _Stripe, tile, span):
    scratch = stripe.scratch
    stage = claim(scratch.factors_consumed, span)
    slot = owner(stripe.slots, tile, stripe.tiles)
    ranks = pl.ds(slot * stripe.rank, stripe.rank)
    for i, factor in enumerate(stripe.factors):
        plgpu.copy_gmem_to_smem(
            factor.at[ranks, stripe.columns],
            scratch.factors.at[stage, i],
            scratch.factors_loaded.at[stage],
        )


def _load_tile(stripe: _Stripe, tile, step):
    scratch = stripe.scratch
    stage, rows = claim(scratch.consumed, step), pl.ds(tile * PART, PART)
    copy = partial(plgpu.copy_gmem_to_smem, barrier=scratch.loaded.at[stage])
    for i, (activation, low) in enumerate(zip(stripe.activations, stripe.lows, strict=True)):
        copy(activation.at[rows, stripe.columns], scratch.activations.at[stage, i])
        copy(low.at[:, rows], scratch.lows.at[stage, i])


def _compute_tiles(stripe: _Stripe):
    """Loops over the row tiles. The loop carries the current owner's accumulators in registers."""

    def compute(tile, carry):
        place = stripe.place(tile)

        def compute_owned(progress, accumulated):
            spans, accumulated = lax.cond(
                place != progress.place,
                lambda: (progress.spans + 1, _change_owner(stripe, progress, place, accumulated)),
                lambda: (progress.spans, accumulated),
            )
            progress = _Progress(progress.step, spans, place)
            pl.when(~stripe.is_ahead(tile))(lambda: _differentiate(stripe, progress.step))
            products = _products(stripe, tile, progress)
            accumulated = [total + new for total, new in zip(accumulated, products, strict=True)]
            return progress._replace(step=progress.step + 1), accumulated

        def clear(*carry):
            rows = pl.ds(tile * PART, PART)
            for gradient in stripe.gradients:
                write_zeros(gradient.at[rows, stripe.part])
            zeros = jnp.zeros((PART, stripe.rank), stripe.partial_sums.dtype)
            store_rank_major(stripe.partial_sums.at[stripe.thread, stripe.index].at[:, rows], zeros)
            return carry

        return lax.cond(place >= 0, compute_owned, clear, *carry)

    zeros = jnp.zeros((PART, stripe.rank), jnp.float32)
    accumulated = [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)] * 3
    carry = _no_progress(), accumulated
    progress, accumulated = lax.fori_loop(0, stripe.tiles, compute, carry)

    @pl.when(progress.step > 0)
    def _():
        _store_accumulators(stripe, progress.place, accumulated)
        plgpu.barrier_arrive(stripe.scratch.factors_consumed.at[lax.rem(progress.spans - 1, 2)])


def _change_owner(stripe: _Stripe, before: _Progress, place, accumulated: list) -> list:

    @pl.when(before.spans > 0)
    def _():
        _store_accumulators(stripe, before.place, accumulated)
        plgpu.barrier_arrive(stripe.scratch.factors_consumed.at[lax.rem(before.spans - 1, 2)])

    plgpu.barrier_wait(stripe.scratch.factors_loaded.at[lax.rem(before.spans, 2)])
    return _load_accumulators(stripe, place)


def _differentiate(stripe: _Stripe, step):
    """Computes dgate, dup and h of this warpgroup's part of a tile."""
    scratch = stripe.scratch
    stage = await_loaded(scratch.loaded, step)
    part = pl.ds(stripe.thread * PART, PART)
    tiles = [scratch.activations.at[stage, i].at[:, part] for i in range(3)]
    gate, up, dh = map(load_float32, tiles)
    sigma = sigmoid(gate)
    silu = gate * sigma
    slope = sigma * (1 + gate * (1 - sigma))
    # Written from last to first: in the other order, there are too few registers at rank 32.
    for tile, value in zip(tiles[::-1], (silu * up, silu * dh, slope * dh * up), strict=True):
        tile[...] = value.astype(tile.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch.written.at[stage])


def _products(stripe: _Stripe, tile, progress: _Progress) -> list:
    """Computes the products of a tile, and meanwhile differentiates the next tile if `is_ahead`.

    Returns the products that sum over the tile's rows, for this warpgroup's columns. Stores the
    products that sum over the tile's columns: the first warpgroup computes the one of dgate, the
    second one that of dup.
    """
    scratch, stage, thread = stripe.scratch, stripe.stage(progress.step), stripe.thread
    part, rows = pl.ds(thread * PART, PART), pl.ds(tile * PART, PART)
    next_is_ahead = stripe.is_ahead(tile + 1)

    def multiply(row_acc, *column_accs):
        for i, acc in enumerate(column_accs):
            activation = scratch.activations.at[stage, i].at[:, part]
            low = scratch.lows.at[stage, i]
            plgpu.wgmma(acc, activation.transpose((1, 0)), low.transpose((1, 0)))
        plgpu.barrier_wait(scratch.written.at[stage])
        factor = scratch.factors.at[lax.rem(progress.spans - 1, 2), thread]
        plgpu.wgmma(row_acc, scratch.activations.at[stage, thread], factor.transpose((1, 0)))
        _store_gradient(stripe, rows, stage)
        pl.when(next_is_ahead)(lambda: _differentiate(stripe, progress.step + 1))
        release(scratch.consumed.at[stage])
        row_products = row_acc[...].astype(stripe.partial_sums.dtype)
        store_rank_major(stripe.partial_sums.at[thread, stripe.index].at[:, rows], row_products)
        return [acc[...] for acc in column_accs]

    return pl.run_scoped(multiply, *(plgpu.ACC((PART, stripe.rank)) for _ in range(4)))


def _store_gradient(stripe: _Stripe, rows, stage):
    """Starts the store of dgate or dup of a tile."""
    for i, gradient in enumerate(stripe.gradients):

        @pl.when(stripe.thread == i)
        def _(i=i, gradient=gradient):
            tile = stripe.scratch.activations.at[stage, i]
            plgpu.copy_smem_to_gmem(tile, gradient.at[rows, stripe.columns])


def _accumulator_parts(stripe: _Stripe, place) -> list:
    """This warpgroup's [64, r] part of each of one owner's accumulators, in global memory, with the
    register layout in which it is loaded and stored."""
    *rank_major, da_down = stripe.accumulators
    ranks = pl.ds(place * stripe.rank, stripe.rank)
    width = stripe.gradients[0].shape[1]
    return [
        (db.at[ranks, stripe.part].transpose((1, 0)), plgpu.Layout.WGMMA_TRANSPOSED)
        for db in rank_major
    ] + [(da_down.at[pl.ds(place * width + stripe.part.start, PART)], plgpu.Layout.WGMMA)]


def _load_accumulators(stripe: _Stripe, place) -> list:
    return [
        plgpu.layout_cast(load_unoptimized(at, layout), plgpu.Layout.WGMMA)
        for at, layout in _accumulator_parts(stripe, place)
    ]


def _store_accumulators(stripe: _Stripe, place, accumulated: list):
    for (at, layout), value in zip(_accumulator_parts(stripe, place), accumulated, strict=True):
        at[...] = plgpu.layout_cast(value, layout)
