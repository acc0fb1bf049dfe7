"""Tile sizes of the Mosaic GPU kernels: the table that `scripts/tune_grouped_lora.py` writes, by
device and shape, and the rules that fit a tiling into shared memory."""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path

import jax
from jax.extend import backend

from ..collectives import TP, blocks_of_sums
from .routed_matmul_sm90 import PIECE, STEP_BYTES, TILE_M, TILE_N, Tiling
from .row_products_sm90 import RowOperands, RowTiling
from .tiles_sm90 import SHARED_MEMORY

TABLE = Path(__file__).with_name("tilings.json")
# The fields of a `Tiling` that the table holds.
TUNED = ("stages", "borrowed", "spare", "minor", "group")


def is_hopper() -> bool:
    """Whether the device for which kernels are traced is a Hopper GPU."""
    device = _device()
    if isinstance(device, jax.Device):
        return device.platform == "gpu" and device.compute_capability == "9.0"
    return "H100" in device.device_kind or "H200" in device.device_kind


def multiprocessors() -> int:
    """Number of multiprocessors that a kernel occupies on the device for which it is traced. If
    sums over devices run beside it, it leaves some multiprocessors free."""
    device = _device()
    if device.platform != "gpu":
        # The interpreter runs on any device. Two thread blocks are the fewest that can have a race.
        return 2
    count = device.core_count if isinstance(device, jax.Device) else device.num_cores
    return count - blocks_of_sums(jax.sharding.get_abstract_mesh().shape.get(TP, 1))


def matmul_tiling(
    k: int, widths: tuple[int, ...], rank: int, *, transposed: bool, keeps_low: bool
) -> Tiling | None:
    """The tiling of a `routed_matmul`, or None if no tiling fits into shared memory. `k` is the
    input width of all weights, and `widths` are their output widths; their products are added up.
    `rank` and `keeps_low` are as for `fitted`."""
    entries = table()[_device().device_kind]
    tuned = entries.get(key(k, widths, transposed=transposed), {})
    return fitted(Tiling(**tuned), terms=len(widths), rank=rank, keeps_low=keeps_low)


def fitted(wanted: Tiling, *, terms: int, rank: int, keeps_low: bool) -> Tiling | None:
    """The wanted tiling, reduced to fit into shared memory; None if two stages do not fit. `terms`
    is the number of products that are added up, and `rank` that of their low-rank products. If
    `keeps_low`, these are added to the finished tile, with dropout or in float8. The low-rank
    operands of all terms of a tile are then in shared memory at the same time, in thin slices."""
    tile_r = 16 if keeps_low else 64
    low_bytes = min(rank, tile_r) * (TILE_M + TILE_N) * 2
    low_steps = terms * -(-rank // tile_r)
    least_low = low_bytes * (low_steps if keeps_low else 1)
    stage_bytes, spare_bytes = STEP_BYTES * (TILE_M + TILE_N), 2 * PIECE * PIECE * 2

    stages = min(wanted.stages, (SHARED_MEMORY - least_low) // stage_bytes)
    if stages < 2:
        return None
    room = SHARED_MEMORY - stages * stage_bytes
    spare = min(wanted.spare, (room - least_low) // spare_bytes)
    return wanted._replace(
        stages=stages,
        # At least two pieces of the output are in flight, and two stages of the next tile.
        borrowed=max(1, min(max(wanted.borrowed, 2 - spare), stages - 2)),
        spare=spare,
        tile_r=tile_r,
        low_stages=min(low_steps, (room - spare * spare_bytes) // low_bytes),
    )


def row_tiling(*groups: RowOperands) -> RowTiling:
    deepest = max(sum(factor.shape[1] for factor in group.factors) for group in groups)
    # Shared memory needs room for several loads of activations and factors, and the partial sums.
    return RowTiling() if deepest <= 128 else RowTiling(tile_k=64)


def key(k: int, widths: tuple[int, ...], *, transposed: bool) -> str:
    """The name of an entry of the table, for example "4096x1024+1024 transposed"."""
    return f"{k}x{'+'.join(map(str, widths))}{' transposed' if transposed else ''}"


@cache
def table() -> defaultdict[str, dict[str, dict]]:
    return defaultdict(dict, json.loads(TABLE.read_text()))


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or backend.get_default_device()
