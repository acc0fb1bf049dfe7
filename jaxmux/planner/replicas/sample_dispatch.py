"""Which sequences of a step each replica takes, so that the slowest is fastest (LobRA 4.3, Eq. 3).

Replicas of one configuration share its sequences evenly. So the program has a variable for each
configuration and bucket, none for a replica, and no assignment of sequences to single replicas is
faster than its optimum. The gap reported here is that of whole sequences on replicas to this bound.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from .cost_table import CostTable, Replica, SequenceCosts, require_service, tabulate_costs
from .length_bins import LengthBins

# Moves of the greedy dispatch, and exchanges between replicas; both end by themselves long before.
_MOST_MOVES = 2000
_MOST_EXCHANGES = 300
# The slowest replica exchanges with one of so many of the fastest of each configuration.
_PARTNERS = 6
# Halvings of an interval until it is as short as rounding.
_HALVINGS = 50


class SampleDispatch(NamedTuple):
    """The sequences of a step, by replica.

    Attributes:
      counts: by configuration, the sequences of each bucket that each of its replicas takes,
        int64 [replicas, R].
      seconds: of the slowest replica.
      bound: no dispatch takes fewer seconds.
    """

    counts: dict[Replica, np.ndarray]
    seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """How much slower than the best dispatch this may be; 0.01 is 1%."""
        return self.seconds / self.bound - 1


def dispatch_samples(
    replicas: Mapping[Replica, int],
    buckets: LengthBins,
    model: SequenceCosts,
    gap: float = 0.01,
    seconds: float = 0.05,
) -> SampleDispatch:
    """Deals the sequences of a step out to the replicas (Eq. 3).

    min max_i T({d_ij / p_i}_j; S_i)  subject to  Σ_i d_ij = B_j, d_ij a natural number, and 0
    where S_i has no memory for bucket j. The greedy dispatch stands where it is within `gap` of
    a bound in closed form, or where the solver finds none that is better.

    Args:
      replicas: p_i, how many replicas of each configuration are deployed.
      buckets: the step's sequences, of all tasks, by padded length.
      model: times and memory of a replica.
      gap: that the solver may leave to its optimum.
      seconds: time limit of the solver.

    Raises:
      PlanningError: no replica has the memory for some bucket.
    """
    deployed = [configuration for configuration, count in replicas.items() if count]
    number = np.array([replicas[configuration] for configuration in deployed], np.int64)
    used = np.flatnonzero(buckets.counts)
    demand = np.asarray(buckets.counts, np.int64)[used]
    costs = tabulate_costs(deployed, [buckets.boundaries[j] for j in used], model)
    if len(used):
        require_service(costs, int(costs.gpus @ number))
        found = _dispatch(costs, number, demand, gap, seconds)
    else:
        nothing = np.zeros((len(number), 0), np.int64)
        found = _split(costs, number, nothing, enough=np.inf)
        found = found._replace(bound=found.seconds)
    counts = {}
    for configuration, part in found.counts.items():
        counts[configuration] = np.zeros((len(part), len(buckets.counts)), np.int64)
        counts[configuration][:, used] = part
    return SampleDispatch(counts, found.seconds, min(found.bound, found.seconds))


def _dispatch(
    costs: CostTable, number: np.ndarray, demand: np.ndarray, gap: float, seconds: float
) -> SampleDispatch:
    bound = max(_price_bound(costs, number, demand), _whole_bound(costs, number, demand))
    greedy = dispatch_greedily(costs, number, demand)
    found = _split(costs, number, greedy, (1 + gap) * bound)
    if found.seconds > (1 + gap) * bound:
        counts, proven = _solve(costs, number, demand, found.seconds, gap, seconds)
        bound = max(bound, proven)
        if counts is not None:
            split = _split(costs, number, counts, (1 + gap) * bound)
            found = min(found, split, key=lambda one: one.seconds)
    return found._replace(bound=bound)


def dispatch_greedily(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """LobRA's length-based dispatch, then work moved off the slowest configuration.

    Each bucket starts on the configuration that serves it for the fewest GPU seconds. Of the
    sequences of the slowest configuration, those move on that cost their new one least for what
    they cost the old, as many as make both equally fast.

    Args:
      costs: of the S deployed configurations.
      number: replicas of each, [S].
      demand: sequences of each of R buckets.

    Returns:
      Sequences of each bucket that each configuration takes, int64 [S, R].
    """
    share = costs.per_sequence / number[:, None]
    counts = np.zeros(share.shape, np.int64)
    counts[(costs.gpus[:, None] * costs.per_sequence).argmin(axis=0), range(len(demand))] = demand
    for _ in range(_MOST_MOVES):
        busy = costs.constant + costs.loads(counts) / number
        slowest = int(busy.argmax())
        room = busy[slowest] - busy[:, None]
        relief = share[slowest]
        helps = (counts[slowest] > 0) & (share < room)
        if not helps.any():
            break
        price = np.where(helps, share, np.inf) / np.where(np.isfinite(relief), relief, 1)
        to, bucket = np.unravel_index(price.argmin(), price.shape)
        even = int(room[to, 0] / (share[to, bucket] + relief[bucket]))
        moved = min(max(1, even), counts[slowest, bucket])
        counts[slowest, bucket] -= moved
        counts[to, bucket] += moved
    return counts


def _split(
    costs: CostTable, number: np.ndarray, counts: np.ndarray, enough: float
) -> SampleDispatch:
    """Divides what each configuration takes evenly among its replicas, then evens all out."""
    parts = [
        split_evenly(counts[i], costs.per_sequence[i], int(number[i])) for i in range(len(number))
    ]
    held, slowest = exchange(costs, number, np.concatenate(parts), enough)
    split = np.split(held, np.cumsum(number)[:-1])
    return SampleDispatch(dict(zip(costs.configurations, split, strict=True)), slowest, 0.0)


def split_evenly(counts: np.ndarray, per_sequence: np.ndarray, replicas: int) -> np.ndarray:
    """Divides the sequences [R] of a configuration among its replicas: int64 [replicas, R].

    What is left of a bucket over equal parts goes to the replicas with the least so far, slowest
    bucket first (LPT).
    """
    parts = np.tile(counts // replicas, (replicas, 1))
    seconds = np.where(counts > 0, per_sequence, 0)
    busy = parts @ seconds
    for bucket in np.argsort(-seconds, kind="stable"):
        takers = np.argsort(busy, kind="stable")[: counts[bucket] % replicas]
        parts[takers, bucket] += 1
        busy[takers] += seconds[bucket]
    return parts


def exchange(
    costs: CostTable, number: np.ndarray, counts: np.ndarray, enough: float = 0.0
) -> tuple[np.ndarray, float]:
    """Lets the slowest replica hand a sequence to another, for a quicker one or none in return.

    Sequences are whole, and few long ones fall to a replica: what an even division leaves uneven,
    exchanges between two replicas at a time nearly always even out.

    Args:
      costs: of the S deployed configurations.
      number: replicas of each, [S]; K together.
      counts: sequences of each bucket that each replica takes, [K, R], in the order of `costs`.
      enough: seconds at which to stop.

    Returns:
      Counts anew, int64 [K, R], and the seconds of the slowest replica.
    """
    held = counts.copy()
    replicas = np.split(np.arange(len(held)), np.cumsum(number)[:-1])
    costs = costs.of(np.repeat(np.arange(len(number)), number))
    # The last column stands for no sequence.
    seconds = np.column_stack([costs.per_sequence, np.zeros(len(held))])
    busy = costs.constant + costs.loads(held)
    for _ in range(_MOST_EXCHANGES):
        slowest = int(busy.argmax())
        if busy[slowest] <= enough:
            break
        others = np.concatenate([kind[np.argsort(busy[kind])[:_PARTNERS]] for kind in replicas])
        gives = np.flatnonzero(held[slowest])
        own, theirs = seconds[slowest], seconds[others]
        takes = np.column_stack([held[others] > 0, np.ones(len(others), bool)]) & np.isfinite(own)
        # [others, gives, takes]: what the two are busy after the exchange.
        back = np.where(takes, theirs, 0)[:, None, :]
        ours = busy[slowest] - own[gives][:, None] + np.where(takes, own, np.inf)[:, None, :]
        slower = np.maximum(ours, busy[others, None, None] + theirs[:, gives, None] - back)
        partner, given, taken = np.unravel_index(slower.argmin(), slower.shape)
        if slower[partner, given, taken] >= busy[slowest] * (1 - 1e-9):
            break
        other, given = others[partner], gives[given]
        held[slowest, given] -= 1
        held[other, given] += 1
        if taken < held.shape[1]:
            held[other, taken] -= 1
            held[slowest, taken] += 1
        pair = [slowest, other]
        busy[pair] = costs.constant[pair] + costs.of(pair).loads(held[pair])
    return held, float(busy.max())


def _price_bound(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> float:
    """Seconds if every sequence took the fewest GPU seconds and all GPUs were always busy."""
    cheapest = (costs.gpus[:, None] * costs.per_sequence).min(axis=0) @ demand
    held = costs.gpus * number
    return max(float((cheapest + held @ costs.constant) / held.sum()), float(costs.constant.max()))


def _whole_bound(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> float:
    """Seconds in which the replicas can serve, by whole sequences, each bucket and all longer ones.

    Within T, a replica serves at most ⌊(T - c_i) / t_ij⌋ sequences of bucket j or longer. Few
    replicas serve the longest, and few of them each: this is where the step time often lies.
    """
    quickest = np.minimum.accumulate(costs.per_sequence[:, ::-1], axis=1)[:, ::-1]
    needed = np.cumsum(demand[::-1])[::-1]
    constant = costs.constant[:, None]
    least = constant.min() * np.ones(len(needed))
    enough = np.where(needed > 0, (constant + quickest * needed).min(axis=0), least)
    for _ in range(_HALVINGS):
        middle = (least + enough) / 2
        served = number @ np.maximum(0, (middle - constant) // quickest)
        least = np.where(served < needed, middle, least)
        enough = np.where(served < needed, enough, middle)
    return float(least.max())


def _solve(
    costs: CostTable,
    number: np.ndarray,
    demand: np.ndarray,
    known: float,
    gap: float,
    seconds: float,
) -> tuple[np.ndarray | None, float]:
    """The integer program: counts [S, R], or None where time ran out, and a bound in seconds.

    Variables are the step time in units of `known` seconds, that of a dispatch at hand, and d_ij
    wherever one sequence alone does not take longer.
    """
    row, column = np.nonzero(costs.alone <= known)
    variables = len(row) + 1
    places = np.arange(1, variables)
    busy = np.zeros((len(number), variables))
    busy[:, 0] = -1
    busy[row, places] = costs.per_sequence[row, column] / (number[row] * known)
    served = np.zeros((len(demand), variables))
    served[column, places] = 1
    answer = milp(
        np.eye(variables)[0],
        integrality=np.arange(variables) > 0,
        bounds=Bounds(0, np.concatenate([[1], demand[column]])),
        constraints=[
            LinearConstraint(busy, -np.inf, -costs.constant / known),
            LinearConstraint(served, demand, demand),
        ],
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    proven = answer.mip_dual_bound
    bound = known * proven if proven is not None and np.isfinite(proven) else 0.0
    if answer.x is None:
        return None, bound
    counts = np.zeros(costs.per_sequence.shape, np.int64)
    counts[row, column] = np.rint(answer.x[1:])
    return counts, bound
