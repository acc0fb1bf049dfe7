"""The plans that LobRA is compared with (5.1): all replicas alike, for all tasks or for each."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .cost_table import Replica, SequenceCosts, require_service, tabulate_costs
from .length_bins import LengthBins
from .sample_dispatch import dispatch_samples


class MeasuredPlan(NamedTuple):
    """Replicas, and what simulated steps take with them.

    Attributes:
      replicas: by configuration, how many.
      gpu_seconds: of a step, mean over steps: all GPUs of the mesh times the slowest replica.
    """

    replicas: dict[Replica, int]
    gpu_seconds: float


def measure(
    replicas: Mapping[Replica, int],
    gpus: int,
    steps: Sequence[LengthBins],
    model: SequenceCosts,
) -> MeasuredPlan:
    """Dispatches every step to the replicas of a mesh of `gpus` GPUs."""
    seconds = sum(dispatch_samples(replicas, buckets, model).seconds for buckets in steps)
    return MeasuredPlan(dict(replicas), gpus * seconds / len(steps))


def plan_fused(
    gpus: int,
    configurations: Sequence[Replica],
    steps: Sequence[LengthBins],
    model: SequenceCosts,
    rng: np.random.Generator | None = None,
) -> MeasuredPlan:
    """Task-Fused: the batches of all tasks as one, on replicas that all serve the longest sequence.

    Every configuration is tried on the steps themselves, so that none would have done better.
    LobRA's competitors dispatch uniformly; so does this with `rng`. Without, like replicas have the
    balanced dispatch, too.

    Args:
      gpus: of the mesh, shared out to as many replicas as it has room for.
      configurations: to choose from.
      steps: the sequences of each simulated step.
      model: times and memory of a replica.
      rng: shuffles the sequences of uniform dispatching; None for balanced dispatching.

    Raises:
      PlanningError: no configuration on `gpus` GPUs serves the longest sequence.
    """
    longest = max(length for buckets in steps for length in buckets.boundaries)
    costs = tabulate_costs(configurations, [longest], model)
    require_service(costs, gpus)
    plans = [
        measure({configuration: gpus // configuration.devices}, gpus, steps, model)
        if rng is None
        else measure_uniform(configuration, gpus, steps, model, rng)
        for configuration in configurations
        if configuration.devices <= gpus and longest <= model.longest(configuration)
    ]
    return min(plans, key=lambda plan: plan.gpu_seconds)


def plan_sequential(
    gpus: int,
    configurations: Sequence[Replica],
    steps: Mapping[str, Sequence[LengthBins]],
    model: SequenceCosts,
    rng: np.random.Generator | None = None,
) -> dict[str, MeasuredPlan]:
    """Task-Sequential: one task after the other, each with the replicas that suit it best.

    A step of all tasks takes the sum of their GPU seconds. Arguments are as of `plan_fused`, with
    the steps by task.
    """
    return {task: plan_fused(gpus, configurations, own, model, rng) for task, own in steps.items()}


def measure_uniform(
    configuration: Replica,
    gpus: int,
    steps: Sequence[LengthBins],
    model: SequenceCosts,
    rng: np.random.Generator,
) -> MeasuredPlan:
    """Deals every step, shuffled, to like replicas in equal numbers, whatever the lengths."""
    replicas = gpus // configuration.devices
    seconds = 0.0
    for buckets in steps:
        costs = tabulate_costs([configuration], buckets.boundaries, model)
        sequences = np.repeat(costs.per_sequence[0], buckets.counts)
        rng.shuffle(sequences)
        busiest = max(sequences[replica::replicas].sum() for replica in range(replicas))
        seconds += float(costs.constant[0] + busiest)
    return MeasuredPlan({configuration: replicas}, gpus * seconds / len(steps))
