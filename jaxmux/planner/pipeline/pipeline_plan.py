"""Plans a stream of rounds for a pipeline: groups of tasks, microbatches, their order and times.

While a task waits for its update, microbatches of other groups of tasks keep the stages busy. The
tasks of a group are packed together, and groups take turns. Within a round, the last microbatch of
a turn is filled up with samples of the next one. More groups provide more microbatches for the time
of an update, fewer groups fill microbatches better; what is best depends on the lengths of the
samples. A quick estimate chooses the most promising groupings, and the simulator compares these.

Training makes the same choice by the same function, packs each round in the same way and runs the
passes in the same order, so a plan shows what runs.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from ..devices import Replica
from ..packing.microbatches import PackedRound, RoundLengths, cut_batches, pack_cut
from ..packing.sampled_rounds import Batches, PartOfBatches, sample_rounds
from ..packing.shape_class import ShapeClass
from .adapter_groups import take_turns
from .bubble_lemma import PackedMicrobatch, schedule_turns
from .grouping_estimates import most_promising
from .groupings import CutRound, Grouping, Groups, candidate_groupings
from .schedules import (
    BACKWARD,
    FORWARD,
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    Workload,
    simulate_asynchronous,
    streaming,
)

# Takes the lengths in tokens of the sequences of a microbatch; returns its forward and its backward
# seconds on each stage, float64 [S] each.
StageSeconds = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]

# Groupings are compared by as many rounds as have this many microbatches per stage, with at least
# two.
_MICROBATCHES_PER_STAGE = 16
# Groups that are in use are kept unless others are faster by this fraction. The first round of
# other groups waits for the last updates of those before, while stages are idle.
_LEAST_GAIN = 0.01


class PipelinePlan(NamedTuple):
    """A stream of microbatches and its schedule.

    Attributes:
      grouping: the hTasks and buckets that the groups come from.
      microbatches: in the order of the schedule. Their spans refer by index to the turns of
        `take_turns(rounds, grouping.groups)`.
      rounds: for each microbatch, the index of its round.
      workload: the same microbatches with their times.
      schedule: what each stage runs.
      simulation: the times of the schedule, with stages that run at their own pace.
    """

    grouping: Grouping
    microbatches: list[PackedMicrobatch]
    rounds: list[int]
    workload: Workload
    schedule: PipelineSchedule
    simulation: Simulation

    @property
    def buckets(self) -> int:
        """Number of groups that have microbatches of their own."""
        return len({microbatch.bucket for microbatch in self.workload.microbatches})


class PipelineCosts(NamedTuple):
    """The time that microbatches take in a pipeline.

    Attributes:
      shape: shape class of the microbatches.
      stage_seconds: returns the time of a microbatch on each stage.
      hop_seconds: time in which the output of a pass gets to the next stage.
    """

    shape: ShapeClass
    stage_seconds: StageSeconds
    hop_seconds: float = 0.0


def grouping_of_tasks(
    tasks: Sequence[Batches], shape: ShapeClass, stages: int, present: Groups = ()
) -> Grouping:
    """Returns the grouping with which tasks train in the least time as long as all of them train.

    Args:
      tasks: for each task and step, the stream lengths in tokens of the samples of its global
        batch. The slot of a task is its index.
      shape: shape class of the microbatches.
      stages: S, number of stages of the pipeline.
      present: the groups in use, see `choose_grouping`.
    """
    together = one_htask(range(len(tasks)))
    if stages == 1 or len(tasks) == 1:
        return together
    steps = min(map(len, tasks))
    rounds = sample_rounds([_First(batches, steps) for batches in tasks])
    rounds = [{slot: own for slot, own in batches.items() if own} for batches in rounds]
    rounds = _enough([batches for batches in rounds if batches], shape, stages)
    # A task of which these rounds have no samples could be in any group.
    if len(set().union(*rounds)) < len(tasks):
        return of_groups(present) if present else together
    return choose_grouping(rounds, shape, stages, present)


def grouping_of_share(
    tasks: Sequence[Batches],
    replica: Replica,
    shape: ShapeClass,
    devices: int,
    present: Groups = (),
) -> Grouping:
    """Returns the grouping of tasks that suits a replica that trains a share of their samples:
    those that fit into its rows, divided by the number of devices.

    Args:
      tasks: for each task and step, the stream lengths in tokens of the samples of its global
        batch. The slot of a task is its index.
      replica: the replica.
      shape: shape class of its microbatches.
      devices: number of devices of all replicas.
      present: the groups in use, see `choose_grouping`.
    """
    parts = replica.shards * round(devices / replica.devices)
    share = [PartOfBatches(batches, parts, shape.row_len) for batches in tasks]
    return grouping_of_tasks(share, shape, replica.pp, present)


class _First(Sequence):
    """The first steps of a task, which are read only when they are requested."""

    def __init__(self, batches: Batches, steps: int):
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Sequence[int]:
        return self._batches[step]


def choose_grouping(
    rounds: Sequence[RoundLengths], shape: ShapeClass, stages: int, present: Groups = ()
) -> Grouping:
    """Returns the grouping of least makespan among the most promising ones.

    The passes of all microbatches are taken to be equally long on all stages. As long as the tasks
    stay the same, the grouping suits later rounds too.

    Args:
      rounds: global batches of every task, round after round; they are all packed and simulated.
      shape: shape class of the microbatches.
      stages: S, number of stages.
      present: the groups in use, which together hold all these tasks. They are returned unless
        others take at least 1% less time. Empty if there are none.

    Raises:
      PlanningError: there are no samples, or one is longer than a row.
    """
    packings = _Packings(rounds, shape)
    forward, backward = (np.full(stages, seconds) for seconds in (FORWARD, BACKWARD))
    costs = PipelineCosts(shape, lambda lengths: (forward, backward))
    together = one_htask(sorted({slot for batches in rounds for slot in batches}))
    candidates = candidate_groupings(packings.cut, shape, (forward + backward) / 2)
    found = []
    for grouping in most_promising(candidates, packings.cut, shape, stages):
        # Which turn fills up the last microbatch of which other one depends on the order.
        found += [grouping, grouping._replace(buckets=grouping.buckets[::-1])]
    plans = [_plan(packings, grouping, costs) for grouping in (*found, together)]
    # A group without a microbatch of its own is of no use, and one group always has one. Of equally
    # fast plans the first is taken, because several groups hide the time of updates, which the
    # simulation leaves out.
    useful = (plan for plan in plans if plan.buckets == len(plan.grouping.groups))
    best = min(useful, key=lambda plan: plan.simulation.makespan)
    if present:
        kept = _plan(packings, of_groups(present), costs)
        if kept.simulation.makespan * (1 - _LEAST_GAIN) < best.simulation.makespan:
            return kept.grouping
    return best.grouping


def _enough(rounds: list[RoundLengths], shape: ShapeClass, stages: int) -> list[RoundLengths]:
    """As many of the first rounds as suffice to compare groupings."""
    if not rounds:
        return []
    microbatches = max(1, sum(map(sum, rounds[0].values())) // shape.tokens)
    return rounds[: max(2, -(-_MICROBATCHES_PER_STAGE * stages // microbatches))]


def one_htask(slots: Sequence[int]) -> Grouping:
    """Returns the grouping in which all tasks are one hTask."""
    return of_groups([tuple(slots)])


def of_groups(groups: Groups) -> Grouping:
    """Returns the grouping in which every group is one hTask.

    Args:
      groups: for each group, the slots of its tasks.
    """
    return Grouping(tuple(groups), tuple((i,) for i in range(len(groups))))


def plan_pipeline(
    rounds: Sequence[RoundLengths], grouping: Grouping, costs: PipelineCosts
) -> PipelinePlan:
    """Returns the plan of a stream of rounds.

    Args:
      rounds: global batches of every task, round after round; there is no flush between them.
      grouping: the groups of tasks, for example from `choose_grouping`.
      costs: times of the pipeline.

    Raises:
      PlanningError: there are no samples, or one is longer than a row.
    """
    return _plan(_Packings(rounds, costs.shape), grouping, costs)


def pack_in_groups(
    batches: RoundLengths, groups: Groups, shape: ShapeClass
) -> list[PackedMicrobatch]:
    """Packs a round: the groups one after another, each filling up the last microbatch of the one
    before.

    Args:
      batches: by slot, the stream lengths in tokens of the samples of the task's global batch.
      groups: the groups, with all these slots.
      shape: shape class of the microbatches.
    """
    return next(_Packings([batches], shape).in_groups(groups))[1]


class _Packings:
    """The packed turns of groups, each packed once for all groupings that contain the group."""

    def __init__(self, rounds: Sequence[RoundLengths], shape: ShapeClass):
        self.rounds = rounds
        self.cut: list[CutRound] = [cut_batches(batches, shape) for batches in rounds]
        self._shape = shape
        self._of_group = cache(self._pack_group)

    def _pack_group(self, group: tuple[int, ...]) -> dict[int, PackedRound]:
        """By round, the group's packed turn, if it has one."""
        packed = {}
        for i, batches in enumerate(self.cut):
            if turn := {slot: batches[slot] for slot in group if slot in batches}:
                packed[i] = pack_cut(turn, self._shape)
        return packed

    def in_groups(self, groups: Groups) -> Iterator[tuple[int, list[PackedMicrobatch]]]:
        """For each round, the number of its turns and its microbatches. Their spans count turns
        from the first of the round."""
        for i in range(len(self.rounds)):
            turns = [packed[i] for packed in map(self._of_group, groups) if i in packed]
            yield len(turns), schedule_turns(turns, stages=1)


def _plan(packings: _Packings, grouping: Grouping, costs: PipelineCosts) -> PipelinePlan:
    turns = take_turns(packings.rounds, grouping.groups)
    microbatches, rounds, first_turn = [], [], 0
    for i, (count, own) in enumerate(packings.in_groups(grouping.groups)):
        microbatches += [microbatch.after(first_turn) for microbatch in own]
        rounds += [i] * len(own)
        first_turn += count
    workload = stream_workload(microbatches, turns, grouping.groups, costs.stage_seconds)
    schedule = streaming(workload)
    simulation = simulate_asynchronous(schedule, workload, costs.hop_seconds)
    return PipelinePlan(grouping, microbatches, rounds, workload, schedule, simulation)


def stream_workload(
    microbatches: Sequence[PackedMicrobatch],
    turns: Sequence[RoundLengths],
    groups: Groups,
    stage_seconds: StageSeconds,
) -> Workload:
    """Returns microbatches with their times as a workload for schedule generators.

    Args:
      microbatches: the stream, without no-ops.
      turns: for each turn, by slot, the lengths in tokens of the global batches that were packed. A
        span's `turn` is an index of it. The n-th turn of a task is its step n.
      groups: the groups of the turns; a microbatch's bucket is the group of its first turn.
      stage_seconds: returns the time of a microbatch on each stage.
    """
    steps = _steps(turns)
    bucket_of = {slot: i for i, group in enumerate(groups) for slot in group}
    scheduled, seconds = [], []
    for microbatch in microbatches:
        own = sorted(set(microbatch.turns().values()))
        # All tasks of a turn are updated together.
        batches = [(slot, steps[turn][slot]) for turn in own for slot in turns[turn]]
        scheduled.append(
            ScheduledMicrobatch(
                tasks=tuple(slot for slot, _ in batches),
                steps=tuple(step for _, step in batches),
                bucket=bucket_of[next(iter(turns[own[0]]))],
            )
        )
        seconds.append(stage_seconds(sequence_lengths(microbatch, turns)))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    return Workload(tuple(scheduled), forward, backward)


def sequence_lengths(microbatch: PackedMicrobatch, turns: Sequence[RoundLengths]) -> list[int]:
    """Returns the length in tokens of each sequence of a microbatch; arguments as of
    `stream_workload`."""
    return [
        turns[placed.turn][placed.slot][sample]
        for row in microbatch.rows
        for placed in row
        for sample, _, _ in placed.span.samples
    ]


def _steps(turns: Sequence[RoundLengths]) -> list[dict[int, int]]:
    """For each turn, by slot, how many global batches the task has had before."""
    before: Counter[int] = Counter()
    steps = []
    for turn in turns:
        steps.append({slot: before[slot] for slot in turn})
        before.update(turn.keys())
    return steps
