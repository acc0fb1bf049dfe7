"""Plans a stream of rounds for a pipeline: groups of tasks, microbatches, their order and ticks.

In lockstep a tick takes as long as its slowest stage. Three choices keep the other stages busy:

- **The order of the groups.** All microbatches have N tokens, so only attention makes their times
  differ. The tasks of a group are packed together, and groups take turns in descending order of
  time (rule 1 of MuxTune's template, 3.4.1), so that microbatches of similar time follow each
  other.
- **The tick rule.** A backward pass takes longer than a forward pass. With paired or alternating
  ticks (see `schedules.tick_layout`) a microbatch takes F + B of every stage's time instead of
  2 max(F, B), where F and B are the times of its forward and backward pass. But on S stages a
  task's next global batch begins 2S (paired) or 2S - 1 (alternating) microbatches after its
  current one ends. Single ticks need S.
- **The number of groups.** While a task waits for its update, microbatches of other groups fill the
  distance. More groups provide more of them, fewer groups fill microbatches better.

The best choice depends on the lengths of the samples. A quick estimate chooses the most promising
groupings, and the simulator compares these.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, get_args

import numpy as np

from ..packing.microbatches import PackedRound, RoundLengths, cut_batches, pack_cut
from ..packing.shape_class import ShapeClass
from .adapter_groups import take_turns
from .bubble_lemma import PackedMicrobatch, lemma_distance, schedule_turns
from .grouping_estimates import most_promising
from .groupings import CutRound, Grouping, Groups, candidate_groupings
from .schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    TickRule,
    Workload,
    one_forward_one_backward,
    simulate_lockstep,
)

# Takes the lengths in tokens of the sequences of a microbatch; returns its forward and its backward
# seconds on each stage, float64 [S] each.
StageSeconds = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]


class PipelinePlan(NamedTuple):
    """A stream of microbatches and its schedule.

    Attributes:
      grouping: the hTasks and buckets that the groups come from.
      groups: for each group, the slots of its tasks, in the order of the turns.
      rule: the tick rule of the schedule.
      microbatches: in the order of the schedule. Their spans refer by index to the turns of
        `take_turns(rounds, groups)`.
      workload: the same microbatches with their times.
      schedule: what each stage runs in each tick.
      simulation: the times of the schedule in lockstep.
    """

    grouping: Grouping
    groups: Groups
    rule: TickRule
    microbatches: list[PackedMicrobatch]
    workload: Workload
    schedule: PipelineSchedule
    simulation: Simulation


class PipelineCosts(NamedTuple):
    """The time that microbatches take in a pipeline, and the memory that it has for them.

    Attributes:
      shape: shape class of the microbatches.
      stage_seconds: returns the time of a microbatch on each stage.
      permute_seconds: time of the messages at the end of a tick.
      buffer_limit: number of buffers for residuals on each stage; None for no limit.
    """

    shape: ShapeClass
    stage_seconds: StageSeconds
    permute_seconds: float = 0.0
    buffer_limit: tuple[int, ...] | None = None


def plan_pipeline(rounds: Sequence[RoundLengths], costs: PipelineCosts) -> PipelinePlan:
    """Returns the plan of least lockstep makespan among the most promising groupings.

    As long as the tasks stay the same, the grouping suits later rounds too (see `plan_grouping`).

    Args:
      rounds: global batches of every task, round after round; there is no flush between them.
      costs: times and memory of the pipeline.

    Raises:
      PlanningError: there are no samples, or one is longer than a row.
    """
    packings = _Packings(rounds, costs.shape)
    everything = tuple(sorted({slot for batches in rounds for slot in batches}))
    forward, backward = packings.mean_seconds(everything, costs.stage_seconds)
    candidates = candidate_groupings(packings.cut, costs.shape, (forward + backward) / 2)
    depth = costs.buffer_limit[0] if costs.buffer_limit else None
    found = most_promising(
        candidates, packings.cut, costs.shape, forward, backward, costs.permute_seconds, depth
    )
    plans = (_plan(packings, grouping, rule, costs) for _, grouping, rule in found)
    return min(plans, key=lambda plan: plan.simulation.makespan)


def plan_grouping(
    rounds: Sequence[RoundLengths], grouping: Grouping, costs: PipelineCosts
) -> PipelinePlan:
    """Returns the plan with this grouping and the tick rule of least lockstep makespan.

    The other arguments, and errors, are those of `plan_pipeline`.
    """
    packings = _Packings(rounds, costs.shape)
    plans = [_plan(packings, grouping, rule, costs) for rule in get_args(TickRule)]
    return min(plans, key=lambda plan: plan.simulation.makespan)


class _Packings:
    """The packed turns of groups, each packed once for all groupings that contain the group."""

    def __init__(self, rounds: Sequence[RoundLengths], shape: ShapeClass):
        self.rounds = rounds
        self.cut: list[CutRound] = [cut_batches(batches, shape) for batches in rounds]
        self._shape = shape
        self.of_group = cache(self._pack_group)
        self.mean_seconds = cache(self._mean_seconds)

    def _pack_group(self, group: tuple[int, ...]) -> list[PackedRound]:
        """The group's packed turns, for each round in which it has one."""
        return [pack_cut(turn, self._shape) for turn in take_turns(self.cut, [group])]

    def take_turns(self, groups: Groups) -> list[PackedRound]:
        """The packed turns in the order of `adapter_groups.take_turns`."""
        following = {group: iter(self.of_group(group)) for group in groups}
        return [
            next(following[group])
            for batches in self.rounds
            for group in groups
            if any(slot in batches for slot in group)
        ]

    def _mean_seconds(self, group: tuple[int, ...], stage_seconds: StageSeconds) -> np.ndarray:
        """Mean forward and backward seconds of the microbatches of the group's first turn.

        Returns:
          float64 [2, S].
        """
        (lengths, *_) = take_turns(self.rounds, [group])
        seconds = [
            stage_seconds([lengths[p.slot][p.sample] for p in placements])
            for placements in self.of_group(group)[0].microbatches()
        ]
        return np.mean(seconds or [stage_seconds([])], axis=0)


def _plan(
    packings: _Packings, grouping: Grouping, rule: TickRule, costs: PipelineCosts
) -> PipelinePlan:
    def forward_seconds(group: tuple[int, ...]) -> float:
        return float(packings.mean_seconds(group, costs.stage_seconds)[0].mean())

    groups = tuple(sorted(grouping.groups, key=forward_seconds, reverse=True))
    turns, packed = take_turns(packings.rounds, groups), packings.take_turns(groups)
    stages = len(costs.stage_seconds([costs.shape.row_len])[0])
    stream = schedule_turns(packed, lemma_distance(stages, rule))
    # The schedule itself makes a task wait where the stream has a no-op.
    microbatches = [microbatch for microbatch in stream if not microbatch.is_noop]
    workload = stream_workload(microbatches, turns, costs.stage_seconds, costs.buffer_limit)
    schedule = one_forward_one_backward(workload, rule)
    simulation = simulate_lockstep(schedule, workload, costs.permute_seconds)
    return PipelinePlan(grouping, groups, rule, microbatches, workload, schedule, simulation)


def stream_workload(
    microbatches: Sequence[PackedMicrobatch],
    turns: Sequence[RoundLengths],
    stage_seconds: StageSeconds,
    buffer_limit: tuple[int, ...] | None = None,
) -> Workload:
    """Returns microbatches with their times as a workload for schedule generators.

    Args:
      microbatches: the stream, without no-ops.
      turns: for each turn, by slot, the lengths in tokens of the global batches that were packed. A
        span's `turn` is an index of it. The n-th turn of a task is its step n.
      stage_seconds: returns the time of a microbatch on each stage.
      buffer_limit: number of buffers for residuals on each stage; None for no limit.
    """
    steps = _steps(turns)
    groups = dict.fromkeys(tuple(sorted(turn)) for turn in turns)
    bucket_of = {slots: i for i, slots in enumerate(groups)}
    scheduled, seconds = [], []
    for microbatch in microbatches:
        turn_of = microbatch.turns()
        first = min(turn_of.values())
        scheduled.append(
            ScheduledMicrobatch(
                tasks=tuple(turn_of),
                steps=tuple(steps[turn][slot] for slot, turn in turn_of.items()),
                bucket=bucket_of[tuple(sorted(turns[first]))],
            )
        )
        seconds.append(stage_seconds(sequence_lengths(microbatch, turns)))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    return Workload(tuple(scheduled), forward, backward, buffer_limit)


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
