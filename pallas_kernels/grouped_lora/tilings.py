"""Tile sizes of the Mosaic GPU kernels: a table of what `scripts/tune_grouped_lora.py` has found,
by device and shape, and the rule that fits them into shared memory.
"""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import jax
from jax.extend import backend

from .routed_matmul_sm90 import TILE_M, Tiling
from .row_products_sm90 import RowJob, RowTiling
from .tiles_sm90 import SHARED_MEMORY

TABLE = Path(__file__).with_name("tilings.json")
# The fields of a `Tiling` that the table holds.
TUNED = ("split_rows", "delay_release", "minor", "group")


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


def matmul_tiling(k: int, n: int, terms: int, rank: int, *, transposed: bool, masked: bool):
    """Tile sizes of a `routed_matmul` with weights [k, n], or None if no tile fits.

    Args:
      terms: products that are added up.
      rank: of the low-rank products.
      transposed: whether the weights are.
      masked: whether the low-rank products are dropped.
    """
    entries = table()[_device().device_kind]
    tuned = entries.get(key(k, n, transposed=transposed), {})
    return fitted(Tiling(**tuned), terms=terms, rank=rank, masked=masked)


def fitted(tiling: Tiling, *, terms: int, rank: int, masked: bool) -> Tiling | None:
    """A tiling with as many stages as shared memory holds; None if it does not hold two.

    With dropout all low-rank operands of a tile stay there, in thin slices.
    """
    tiling = tiling._replace(tile_r=16 if masked else 64)
    low_bytes = min(rank, tiling.tile_r) * (TILE_M + tiling.tile_n) * 2
    stage_bytes = tiling.tile_k * (TILE_M + tiling.tile_n) * 2
    epilogue_bytes = 2 * TILE_M * tiling.epilogue_n * 2
    low_steps = terms * -(-rank // tiling.tile_r)
    room = SHARED_MEMORY - epilogue_bytes
    low_stages = min(low_steps, (room - 3 * stage_bytes) // low_bytes)
    low_stages = low_steps if masked else max(1, low_stages)
    stages = min(4, (room - low_stages * low_bytes) // stage_bytes)
    return tiling._replace(low_stages=low_stages, stages=stages) if stages > 1 else None


def row_tiling(*jobs: RowJob) -> RowTiling:
    """Tile sizes for `row_products`."""
    deepest = max(sum(factor.shape[1] for factor in job.factors) for job in jobs)
    # Several loads of activations and factors must fit, besides a warpgroup's sums.
    return RowTiling() if deepest <= 128 else RowTiling(tile_k=64)


def key(k: int, n: int, *, transposed: bool) -> str:
    """The name of an entry of the table."""
    return f"{k}x{n}{' transposed' if transposed else ''}"


@cache
def table() -> defaultdict[str, dict[str, dict]]:
    """By device kind and `key`, the tuned fields."""
    return defaultdict(dict, json.loads(TABLE.read_text()))


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
