"""Packs one round, a global batch of every task, into few microbatches.

**Capacity.** A microbatch is `rows` rows of `row_len` tokens; attention sees one row. The samples
of a task lie side by side in *spans*. A span begins at a chunk border, consists of whole chunks and
stays within a row. The end of its last chunk is padding. So a row is full when its chunks are, and
rows are interchangeable: the fewest microbatches are the fewest rows, divided by `rows`. Where a
chunk is longer than a row, it covers several rows, all of one task.

**Isolation** means that a task's result does not depend on the other tasks. Packing has two steps
for it. First, `cut_spans` sees the lengths of one task only, and fixes the contents and the order
of its chunks. Then the spans of all tasks are laid into rows, which decides only the rows and
offsets of the chunks. The lower bound on the number of microbatches assumes neither step: it holds
for every layout of the samples in which each chunk belongs to one task.

LoRAFusion (Eq. 3-4) solves an integer program here. On rounds of real lengths it never needed fewer
microbatches than `fill_rows`, so the tests use it as an oracle.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from .rows import (
    Row,
    RowShape,
    fill_rows,
    least_rows,
    spans_of_rows,
)
from .shape_class import ShapeClass
from .spans import Span, cut_spans

# One round: for each slot, the stream lengths in tokens of the samples of the task's global batch.
# A sample's stream length is its number of tokens without the last one, because the model predicts
# the next token.
RoundLengths = Mapping[int, Sequence[int]]


class Placement(NamedTuple):
    """The place of one sample in a microbatch, which is an array of tokens [rows, row_len].

    Attributes:
      slot: slot of the sample's task, that is, the task's place in the pool of adapters.
      sample: index of the sample in the task's global batch.
      row: index of the row of the microbatch that holds the sample.
      offset: position in the row of the sample's first token, from 0.
    """

    slot: int
    sample: int
    row: int
    offset: int


class CutBatch(NamedTuple):
    """A task's global batch, cut into spans by `cut_spans`.

    Attributes:
      lengths: stream lengths of the samples of the global batch, in tokens.
      spans: the spans of the global batch, in the order in which they must be laid down.
    """

    lengths: Sequence[int]
    spans: tuple[Span, ...]


@dataclasses.dataclass(frozen=True)
class PackedRound:
    """One round (one global batch of every task), laid out in microbatches by `pack_round`.

    Most callers need only `microbatches()` (the place of every sample), `count` (the number of
    microbatches) and `gap` (how far `count` is above its lower bound). A microbatch has several
    rows of tokens. A chunk is a fixed number of consecutive tokens that belong to one task. A span
    is a series of consecutive chunks of one task in a row, with the samples in them. A slot is the
    place of a task in the pool of adapters.

    Attributes:
      shape: shape class of the microbatches: their rows, tokens per row and per chunk, and
        sequences per row.
      spans: for each slot, the spans of the task's global batch, in the order in which the rows
        take them.
      rows: for each row of the round, in order, a mapping from slot to a number of spans. The row
        holds this number of the slot's spans side by side: the first spans in `spans` that no
        earlier row holds. If a chunk is longer than a row, an entry of `rows` stands for all rows
        that one chunk covers. `contents()` gives the spans themselves.
      lengths: for each slot, the stream lengths in tokens of the samples of the task's global
        batch.
    """

    shape: ShapeClass
    spans: dict[int, tuple[Span, ...]]
    rows: list[Row]
    lengths: RoundLengths

    @property
    def count(self) -> int:
        """Number of microbatches of the round."""
        return -(-len(self.rows) // rows_of_microbatch(self.shape))

    @cached_property
    def bound(self) -> int:
        """A lower bound on the number of microbatches, for every layout of these samples in which
        each chunk belongs to one task. It comes from a linear program (see `row_prices`), which
        takes about 0.1 s where a quick bound does not meet `count`."""
        # Imported here because SciPy's solver takes long to import, and planning needs no bound.
        from .row_prices import least_rows_by_prices

        height = rows_of_microbatch(self.shape)
        enough = (self.count - 1) * height + 1
        return -(-least_rows_by_prices(self.lengths, self.shape, enough) // height)

    @property
    def isolated_bound(self) -> int:
        """A lower bound on the number of microbatches, for every layout that uses the spans in
        `spans`. It is at least `bound`, because the spans were cut for each task separately."""
        queues = {slot: queue for slot, queue in self.spans.items() if queue}
        if not queues:
            return self.bound
        rows = least_rows(queues, RowShape.of(self.shape))
        return max(self.bound, -(-rows // rows_of_microbatch(self.shape)))

    @property
    def gap(self) -> float:
        """The fraction by which `count` exceeds `bound`: 0.03 means 3% more microbatches than the
        lower bound. 0 for an empty round."""
        return self.count / self.bound - 1 if self.bound else 0.0

    def contents(self) -> list[list[list[tuple[int, Span]]]]:
        """Returns the spans of every row, as `contents[microbatch][row]`.

        Each row is a list of pairs (slot, span) in the order in which the spans lie in the row. If
        a chunk is longer than a row, an entry stands for all rows that one chunk covers. The fields
        of a span are `chunks` (number of chunks), `sequences` (most samples in one row of it) and
        `samples`: triples (index of the sample in the global batch, row and offset of its first
        token within the span).
        """
        rows = spans_of_rows(self.spans, self.rows)
        height = rows_of_microbatch(self.shape)
        return [rows[start : start + height] for start in range(0, len(rows), height)]

    def microbatches(self) -> list[tuple[Placement, ...]]:
        """Returns, for each microbatch, the placements (slot, sample, row, offset) of its samples.

        The placements of a microbatch are in the order of its rows.
        """
        return [place(rows, self.shape) for rows in self.contents()]


def place(rows: Sequence[Sequence[tuple[int, Span]]], shape: ShapeClass) -> tuple[Placement, ...]:
    """Returns the placements of the samples of one microbatch, whose rows hold given spans.

    Args:
      rows: for each row, pairs (slot, span) in the order in which the spans lie in the row, as in
        an entry of `PackedRound.contents()`.
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
    """Returns the number of rows of a microbatch; the rows that one chunk covers count as one."""
    return shape.rows // RowShape.of(shape).block


def pack_rounds(rounds: Sequence[RoundLengths], shape: ShapeClass) -> list[PackedRound]:
    """Packs several rounds into few microbatches, each round by itself.

    A round is one global batch of every task. `pack_round` packs it: it decides in which microbatch
    and row, and at which offset in the row, each sample of the round lies. No round affects the
    packing of another, and no microbatch holds samples of two rounds.

    Args:
      rounds: for each round, a mapping from slot (a task's place in the pool of adapters) to the
        stream lengths in tokens of the samples of the task's global batch. The stream length of a
        sample is its number of tokens without the last one, which is only predicted.
        `sample_rounds` picks such rounds from a training run.
      shape: shape class of the microbatches of all rounds: rows of a microbatch, tokens of a row,
        tokens of a chunk (consecutive tokens of a row that belong to one task), and the most
        samples in a row.

    Returns:
      For each round, in the order of `rounds`, a `PackedRound`: its rows with the samples that they
      hold, and the number of microbatches.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return [pack_round(lengths, shape) for lengths in rounds]


def pack_round(lengths: RoundLengths, shape: ShapeClass) -> PackedRound:
    """Packs one round, a global batch of every task, into few microbatches.

    It decides in which microbatch, row and place each sample lies. A chunk (`shape.chunk_len`
    consecutive tokens) never holds samples of two tasks. The contents and the order of a task's
    chunks depend on this task's lengths and `shape` alone, not on the other tasks. Among the
    packings with the fewest rows that it finds, the function prefers the one with the fewest chunks
    in the last microbatch. Equal arguments give equal results.

    Args:
      lengths: for each slot (a task's place in the pool of adapters), the stream lengths in tokens
        of the samples of the task's global batch. The stream length of a sample is its number of
        tokens without the last one, which is only predicted.
      shape: shape class of the microbatches: rows, tokens per row and per chunk, and sequences per
        row. `choose_shape` finds a good one.

    Returns:
      The packed round. Its method `microbatches()` gives the place of every sample. Its property
      `gap` tells by which fraction the number of microbatches exceeds a lower bound.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return pack_cut(cut_batches(lengths, shape), shape)


def cut_batches(lengths: RoundLengths, shape: ShapeClass) -> dict[int, CutBatch]:
    """Cuts each task's global batch into spans, for callers that pack the same batches several
    times.

    `pack_cut` packs the result, or a part of its slots.

    Args:
      lengths: for each slot, the stream lengths in tokens of the samples of the task's global
        batch.
      shape: shape class of the microbatches.

    Returns:
      For each slot, the task's global batch, cut into spans.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    return {
        slot: CutBatch(sizes, cut_spans(sizes, shape, f"slot {slot}"))
        for slot, sizes in lengths.items()
    }


def pack_cut(batches: Mapping[int, CutBatch], shape: ShapeClass) -> PackedRound:
    """Packs one round like `pack_round`, but takes batches that `cut_batches` has cut into spans.

    Args:
      batches: for each slot, the task's global batch, cut into spans.
      shape: shape class of the microbatches, for which the batches were cut.
    """
    spans = {slot: batch.spans for slot, batch in batches.items()}
    queues = {slot: queue for slot, queue in spans.items() if queue}
    row_shape, height = RowShape.of(shape), rows_of_microbatch(shape)
    lengths = {slot: batch.lengths for slot, batch in batches.items()}
    rows = fill_rows(queues, row_shape, height) if queues else []
    return PackedRound(shape, spans, rows, lengths)
