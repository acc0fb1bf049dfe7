"""Plans a stream of global batches for a pipeline: groups, microbatches, order and ticks.

In lockstep a tick is as long as its slowest stage. Three things keep the others from waiting:

- Every microbatch has the same N tokens, so that only attention tells them apart; and what costs
  alike comes together, because a group's tasks are packed together and groups come in descending
  order of cost (MuxTune's template, 3.4.1).
- A backward takes longer than a forward. With *paired* or *alternating* ticks (see
  `schedules.layout`) every stage takes F + B. A microbatch is then in flight for 2S others, or one
  less, and so a task's next global batch begins as many microbatches after its current one ends,
  where one op a tick needs S.
- Tasks that wait for their update need others to fill the distance. More groups give more of them,
  fewer groups fuller microbatches.

What is best of groups and ticks depends on the lengths: those that are most promising by a quick
estimate are tried in the simulator.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, get_args

import numpy as np

from ..packing.microbatches import PackedRound, RoundLengths, cut_batches, pack_cut
from ..packing.shape_class import ShapeClass
from .adapter_groups import take_turns
from .bubble_lemma import PackedMicrobatch, lemma_distance, schedule_batches
from .groupings import CutRound, Grouping, Groups, candidate_groupings, most_promising
from .schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    TickRule,
    Workload,
    one_forward_one_backward,
    simulate_lockstep,
)

# Forward and backward seconds of each stage, float64 [S], of a microbatch with sequences of these
# lengths in tokens.
StageSeconds = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]


class PipelinePlan(NamedTuple):
    """A stream of microbatches and its schedule.

    Attributes:
      grouping: the hTasks and buckets that the groups come from.
      groups: the tasks that are packed together.
      rule: of the schedule's ticks.
      microbatches: in the order of the jobs of the schedule; their spans name by index the turns of
        `take_turns(rounds, groups)`.
      load: the jobs and their times.
      schedule: what each stage does in each tick.
      simulation: when, in lockstep.
    """

    grouping: Grouping
    groups: Groups
    rule: TickRule
    microbatches: list[PackedMicrobatch]
    load: Workload
    schedule: PipelineSchedule
    simulation: Simulation


class PipelineCosts(NamedTuple):
    """What a pipeline takes, and has room for.

    Attributes:
      shape: shape class of the microbatches.
      stage_seconds: what a microbatch takes on each stage.
      permute_seconds: of the messages at the end of a tick.
      buffer_limit: residual slots of each stage; None for no limit.
    """

    shape: ShapeClass
    stage_seconds: StageSeconds
    permute_seconds: float = 0.0
    buffer_limit: tuple[int, ...] | None = None


def plan_pipeline(
    rounds: Sequence[RoundLengths],
    costs: PipelineCosts,
) -> PipelinePlan:
    """The grouping and the ticks of least makespan in lockstep, as far as a search finds it.

    As long as the tasks stay, the plan's grouping will do for the next rounds, too: see
    `plan_grouping`.

    Args:
      rounds: global batches of every task, round after round; there is no flush between them.

    Raises:
      PlanningError: there are no samples, or one is longer than a row.
    """
    packings = _Packings(rounds, costs.shape)
    forward, backward = _mean_stages(packings, costs.stage_seconds)
    candidates = candidate_groupings(packings.cut, costs.shape, (forward + backward) / 2)
    stages = (forward, backward, costs.permute_seconds)
    depth = costs.buffer_limit[0] if costs.buffer_limit else None
    found = most_promising(candidates, packings.cut, costs.shape, *stages, depth)
    plans = (_plan(packings, grouping, rule, costs) for _, grouping, rule in found)
    return min(plans, key=lambda plan: plan.simulation.makespan)


def plan_grouping(
    rounds: Sequence[RoundLengths],
    grouping: Grouping,
    costs: PipelineCosts,
) -> PipelinePlan:
    """The plan with this grouping and the ticks of least makespan; as `plan_pipeline` otherwise."""
    packings = _Packings(rounds, costs.shape)
    plans = [_plan(packings, grouping, rule, costs) for rule in get_args(TickRule)]
    return min(plans, key=lambda plan: plan.simulation.makespan)


class _Packings:
    """The packed turns of groups of tasks, each packed once for all groupings that it is in."""

    def __init__(self, rounds: Sequence[RoundLengths], shape: ShapeClass):
        self.rounds = rounds
        self.cut: list[CutRound] = [cut_batches(batches, shape) for batches in rounds]
        self._pack = partial(pack_cut, shape=shape)
        self._packed: dict[tuple[int, ...], list[PackedRound]] = {}
        self._seconds: dict[tuple[int, ...], np.ndarray] = {}

    def of_group(self, group: tuple[int, ...]) -> list[PackedRound]:
        """By round in which it has a turn."""
        if group not in self._packed:
            turns = take_turns(self.cut, [group])
            self._packed[group] = [self._pack(turn) for turn in turns]
        return self._packed[group]

    def take_turns(self, groups: Groups) -> list[PackedRound]:
        """In the order of `adapter_groups.take_turns`."""
        following = {group: iter(self.of_group(group)) for group in groups}
        return [
            next(following[group])
            for batches in self.rounds
            for group in groups
            if any(slot in batches for slot in group)
        ]

    def mean_seconds(self, group: tuple[int, ...], stage_seconds: StageSeconds) -> np.ndarray:
        """Forward and backward of the group's microbatches in its first turn: float64 [2, S]."""
        if group not in self._seconds:
            (lengths, *_) = take_turns(self.rounds, [group])
            seconds = [
                stage_seconds([lengths[p.slot][p.sample] for p in placements])
                for placements in self.of_group(group)[0].microbatches()
            ]
            self._seconds[group] = np.mean(seconds or [stage_seconds([])], axis=0)
        return self._seconds[group]


def _mean_stages(packings: _Packings, stage_seconds: StageSeconds) -> np.ndarray:
    """As if all tasks were packed together."""
    everything = tuple(sorted({slot for batches in packings.rounds for slot in batches}))
    return packings.mean_seconds(everything, stage_seconds)


def _plan(
    packings: _Packings, grouping: Grouping, rule: TickRule, costs: PipelineCosts
) -> PipelinePlan:
    groups = _longest_first(grouping.groups, packings, costs.stage_seconds)
    turns, packed = take_turns(packings.rounds, groups), packings.take_turns(groups)
    stages = len(costs.stage_seconds([costs.shape.row_len])[0])
    stream = schedule_batches(packed, lemma_distance(stages, rule))
    # The schedule waits by itself where the lemma would have a no-op.
    microbatches = [m for m in stream if not m.is_noop]
    load = stream_workload(microbatches, turns, costs.stage_seconds, costs.buffer_limit)
    schedule = one_forward_one_backward(load, rule)
    simulation = simulate_lockstep(schedule, load, costs.permute_seconds)
    return PipelinePlan(grouping, groups, rule, microbatches, load, schedule, simulation)


def _longest_first(groups: Groups, packings: _Packings, stage_seconds: StageSeconds) -> Groups:
    """The groups in descending order of the mean forward time of their microbatches."""

    def forward(group: tuple[int, ...]) -> float:
        return float(packings.mean_seconds(group, stage_seconds)[0].mean())

    return tuple(sorted(groups, key=forward, reverse=True))


def stream_workload(
    microbatches: Sequence[PackedMicrobatch],
    turns: Sequence[RoundLengths],
    stage_seconds: StageSeconds,
    buffer_limit: Sequence[int] | None = None,
) -> Workload:
    """The jobs of microbatches, none of them a no-op, and what they take.

    Args:
      microbatches: in the order of the stream.
      turns: the global batches that were packed, in the order of their turns (see `take_turns`); a
        span's `batch` is an index of it. A task's n-th turn is its step n.
      stage_seconds: what a microbatch takes on each stage.
      buffer_limit: residual slots of each stage.
    """
    steps = _steps(turns)
    bucket = {slots: i for i, slots in enumerate(dict.fromkeys(tuple(sorted(t)) for t in turns))}
    jobs, seconds = [], []
    for microbatch in microbatches:
        batches = microbatch.batches()
        first = min(batches.values())
        jobs.append(
            ScheduledMicrobatch(
                tasks=tuple(batches),
                steps=tuple(steps[turn][slot] for slot, turn in batches.items()),
                bucket=bucket[tuple(sorted(turns[first]))],
            )
        )
        seconds.append(stage_seconds(sequence_lengths(microbatch, turns)))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    limit = None if buffer_limit is None else tuple(buffer_limit)
    return Workload(tuple(jobs), forward, backward, limit)


def sequence_lengths(microbatch: PackedMicrobatch, turns: Sequence[RoundLengths]) -> list[int]:
    """Tokens of each sequence of a microbatch."""
    return [
        turns[placed.batch][placed.slot][sample]
        for row in microbatch.rows
        for placed in row
        for sample, _, _ in placed.span.samples
    ]


def _steps(turns: Sequence[RoundLengths]) -> list[dict[int, int]]:
    """By turn and slot, how many global batches the task has had before."""
    before: dict[int, int] = defaultdict(int)
    steps = []
    for turn in turns:
        steps.append({slot: before[slot] for slot in turn})
        for slot in turn:
            before[slot] += 1
    return steps
