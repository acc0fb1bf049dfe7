"""Matrix products to which the low-rank product of the tile's task is added in the accumulator, for
Hopper GPUs.

One persistent kernel serves the forward pass, `x W + s B[t]`, and the input gradient,
`Σ dy W^T + ds A[t]^T` (LoRAFusion 5.1). One warpgroup loads tiles through TMA. Two other warpgroups
multiply them, each half the rows of an output tile. All `TILE_M` rows of a tile belong to one
chunk, so one task's factor is loaded for the tile. Thread blocks take tiles in turns, first those
with an owner, so that each block has an equal share of the work wherever the empty chunks are.

A finished output tile is stored through shared memory, nearly all of which holds the stages of the
pipeline. The tile therefore *borrows* the memory of the last left operands, of which each warpgroup
uses the part with its rows. The borrowed stages are released to the loading warpgroup only after
the first product of the next tile; by then the stores have read them.

Left operands and weights may be float8 (e4m3), which is twice as fast. Scales of rows and columns
are then applied to the finished tile. The low-rank products stay in half precision. With float8 or
dropout, they are added to the finished tile piece by piece, and so is a residual with float8.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu
from ..compilation import traced_once
from ..frozen_weight import FrozenWeight
from .dropout_sm90 import Masks, drop, load_counters, mask_operands
from .tiles_sm90 import (
    await_all,
    await_loaded,
    claim,
    flat,
    load_unoptimized,
    owned_first,
    product,
    run_warpgroups,
    smem_tiles,
    stage_of,
    warpgroups,
    write_zeros,
)

TILE_M = 128
TILE_N = 256
# Bytes of one row of an operand in one pipeline step: 64 numbers in half precision, 128 in float8.
STEP_BYTES = 128
# Rows and columns of a piece of the output that is stored at once. This is also the number of rows
# of a tile that one warpgroup computes.
PIECE = 64


class Tiling(NamedTuple):
    """How the kernel divides shared memory, and the order of its output tiles.

    `tilings.fitted` reduces a tiling until it fits; `scripts/tune_grouped_lora.py` finds the
    fastest.

    Attributes:
      stages: number of pipeline steps in flight, at least 2.
      borrowed: number of stages that a finished tile borrows, at least 1 and less than `stages`.
      spare: 0 or 1, the number of pieces of a finished tile for which each warpgroup has shared
        memory besides the stages.
      tile_r: largest depth of one low-rank product.
      low_stages: largest number of low-rank products in flight.
      minor: the dimension of the output along which consecutive tiles lie, 0 for rows and 1 for
        columns.
      group: number of consecutive tiles along `minor`, which share operands in the L2 cache.
    """

    stages: int = 4
    borrowed: int = 1
    spare: int = 1
    tile_r: int = 64
    low_stages: int = 1
    minor: int = 0
    group: int = 16


class Term(NamedTuple):
    """One product and the low-rank product that belongs to it:
    `lhs @ weight[layer] + low^T @ factor[t]`, or with the transposed weight.

    K is the depth of the product: k, or n with the transposed weight. M is the other width.

    Attributes:
      lhs: half precision, or float8.
      weight: [L, k, n], stored in the dtype of `lhs`. In float8 the contraction is the last axis of
        the values: [L, n, k], or with the transposed weight [L, k, n].
      low: the rank-r intermediate, rank-major.
      factor: rank-major: B, or A with its last two axes swapped.
    """

    lhs: Float[Array, "N K"]
    weight: FrozenWeight
    low: Float[Array, "r N"]
    factor: Float[Array, "T r M"]


class Scales(NamedTuple):
    """The scales of products in float8.

    Attributes:
      rows: scales of the rows of all left operands.
      columns: scales of the output columns in all layers; None if the left operands contain them.
    """

    rows: Float[Array, " N"]
    columns: Float[Array, "L M"] | None


@traced_once("transposed", "tiling", "blocks")
def routed_matmul(
    terms: tuple[Term, ...],
    chunk_slot: Int[Array, " chunks"],
    layer: Int[Array, ""],
    *,
    transposed: bool,
    tiling: Tiling,
    blocks: int,
    residual: Float[Array, "N M"] | None = None,
    masks: Masks | None = None,
    scales: Scales | None = None,
) -> Float[Array, "N M"]:
    """The sum over the terms of `lhs @ W[layer] + low^T @ factor[t]`, or with the transpose of W.

    Sums are float32; the result has the dtype of `low`. Rows of empty chunks (slot -1) are zeros.
    Products in float8 are scaled before the low-rank products and the residual are added.

    Args:
      terms: the products to add up, all with the same number of rows and columns. The columns M are
        a multiple of `TILE_N`.
      chunk_slot: int32, owner slot of each chunk. The tokens of a chunk are a multiple of `TILE_M`.
      layer: int32, index of the layer in the stacks of weights.
      transposed: whether to multiply by the transpose of W.
      tiling: a tiling that fits into shared memory.
      blocks: number of thread blocks to launch, one for each multiprocessor.
      residual: added to the result; only allowed if `transposed` is False.
      masks: dropout of each term's low-rank product, with counters for each term; None for none.
      scales: scales of the products, if they are in float8.
    """
    first = terms[0]
    dtype = first.low.dtype
    depth_last = transposed or scales is not None
    rows, columns = first.lhs.shape[0], first.weight.values.shape[1 if depth_last else 2]
    heights = tuple(t.weight.values.shape[1] for t in terms)
    layout = _Layout(tiling, depth_last, first.low.shape[0], heights, first.lhs.dtype, dtype)
    kernel = plgpu.kernel(
        partial(_kernel, layout),
        out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        scratch_types=(_scratch(layout),),
        grid=(blocks,),
        grid_names=("sm",),
        kernel_name="routed_matmul_transposed" if transposed else "routed_matmul",
        **warpgroups(3),
    )
    # The kernel gets terms whose layers and slots are stacked along the rows.
    terms = [t._replace(weight=flat(t.weight.values), factor=flat(t.factor)) for t in terms]
    layer = jnp.reshape(layer, 1).astype(jnp.int32)
    added = None
    if residual is not None and not layout.is_float8:
        # The residual enters the accumulator through the pipeline, as a product with the identity.
        added, residual = (jnp.eye(TILE_M, dtype=dtype), residual), None
    order = owned_first(chunk_slot, rows // TILE_M)
    if scales is not None and scales.columns is not None:
        scales = scales._replace(columns=scales.columns.reshape(-1))
    return kernel(layer, order, terms, added, residual, mask_operands(masks), scales)


class _Layout(NamedTuple):
    """Static properties of one call.

    Attributes:
      tiling: division of shared memory.
      depth_last: whether the contraction is the last axis of the weights' values.
      rank: rank of the low-rank products.
      heights: number of rows of each weight's values.
      dtype: dtype of the left operands and weights.
      out_dtype: dtype of the low-rank products and the output.
    """

    tiling: Tiling
    depth_last: bool
    rank: int
    heights: tuple[int, ...]
    dtype: Any
    out_dtype: Any

    @property
    def tile_k(self) -> int:
        return STEP_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def is_float8(self) -> bool:
        return self.dtype != self.out_dtype

    @property
    def low_steps(self) -> int:
        """Number of low-rank products of an output tile, each at most `tiling.tile_r` deep."""
        return len(self.heights) * (self.rank // self.tile_r)

    @property
    def tile_r(self) -> int:
        return min(self.rank, self.tiling.tile_r)


class _Scratch(NamedTuple):
    """Stages of the operands, pieces of the output, and barriers of the stages."""

    lhs: Any
    weight: Any
    low: Any
    factor: Any
    out: Any
    loaded: Any
    consumed: Any
    low_loaded: Any
    low_consumed: Any


class _Tile(NamedTuple):
    """An output tile and its owner."""

    rows: Any
    columns: Any
    slot: Int[Array, ""]


def _scratch(layout: _Layout) -> _Scratch:
    stages, low_stages = layout.tiling.stages, min(layout.tiling.low_stages, layout.low_steps)
    tile_k, tile_r, dtype = layout.tile_k, layout.tile_r, layout.out_dtype
    weight = (TILE_N, tile_k) if layout.depth_last else (tile_k, TILE_N)
    lhs = smem_tiles((stages, TILE_M, tile_k), layout.dtype)
    if layout.is_float8:
        # The output borrows the memory of left operands, whose rows have as many bytes.
        lhs = plgpu.RefUnion(lhs, smem_tiles((stages, TILE_M, PIECE), dtype))
    return _Scratch(
        lhs=lhs,
        weight=smem_tiles((stages, *weight), layout.dtype),
        low=smem_tiles((low_stages, tile_r, TILE_M), dtype, tile_r),
        factor=smem_tiles((low_stages, tile_r, TILE_N), dtype, tile_r),
        out=smem_tiles((2, PIECE, PIECE), dtype) if layout.tiling.spare else None,
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        low_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=low_stages),
        low_consumed=plgpu.Barrier(num_arrivals=2, num_barriers=low_stages),
    )


def _kernel(
    layout: _Layout, layer_gmem, order, terms, added, residual, masks, scales, out_gmem, scratch
):
    tiling, borrowed = layout.tiling, scratch.lhs
    if layout.is_float8:
        lhs, borrowed = scratch.lhs
        scratch = scratch._replace(lhs=lhs)
    # Low-rank products are added to the finished tile, not in the accumulator.
    adds_last = masks is not None or layout.is_float8
    shape = (out_gmem.shape[0] // TILE_M, out_gmem.shape[1] // TILE_N)
    depth = sum(term.lhs.shape[1] for term in terms) + (TILE_M if added else 0)
    steps = depth // layout.tile_k

    def for_each_tile(body):
        """Calls `body(tile, owned)` for each tile of this thread block, where `owned` is the number
        of tiles so far that had an owner. Returns the final number."""

        @plgpu.nd_loop((shape[0] * shape[1],), collective_axes="sm", init_carry=jnp.int32(0))
        def count(info, carry):
            place, column = plgpu.planar_snake(info.index[0], shape, tiling.minor, tiling.group)
            row, slot = order.tile[place], order.slot[place]
            tile = _Tile(pl.ds(row * TILE_M, TILE_M), pl.ds(column * TILE_N, TILE_N), slot)
            body(tile, carry)
            return carry + (slot >= 0).astype(jnp.int32)

        return count

    def load():
        layer = layer_gmem[0]

        def load_tile(tile, owned):
            @pl.when(tile.slot >= 0)
            def _():
                _load_low_rank(layout, terms, scratch, tile, owned * layout.low_steps)
                _load_steps(layout, terms, added, scratch, tile, layer, owned * steps)

        owned = for_each_tile(load_tile)
        await_all(scratch.consumed, owned * steps)
        await_all(scratch.low_consumed, owned * layout.low_steps)

    def multiply(thread):
        part = pl.ds(thread * PIECE, PIECE)

        def multiply_tile(tile, owned):
            step, low_step = owned * steps, owned * layout.low_steps
            out = out_gmem.at[tile.rows, tile.columns].at[part]

            def multiply_owned(acc):
                rows = pl.ds(tile.rows.start + thread * PIECE, PIECE)
                tokens = load_counters(masks, rows)
                scaled = _scaling(layout, scales, rows, tile, layer_gmem[0])
                if not adds_last:
                    _multiply_low_rank(layout, acc, scratch, part, low_step)
                _multiply_steps(acc, layout, scratch, part, step, steps)
                places = [scratch.out.at[thread]] if tiling.spare else []
                for stage in _borrowed(layout, scratch, step + steps):
                    places.append(borrowed.at[stage].at[part])
                store = partial(_store, acc[...], out, places)
                if not adds_last:
                    store()
                else:
                    for i in range(layout.low_steps):
                        await_loaded(scratch.low_loaded, low_step + i)
                    add = partial(
                        _add_low_rank, layout, scratch, masks, tokens, tile, part, low_step
                    )

                    def finished(piece, column: int):
                        if residual is None:
                            return add(scaled(piece, column), column)
                        addend = residual.at[rows, pl.ds(tile.columns.start + column, PIECE)]
                        # Loaded first, because it takes longest.
                        addend = load_unoptimized(addend, plgpu.Layout.WGMMA)
                        return add(scaled(piece, column), column) + addend.astype(jnp.float32)

                    store(finished)
                    _release_low_rank(layout, scratch, low_step)

            @pl.when(tile.slot >= 0)
            def _():
                pl.run_scoped(multiply_owned, plgpu.ACC((PIECE, TILE_N), jnp.float32))

            pl.when(tile.slot < 0)(lambda: write_zeros(out))

        owned = for_each_tile(multiply_tile)
        pl.when(owned > 0)(lambda: _return_stages(layout, scratch, owned * steps))
        plgpu.wait_smem_to_gmem(0)

    run_warpgroups(load, multiply)


def _load_low_rank(layout: _Layout, terms, scratch: _Scratch, tile: _Tile, step):
    for term in terms:
        for rank in range(0, layout.rank, layout.tile_r):
            stage = claim(scratch.low_consumed, step)
            barrier = scratch.low_loaded.at[stage]
            ranks = pl.ds(tile.slot * layout.rank + rank, layout.tile_r)
            low = term.low.at[pl.ds(rank, layout.tile_r), tile.rows]
            plgpu.copy_gmem_to_smem(low, scratch.low.at[stage], barrier)
            factor = term.factor.at[ranks, tile.columns]
            plgpu.copy_gmem_to_smem(factor, scratch.factor.at[stage], barrier)
            step += 1


def _load_steps(layout: _Layout, terms, added, scratch: _Scratch, tile: _Tile, layer, step):
    for term, height in zip(terms, layout.heights, strict=True):
        count = term.lhs.shape[1] // layout.tile_k

        @pl.loop(0, count)
        def _step(i, term=term, height=height, step=step):
            depth = pl.ds(i * layout.tile_k, layout.tile_k)
            if layout.depth_last:
                weight = term.weight.at[pl.ds(layer * height + tile.columns.start, TILE_N), depth]
            else:
                at = layer * height + i * layout.tile_k
                weight = term.weight.at[pl.ds(at, layout.tile_k), tile.columns]
            _load_step(scratch, step + i, term.lhs.at[tile.rows, depth], weight)

        step += count

    if added:
        identity, residual = added
        tile_k = layout.tile_k
        for i in range(TILE_M // tile_k):
            rows = pl.ds(tile.rows.start + i * tile_k, tile_k)
            lhs, weight = identity.at[:, pl.ds(i * tile_k, tile_k)], residual.at[rows, tile.columns]
            _load_step(scratch, step + i, lhs, weight)


def _load_step(scratch: _Scratch, step, lhs, weight):
    stage = claim(scratch.consumed, step)
    barrier = scratch.loaded.at[stage]
    plgpu.copy_gmem_to_smem(lhs, scratch.lhs.at[stage], barrier)
    plgpu.copy_gmem_to_smem(weight, scratch.weight.at[stage], barrier)


def _multiply_low_rank(layout: _Layout, acc, scratch: _Scratch, part, step):
    for _ in range(layout.low_steps):
        stage = await_loaded(scratch.low_loaded, step)
        low = scratch.low.at[stage].at[:, part].transpose((1, 0))
        plgpu.wgmma(acc, low, scratch.factor.at[stage])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.low_consumed.at[stage])
        step += 1


def _release_low_rank(layout: _Layout, scratch: _Scratch, step):
    for i in range(layout.low_steps):
        plgpu.barrier_arrive(scratch.low_consumed.at[stage_of(scratch.low_loaded, step + i)])


def _scaling(layout: _Layout, scales: Scales | None, rows, tile: _Tile, layer):
    """A function that scales a piece of a tile if products are in float8. It takes the piece and
    the column at which the piece starts."""
    if not layout.is_float8:
        return lambda piece, column: piece

    def across(values, shape, axis: int):
        return jax.lax.broadcast_in_dim(values, shape, (axis,))

    of_rows = load_unoptimized(scales.rows.at[rows], plgpu.Layout.WGMMA.reduce(1))

    def scaled(piece, column: int):
        piece = piece * across(of_rows, piece.shape, 0)
        if scales.columns is None:
            return piece
        # The output columns of one layer are rows of the weight's values.
        first = layer * layout.heights[0] + tile.columns.start + column
        scales_of_piece = scales.columns.at[pl.ds(first, PIECE)]
        of_columns = load_unoptimized(scales_of_piece, plgpu.Layout.WGMMA.reduce(0))
        return piece * across(of_columns, piece.shape, 1)

    return scaled


def _add_low_rank(layout, scratch, masks, tokens, tile, part, step, total, column: int):
    """`total`, the piece of a tile that starts at a column, plus the low-rank products, with
    dropout if there are masks."""
    columns = pl.ds(column, PIECE)
    per_term = layout.low_steps // len(layout.heights)

    def operands(term: int):
        for i in range(term * per_term, (term + 1) * per_term):
            stage = stage_of(scratch.low_loaded, step + i)
            low = scratch.low.at[stage].at[:, part].transpose((1, 0))
            yield low, scratch.factor.at[stage].at[:, columns]

    if masks is None:
        every = (pair for term in range(len(layout.heights)) for pair in operands(term))
        return total + product(total.shape, every)
    first = tile.columns.start + column
    products = (
        drop(product(total.shape, operands(term)), masks, tokens[term], tile.slot, first)
        for term in range(len(layout.heights))
    )
    return sum(products, total)


def _multiply_steps(acc, layout: _Layout, scratch: _Scratch, part, first_step, steps: int):
    """Multiplies all steps of a tile. Each stage is released after the next product has started.
    The last stages are not released, because the finished tile borrows them."""

    def multiply(i):
        stage = await_loaded(scratch.loaded, first_step + i)
        weight = scratch.weight.at[stage]
        weight = weight.transpose((1, 0)) if layout.depth_last else weight
        plgpu.wgmma(acc, scratch.lhs.at[stage].at[part], weight)

    multiply(0)
    pl.when(first_step > 0)(lambda: _return_stages(layout, scratch, first_step))

    @pl.loop(1, steps)
    def _step(i):
        multiply(i)
        plgpu.wgmma_wait(1)
        before = scratch.consumed.at[stage_of(scratch.consumed, first_step + i - 1)]
        pl.when(i <= steps - layout.tiling.borrowed)(lambda: plgpu.barrier_arrive(before))

    plgpu.wgmma_wait(0)


def _borrowed(layout: _Layout, scratch: _Scratch, step) -> list:
    """The stages that are borrowed for a tile whose last step is `step - 1`."""
    return [stage_of(scratch.consumed, step - 1 - i) for i in range(layout.tiling.borrowed)]


def _return_stages(layout: _Layout, scratch: _Scratch, step):
    """Releases the stages borrowed by the tile whose last step is `step - 1`, after its stores have
    read them."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for stage in _borrowed(layout, scratch, step):
        plgpu.barrier_arrive(scratch.consumed.at[stage])


def _store(total, out_gmem, places, add=lambda piece, column: piece):
    """Stores a warpgroup's rows of a tile, piece by piece, through `places` in shared memory that
    are used in turns. `add(piece, column)` may change a piece first."""
    for i in range(TILE_N // PIECE):
        column, place = i * PIECE, places[i % len(places)]
        piece = add(total[:, column : column + PIECE], column)
        if i >= len(places):
            plgpu.wait_smem_to_gmem(len(places) - 1, wait_read_only=True)
        place[...] = piece.astype(out_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(place, out_gmem.at[:, pl.ds(column, PIECE)])
