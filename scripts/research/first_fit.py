"""Simpler packings, to compare `pack_round` with.

`pack_first_fit` packs the global batches of a round first-fit-decreasing, task by task.
`pack_greedily` fills rows with the spans of `pack_round` more simply.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxmux.planner import PlanningError
from jaxmux.planner.packing import PackedRound, Placement, RoundLengths, ShapeClass, pack_round
from jaxmux.planner.packing.rows import RowShape, fill_rows_greedily


class _Span(NamedTuple):
    samples: tuple[int, ...]
    tokens: int


def pack_first_fit(lengths: RoundLengths, shape: ShapeClass) -> list[tuple[Placement, ...]]:
    """Packs one round with the plain first-fit-decreasing rule, as a baseline for `pack_round`.

    A round is one global batch of every task. The rule has two steps. First, the samples of each
    task are grouped into spans. A span is a series of samples of one task that lie side by side in
    a row; it has at most the tokens of a row and the most samples that a row may have. Each sample,
    longest first, joins the first span of its task that has room for it. Second, rows are filled
    with spans, one row after another: of the tasks' longest remaining spans, the longest that fits
    comes next. In a row, every span begins at the border of a chunk, so a chunk (consecutive tokens
    of fixed number) holds tokens of one task only. `pack_round` searches for fuller rows and
    usually needs fewer microbatches, so training uses `pack_round`.

    Args:
      lengths: for each slot (a task's place in the pool of adapters), the stream lengths in tokens
        of the samples of the task's global batch. The stream length of a sample is its number of
        tokens without the last one, which is only predicted.
      shape: shape class of the microbatches: rows of a microbatch, tokens of a row, tokens of a
        chunk, and the most samples in a row.

    Returns:
      For each microbatch, the placements (slot, sample, row, offset) of its samples. Every sample
      of the round has exactly one placement. The contents and the order of a task's chunks depend
      on this task's lengths and the shape class alone, not on the other tasks.

    Raises:
      PlanningError: a sample is longer than a row.
    """
    queues = {slot: _spans(slot, sizes, shape) for slot, sizes in lengths.items()}
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


def _spans(slot: int, lengths: Sequence[int], shape: ShapeClass) -> list[_Span]:
    """First-fit-decreasing of one task's samples into spans of at most a row, longest span
    first."""
    spans: list[_Span] = []
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        size = lengths[sample]
        if size > shape.row_len:
            raise PlanningError(
                f"slot {slot}: sample {sample} has {size} tokens, a row holds {shape.row_len}"
            )
        for i, span in enumerate(spans):
            if span.tokens + size <= shape.row_len and len(span.samples) < shape.max_sequences:
                spans[i] = _Span((*span.samples, sample), span.tokens + size)
                break
        else:
            spans.append(_Span((sample,), size))
    return sorted(spans, key=lambda span: -span.tokens)


def _fill_chunk(
    queues: dict[int, list[_Span]],
    lengths: RoundLengths,
    shape: ShapeClass,
    row: int,
) -> list[list[Placement]]:
    """Fills the rows of one chunk, which begins at `row`, with one span each. All spans are of the
    task whose next span is the longest."""
    slot = max((s for s, queue in queues.items() if queue), key=lambda s: queues[s][0].tokens)
    rows = []
    for i in range(row, row + shape.chunk_len // shape.row_len):
        span = queues[slot].pop(0) if queues[slot] else _Span((), 0)
        rows.append(_place(span, slot, lengths, i, offset=0))
    return rows


def _fill_row(
    queues: dict[int, list[_Span]],
    lengths: RoundLengths,
    shape: ShapeClass,
    row: int,
) -> list[Placement]:
    """Takes spans from the heads of the tasks' queues, the longest that fits first, until none
    fits."""
    placements: list[Placement] = []
    start = 0
    while True:
        room = shape.row_len - start
        sequences = shape.max_sequences - len(placements)
        fitting = [
            slot
            for slot, queue in queues.items()
            if queue and queue[0].tokens <= room and len(queue[0].samples) <= sequences
        ]
        if not fitting:
            return placements
        slot = max(fitting, key=lambda s: queues[s][0].tokens)
        span = queues[slot].pop(0)
        placements += _place(span, slot, lengths, row, offset=start)
        start += -(-span.tokens // shape.chunk_len) * shape.chunk_len


def _place(span: _Span, slot: int, lengths: RoundLengths, row: int, offset: int) -> list[Placement]:
    placements = []
    for sample in span.samples:
        placements.append(Placement(slot, sample, row, offset))
        offset += lengths[slot][sample]
    return placements


def pack_greedily(lengths: RoundLengths, shape: ShapeClass) -> PackedRound:
    """Packs one round more simply than `pack_round`, to compare with it.

    Each row takes the longest of the tasks' next spans that fits, until none fits. Arguments,
    result and errors are as in `pack_round`.
    """
    packed = pack_round(lengths, shape)
    return dataclasses.replace(packed, rows=fill_rows_greedily(packed.spans, RowShape.of(shape)))
