"""Packs global batches into microbatches: proven optimal, or with the gap that is left.

**Capacity.** A microbatch is `rows` rows of `row_len` tokens, N together; attention sees one row.
A task's samples lie side by side in *runs*; a run begins at a chunk border, takes whole chunks,
the last of them padded, and stays within a row. So a row is full when the chunks of its runs are,
and rows are interchangeable: as few microbatches as possible is as few rows as possible, divided
by `rows`. Where a chunk is longer than a row, it spans several, all of one task.

**Isolation.** Two levels keep a task's result independent of its company. `cut_runs` sees one
task's lengths and fixes the contents and the order of its chunks. The packing of all tasks' runs
into rows then decides only where they lie. The lower bound knows no such restraint: it holds for
every layout of the samples in which each chunk has one owner.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from typing import Any, NamedTuple

from .rows import (
    Row,
    RowShape,
    fill_rows,
    fill_rows_greedily,
    last_chunks,
    least_rows,
    least_rows_of_samples,
    row_chunks,
    runs_of_rows,
)
from .runs import Run, cut_runs
from .shape_class import ShapeClass

_log = logging.getLogger("jaxmux")

Lengths = Mapping[int, Sequence[int]]

# Version of what `pack_batch` makes without a solver: a round can be taken up in its middle only if
# it is packed as before.
PACKING = 1

# A process is given up after so many seconds, and limits of the solver: it may have yet to start.
_PATIENCE_SECONDS, _PATIENCE_LIMITS = 30.0, 10.0
# The solver's share of the 1 ms that planning a sample may take.
_SOLVER_SECONDS_PER_SAMPLE = 2e-4


class Placement(NamedTuple):
    """Where one sample of a round lies.

    Attributes:
      slot: slot of the task.
      sample: index of the sample in the task's global batch.
      row: row of the microbatch.
      offset: first token in the row.
    """

    slot: int
    sample: int
    row: int
    offset: int


class CutBatch(NamedTuple):
    """A task's global batch, ready to be packed beside any others.

    Attributes:
      lengths: stream lengths in tokens of its samples.
      runs: that they are cut into (see `runs`).
    """

    lengths: Sequence[int]
    runs: tuple[Run, ...]


class PackedBatch(NamedTuple):
    """One global batch of every task of a group, in microbatches.

    Attributes:
      shape: shape class of the microbatches.
      runs: by slot, the task's runs in the order of the stream.
      rows: for each row, how many of its next runs each slot places there, side by side. A row
        stands for the several that a chunk spans where chunks are longer than rows.
      bound: no layout of the samples has fewer microbatches.
      isolated_bound: no layout of these runs has fewer.
    """

    shape: ShapeClass
    runs: dict[int, tuple[Run, ...]]
    rows: list[Row]
    bound: int
    isolated_bound: int

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return -(-len(self.rows) // rows_of_microbatch(self.shape))

    @property
    def gap(self) -> float:
        """How far the number of microbatches may be above the least possible: 0.03 is 3%."""
        return self.count / self.bound - 1 if self.bound else 0.0

    def contents(self) -> list[list[list[tuple[int, Run]]]]:
        """For each microbatch and row, the runs that lie there and their slots, in order."""
        rows = runs_of_rows(self.runs, self.rows)
        height = rows_of_microbatch(self.shape)
        return [rows[start : start + height] for start in range(0, len(rows), height)]

    def microbatches(self) -> list[tuple[Placement, ...]]:
        """Where each sample lies, by microbatch, in the order of the rows."""
        return [place(rows, self.shape) for rows in self.contents()]


def place(rows: Sequence[Sequence[tuple[int, Run]]], shape: ShapeClass) -> tuple[Placement, ...]:
    """Places the runs of a microbatch, given by row with their slots, side by side."""
    block = RowShape.of(shape).block
    placements = []
    for i, row in enumerate(rows):
        chunk = 0
        for slot, run in row:
            placements += [
                Placement(slot, sample, i * block + below, chunk * shape.chunk_len + offset)
                for sample, below, offset in run.samples
            ]
            chunk += run.chunks
    return tuple(placements)


def rows_of_microbatch(shape: ShapeClass) -> int:
    """Rows of a microbatch; the rows that one chunk spans count as one."""
    return shape.rows // RowShape.of(shape).block


def pack_batches(
    batches: Sequence[Lengths],
    shape: ShapeClass,
    solver_seconds: float | None = None,
    executor: Executor | None = None,
) -> list[PackedBatch]:
    """`pack_batch` of every global batch; they are independent of each other.

    Args:
      batches, shape, solver_seconds: see `pack_batch`.
      executor: packs them in parallel (LoRAFusion Alg. 1, line 1). A `ProcessPoolExecutor` that
        spawns its processes will do, kept by the caller, for processes are slow to start. What its
        processes fail to do, killed or stuck, is done here without the solver.
    """
    if executor is None:
        return [pack_batch(lengths, shape, solver_seconds) for lengths in batches]
    futures = [_submit(executor, lengths, shape, solver_seconds) for lengths in batches]
    patience = _PATIENCE_SECONDS + _PATIENCE_LIMITS * (solver_seconds or 0.0)
    return [
        _collect(future, lengths, shape, patience)
        for future, lengths in zip(futures, batches, strict=True)
    ]


def _submit(executor: Executor, *arguments: Any) -> Future[PackedBatch]:
    try:
        return executor.submit(pack_batch, *arguments)
    except BrokenExecutor as e:
        failed: Future[PackedBatch] = Future()
        failed.set_exception(e)
        return failed


def _collect(
    future: Future[PackedBatch], lengths: Lengths, shape: ShapeClass, patience: float
) -> PackedBatch:
    try:
        return future.result(patience)
    except (BrokenExecutor, TimeoutError) as e:
        _log.warning("a batch is packed without the solver: %s", str(e) or "its process is stuck")
        future.cancel()
        return pack_batch(lengths, shape, solver_seconds=0)


def pack_batch(
    lengths: Lengths, shape: ShapeClass, solver_seconds: float | None = None
) -> PackedBatch:
    """Packs one global batch into the fewest microbatches, then with the least-full last one.

    Args:
      lengths: by slot, the stream lengths in tokens of the samples of the task's global batch.
      shape, solver_seconds: see `pack_cut`.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return pack_cut(cut_batches(lengths, shape), shape, solver_seconds)


def cut_batches(lengths: Lengths, shape: ShapeClass) -> dict[int, CutBatch]:
    """By slot, the task's global batch in runs: who packs it again and again cuts it once.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return {
        slot: CutBatch(sizes, cut_runs(sizes, shape, f"slot {slot}"))
        for slot, sizes in lengths.items()
    }


def pack_cut(
    batches: Mapping[int, CutBatch], shape: ShapeClass, solver_seconds: float | None = None
) -> PackedBatch:
    """`pack_batch` of what is cut already.

    The rows found without a solver stand unless a better packing is found. The solver is called
    only where the lower bounds leave open whether there is one, and gives up after its time.

    Args:
      batches: by slot, the task's global batch.
      shape: shape class of the microbatches, for which they were cut.
      solver_seconds: time limit of all programs together; 0 leaves the solver out, None takes what
        keeps planning below 1 ms a sample. The result depends on the machine's speed only where
        the limit is reached.
    """
    runs = {slot: batch.runs for slot, batch in batches.items()}
    lengths = {slot: batch.lengths for slot, batch in batches.items()}
    queues = {slot: queue for slot, queue in runs.items() if queue}
    if not queues:
        return PackedBatch(shape, runs, [], 0, 0)
    row_shape, height = RowShape.of(shape), rows_of_microbatch(shape)
    rows = fill_rows(queues, row_shape, height)
    bound = -(-least_rows_of_samples(lengths, shape) // height)
    isolated_bound = max(bound, -(-least_rows(queues, row_shape) // height))
    if solver_seconds is None:
        solver_seconds = _SOLVER_SECONDS_PER_SAMPLE * sum(map(len, lengths.values()))
    if solver_seconds > 0:
        # Who leaves the solver out need not load it.
        from .exact_rows import Answer, solve_rows

        end = time.monotonic() + solver_seconds

        def program(rows: int, last: int) -> Answer:
            seconds = max(0.0, end - time.monotonic())
            return solve_rows(queues, row_shape, rows, last, seconds)

        rows, isolated_bound = _with_fewest_microbatches(rows, isolated_bound, height, program)
        rows = _with_least_full_last(rows, height, program, queues, row_shape)
    return PackedBatch(shape, runs, rows, bound, isolated_bound)


def pack_greedily(lengths: Lengths, shape: ShapeClass) -> PackedBatch:
    """The baseline: rows take the longest of the next runs that fits, until none does."""
    runs = {slot: batch.runs for slot, batch in cut_batches(lengths, shape).items()}
    queues = {slot: queue for slot, queue in runs.items() if queue}
    rows = fill_rows_greedily(queues, RowShape.of(shape))
    bound = -(-least_rows_of_samples(lengths, shape) // rows_of_microbatch(shape))
    return PackedBatch(shape, runs, rows, bound, bound)


def _with_fewest_microbatches(rows: list[Row], bound: int, height: int, program) -> tuple:
    """Stage 1 (Eq. 3): a packing of fewer microbatches, where there is one, and the bound on them
    that is proven then."""
    while bound < -(-len(rows) // height):
        answer = program(rows=bound * height, last=(bound - 1) * height)
        if answer.rows is not None:
            return answer.rows, bound
        if not answer.infeasible:
            break
        bound += 1
    return rows, bound


def _with_least_full_last(
    rows: list[Row], height: int, program, queues, shape: RowShape
) -> list[Row]:
    """Stage 2 (Eq. 4): as many microbatches with fewer chunks in the last, where there are such."""
    last = (len(rows) - 1) // height * height
    in_last = last_chunks(queues, rows, height)
    if in_last <= max(1, sum(row_chunks(queues, rows)) - last * shape.chunks):
        return rows
    answer = program(rows=last + height, last=last)
    better = answer.rows is not None and last_chunks(queues, answer.rows, height) < in_last
    return answer.rows if better else rows
