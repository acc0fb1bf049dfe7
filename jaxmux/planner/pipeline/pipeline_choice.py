"""The pipeline of tasks on a replica, and the methods with which it is compared."""

from collections.abc import Sequence

import numpy as np

from ..costs.replica_costs import ReplicaCosts
from ..packing.microbatches import RoundLengths
from ..packing.shape_class import ShapeClass
from .groupings import Grouping
from .pipeline_plan import PipelineCosts, PipelinePlan, one_htask, plan_pipeline
from .plan_value import Baseline


def plan_with(
    grouping: Grouping, rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> PipelinePlan:
    """Returns the pipeline of rounds on a replica.

    Args:
      grouping: the groups of tasks.
      rounds: for each round, the lengths of every task's global batch.
      shape: shape class of the microbatches.
      costs: costs of the replica, for the pool of all tasks.
    """
    seconds = costs.stages(shape)
    pipeline = PipelineCosts(shape, lambda lengths: seconds, costs.permute(shape))
    return plan_pipeline(rounds, grouping, pipeline)


def baselines(
    rounds: Sequence[RoundLengths], shape: ShapeClass, costs: ReplicaCosts
) -> tuple[Baseline, ...]:
    """Returns the predicted costs of the methods that a plan is compared with.

    They use 1F1B and the plan's shape class. On one device the plan itself trains all tasks
    together, so only one task at a time remains.

    Args:
      rounds: for each round, the lengths of every task's global batch.
      shape: shape class of the microbatches.
      costs: costs of the replica, for the pool of all tasks.
    """
    separate = []
    for slot in rounds[0]:
        own = [{slot: batches[slot]} for batches in rounds]
        separate.append(plan_with(one_htask([slot]), own, shape, costs))
    if costs.replica.pp == 1:
        methods = {"one task at a time": separate}
    else:
        together = plan_with(one_htask(sorted(rounds[0])), rounds, shape, costs)
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
