"""Chooses between the deployment of Eq. 2 and like replicas by simulating whole sequences."""

from collections.abc import Mapping, Sequence

from .cost_table import Replica, SequenceCosts
from .deployment_plan import DeploymentPlan, evaluate_replicas, plan_replicas
from .length_bins import LengthBins
from .sample_dispatch import dispatch_samples


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
    """Chooses replicas by simulating given rounds: those of `plan_replicas`, or equal replicas.

    A round is one global batch of every task; its sequences are the samples. A configuration is a
    `Replica` value: pipeline stages and tensor-parallel devices of each stage. `plan_replicas`
    divides the sequences of an expected round into fractions. In a real round with few long
    sequences, its replicas may not be able to share them evenly. The alternatives are, for each
    configuration that has memory for the longest sequence, as many equal replicas as the devices
    allow. The function returns the replicas with the least mean time over `rounds`.

    Args:
      devices: N, the most devices of all replicas together.
      configurations: configurations to choose from, for example from `candidate_replicas`.
      bins: the sequences of a sample of rounds, sorted by length, from `choose_length_bins`.
      rounds: for each round to simulate, its sequences sorted into length bins, for example those
        of each round of the sample; at least one round.
      model: times and memory of a replica, for example `ModelledSequenceCosts`.
      sampled_rounds: number of rounds in the sample `bins`. An expected round has `bins.counts[j] /
        sampled_rounds` sequences of length bin j.
      gap: each search stops at a plan that is at most this fraction slower than the best; 1e-3 is
        0.1%.
      time_limit: seconds of computation after which each search returns its best plan so far.

    Returns:
      The deployment. Its `round_seconds` and `bound` are those of an expected round with divisible
      sequences, as from `plan_replicas`, and not the simulated times.

    Raises:
      PlanningError: there are no sequences or no configurations, or the sequences of a bin fit no
        configuration of at most `devices` devices.
    """
    best = plan_replicas(devices, configurations, bins, model, sampled_rounds, gap, time_limit)
    choices = [best.replicas]
    longest = max(bins.boundaries)
    for configuration in configurations:
        if configuration.devices <= devices and longest <= model.longest(configuration):
            choices.append({configuration: devices // configuration.devices})
    chosen = min(choices, key=lambda replicas: simulate_rounds(replicas, devices, rounds, model))
    if chosen == best.replicas:
        return best
    like = evaluate_replicas(chosen, bins, model, sampled_rounds, gap, time_limit)
    return like._replace(bound=min(best.bound, like.round_seconds), dominated=best.dominated)


def simulate_rounds(
    replicas: Mapping[Replica, int],
    devices: int,
    rounds: Sequence[LengthBins],
    model: SequenceCosts,
) -> float:
    """Returns the mean device seconds of rounds that `dispatch_samples` divides among replicas.

    The device seconds of a round are the number of devices times the seconds of the slowest
    replica.

    Args:
      replicas: for each configuration, its number of replicas.
      devices: number of devices, including those that no replica uses.
      rounds: for each round, its sequences in length bins.
      model: times and memory of a replica.

    Raises:
      PlanningError: no replica has the memory for some bin.
    """
    seconds = sum(dispatch_samples(replicas, bins, model).round_seconds for bins in rounds)
    return devices * seconds / len(rounds)
