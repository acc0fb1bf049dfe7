"""Matrix products to which the low-rank product of the tile's task is added in the accumulator, for
Hopper GPUs.

One persistent kernel serves the forward pass, `x W + s B[t]`, and the input gradient,
`Σ dy W^T + ds A[t]^T` (LoRAFusion 5.1). One warpgroup loads tiles through TMA. Two others multiply
them, each half the rows of an output tile. All `TILE_M` rows of a tile belong to one chunk, so one
task's factor is loaded for the tile. Thread blocks take tiles in turns, first those with an owner,
so that each block has an equal share of the work wherever the empty chunks are.

A finished output tile is stored through shared memory, nearly all of which holds the stages of the
pipeline. The tile therefore *borrows* the place of the last left operands, of which each warpgroup
uses its own rows. The borrowed stages are released to the loading warpgroup only after the first
product of the next tile; by then the stores have read them.
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
# Depth of one pipeline step.
TILE_K = 64
# Rows and columns of a piece of the output that is stored at once. It is also the number of a
# tile's rows that one warpgroup computes.
PIECE = 64


class Tiling(NamedTuple):
    """How the kernel divides shared memory, and the order of its output tiles.

    `tilings.fitted` reduces a tiling until it fits; `scripts/tune_grouped_lora.py` finds the
    fastest.

    Attributes:
      stages: number of pipeline steps in flight, at least 2.
      borrowed: number of stages that a finished tile borrows, at least 1 and less than `stages`.
      spare: number of pieces of a finished tile, 0 or 1 for each warpgroup, that have a place of
        their own in shared memory.
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
      lhs: half precision.
      weight: [L, k, n], stored in the dtype of `lhs`.
      low: the rank-r intermediate, rank-major.
      factor: rank-major: B as it is, or A with its last two axes swapped.
    """

    lhs: Float[Array, "N K"]
    weight: FrozenWeight
    low: Float[Array, "r N"]
    factor: Float[Array, "T r M"]


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
) -> Float[Array, "N M"]:
    """The sum over the terms of `lhs @ W[layer] + low^T @ factor[t]`, or with the transpose of W.

    Sums are float32; the result has the dtype of `lhs`. Rows of empty chunks (slot -1) are zeros.

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
    """
    first = terms[0]
    dtype = first.lhs.dtype
    rows, columns = first.lhs.shape[0], first.weight.shape[1 if transposed else 2]
    layout = _Layout(
        tiling, transposed, first.low.shape[0], tuple(t.weight.shape[1] for t in terms)
    )
    kernel = plgpu.kernel(
        partial(_kernel, layout),
        out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        scratch_types=(_scratch(layout, dtype),),
        grid=(blocks,),
        grid_names=("sm",),
        kernel_name="routed_matmul_transposed" if transposed else "routed_matmul",
        **warpgroups(3),
    )
    # The kernel is given terms whose layers and slots are stacked along the rows.
    terms = [t._replace(weight=flat(t.weight.values), factor=flat(t.factor)) for t in terms]
    layer = jnp.reshape(layer, 1).astype(jnp.int32)
    # The residual enters the accumulator through the pipeline, as a product with the identity.
    added = None if residual is None else (jnp.eye(TILE_M, dtype=dtype), residual)
    order = owned_first(chunk_slot, rows // TILE_M)
    return kernel(layer, order, terms, added, mask_operands(masks))


class _Layout(NamedTuple):
    """Static properties of one call; `heights` are the numbers of rows k of each weight."""

    tiling: Tiling
    transposed: bool
    rank: int
    heights: tuple[int, ...]

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


def _scratch(layout: _Layout, dtype) -> _Scratch:
    stages, low_stages = layout.tiling.stages, min(layout.tiling.low_stages, layout.low_steps)
    weight = (TILE_N, TILE_K) if layout.transposed else (TILE_K, TILE_N)
    tile_r = layout.tile_r
    return _Scratch(
        lhs=smem_tiles((stages, TILE_M, TILE_K), dtype),
        weight=smem_tiles((stages, *weight), dtype),
        low=smem_tiles((low_stages, tile_r, TILE_M), dtype, tile_r),
        factor=smem_tiles((low_stages, tile_r, TILE_N), dtype, tile_r),
        out=smem_tiles((2, PIECE, PIECE), dtype) if layout.tiling.spare else None,
        loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        low_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=low_stages),
        low_consumed=plgpu.Barrier(num_arrivals=2, num_barriers=low_stages),
    )


def _kernel(layout: _Layout, layer_gmem, order, terms, added, masks, out_gmem, scratch):
    tiling = layout.tiling
    shape = (out_gmem.shape[0] // TILE_M, out_gmem.shape[1] // TILE_N)
    depth = sum(term.lhs.shape[1] for term in terms) + (TILE_M if added else 0)
    steps = depth // TILE_K

    def for_each_tile(body):
        """Calls `body(tile, owned)`, where `owned` is the number of this thread block's tiles so
        far that had an owner; returns their final number."""

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
                tokens = load_counters(masks, pl.ds(tile.rows.start + thread * PIECE, PIECE))
                if masks is None:
                    _multiply_low_rank(layout, acc, scratch, part, low_step)
                _multiply_steps(acc, layout, scratch, part, step, steps)
                places = [scratch.out.at[thread]] if tiling.spare else []
                for stage in _borrowed(layout, scratch, step + steps):
                    places.append(scratch.lhs.at[stage].at[part])
                store = partial(_store, acc[...], out, places)
                if masks is None:
                    store()
                else:
                    at = tile, part, low_step
                    for i in range(layout.low_steps):
                        await_loaded(scratch.low_loaded, low_step + i)
                    store(partial(_add_dropped, layout, scratch, masks, tokens, *at))
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
        count = term.lhs.shape[1] // TILE_K

        @pl.loop(0, count)
        def _step(i, term=term, height=height, step=step):
            depth = pl.ds(i * TILE_K, TILE_K)
            if layout.transposed:
                weight = term.weight.at[pl.ds(layer * height + tile.columns.start, TILE_N), depth]
            else:
                weight = term.weight.at[pl.ds(layer * height + i * TILE_K, TILE_K), tile.columns]
            _load_step(scratch, step + i, term.lhs.at[tile.rows, depth], weight)

        step += count

    if added:
        identity, residual = added
        for i in range(TILE_M // TILE_K):
            rows = pl.ds(tile.rows.start + i * TILE_K, TILE_K)
            lhs, weight = identity.at[:, pl.ds(i * TILE_K, TILE_K)], residual.at[rows, tile.columns]
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


def _add_dropped(layout, scratch, masks, tokens, tile, part, step, total, column: int):
    """`total`, the piece of a tile that starts at a column, plus the low-rank products with
    dropout."""
    columns = pl.ds(column, PIECE)
    per_term = layout.low_steps // len(layout.heights)

    def operands(term: int):
        for i in range(term * per_term, (term + 1) * per_term):
            stage = stage_of(scratch.low_loaded, step + i)
            low = scratch.low.at[stage].at[:, part].transpose((1, 0))
            yield low, scratch.factor.at[stage].at[:, columns]

    first = tile.columns.start + column
    products = (
        drop(product(total.shape, operands(term)), masks, tokens[term], tile.slot, first)
        for term in range(len(layout.heights))
    )
    return sum(products, total)


def _multiply_steps(acc, layout: _Layout, scratch: _Scratch, part, first_step, steps: int):
    """Multiplies all steps of a tile. A stage is released when the product after it has been
    started; the last stages are not, because the finished tile borrows them."""

    def multiply(i):
        stage = await_loaded(scratch.loaded, first_step + i)
        weight = scratch.weight.at[stage]
        weight = weight.transpose((1, 0)) if layout.transposed else weight
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
    """The stages that are borrowed for a tile whose last step is the one before `step`."""
    return [stage_of(scratch.consumed, step - 1 - i) for i in range(layout.tiling.borrowed)]


def _return_stages(layout: _Layout, scratch: _Scratch, step):
    """Releases the stages borrowed by the tile that ended before `step`, when its stores have read
    them."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for stage in _borrowed(layout, scratch, step):
        plgpu.barrier_arrive(scratch.consumed.at[stage])


def _store(total, out_gmem, places, add=lambda piece, column: piece):
    """Stores a warpgroup's rows of a tile, piece by piece, through places in shared memory that are
    used in turns. `add(piece, column)` may change a piece first."""
    for i in range(TILE_N // PIECE):
        column, place = i * PIECE, places[i % len(places)]
        piece = add(total[:, column : column + PIECE], column)
        if i >= len(places):
            plgpu.wait_smem_to_gmem(len(places) - 1, wait_read_only=True)
        place[...] = piece.astype(out_gmem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(place, out_gmem.at[:, pl.ds(column, PIECE)])
