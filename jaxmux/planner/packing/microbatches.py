"""Packs one round, a global batch of every task, into few microbatches.

Packing has two steps, which keep tasks isolated. First, `cut_spans` fixes the contents and the
order of a task's chunks from the lengths of this task alone. Then the spans of all tasks are laid
into rows, which decides only the rows and offsets of the chunks.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from .rows import (
    Row,
    RowShape,
    ShapeClass,
    Span,
    cut_spans,
    fill_rows,
    least_rows,
    spans_of_rows,
)

# One round: for each slot, the stream lengths in tokens of the samples of the task's global batch.
RoundLengths = Mapping[int, Sequence[int]]
# By slot, the number of sequences of each sample, if it is not 1.
Members = Mapping[int, int]


class Placement(NamedTuple):
    """The position of one sample in a microbatch, which is an array of tokens [rows, row_len].

    Attributes:
      sample: index of the sample in its task's global batch.
      offset: position of the sample's first token in the row, from 0.
    """

    slot: int
    sample: int
    row: int
    offset: int


class CutBatch(NamedTuple):
    """A task's global batch: its stream lengths, and the spans into which `cut_spans` has cut
    it."""

    lengths: Sequence[int]
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class PackedRound:
    """One round, laid out in microbatches by `pack_round`.

    Attributes:
      spans: for each slot, the spans of the task's global batch in the order in which rows take
        them.
      rows: for each row of the round, the number of spans that the row takes from each slot, side
        by side. If a chunk covers several rows, one entry of `rows` stands for all of these.
      lengths: for each slot, the stream lengths in tokens of the samples of the global batch.
    """

    shape: ShapeClass
    spans: dict[int, tuple[Span, ...]]
    rows: list[Row]
    lengths: RoundLengths

    @property
    def count(self) -> int:
        return -(-len(self.rows) // rows_of_microbatch(self.shape))

    @cached_property
    def bound(self) -> int:
        """A lower bound on the number of microbatches over all layouts of these samples in which
        each chunk belongs to one task (see `row_prices`)."""
        # Imported here because SciPy's solver takes long to import and planning does not use this
        # bound.
        from .row_prices import least_rows_by_prices

        height = rows_of_microbatch(self.shape)
        enough = (self.count - 1) * height + 1
        return -(-least_rows_by_prices(self.lengths, self.shape, enough) // height)

    @property
    def isolated_bound(self) -> int:
        """A lower bound on the number of microbatches over all layouts of the spans in `spans`."""
        queues = {slot: queue for slot, queue in self.spans.items() if queue}
        if not queues:
            return self.bound
        rows = least_rows(queues, RowShape.of(self.shape))
        return max(self.bound, -(-rows // rows_of_microbatch(self.shape)))

    @property
    def gap(self) -> float:
        """The fraction by which `count` exceeds `bound`; 0.03 means 3% more microbatches."""
        return self.count / self.bound - 1 if self.bound else 0.0

    def contents(self) -> list[list[list[tuple[int, Span]]]]:
        """Returns the pairs (slot, span) in each row, in their order, as
        `contents[microbatch][row]`. The rows are those of the field `rows`."""
        rows = spans_of_rows(self.spans, self.rows)
        height = rows_of_microbatch(self.shape)
        return [rows[start : start + height] for start in range(0, len(rows), height)]

    def microbatches(self) -> list[tuple[Placement, ...]]:
        """Returns the placements of the samples of each microbatch, in the order of its rows."""
        return [place(rows, self.shape) for rows in self.contents()]


def place(rows: Sequence[Sequence[tuple[int, Span]]], shape: ShapeClass) -> tuple[Placement, ...]:
    """Returns the placements of the samples of one microbatch. `rows` is an entry of
    `PackedRound.contents()`."""
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
    """The number of rows of a microbatch. If a chunk covers several rows, these count as one."""
    return shape.rows // RowShape.of(shape).block


def pack_rounds(rounds: Sequence[RoundLengths], shape: ShapeClass) -> list[PackedRound]:
    return [pack_round(lengths, shape) for lengths in rounds]


def pack_round(
    lengths: RoundLengths, shape: ShapeClass, members: Members = MappingProxyType({})
) -> PackedRound:
    """Packs one round into few microbatches; the result depends on the arguments only. Raises
    PlanningError as `cut_spans` does."""
    return pack_cut(cut_batches(lengths, shape, members), shape)


def cut_batches(
    lengths: RoundLengths, shape: ShapeClass, members: Members = MappingProxyType({})
) -> dict[int, CutBatch]:
    """Cuts each task's global batch into spans. Use this to pack the same batches several times."""
    return {
        slot: CutBatch(sizes, cut_spans(sizes, shape, f"slot {slot}", members.get(slot, 1)))
        for slot, sizes in lengths.items()
    }


def pack_cut(batches: Mapping[int, CutBatch], shape: ShapeClass) -> PackedRound:
    """Packs one round like `pack_round`, from batches that `cut_batches` has cut for `shape`."""
    # LoRAFusion (Eq. 3-4) solves an integer program here. For rounds of real lengths it never found
    # fewer microbatches than `fill_rows`, so only the tests use it, as an oracle.
    spans = {slot: batch.spans for slot, batch in batches.items()}
    queues = {slot: queue for slot, queue in spans.items() if queue}
    row_shape, height = RowShape.of(shape), rows_of_microbatch(shape)
    lengths = {slot: batch.lengths for slot, batch in batches.items()}
    rows = fill_rows(queues, row_shape, height) if queues else []
    return PackedRound(shape, spans, rows, lengths)
