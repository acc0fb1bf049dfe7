"""Searches the numbers of replicas with which a round takes the least time (LobRA 4.2, Eq. 2).

Eq. 2 is not linear, because d_ij / p_i divides one variable by another. LobRA lists the ways to
divide the devices, filters them by a lower bound and solves a program for each that is left. Here a
single program covers all ways: for a *given* time T of a round, the condition

    c_i + Σ_j t_ij d_ij / p_i <= T   is equivalent to   Σ_j t_ij d_ij <= (T - c_i) p_i,

which is linear in p and d together. (c_i is the constant of configuration i, t_ij its time per
sequence of length bin j.) "Is there a plan that takes at most T?" is one program, and bisection
over T finds the best plan with a proof, without a list that grows with a high power of the number
of devices. LobRA's filter of 15% is used as the first interval: the search starts between a bound
on every plan and 15% above it, and continues above only when no plan lies there.

The p_i are whole numbers; the d_ij, the sequences of an expected round, are not. Eq. 2 has whole
d_ij and so rounds the expected B f_j up, which gives a round up to R more sequences than any round
has, of the rare, long ones. A single sequence cannot be divided here either: it goes only to
configurations that serve it alone within T.
"""

import time
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from .cost_table import CostTable
from .greedy_dispatch import dispatch_greedily

# The first target of the bisection is at most this multiple of the bound.
_FILTER = 1.15
# One program gets at most this fraction of the time limit, so that a hard one does not end the
# search.
_SHARE = 0.1
# scipy's status of a program that has no solution.
_INFEASIBLE = 2


class DeploymentProblem(NamedTuple):
    """Eq. 2 for S configurations and R length bins.

    Attributes:
      costs: costs of the configurations.
      demand: float64 [R], B f_j, the expected sequences of each bin in a round.
      devices: N, most devices of all replicas together.
      least, most: int64 [S], limits on the number of replicas of each configuration.
    """

    costs: CostTable
    demand: np.ndarray
    devices: int
    least: np.ndarray
    most: np.ndarray


class FoundDeployment(NamedTuple):
    """The best deployment that a search found.

    Attributes:
      replicas: int64 [S], p_i, the number of replicas of each configuration.
      round_seconds: time of the expected round.
      bound: no deployment within the problem's limits takes fewer seconds.
    """

    replicas: np.ndarray
    round_seconds: float
    bound: float


def search_deployment(
    problem: DeploymentProblem, start: np.ndarray, gap: float, time_limit: float
) -> FoundDeployment:
    """Bisects over the time of a round.

    Args:
      problem: the problem.
      start: int64 [S], replicas that serve every bin.
      gap: fraction above the bound at which the search stops.
      time_limit: seconds after which the search stops.
    """
    costs, demand = problem.costs, problem.demand
    deadline = time.monotonic() + time_limit
    deployed = np.flatnonzero(start)
    counts = np.zeros(costs.per_sequence.shape)
    whole = np.ceil(demand).astype(np.int64)
    counts[deployed] = dispatch_greedily(costs.of(deployed), start[deployed], whole)
    found = FoundDeployment(start, _round_seconds(costs, start, counts), _bound(problem))
    low = found.bound
    while found.round_seconds > (1 + gap) * low and (left := deadline - time.monotonic()) > 0:
        target = min(_FILTER * low, (low + found.round_seconds) / 2)
        answer = _plan_within(target, problem, min(left, _SHARE * time_limit))
        if answer.plan is not None:
            replicas, counts = answer.plan
            reached = _round_seconds(costs, replicas, counts)
            found = found._replace(
                replicas=replicas, round_seconds=min(reached, found.round_seconds)
            )
        else:
            low = target
            if answer.infeasible:
                found = found._replace(bound=target)
    return found._replace(bound=min(found.bound, found.round_seconds))


def best_like_replicas(problem: DeploymentProblem) -> np.ndarray:
    """Returns the best deployment of a single configuration: int64 [S], replicas of each."""
    costs = problem.costs
    even = costs.per_sequence @ problem.demand / problem.most
    seconds = costs.constant + np.maximum(even, costs.per_sequence.max(axis=1))
    return np.where(np.arange(len(seconds)) == seconds.argmin(), problem.most, 0)


class _Answer(NamedTuple):
    """The answer of one program.

    Attributes:
      plan: replicas int64 [S] and dispatch float64 [S, R]; None if none was found.
      infeasible: whether it is proven that there is none.
    """

    plan: tuple[np.ndarray, np.ndarray] | None
    infeasible: bool


def _plan_within(target: float, problem: DeploymentProblem, time_limit: float) -> _Answer:
    """Solves: is there a plan whose round takes at most `target` seconds?

    The variables are all p_i, then d_ij for every configuration and bin for which a single sequence
    takes at most `target` seconds.
    """
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
    """Seconds of the slowest deployed configuration: an even share of its sequences on each
    replica, or its slowest sequence alone if that takes longer."""
    deployed = np.flatnonzero(number)
    even = costs.seconds_of(counts)[deployed] / number[deployed]
    alone = np.where(counts > 0, costs.per_sequence, 0).max(axis=1)[deployed]
    return float((costs.constant[deployed] + np.maximum(even, alone)).max())


def _bound(problem: DeploymentProblem) -> float:
    """A bound on every plan: each sequence takes its fewest device seconds, no device is idle, and
    the slowest sequence alone fits into the round."""
    costs = problem.costs
    cheapest = (costs.devices[:, None] * costs.per_sequence).min(axis=0)
    busy = float(cheapest @ problem.demand) / problem.devices
    return max(busy, float(costs.alone.min(axis=0).max()))
