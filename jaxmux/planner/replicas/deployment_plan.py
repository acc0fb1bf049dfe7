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
    """Replicas to deploy, and the expected time of a round with them.

    Attributes:
      replicas: p_i, by configuration the number of replicas, at least 1 each.
      round_seconds: time of a round with the expected sequences. It is the time of the slowest
        configuration, whose replicas share its sequences evenly, but at least the time of its
        slowest sequence alone.
      bound: no plan takes fewer seconds. For given replicas, no dispatch to them does.
      dominated: by configuration that was left out beforehand, one that is better or equal in every
        respect.
    """

    replicas: dict[Replica, int]
    round_seconds: float
    bound: float
    dominated: dict[Replica, Replica]

    @property
    def devices(self) -> int:
        """Number of devices of all replicas."""
        return sum(configuration.devices * count for configuration, count in self.replicas.items())

    @property
    def gap(self) -> float:
        """Bound on how much slower this is than the best plan; 0.01 is 1%."""
        return self.round_seconds / self.bound - 1


class Replan(NamedTuple):
    """A decision about the replicas after tasks arrive or leave.

    Attributes:
      deployment: the deployment to continue with; its `round_seconds` are those of the new tasks.
      switch: whether it differs from the current one.
      saved_seconds: seconds that the switch saves over the horizon, less the time of the switch
        itself; infinite if the current replicas cannot serve the new tasks.
    """

    deployment: DeploymentPlan
    switch: bool
    saved_seconds: float


def candidate_replicas(
    devices: int, tp: Sequence[int] = (1, 2, 4, 8), pp: Sequence[int] = (1, 2, 4, 8)
) -> list[Replica]:
    """Returns every combination of tensor-parallel degree and pipeline stages on few devices.

    Args:
      devices: most devices of a replica.
      tp: tensor-parallel degrees.
      pp: numbers of pipeline stages.
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
    """Returns the deployment with which a round is expected to take the least time (Eq. 2).

    Args:
      devices: N, most devices of all replicas together.
      configurations: configurations to choose from. Those with more devices than there are make no
        difference except to error messages.
      bins: the sequences of a sample of rounds of all tasks.
      model: times and memory of a replica.
      sampled_rounds: number of rounds in the sample (LobRA takes 100). A round is expected to have
        `bins.counts[j] / sampled_rounds` sequences of bin j.
      gap: fraction above the best plan at which the search may stop.
      time_limit: seconds after which the best plan so far is returned.

    Raises:
      PlanningError: a bin fits no configuration of at most `devices` devices.
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
    """Returns the given replicas with the expected time of a round.

    The other arguments are those of `plan_replicas`.

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
    """Decides whether other replicas save more time than it takes to switch to them.

    Args:
      current: by configuration, the number of deployed replicas.
      switch_seconds: time to change the replicas (less than 3 minutes in LobRA).
      horizon_rounds: number of rounds for which the tasks are expected to stay the same.

    The other arguments, and errors, are those of `plan_replicas`.
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
