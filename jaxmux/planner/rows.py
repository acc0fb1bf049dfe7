"""Lays the runs of several tasks down in rows, each task's runs in their own fixed order.

What a task computes depends on the contents and the order of its chunks, not on where they lie
(see `packing`). So a row takes the next few runs of some of the tasks, never one out of turn, and
within that rule as many chunks as fit.
"""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .bins import least_bins
from .runs import Run
from .shape_class import ShapeClass

# By slot, the runs in the order in which they must be laid down.
Queues = Mapping[int, Sequence[Run]]
# By slot, how many of its next runs a row takes.
Row = dict[int, int]


# Of room and of seats, in the bounds on rows that have both.
_WEIGHTS = ((1, 0), (0, 1), (1, 1), (2, 1), (1, 2))


class RowShape(NamedTuple):
    """What a row holds.

    Attributes:
      chunks: chunks of a row.
      seats: most sequences of a row.
      block: rows of the shape class that a row here stands for: those that a chunk spans.
    """

    chunks: int
    seats: int
    block: int

    @classmethod
    def of(cls, shape: ShapeClass) -> "RowShape":
        return cls(
            max(1, shape.row_len // shape.chunk_len),
            shape.max_sequences,
            max(1, shape.chunk_len // shape.row_len),
        )


def fill_rows(queues: Queues, shape: RowShape, height: int) -> list[Row]:
    """Rows that hold every run: the best plan of a few ways to fill one row after another.

    Best is the plan of the fewest rows, then that with the fewest chunks in its last microbatch,
    of `height` rows.
    """
    best = fill_rows_greedily(queues, shape)
    least = least_rows(queues, shape)
    chunks = sum(row_chunks(queues, best))
    least_last = max(1, chunks - (least - 1) // height * height * shape.chunks)
    for even_out in (False, True):
        for insist in (True, False):
            if last_chunks(queues, best, height) == least_last and len(best) == least:
                return best
            plan = _fill_rows_full(queues, shape, even_out, insist)
            best = min(best, plan, key=lambda r: (len(r), last_chunks(queues, r, height)))
    return best


def last_chunks(queues: Queues, rows: Sequence[Row], height: int) -> int:
    """Chunks in the last microbatch, of at most `height` rows."""
    return sum(row_chunks(queues, rows)[(len(rows) - 1) // height * height :])


def fill_rows_greedily(queues: Queues, shape: RowShape) -> list[Row]:
    """First fit decreasing as far as the order permits: a row takes the longest of the tasks' next
    runs that fits, until none does."""
    order = {slot: i for i, slot in enumerate(queues)}
    position = dict.fromkeys(queues, 0)
    # The next run of every task, longest first.
    heads = [(-queue[0].chunks, order[slot], slot) for slot, queue in queues.items() if queue]
    heapq.heapify(heads)
    rows = []
    while heads:
        row: Row = {}
        chunks, seats = shape.chunks, shape.seats
        too_large = []
        while heads and chunks and seats:
            head = heapq.heappop(heads)
            slot = head[-1]
            run = queues[slot][position[slot]]
            if run.chunks > chunks or run.seats > seats:
                too_large.append(head)
                continue
            chunks -= run.chunks
            seats -= run.seats
            position[slot] += 1
            row[slot] = row.get(slot, 0) + 1
            if position[slot] < len(queues[slot]):
                following = queues[slot][position[slot]]
                heapq.heappush(heads, (-following.chunks, order[slot], slot))
        for head in too_large:
            heapq.heappush(heads, head)
        rows.append(row)
    return rows


def _fill_rows_full(queues: Queues, shape: RowShape, even_out: bool, insist: bool) -> list[Row]:
    """Fills every row as far as the runs next in turn can.

    Among the choices that do, one takes the fewest sequences, so that short ones stay for later
    gaps; or, with `even_out`, comes from the tasks of which most is left, so that the last rows
    still choose among many. With `insist`, a row always takes the longest of the next runs.
    """
    position = dict.fromkeys(queues, 0)
    left = {slot: sum(run.chunks for run in queue) for slot, queue in queues.items()}
    rows = []
    while any(left.values()):
        weight = left if even_out else None
        row = fullest_row(queues, position, shape.chunks, shape.seats, weight, insist)
        for slot, count in row.items():
            start = position[slot]
            position[slot] += count
            left[slot] -= sum(run.chunks for run in queues[slot][start : start + count])
        rows.append(row)
    return rows


def fullest_row(
    queues: Queues,
    position: Mapping[int, int],
    chunks: int,
    seats: int,
    weight: Mapping[int, float] | None = None,
    insist: bool = False,
) -> Row:
    """The runs next in turn that fill most of a row; empty if none fits.

    A knapsack over the tasks: for each number of chunks, the best choice of so many runs of the
    first task, so many of the second, ... that takes just these chunks.

    Args:
      queues: by slot, the runs in their order.
      position: by slot, how many runs are laid down already.
      chunks, seats: what the row has room for.
      weight: by slot, the gain of a chunk of it, among choices that fill as much; None takes the
        choice of fewest sequences.
      insist: whether the longest of the next runs must be among them.
    """
    waiting = _waiting(queues, position)
    waiting.sort(key=lambda slot: -queues[slot][position[slot]].chunks)
    # By chunks taken, the cost and the sequences of the best choice. Few sums are possible.
    best: dict[int, tuple[float, int]] = {0: (0, 0)}
    choices: list[tuple[int, dict[int, int]]] = []
    for slot in waiting:
        prefixes = _prefixes(queues[slot], position[slot], chunks, seats)
        if not prefixes:
            continue
        longer = {} if insist and not choices else dict(best)
        count: dict[int, int] = {}
        for n, (size, sequences) in enumerate(prefixes, start=1):
            price = sequences if weight is None else -weight[slot] * size
            for total, (cost, used) in best.items():
                with_runs = total + size
                if with_runs > chunks or used + sequences > seats:
                    continue
                known = longer.get(with_runs)
                if known is None or cost + price < known[0]:
                    longer[with_runs] = cost + price, used + sequences
                    count[with_runs] = n
        best = longer
        choices.append((slot, count))
    total = max(best)
    row: Row = {}
    for slot, count in reversed(choices):
        if taken := count.get(total):
            row[slot] = taken
            start = position[slot]
            total -= sum(run.chunks for run in queues[slot][start : start + taken])
    return row


def _waiting(queues: Queues, position: Mapping[int, int]) -> list[int]:
    return [slot for slot, queue in queues.items() if position[slot] < len(queue)]


def _prefixes(queue: Sequence[Run], start: int, chunks: int, seats: int) -> list[tuple[int, int]]:
    """Chunks and sequences of the next run, the next two, ... as far as they fit."""
    sums, size, sequences = [], 0, 0
    for i in range(start, len(queue)):
        size += queue[i].chunks
        sequences += queue[i].seats
        if size > chunks or sequences > seats:
            break
        sums.append((size, sequences))
    return sums


def runs_of_rows(queues: Queues, rows: Sequence[Row]) -> list[list[tuple[int, Run]]]:
    """For each row, the runs that lie there and their slots, in order."""
    position = dict.fromkeys(queues, 0)
    laid_down = []
    for row in rows:
        laid_down.append([])
        for slot, count in row.items():
            start = position[slot]
            laid_down[-1] += [(slot, run) for run in queues[slot][start : start + count]]
            position[slot] += count
    return laid_down


def row_chunks(queues: Queues, rows: Sequence[Row]) -> list[int]:
    """Chunks that each row holds."""
    return [sum(run.chunks for _, run in runs) for runs in runs_of_rows(queues, rows)]


def least_rows(queues: Queues, shape: RowShape) -> int:
    """Lower bound on the rows that hold these runs, in whatever order."""
    runs = [run for queue in queues.values() for run in queue]
    if shape.block > 1:
        return len(runs)
    chunks, seats = [run.chunks for run in runs], [run.seats for run in runs]
    return _least_rows_of_both(chunks, shape.chunks, seats, shape.seats)


def least_rows_of_samples(lengths: Mapping[int, Sequence[int]], shape: ShapeClass) -> int:
    """Lower bound on the rows of any layout of samples in which each chunk has one owner."""
    row = RowShape.of(shape)
    if row.block > 1:
        return sum(
            -(-least_bins(sizes, shape.row_len, shape.max_sequences) // row.block)
            for sizes in lengths.values()
        )
    samples = [size for sizes in lengths.values() for size in sizes]
    chunks = sum(-(-sum(sizes) // shape.chunk_len) for sizes in lengths.values())
    return max(
        _least_rows_of_both(samples, shape.row_len, [1] * len(samples), shape.max_sequences),
        -(-chunks // row.chunks),
    )


def _least_rows_of_both(
    sizes: Sequence[int], room: int, seats: Sequence[int], most_seats: int
) -> int:
    """Lower bound on rows with room and seats: the best over weighted sums of both, each of which
    no row exceeds."""
    share = np.asarray(sizes, np.int64) * most_seats
    seat_share = np.asarray(seats, np.int64) * room
    return max(
        least_bins(
            of_room * share + of_seats * seat_share, (of_room + of_seats) * room * most_seats
        )
        for of_room, of_seats in _WEIGHTS
    )
