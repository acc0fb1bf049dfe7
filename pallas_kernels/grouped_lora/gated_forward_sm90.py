"""The activation of a gated MLP, `silu(gate) * up`, and in the same kernel its product with the A
factors of `down_proj`, for Hopper GPUs.

One warpgroup loads tiles through TMA; two other warpgroups compute the activation. It overwrites
its input in shared memory, where it is an operand of the product and the source of the TMA store.
As in `row_products_sm90`, the factors are rank-major.
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
    owner,
    run_warpgroups,
    smem_tiles,
    stage_of,
    stages_that_fit,
    store_rank_major,
    warpgroups,
    write_zeros,
)


class ForwardTiling(NamedTuple):
    """Tile sizes of `gated_forward`, whose tiles have 128 rows.

    Attributes:
      tile_k: columns of one load, a multiple of 64.
      splits: number of thread blocks among which the columns of a row tile are divided.
      stages: largest number of loads in flight; it is reduced to what fits into shared memory.
    """

    tile_k: int = 128
    splits: int = 2
    stages: int = 6


def forward_tiling(width: int, rank: int) -> ForwardTiling:
    """Tile sizes for arrays of `width` columns: loads of 128 columns if three of them fit into
    shared memory, else of 64."""
    tiling = ForwardTiling()
    fits = width % (tiling.splits * tiling.tile_k) == 0 and rank <= 32
    return tiling if fits else tiling._replace(tile_k=64)


@traced_once("tiling")
def gated_forward(
    gate: Float[Array, "N w"],
    up: Float[Array, "N w"],
    a: Float[Array, "T r w"],
    chunk_slot: Int[Array, " chunks"],
    *,
    tiling: ForwardTiling | None = None,
) -> tuple[Float[Array, "N w"], Float[Array, "splits r N"]]:
    """`h = silu(gate) * up`, and `h a[t]^T` as partial sums over ranges of columns.

    The activation is computed in float32 and rounded once; the product is that of the rounded
    activation. Rows of empty chunks (slot -1) are zeros; there the inputs are not read.

    Args:
      gate: output of `gate_proj`, half precision.
      up: output of `up_proj`, in the same dtype.
      a: the A factors of `down_proj`, rank-major, in the same dtype.
      chunk_slot: int32, owner slot of each chunk.
      tiling: tile sizes; None for `forward_tiling`.

    Returns:
      h in the dtype of the inputs, and float32 partial sums, rank-major, whose sum over the first
      axis is the product.
    """
    rows, width = gate.shape
    rank = a.shape[1]
    tiling = tiling or forward_tiling(width, rank)
    check_chunks(rows, chunk_slot, "tile_m", 2 * PART)
    check_width(width, tiling.splits * tiling.tile_k)
    check_gated_rank(rank)
    return plgpu.kernel(
        partial(_forward_kernel, tiling),
        out_type=(
            jax.ShapeDtypeStruct(gate.shape, gate.dtype),
            jax.ShapeDtypeStruct((tiling.splits, rank, rows), jnp.float32),
        ),
        scratch_types=(_forward_scratch(tiling, rank, gate.dtype),),
        grid=(rows // (2 * PART), tiling.splits),
        grid_names=("tile", "split"),
        kernel_name="gated_forward",
        **warpgroups(3, approx_math=True),
    )(chunk_slot, gate, up, flat(a))


class _ForwardScratch(NamedTuple):
    """Stages of operands and their barriers: gate, which h overwrites; up; the factor."""

    gate: Any
    up: Any
    a: Any
    loaded: Any
    consumed: Any


def _forward_scratch(tiling: ForwardTiling, rank: int, dtype) -> _ForwardScratch:
    stages = stages_that_fit(tiling.stages, (4 * PART + rank) * tiling.tile_k, dtype)
    return _ForwardScratch(
        gate=smem_tiles((stages, 2 * PART, tiling.tile_k), dtype),
        up=smem_tiles((stages, 2 * PART, tiling.tile_k), dtype),
        a=smem_tiles((stages, rank, tiling.tile_k), dtype),
        loaded=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        consumed=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    )


class _RowTile(NamedTuple):
    tiling: ForwardTiling
    gate: Any
    up: Any
    a: Any
    h: Any
    partial_sums: Any
    scratch: _ForwardScratch
    slot: Any
    row: Any
    split: Any

    @property
    def steps(self) -> int:
        return self.gate.shape[1] // self.tiling.splits // self.tiling.tile_k

    def columns(self, step):
        return pl.ds((self.split * self.steps + step) * self.tiling.tile_k, self.tiling.tile_k)

    def stage(self, step):
        return stage_of(self.scratch.loaded, step)


def _forward_kernel(tiling: ForwardTiling, slot_gmem, gate, up, a, h, partial_sums, scratch):
    tile, split = lax.axis_index("tile"), lax.axis_index("split")
    slot, row = owner(slot_gmem, tile, gate.shape[0] // (2 * PART)), tile * 2 * PART
    block = _RowTile(tiling, gate, up, a, h, partial_sums, scratch, slot, row, split)

    def load():
        pl.when(slot >= 0)(lambda: _load_columns(block))

    def compute(thread):
        acc = plgpu.ACC((PART, partial_sums.shape[1]))
        pl.run_scoped(lambda acc: _compute_columns(block, thread, acc), acc)

    run_warpgroups(load, compute)


def _load_columns(block: _RowTile):
    scratch, rank = block.scratch, block.partial_sums.shape[1]
    rows, ranks = pl.ds(block.row, 2 * PART), pl.ds(block.slot * rank, rank)

    @pl.loop(0, block.steps)
    def _step(i):
        stage, columns = claim(scratch.consumed, i), block.columns(i)
        copy = partial(plgpu.copy_gmem_to_smem, barrier=scratch.loaded.at[stage])
        copy(block.gate.at[rows, columns], scratch.gate.at[stage])
        copy(block.up.at[rows, columns], scratch.up.at[stage])
        copy(block.a.at[ranks, columns], scratch.a.at[stage])

    await_all(scratch.consumed, block.steps)


def _compute_columns(block: _RowTile, thread, acc):
    """Computes this warpgroup's rows of h, and their product with the owner's factor."""
    scratch, rows = block.scratch, pl.ds(block.row + thread * PART, PART)
    part = pl.ds(thread * PART, PART)

    @pl.when(block.slot >= 0)
    def _():
        @pl.loop(0, block.steps)
        def _step(i):
            stage = await_loaded(scratch.loaded, i)
            h_smem = scratch.gate.at[stage].at[part]
            gate, up = load_float32(h_smem), load_float32(scratch.up.at[stage].at[part])
            h = (gate * sigmoid(gate) * up).astype(h_smem.dtype)
            # Released only now, so that the previous product and store run during the arithmetic.
            pl.when(i > 0)(lambda: release(scratch.consumed.at[block.stage(i - 1)]))
            h_smem[...] = h
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(h_smem, block.h.at[rows, block.columns(i)])
            plgpu.wgmma(acc, h_smem, scratch.a.at[stage].transpose((1, 0)))

        release(scratch.consumed.at[block.stage(block.steps - 1)])

    @pl.when(block.slot < 0)
    def _():
        pl.loop(0, block.steps)(lambda i: write_zeros(block.h.at[rows, block.columns(i)]))

    store_rank_major(block.partial_sums.at[block.split].at[:, rows], acc[...])
