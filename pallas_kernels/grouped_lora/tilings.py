"""Tile sizes of the Mosaic GPU kernels."""

import jax
from jax.extend import backend

from .routed_matmul_sm90 import TILE_M, Tiling
from .stream_products_sm90 import RowJob, RowTiling

# What a thread block may hold, less what barriers and alignment take.
_SHARED_MEMORY = 226 * 1024


def is_hopper() -> bool:
    """Whether kernels are traced for a Hopper GPU."""
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return "H100" in device.device_kind or "H200" in device.device_kind
    device = backend.get_default_device()
    return device.platform == "gpu" and device.compute_capability == "9.0"


def multiprocessors() -> int:
    """Of the default device, or of the abstract one under whose mesh a kernel is traced."""
    if device := jax.sharding.get_abstract_mesh().abstract_device:
        return device.num_cores
    device = backend.get_default_device()
    # The interpreter runs anywhere, on as few blocks as can show an error between them.
    return device.core_count if device.platform == "gpu" else 2


def matmul_tiling(terms: int, rank: int, *, masked: bool) -> Tiling | None:
    """Tile sizes for a `routed_matmul` of so many terms; None if they do not fit.

    Args:
      masked: with dropout, all low-rank operands of a tile stay in shared memory.
    """
    base = Tiling(minor=0, group=16, split_rows=True, tile_r=16 if masked else 64)
    low_bytes = min(rank, base.tile_r) * (TILE_M + base.tile_n) * 2
    stage_bytes = base.tile_k * (TILE_M + base.tile_n) * 2
    epilogue_bytes = 2 * TILE_M * base.epilogue_n * 2
    low_steps = terms * -(-rank // base.tile_r)
    room = _SHARED_MEMORY - epilogue_bytes
    low_stages = min(low_steps, (room - 3 * stage_bytes) // low_bytes)
    low_stages = low_steps if masked else max(1, low_stages)
    stages = min(4, (room - low_stages * low_bytes) // stage_bytes)
    return base._replace(low_stages=low_stages, stages=stages) if stages > 1 else None


def row_tiling(*jobs: RowJob) -> RowTiling:
    """Tile sizes for `row_products`."""
    return RowTiling()
