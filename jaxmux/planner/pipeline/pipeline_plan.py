"""Plans a stream of rounds for a pipeline: groups of tasks, microbatches, their order and times.

While a task waits for its update, microbatches of other groups of tasks keep the stages busy. The
tasks of a group are packed together, and groups take turns. A *turn* is the part of a round that
belongs to one group. The last microbatch of a turn is filled up with samples of the next turn. With
more groups, more microbatches are there to run during an update; with fewer groups, microbatches
are fuller. Training chooses the groups by the same function.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ..devices import AUTO_SCHEDULE, Replica
from ..packing.microbatches import (
    Members,
    PackedRound,
    Placement,
    RoundLengths,
    cut_batches,
    pack_cut,
    place,
    rows_of_microbatch,
)
from ..packing.rows import RowShape, ShapeClass, Span, fill_rows, fill_rows_greedily, fullest_row
from ..packing.shape_choice import Batches, PartOfBatches, sample_rounds
from .groupings import CutRound, Grouping, Groups, candidate_groupings, most_promising, take_turns
from .schedules import (
    BACKWARD,
    FORWARD,
    TASK_BY_TASK,
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    Workload,
    schedule_rounds,
    simulate_asynchronous,
)


class PlacedSpan(NamedTuple):
    """A span in a microbatch. `turn` is the index, in the order of execution, of the turn that has
    the span's samples."""

    turn: int
    slot: int
    span: Span


class PlannedMicrobatch(NamedTuple):
    """The spans of a microbatch, side by side in its rows. Without spans, it is a no-op."""

    rows: tuple[tuple[PlacedSpan, ...], ...] = ()

    @property
    def is_noop(self) -> bool:
        return not any(self.rows)

    def after(self, turns: int) -> "PlannedMicrobatch":
        """The same microbatch in a stream that has `turns` more turns before it."""
        rows = [[placed._replace(turn=placed.turn + turns) for placed in row] for row in self.rows]
        return PlannedMicrobatch(tuple(map(tuple, rows)))

    def turns(self) -> dict[int, int]:
        """For each slot, the turn that has its samples. The bubble lemma forbids two turns of one
        task."""
        return {placed.slot: placed.turn for row in self.rows for placed in row}

    def placements(self, shape: ShapeClass) -> tuple[Placement, ...]:
        return place([[(placed.slot, placed.span) for placed in row] for row in self.rows], shape)


# The bubble lemma (LoRAFusion 5.2): a task's update needs the gradients of a whole global batch. In
# a pipeline of S stages, a microbatch may start its backward pass S - 1 microbatches after its
# launch. A microbatch with samples of a task's next global batch therefore comes at least S
# microbatches after the last one with samples of the current global batch. Microbatches of other
# tasks, or no-op microbatches, fill this distance. LoRAFusion requires the distance S - 1, because
# its backward pass ends in the clock in which the next forward pass begins; here, the update must
# also come between the two passes.
#
# Plans and training schedule one round at a time. No task occurs twice in a round, so they need no
# no-ops. Plans are also compared with LoRAFusion's order, which needs streams of several rounds.
def schedule_turns(turns: Sequence[PackedRound], stages: int) -> list[PlannedMicrobatch]:
    """Returns the microbatches of all turns in their order, such that the bubble lemma holds
    (LoRAFusion Alg. 1, lines 12 to 15)."""
    # Turns may be merged or not. How well two turns merge does not follow from how full each one's
    # microbatches are, so the greedy packing of the same spans is tried too.
    schedules = []
    for packed in (turns, [_repack_greedily(turn) for turn in turns]):
        separate = [microbatch for i, turn in enumerate(packed) for microbatch in _lay(i, turn)]
        schedules += [insert_noops(separate, stages), merge_turns(packed, stages)]
    return min(schedules, key=len)


def insert_noops(microbatches: Sequence[PlannedMicrobatch], stages: int) -> list[PlannedMicrobatch]:
    """Returns the microbatches in their order, with the fewest no-ops for which the bubble lemma
    holds."""
    timeline = _Timeline(stages)
    for microbatch in microbatches:
        timeline.append(microbatch)
    return timeline.microbatches


def merge_turns(turns: Sequence[PackedRound], stages: int) -> list[PlannedMicrobatch]:
    """Returns the microbatches of the turns in order. Each turn first fills up the last microbatch
    of the turn before."""
    timeline = _Timeline(stages)
    for index, turn in enumerate(turns):
        filled, remaining = _fill_last(timeline, index, turn)
        # Move spans only if the rest of the turn, packed again, does not need more microbatches.
        if filled is not None and remaining.count <= turn.count:
            timeline.replace_last(filled)
            turn = remaining
        for microbatch in _lay(index, turn):
            timeline.append(microbatch)
    return timeline.microbatches


class _Timeline:
    """Microbatches in the order of execution, and the last microbatch of each task's current global
    batch."""

    def __init__(self, stages: int):
        self.stages = stages
        self.microbatches: list[PlannedMicrobatch] = []
        # For each slot, the turn of its current global batch and the last microbatch with samples
        # of this batch.
        self._ends: dict[int, tuple[int, int]] = {}

    def earliest(self, slot: int, turn: int) -> int:
        """The index of the first microbatch that may hold the task's samples of this turn."""
        current, last = self._ends.get(slot, (turn, 0))
        return last if current == turn else last + self.stages

    def append(self, microbatch: PlannedMicrobatch) -> None:
        turns = microbatch.turns()
        start = max((self.earliest(*item) for item in turns.items()), default=0)
        while len(self.microbatches) < start:
            self.microbatches.append(PlannedMicrobatch())
        self.microbatches.append(microbatch)
        self._record_ends(turns)

    def replace_last(self, microbatch: PlannedMicrobatch) -> None:
        self.microbatches[-1] = microbatch
        self._record_ends(microbatch.turns())

    def _record_ends(self, turns: dict[int, int]) -> None:
        at = len(self.microbatches) - 1
        self._ends.update({slot: (turn, at) for slot, turn in turns.items()})


def _repack_greedily(turn: PackedRound) -> PackedRound:
    queues = {slot: spans for slot, spans in turn.spans.items() if spans}
    return dataclasses.replace(turn, rows=fill_rows_greedily(queues, RowShape.of(turn.shape)))


def _lay(index: int, turn: PackedRound) -> list[PlannedMicrobatch]:
    """The microbatches of one turn, not merged with other turns."""
    return [
        PlannedMicrobatch(
            tuple(tuple(PlacedSpan(index, slot, span) for slot, span in row) for row in rows)
        )
        for rows in turn.contents()
    ]


def _fill_last(
    timeline: _Timeline, index: int, turn: PackedRound
) -> tuple[PlannedMicrobatch | None, PackedRound]:
    """The timeline's last microbatch after spans of the turn are added, and the rest of the
    turn."""
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
    # `lengths` are used only for bounds, which the rest of the turn does not need.
    remaining = dataclasses.replace(turn, spans=left, rows=packed, lengths={})
    return PlannedMicrobatch(tuple(rows)), remaining


# Takes the lengths in tokens of the sequences of a microbatch; returns its forward and its backward
# seconds on each stage, float64 [S] each.
StageSeconds = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]

# Groupings are compared on at least two rounds, and on enough rounds for this number of
# microbatches per stage.
_MICROBATCHES_PER_STAGE = 16
# Groups in use are kept unless other groups are faster by this fraction. A change has a cost: the
# first round after it waits for the last updates of the old groups, while stages are idle.
_LEAST_GAIN = 0.01


class PipelinePlan(NamedTuple):
    """A stream of microbatches and its schedule. Spans refer to turns by their index in
    `take_turns(rounds, grouping.groups)`. `rounds` has the index of each microbatch's round."""

    grouping: Grouping
    microbatches: list[PlannedMicrobatch]
    rounds: list[int]
    workload: Workload
    schedule: PipelineSchedule
    simulation: Simulation

    @property
    def buckets(self) -> int:
        """The number of groups whose samples come first in some microbatch; other groups only fill
        up microbatches."""
        return len({microbatch.bucket for microbatch in self.workload.microbatches})


class PipelineCosts(NamedTuple):
    """The time that microbatches take in a pipeline. `hop_seconds` is the time until the output of
    a pass is at the next stage."""

    shape: ShapeClass
    stage_seconds: StageSeconds
    hop_seconds: float = 0.0
    schedule: str = AUTO_SCHEDULE
    parts_per_stage: int = 1


def grouping_of_tasks(
    tasks: Sequence[Batches],
    shape: ShapeClass,
    stages: int,
    present: Groups = (),
    schedule: str = AUTO_SCHEDULE,
) -> Grouping:
    """Returns the grouping with which the tasks train fastest while all of them train. Only the
    schedule "auto" lets the planner choose. With "lorapp" and "template", every task is a group;
    with other schedules, all tasks together are one group. For `present` see `choose_grouping`."""
    if schedule in TASK_BY_TASK:
        return of_groups([(slot,) for slot in range(len(tasks))])
    together = one_htask(range(len(tasks)))
    if schedule != AUTO_SCHEDULE:
        return together
    if stages == 1 or len(tasks) == 1:
        return together
    steps = min(map(len, tasks))
    rounds = sample_rounds([_First(batches, steps) for batches in tasks])
    rounds = [{slot: lengths for slot, lengths in batches.items() if lengths} for batches in rounds]
    rounds = _enough([batches for batches in rounds if batches], shape, stages)
    # If these rounds have no sample of some task, every group would be equally good for it.
    if len(set().union(*rounds)) < len(tasks):
        return of_groups(present) if present else together
    return choose_grouping(rounds, shape, stages, present)


def grouping_of_share(
    tasks: Sequence[Batches],
    replica: Replica,
    shape: ShapeClass,
    devices: int,
    present: Groups = (),
    schedule: str = AUTO_SCHEDULE,
) -> Grouping:
    """Returns the grouping for a replica that trains a share of the tasks' samples: the samples
    that fit into its rows, divided among `devices`, the devices of all replicas."""
    parts = replica.shards * round(devices / replica.devices)
    share = [PartOfBatches(batches, parts, shape.row_len) for batches in tasks]
    return grouping_of_tasks(share, shape, replica.pp, present, schedule)


class _First(Sequence):
    """The first `steps` steps of a task. A step is read only when it is requested."""

    def __init__(self, batches: Batches, steps: int):
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Sequence[int]:
        return self._batches[step]


def choose_grouping(
    rounds: Sequence[RoundLengths], shape: ShapeClass, stages: int, present: Groups = ()
) -> Grouping:
    """Returns the grouping of least makespan among the most promising ones. All passes of one
    direction count as equally long, on all stages. The groups in use, `present`, are kept unless
    others take at least 1% less time."""
    packings = _Packings(rounds, shape)
    forward, backward = (np.full(stages, seconds) for seconds in (FORWARD, BACKWARD))
    costs = PipelineCosts(shape, lambda lengths: (forward, backward))
    together = one_htask(sorted({slot for batches in rounds for slot in batches}))
    candidates = candidate_groupings(packings.cut, shape, (forward + backward) / 2)
    orders = []
    for grouping in most_promising(candidates, packings.cut, shape, stages):
        # The order of buckets decides whose turn fills up whose last microbatch.
        orders += [grouping, grouping._replace(buckets=grouping.buckets[::-1])]
    plans = [_plan(packings, grouping, costs) for grouping in (*orders, together)]
    # A group that only fills up microbatches of other groups is of no use. Among equally fast
    # plans, take the first, which has several groups: they hide the time of updates, which the
    # simulation leaves out.
    useful = (plan for plan in plans if plan.buckets == len(plan.grouping.groups))
    best = min(useful, key=lambda plan: plan.simulation.makespan)
    if present:
        kept = _plan(packings, of_groups(present), costs)
        if kept.simulation.makespan * (1 - _LEAST_GAIN) < best.simulation.makespan:
            return kept.grouping
    return best.grouping


def _enough(rounds: list[RoundLengths], shape: ShapeClass, stages: int) -> list[RoundLengths]:
    """The first rounds, as many as are needed to compare groupings."""
    if not rounds:
        return []
    microbatches = max(1, sum(map(sum, rounds[0].values())) // shape.tokens)
    return rounds[: max(2, -(-_MICROBATCHES_PER_STAGE * stages // microbatches))]


def one_htask(slots: Sequence[int]) -> Grouping:
    return of_groups([tuple(slots)])


def of_groups(groups: Groups) -> Grouping:
    return Grouping(tuple(groups), tuple((i,) for i in range(len(groups))))


def plan_pipeline(
    rounds: Sequence[RoundLengths], grouping: Grouping, costs: PipelineCosts
) -> PipelinePlan:
    """Plans a stream of rounds; the pipeline does not drain between rounds. Raises PlanningError if
    there are no samples, or a sample is longer than a row."""
    return _plan(_Packings(rounds, costs.shape), grouping, costs)


def pack_in_groups(
    batches: RoundLengths,
    groups: Groups,
    shape: ShapeClass,
    members: Members = MappingProxyType({}),
) -> list[PlannedMicrobatch]:
    """Packs a round, one group after another. Each group first fills up the last microbatch of the
    group before."""
    return next(_Packings([batches], shape, members).in_groups(groups))[1]


class _Packings:
    """The packed turns of groups. Each group is packed once for all groupings that contain it."""

    def __init__(
        self,
        rounds: Sequence[RoundLengths],
        shape: ShapeClass,
        members: Members = MappingProxyType({}),
    ):
        self.rounds = rounds
        self.cut: list[CutRound] = [cut_batches(batches, shape, members) for batches in rounds]
        self._shape = shape
        self._of_group = cache(self._pack_group)

    def _pack_group(self, group: tuple[int, ...]) -> dict[int, PackedRound]:
        """The group's packed turn in each round in which it has samples, by index of the round."""
        packed = {}
        for i, batches in enumerate(self.cut):
            if turn := {slot: batches[slot] for slot in group if slot in batches}:
                packed[i] = pack_cut(turn, self._shape)
        return packed

    def in_groups(
        self, groups: Groups, apart: bool = False
    ) -> Iterator[tuple[int, list[PlannedMicrobatch]]]:
        """Yields, for each round, the number of its turns and its microbatches. Turns are counted
        from the first turn of the round. With `apart`, groups share no microbatch."""
        for i in range(len(self.rounds)):
            turns = [packed[i] for packed in map(self._of_group, groups) if i in packed]
            if apart:
                laid = [m for turn, packed in enumerate(turns) for m in _lay(turn, packed)]
            else:
                laid = schedule_turns(turns, stages=1)
            yield len(turns), laid


def _plan(packings: _Packings, grouping: Grouping, costs: PipelineCosts) -> PipelinePlan:
    turns = take_turns(packings.rounds, grouping.groups)
    microbatches, rounds, first_turn = [], [], 0
    apart = costs.schedule in TASK_BY_TASK
    for i, (count, packed) in enumerate(packings.in_groups(grouping.groups, apart)):
        microbatches += [microbatch.after(first_turn) for microbatch in packed]
        rounds += [i] * len(packed)
        first_turn += count
    workload = stream_workload(microbatches, turns, grouping.groups, costs.stage_seconds)
    schedule = schedule_rounds(costs.schedule, workload, rounds, costs.parts_per_stage)
    simulation = simulate_asynchronous(schedule, workload, costs.hop_seconds)
    return PipelinePlan(grouping, microbatches, rounds, workload, schedule, simulation)


def stream_workload(
    microbatches: Sequence[PlannedMicrobatch],
    turns: Sequence[RoundLengths],
    groups: Groups,
    stage_seconds: StageSeconds,
) -> Workload:
    """Returns microbatches with their times, as a workload for schedule generators. The n-th of
    `turns` that holds a task is the task's step n. A microbatch's bucket is the group of its first
    turn."""
    steps = _steps(turns)
    bucket_of = {slot: i for i, group in enumerate(groups) for slot in group}
    scheduled, seconds = [], []
    for microbatch in microbatches:
        begun_turns = sorted(set(microbatch.turns().values()))
        # All tasks of a turn are updated together.
        batches = [(slot, steps[turn][slot]) for turn in begun_turns for slot in turns[turn]]
        scheduled.append(
            ScheduledMicrobatch(
                tasks=tuple(slot for slot, _ in batches),
                steps=tuple(step for _, step in batches),
                bucket=bucket_of[next(iter(turns[begun_turns[0]]))],
            )
        )
        seconds.append(stage_seconds(sequence_lengths(microbatch, turns)))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    return Workload(tuple(scheduled), forward, backward)


def sequence_lengths(microbatch: PlannedMicrobatch, turns: Sequence[RoundLengths]) -> list[int]:
    return [
        turns[placed.turn][placed.slot][sample]
        for row in microbatch.rows
        for placed in row
        for sample, _, _ in placed.span.samples
    ]


def _steps(turns: Sequence[RoundLengths]) -> list[dict[int, int]]:
    """For each turn and slot, the number of global batches that the task has had before."""
    before: Counter[int] = Counter()
    steps = []
    for turn in turns:
        steps.append({slot: before[slot] for slot in turn})
        before.update(turn.keys())
    return steps
