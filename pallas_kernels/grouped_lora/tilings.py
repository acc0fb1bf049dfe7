"""Tile sizes of the Mosaic GPU kernels: a table of what `scripts/tune_grouped_lora.py` has found,
by device and shape, and the rule that fits them into shared memory.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import jax
from jax.extend import backend

from .routed_matmul_sm90 import PIECE, TILE_K, TILE_M, TILE_N, Tiling
from .row_products_sm90 import RowJob, RowTiling
from .tiles_sm90 import SHARED_MEMORY

TABLE = Path(__file__).with_name("tilings.json")
# The fields of a `Tiling` that the table holds.
TUNED = ("stages", "borrowed", "spare", "minor", "group")


def is_hopper() -> bool:
    """Whether kernels are traced for a Hopper GPU."""
    device = _device()
    if isinstance(device, jax.Device):
        return device.platform == "gpu" and device.compute_capability == "9.0"
    return "H100" in device.device_kind or "H200" in device.device_kind


def multiprocessors() -> int:
    """Of the device that kernels are traced for."""
    device = _device()
    if isinstance(device, jax.Device):
        # The interpreter runs anywhere, on as few blocks as can show an error between them.
        return device.core_count if device.platform == "gpu" else 2
    return device.num_cores


def matmul_tiling(
    k: int, widths: tuple[int, ...], rank: int, *, transposed: bool, masked: bool
) -> Tiling | None:
    """How a `routed_matmul` works, or None if nothing fits.

    Args:
      k, widths: of the weights [k, n] of the products that are added up.
      rank: of the low-rank products.
      transposed: whether the weights are.
      masked: whether the low-rank products are dropped.
    """
    entries = table()[_device().device_kind]
    tuned = entries.get(key(k, widths, transposed=transposed), {})
    return fitted(Tiling(**tuned), terms=len(widths), rank=rank, masked=masked)


def fitted(wanted: Tiling, *, terms: int, rank: int, masked: bool) -> Tiling | None:
    """What shared memory holds of a tiling; None if it does not hold two stages.

    With dropout all low-rank operands of a tile stay there, in thin slices.
    """
    tile_r = 16 if masked else 64
    low_bytes = min(rank, tile_r) * (TILE_M + TILE_N) * 2
    low_steps = terms * -(-rank // tile_r)
    least_low = low_bytes * (low_steps if masked else 1)
    stage_bytes, spare_bytes = TILE_K * (TILE_M + TILE_N) * 2, 2 * PIECE * PIECE * 2

    stages = min(wanted.stages, (SHARED_MEMORY - least_low) // stage_bytes)
    if stages < 2:
        return None
    room = SHARED_MEMORY - stages * stage_bytes
    spare = min(wanted.spare, (room - least_low) // spare_bytes)
    return wanted._replace(
        stages=stages,
        # Two pieces on their way at least, and two stages for the next tile.
        borrowed=max(1, min(max(wanted.borrowed, 2 - spare), stages - 2)),
        spare=spare,
        tile_r=tile_r,
        low_stages=min(low_steps, (room - spare * spare_bytes) // low_bytes),
    )


def row_tiling(*jobs: RowJob) -> RowTiling:
    """Tile sizes for `row_products`."""
    deepest = max(sum(factor.shape[1] for factor in job.factors) for job in jobs)
    # Several loads of activations and factors must fit, besides a warpgroup's sums.
    return RowTiling() if deepest <= 128 else RowTiling(tile_k=64)


def key(k: int, widths: tuple[int, ...], *, transposed: bool) -> str:
    """The name of an entry of the table."""
    return f"{k}x{'+'.join(map(str, widths))}{' transposed' if transposed else ''}"


@cache
def table() -> defaultdict[str, dict[str, dict]]:
    """By device kind and `key`, the tuned fields."""
    return defaultdict(dict, json.loads(TABLE.read_text()))


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
