"""Searches for the numbers of replicas with which a round takes the least time (LobRA 4.2, Eq.
2)."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ..errors import PlanningError
from .cost_table import (
    CostTable,
    Replica,
    SequenceCosts,
    drop_dominated,
    require_service,
    tabulate_costs,
)
from .length_bins import LengthBins
from .sample_dispatch import dispatch_greedily, dispatch_samples

# The bisection starts between a lower bound on all plans and this multiple of the bound (LobRA's
# filter). It goes higher only if there is no plan in this interval.
_FILTER = 1.15
# One program gets at most this fraction of the time limit, so that a hard program does not end the
# search.
_SHARE = 0.1
# scipy's status of a program that has no solution.
_INFEASIBLE = 2


class DeploymentProblem(NamedTuple):
    """LobRA Eq. 2 for S configurations and R length bins. `demand`, float64 [R], is B f_j, the
    expected number of sequences of each bin in a round. The number of replicas of each
    configuration is between `least` and `most`, int64 [S]."""

    costs: CostTable
    demand: np.ndarray
    devices: int
    least: np.ndarray
    most: np.ndarray


class FoundDeployment(NamedTuple):
    """The best numbers of replicas p_i that a search found, int64 [S]. No deployment within the
    problem's limits takes fewer seconds than `bound`."""

    replicas: np.ndarray
    round_seconds: float
    bound: float


def search_deployment(
    problem: DeploymentProblem, start: np.ndarray, gap: float, time_limit: float
) -> FoundDeployment:
    """Bisects over the time of a round, from the replicas `start`, which serve every bin. Stops
    when the time is within the fraction `gap` of the bound, or after `time_limit` seconds."""
    costs, demand = problem.costs, problem.demand
    deadline = time.monotonic() + time_limit
    deployed = np.flatnonzero(start)
    counts = np.zeros(costs.per_sequence.shape)
    whole = np.ceil(demand).astype(np.int64)
    counts[deployed] = dispatch_greedily(costs.of(deployed), start[deployed], whole)
    best = FoundDeployment(start, _round_seconds(costs, start, counts), _bound(problem))
    low = best.bound
    while best.round_seconds > (1 + gap) * low and (left := deadline - time.monotonic()) > 0:
        target = min(_FILTER * low, (low + best.round_seconds) / 2)
        answer = _plan_within(target, problem, min(left, _SHARE * time_limit))
        if answer.plan is not None:
            replicas, counts = answer.plan
            reached = _round_seconds(costs, replicas, counts)
            best = best._replace(replicas=replicas, round_seconds=min(reached, best.round_seconds))
        else:
            low = target
            if answer.infeasible:
                best = best._replace(bound=target)
    return best._replace(bound=min(best.bound, best.round_seconds))


def best_like_replicas(problem: DeploymentProblem) -> np.ndarray:
    """Returns the best deployment of a single configuration, int64 [S]."""
    costs = problem.costs
    even = costs.per_sequence @ problem.demand / problem.most
    seconds = costs.constant + np.maximum(even, costs.per_sequence.max(axis=1))
    return np.where(np.arange(len(seconds)) == seconds.argmin(), problem.most, 0)


class _Answer(NamedTuple):
    """A solution if one was found: replicas int64 [S] and dispatch float64 [S, R]. `infeasible`
    means that there is proof that no solution exists."""

    plan: tuple[np.ndarray, np.ndarray] | None
    infeasible: bool


def _plan_within(target: float, problem: DeploymentProblem, time_limit: float) -> _Answer:
    """Searches for a plan whose round takes at most `target` seconds. The variables are all p_i,
    then d_ij for every configuration and bin for which a single sequence takes at most `target`
    seconds."""
    # Eq. 2 is not linear, because d_ij / p_i divides one variable by another. LobRA lists the ways
    # to divide the devices and solves a program for each. Here a single program covers all ways.
    # Let c_i be the constant of configuration i, and t_ij its time per sequence of length bin j.
    # For a fixed time T of a round, c_i + Σ_j t_ij d_ij / p_i <= T is equivalent to Σ_j t_ij d_ij
    # <= (T - c_i) p_i, which is linear in p and d.
    #
    # The p_i are whole numbers, but the d_ij, the sequences of an expected round, are not. Eq. 2
    # has whole d_ij and so rounds the expected B f_j up; this adds up to R rare, long sequences to
    # a round. Still, a single sequence is not divided: it goes only to configurations that can
    # serve it within T.
    costs, demand, devices, least, most = problem
    row, column = np.nonzero(costs.alone <= target)
    configurations, bins = costs.per_sequence.shape
    d = configurations + np.arange(len(row))
    variables = configurations + len(row)
    busy = np.zeros((configurations, variables))
    busy[:, :configurations] = np.diag(costs.constant / target - 1)
    busy[row, d] = costs.per_sequence[row, column] / target
    served = np.zeros((bins, variables))
    served[column, d] = 1
    held = np.concatenate([costs.devices, np.zeros(len(row))])
    answer = milp(
        np.zeros(variables),
        integrality=np.arange(variables) < configurations,
        bounds=Bounds(
            np.concatenate([least, np.zeros(len(row))]), np.concatenate([most, demand[column]])
        ),
        constraints=[
            LinearConstraint(busy, -np.inf, 0),
            LinearConstraint(served, demand, np.inf),
            LinearConstraint(held, 0, devices),
        ],
        options={"time_limit": time_limit},
    )
    if answer.x is None:
        return _Answer(None, answer.status == _INFEASIBLE)
    counts = np.zeros((configurations, bins))
    counts[row, column] = answer.x[configurations:]
    return _Answer((np.rint(answer.x[:configurations]).astype(np.int64), counts), False)


def _round_seconds(costs: CostTable, number: np.ndarray, counts: np.ndarray) -> float:
    """Seconds of the slowest deployed configuration. Its sequences are divided evenly among its
    replicas, but its slowest sequence takes at least its time alone."""
    deployed = np.flatnonzero(number)
    even = costs.seconds_of(counts)[deployed] / number[deployed]
    alone = np.where(counts > 0, costs.per_sequence, 0).max(axis=1)[deployed]
    return float((costs.constant[deployed] + np.maximum(even, alone)).max())


def _bound(problem: DeploymentProblem) -> float:
    """A lower bound on every plan: each sequence takes its fewest device seconds, no device is
    idle, and the slowest sequence alone fits into the round."""
    costs = problem.costs
    cheapest = (costs.devices[:, None] * costs.per_sequence).min(axis=0)
    busy = float(cheapest @ problem.demand) / problem.devices
    return max(busy, float(costs.alone.min(axis=0).max()))


class DeploymentPlan(NamedTuple):
    """The replicas to deploy, and the expected time of a round with them.

    Attributes:
      replicas: for each deployed configuration, its number of replicas (p_i in LobRA), at least 1.
      round_seconds: expected seconds of a round, which are those of the slowest configuration.
      bound: lower bound in seconds on `round_seconds` over all choices of replicas.
      dominated: for each configuration that was left out of the search, one that is at least as
        good.
    """

    replicas: dict[Replica, int]
    round_seconds: float
    bound: float
    dominated: dict[Replica, Replica]

    @property
    def devices(self) -> int:
        return sum(configuration.devices * count for configuration, count in self.replicas.items())

    @property
    def gap(self) -> float:
        """Upper bound on the fraction by which `round_seconds` exceeds the least possible; 0.01 is
        1%."""
        return self.round_seconds / self.bound - 1


class Replan(NamedTuple):
    """The decision of `replan`: the deployment to continue with, and whether it is new.
    `saved_seconds` is the time that the change saves over the horizon, minus the time that the
    change takes; infinite if the current replicas cannot serve the new tasks."""

    deployment: DeploymentPlan
    switch: bool
    saved_seconds: float


def candidate_replicas(
    devices: int, tp: Sequence[int] = (1, 2, 4, 8), pp: Sequence[int] = (1, 2, 4, 8)
) -> list[Replica]:
    """Returns all replicas of at most `devices` devices with these tensor-parallel degrees and
    numbers of pipeline stages."""
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

    Here, the sequences of an expected round are divisible; `choose_replicas` also simulates rounds
    of whole sequences. The search stops at a plan within the fraction `gap` of the best, or after
    `time_limit` seconds. Devices that would be idle get further replicas.

    Args:
      configurations: configurations to choose from. Those with too many devices are only named in
        error messages.
      bins: the sequences of a sample of rounds, sorted by length, from `choose_length_bins`.
      sampled_rounds: number of rounds in the sample (LobRA takes 100).

    Raises:
      PlanningError: there are no sequences, or no configuration serves the sequences of some bin.
    """
    costs, demand = _costs_and_demand(configurations, bins, sampled_rounds, model)
    require_service(costs, devices)
    costs, dominated = drop_dominated(costs.of(np.flatnonzero(costs.devices <= devices)))
    most = devices // costs.devices
    problem = DeploymentProblem(costs, demand, devices, np.zeros_like(most), most)
    searched = search_deployment(problem, best_like_replicas(problem), gap, time_limit)
    number = _use_idle_devices(costs, searched.replicas, devices)
    replicas = {costs.configurations[i]: int(number[i]) for i in np.flatnonzero(number)}
    return DeploymentPlan(replicas, searched.round_seconds, searched.bound, dominated)


def evaluate_replicas(
    replicas: Mapping[Replica, int],
    bins: LengthBins,
    model: SequenceCosts,
    sampled_rounds: int = 1,
    gap: float = 1e-3,
    time_limit: float = 60.0,
) -> DeploymentPlan:
    """Returns a plan with the given replicas and their expected time of a round; `bound` holds for
    these replicas only. Other arguments and errors are as in `plan_replicas`."""
    deployed = {configuration: number for configuration, number in replicas.items() if number}
    costs, demand = _costs_and_demand(list(deployed), bins, sampled_rounds, model)
    number = np.array(list(deployed.values()), np.int64)
    devices = int(costs.devices @ number)
    require_service(costs, devices)
    problem = DeploymentProblem(costs, demand, devices, number, number)
    searched = search_deployment(problem, number, gap, time_limit)
    return DeploymentPlan(deployed, searched.round_seconds, searched.bound, {})


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
    """Decides whether to change the deployed replicas after tasks arrive or leave. The change takes
    `switch_seconds` (less than 3 minutes in LobRA). It pays if it saves more than that over the
    next `horizon_rounds` rounds, or if the current replicas cannot train the new tasks. Other
    arguments and errors are as in `plan_replicas`."""
    best = plan_replicas(
        devices, configurations, bins, model, sampled_rounds, gap=gap, time_limit=time_limit
    )
    try:
        kept = evaluate_replicas(
            current, bins, model, sampled_rounds, gap=gap, time_limit=time_limit
        )
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
    """Adds replicas of deployed configurations, largest first. They make no round slower."""
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
    """The costs of all bins that have sequences, and B f_j, the expected number of sequences of
    each."""
    used = [j for j, count in enumerate(bins.counts) if count]
    lengths = [bins.boundaries[j] for j in used]
    demand = np.array([bins.counts[j] for j in used]) / sampled_rounds
    return tabulate_costs(configurations, lengths, model), demand


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
    """Chooses between the replicas of `plan_replicas` and equal replicas of one configuration, by
    the mean simulated time of `rounds`: different replicas may not be able to share few long
    sequences evenly. The times in the result are predicted for an expected round, not simulated."""
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
    """Returns the mean device seconds of rounds that `dispatch_samples` divides among replicas: the
    number of devices, idle ones included, times the seconds of the slowest replica."""
    seconds = sum(dispatch_samples(replicas, bins, model).round_seconds for bins in rounds)
    return devices * seconds / len(rounds)
