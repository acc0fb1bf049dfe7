"""What the Hopper kernels share: owners of tiles, layouts in shared memory, and its limits."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

# What a thread block may hold, less what barriers and alignment take.
SHARED_MEMORY = 224 * 1024
COMPILER_PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def flat(stacked: Float[Array, "T _ _"]) -> Float[Array, "_ _"]:
    return stacked.reshape(-1, stacked.shape[-1])


def owner(slot_gmem, tile, tiles: int):
    return slot_gmem[lax.div(tile, jnp.int32(tiles // slot_gmem.shape[0]))]


class TileOrder(NamedTuple):
    """Row tiles in the order in which a kernel takes them, and the slot of each."""

    tile: Int[Array, "tiles"]
    slot: Int[Array, "tiles"]


def owned_first(chunk_slot: Int[Array, "C"], tiles: int) -> TileOrder:
    """All row tiles, those with an owner before those without (slot -1), else as they lie."""
    slots = jnp.repeat(chunk_slot, tiles // chunk_slot.shape[0])
    index = jnp.arange(tiles, dtype=jnp.int32)
    _, *order = lax.sort((slots < 0, index, slots), num_keys=1, is_stable=True)
    return TileOrder(*order)


def swizzled(dtype) -> tuple:
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128)


def store_rank_major(ref, value: Float[Array, "rows r"]):
    """Writes to a place [r, rows]."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def write_zeros(gmem):
    zeros = jnp.zeros(gmem.shape, gmem.dtype)
    gmem[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def stages_that_fit(wanted: int, elements: int, dtype, reserved: int = 0) -> int:
    """How many loads of so many elements fit beside the reserved ones."""
    available = SHARED_MEMORY // jnp.dtype(dtype).itemsize - reserved
    if 2 * elements > available:
        raise ValueError(
            f"two loads of {elements} elements do not fit into shared memory, which has room for "
            f"{available}; use smaller tiles"
        )
    return min(wanted, available // elements)


def run_warpgroups(load, compute):
    """Runs `load()` on the last of three warpgroups, and `compute(i)` on the others."""
    thread = lax.axis_index("wg")

    @pl.when(thread == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        load()

    @pl.when(thread < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        compute(thread)


def stage_of(barriers, step):
    """Which stage a step has, where there are as many as barriers."""
    return lax.rem(jnp.int32(step), jnp.int32(barriers.shape[0]))


def claim(consumed, step):
    """The stage of a step, once its last user has released it."""
    stage = stage_of(consumed, step)
    pl.when(step >= consumed.shape[0])(lambda: plgpu.barrier_wait(consumed.at[stage]))
    return stage


def await_all(consumed, steps):
    for stage in range(consumed.shape[0]):
        pl.when(steps > stage)(lambda stage=stage: plgpu.barrier_wait(consumed.at[stage]))


def check_chunks(rows: int, chunk_slot, name: str, size: int):
    chunks = chunk_slot.shape[0]
    if rows % (chunks * size) or size % 64:
        raise ValueError(
            f"{rows} rows in {chunks} chunks; expected chunks of a multiple of {name} = {size}, "
            "itself a multiple of 64"
        )


def check_ranks(ranks: list[int]):
    if any(rank % 8 or rank > 256 for rank in ranks):
        raise ValueError(f"ranks {ranks}; expected multiples of 8, at most 256")
