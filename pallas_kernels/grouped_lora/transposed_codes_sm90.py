"""The codes of a layer in float8 with their axes swapped, for Hopper GPUs.

The tensor cores transpose a tile: they multiply the identity matrix by the transposed tile, which
they read with the contraction last, like any right operand in float8. The product is exact, because
at most one term of each sum is not zero.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float8e4m3fn, Int

from .. import plgpu
from ..compilation import traced_once
from .tiles_sm90 import compiler_params, flat, product, smem_tiles

TILE = 128
# Rows of a transposed tile that are computed and stored at once.
HALF = TILE // 2
# Number of tiles of a row or a column that thread blocks take one after another.
GROUP = 16


class Tiling(NamedTuple):
    """Sizes of the kernel.

    Attributes:
      stages: number of tiles that a thread block has in flight.
      blocks: number of thread blocks to launch, at most as many as run at the same time.
    """

    stages: int
    blocks: int


@traced_once("tiling")
def transposed_codes(
    codes: Float8e4m3fn[Array, "L n k"], layer: Int[Array, ""] | int, *, tiling: Tiling
) -> Float8e4m3fn[Array, "k n"]:
    """`codes[layer].T`, except the sign of zeros. The codes are finite; n and k are multiples of
    128, or a ValueError is raised."""
    _, n, k = codes.shape
    if n % TILE or k % TILE:
        raise ValueError(f"codes [{n}, {k}]; expected multiples of {TILE}")
    kernel = plgpu.kernel(
        partial(_kernel, tiling, n),
        out_type=jax.ShapeDtypeStruct((k, n), codes.dtype),
        scratch_types=(_scratch(tiling, codes.dtype),),
        grid=(tiling.blocks,),
        grid_names=("block",),
        kernel_name="transposed_codes",
        compiler_params=compiler_params(),
    )
    identity = np.eye(TILE).astype(codes.dtype)
    return kernel(jnp.reshape(layer, 1), identity, flat(codes))


class _Scratch(NamedTuple):
    identity: Any
    tiles: Any
    halves: Any
    arrived: Any
    loaded: Any


def _scratch(tiling: Tiling, dtype) -> _Scratch:
    return _Scratch(
        identity=smem_tiles((TILE, TILE), dtype),
        tiles=smem_tiles((tiling.stages, TILE, TILE), dtype),
        halves=smem_tiles((2, HALF, TILE), dtype),
        arrived=plgpu.Barrier(),
        loaded=plgpu.Barrier(num_barriers=tiling.stages),
    )


def _kernel(tiling: Tiling, n: int, layer, identity, codes, out, scratch: _Scratch):
    first, own_layer = lax.axis_index("block"), layer[0]
    shape = n // TILE, out.shape[0] // TILE
    steps = lax.div(shape[0] * shape[1] - first + tiling.blocks - 1, jnp.int32(tiling.blocks))

    def place(step):
        """The row and column at which the tile of a step begins. Tiles that are in flight at the
        same time form a square, so that neither reads nor writes are scattered."""
        row, column = plgpu.planar_snake(first + step * tiling.blocks, shape, 0, GROUP)
        return row * TILE, column * TILE

    def stage_of(step):
        return lax.rem(step, jnp.int32(tiling.stages))

    def load(step):
        @pl.when(step < steps)
        def _():
            row, column = place(step)
            tile = codes.at[pl.ds(own_layer * n + row, TILE), pl.ds(column, TILE)]
            stage = stage_of(step)
            plgpu.copy_gmem_to_smem(tile, scratch.tiles.at[stage], scratch.loaded.at[stage])

    plgpu.copy_gmem_to_smem(identity, scratch.identity, scratch.arrived)
    for step in range(tiling.stages):
        load(jnp.int32(step))
    plgpu.barrier_wait(scratch.arrived)

    @pl.loop(0, steps)
    def _step(step):
        plgpu.barrier_wait(scratch.loaded.at[stage_of(step)])
        tile = scratch.tiles.at[stage_of(step)].transpose((1, 0))
        row, column = place(step)
        for i in range(2):
            rows = scratch.identity.at[pl.ds(i * HALF, HALF)]
            half = product((HALF, TILE), [(rows, tile)])
            # Waits until the store of the half before the last one has read its memory.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            scratch.halves.at[i][...] = half.astype(out.dtype)
            plgpu.commit_smem()
            target = out.at[pl.ds(column + i * HALF, HALF), pl.ds(row, TILE)]
            plgpu.copy_smem_to_gmem(scratch.halves.at[i], target)
        load(step + tiling.stages)

    plgpu.wait_smem_to_gmem(0)
