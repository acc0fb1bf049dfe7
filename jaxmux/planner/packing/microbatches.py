"""Packs one round, a global batch of every task, into few microbatches.

**Capacity.** A microbatch is `rows` rows of `row_len` tokens, N together; attention sees one row. A
task's samples lie side by side in *spans*. A span begins at a chunk border, takes whole chunks, the
last of them padded, and stays within a row. So a row is full when the chunks of its spans are, and
rows are interchangeable: the fewest microbatches are the fewest rows, divided by `rows`. Where a
chunk is longer than a row, it covers several rows, all of one task.

**Isolation.** Two levels keep a task's result independent of the other tasks. `cut_spans` sees the
lengths of one task and fixes the contents and the order of its chunks. Laying the spans of all
tasks into rows then decides only where they lie. The lower bound assumes neither level: it holds
for every layout of the samples in which each chunk has one owner.

LoRAFusion (Eq. 3-4) solves an integer program here. On rounds of real lengths it never needed fewer
microbatches than `fill_rows`, so it serves as an oracle in the tests.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .rows import (
    Row,
    RowShape,
    fill_rows,
    fill_rows_greedily,
    least_rows,
    least_rows_of_samples,
    spans_of_rows,
)
from .shape_class import ShapeClass
from .spans import Span, cut_spans

# By slot, the stream lengths in tokens of the samples of the task's global batch.
RoundLengths = Mapping[int, Sequence[int]]


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
    """A task's global batch, cut into spans.

    Attributes:
      lengths: stream lengths of its samples, in tokens.
      spans: the spans that it is cut into, in the order in which they must be laid down.
    """

    lengths: Sequence[int]
    spans: tuple[Span, ...]


class PackedRound(NamedTuple):
    """One global batch of every task of a group, in microbatches.

    Attributes:
      shape: shape class of the microbatches.
      spans: by slot, the task's spans in the order of the stream.
      rows: for each row, how many of its next spans each slot places there, side by side. Where a
        chunk is longer than a row, an entry stands for all rows that a chunk covers.
      bound: no layout of the samples has fewer microbatches.
      isolated_bound: no layout of these spans has fewer microbatches.
    """

    shape: ShapeClass
    spans: dict[int, tuple[Span, ...]]
    rows: list[Row]
    bound: int
    isolated_bound: int

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return -(-len(self.rows) // rows_of_microbatch(self.shape))

    @property
    def gap(self) -> float:
        """Microbatches above the lower bound, as a part of it: 0.03 is 3%."""
        return self.count / self.bound - 1 if self.bound else 0.0

    def contents(self) -> list[list[list[tuple[int, Span]]]]:
        """For each microbatch and row, the spans that lie there with their slots, in order."""
        rows = spans_of_rows(self.spans, self.rows)
        height = rows_of_microbatch(self.shape)
        return [rows[start : start + height] for start in range(0, len(rows), height)]

    def microbatches(self) -> list[tuple[Placement, ...]]:
        """For each microbatch, where its samples lie, in the order of the rows."""
        return [place(rows, self.shape) for rows in self.contents()]


def place(rows: Sequence[Sequence[tuple[int, Span]]], shape: ShapeClass) -> tuple[Placement, ...]:
    """Places the samples of a microbatch.

    Args:
      rows: for each row, its spans with their slots, which come to lie side by side.
      shape: shape class of the microbatch.
    """
    block = RowShape.of(shape).block
    placements = []
    for i, row in enumerate(rows):
        chunk = 0
        for slot, span in row:
            placements += [
                Placement(slot, sample, i * block + below, chunk * shape.chunk_len + offset)
                for sample, below, offset in span.samples
            ]
            chunk += span.chunks
    return tuple(placements)


def rows_of_microbatch(shape: ShapeClass) -> int:
    """Rows of a microbatch; the rows that one chunk covers count as one."""
    return shape.rows // RowShape.of(shape).block


def pack_rounds(rounds: Sequence[RoundLengths], shape: ShapeClass) -> list[PackedRound]:
    """`pack_round` of every round; they are independent of each other."""
    return [pack_round(lengths, shape) for lengths in rounds]


def pack_round(lengths: RoundLengths, shape: ShapeClass) -> PackedRound:
    """Packs one round into few microbatches, with as little as possible in the last one.

    The result depends on the arguments alone, on no clock and no random numbers.

    Args:
      lengths: by slot, the stream lengths in tokens of the samples of the task's global batch.
      shape: shape class of the microbatches.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return pack_cut(cut_batches(lengths, shape), shape)


def cut_batches(lengths: RoundLengths, shape: ShapeClass) -> dict[int, CutBatch]:
    """By slot, the task's global batch cut into spans, for callers that pack it several times.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return {
        slot: CutBatch(sizes, cut_spans(sizes, shape, f"slot {slot}"))
        for slot, sizes in lengths.items()
    }


def pack_cut(batches: Mapping[int, CutBatch], shape: ShapeClass) -> PackedRound:
    """`pack_round` of batches that are cut already.

    Args:
      batches: by slot, the task's global batch.
      shape: shape class of the microbatches, for which the batches were cut.
    """
    return _packed(batches, shape, fill_rows)


def pack_greedily(lengths: RoundLengths, shape: ShapeClass) -> PackedRound:
    """A simpler packing to compare with: rows take the longest of the next spans that fits, until
    none does. Arguments and errors as of `pack_round`."""
    return _packed(
        cut_batches(lengths, shape),
        shape,
        lambda queues, row_shape, height: fill_rows_greedily(queues, row_shape),
    )


def _packed(batches: Mapping[int, CutBatch], shape: ShapeClass, fill) -> PackedRound:
    spans = {slot: batch.spans for slot, batch in batches.items()}
    queues = {slot: queue for slot, queue in spans.items() if queue}
    if not queues:
        return PackedRound(shape, spans, [], 0, 0)
    row_shape, height = RowShape.of(shape), rows_of_microbatch(shape)
    lengths = {slot: batch.lengths for slot, batch in batches.items()}
    bound = -(-least_rows_of_samples(lengths, shape) // height)
    isolated_bound = max(bound, -(-least_rows(queues, row_shape) // height))
    return PackedRound(shape, spans, fill(queues, row_shape, height), bound, isolated_bound)
