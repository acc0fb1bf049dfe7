"""Plans which replicas to deploy: how many of each parallel configuration (LobRA 4.2, Eq. 2)."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError
from .cost_table import (
    CostTable,
    Replica,
    SequenceCosts,
    drop_dominated,
    require_service,
    tabulate_costs,
)
from .deployment_search import DeploymentProblem, best_like_replicas, search_deployment
from .length_bins import LengthBins


class DeploymentPlan(NamedTuple):
    """The replicas to deploy, and the expected time of a round with them.

    A round is one global batch of every task; its sequences are the samples. A *configuration* is a
    `Replica` value, that is, pipeline stages and tensor-parallel devices of each stage. Several
    equal replicas of a configuration can be deployed.

    Attributes:
      replicas: for each deployed configuration, its number of replicas (p_i in LobRA), at least 1.
      round_seconds: expected seconds of a round, the time of the slowest configuration. The
        replicas of a configuration share its sequences evenly, in fractions if necessary. But a
        configuration takes at least as long as a round with one whole sequence, the slowest of its
        sequences.
      bound: lower bound in seconds on the `round_seconds` of any choice of replicas.
      dominated: configurations that were left out of the search. It maps each of them to another
        configuration that is at least as good in devices, memory and time.
    """

    replicas: dict[Replica, int]
    round_seconds: float
    bound: float
    dominated: dict[Replica, Replica]

    @property
    def devices(self) -> int:
        """Number of devices of all replicas together."""
        return sum(configuration.devices * count for configuration, count in self.replicas.items())

    @property
    def gap(self) -> float:
        """Most by which `round_seconds` exceeds the least possible, as a fraction; 0.01 is 1%."""
        return self.round_seconds / self.bound - 1


class Replan(NamedTuple):
    """The decision of `replan` about the replicas after tasks arrive or leave.

    Attributes:
      deployment: the deployment to continue with: a new one if `switch` is true, otherwise the
        current replicas. Its `round_seconds` are those of the new tasks.
      switch: whether to change the replicas.
      saved_seconds: seconds that the change saves over the horizon, less the time of the change
        itself; negative if the change does not pay. It is infinite if the current replicas cannot
        serve the new tasks or need more devices than there are.
    """

    deployment: DeploymentPlan
    switch: bool
    saved_seconds: float


def candidate_replicas(
    devices: int, tp: Sequence[int] = (1, 2, 4, 8), pp: Sequence[int] = (1, 2, 4, 8)
) -> list[Replica]:
    """Returns replica configurations to choose from, for `plan_replicas` and `choose_replicas`.

    They are all combinations of a tensor-parallel degree and a number of pipeline stages whose
    product is at most `devices`.

    Args:
      devices: the most devices that one replica may have.
      tp: tensor-parallel degrees to combine.
      pp: numbers of pipeline stages to combine.
    """
    pairs = (Replica.uniform(pp=stages, tp=degree) for degree in tp for stages in pp)
    return [configuration for configuration in pairs if configuration.devices <= devices]


def plan_replicas(
    devices: int,
    configurations: Sequence[Replica],
    bins: LengthBins,
    model: SequenceCosts,
    sampled_rounds: int = 1,
    gap: float = 1e-3,
    time_limit: float = 60.0,
) -> DeploymentPlan:
    """Chooses the replicas with which an expected round takes the least time (LobRA Eq. 2).

    A round is one global batch of every task; its sequences are the samples. A configuration is a
    `Replica` value: pipeline stages and tensor-parallel devices of each stage. Replicas of
    different sizes pay where a few long sequences need much memory and most sequences are short.
    The function treats the sequences of an expected round as divisible. `choose_replicas` also
    simulates rounds of whole sequences and may find better replicas.

    Args:
      devices: N, the most devices of all replicas together.
      configurations: configurations to choose from, for example from `candidate_replicas`. Those
        with more than N devices are never chosen; they only improve error messages.
      bins: the sequences of a sample of rounds, sorted by length, from `choose_length_bins`.
      model: times and memory of a replica, for example `ModelledSequenceCosts`.
      sampled_rounds: number of rounds in the sample (LobRA takes 100). An expected round has
        `bins.counts[j] / sampled_rounds` sequences of length bin j.
      gap: the search stops at a plan that is at most this fraction slower than the best; 1e-3 is
        0.1%.
      time_limit: seconds of computation after which the best plan so far is returned.

    Returns:
      The deployment. Devices that would be left idle are used for further replicas of the chosen
      configurations, which makes no round slower.

    Raises:
      PlanningError: there are no sequences or no configurations, or the sequences of a bin fit no
        configuration of at most `devices` devices.
    """
    costs, demand = _costs_and_demand(configurations, bins, sampled_rounds, model)
    require_service(costs, devices)
    costs, dominated = drop_dominated(costs.of(np.flatnonzero(costs.devices <= devices)))
    most = devices // costs.devices
    problem = DeploymentProblem(costs, demand, devices, np.zeros_like(most), most)
    found = search_deployment(problem, best_like_replicas(problem), gap, time_limit)
    number = _use_idle_devices(costs, found.replicas, devices)
    replicas = {costs.configurations[i]: int(number[i]) for i in np.flatnonzero(number)}
    return DeploymentPlan(replicas, found.round_seconds, found.bound, dominated)


def evaluate_replicas(
    replicas: Mapping[Replica, int],
    bins: LengthBins,
    model: SequenceCosts,
    sampled_rounds: int = 1,
    gap: float = 1e-3,
    time_limit: float = 60.0,
) -> DeploymentPlan:
    """Returns given replicas with the expected time of a round; it does not change the replicas.

    Args:
      replicas: for each configuration, its number of replicas; 0 is allowed.
      bins, model, sampled_rounds, gap, time_limit: as for `plan_replicas`. `gap` and `time_limit`
        are those of the search for the best division of the sequences.

    Returns:
      The replicas. `bound` holds for these replicas only.

    Raises:
      PlanningError: no replica has the memory for some bin.
    """
    deployed = {configuration: number for configuration, number in replicas.items() if number}
    costs, demand = _costs_and_demand(list(deployed), bins, sampled_rounds, model)
    number = np.array(list(deployed.values()), np.int64)
    devices = int(costs.devices @ number)
    require_service(costs, devices)
    problem = DeploymentProblem(costs, demand, devices, number, number)
    found = search_deployment(problem, number, gap, time_limit)
    return DeploymentPlan(deployed, found.round_seconds, found.bound, {})


def replan(
    current: Mapping[Replica, int],
    devices: int,
    configurations: Sequence[Replica],
    bins: LengthBins,
    model: SequenceCosts,
    *,
    switch_seconds: float,
    horizon_rounds: int,
    sampled_rounds: int = 1,
    gap: float = 1e-3,
    time_limit: float = 60.0,
) -> Replan:
    """Decides whether to change the deployed replicas after tasks arrive or leave.

    It plans replicas for the new set of tasks with `plan_replicas`. It recommends the change if
    this saves more seconds over the next rounds (global batches of every task) than the change
    itself takes, or if the current replicas cannot train the new tasks.

    Args:
      current: the deployed replicas: for each configuration (`Replica` value), its number of
        replicas.
      devices: N, the most devices of all replicas together.
      configurations: configurations to choose from, for example from `candidate_replicas`.
      bins: the samples of a few rounds of the new tasks, sorted by length, from
        `choose_length_bins`.
      model: times and memory of a replica, for example `ModelledSequenceCosts`.
      switch_seconds: seconds that changing the replicas takes (less than 3 minutes in LobRA).
      horizon_rounds: number of rounds for which the tasks are expected to stay as they are.
      sampled_rounds: number of rounds whose samples `bins` holds together.
      gap: each search stops at a plan that is at most this fraction slower than the best; 1e-3 is
        0.1%.
      time_limit: seconds of computation after which each search returns its best plan so far.

    Returns:
      The decision, a `Replan` with three fields. `deployment` is the deployment to continue with: a
      new one, or the current replicas with the expected time of the new tasks. `switch` tells
      whether to change the replicas. `saved_seconds` are the seconds that the change saves over the
      horizon, less `switch_seconds`; negative if the change does not pay, and infinite if the
      current replicas cannot serve the new tasks or need more than `devices` devices.

    Raises:
      PlanningError: there are no sequences or no configurations, or the new tasks have a sequence
        that fits no configuration of at most `devices` devices.
    """
    given = (bins, model, sampled_rounds, gap, time_limit)
    best = plan_replicas(devices, configurations, *given)
    try:
        kept = evaluate_replicas(current, *given)
    except PlanningError:
        return Replan(best, True, math.inf)
    if kept.devices > devices:
        return Replan(best, True, math.inf)
    saved = (kept.round_seconds - best.round_seconds) * horizon_rounds - switch_seconds
    if saved > 0 and best.replicas != kept.replicas:
        return Replan(best, True, saved)
    kept = kept._replace(bound=min(best.bound, kept.round_seconds), dominated=best.dominated)
    return Replan(kept, False, saved)


def _use_idle_devices(costs: CostTable, number: np.ndarray, devices: int) -> np.ndarray:
    """Adds replicas of deployed configurations, largest first; they make no round slower."""
    number = number.copy()
    for i in sorted(np.flatnonzero(number), key=lambda i: -costs.devices[i]):
        number[i] += (devices - costs.devices @ number) // costs.devices[i]
    return number


def _costs_and_demand(
    configurations: Sequence[Replica],
    bins: LengthBins,
    sampled_rounds: int,
    model: SequenceCosts,
) -> tuple[CostTable, np.ndarray]:
    """The costs of all bins that have sequences, and B f_j, the expected sequences of each."""
    used = [j for j, count in enumerate(bins.counts) if count]
    lengths = [bins.boundaries[j] for j in used]
    demand = np.array([bins.counts[j] for j in used]) / sampled_rounds
    return tabulate_costs(configurations, lengths, model), demand
