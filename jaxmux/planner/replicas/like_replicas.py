"""The plans that LobRA is compared with (5.1): replicas that are all alike.

*Task-Fused* trains all tasks on the same like replicas; *Task-Sequential* trains one task after
another, each on the like replicas that suit it best. Their time is simulated round by round.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .cost_table import Replica, SequenceCosts, require_service, tabulate_costs
from .deployment_search import simulate_rounds
from .length_bins import LengthBins


class LikeReplicas(NamedTuple):
    """Replicas of one configuration, and the time of simulated rounds with them.

    Attributes:
      replicas: the configuration, with the number of replicas.
      device_seconds: mean over the rounds of the number of devices, idle ones included, times the
        seconds of the slowest replica.
    """

    replicas: dict[Replica, int]
    device_seconds: float


def simulate_uniform_dispatch(
    configuration: Replica,
    devices: int,
    rounds: Sequence[LengthBins],
    model: SequenceCosts,
    rng: np.random.Generator,
) -> float:
    """Returns the mean device seconds of rounds of which every replica gets as many sequences.

    Args:
      configuration: configuration of all replicas, as many as `devices` allows.
      rng: shuffles the sequences.

    The other arguments are those of `simulate_rounds`.
    """
    replicas = devices // configuration.devices
    seconds = 0.0
    for bins in rounds:
        costs = tabulate_costs([configuration], bins.boundaries, model)
        sequences = np.repeat(costs.per_sequence[0], bins.counts)
        rng.shuffle(sequences)
        busiest = max(sequences[replica::replicas].sum() for replica in range(replicas))
        seconds += float(costs.constant[0] + busiest)
    return devices * seconds / len(rounds)


def plan_fused(
    devices: int,
    configurations: Sequence[Replica],
    rounds: Sequence[LengthBins],
    model: SequenceCosts,
    rng: np.random.Generator | None = None,
) -> LikeReplicas:
    """Returns the best Task-Fused plan: like replicas that all serve the longest sequence.

    Every configuration is simulated with the rounds themselves, so no other one would be faster.

    Args:
      devices: number of devices, divided into as many replicas as possible.
      configurations: configurations to choose from.
      rounds: for each round, the sequences of all tasks.
      model: times and memory of a replica.
      rng: shuffles the sequences for uniform dispatch, as in LobRA's comparison; None for the
        balanced dispatch of `dispatch_samples`.

    Raises:
      PlanningError: no configuration of at most `devices` devices serves the longest sequence.
    """
    longest = max(length for bins in rounds for length in bins.boundaries)
    require_service(tabulate_costs(configurations, [longest], model), devices)
    plans = []
    for configuration in configurations:
        if configuration.devices <= devices and longest <= model.longest(configuration):
            replicas = {configuration: devices // configuration.devices}
            if rng is None:
                seconds = simulate_rounds(replicas, devices, rounds, model)
            else:
                seconds = simulate_uniform_dispatch(configuration, devices, rounds, model, rng)
            plans.append(LikeReplicas(replicas, seconds))
    return min(plans, key=lambda plan: plan.device_seconds)


def plan_sequential(
    devices: int,
    configurations: Sequence[Replica],
    rounds: Mapping[str, Sequence[LengthBins]],
    model: SequenceCosts,
    rng: np.random.Generator | None = None,
) -> dict[str, LikeReplicas]:
    """Returns the best Task-Sequential plan: for each task, the like replicas that suit it best.

    A round of all tasks takes the sum of their device seconds.

    Args:
      rounds: by task, the sequences of its global batch in each round.

    The other arguments, and errors, are those of `plan_fused`.
    """
    return {
        task: plan_fused(devices, configurations, lengths, model, rng)
        for task, lengths in rounds.items()
    }
