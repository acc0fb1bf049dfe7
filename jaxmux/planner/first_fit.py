"""Packs the global batches of a round first-fit-decreasing, task by task: the plain way that
`microbatches` is measured against.

A *run* is a series of whole sequences of one task that lie side by side in a row from a chunk
border on. Each task's batch is cut into runs by itself, and its runs are laid down in one fixed
order. So neither the contents of a task's chunks nor their order depends on who shares the
microbatches: only where they lie does.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .microbatches import Placement
from .shape_class import PlanningError, ShapeClass


class _Run(NamedTuple):
    samples: tuple[int, ...]
    tokens: int


def pack_first_fit(
    lengths: Mapping[int, Sequence[int]], shape: ShapeClass
) -> list[tuple[Placement, ...]]:
    """Places every sample of a round exactly once.

    Args:
      lengths: by slot, the stream lengths in tokens of the samples of the task's global batch.
      shape: the shape class of the microbatches.

    Returns:
      One tuple of placements per microbatch. The chunks of a task appear in the same order whatever
      the other tasks.

    Raises:
      PlanningError: a sample is longer than a row.
    """
    queues = {slot: _runs(slot, sizes, shape) for slot, sizes in lengths.items()}
    rows: list[list[Placement]] = []
    while any(queues.values()):
        row = len(rows) % shape.rows
        if shape.chunk_len > shape.row_len:
            rows += _fill_chunk(queues, lengths, shape, row)
        else:
            rows.append(_fill_row(queues, lengths, shape, row))
    return [
        tuple(p for row in rows[start : start + shape.rows] for p in row)
        for start in range(0, len(rows), shape.rows)
    ]


def _runs(slot: int, lengths: Sequence[int], shape: ShapeClass) -> list[_Run]:
    """First-fit-decreasing of one task's samples into runs of at most a row, longest run first."""
    runs: list[_Run] = []
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        size = lengths[sample]
        if size > shape.row_len:
            raise PlanningError(
                f"slot {slot}: sample {sample} has {size} tokens, a row holds {shape.row_len}"
            )
        for i, run in enumerate(runs):
            if run.tokens + size <= shape.row_len and len(run.samples) < shape.max_sequences:
                runs[i] = _Run((*run.samples, sample), run.tokens + size)
                break
        else:
            runs.append(_Run((sample,), size))
    return sorted(runs, key=lambda run: -run.tokens)


def _fill_chunk(
    queues: dict[int, list[_Run]],
    lengths: Mapping[int, Sequence[int]],
    shape: ShapeClass,
    row: int,
) -> list[list[Placement]]:
    """The rows of one chunk from `row` on, a run each, of the task whose next run is longest."""
    slot = max((s for s, queue in queues.items() if queue), key=lambda s: queues[s][0].tokens)
    rows = []
    for i in range(row, row + shape.chunk_len // shape.row_len):
        run = queues[slot].pop(0) if queues[slot] else _Run((), 0)
        rows.append(_place(run, slot, lengths, i, offset=0))
    return rows


def _fill_row(
    queues: dict[int, list[_Run]],
    lengths: Mapping[int, Sequence[int]],
    shape: ShapeClass,
    row: int,
) -> list[Placement]:
    """Takes runs from the heads of the tasks' queues, the longest that fits first, until none
    fits."""
    placements: list[Placement] = []
    start = 0
    while True:
        room = shape.row_len - start
        seats = shape.max_sequences - len(placements)
        fitting = [
            slot
            for slot, queue in queues.items()
            if queue and queue[0].tokens <= room and len(queue[0].samples) <= seats
        ]
        if not fitting:
            return placements
        slot = max(fitting, key=lambda s: queues[s][0].tokens)
        run = queues[slot].pop(0)
        placements += _place(run, slot, lengths, row, offset=start)
        start += -(-run.tokens // shape.chunk_len) * shape.chunk_len


def _place(
    run: _Run, slot: int, lengths: Mapping[int, Sequence[int]], row: int, offset: int
) -> list[Placement]:
    placements = []
    for sample in run.samples:
        placements.append(Placement(slot, sample, row, offset))
        offset += lengths[slot][sample]
    return placements
