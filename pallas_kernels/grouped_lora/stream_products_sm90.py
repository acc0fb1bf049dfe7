"""Products of a long activation with its tasks' low-rank matrices at the speed of memory, for
Hopper.

`row_products` multiplies rows of the activation by the factor of the task that owns them (`X A[t]`,
`dY B[t]^T`); `column_products` adds the products with the rank-r intermediates to the accumulators
of the tasks (`X^T dS`, `S^T dY`); `gradient_products` does both in one launch, so that the second
reader of the activation finds it in the L2 cache. One warpgroup a thread block waits for TMA loads
and multiplies; several stages of loads in flight, not arithmetic, set the pace.

Every array that meets the activation in a product is *rank-major*, `[r, w]` or `[r, N]`: the two
operands of a `wgmma` share one swizzle, and only rank-major tiles of rank 16 have the wide swizzle
with which the activation loads fast.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from .dropout_sm90 import MaskOperands, Masks, drop, load_counters, mask_operands

# What a thread block may hold, less what barriers and alignment take.
_SHARED_MEMORY = 224 * 1024


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


class ColumnJob(NamedTuple):
    """An activation, the intermediates that multiply its columns, and where the sums go.

    Attributes:
      z: [N, w] in half precision.
      lows: [r, N] each, in the dtype of `z`.
      accumulators: one per intermediate, float32 [T, w, r] or, if rank-major, [T, r, w].
      rank_major: whether the accumulators are, as the gradient of `b` is.
      masks: dropout of `z`, with counters per intermediate; None for none.
    """

    z: Float[Array, "N w"]
    lows: tuple[Float[Array, "r N"], ...]
    accumulators: tuple[Float[Array, "T _ _"], ...]
    rank_major: bool
    masks: Masks | None = None


class RowTiling(NamedTuple):
    """Tile sizes of `row_products`.

    Attributes:
      tile_m: rows of a thread block, a divisor of the chunk.
      tile_k: columns of one load, a multiple of 64.
      splits: thread blocks that share the columns of a row tile.
      stages: loads in flight, at most; fewer where shared memory ends.
    """

    tile_m: int = 128
    tile_k: int = 128
    splits: int = 2
    stages: int = 5


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


def row_products(
    jobs: tuple[RowJob, ...],
    chunk_slot: Int[Array, "C"],
    *,
    tiling: RowTiling = RowTiling(),  # noqa: B008
    interpret: Any = None,
) -> tuple[tuple[Float[Array, "splits N r"], ...], ...]:
    """`z F[t]^T` for every factor of every job, in partial sums over `splits` ranges of columns.

    Rows of empty chunks (slot -1) are zeros and their `z` is not read.

    Args:
      jobs: what to multiply; each `z` is read once for all its factors.
      chunk_slot: int32 [C], owner slot of each chunk of N / C rows. Factors of several layers can
        be passed as [L T, r, w] with the slots of layer l counted from l T.
      interpret: see `plgpu.kernel`.

    Returns:
      Per job and factor, float32 [splits, N, r] whose sum over the first axis is the product.

    Raises:
      ValueError: the tiling does not divide the arrays.
    """
    for job in jobs:
        _check_rows(job, chunk_slot, tiling)
    rows = jobs[0].z.shape[0]

    def body(slot_gmem, jobs, *outputs):
        tile, split = lax.axis_index("tile"), lax.axis_index("split")
        for job, out in zip(jobs, outputs, strict=True):
            _multiply_rows(tiling, slot_gmem, job, out, tile, split)

    return plgpu.kernel(
        body,
        out_type=_row_outputs(jobs, tiling),
        grid=(rows // tiling.tile_m, tiling.splits),
        grid_names=("tile", "split"),
        kernel_name="row_products",
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
    )(chunk_slot, _row_operands(jobs))


def column_products(
    jobs: tuple[ColumnJob, ...],
    chunk_slot: Int[Array, "C"],
    *,
    tiling: ColumnTiling = ColumnTiling(),  # noqa: B008
    interpret: Any = None,
) -> tuple[tuple[Float[Array, "T _ _"], ...], ...]:
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
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
    )(chunk_slot, operands)
    return _new_accumulators(jobs, operands)


def gradient_products(
    row_jobs: tuple[RowJob, ...],
    column_jobs: tuple[ColumnJob, ...],
    chunk_slot: Int[Array, "C"],
    *,
    row_tiling: RowTiling = RowTiling(splits=8),  # noqa: B008
    column_tiling: ColumnTiling = ColumnTiling(),  # noqa: B008
    blocks: int,
    interpret: Any = None,
) -> tuple[
    tuple[tuple[Float[Array, "splits N r"], ...], ...],
    tuple[tuple[Float[Array, "T _ _"], ...], ...],
]:
    """`row_products` and `column_products` in one launch, for jobs that share their activations.

    Every stripe of columns has a thread block; the others walk the row tiles in the same order, a
    few tiles at a time, each split among several blocks. Both pass over the rows at about the same
    pace, so an activation comes from memory once and then from the L2 cache.

    Args:
      blocks: thread blocks to launch, one per multiprocessor.

    Returns:
      What the two functions return.

    Raises:
      ValueError: a tiling does not divide the arrays, or the stripes leave no block for the rows.
    """
    for job in row_jobs:
        _check_rows(job, chunk_slot, row_tiling)
    for job in column_jobs:
        _check_columns(job, chunk_slot, column_tiling)
    stripes = _stripes(column_jobs, column_tiling)
    if stripes >= blocks:
        raise ValueError(f"{stripes} stripes of columns leave none of {blocks} blocks for the rows")
    rank_major = [job.rank_major for job in column_jobs]
    units = row_jobs[0].z.shape[0] // row_tiling.tile_m * row_tiling.splits

    def body(slot_gmem, row_jobs, column_jobs, *outputs):
        block = lax.axis_index("block")

        @pl.when(block < stripes)
        def _():
            _multiply_stripe(column_tiling, slot_gmem, column_jobs, rank_major, block)

        @pl.when(block >= stripes)
        def _():
            @pl.loop(0, pl.cdiv(units, blocks - stripes))
            def _round(i):
                unit = i * (blocks - stripes) + block - stripes

                @pl.when(unit < units)
                def _():
                    tile, split = lax.div(unit, row_tiling.splits), lax.rem(unit, row_tiling.splits)
                    for job, out in zip(row_jobs, outputs, strict=True):
                        _multiply_rows(row_tiling, slot_gmem, job, out, tile, split)

    operands = _column_operands(column_jobs)
    sums = plgpu.kernel(
        body,
        out_type=_row_outputs(row_jobs, row_tiling),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="gradient_products",
        compiler_params=_COMPILER_PARAMS,
        interpret=interpret,
    )(chunk_slot, _row_operands(row_jobs), operands)
    return sums, _new_accumulators(column_jobs, operands)


_COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


class _RowOperands(NamedTuple):
    z: Any
    factors: tuple
    masks: MaskOperands | None


class _ColumnOperands(NamedTuple):
    z: Any
    lows: tuple
    accumulators: tuple
    masks: MaskOperands | None


def _row_operands(jobs) -> list[_RowOperands]:
    # A slice of a three-dimensional array does not load: slots become row offsets.
    return [
        _RowOperands(job.z, tuple(_flat(f) for f in job.factors), mask_operands(job.masks))
        for job in jobs
    ]


def _row_outputs(jobs, tiling: RowTiling) -> tuple:
    def partial_sums(job, factor):
        shape = (tiling.splits, job.z.shape[0], factor.shape[1])
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return tuple(tuple(partial_sums(job, factor) for factor in job.factors) for job in jobs)


def _column_operands(jobs) -> list[_ColumnOperands]:
    return [
        _ColumnOperands(
            job.z,
            job.lows,
            tuple(jax.new_ref(_flat(g)) for g in job.accumulators),
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


def _flat(stacked: Float[Array, "T _ _"]) -> Float[Array, "_ _"]:
    return stacked.reshape(-1, stacked.shape[-1])


def _stripes(jobs, tiling: ColumnTiling) -> int:
    return sum(job.z.shape[1] for job in jobs) // tiling.stripe


def _multiply_rows(tiling: RowTiling, slot_gmem, job: _RowOperands, outputs, tile, split):
    """One row tile of `z` times its owner's factors, over one range of columns."""
    dtype = job.z.dtype
    ranks = [out.shape[-1] for out in outputs]
    width = job.z.shape[1] // tiling.splits
    rows, columns = pl.ds(tile * tiling.tile_m, tiling.tile_m), pl.ds(split * width, width)
    slot = _owner(slot_gmem, tile, job.z.shape[0] // tiling.tile_m)
    load = (tiling.tile_m, tiling.tile_k)

    heights = (tiling.tile_m, *ranks)
    pipeline = partial(
        plgpu.emit_pipeline,
        grid=(width // tiling.tile_k,),
        in_specs=[_load_spec((height, tiling.tile_k), dtype) for height in heights],
        max_concurrent_steps=_stages(
            tiling.stages, sum(heights) * tiling.tile_k, dtype, _dropped_size(job.masks, load)
        ),
    )

    def multiply(accs, dropped_smem, counters, index, z_smem, *factors_smem):
        column = split * width + index[0] * tiling.tile_k
        for i, (acc, factor) in enumerate(zip(accs, factors_smem, strict=True)):
            left = z_smem
            if job.masks is not None:
                left = dropped_smem
                _drop(z_smem, dropped_smem, job.masks, counters[i], slot, column)
            plgpu.wgmma(acc, left, factor.transpose((1, 0)))
        # The buffers of the step before are free once only this step's products are in flight.
        plgpu.wgmma_wait(len(accs))

    def scope(dropped_smem, *accs):
        @pl.when(slot >= 0)
        def _():
            owned = [
                factor.at[pl.ds(slot * rank, rank), columns]
                for factor, rank in zip(job.factors, ranks, strict=True)
            ]
            counters = load_counters(job.masks, rows)
            pipeline(partial(multiply, accs, dropped_smem, counters))(
                job.z.at[rows, columns], *owned
            )

        for acc, out in zip(accs, outputs, strict=True):
            out.at[split, rows][...] = acc[...]

    def with_dropped(dropped_smem):
        accs = (plgpu.ACC((tiling.tile_m, rank)) for rank in ranks)
        pl.run_scoped(partial(scope, dropped_smem), *accs)

    _with_dropped(job.masks, load, dtype, with_dropped)


def _load_spec(shape, dtype):
    return plgpu.BlockSpec(
        shape, lambda step: (0, step), transforms=_swizzled(dtype), delay_release=1
    )


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
        return _owner(self.slot_gmem, step, self.job.z.shape[0] // self.tiling.tile_rows)


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
    reserved = _dropped_size(stripe.job.masks, shape)
    stages = min(
        stripe.job.z.shape[0] // tile, _stages(stripe.tiling.stages, elements, dtype, reserved)
    )

    def with_dropped(dropped):
        pl.run_scoped(
            lambda *buffers: _add_products(stripe, _Buffers(*buffers, dropped), stages),
            plgpu.SMEM((stages, *shape), dtype, transforms=_swizzled(dtype)),
            [
                plgpu.SMEM((stages, rank, tile), dtype, transforms=_swizzled(dtype))
                for rank in ranks
            ],
            plgpu.Barrier(num_arrivals=1 + len(ranks), num_barriers=stages),
        )

    _with_dropped(stripe.job.masks, shape, dtype, with_dropped)


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
                _drop(buffers.z.at[stage], z, masks, counters[i], slot, stripe.column)
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


def _drop(z_smem, dropped_smem, masks: MaskOperands, counters, slot, first_column):
    """Writes the tile of `z` to another place with the owner's dropout applied."""
    # The product before may still read the place.
    plgpu.wgmma_wait(0)
    width = 64
    for start in range(0, z_smem.shape[1], width):
        part = pl.ds(start, width)
        z = plgpu.load(z_smem.at[:, part], layout=plgpu.Layout.WGMMA)
        dropped = drop(z, masks, counters, slot, first_column + start)
        dropped_smem.at[:, part][...] = dropped
    plgpu.commit_smem()


def _with_dropped(masks: MaskOperands | None, shape, dtype, function):
    """Calls the function with a place for a dropped tile, or with None where nothing drops."""
    if masks is None:
        function(None)
    else:
        pl.run_scoped(function, plgpu.SMEM(shape, dtype, transforms=_swizzled(dtype)))


def _dropped_size(masks: MaskOperands | None, shape) -> int:
    return 0 if masks is None else shape[0] * shape[1]


def _owner(slot_gmem, tile, tiles: int):
    return slot_gmem[lax.div(tile, jnp.int32(tiles // slot_gmem.shape[0]))]


def _swizzled(dtype) -> tuple:
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)


def _stages(wanted: int, elements: int, dtype, reserved: int = 0) -> int:
    """How many loads of so many elements fit beside the reserved ones."""
    available = _SHARED_MEMORY // jnp.dtype(dtype).itemsize - reserved
    if 2 * elements > available:
        raise ValueError(
            f"two loads of {elements} elements do not fit into shared memory, which has room for "
            f"{available}; use smaller tiles"
        )
    return min(wanted, available // elements)


def _check_rows(job: RowJob, chunk_slot, tiling: RowTiling):
    rows, width = job.z.shape
    _check_chunks(rows, chunk_slot, "tile_m", tiling.tile_m)
    if width % (tiling.splits * tiling.tile_k) or tiling.tile_k % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of splits x tile_k = {tiling.splits} x "
            f"{tiling.tile_k}, and tile_k a multiple of 64"
        )
    _check_ranks([factor.shape[1] for factor in job.factors])


def _check_columns(job: ColumnJob, chunk_slot, tiling: ColumnTiling):
    rows, width = job.z.shape
    _check_chunks(rows, chunk_slot, "tile_rows", tiling.tile_rows)
    if width % tiling.stripe or tiling.stripe % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of stripe = {tiling.stripe}, itself a "
            "multiple of 64"
        )
    _check_ranks([low.shape[0] for low in job.lows])


def _check_chunks(rows: int, chunk_slot, name: str, size: int):
    chunks = chunk_slot.shape[0]
    if rows % (chunks * size) or size % 64:
        raise ValueError(
            f"{rows} rows in {chunks} chunks; expected chunks of a multiple of {name} = {size}, "
            "itself a multiple of 64"
        )


def _check_ranks(ranks: list[int]):
    if any(rank % 8 or rank > 256 for rank in ranks):
        raise ValueError(f"ranks {ranks}; expected multiples of 8, at most 256")
