"""Puts packed turns in a row for a pipeline so that every task waits for its updates.

**Bubble lemma** (LoRAFusion 5.2). A task's update needs the gradients of a whole global batch. In a
pipeline of S stages a microbatch has run forward on all stages, and may start its backward pass,
S - 1 microbatches after it was launched. A microbatch with samples of a task's next global batch
therefore comes at least S microbatches after the last one with samples of its current global batch.
Microbatches of other tasks fill the distance. Where there are none, *no-op* microbatches fill it.

LoRAFusion requires the distance S - 1: its backward pass ends in the same clock in which the next
forward pass begins. Here the update must come between the two as well.

A *turn* is the part of a round that belongs to one group of tasks (see
`adapter_groups.take_turns`). Plans and training put the turns of one round in a row; there no task
occurs twice, so nothing waits, and only the filling up of each turn's last microbatch remains. A
row of several rounds, with no-ops, is LoRAFusion's own order, with which plans are compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..packing.microbatches import PackedRound, Placement, place, rows_of_microbatch
from ..packing.rows import RowShape, fill_rows, fill_rows_greedily, fullest_row
from ..packing.shape_class import ShapeClass
from ..packing.spans import Span


class PlacedSpan(NamedTuple):
    """A span in a microbatch.

    Attributes:
      turn: index of the turn, in the order of execution, whose samples the span holds.
      slot: slot of the task.
      span: the samples, as indices within the task's global batch of that turn.
    """

    turn: int
    slot: int
    span: Span


class PackedMicrobatch(NamedTuple):
    """The spans of a microbatch.

    Attributes:
      rows: for each row, its spans side by side; a microbatch without spans is a no-op.
    """

    rows: tuple[tuple[PlacedSpan, ...], ...] = ()

    @property
    def is_noop(self) -> bool:
        """Whether the microbatch holds no samples."""
        return not any(self.rows)

    def after(self, turns: int) -> "PackedMicrobatch":
        """The microbatch behind this many turns: the turns of its spans count from there."""
        rows = [[placed._replace(turn=placed.turn + turns) for placed in row] for row in self.rows]
        return PackedMicrobatch(tuple(map(tuple, rows)))

    def turns(self) -> dict[int, int]:
        """By slot, the turn whose samples it holds; the lemma forbids two turns of one task."""
        return {placed.slot: placed.turn for row in self.rows for placed in row}

    def placements(self, shape: ShapeClass) -> tuple[Placement, ...]:
        """The placement of each sample; its index is within its task's global batch."""
        return place([[(placed.slot, placed.span) for placed in row] for row in self.rows], shape)


def schedule_turns(turns: Sequence[PackedRound], stages: int) -> list[PackedMicrobatch]:
    """Returns the microbatches of all turns, in their order, such that the bubble lemma holds.

    Each turn's underfull last microbatch is filled up with spans of the next turn if that makes the
    whole shorter, and no-ops are added where the lemma needs them (LoRAFusion Alg. 1, lines 12 to
    15). How well two turns merge does not follow from how well each is packed, so the greedy
    packing of the same spans is tried as well. The shortest of the four results is returned.

    Args:
      turns: packed turns in the order of execution. Turns of groups that alternate (see
        `adapter_groups.take_turns`) need few no-ops.
      stages: S, the least distance of a task's global batches.
    """
    schedules = []
    for packed in (turns, [_repack_greedily(turn) for turn in turns]):
        separate = [microbatch for i, turn in enumerate(packed) for microbatch in _lay(i, turn)]
        schedules += [insert_noops(separate, stages), merge_turns(packed, stages)]
    return min(schedules, key=len)


def insert_noops(microbatches: Sequence[PackedMicrobatch], stages: int) -> list[PackedMicrobatch]:
    """Returns the microbatches in their order, with the fewest no-ops that keep the lemma."""
    timeline = _Timeline(stages)
    for microbatch in microbatches:
        timeline.append(microbatch)
    return timeline.microbatches


def merge_turns(turns: Sequence[PackedRound], stages: int) -> list[PackedMicrobatch]:
    """Returns the turns one after another, each filling up the last microbatch of the one before.

    Spans move to the earlier microbatch in the order of their task, and only spans of tasks whose
    previous global batch ended at least S microbatches before. The rest of the turn is packed
    again, and nothing is moved if that needs more microbatches than the turn did. No-ops are added
    where the lemma needs them.
    """
    timeline = _Timeline(stages)
    for index, turn in enumerate(turns):
        filled, remaining = _fill_last(timeline, index, turn)
        if filled is not None and remaining.count <= turn.count:
            timeline.replace_last(filled)
            turn = remaining
        for microbatch in _lay(index, turn):
            timeline.append(microbatch)
    return timeline.microbatches


class _Timeline:
    """Microbatches in the order of execution, and the end of each task's current global batch."""

    def __init__(self, stages: int):
        self.stages = stages
        self.microbatches: list[PackedMicrobatch] = []
        # By slot, the turn of its current global batch and the last microbatch with samples of it.
        self._ends: dict[int, tuple[int, int]] = {}

    def earliest(self, slot: int, turn: int) -> int:
        """Index of the first microbatch that may hold samples of this turn of the task."""
        current, last = self._ends.get(slot, (turn, 0))
        return last if current == turn else last + self.stages

    def append(self, microbatch: PackedMicrobatch) -> None:
        turns = microbatch.turns()
        start = max((self.earliest(*item) for item in turns.items()), default=0)
        while len(self.microbatches) < start:
            self.microbatches.append(PackedMicrobatch())
        self.microbatches.append(microbatch)
        self._record_ends(turns)

    def replace_last(self, microbatch: PackedMicrobatch) -> None:
        self.microbatches[-1] = microbatch
        self._record_ends(microbatch.turns())

    def _record_ends(self, turns: dict[int, int]) -> None:
        at = len(self.microbatches) - 1
        self._ends.update({slot: (turn, at) for slot, turn in turns.items()})


def _repack_greedily(turn: PackedRound) -> PackedRound:
    queues = {slot: spans for slot, spans in turn.spans.items() if spans}
    return turn._replace(rows=fill_rows_greedily(queues, RowShape.of(turn.shape)))


def _lay(index: int, turn: PackedRound) -> list[PackedMicrobatch]:
    """The microbatches of a turn alone."""
    return [
        PackedMicrobatch(
            tuple(tuple(PlacedSpan(index, slot, span) for slot, span in row) for row in rows)
        )
        for rows in turn.contents()
    ]


def _fill_last(
    timeline: _Timeline, index: int, turn: PackedRound
) -> tuple[PackedMicrobatch | None, PackedRound]:
    """The timeline's last microbatch filled up with spans of the turn, and the rest of the turn."""
    end = len(timeline.microbatches) - 1
    ready = {
        slot: spans
        for slot, spans in turn.spans.items()
        if spans and end >= 0 and timeline.earliest(slot, index) <= end
    }
    if not ready:
        return None, turn
    shape, height = RowShape.of(turn.shape), rows_of_microbatch(turn.shape)
    rows = list(timeline.microbatches[-1].rows)
    rows += [()] * (height - len(rows))
    moved = dict.fromkeys(ready, 0)
    for i, row in enumerate(rows):
        chunks = shape.chunks - sum(placed.span.chunks for placed in row)
        sequences = shape.max_sequences - sum(placed.span.sequences for placed in row)
        if not chunks or not sequences:
            continue
        for slot, count in fullest_row(ready, moved, chunks, sequences).items():
            spans = ready[slot][moved[slot] : moved[slot] + count]
            rows[i] += tuple(PlacedSpan(index, slot, span) for span in spans)
            moved[slot] += count
    if not any(moved.values()):
        return None, turn
    left = {slot: spans[moved.get(slot, 0) :] for slot, spans in turn.spans.items()}
    queues = {slot: spans for slot, spans in left.items() if spans}
    packed = fill_rows(queues, shape, height) if queues else []
    remaining = turn._replace(spans=left, rows=packed, bound=0, isolated_bound=0)
    return PackedMicrobatch(tuple(rows)), remaining
