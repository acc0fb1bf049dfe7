"""Prepares the LoRA factors of one layer for the matrix products on Hopper GPUs: reads them from
the float32 pools of all layers, casts them to the compute dtype and makes them *rank-major*,
[r, w].

The kernel is limited by memory bandwidth. One launch serves all projections of a call, and every
thread block transposes one tile of one array: it loads whole sectors of 32 bytes to registers and
stores long rows through shared memory. The blocks are small, so many of them share a multiprocessor
and keep enough loads in flight.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu
from ..compilation import traced_once
from .tiles_sm90 import compiler_params, flat, load_unoptimized, smem_tiles, store_rank_major

# Largest number of elements that a thread block loads, unless even the narrowest tile has more.
TILE_SIZE = 4096
# Numbers of columns that a tile may have.
TILE_WIDTHS = (256, 128, 64)


@traced_once("rank", "dtype")
def rank_major_factors(
    pools: tuple[tuple[Float[Array, "L T _ _"], Float[Array, "L T _ _"]], ...],
    layer: Int[Array, ""] | int,
    *,
    rank: int,
    dtype: Any,
) -> tuple[tuple[Float[Array, "T {rank} _"], Float[Array, "T {rank} _"]], ...]:
    """One layer of every pair of factors: `a` with its last two axes swapped, [T, rank, k], and
    `b`, [T, rank, n], in half precision.

    Args:
      pools: pairs of `a` and `b`, float32 or already in the compute dtype; their ranks are
        multiples of 8.
      rank: rank of the results, to which factors are padded with zeros; a multiple of 8.

    Raises:
      ValueError: the tiles do not divide the arrays, or a rank cannot be padded to `rank`.
    """
    arrays = [_Pool(each, is_a) for a, b in pools for each, is_a in ((a, True), (b, False))]
    for array in arrays:
        _check(array, rank)

    def body(layer_gmem, pools_gmem, *outputs):
        tile, first = lax.axis_index("tile"), 0
        for array, pool, out in zip(arrays, pools_gmem, outputs, strict=True):

            @pl.when((tile >= first) & (tile < first + array.tiles))
            def _(array=array, pool=pool, out=out, first=first):
                _transpose_tile(array, pool, out, layer_gmem[0], tile - first)

            first += array.tiles

    outputs = plgpu.kernel(
        body,
        out_type=tuple(
            jax.ShapeDtypeStruct((array.slots * rank, array.width), dtype) for array in arrays
        ),
        grid=(sum(array.tiles for array in arrays),),
        grid_names=("tile",),
        kernel_name="rank_major_factors",
        compiler_params=compiler_params(),
    )(
        jnp.reshape(layer, 1).astype(jnp.int32),
        [flat(array.values) for array in arrays],
    )
    stacked = [out.reshape(-1, rank, out.shape[1]) for out in outputs]
    return tuple(zip(stacked[::2], stacked[1::2], strict=True))


class _Pool(NamedTuple):
    """A factor of all layers and slots: `a` [L, T, k, r] or `b` [L, T, r, n]."""

    values: Any
    is_a: bool

    @property
    def slots(self) -> int:
        return self.values.shape[1]

    @property
    def width(self) -> int:
        return self.values.shape[2 if self.is_a else 3]

    @property
    def rank(self) -> int:
        return self.values.shape[3 if self.is_a else 2]

    @property
    def tile_width(self) -> int:
        fitting = (width for width in TILE_WIDTHS if width * self.rank <= TILE_SIZE)
        return next(fitting, TILE_WIDTHS[-1])

    @property
    def tiles(self) -> int:
        return self.slots * self.width // self.tile_width


def _transpose_tile(array: _Pool, pool, out, layer, tile):
    """Writes all ranks of the columns of one tile, which belongs to one slot."""
    width = array.tile_width
    slot = lax.div(tile, jnp.int32(array.width // width))
    column = lax.rem(tile, jnp.int32(array.width // width)) * width
    place, columns = layer * array.slots + slot, pl.ds(column, width)
    # Each of the layouts loads along the rows of its pool.
    if array.is_a:
        at = pool.at[pl.ds(place * array.width + column, width)]
        value = load_unoptimized(at, plgpu.Layout.WGMMA)
    else:
        at = pool.at[pl.ds(place * array.rank, array.rank), columns].transpose((1, 0))
        value = load_unoptimized(at, plgpu.Layout.WGMMA_TRANSPOSED)
    value = value.astype(out.dtype)
    rank = out.shape[0] // array.slots

    def write(tile_smem):
        store_rank_major(tile_smem.at[pl.ds(0, array.rank)], value)
        if missing := rank - array.rank:
            zeros = jnp.zeros((width, missing), out.dtype)
            store_rank_major(tile_smem.at[pl.ds(array.rank, missing)], zeros)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile_smem, out.at[pl.ds(slot * rank, rank), columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    pl.run_scoped(write, smem_tiles((rank, width), out.dtype))


def _check(array: _Pool, rank: int):
    if array.width % TILE_WIDTHS[0]:
        raise ValueError(f"a factor of width {array.width}; expected a multiple of 256")
    if array.rank % 8 or rank % 8 or not array.rank <= rank <= 256:
        raise ValueError(
            f"a factor of rank {array.rank}, padded to {rank}; expected multiples of 8, the latter "
            "not smaller and at most 256"
        )
