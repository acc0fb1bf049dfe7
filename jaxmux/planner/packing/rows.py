"""Lays the spans of several tasks into rows, each task's spans in their fixed order.

A task's result depends on the contents and the order of its chunks, not on their rows (see
`microbatches`). A row therefore takes the next spans of some of the tasks, and never a later span
of a task before an earlier one. Under this rule, rows take as many chunks as fit.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice, product
from typing import NamedTuple

import numpy as np

from .shape_class import ShapeClass
from .spans import Span, least_bins

# For each slot, the task's spans in the order in which they must be laid down.
Queues = Mapping[int, Sequence[Span]]
# For each slot, the number of the slot's next spans that a row takes.
Row = dict[int, int]


# Weights of room and of sequences in the weighted sums that bound rows with limits on both.
_WEIGHTS = ((1, 0), (0, 1), (1, 1), (2, 1), (1, 2))


class RowShape(NamedTuple):
    """Limits of a row. If a chunk is longer than a row of the shape class, a row of this module
    stands for the `block` rows that one chunk covers."""

    chunks: int
    max_sequences: int
    block: int

    @classmethod
    def of(cls, shape: ShapeClass) -> "RowShape":
        return cls(
            max(1, shape.row_len // shape.chunk_len),
            shape.max_sequences,
            max(1, shape.chunk_len // shape.row_len),
        )


def fill_rows(queues: Queues, shape: RowShape, height: int) -> list[Row]:
    """Lays all spans into rows, with the best of several ways to fill one row after another. The
    best way needs the fewest rows; among ways with equally many rows, it has the fewest chunks in
    the last microbatch of `height` rows."""
    best = fill_rows_greedily(queues, shape)
    least = least_rows(queues, shape)
    chunks = sum(row_chunks(queues, best))
    least_last = max(1, chunks - (least - 1) // height * height * shape.chunks)
    for even_out, insist in product((False, True), (True, False)):
        if last_chunks(queues, best, height) == least_last and len(best) == least:
            return best
        plan = _fill_rows_full(queues, shape, even_out, insist)
        best = min(best, plan, key=lambda r: (len(r), last_chunks(queues, r, height)))
    return best


def last_chunks(queues: Queues, rows: Sequence[Row], height: int) -> int:
    return sum(row_chunks(queues, rows)[(len(rows) - 1) // height * height :])


def fill_rows_greedily(queues: Queues, shape: RowShape) -> list[Row]:
    """Lays all spans into rows by first fit decreasing: a row takes the longest of the tasks' next
    spans that fits, until none fits."""
    left = {slot: deque(queue) for slot, queue in queues.items() if queue}
    rows = []
    while left:
        row: Row = {}
        chunks, sequences = shape.chunks, shape.max_sequences
        while fitting := [
            slot
            for slot, spans in left.items()
            if spans[0].chunks <= chunks and spans[0].sequences <= sequences
        ]:
            slot = max(fitting, key=lambda slot: left[slot][0].chunks)
            span = left[slot].popleft()
            chunks -= span.chunks
            sequences -= span.sequences
            row[slot] = row.get(slot, 0) + 1
            if not left[slot]:
                del left[slot]
        rows.append(row)
    return rows


def _fill_rows_full(queues: Queues, shape: RowShape, even_out: bool, insist: bool) -> list[Row]:
    """Fills every row as full as the next spans of the tasks allow. Of choices that fill a row
    equally, it takes the one with the fewest sequences, or with `even_out`, spans of the tasks that
    have the most chunks left. With `insist`, a row always takes the longest of the next spans."""
    # Few sequences leave short ones for gaps in later rows. Spans of the tasks with the most chunks
    # left leave many tasks to choose from in the last rows.
    position = dict.fromkeys(queues, 0)
    left = {slot: sum(span.chunks for span in queue) for slot, queue in queues.items()}
    rows = []
    chunks, max_sequences = shape.chunks, shape.max_sequences
    prefixes = {slot: _prefixes(queue, 0, chunks, max_sequences) for slot, queue in queues.items()}
    while any(left.values()):
        weight = left if even_out else None
        row = _fullest_of_prefixes(prefixes, chunks, max_sequences, weight=weight, insist=insist)
        for slot, count in row.items():
            position[slot] += count
            left[slot] -= prefixes[slot][count - 1][0]
            prefixes[slot] = _prefixes(queues[slot], position[slot], chunks, max_sequences)
        rows.append(row)
    return rows


def fullest_row(
    queues: Queues,
    position: Mapping[int, int],
    chunks: int,
    max_sequences: int,
    weight: Mapping[int, float] | None = None,
    insist: bool = False,
) -> Row:
    """Chooses the spans that fill one row best, by a knapsack over the next spans of each task.
    `weight` is the value of a chunk of each slot, and decides between choices that fill the row
    equally; None prefers the choice with the fewest sequences."""
    prefixes = {
        slot: _prefixes(queue, position[slot], chunks, max_sequences)
        for slot, queue in queues.items()
    }
    return _fullest_of_prefixes(prefixes, chunks, max_sequences, weight, insist)


def _fullest_of_prefixes(
    prefixes: Mapping[int, Sequence[tuple[int, int]]],
    chunks: int,
    max_sequences: int,
    weight: Mapping[int, float] | None,
    insist: bool,
) -> Row:
    waiting = sorted(filter(prefixes.get, prefixes), key=lambda slot: -prefixes[slot][0][0])
    # For each number of chunks taken, the cost and the number of sequences of the best choice.
    best: dict[int, tuple[float, int]] = {0: (0, 0)}
    choices: list[tuple[int, dict[int, int]]] = []
    for slot in waiting:
        longer = {} if insist and not choices else dict(best)
        count: dict[int, int] = {}
        for n, (size, sequences) in enumerate(prefixes[slot], start=1):
            price = sequences if weight is None else -weight[slot] * size
            for total, (cost, used) in best.items():
                taken_chunks = total + size
                if taken_chunks > chunks or used + sequences > max_sequences:
                    continue
                known = longer.get(taken_chunks)
                if known is None or cost + price < known[0]:
                    longer[taken_chunks] = cost + price, used + sequences
                    count[taken_chunks] = n
        best = longer
        choices.append((slot, count))
    total = max(best)
    row: Row = {}
    for slot, count in reversed(choices):
        if taken := count.get(total):
            row[slot] = taken
            total -= prefixes[slot][taken - 1][0]
    return row


def _prefixes(
    queue: Sequence[Span], start: int, chunks: int, max_sequences: int
) -> list[tuple[int, int]]:
    """Chunks and sequences of the next span, of the next two together, and so on while they fit."""
    sums, size, sequences = [], 0, 0
    for i in range(start, len(queue)):
        size += queue[i].chunks
        sequences += queue[i].sequences
        if size > chunks or sequences > max_sequences:
            break
        sums.append((size, sequences))
    return sums


def spans_of_rows(queues: Queues, rows: Sequence[Row]) -> list[list[tuple[int, Span]]]:
    """The spans of each row, as pairs (slot, span) in the order in which they lie there."""
    left = {slot: iter(queue) for slot, queue in queues.items()}
    return [
        [(slot, span) for slot, count in row.items() for span in islice(left[slot], count)]
        for row in rows
    ]


def row_chunks(queues: Queues, rows: Sequence[Row]) -> list[int]:
    return [sum(span.chunks for _, span in spans) for spans in spans_of_rows(queues, rows)]


def least_rows(queues: Queues, shape: RowShape) -> int:
    """A lower bound on the number of rows that hold these spans, in any order."""
    spans = [span for queue in queues.values() for span in queue]
    if shape.block > 1:
        return len(spans)
    chunks, sequences = [span.chunks for span in spans], [span.sequences for span in spans]
    return _least_rows_of_both(chunks, shape.chunks, sequences, shape.max_sequences)


def least_rows_of_samples(lengths: Mapping[int, Sequence[int]], shape: ShapeClass) -> int:
    """A lower bound on the number of rows of any layout of the samples in which each chunk belongs
    to one task."""
    row = RowShape.of(shape)
    if row.block > 1:
        return sum(
            -(-least_bins(sizes, shape.row_len, shape.max_sequences) // row.block)
            for sizes in lengths.values()
        )
    together = [size for sizes in lengths.values() for size in sizes]
    if row.chunks == 1:
        # A row belongs to one task.
        return sum(_least_rows_of_one_task(sizes, shape) for sizes in lengths.values())
    chunks = sum(_least_chunks(sizes, shape) for sizes in lengths.values())
    return max(_least_rows_of_one_task(together, shape), -(-chunks // row.chunks))


def _least_rows_of_one_task(lengths: Sequence[int], shape: ShapeClass) -> int:
    """A lower bound on the number of rows, without regard to chunks."""
    return _least_rows_of_both(lengths, shape.row_len, [1] * len(lengths), shape.max_sequences)


def _least_chunks(lengths: Sequence[int], shape: ShapeClass) -> int:
    """A lower bound on the number of chunks that one task's samples take in any rows.

    It is the larger of two bounds, each for the best threshold of the lengths:

    - If c chunks hold at most m(c) samples of at least u tokens, each such sample takes at least
      the smallest c / m(c).
    - Two samples above half a row never share a row. Each takes whole chunks, and the other
      samples first fill the ends of these chunks.
    """
    if not lengths:
        return 0
    chunk_len, most = shape.chunk_len, shape.row_len // shape.chunk_len
    descending = np.sort(np.asarray(lengths, np.int64))[::-1]
    counts = np.arange(1, len(descending) + 1)
    chunks = np.arange(1, most + 1)
    held = chunks * chunk_len // descending[:, None]
    # m / c, so that no division is by 0; every sample fits into a row.
    densest = (held / chunks).max(axis=1)
    by_count = np.ceil(counts / densest - 1e-9).max()
    sums = np.concatenate([[0], np.cumsum(descending)])
    long = np.concatenate([[0], np.cumsum(-(-descending // chunk_len))])
    above_half = np.searchsorted(-descending, -(shape.row_len // 2)) + 1
    long, filled = long[:above_half], sums[:above_half]
    beyond = np.maximum(0, (sums[-1] - filled) - (long * chunk_len - filled))
    return max(int(by_count), int((long + -(-beyond // chunk_len)).max()))


def _least_rows_of_both(
    sizes: Sequence[int], room: int, counts: Sequence[int], max_count: int
) -> int:
    """A lower bound on the number of rows that are limited in both size and count: the best one
    over several weighted sums of both, as no row exceeds any of these sums. If the items are so
    long that no row reaches the limit of the count, the size alone counts."""
    # There are no samples if all samples of a task train on other replicas.
    if not len(sizes) or (
        min(s / c for s, c in zip(sizes, counts, strict=True)) * max_count >= room
    ):
        return least_bins(sizes, room)
    share = np.asarray(sizes, np.int64) * max_count
    count_share = np.asarray(counts, np.int64) * room
    return max(
        least_bins(
            of_room * share + of_count * count_share, (of_room + of_count) * room * max_count
        )
        for of_room, of_count in _WEIGHTS
    )
