"""Makes a plan: shape class, hTasks, buckets, microbatches and schedule for tasks on a mesh."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .adapter_groups import take_turns
from .alignment import Round, choose_alignment
from .groupings import Grouping, candidate_groupings
from .mesh_costs import MeshCosts
from .pipeline import PipelinePlan, plan_pipeline
from .plan import Baseline, CostSource, PlacedSample, Plan, PlannedTask, Prediction
from .pool import Pool
from .schedules import validate
from .shape_class import MIN_CHUNK_LEN, PlanningError, ShapeClass, choose_shape_class

# The shape class is chosen by the first few rounds, the grouping by as many as have so many
# microbatches for every stage, at least two.
_ROUNDS_OF_SHAPE = 3
_MICROBATCHES_OF_CHOICE = 16
# When smaller microbatches are tried, and what step time, as a part of before, is worth a word.
_MANY_BUBBLES, _NOTABLE = 0.15, 0.95


class TaskLoad(NamedTuple):
    """What planning needs to know of a task.

    Attributes:
      name: of the task.
      pool: with one slot: what it needs alone.
      batch_size: samples of a global batch.
      steps: that it trains.
      lengths: stream lengths in tokens of all its samples.
      batches: those of the samples of its first global batches.
      held_out: those of its held-out samples; a row must hold them too.
    """

    name: str
    pool: Pool
    batch_size: int
    steps: int
    lengths: Sequence[int]
    batches: Sequence[Sequence[int]]
    held_out: Sequence[int] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest sample, held-out ones included."""
        return max((*self.lengths, *self.held_out))


class ShapeRequest(NamedTuple):
    """What is asked of the shape class.

    Attributes:
      tokens: N, of a microbatch; rounded up to whole rows and chunks.
      row_len, chunk_len: None for the best.
      least_chunk_len: shortest chunk that the kernels take.
    """

    tokens: int
    row_len: int | None = None
    chunk_len: int | None = None
    least_chunk_len: int = MIN_CHUNK_LEN


def shared_pool(tasks: Sequence[TaskLoad]) -> Pool:
    """The pool of all tasks: ranks are padded to the highest, every adapted linear is in it."""
    modules = dict.fromkeys(module for task in tasks for module in task.pool.modules or ())
    whole = any(task.pool.modules is None for task in tasks)
    optimizers = {task.pool.optimizer for task in tasks}
    return Pool(
        slots=len(tasks),
        rank=max(task.pool.rank for task in tasks),
        modules=None if whole else tuple(modules),
        dropout=any(task.pool.dropout for task in tasks),
        optimizer="adamw" if "adamw" in optimizers else min(optimizers),
    )


def make_plan(
    tasks: Sequence[TaskLoad],
    request: ShapeRequest,
    costs: MeshCosts,
    source: CostSource,
    rounds: int,
) -> Plan:
    """The plan of least predicted time.

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
    batches = [
        {slot: list(task.batches[k % len(task.batches)]) for slot, task in enumerate(tasks)}
        for k in range(rounds)
    ]
    shape = _choose_shape(tasks, batches, request, costs)
    _require_memory(tasks, shape, request, costs)
    pipeline, grouping = _choose_pipeline(batches, shape, costs)
    groups = pipeline.groups
    order = [grouping.groups.index(group) for group in groups]
    validate(pipeline.schedule)
    forward, backward = costs.stages(shape)
    in_flight = int(pipeline.simulation.peak_buffers.max())
    update = costs.update()
    return Plan(
        costs=source,
        backbone=costs.times.backbone.name,
        mesh=costs.mesh,
        tasks=tuple(_planned(task) for task in tasks),
        shape=shape,
        remat=costs.policies(shape),
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
            memory_bytes=costs.peak(shape, costs.policies(shape), in_flight),
        ),
        baselines=_baselines(batches, shape, costs),
    )


def plan_with_smaller_microbatches(
    plan: Plan, tasks: Sequence[TaskLoad], request: ShapeRequest, costs: MeshCosts
) -> Plan | None:
    """The fastest plan with N halved once or more, if it is notably faster.

    Smaller microbatches are more, which fill a pipeline better. Where it is full already, or there
    is none, nothing is tried.

    Args:
      plan: what `make_plan` made of all the rest.
    """
    best, tokens = plan, plan.shape.tokens // 2
    unit = max(plan.shape.row_len, plan.shape.chunk_len)
    while tokens >= unit and plan.prediction.bubble_ratio > _MANY_BUBBLES:
        smaller = make_plan(tasks, request._replace(tokens=tokens), costs, plan.costs, plan.rounds)
        best = min(best, smaller, key=lambda p: p.prediction.step_seconds)
        tokens //= 2
    is_notable = best.prediction.step_seconds < _NOTABLE * plan.prediction.step_seconds
    return best if is_notable else None


def _planned(task: TaskLoad) -> PlannedTask:
    lengths = task.lengths
    rank, sizes = task.pool.rank, (len(lengths), sum(lengths), max(lengths))
    return PlannedTask(task.name, rank, task.batch_size, task.steps, *sizes)


def _choose_shape(
    tasks: Sequence[TaskLoad], batches: Sequence[Round], request: ShapeRequest, costs: MeshCosts
) -> ShapeClass:
    lengths = [length for task in tasks for length in (*task.lengths, *task.held_out)]
    for task in tasks:
        if request.row_len is not None and task.longest > request.row_len:
            needed = 1 << (task.longest - 1).bit_length()
            raise PlanningError(
                f"task {task.name!r}: its longest sample has {task.longest} tokens, a row "
                f"holds row_len={request.row_len}; it would fit with row_len={needed} or "
                f"max_length={request.row_len}"
            )
    row_len, chunk_len = request.row_len, request.chunk_len
    if row_len is None and chunk_len is None:
        # A row must hold the longest sample, which the first rounds may lack.
        with_longest = [*batches[:_ROUNDS_OF_SHAPE], {0: [max(lengths)]}]
        best = choose_alignment(
            with_longest, request.tokens, costs.microbatch, request.least_chunk_len
        )
        row_len, chunk_len = best.shape.row_len, best.shape.chunk_len
    chunk_len = chunk_len or request.least_chunk_len
    return choose_shape_class(lengths, request.tokens, chunk_len, row_len)


def _require_memory(
    tasks: Sequence[TaskLoad], shape: ShapeClass, request: ShapeRequest, costs: MeshCosts
) -> None:
    for task in tasks:
        alone = dataclasses.replace(costs, pool=task.pool)
        try:
            alone.require(shape)
        except PlanningError as e:
            raise PlanningError(
                f"task {task.name!r} does not fit even alone on {costs.mesh}: {e}"
                + _shorter_rows(alone, shape, request)
            ) from None
    costs.require(shape)


def _shorter_rows(costs: MeshCosts, shape: ShapeClass, request: ShapeRequest) -> str:
    """The longest samples with which it would fit, where they are what makes it too large."""
    row_len = shape.row_len // 2
    while row_len >= MIN_CHUNK_LEN:
        rows = choose_shape_class([row_len], request.tokens, shape.chunk_len, row_len)
        if rows.tokens < shape.tokens and costs.depth(rows):
            return f" or max_length={row_len}"
        row_len //= 2
    return ""


def _choose_pipeline(
    batches: Sequence[Round], shape: ShapeClass, costs: MeshCosts
) -> tuple[PipelinePlan, Grouping]:
    """The grouping that is the fastest over some rounds, and the plan of all of them with it."""
    microbatches = max(1, sum(map(sum, batches[0].values())) // shape.tokens)
    some = max(2, -(-_MICROBATCHES_OF_CHOICE * costs.mesh.pp // microbatches))
    mean_pass = sum(costs.stages(shape)) / 2
    candidates = candidate_groupings(batches[0], shape, mean_pass.tolist())
    plan = partial(_plan_rounds, shape=shape, costs=costs)
    best = plan(batches[:some], groupings=[c.groups for c in candidates])
    chosen = next(c for c in candidates if set(c.groups) == set(best.groups))
    return plan(batches, groupings=[chosen.groups]), chosen


def _plan_rounds(
    batches: Sequence[Round], groupings: Sequence, shape: ShapeClass, costs: MeshCosts
) -> PipelinePlan:
    seconds = costs.stages(shape)
    limit = (costs.depth(shape),) * costs.mesh.pp
    permute = costs.permute(shape)
    return plan_pipeline(
        batches, shape, lambda lengths: seconds, permute, groupings, limit, solver_seconds=0
    )


def _placements(
    pipeline: PipelinePlan, batches: Sequence[Round], shape: ShapeClass
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
    batches: Sequence[Round], shape: ShapeClass, costs: MeshCosts
) -> tuple[Baseline, ...]:
    """Both with 1F1B, under the clock that is better for them, and with this plan's shape class."""
    slots = tuple(batches[0])
    plan = partial(_plan_rounds, shape=shape, costs=costs)
    together = [plan(batches, groupings=[(slots,)])]
    apart = [
        plan([{slot: sizes[slot]} for sizes in batches], groupings=[((slot,),)]) for slot in slots
    ]
    one_by_one = "1F1B per task" if costs.mesh.pp > 1 else "one task at a time"
    methods = {one_by_one: apart, "batch everything": together}
    return tuple(_baseline(name, plans, len(batches), costs) for name, plans in methods.items())


def _baseline(name: str, plans: Sequence[PipelinePlan], rounds: int, costs: MeshCosts) -> Baseline:
    """Of plans that run one after another, each with updates of its own tasks."""
    seconds = sum(plan.simulation.makespan for plan in plans)
    busy = sum(float(np.sum(plan.simulation.busy())) for plan in plans)
    return Baseline(
        name=name,
        step_seconds=seconds / rounds + costs.update(),
        bubble_ratio=1 - busy / (costs.mesh.pp * seconds),
        microbatches=sum(len(plan.microbatches) for plan in plans) / rounds,
    )
