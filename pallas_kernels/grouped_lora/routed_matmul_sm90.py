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
from jaxtyping import Array, Float, Int

TILE_M = 128


class Tiling(NamedTuple):
    """Tile sizes of the kernel, found by `scripts/tune_grouped_lora.py`.

    Attributes:
      tile_n: output columns of each of the two multiplying warpgroups.
      tile_k: depth of one pipeline step.
      stages: pipeline steps in flight.
      epilogue_n: columns stored at once.
      group: output tiles that neighbouring blocks share along `minor`, for the L2 cache.
      minor: the dimension that varies fastest, 0 for rows and 1 for columns.
      delay_release: steps by which a buffer's release trails its product (0 or 1).
    """

    tile_n: int = 128
    tile_k: int = 64
    stages: int = 4
    epilogue_n: int = 32
    group: int = 8
    minor: int = 1
    delay_release: int = 0


class Term(NamedTuple):
    """One product and its low-rank companion: `lhs @ weight + low @ factor[t]`.

    Attributes:
      lhs: [N, K] in half precision.
      weight: [L, k, n], frozen, of which layer `layer` is used: [K, n] or, transposed, [k, K].
      low: [N, r], the rank-r intermediate.
      factor: [L, T, r, n] or, transposed, [L, T, k, r].
    """

    lhs: Float[Array, "N K"]
    weight: Float[Array, "L k n"]
    low: Float[Array, "N r"]
    factor: Float[Array, "L T _ _"]


def routed_matmul(
    terms: tuple[Term, ...],
    chunk_slot: Int[Array, "C"],
    layer: Int[Array, ""],
    *,
    transposed: bool,
    tiling: Tiling,
    blocks: int,
    interpret: Any = None,
) -> Float[Array, "N n"]:
    """Sum over the terms of `lhs @ W[layer] + low @ factor[layer, t]`, or with the transposes of W
    and factor.

    Rows of empty chunks (slot -1) are zeros. Sums are float32; the result has the dtype of `lhs`.

    Args:
      chunk_slot: int32 [C], owner slot of each chunk; N / C is a multiple of `TILE_M`.
      blocks: thread blocks to launch, one per multiprocessor.
      interpret: see `plgpu.kernel`.
    """
    first = terms[0]
    dtype = first.lhs.dtype
    columns = first.weight.shape[1 if transposed else 2]
    layout = _Layout(
        tiling, transposed, first.factor.shape[1], tuple(t.weight.shape[1] for t in terms)
    )
    kernel = plgpu.kernel(
        partial(_kernel, layout),
        out_type=jax.ShapeDtypeStruct((first.lhs.shape[0], columns), dtype),
        scratch_types=_scratch(layout, first.low.shape[1], dtype),
        grid=(blocks,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="wg",
        kernel_name="routed_matmul_transposed" if transposed else "routed_matmul",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    # A slice of a three-dimensional array does not lower: layers and slots become row offsets.
    flat = [
        (
            t.lhs,
            t.weight.reshape(-1, t.weight.shape[-1]),
            t.low,
            t.factor.reshape(-1, t.factor.shape[-1]),
        )
        for t in terms
    ]
    return kernel(jnp.reshape(layer, 1).astype(jnp.int32), chunk_slot, *sum(flat, ()))


class _Layout(NamedTuple):
    """Static facts of one call; `heights` are the rows of one layer of each weight."""

    tiling: Tiling
    transposed: bool
    slots: int
    heights: tuple[int, ...]


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
    rows: Any
    column: Int[Array, ""]
    slot: Int[Array, ""]


def _scratch(layout: _Layout, rank: int, dtype) -> tuple:
    tiling, terms = layout.tiling, len(layout.heights)
    wide = 2 * tiling.tile_n
    weight, factor = (tiling.tile_k, wide), (rank, wide)
    if layout.transposed:
        weight, factor = weight[::-1], factor[::-1]
    main, low = _swizzled(tiling.tile_k, dtype), _swizzled(rank, dtype)
    out = (2, 2, TILE_M // 2, tiling.epilogue_n)
    return tuple(
        _Scratch(
            lhs=plgpu.SMEM((tiling.stages, TILE_M, tiling.tile_k), dtype, transforms=main),
            weight=plgpu.SMEM((tiling.stages, *weight), dtype, transforms=main),
            low=plgpu.SMEM((terms, TILE_M, rank), dtype, transforms=low),
            factor=plgpu.SMEM((terms, *factor), dtype, transforms=low),
            out=plgpu.SMEM(out, dtype, transforms=_swizzled(tiling.epilogue_n, dtype)),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            consumed=plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            low_loaded=plgpu.Barrier(num_arrivals=2 * terms),
            low_consumed=plgpu.Barrier(num_arrivals=2),
        )
    )


def _swizzled(columns: int, dtype) -> tuple:
    size = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * size * 8)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


def _kernel(layout: _Layout, layer_gmem, slot_gmem, *refs):
    terms, out_gmem, scratch = _unpack(refs, len(layout.heights))
    tiling = layout.tiling
    wide = 2 * tiling.tile_n
    shape = (out_gmem.shape[0] // TILE_M, out_gmem.shape[1] // wide)
    chunk_tiles = shape[0] // slot_gmem.shape[0]
    steps = sum(term.lhs.shape[1] for term in terms) // tiling.tile_k
    thread = lax.axis_index("wg")

    def for_each_tile(body):
        # The carry counts the pipeline steps, and the tiles that have a task, so far.
        @plgpu.nd_loop((shape[0] * shape[1],), collective_axes="sm", init_carry=(jnp.int32(0),) * 2)
        def _loop(info, carry):
            row, column = plgpu.planar_snake(info.index[0], shape, tiling.minor, tiling.group)
            slot = slot_gmem[lax.div(row, jnp.int32(chunk_tiles))]
            step, owned = carry
            body(_Tile(pl.ds(row * TILE_M, TILE_M), column, slot), step, owned)
            live = (slot >= 0).astype(jnp.int32)
            return step + live * steps, owned + live

        return _loop

    @pl.when(thread == 2)
    def _load():
        plgpu.set_max_registers(40, action="decrease")
        layer = layer_gmem[0]

        def load_tile(tile, step, owned):
            @pl.when(tile.slot >= 0)
            def _():
                pl.when(owned > 0)(lambda: plgpu.barrier_wait(scratch.low_consumed))
                _load_low_rank(layout, terms, scratch, tile, layer)
                _load_steps(layout, terms, scratch, tile, layer, step)

        _await_consumers(scratch, *for_each_tile(load_tile), tiling.stages)

    @pl.when(thread < 2)
    def _multiply():
        plgpu.set_max_registers(232, action="increase")
        columns = pl.ds(thread * tiling.tile_n, tiling.tile_n)

        def multiply_tile(tile, step, owned):
            @partial(pl.run_scoped, acc=plgpu.ACC((TILE_M, tiling.tile_n), jnp.float32))
            def _scope(acc):
                @pl.when(tile.slot >= 0)
                def _():
                    _multiply_low_rank(layout, acc, scratch, columns)
                    _multiply_steps(layout, acc, scratch, columns, step, steps)

                at = out_gmem.at[tile.rows, pl.ds(tile.column * wide, wide)].at[:, columns]
                _store(acc[...], at, scratch.out.at[thread], tiling.epilogue_n)

        for_each_tile(multiply_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _unpack(refs, terms: int):
    grouped = [Term(*refs[4 * i : 4 * i + 4]) for i in range(terms)]
    return grouped, refs[4 * terms], _Scratch(*refs[4 * terms + 1 :])


def _load_low_rank(layout: _Layout, terms, scratch: _Scratch, tile: _Tile, layer):
    wide = 2 * layout.tiling.tile_n
    for i, (term, height) in enumerate(zip(terms, layout.heights, strict=True)):
        index, rank = layer * layout.slots + tile.slot, term.low.shape[1]
        if layout.transposed:
            factor = term.factor.at[pl.ds(index * height + tile.column * wide, wide)]
        else:
            factor = term.factor.at[pl.ds(index * rank, rank), pl.ds(tile.column * wide, wide)]
        plgpu.copy_gmem_to_smem(term.low.at[tile.rows], scratch.low.at[i], scratch.low_loaded)
        plgpu.copy_gmem_to_smem(factor, scratch.factor.at[i], scratch.low_loaded)


def _load_steps(layout: _Layout, terms, scratch: _Scratch, tile: _Tile, layer, first_step):
    tiling = layout.tiling
    wide = 2 * tiling.tile_n
    for term, height in zip(terms, layout.heights, strict=True):
        count = term.lhs.shape[1] // tiling.tile_k

        @pl.loop(0, count)
        def _step(i, term=term, height=height, first_step=first_step):
            step, depth = first_step + i, pl.ds(i * tiling.tile_k, tiling.tile_k)
            stage = lax.rem(step, jnp.int32(tiling.stages))
            pl.when(step >= tiling.stages)(lambda: plgpu.barrier_wait(scratch.consumed.at[stage]))
            if layout.transposed:
                weight = term.weight.at[pl.ds(layer * height + tile.column * wide, wide), depth]
            else:
                row = pl.ds(layer * height + i * tiling.tile_k, tiling.tile_k)
                weight = term.weight.at[row, pl.ds(tile.column * wide, wide)]
            barrier = scratch.loaded.at[stage]
            plgpu.copy_gmem_to_smem(term.lhs.at[tile.rows, depth], scratch.lhs.at[stage], barrier)
            plgpu.copy_gmem_to_smem(weight, scratch.weight.at[stage], barrier)

        first_step += count


def _await_consumers(scratch: _Scratch, step, owned, stages: int):
    """Leaves no barrier with an arrival that nobody waited for."""
    pl.when(owned > 0)(lambda: plgpu.barrier_wait(scratch.low_consumed))
    for stage in range(stages):
        pl.when(step > stage)(lambda stage=stage: plgpu.barrier_wait(scratch.consumed.at[stage]))


def _multiply_low_rank(layout: _Layout, acc, scratch: _Scratch, columns):
    plgpu.barrier_wait(scratch.low_loaded)
    for i in range(len(layout.heights)):
        plgpu.wgmma(acc, scratch.low.at[i], _columns(layout, scratch.factor.at[i], columns))
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(scratch.low_consumed)


def _multiply_steps(layout: _Layout, acc, scratch: _Scratch, columns, first_step, steps: int):
    stages, delay = layout.tiling.stages, layout.tiling.delay_release

    def stage_of(step):
        return lax.rem(step, jnp.int32(stages))

    @pl.loop(0, steps)
    def _step(i):
        stage = stage_of(first_step + i)
        plgpu.barrier_wait(scratch.loaded.at[stage])
        weight = _columns(layout, scratch.weight.at[stage], columns)
        plgpu.wgmma(acc, scratch.lhs.at[stage], weight)
        plgpu.wgmma_wait(delay)
        if delay:
            previous = stage_of(first_step + i + (stages - 1))
            pl.when(i > 0)(lambda: plgpu.barrier_arrive(scratch.consumed.at[previous]))
        else:
            plgpu.barrier_arrive(scratch.consumed.at[stage])

    if delay:
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(scratch.consumed.at[stage_of(first_step + (steps - 1))])


def _columns(layout: _Layout, ref, columns):
    return ref.at[columns].transpose((1, 0)) if layout.transposed else ref.at[:, columns]


def _store(acc, out_gmem, out_smem, epilogue_n: int):
    out = acc.astype(out_gmem.dtype)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    half = TILE_M // 2
    for i, (row, column) in enumerate(
        (r, c) for r in (0, half) for c in range(0, acc.shape[1], epilogue_n)
    ):
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
        at = (slice(row, row + half), slice(column, column + epilogue_n))
        out_smem[i % 2] = out[at]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem.at[i % 2], out_gmem.at[at])
