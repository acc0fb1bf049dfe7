"""Matrix products with a low-rank product of the tile's task added in the accumulator, for Hopper.

One persistent kernel serves the forward pass, `x W + s B[t]`, and the input gradient,
`Σ dy W^T + ds A[t]^T` (LoRAFusion 5.1). A warpgroup loads tiles through TMA; two others multiply
them. Every output tile has `TILE_M` rows, all of one chunk, so one task's factor is loaded for it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from .dropout_sm90 import Masks, drop, load_counters, mask_operands
from .tiles_sm90 import COMPILER_PARAMS, await_all, claim, flat, run_warpgroups

TILE_M = 128
# Rows of the output stored at once.
PIECE_M = 64


class Tiling(NamedTuple):
    """Tile sizes of the kernel, found by `scripts/tune_grouped_lora.py`.

    Attributes:
      tile_n: output columns of a thread block.
      split_rows: whether the two multiplying warpgroups share a tile by rows, not by columns.
      cluster: thread blocks, 1 or 2, that lie above each other and share what they load of W.
      tile_k: depth of one pipeline step.
      stages: pipeline steps in flight.
      tile_r: depth of one low-rank product, at most.
      low_stages: low-rank products in flight, at most.
      epilogue_n: columns stored at once.
      group: output tiles that neighbouring blocks share along `minor`, for the L2 cache.
      minor: the dimension that varies fastest, 0 for rows and 1 for columns.
      delay_release: steps by which a buffer's release trails its product (0 or 1).
    """

    tile_n: int = 256
    split_rows: bool = True
    cluster: int = 1
    tile_k: int = 64
    stages: int = 4
    tile_r: int = 64
    low_stages: int = 1
    epilogue_n: int = 32
    group: int = 16
    minor: int = 0
    delay_release: int = 0


class Term(NamedTuple):
    """One product and its low-rank companion: `lhs @ weight + low^T @ factor[t]`.

    Attributes:
      lhs: [N, K] in half precision.
      weight: [L, k, n], frozen, of which layer `layer` is used: [K, n] or, transposed, [k, K].
      low: [r, N], the rank-r intermediate, rank-major.
      factor: [T, r, n], rank-major: `b` as it is, `a` with its last axes swapped.
    """

    lhs: Float[Array, "N K"]
    weight: Float[Array, "L k n"]
    low: Float[Array, "r N"]
    factor: Float[Array, "T r n"]


def routed_matmul(
    terms: tuple[Term, ...],
    chunk_slot: Int[Array, "C"],
    layer: Int[Array, ""],
    *,
    transposed: bool,
    tiling: Tiling,
    blocks: int,
    residual: Float[Array, "N n"] | None = None,
    masks: Masks | None = None,
    interpret: Any = None,
) -> Float[Array, "N n"]:
    """Sum over the terms of `lhs @ W[layer] + low^T @ factor[t]`, or with the transpose of W.

    Rows of empty chunks (slot -1) are zeros. Sums are float32; the result has the dtype of `lhs`.

    Args:
      chunk_slot: int32 [C], owner slot of each chunk; N / C is a multiple of `TILE_M`.
      blocks: thread blocks to launch, one per multiprocessor.
      residual: added to the result; only with W as it is.
      masks: dropout of each term's low-rank product, with counters per term; None for none.
      interpret: see `plgpu.kernel`.
    """
    first = terms[0]
    cluster = tiling.cluster
    dtype = first.lhs.dtype
    rows, columns = first.lhs.shape[0], first.weight.shape[1 if transposed else 2]
    layout = _Layout(
        tiling, transposed, first.low.shape[0], tuple(t.weight.shape[1] for t in terms)
    )
    kernel = plgpu.kernel(
        partial(_kernel, layout),
        out_type=jax.ShapeDtypeStruct((rows, columns), dtype),
        scratch_types=_scratch(layout, dtype),
        grid=(blocks // cluster,),
        grid_names=("sm",),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=3,
        thread_name="wg",
        kernel_name="routed_matmul_transposed" if transposed else "routed_matmul",
        compiler_params=COMPILER_PARAMS,
        interpret=interpret,
    )
    # A slice of a three-dimensional array does not lower: layers and slots become row offsets.
    operands = [Term(t.lhs, flat(t.weight), t.low, flat(t.factor)) for t in terms]
    layer = jnp.reshape(layer, 1).astype(jnp.int32)
    # As the product with an identity, the residual takes the pipeline's way into the accumulator.
    added = None if residual is None else (jnp.eye(TILE_M, dtype=dtype), residual)
    return kernel(layer, chunk_slot, operands, added, mask_operands(masks))


class _Layout(NamedTuple):
    """Static facts of one call; `heights` are the rows of one layer of each weight."""

    tiling: Tiling
    transposed: bool
    rank: int
    heights: tuple[int, ...]

    @property
    def part(self) -> tuple[int, int]:
        """Rows and columns of one warpgroup's part of a tile."""
        if self.tiling.split_rows:
            return TILE_M // 2, self.tiling.tile_n
        return TILE_M, self.tiling.tile_n // 2

    def part_of(self, warpgroup):
        """Where in a tile a warpgroup's part lies."""
        rows, columns = self.part
        if self.tiling.split_rows:
            return pl.ds(warpgroup * rows, rows), pl.ds(0, columns)
        return pl.ds(0, rows), pl.ds(warpgroup * columns, columns)

    @property
    def low_steps(self) -> int:
        """Low-rank products of an output tile, each at most `tiling.tile_r` deep."""
        return len(self.heights) * (self.rank // self.tile_r)

    @property
    def tile_r(self) -> int:
        return min(self.rank, self.tiling.tile_r)


class _Scratch(NamedTuple):
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
    """Where a thread block works; `live` where any block of its cluster has a task's tile."""

    rows: Any
    columns: Any
    slot: Int[Array, ""]
    live: Bool[Array, ""]

    @property
    def owned(self) -> Bool[Array, ""]:
        return self.slot >= 0


def _scratch(layout: _Layout, dtype) -> tuple:
    tiling, low_stages = layout.tiling, min(layout.tiling.low_stages, layout.low_steps)
    weight = (tiling.tile_k, tiling.tile_n)
    out = (2, 2, PIECE_M, tiling.epilogue_n)
    consumed = dict(num_arrivals=2, num_barriers=tiling.stages)

    def tiles(count: int, rows: int, columns: int, depth: int):
        # The swizzle of an operand may not exceed the depth of the product.
        return plgpu.SMEM((count, rows, columns), dtype, transforms=_swizzled(depth, dtype))

    return tuple(
        _Scratch(
            lhs=tiles(tiling.stages, TILE_M, tiling.tile_k, tiling.tile_k),
            weight=tiles(
                tiling.stages, *(weight[::-1] if layout.transposed else weight), tiling.tile_k
            ),
            low=tiles(low_stages, layout.tile_r, TILE_M, layout.tile_r),
            factor=tiles(low_stages, layout.tile_r, layout.tiling.tile_n, layout.tile_r),
            out=plgpu.SMEM(out, dtype, transforms=_swizzled(tiling.epilogue_n, dtype)),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            consumed=plgpu.Barrier(**consumed)
            if tiling.cluster == 1
            else plgpu.ClusterBarrier(collective_axes=("cluster",), **consumed),
            low_loaded=plgpu.Barrier(num_arrivals=2, num_barriers=low_stages),
            low_consumed=plgpu.Barrier(num_arrivals=2, num_barriers=low_stages),
        )
    )


def _swizzled(columns: int, dtype) -> tuple:
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def _kernel(layout: _Layout, layer_gmem, slot_gmem, terms, added, masks, out_gmem, *scratch):
    scratch = _Scratch(*scratch)
    tiling = layout.tiling
    shape = (out_gmem.shape[0] // (tiling.cluster * TILE_M), out_gmem.shape[1] // tiling.tile_n)
    chunk_tiles = out_gmem.shape[0] // (slot_gmem.shape[0] * TILE_M)
    depth = sum(term.lhs.shape[1] for term in terms) + (TILE_M if added else 0)
    steps = depth // tiling.tile_k

    def for_each_tile(body):
        # The carry counts the pipeline steps, and the tiles that have a task, so far.
        @plgpu.nd_loop((shape[0] * shape[1],), collective_axes="sm", init_carry=(jnp.int32(0),) * 2)
        def counts(info, carry):
            row, column = plgpu.planar_snake(info.index[0], shape, tiling.minor, tiling.group)
            tile = _tile(tiling, slot_gmem, chunk_tiles, row, column)
            step, owned = carry
            body(tile, step, owned)
            return step + tile.live.astype(jnp.int32) * steps, owned + tile.owned.astype(jnp.int32)

        return counts

    def load():
        layer = layer_gmem[0]

        def load_tile(tile, step, owned):
            @pl.when(tile.owned)
            def _():
                _load_low_rank(layout, terms, scratch, tile, owned * layout.low_steps)

            @pl.when(tile.live)
            def _():
                _load_steps(layout, terms, added, scratch, tile, layer, step)

        step, owned = for_each_tile(load_tile)
        # No barrier may be left with an arrival that nobody waited for.
        await_all(scratch.consumed, step)
        await_all(scratch.low_consumed, owned * layout.low_steps)

    def multiply(thread):
        part = layout.part_of(thread)

        def multiply_tile(tile, step, owned):
            low_step = owned * layout.low_steps
            tokens = _load_tokens(layout, masks, tile, part)

            @partial(pl.run_scoped, acc=plgpu.ACC(layout.part, jnp.float32))
            def _scope(acc):
                if masks is None:

                    @pl.when(tile.owned)
                    def _():
                        _multiply_low_rank(layout, acc, scratch, part, low_step)

                @pl.when(tile.live)
                def _():
                    _multiply_steps(layout, acc, scratch, part, step, steps)

                out = acc[...]
                if tiling.cluster > 1:
                    # An empty tile may have been multiplied along with its neighbour's.
                    out = lax.cond(tile.owned, lambda: out, lambda: jnp.zeros_like(out))
                at = out_gmem.at[tile.rows, tile.columns].at[part]
                store = partial(_store, out, at, scratch.out.at[thread], tiling.epilogue_n)
                if masks is None:
                    store()
                else:
                    dropped = masks, tokens
                    add = partial(_add_dropped, layout, scratch, dropped, tile, part, low_step)
                    _with_low_rank(layout, scratch, tile, low_step, lambda: store(add))

        for_each_tile(multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    run_warpgroups(load, multiply)


def _tile(tiling: Tiling, slot_gmem, chunk_tiles: int, row, column) -> _Tile:
    """The tile of this block when its cluster is at a row and column of clusters."""

    def slot_of(row):
        return slot_gmem[lax.div(row, jnp.int32(chunk_tiles))]

    row *= tiling.cluster
    live = slot_of(row) >= 0
    if tiling.cluster == 2:
        live |= slot_of(row + 1) >= 0
        row += lax.axis_index("cluster")
    columns = pl.ds(column * tiling.tile_n, tiling.tile_n)
    return _Tile(pl.ds(row * TILE_M, TILE_M), columns, slot_of(row), live)


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
    tile_k = layout.tiling.tile_k
    for term, height in zip(terms, layout.heights, strict=True):
        count = term.lhs.shape[1] // tile_k

        @pl.loop(0, count)
        def _step(i, term=term, height=height, step=step):
            depth = pl.ds(i * tile_k, tile_k)
            if layout.transposed:
                rows = pl.ds(layer * height + tile.columns.start, layout.tiling.tile_n)
                weight = term.weight.at[rows, depth]
            else:
                rows = pl.ds(layer * height + i * tile_k, tile_k)
                weight = term.weight.at[rows, tile.columns]
            _load_step(layout, scratch, step + i, term.lhs.at[tile.rows, depth], weight)

        step += count

    if added:
        identity, residual = added
        for i in range(TILE_M // tile_k):
            rows = pl.ds(tile.rows.start + i * tile_k, tile_k)
            lhs, weight = identity.at[:, pl.ds(i * tile_k, tile_k)], residual.at[rows, tile.columns]
            # The rows of a residual are the tile's own: nothing to share with a neighbour.
            _load_step(layout, scratch, step + i, lhs, weight, shared=False)


def _load_step(layout: _Layout, scratch: _Scratch, step, lhs, weight, shared: bool = True):
    stage = claim(scratch.consumed, step)
    barrier = scratch.loaded.at[stage]
    plgpu.copy_gmem_to_smem(lhs, scratch.lhs.at[stage], barrier)
    shared = shared and layout.tiling.cluster > 1
    plgpu.copy_gmem_to_smem(
        weight, scratch.weight.at[stage], barrier, collective_axes="cluster" if shared else None
    )


def _multiply_low_rank(layout: _Layout, acc, scratch: _Scratch, part, step):
    for _ in range(layout.low_steps):
        stage = lax.rem(step, jnp.int32(scratch.low.shape[0]))
        plgpu.barrier_wait(scratch.low_loaded.at[stage])
        low = scratch.low.at[stage].at[:, part[0]].transpose((1, 0))
        plgpu.wgmma(acc, low, scratch.factor.at[stage].at[:, part[1]])
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.low_consumed.at[stage])
        step += 1


def _with_low_rank(layout: _Layout, scratch: _Scratch, tile: _Tile, step, function):
    """Calls the function while the low-rank operands of an owned tile are loaded."""
    stages = [lax.rem(step + i, jnp.int32(scratch.low.shape[0])) for i in range(layout.low_steps)]

    @pl.when(tile.owned)
    def _():
        for stage in stages:
            plgpu.barrier_wait(scratch.low_loaded.at[stage])

    function()

    @pl.when(tile.owned)
    def _():
        for stage in stages:
            plgpu.barrier_arrive(scratch.low_consumed.at[stage])


def _load_tokens(layout: _Layout, masks, tile: _Tile, part) -> list:
    """The counters of a warpgroup's part of a tile, for every `PIECE_M` rows. Loaded ahead of the
    products, because the epilogue would wait for them."""
    first = tile.rows.start + part[0].start
    pieces = range(0, layout.part[0], PIECE_M)
    return [load_counters(masks, pl.ds(first + row, PIECE_M)) for row in pieces]


def _add_dropped(layout, scratch, dropped, tile, part, step, total, row: int, column: int):
    """A piece of the output at a row and column of a warpgroup's part, plus its dropped low-rank
    products."""
    rows = pl.ds(part[0].start + row, total.shape[0])
    columns = pl.ds(part[1].start + column, total.shape[1])
    per_term = layout.low_steps // len(layout.heights)
    masks, tokens = dropped

    def product(term: int):
        def multiply(acc):
            for i in range(term * per_term, (term + 1) * per_term):
                stage = lax.rem(step + i, jnp.int32(scratch.low.shape[0]))
                low = scratch.low.at[stage].at[:, rows].transpose((1, 0))
                plgpu.wgmma(acc, low, scratch.factor.at[stage].at[:, columns])
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC(total.shape, jnp.float32))

    def with_products():
        first = tile.columns.start + columns.start
        products = (
            drop(product(term), masks, tokens[row // PIECE_M][term], tile.slot, first)
            for term in range(len(layout.heights))
        )
        return sum(products, total)

    return lax.cond(tile.owned, with_products, lambda: total)


def _multiply_steps(layout: _Layout, acc, scratch: _Scratch, part, first_step, steps: int):
    stages, delay = layout.tiling.stages, layout.tiling.delay_release

    def stage_of(step):
        return lax.rem(step, jnp.int32(stages))

    @pl.loop(0, steps)
    def _step(i):
        stage = stage_of(first_step + i)
        plgpu.barrier_wait(scratch.loaded.at[stage])
        weight = scratch.weight.at[stage]
        if layout.transposed:
            weight = weight.at[part[1]].transpose((1, 0))
        else:
            weight = weight.at[:, part[1]]
        plgpu.wgmma(acc, scratch.lhs.at[stage].at[part[0]], weight)
        plgpu.wgmma_wait(delay)
        if delay:
            previous = stage_of(first_step + i + (stages - 1))
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.consumed.at[previous]))
        else:
            plgpu.barrier_arrive(scratch.consumed.at[stage])

    if delay:
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.consumed.at[stage_of(first_step + (steps - 1))])


def _store(acc, out_gmem, out_smem, epilogue_n: int, add=lambda piece, row, column: piece):
    rows, columns = acc.shape
    pieces = ((r, c) for r in range(0, rows, PIECE_M) for c in range(0, columns, epilogue_n))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i, (row, column) in enumerate(pieces):
        at = (slice(row, row + PIECE_M), slice(column, column + epilogue_n))
        piece = add(acc[at], row, column).astype(out_gmem.dtype)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        out_smem[i % 2] = piece
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[i % 2], out_gmem.at[at])
