"""Which replicas to deploy: how many of each parallel configuration (LobRA 4.2, Eq. 2).

Eq. 2 is not linear, because d_ij / p_i divides one variable by another. LobRA therefore lists the
partitions of the GPUs, filters them by a lower bound and solves a program for each that is left.
Here one program looks at all partitions: for a *given* step time T the condition

  c_i + Σ_j t_ij d_ij / p_i <= T   is   Σ_j t_ij d_ij <= (T - c_i) p_i,

linear in p and d together. So "is there a plan that takes at most T?" is one program, and bisection
over T finds the best plan, with a proof, without a list that grows with a high power of the GPUs.
LobRA's filter at 15% remains as the first window: the search starts between a bound on every plan
and 15% above it, and moves on only when it has proven that no plan lies there.

The p_i are whole numbers; the d_ij, sequences of an expected step, are not. Eq. 2 has whole d_ij
and so rounds the expected B f_j up: a step would have up to R sequences more than it ever has, and
they would be rare, long ones. What cannot be divided here either is the sequence itself: none goes
where it alone would take longer than T.
"""

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
from .sample_dispatch import dispatch_greedily

# Plans whose bound is this much above the least possible are looked at only if there is no other.
_FILTER = 1.15
# One program gets at most this part of the time limit, so that a hard one does not end the search.
_SHARE = 0.1
# scipy's status of a program that has no solution.
_INFEASIBLE = 2


class DeploymentPlan(NamedTuple):
    """Replicas, and what a step is expected to take with them.

    Attributes:
      replicas: p_i, by configuration, at least 1 each.
      seconds: of a step with the expected sequences: of the slowest configuration, its sequences
        shared evenly among its replicas, and no less than any of them takes alone.
      bound: no plan takes fewer seconds; of replicas that were given, no dispatch to them.
      dominated: by configuration left out beforehand, the one that is no worse in any respect.
    """

    replicas: dict[Replica, int]
    seconds: float
    bound: float
    dominated: dict[Replica, Replica]

    @property
    def gpus(self) -> int:
        return sum(configuration.devices * count for configuration, count in self.replicas.items())

    @property
    def gap(self) -> float:
        """How much slower than the best plan this may be; 0.01 is 1%."""
        return self.seconds / self.bound - 1


class Replan(NamedTuple):
    """What to do when tasks arrive or leave.

    Attributes:
      deployment: to go on with; its `seconds` are those with the new tasks.
      switch: whether it is another than before.
      saved_seconds: over the horizon, the switch paid for; if positive, the reason to switch.
        inf where the old replicas cannot serve the new tasks.
    """

    deployment: DeploymentPlan
    switch: bool
    saved_seconds: float


def candidate_replicas(
    gpus: int, tp: Sequence[int] = (1, 2, 4, 8), pp: Sequence[int] = (1, 2, 4, 8)
) -> list[Replica]:
    """Every combination of the degrees that some mesh of `gpus` GPUs has room for."""
    pairs = (Replica.uniform(tp=tensor, pp=stages) for tensor in tp for stages in pp)
    return [configuration for configuration in pairs if configuration.devices <= gpus]


def plan_replicas(
    gpus: int,
    configurations: Sequence[Replica],
    buckets: LengthBins,
    model: SequenceCosts,
    batches: int = 1,
    gap: float = 1e-3,
    seconds: float = 60.0,
) -> DeploymentPlan:
    """The deployment whose step is expected to take the least time (Eq. 2).

    Args:
      gpus: N, most GPUs of all replicas together.
      configurations: to choose from. Such as need more GPUs do no harm and improve error messages.
      buckets: of the sequences of a sample of steps, of all tasks.
      model: times and memory of a replica.
      batches: steps in the sample (LobRA takes 100). A step is expected to have B_j / `batches`
        sequences of bucket j.
      gap: how far above the best plan the answer may be.
      seconds: time limit, after which the best plan so far is returned with its gap.

    Raises:
      PlanningError: a bucket fits no configuration on `gpus` GPUs.
    """
    costs, demand = _costs_and_demand(configurations, buckets, batches, model)
    require_service(costs, gpus)
    costs, dominated = drop_dominated(costs.of(np.flatnonzero(costs.gpus <= gpus)))
    most = gpus // costs.gpus
    problem = _Problem(costs, demand, gpus, np.zeros_like(most), most)
    found = _search(problem, _homogeneous(problem), gap, seconds)
    number = _use_idle_gpus(costs, found.replicas, gpus)
    replicas = {costs.configurations[i]: int(number[i]) for i in np.flatnonzero(number)}
    return DeploymentPlan(replicas, found.seconds, found.bound, dominated)


def evaluate_replicas(
    replicas: Mapping[Replica, int],
    buckets: LengthBins,
    model: SequenceCosts,
    batches: int = 1,
    gap: float = 1e-3,
    seconds: float = 60.0,
) -> DeploymentPlan:
    """What a step is expected to take with these replicas; arguments as of `plan_replicas`.

    Raises:
      PlanningError: no replica has the memory for some bucket.
    """
    deployed = {configuration: number for configuration, number in replicas.items() if number}
    costs, demand = _costs_and_demand(list(deployed), buckets, batches, model)
    number = np.array(list(deployed.values()), np.int64)
    gpus = int(costs.gpus @ number)
    require_service(costs, gpus)
    found = _search(_Problem(costs, demand, gpus, number, number), number, gap, seconds)
    return DeploymentPlan(deployed, found.seconds, found.bound, {})


def replan(
    current: Mapping[Replica, int],
    gpus: int,
    configurations: Sequence[Replica],
    buckets: LengthBins,
    model: SequenceCosts,
    *,
    switch_seconds: float,
    horizon_steps: int,
    batches: int = 1,
    gap: float = 1e-3,
    seconds: float = 60.0,
) -> Replan:
    """Keeps the current replicas unless others save more than the switch costs.

    Args:
      current: the replicas in force.
      switch_seconds: what changing the replicas takes (LobRA: below 3 minutes).
      horizon_steps: steps for which the tasks are expected to stay the same.

    The other arguments, and errors, are those of `plan_replicas`.
    """
    best = plan_replicas(gpus, configurations, buckets, model, batches, gap, seconds)
    try:
        kept = evaluate_replicas(current, buckets, model, batches, gap, seconds)
    except PlanningError:
        return Replan(best, True, math.inf)
    if kept.gpus > gpus:
        return Replan(best, True, math.inf)
    saved = (kept.seconds - best.seconds) * horizon_steps - switch_seconds
    if saved > 0 and best.replicas != kept.replicas:
        return Replan(best, True, saved)
    kept = kept._replace(bound=min(best.bound, kept.seconds), dominated=best.dominated)
    return Replan(kept, False, saved)


class _Problem(NamedTuple):
    """Eq. 2: costs, B f_j [R], GPUs of the mesh, and limits [S] on the replicas of each kind."""

    costs: CostTable
    demand: np.ndarray
    gpus: int
    least: np.ndarray
    most: np.ndarray


class _Found(NamedTuple):
    replicas: np.ndarray
    seconds: float
    bound: float


def _search(problem: _Problem, start: np.ndarray, gap: float, seconds: float) -> _Found:
    """Bisection over the step time; `start` are replicas that serve everything."""
    costs, demand = problem.costs, problem.demand
    deadline = time.monotonic() + seconds
    deployed = np.flatnonzero(start)
    counts = np.zeros(costs.per_sequence.shape)
    whole = np.ceil(demand).astype(np.int64)
    counts[deployed] = dispatch_greedily(costs.of(deployed), start[deployed], whole)
    found = _Found(start, _step_seconds(costs, start, counts), _bound(problem))
    low = found.bound
    while found.seconds > (1 + gap) * low and (left := deadline - time.monotonic()) > 0:
        target = min(_FILTER * low, (low + found.seconds) / 2)
        limit = min(left, _SHARE * seconds)
        answer = _plan_within(target, problem, limit)
        if answer.plan is not None:
            reached = _step_seconds(costs, *answer.plan)
            found = found._replace(replicas=answer.plan[0], seconds=min(reached, found.seconds))
        else:
            low = target
            if answer.infeasible:
                found = found._replace(bound=target)
    return found._replace(bound=min(found.bound, found.seconds))


class _Answer(NamedTuple):
    plan: tuple[np.ndarray, np.ndarray] | None
    infeasible: bool


def _plan_within(target: float, problem: _Problem, limit: float) -> _Answer:
    """Replicas [S] and dispatch [S, R] whose step takes at most `target` seconds, if any do.

    Variables are p_i and, where one sequence alone takes no longer, d_ij.
    """
    costs, demand, gpus, least, most = problem
    row, column = np.nonzero(costs.alone <= target)
    kinds, buckets = costs.per_sequence.shape
    places = kinds + np.arange(len(row))
    variables = kinds + len(row)
    busy = np.zeros((kinds, variables))
    busy[:, :kinds] = np.diag(costs.constant / target - 1)
    busy[row, places] = costs.per_sequence[row, column] / target
    served = np.zeros((buckets, variables))
    served[column, places] = 1
    held = np.concatenate([costs.gpus, np.zeros(len(row))])
    answer = milp(
        np.zeros(variables),
        integrality=np.arange(variables) < kinds,
        bounds=Bounds(
            np.concatenate([least, np.zeros(len(row))]), np.concatenate([most, demand[column]])
        ),
        constraints=[
            LinearConstraint(busy, -np.inf, 0),
            LinearConstraint(served, demand, np.inf),
            LinearConstraint(held, 0, gpus),
        ],
        options={"time_limit": limit},
    )
    if answer.x is None:
        return _Answer(None, answer.status == _INFEASIBLE)
    counts = np.zeros((kinds, buckets))
    counts[row, column] = answer.x[kinds:]
    return _Answer((np.rint(answer.x[:kinds]).astype(np.int64), counts), False)


def _step_seconds(costs: CostTable, number: np.ndarray, counts: np.ndarray) -> float:
    """Of the slowest deployed configuration: an even share, or its slowest sequence alone."""
    deployed = np.flatnonzero(number)
    even = costs.loads(counts)[deployed] / number[deployed]
    alone = np.where(counts > 0, costs.per_sequence, 0).max(axis=1)[deployed]
    return float((costs.constant[deployed] + np.maximum(even, alone)).max())


def _bound(problem: _Problem) -> float:
    """On every plan: each sequence where it takes the fewest GPU seconds, all GPUs always busy."""
    costs = problem.costs
    cheapest = (costs.gpus[:, None] * costs.per_sequence).min(axis=0)
    busy = float(cheapest @ problem.demand) / problem.gpus
    return max(busy, float(costs.alone.min(axis=0).max()))


def _homogeneous(problem: _Problem) -> np.ndarray:
    """The best plan with only one configuration, p_i [S]."""
    costs = problem.costs
    even = costs.per_sequence @ problem.demand / problem.most
    seconds = costs.constant + np.maximum(even, costs.per_sequence.max(axis=1))
    return np.where(np.arange(len(seconds)) == seconds.argmin(), problem.most, 0)


def _use_idle_gpus(costs: CostTable, number: np.ndarray, gpus: int) -> np.ndarray:
    """Adds replicas of deployed configurations, largest first: no step is slower for them."""
    number = number.copy()
    for i in sorted(np.flatnonzero(number), key=lambda i: -costs.gpus[i]):
        number[i] += (gpus - costs.gpus @ number) // costs.gpus[i]
    return number


def _costs_and_demand(
    configurations: Sequence[Replica],
    buckets: LengthBins,
    batches: int,
    model: SequenceCosts,
) -> tuple[CostTable, np.ndarray]:
    """Costs of the buckets that have sequences, and B f_j, the expected sequences of each."""
    used = [j for j, count in enumerate(buckets.counts) if count]
    lengths = [buckets.boundaries[j] for j in used]
    demand = np.array([buckets.counts[j] for j in used]) / batches
    return tabulate_costs(configurations, lengths, model), demand
