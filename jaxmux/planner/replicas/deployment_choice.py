"""Chooses replicas by steps as they come: Eq. 2's, unless like ones do better on whole
sequences."""

from collections.abc import Sequence

from .cost_table import Replica, SequenceCosts
from .deployment_plan import DeploymentPlan, evaluate_replicas, plan_replicas
from .length_bins import LengthBins
from .like_replicas import measure


def choose_replicas(
    gpus: int,
    configurations: Sequence[Replica],
    buckets: LengthBins,
    steps: Sequence[LengthBins],
    model: SequenceCosts,
    batches: int = 1,
    gap: float = 1e-3,
    seconds: float = 60.0,
) -> DeploymentPlan:
    """The deployment of Eq. 2, or one of like replicas if it takes less for the given steps.

    Eq. 2 divides expected sequences as it likes. Where a step has only a few long ones, which are
    whole, it may choose replicas among which they cannot be evened out.

    Args:
      steps: the sequences of some steps each, of the sample.

    The other arguments, and errors, are those of `plan_replicas`; the bound is Eq. 2's.
    """
    best = plan_replicas(gpus, configurations, buckets, model, batches, gap, seconds)
    choices = [best.replicas]
    longest = max(buckets.boundaries)
    for configuration in configurations:
        if configuration.devices <= gpus and longest <= model.longest(configuration):
            choices.append({configuration: gpus // configuration.devices})
    measured = [measure(replicas, gpus, steps, model).gpu_seconds for replicas in choices]
    chosen = choices[measured.index(min(measured))]
    if chosen == best.replicas:
        return best
    like = evaluate_replicas(chosen, buckets, model, batches, gap, seconds)
    return like._replace(bound=min(best.bound, like.seconds), dominated=best.dominated)
