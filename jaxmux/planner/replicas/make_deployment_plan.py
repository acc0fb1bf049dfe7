"""Plans several replicas that train the samples of the same tasks together (LobRA 4.3)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..costs.admission import Admission
from ..costs.cost_models import CostSource
from ..costs.replica_costs import ReplicaCosts
from ..devices import Deployment, Replica
from ..errors import PlanningError
from ..numbers import power_of_two
from ..packing.microbatches import RoundLengths
from ..packing.rows import ShapeClass
from ..packing.shape_choice import (
    Batches,
    PartOfBatches,
    ShapeRequest,
    at_most,
    choose_shape,
    longest_that_fits,
    require_longest_rows,
    sample_rounds,
    sampled_part,
)
from ..pipeline.groupings import Grouping
from ..pipeline.make_plan import (
    Plan,
    TaskLoad,
    plan_rounds,
    plan_with,
    require_rows,
    round_lengths,
)
from ..pipeline.pipeline_plan import grouping_of_share
from .cost_table import ShapeCosts
from .sample_dispatch import assign_samples

FORMAT = "jaxmux.deployment_plan/1"

# For each kind of replica, its costs and the shape class of its microbatches.
PricedReplicas = Mapping[Replica, tuple[ReplicaCosts, ShapeClass]]
# For each slot, the indices of samples in the task's global batch.
Share = Mapping[int, Sequence[int]]


class DeployedPlans(NamedTuple):
    """Plans of some rounds on several replicas. Predicted times leave out the exchange of gradients
    and adapters between replicas.

    Attributes:
      plans: the plan of each replica's first data shard, without baselines; None for a replica that
        trains no sample of these rounds.
      tokens: for each replica, the mean number of tokens in its share of a round, without padding.
    """

    deployment: Deployment
    plans: tuple[Plan | None, ...]
    tokens: tuple[float, ...]

    @property
    def round_seconds(self) -> float:
        """Predicted seconds of a round: those of the replica that is slowest on average."""
        return max(plan.prediction.round_seconds for plan in self.plans if plan)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for `json.dump`."""
        return {
            "format": FORMAT,
            "deployment": str(self.deployment),
            "round_seconds": self.round_seconds,
            "tokens": self.tokens,
            "plans": [plan and plan.to_json() for plan in self.plans],
        }


def make_deployment_plan(
    tasks: Sequence[TaskLoad],
    request: ShapeRequest,
    deployment: Deployment,
    costs: Mapping[Replica, ReplicaCosts],
    source: CostSource,
    rounds: int,
    shapes: Mapping[Replica, ShapeClass] | None = None,
) -> DeployedPlans:
    """Divides the samples of rounds among replicas, as training does, and plans each replica. Equal
    replicas have the same shape class, with rows for the longest samples for which they have
    memory. Raises PlanningError if there are no tasks, or no replica has memory for a task's
    samples."""
    if not tasks:
        raise PlanningError("nothing to plan: there are no tasks; one with one sample would do")
    if shapes is None:
        if request.row_len is not None:
            require_rows(tasks, request)
        shapes = {
            replica: _shape_of_share(tasks, request, costs[replica], deployment.devices)
            for replica in deployment.counts
        }
    row_len = max(shape.row_len for shape in shapes.values())
    require_longest_rows(deployment, row_len, {task.name: task.longest for task in tasks})
    lengths, priced = round_lengths(tasks, rounds), {r: (costs[r], shapes[r]) for r in shapes}
    grouping = grouping_of_deployment([task.batches for task in tasks], deployment, priced)
    plans: list[Plan | None] = []
    tokens = []
    for replica, shares in shares_of_rounds(lengths, deployment, priced):
        whole, samples = lengths_of(shares, lengths), first_shard(shares, replica)
        tokens.append(sum(sum(map(sum, batches.values())) for batches in whole) / rounds)
        planned, shape = lengths_of(samples, lengths), shapes[replica]
        plan = None
        if any(planned):
            plan = plan_rounds(tasks, planned, shape, grouping, costs[replica], source, samples)
        plans.append(plan)
    return DeployedPlans(deployment, tuple(plans), tuple(tokens))


def predicted_round_seconds(
    tasks: Sequence[Batches], deployment: Deployment, costs: PricedReplicas
) -> float:
    """Returns the predicted seconds of a round on several replicas: those of the replica that is
    slowest on average, without the exchange of gradients and adapters."""
    lengths, slowest = sample_rounds(tasks), 0.0
    grouping = grouping_of_deployment(tasks, deployment, costs)
    for replica, shares in shares_of_rounds(lengths, deployment, costs):
        replica_costs, shape = costs[replica]
        samples = first_shard(shares, replica)
        if filled := [batches for batches in lengths_of(samples, lengths) if batches]:
            seconds = plan_with(grouping, filled, shape, replica_costs).simulation.makespan
            seconds /= len(lengths) * sampled_part(tasks)
            slowest = max(slowest, seconds + replica_costs.update())
    return slowest


def grouping_of_deployment(
    tasks: Sequence[Batches], deployment: Deployment, costs: PricedReplicas
) -> Grouping:
    """Returns the grouping of the tasks on all replicas: the best one for the longest pipeline."""
    longest = max(deployment.replicas, key=lambda replica: replica.pp)
    priced, shape = costs[longest]
    return grouping_of_share(tasks, longest, shape, deployment.devices, schedule=priced.schedule)


def shares_of_rounds(
    rounds: Sequence[RoundLengths], deployment: Deployment, costs: PricedReplicas
) -> Iterator[tuple[Replica, list[Share]]]:
    """Yields each replica with the samples that it trains in each round."""
    replicas = deployment.replicas
    assigned = [assign_samples(replicas, ShapeCosts(costs), batches) for batches in rounds]
    for i, replica in enumerate(replicas):
        yield replica, [shares[i] for shares in assigned]


def first_shard(shares: Sequence[Share], replica: Replica) -> list[Share]:
    """Returns the samples of each round that the replica's first data shard trains."""
    return [
        {slot: samples[:: replica.shards] for slot, samples in share.items()} for share in shares
    ]


def lengths_of(samples: Sequence[Share], rounds: Sequence[RoundLengths]) -> list[RoundLengths]:
    return [
        {slot: [batches[slot][i] for i in indices] for slot, indices in share.items()}
        for share, batches in zip(samples, rounds, strict=True)
    ]


def _shape_of_share(
    tasks: Sequence[TaskLoad], request: ShapeRequest, costs: ReplicaCosts, devices: int
) -> ShapeClass:
    """The best shape class of a replica for the longest samples for which it has memory."""
    replica = costs.replica
    lengths = [length for task in tasks for length in task.in_rows]
    parts = replica.shards * round(devices / replica.devices)
    pools = {task.name: task.pool for task in tasks}

    def choose(longest: int) -> ShapeClass:
        batches = [PartOfBatches(task.batches, parts, longest) for task in tasks]
        rounds = [
            batches_by_slot
            for batches_by_slot in sample_rounds(batches)
            if any(batches_by_slot.values())
        ]
        kept = at_most(longest, lengths)
        return choose_shape(rounds or [{0: kept}], request, costs.microbatch, kept).shape

    def require(shape: ShapeClass) -> None:
        Admission(costs, shape, request.tokens, more_stages=False).require(pools)
        costs.require_full_pipeline(shape)

    longest, fixed = power_of_two(max(lengths)), request.row_len is not None
    return longest_that_fits(lengths, longest, choose, require, fixed)
