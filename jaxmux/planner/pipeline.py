"""Plans a stream of global batches for a pipeline: groups, microbatches, order and clock.

In lockstep a tick is as long as its slowest stage. Three things keep the others from waiting:

- Every microbatch has the same N tokens, so that only attention tells them apart; and what costs
  alike comes together, because a group's tasks are packed together and groups come in descending
  order of cost (MuxTune's template, 3.4.1).
- A backward takes longer than a forward. With *paired* ticks, one of each a stage, every stage
  takes F + B. A microbatch is then in flight for 2S ticks, and so a task's next global batch begins
  2S microbatches after its current one ends, where one op a tick needs S.
- Tasks that wait for their update need others to fill the distance. More groups give more of them,
  fewer groups fuller microbatches.

What is best of groups and clock depends on the lengths: each is tried in the simulator.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .adapter_groups import pair_head_with_tail, take_turns
from .bubble_lemma import ScheduledMicrobatch, schedule_batches
from .microbatches import pack_batch, pack_batches
from .schedules import (
    Job,
    Schedule,
    Simulation,
    Workload,
    one_forward_one_backward,
    simulate_lockstep,
)
from .shape_class import PlanningError, ShapeClass

# By slot, the stream lengths in tokens of the samples of the task's global batch.
Round = Mapping[int, Sequence[int]]
# Slots of the tasks that are packed together, group by group in the order of their turns.
Groups = tuple[tuple[int, ...], ...]
# Forward and backward seconds of each stage, float64 [S], of a microbatch with sequences of these
# lengths in tokens.
StageSeconds = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]


class PipelinePlan(NamedTuple):
    """A stream of microbatches and its schedule.

    Attributes:
      groups: the tasks that are packed together.
      paired: whether a tick holds a forward and a backward of a stage.
      microbatches: in the order of the jobs of the schedule; their runs name by index the turns of
        `take_turns(rounds, groups)`.
      load: the jobs and their times.
      schedule: what each stage does in each tick.
      simulation: when, in lockstep.
    """

    groups: Groups
    paired: bool
    microbatches: list[ScheduledMicrobatch]
    load: Workload
    schedule: Schedule
    simulation: Simulation


def plan_pipeline(
    rounds: Sequence[Round],
    shape: ShapeClass,
    stage_seconds: StageSeconds,
    permute_seconds: float = 0.0,
    groupings: Sequence[Groups] | None = None,
    buffer_limit: Sequence[int] | None = None,
    solver_seconds: float | None = None,
) -> PipelinePlan:
    """The grouping and the clock of least makespan in lockstep.

    Args:
      rounds: global batches of every task, round after round; there is no flush between them.
      shape: shape class of the microbatches.
      stage_seconds: what a microbatch takes on each stage.
      permute_seconds: of the messages at the end of a tick.
      groupings: which to try; None for head-tail pairing into one group, two, and so on. As long as
        the tasks stay, a plan's own will do for the next rounds.
      buffer_limit: residual slots of each stage.
      solver_seconds: see `pack_batch`.

    Raises:
      PlanningError: there are no samples, or one is longer than a row.
    """
    stages = len(stage_seconds([shape.row_len])[0])
    plans = []
    for groups in groupings or _head_tail_groupings(rounds, stages):
        groups = _longest_first(groups, rounds[0], shape, stage_seconds)
        turns = take_turns(rounds, groups)
        packed = pack_batches(turns, shape, solver_seconds)
        for paired in (False, True):
            stream = schedule_batches(packed, 2 * stages if paired else stages)
            # The schedule waits by itself where the lemma would have a no-op.
            microbatches = [m for m in stream if not m.is_noop]
            load = stream_workload(microbatches, turns, stage_seconds, buffer_limit)
            schedule = one_forward_one_backward(load, paired)
            simulation = simulate_lockstep(schedule, load, permute_seconds)
            plans.append(PipelinePlan(groups, paired, microbatches, load, schedule, simulation))
    return min(plans, key=lambda plan: plan.simulation.makespan)


def stream_workload(
    microbatches: Sequence[ScheduledMicrobatch],
    turns: Sequence[Round],
    stage_seconds: StageSeconds,
    buffer_limit: Sequence[int] | None = None,
) -> Workload:
    """The jobs of microbatches, none of them a no-op, and what they take.

    Args:
      microbatches: in the order of the stream.
      turns: the global batches that were packed, in the order of their turns (see `take_turns`); a
        run's `batch` is an index of it. A task's n-th turn is its step n.
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
            Job(
                tasks=tuple(batches),
                steps=tuple(steps[turn][slot] for slot, turn in batches.items()),
                bucket=bucket[tuple(sorted(turns[first]))],
            )
        )
        seconds.append(stage_seconds(sequence_lengths(microbatch, turns)))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    limit = None if buffer_limit is None else tuple(buffer_limit)
    return Workload(tuple(jobs), forward, backward, limit)


def sequence_lengths(microbatch: ScheduledMicrobatch, turns: Sequence[Round]) -> list[int]:
    """Tokens of each sequence of a microbatch."""
    return [
        turns[laid.batch][laid.slot][sample]
        for row in microbatch.rows
        for laid in row
        for sample, _, _ in laid.run.samples
    ]


def _head_tail_groupings(rounds: Sequence[Round], stages: int) -> Iterator[Groups]:
    """By number of groups; 2S of them fill any distance."""
    lengths = defaultdict(list)
    for batches in rounds:
        for slot, sizes in batches.items():
            lengths[slot] += sizes
    lengths = {slot: sizes for slot, sizes in lengths.items() if sizes}
    if not lengths:
        raise PlanningError("no samples to plan a pipeline for")
    for count in range(1, 1 + min(len(lengths), 2 * stages)):
        yield pair_head_with_tail(lengths, count)


def _longest_first(
    groups: Groups, batches: Round, shape: ShapeClass, stage_seconds: StageSeconds
) -> Groups:
    """The groups in descending order of the mean forward time of their microbatches."""

    def mean_seconds(group: tuple[int, ...]) -> float:
        turn = {slot: batches[slot] for slot in group if slot in batches}
        packed = schedule_batches([pack_batch(turn, shape, solver_seconds=0)], stages=1)
        seconds = [stage_seconds(sequence_lengths(m, [turn]))[0].mean() for m in packed]
        return float(np.mean(seconds)) if seconds else 0.0

    return tuple(sorted(groups, key=mean_seconds, reverse=True))


def _steps(turns: Sequence[Round]) -> list[dict[int, int]]:
    """By turn and slot, how many global batches the task has had before."""
    before: dict[int, int] = defaultdict(int)
    steps = []
    for turn in turns:
        steps.append({slot: before[slot] for slot in turn})
        for slot in turn:
            before[slot] += 1
    return steps
