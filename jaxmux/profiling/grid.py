"""The points of a profile. There are few, and each determines a term of the cost models."""

import dataclasses
import math

from jaxmux.models import NAMED_POLICIES
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import (
    AttentionPoint,
    BackboneSize,
    CollectivePoint,
    HeadPoint,
    LayerPoint,
    Point,
    RoundPoint,
    UpdatePoint,
)
from jaxmux.planner.packing import ShapeClass

_COLLECTIVES = ("psum", "all_gather", "ppermute")
OPTIMIZER = "adamw"
# Maximum number of sequences per row. The time of one more sequence is the slope over the last
# three.
_MAX_SEQUENCES = (1, 4, 16, 64)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values from which the points of a profile are made.

    A point is one measured operator with its sizes. A profile is a file of measurements, to which
    cost models are fitted. `Grid()` suits GPUs, and `CPU_GRID` suits CPUs. Not every combination of
    values is measured. Each field has a reference value: the first one, unless the field says
    otherwise. Other points take a further value of one field, and the reference values of the other
    fields. Layers are measured with one task in every slot of the pool of adapters, and with
    a single task.

    Attributes:
      tokens: N, tokens of a microbatch, ascending. The reference is the upper median.
      row_lens: tokens of a row (the tokens that attention sees together), ascending, powers of two
        of at least 64. The reference is the longest row that the smallest microbatch holds.
        Attention is measured at all of them.
      chunk_lens: tokens of a chunk (a series of tokens of one task), powers of two of at least 64.
      ranks: R, rank to which all adapters are padded.
      slots: T, number of slots.
      layers: number of layers of a measured program. With several layers, the kernels of one layer
        hide the time to launch those of the next.
      payload_bytes: bytes that each device puts into a collective.

    Raises:
      PlanningError: a value is not positive, every row is longer than the smallest microbatch, the
        reference row length or a chunk length is not a power of two of at least 64, or the
        microbatches do not consist of whole rows and chunks.
    """

    tokens: tuple[int, ...] = (512, 2048, 8192, 16384)
    row_lens: tuple[int, ...] = (64, 128, 512, 2048, 8192)
    chunk_lens: tuple[int, ...] = (128, 512)
    ranks: tuple[int, ...] = (16, 64)
    slots: tuple[int, ...] = (4, 16)
    layers: int = 3
    payload_bytes: tuple[int, ...] = (2**16, 2**20, 2**24, 2**26)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            values = getattr(self, field.name)
            values = values if isinstance(values, tuple) else (values,)
            if not values or min(values) < 1:
                raise PlanningError(f"{field.name}: expected positive numbers, found {values}")
        if min(self.row_lens) > min(self.tokens):
            raise PlanningError(
                f"row_lens: the shortest row, {min(self.row_lens)}, is longer than the smallest "
                f"microbatch of {min(self.tokens)} tokens"
            )
        for tokens in self.tokens:
            if tokens % self.row_len:
                raise PlanningError(f"tokens={tokens} is no multiple of row_len={self.row_len}")
            ShapeClass(tokens // self.row_len, self.row_len, self.chunk_lens[0], 1)
        for chunk_len in self.chunk_lens:
            ShapeClass(self.reference_tokens // self.row_len, self.row_len, chunk_len, 1)

    @property
    def reference_tokens(self) -> int:
        """Tokens of the microbatch of the reference point: the upper median of `tokens`."""
        return sorted(self.tokens)[len(self.tokens) // 2]

    @property
    def row_len(self) -> int:
        """Tokens of a row of the reference point: the longest of `row_lens` that the smallest
        microbatch holds."""
        return max(row_len for row_len in self.row_lens if row_len <= min(self.tokens))


# A small grid for CPUs, whose profiles serve tests and dry runs.
CPU_GRID = Grid(
    tokens=(128, 256, 512),
    row_lens=(64, 128, 256),
    chunk_lens=(64, 128),
    ranks=(4, 16),
    slots=(2, 4),
    layers=1,
    payload_bytes=(2**12, 2**16, 2**20),
)


def points(grid: Grid, backbone: BackboneSize, devices: int) -> list[Point]:
    """Returns all points of a profile, each once, grouped by operator.

    Args:
      grid: the values of the points.
      backbone: sizes of the backbone.
      devices: number of devices of this host; collectives are measured over each of its divisors.
    """
    all_points = [
        *_layers(grid),
        *_attention(grid),
        *(HeadPoint(tokens) for tokens in grid.tokens),
        *_updates(grid, backbone),
        _round(grid),
        *_collectives(grid, devices),
    ]
    return list(dict.fromkeys(all_points))


def _layers(grid: Grid) -> list[LayerPoint]:
    slots, rank, chunk_len = grid.slots[0], grid.ranks[0], grid.chunk_lens[0]

    def adapted(tokens: int = grid.reference_tokens, **changes) -> LayerPoint:
        point = LayerPoint(
            layers=grid.layers,
            tokens=tokens,
            row_len=grid.row_len,
            chunk_len=chunk_len,
            max_sequences=1,
            slots=slots,
            rank=rank,
            tasks=slots,
            remat="dots",
            dropout=False,
            backward=True,
        )
        point = dataclasses.replace(point, **changes)
        return dataclasses.replace(point, tasks=min(point.tasks, tokens // point.chunk_len))

    longest = max(r for r in grid.row_lens if not grid.reference_tokens % r)
    return [
        *(adapted(tokens, rank=0, slots=1, tasks=1) for tokens in grid.tokens),
        *(adapted(tokens, tasks=tasks) for tokens in grid.tokens for tasks in (slots, 1)),
        *(adapted(slots=other, tasks=tasks) for other in grid.slots[1:] for tasks in (other, 1)),
        *(adapted(rank=other, tasks=tasks) for other in grid.ranks[1:] for tasks in (slots, 1)),
        *(adapted(chunk_len=other) for other in grid.chunk_lens[1:]),
        adapted(dropout=True),
        *([adapted(padding=0.5)] if grid.row_len >= 2 * chunk_len else []),
        adapted(row_len=longest),
        *(adapted(remat=remat) for remat in NAMED_POLICIES if remat != "dots"),
        *(adapted(tokens, backward=False) for tokens in (grid.tokens[0], grid.reference_tokens)),
    ]


def _attention(grid: Grid) -> list[AttentionPoint]:
    return [
        AttentionPoint(
            max(row_len, grid.reference_tokens // row_len * row_len),
            row_len,
            grid.chunk_lens[0],
            max_sequences,
            backward,
        )
        for row_len in grid.row_lens
        for max_sequences in _MAX_SEQUENCES
        for backward in (False, True)
    ]


def _updates(grid: Grid, backbone: BackboneSize) -> list[UpdatePoint]:
    per_slot = grid.layers * grid.ranks[0] * backbone.adapter_width
    return [UpdatePoint(slots * per_slot, slots, OPTIMIZER) for slots in (1, *grid.slots)]


def _round(grid: Grid) -> RoundPoint:
    tokens, row_len = grid.reference_tokens, grid.row_len
    # The most tasks, at most one per slot, that fill the rows of one microbatch equally.
    tasks = math.gcd(tokens // row_len, grid.slots[0])
    return RoundPoint(
        layers=grid.layers,
        tokens=tokens,
        row_len=row_len,
        chunk_len=grid.chunk_lens[0],
        max_sequences=1,
        slots=tasks,
        rank=grid.ranks[0],
        tasks=tasks,
    )


def _collectives(grid: Grid, devices: int) -> list[CollectivePoint]:
    """Returns collectives over every divisor of the devices: among neighbours, and among devices
    that lie far apart if there are others between them."""
    sizes = [n for n in range(2, devices + 1) if devices % n == 0]
    axes = [("inner", n) for n in sizes] + [("outer", n) for n in sizes if n < devices]
    return [
        CollectivePoint(collective, axis, size, payload)
        for collective in _COLLECTIVES
        for axis, size in axes
        for payload in grid.payload_bytes
    ]
