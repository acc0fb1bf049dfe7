"""Chooses the fastest pipeline of a replica: its grouping and how much its layers recompute."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..costs.replica_costs import ReplicaCosts
from ..packing.microbatches import RoundLengths
from ..packing.shape_class import ShapeClass
from .groupings import Grouping
from .pipeline_plan import PipelineCosts, PipelinePlan, plan_grouping, plan_pipeline
from .plan_value import Baseline

# The grouping is chosen with as many rounds as have this many microbatches per stage, with at least
# two.
_MICROBATCHES_PER_STAGE = 16


class PipelineChoice(NamedTuple):
    """The fastest pipeline that was found, and the one with all tasks in one hTask.

    Attributes:
      best: the fastest pipeline.
      together: the pipeline with all tasks in one hTask.
      costs: the costs with which `best` was planned; they tell how many microbatches are in flight
        and how much the layers recompute for that.
    """

    best: PipelinePlan
    together: PipelinePlan
    costs: ReplicaCosts


def choose_pipeline(
    rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelineChoice:
    """Returns the pipeline of least makespan.

    On one device all tasks are one hTask. On several stages the candidates are that grouping and
    the best other one, once with the costs as they are and once with room for more microbatches.

    Args:
      rounds: for each round, the lengths of every task's global batch.
      shape: shape class of the microbatches.
      costs: costs of the replica, for the pool of all tasks.
    """
    together = _plan_with(one_htask(rounds), rounds, shape, costs)
    found = [(together, costs)]
    if costs.replica.pp > 1:
        found += [(_choose_grouping(rounds, shape, c), c) for c in _depths(shape, costs)]
    best, costs = min(found, key=lambda pair: pair[0].simulation.makespan)
    return PipelineChoice(best, together, costs)


def one_htask(rounds: Sequence[RoundLengths]) -> Grouping:
    """Returns the grouping in which all tasks are one hTask."""
    return Grouping((tuple(rounds[0]),), ((0,),))


def baselines(
    rounds: Sequence[RoundLengths], together: PipelinePlan, shape: ShapeClass, costs: ReplicaCosts
) -> tuple[Baseline, ...]:
    """Returns the predicted costs of the methods that a plan is compared with.

    They use 1F1B, the faster tick rule and the plan's shape class. On one device the plan itself
    trains all tasks together, so only one task at a time remains.
    """
    separate = []
    for slot in rounds[0]:
        own = [{slot: batches[slot]} for batches in rounds]
        separate.append(_plan_with(one_htask(own), own, shape, costs))
    if costs.replica.pp == 1:
        methods = {"one task at a time": separate}
    else:
        methods = {"1F1B per task": separate, "batch everything": [together]}
    return tuple(_baseline(name, plans, len(rounds), costs) for name, plans in methods.items())


def _baseline(
    name: str, plans: Sequence[PipelinePlan], rounds: int, costs: ReplicaCosts
) -> Baseline:
    """The costs of plans that run one after another, each with the updates of its own tasks."""
    seconds = sum(plan.simulation.makespan for plan in plans)
    busy = sum(float(np.sum(plan.simulation.busy())) for plan in plans)
    return Baseline(
        name=name,
        round_seconds=seconds / rounds + costs.update(),
        bubble_ratio=1 - busy / (costs.replica.pp * seconds),
        microbatches=sum(len(plan.microbatches) for plan in plans) / rounds,
    )


def _depths(shape: ShapeClass, costs: ReplicaCosts) -> list[ReplicaCosts]:
    """The costs as they are, and with room for all microbatches that the pipeline has use for.

    The second are left out if they need no more recomputation. Where memory is scarce, either may
    be faster.
    """
    deep = dataclasses.replace(costs, in_flight=costs.most_in_flight)
    return [costs] if deep.policies(shape) == costs.policies(shape) else [costs, deep]


def _choose_grouping(
    rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelinePlan:
    """The plan of all rounds with the grouping that is the fastest for some of them."""
    microbatches = max(1, sum(map(sum, rounds[0].values())) // shape.tokens)
    some = max(2, -(-_MICROBATCHES_PER_STAGE * costs.replica.pp // microbatches))
    found = plan_pipeline(rounds[:some], _pipeline_costs(shape, costs))
    return found if some >= len(rounds) else _plan_with(found.grouping, rounds, shape, costs)


def _plan_with(
    grouping: Grouping, rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelinePlan:
    return plan_grouping(rounds, grouping, _pipeline_costs(shape, costs))


def _pipeline_costs(shape: ShapeClass, costs: ReplicaCosts) -> PipelineCosts:
    seconds = costs.stages(shape)
    limit = (costs.depth(shape),) * costs.replica.pp
    return PipelineCosts(shape, lambda lengths: seconds, costs.permute(shape), limit)
