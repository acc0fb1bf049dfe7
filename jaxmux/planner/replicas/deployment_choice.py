"""Chooses between the deployment of Eq. 2 and like replicas by simulating whole sequences."""

from collections.abc import Sequence

from .cost_table import Replica, SequenceCosts
from .deployment_plan import DeploymentPlan, evaluate_replicas, plan_replicas
from .length_bins import LengthBins
from .like_replicas import simulate_rounds


def choose_replicas(
    devices: int,
    configurations: Sequence[Replica],
    bins: LengthBins,
    rounds: Sequence[LengthBins],
    model: SequenceCosts,
    sampled_rounds: int = 1,
    gap: float = 1e-3,
    time_limit: float = 60.0,
) -> DeploymentPlan:
    """Returns the deployment of Eq. 2, or like replicas if they are faster in the given rounds.

    Eq. 2 divides expected sequences into fractions. Where a round has only a few long sequences,
    which are whole, its replicas may not be able to share them evenly.

    Args:
      rounds: the sequences of some rounds of the sample, each by itself.

    Returns:
      The deployment; its bound is Eq. 2's.

    The other arguments, and errors, are those of `plan_replicas`.
    """
    best = plan_replicas(devices, configurations, bins, model, sampled_rounds, gap, time_limit)
    choices = [best.replicas]
    longest = max(bins.boundaries)
    for configuration in configurations:
        if configuration.devices <= devices and longest <= model.longest(configuration):
            choices.append({configuration: devices // configuration.devices})
    simulated = [
        simulate_rounds(replicas, devices, rounds, model).device_seconds for replicas in choices
    ]
    chosen = choices[simulated.index(min(simulated))]
    if chosen == best.replicas:
        return best
    like = evaluate_replicas(chosen, bins, model, sampled_rounds, gap, time_limit)
    return like._replace(bound=min(best.bound, like.round_seconds), dominated=best.dominated)
