"""Functions that the Hopper kernels share: owners of tiles, layouts and limits of shared memory,
and pipelines of loads.

A kernel's *stage* is a part of shared memory for the operands of one pipeline step. Two arrays of
barriers, with one barrier for each stage, synchronise the warpgroup that loads with the warpgroups
that multiply: `loaded` (the operands have arrived) and `consumed` (they are no longer needed).
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from .. import plgpu

# Bytes that a thread block may use; Hopper's limit minus the bytes for barriers and alignment.
SHARED_MEMORY = 224 * 1024


def compiler_params(approx_math: bool = False) -> "plgpu.CompilerParams":
    """Parameters with which all kernels are compiled: warpgroups, not threads, execute operations.
    If `approx_math`, exponentials and logarithms are approximate."""
    semantics = plgpu.LoweringSemantics.Warpgroup
    return plgpu.CompilerParams(lowering_semantics=semantics, approx_math=approx_math)


def warpgroups(count: int, approx_math: bool = False) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for thread blocks of `count` warpgroups, along the axis "wg"."""
    return dict(num_threads=count, thread_name="wg", compiler_params=compiler_params(approx_math))


def flat(stacked: Float[Array, "*stack rows columns"]) -> Float[Array, "stacked_rows columns"]:
    """The matrices of a stack, one below the other. Kernels address them by row, because slices of
    arrays with more than two dimensions do not lower."""
    return stacked.reshape(-1, stacked.shape[-1])


def owner(slot_gmem, tile, tiles: int):
    """The entry of an array over chunks for row tile `tile`, one of `tiles` of equal height."""
    return slot_gmem[lax.div(tile, jnp.int32(tiles // slot_gmem.shape[0]))]


class TileOrder(NamedTuple):
    """Row tiles in the order in which a kernel takes them, and the slot that owns each; int32."""

    tile: Int[Array, " tiles"]
    slot: Int[Array, " tiles"]


def owned_first(chunk_slot: Int[Array, " chunks"], tiles: int) -> TileOrder:
    """All row tiles: first those with an owner, then those without (slot -1), each in stream
    order."""
    slots = jnp.repeat(chunk_slot, tiles // chunk_slot.shape[0])
    index = jnp.arange(tiles, dtype=jnp.int32)
    _, *order = lax.sort((slots < 0, index, slots), num_keys=1, is_stable=True)
    return TileOrder(*order)


def smem_tiles(shape: tuple[int, ...], dtype: Any, depth: int | None = None):
    """Tiles in shared memory, the type of a scratch array. `shape` is the number of tiles, then the
    rows and columns of a tile. `depth` is that of the products that read a tile; the swizzle is not
    wider than this depth. None takes the widest swizzle, of 128 bytes."""
    size = jnp.dtype(dtype).itemsize
    swizzle = 128 if depth is None else plgpu.find_swizzle(depth * size * 8)
    transforms = plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_unoptimized(ref, layout: Any):
    """Loads an array into registers in a layout for which there is no optimized load: from global
    memory, or from tiles without a swizzle."""
    return plgpu.load(ref, layout=layout, optimized=False)


def product(shape: tuple[int, int], operands: Iterable[tuple[Any, Any]]):
    """The sum of the matrix products of pairs of operands, float32, in registers."""

    def multiply(acc):
        for left, right in operands:
            plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape))


def store_rank_major(ref, value: Float[Array, "rows r"]):
    """Writes the transposed value to `ref`, an array [r, rows] in global or shared memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)


def write_zeros(gmem):
    zeros = jnp.zeros(gmem.shape, gmem.dtype)
    gmem[...] = plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def stages_that_fit(wanted: int, elements: int, dtype: Any, reserved: int = 0) -> int:
    """The wanted number of stages, each of `elements` elements, or fewer if they do not fit into
    shared memory besides `reserved` further elements. ValueError if not even two stages fit."""
    available = SHARED_MEMORY // jnp.dtype(dtype).itemsize - reserved
    if 2 * elements > available:
        raise ValueError(
            f"two loads of {elements} elements do not fit into shared memory, which has room for "
            f"{available}; use smaller tiles"
        )
    return min(wanted, available // elements)


def run_warpgroups(load: Callable[[], None], compute: Callable[[Any], None]):
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
    """The stage of a pipeline step, if there are as many stages as barriers."""
    return lax.rem(jnp.int32(step), jnp.int32(barriers.shape[0]))


def claim(consumed, step):
    """Waits until the stage of a step has been released by its previous step; returns the stage."""
    stage = stage_of(consumed, step)
    pl.when(step >= consumed.shape[0])(lambda: plgpu.barrier_wait(consumed.at[stage]))
    return stage


def await_loaded(loaded, step):
    """Waits until the operands of a step have arrived; returns the step's stage."""
    stage = stage_of(loaded, step)
    plgpu.barrier_wait(loaded.at[stage])
    return stage


def await_all(consumed, steps):
    """Waits until all stages that `steps` steps have used are released. At the end of a kernel, no
    barrier may have an arrival for which no warpgroup has waited."""
    for stage in range(consumed.shape[0]):
        pl.when(steps > stage)(lambda stage=stage: plgpu.barrier_wait(consumed.at[stage]))


def check_chunks(rows: int, chunk_slot: Int[Array, " chunks"], name: str, size: int):
    """Raises a ValueError if tiles, whose size is called `name`, do not divide the chunks."""
    chunks = chunk_slot.shape[0]
    if rows % (chunks * size) or size % 64:
        raise ValueError(
            f"{rows} rows in {chunks} chunks; expected chunks of a multiple of {name} = {size}, "
            "itself a multiple of 64"
        )


def check_columns(width: int, name: str, size: int):
    """Raises a ValueError if tiles, whose size is called `name`, do not divide the width of `z`."""
    if width % size or size % 64:
        raise ValueError(
            f"z has {width} columns; expected a multiple of {name} = {size}, itself a multiple of "
            "64"
        )


def check_ranks(ranks: list[int]):
    if any(rank % 8 or rank > 256 for rank in ranks):
        raise ValueError(f"ranks {ranks}; expected multiples of 8, at most 256")
