"""Makes a plan: shape class, hTasks, buckets, microbatches and schedule for tasks on a mesh."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..costs.admission import Admission
from ..costs.cost_models import CostSource
from ..costs.pool_spec import PoolSpec, merge_pool_specs
from ..costs.replica_costs import ReplicaCosts
from ..errors import PlanningError
from ..numbers import power_of_two
from ..packing.microbatches import RoundLengths
from ..packing.sampled_rounds import Batches, sample_rounds
from ..packing.shape_choice import ShapeRequest, choose_shape
from ..packing.shape_class import ShapeClass, smallest_shape_class
from .adapter_groups import take_turns
from .groupings import Grouping
from .pipeline_plan import PipelineCosts, PipelinePlan, plan_grouping, plan_pipeline
from .plan_value import Baseline, PlacedSample, Plan, PlannedTask, Prediction
from .schedules import validate

# The grouping is chosen by as many rounds as have so many microbatches for every stage, at least
# two.
_MICROBATCHES_OF_CHOICE = 16
# What step time, as a part of the plan's, is worth a word.
_NOTABLE = 0.95


class TaskLoad(NamedTuple):
    """What planning needs to know of a task.

    Attributes:
      name: of the task.
      pool: with one slot: what it needs alone.
      batch_size: samples of a global batch.
      steps: that it trains.
      lengths: stream lengths in tokens of all its samples.
      batches: those of its global batches by step, of the whole span or of its first steps.
      held_out: those of its held-out samples; a row must hold them too.
      dropped: records of its data that gave no sample.
    """

    name: str
    pool: PoolSpec
    batch_size: int
    steps: int
    lengths: Sequence[int]
    batches: Batches
    held_out: Sequence[int] = ()
    dropped: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, held-out ones included."""
        return max((*self.lengths, *self.held_out))


def shared_pool(tasks: Sequence[TaskLoad]) -> PoolSpec:
    """The pool of all tasks."""
    return merge_pool_specs([task.pool for task in tasks])


def make_plan(
    tasks: Sequence[TaskLoad],
    request: ShapeRequest,
    costs: ReplicaCosts,
    source: CostSource,
    rounds: int,
) -> Plan:
    """The plan of least predicted time.

    The shape class is the one that training chooses, by rounds of the whole span. On one device all
    tasks are one hTask, as `spans.shape` has them; on a pipeline they are grouped.

    Args:
      tasks: what is trained; a task's slot is its index.
      request: limits of the shape class.
      costs: of the mesh, for the pool of all tasks.
      source: where the costs come from.
      rounds: that the schedule covers; a task with fewer batches has them again.

    Raises:
      PlanningError: there are no tasks, a task fits no device of the mesh even alone, or all
        together do not fit; the message names the smallest change that would make it fit.
    """
    if not tasks:
        raise PlanningError("nothing to plan: there are no tasks; one with one sample would do")
    batches = _batches(tasks, rounds)
    shape = _choose_shape(tasks, request, costs)
    pools = {task.name: task.pool for task in tasks}
    Admission(costs, shape, request.tokens).require(pools)
    pipeline, together, own = _choose_pipelines(batches, shape, costs)
    grouping = pipeline.grouping
    order = [grouping.groups.index(group) for group in pipeline.groups]
    validate(pipeline.schedule)
    forward, backward = own.stages(shape)
    in_flight = int(pipeline.simulation.peak_buffers.max())
    update = costs.update()
    return Plan(
        costs=source,
        backbone=costs.times.backbone.name,
        replica=costs.replica,
        tasks=tuple(_planned(task) for task in tasks),
        shape=shape,
        remat=own.policies(shape),
        rounds=rounds,
        htasks=grouping.htasks,
        buckets=tuple(grouping.buckets[i] for i in order),
        microbatches=_placements(pipeline, batches, shape),
        forward_seconds=tuple(forward.tolist()),
        backward_seconds=tuple(backward.tolist()),
        permute_seconds=costs.permute(shape),
        schedule=pipeline.schedule,
        prediction=Prediction(
            step_seconds=pipeline.simulation.makespan / rounds + update,
            update_seconds=update,
            bubble_ratio=pipeline.simulation.bubble_ratio(),
            microbatches=len(pipeline.microbatches) / rounds,
            memory_bytes=own.peak(shape, own.policies(shape), in_flight),
        ),
        baselines=_baselines(batches, together, shape, costs),
    )


class SmallerMicrobatches(NamedTuple):
    """What another N would make of a plan.

    Attributes:
      tokens: N, as it is asked for.
      step_seconds, bubble_ratio: as in `Prediction`.
    """

    tokens: int
    step_seconds: float
    bubble_ratio: float


def try_smaller_microbatches(
    plan: Plan, tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> SmallerMicrobatches | None:
    """The fastest N of those that come of halving it, if it is notably faster.

    Smaller microbatches are more, which fill a pipeline better, and of which less is padding.
    Nothing is tried where there is little of either, nor on one device, for there the shape class
    may have fewer tokens anyway; and once they take longer than larger ones, no smaller ones are.

    Args:
      plan: what `make_plan` made of all the rest.
    """
    if plan.replica.pp == 1 or _useful_share(plan) > _NOTABLE:
        return None
    batches, own = _batches(tasks, plan.rounds), plan.prediction
    best = SmallerMicrobatches(request.tokens, own.step_seconds, own.bubble_ratio)
    tokens = request.tokens // 2
    while tokens >= max(task.longest for task in tasks):
        shape = _choose_shape(tasks, request._replace(tokens=tokens), costs)
        simulation = _choose_pipelines(batches, shape, costs).best.simulation
        seconds = simulation.makespan / plan.rounds + own.update_seconds
        if seconds > best.step_seconds:
            break
        best = SmallerMicrobatches(tokens, seconds, simulation.bubble_ratio())
        tokens //= 2
    return best if best.step_seconds < _NOTABLE * own.step_seconds else None


def _useful_share(plan: Plan) -> float:
    """Of the time of all devices, what is neither bubbles nor padding."""
    tokens = plan.tokens_by_microbatch
    return (1 - plan.prediction.bubble_ratio) * sum(tokens) / (len(tokens) * plan.shape.tokens)


def _batches(tasks: Sequence[TaskLoad], rounds: int) -> list[RoundLengths]:
    return [
        {slot: list(task.batches[k % len(task.batches)]) for slot, task in enumerate(tasks)}
        for k in range(rounds)
    ]


def _planned(task: TaskLoad) -> PlannedTask:
    lengths = task.lengths
    rank, sizes = task.pool.rank, (len(lengths), sum(lengths), max(lengths))
    return PlannedTask(task.name, rank, task.batch_size, task.steps, *sizes)


def _choose_shape(
    tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts
) -> ShapeClass:
    lengths = [length for task in tasks for length in (*task.lengths, *task.held_out)]
    if request.row_len is not None:
        _require_rows(tasks, request)
    # Smaller microbatches for the sake of a pipeline are the caller's to try.
    request = request._replace(fewer_tokens=costs.replica.pp == 1)
    rounds = sample_rounds([task.batches for task in tasks])
    return choose_shape(rounds, request, costs.microbatch, lengths).shape


def _require_rows(tasks: Sequence[TaskLoad], request: ShapeRequest) -> None:
    """Checks that there can be rows of the given length, and that they hold every sample."""
    row_len = request.row_len
    smallest_shape_class([1], request.tokens, request.chunk_len, row_len)
    for task in tasks:
        if task.longest > row_len:
            needed = power_of_two(task.longest)
            raise PlanningError(
                f"task {task.name!r}: its longest sample has {task.longest} tokens, a row "
                f"holds row_len={row_len}; it would fit with row_len={needed} or "
                f"max_length={row_len}"
            )


class _Pipelines(NamedTuple):
    """The fastest pipeline that was found, and the one with all tasks in one hTask.

    Attributes:
      costs: of the fastest, with as many microbatches in flight as it has room for.
    """

    best: PipelinePlan
    together: PipelinePlan
    costs: ReplicaCosts


def _choose_pipelines(
    batches: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> _Pipelines:
    everything = Grouping((tuple(batches[0]),), ((0,),))
    together = _plan_with(everything, batches, shape, costs)
    found = [(together, costs)]
    if costs.replica.pp > 1:
        found += [(_choose_grouping(batches, shape, c), c) for c in _depths(shape, costs)]
    best, costs = min(found, key=lambda pair: pair[0].simulation.makespan)
    return _Pipelines(best, together, costs)


def _depths(shape: ShapeClass, costs: ReplicaCosts) -> list[ReplicaCosts]:
    """The costs as they are and, where that makes layers recompute more, with room for all
    microbatches that a pipeline makes use of: with little memory either may be faster."""
    deep = dataclasses.replace(costs, in_flight=costs.most_in_flight)
    return [costs] if deep.policies(shape) == costs.policies(shape) else [costs, deep]


def _choose_grouping(
    batches: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelinePlan:
    """The plan with the grouping that is the fastest over some rounds."""
    microbatches = max(1, sum(map(sum, batches[0].values())) // shape.tokens)
    some = max(2, -(-_MICROBATCHES_OF_CHOICE * costs.replica.pp // microbatches))
    found = plan_pipeline(batches[:some], _pipeline_costs(shape, costs))
    return found if some >= len(batches) else _plan_with(found.grouping, batches, shape, costs)


def _plan_with(
    grouping: Grouping, batches: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelinePlan:
    return plan_grouping(batches, grouping, _pipeline_costs(shape, costs))


def _pipeline_costs(shape: ShapeClass, costs: ReplicaCosts) -> PipelineCosts:
    seconds = costs.stages(shape)
    limit = (costs.depth(shape),) * costs.replica.pp
    return PipelineCosts(shape, lambda lengths: seconds, costs.permute(shape), limit)


def _placements(
    pipeline: PipelinePlan, batches: Sequence[RoundLengths], shape: ShapeClass
) -> tuple[tuple[PlacedSample, ...], ...]:
    """Where samples lie; every group has a turn in every round, so a task's turn tells its step."""
    turns = len(take_turns(batches, pipeline.groups)) // len(batches)
    placed = []
    for microbatch in pipeline.microbatches:
        steps = {slot: turn // turns for slot, turn in microbatch.batches().items()}
        placed.append(
            tuple(
                PlacedSample(
                    *(p.slot, steps[p.slot], p.sample, p.row, p.offset),
                    tokens=batches[steps[p.slot]][p.slot][p.sample],
                )
                for p in microbatch.placements(shape)
            )
        )
    return tuple(placed)


def _baselines(
    batches: Sequence[RoundLengths], together: PipelinePlan, shape: ShapeClass, costs: ReplicaCosts
) -> tuple[Baseline, ...]:
    """With 1F1B, under the clock that is better for them, and with this plan's shape class; the
    plan of one device has all tasks together itself."""
    apart = [
        _plan_with(
            Grouping(((slot,),), ((0,),)), [{slot: sizes[slot]} for sizes in batches], shape, costs
        )
        for slot in batches[0]
    ]
    if costs.replica.pp == 1:
        methods = {"one task at a time": apart}
    else:
        methods = {"1F1B per task": apart, "batch everything": [together]}
    return tuple(_baseline(name, plans, len(batches), costs) for name, plans in methods.items())


def _baseline(
    name: str, plans: Sequence[PipelinePlan], rounds: int, costs: ReplicaCosts
) -> Baseline:
    """Of plans that span one after another, each with updates of its own tasks."""
    seconds = sum(plan.simulation.makespan for plan in plans)
    busy = sum(float(np.sum(plan.simulation.busy())) for plan in plans)
    return Baseline(
        name=name,
        step_seconds=seconds / rounds + costs.update(),
        bubble_ratio=1 - busy / (costs.replica.pp * seconds),
        microbatches=sum(len(plan.microbatches) for plan in plans) / rounds,
    )
