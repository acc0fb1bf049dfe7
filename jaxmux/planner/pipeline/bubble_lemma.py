"""Strings packed global batches together for a pipeline, each task's in their order.

**Bubble lemma** (LoRAFusion 5.2). A task's update needs the gradients of its whole global batch. In
a pipeline of S stages a microbatch has been through all of them forward, and may start backward,
S - 1 microbatches later. So a microbatch with samples of a task's next global batch comes at least
S microbatches after the last one with samples of its current batch. Microbatches of other tasks
fill the distance; where there are none, *no-op* microbatches do.

LoRAFusion states the distance as S - 1, from a backward pass that ends within the clock in which
the next forward pass begins; the update, too, must come between the two here.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..packing.microbatches import PackedRound, Placement, place, rows_of_microbatch
from ..packing.rows import RowShape, fill_rows, fill_rows_greedily, fullest_row
from ..packing.shape_class import ShapeClass
from ..packing.spans import Span
from .schedules import TickRule


class PlacedSpan(NamedTuple):
    """A span in a microbatch.

    Attributes:
      batch: index, in the order of the schedule, of the packed batch whose sample indices it uses.
      slot: slot of the task.
    """

    batch: int
    slot: int
    span: Span


class PackedMicrobatch(NamedTuple):
    """The spans of a microbatch by row; without any it is a no-op."""

    rows: tuple[tuple[PlacedSpan, ...], ...] = ()

    @property
    def is_noop(self) -> bool:
        return not any(self.rows)

    def batches(self) -> dict[int, int]:
        """By slot, of which packed batch its samples are; the lemma leaves no task two."""
        return {placed.slot: placed.batch for row in self.rows for placed in row}

    def placements(self, shape: ShapeClass) -> tuple[Placement, ...]:
        """Where each sample lies; its index is within its task's global batch."""
        return place([[(placed.slot, placed.span) for placed in row] for row in self.rows], shape)


class LemmaViolation(NamedTuple):
    """A task's next global batch begins `distance` < S microbatches after its current one ends."""

    slot: int
    batch: int
    microbatch: int
    distance: int


def lemma_distance(stages: int, rule: TickRule = "single") -> int:
    """Microbatches from the last one of a task's global batch to the first of its next: as many as
    begin while a microbatch is in flight (see `schedules.layout`)."""
    return {"single": stages, "paired": 2 * stages, "alternating": 2 * stages - 1}[rule]


def schedule_batches(batches: Sequence[PackedRound], stages: int) -> list[PackedMicrobatch]:
    """Microbatches of all batches, in their order, that keep the bubble lemma.

    Underfull last microbatches are merged with the next batch where that makes the whole shorter;
    what is missing to the lemma's distance, no-ops fill (LoRAFusion Alg. 1, lines 12-15). How well
    batches merge does not follow from how well each is packed, so the greedy packing of the same
    spans is tried as well.

    Args:
      batches: in the order of execution. A task's batches are those that hold its slot. Groups of
        tasks that take turns (see `adapter_groups.take_turns`) need few no-ops.
      stages: S, of the pipeline.
    """
    schedules = []
    for packed in (batches, [_pack_spans_greedily(batch) for batch in batches]):
        apart = [microbatch for i, batch in enumerate(packed) for microbatch in _lay(i, batch)]
        schedules += [insert_noops(apart, stages), merge_batches(packed, stages)]
    return min(schedules, key=len)


def lemma_violations(schedule: Sequence[PackedMicrobatch], stages: int) -> list[LemmaViolation]:
    """Every place where the lemma, or the order of a task's global batches, is broken."""
    ends: dict[int, tuple[int, int]] = {}
    violations = []
    for index, microbatch in enumerate(schedule):
        for row in microbatch.rows:
            for batch, slot, _ in row:
                current, last = ends.get(slot, (batch, index))
                backwards = batch < current
                if backwards or (batch > current and index - last < stages):
                    violations.append(LemmaViolation(slot, batch, index, index - last))
                ends[slot] = (batch, index)
    return violations


def insert_noops(microbatches: Sequence[PackedMicrobatch], stages: int) -> list[PackedMicrobatch]:
    """The microbatches in their order, each as early as the lemma lets it, no-ops between them."""
    timeline = _Timeline(stages)
    for microbatch in microbatches:
        timeline.append(microbatch)
    return timeline.microbatches


def merge_batches(batches: Sequence[PackedRound], stages: int) -> list[PackedMicrobatch]:
    """The batches one after another, each filling what the one before left free in its last
    microbatch, and no-ops where the lemma needs them.

    Runs move forward in the order of their task, and only of tasks whose previous global batch
    ended S microbatches before. The rest is packed anew, and the move given up if that needs more
    microbatches than before.
    """
    timeline = _Timeline(stages)
    for index, batch in enumerate(batches):
        moved, remaining = _fill_up(timeline, index, batch)
        if moved is not None and remaining.count <= batch.count:
            timeline.replace_last(moved)
            batch = remaining
        for microbatch in _lay(index, batch):
            timeline.append(microbatch)
    return timeline.microbatches


class _Timeline:
    """Microbatches in the order of execution, and where each task's current batch ends."""

    def __init__(self, stages: int):
        self.stages = stages
        self.microbatches: list[PackedMicrobatch] = []
        self._ends: dict[int, tuple[int, int]] = {}

    def earliest(self, slot: int, batch: int) -> int:
        """The first microbatch that may hold samples of this batch of the task."""
        current, last = self._ends.get(slot, (batch, 0))
        return last if current == batch else last + self.stages

    def append(self, microbatch: PackedMicrobatch) -> None:
        batches = microbatch.batches()
        start = max((self.earliest(*item) for item in batches.items()), default=0)
        while len(self.microbatches) < start:
            self.microbatches.append(PackedMicrobatch())
        self.microbatches.append(microbatch)
        self._note(batches)

    def replace_last(self, microbatch: PackedMicrobatch) -> None:
        self.microbatches[-1] = microbatch
        self._note(microbatch.batches())

    def _note(self, batches: dict[int, int]) -> None:
        at = len(self.microbatches) - 1
        self._ends.update({slot: (batch, at) for slot, batch in batches.items()})


def _pack_spans_greedily(batch: PackedRound) -> PackedRound:
    queues = {slot: spans for slot, spans in batch.spans.items() if spans}
    return batch._replace(rows=fill_rows_greedily(queues, RowShape.of(batch.shape)))


def _lay(index: int, batch: PackedRound) -> list[PackedMicrobatch]:
    return [
        PackedMicrobatch(
            tuple(tuple(PlacedSpan(index, slot, span) for slot, span in row) for row in rows)
        )
        for rows in batch.contents()
    ]


def _fill_up(
    timeline: _Timeline, index: int, batch: PackedRound
) -> tuple[PackedMicrobatch | None, PackedRound]:
    """The timeline's last microbatch with spans of the next batch added, and what is left of it."""
    end = len(timeline.microbatches) - 1
    ready = {
        slot: spans
        for slot, spans in batch.spans.items()
        if spans and end >= 0 and timeline.earliest(slot, index) <= end
    }
    if not ready:
        return None, batch
    shape = RowShape.of(batch.shape)
    rows = list(timeline.microbatches[-1].rows)
    rows += [()] * (rows_of_microbatch(batch.shape) - len(rows))
    position = dict.fromkeys(ready, 0)
    for i, row in enumerate(rows):
        room = shape.chunks - sum(placed.span.chunks for placed in row)
        sequences = shape.sequences - sum(placed.span.sequences for placed in row)
        if not room or not sequences:
            continue
        for slot, count in fullest_row(ready, position, room, sequences).items():
            start = position[slot]
            position[slot] += count
            rows[i] += tuple(PlacedSpan(index, slot, r) for r in ready[slot][start : start + count])
    if not any(position.values()):
        return None, batch
    left = {slot: spans[position.get(slot, 0) :] for slot, spans in batch.spans.items()}
    queues = {slot: spans for slot, spans in left.items() if spans}
    packed = fill_rows(queues, shape, rows_of_microbatch(batch.shape)) if queues else []
    remaining = batch._replace(spans=left, rows=packed, bound=0, isolated_bound=0)
    return PackedMicrobatch(tuple(rows)), remaining
