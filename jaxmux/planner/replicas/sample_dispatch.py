"""Divides a round's sequences among replicas so that the slowest replica is fast (LobRA 4.3, Eq.
3)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from ..devices import Replica
from ..packing.rows import MIN_CHUNK_LEN
from .cost_table import CostTable, SequenceCosts, require_service, tabulate_costs
from .length_bins import LengthBins, choose_length_bins

# Replicas of one configuration share its sequences evenly. The integer program therefore has a
# variable for each configuration and length bin, but none for single replicas. For few sequences, a
# second program has variables for each replica. Its optimum is a lower bound on the time of every
# assignment of sequences to replicas; the reported gap is measured from this bound.
#
# Limits on the number of moves between configurations and of exchanges between replicas. Both loops
# usually end long before.
_MOST_MOVES = 2000
_MOST_EXCHANGES = 300
# The slowest replica exchanges sequences only with this many replicas of each configuration, the
# fastest ones.
_PARTNERS = 6


def dispatch_greedily(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> np.ndarray:
    """Divides sequences among configurations by length-based dispatch (LobRA 3), then improves the
    result. Returns int64 [S, R], the number of sequences of each bin that each configuration
    serves."""
    # First, each length bin is served by the configuration that takes the fewest device seconds for
    # it. Then sequences move from the slowest configuration to others, as many at a time as make
    # both equally fast. The sequences whose time grows least by the move, as a ratio, move first.
    share = costs.per_sequence / number[:, None]
    counts = np.zeros(share.shape, np.int64)
    cheapest = (costs.devices[:, None] * costs.per_sequence).argmin(axis=0)
    counts[cheapest, range(len(demand))] = demand
    for _ in range(_MOST_MOVES):
        busy = costs.constant + costs.seconds_of(counts) / number
        slowest = int(busy.argmax())
        room = busy[slowest] - busy[:, None]
        relief = share[slowest]
        helps = (counts[slowest] > 0) & (share < room)
        if not helps.any():
            break
        price = np.where(helps, share, np.inf) / np.where(np.isfinite(relief), relief, 1)
        to, length_bin = np.unravel_index(price.argmin(), price.shape)
        even = int(room[to, 0] / (share[to, length_bin] + relief[length_bin]))
        moved = min(max(1, even), counts[slowest, length_bin])
        counts[slowest, length_bin] -= moved
        counts[to, length_bin] += moved
    return counts


def split_evenly(counts: np.ndarray, per_sequence: np.ndarray, replicas: int) -> np.ndarray:
    """Divides the sequences of a configuration evenly among its replicas, int64 [replicas, R]. The
    remainder of each bin goes to the replicas that are least busy so far, beginning with the bin of
    the longest sequences (longest processing time first)."""
    parts = np.tile(counts // replicas, (replicas, 1))
    seconds = np.where(counts > 0, per_sequence, 0)
    busy = parts @ seconds
    for length_bin in np.argsort(-seconds, kind="stable"):
        takers = np.argsort(busy, kind="stable")[: counts[length_bin] % replicas]
        parts[takers, length_bin] += 1
        busy[takers] += seconds[length_bin]
    return parts


def exchange_sequences(
    costs: CostTable, number: np.ndarray, counts: np.ndarray, enough: float = 0.0
) -> tuple[np.ndarray, float]:
    """Shortens the round by exchanging single sequences between the slowest replica and others,
    until the round takes at most `enough` seconds. Returns the new counts and the seconds of the
    slowest replica. `number`, int64 [S], has the number of replicas of each configuration, K in
    total; `counts` is int64 [K, R]."""
    # In each exchange, the slowest replica gives a sequence and takes a quicker one or none. As
    # replicas have few long sequences, an even division can leave replicas uneven; exchanges
    # between two replicas nearly always correct this.
    held = counts.copy()
    replicas = np.split(np.arange(len(held)), np.cumsum(number)[:-1])
    costs = costs.of(np.repeat(np.arange(len(number)), number))
    # The last column means that no sequence is taken.
    seconds = np.column_stack([costs.per_sequence, np.zeros(len(held))])
    busy = costs.constant + costs.seconds_of(held)
    for _ in range(_MOST_EXCHANGES):
        slowest = int(busy.argmax())
        if busy[slowest] <= enough:
            break
        others = np.concatenate([kind[np.argsort(busy[kind])[:_PARTNERS]] for kind in replicas])
        gives = np.flatnonzero(held[slowest])
        of_slowest, of_others = seconds[slowest], seconds[others]
        takes = np.column_stack([held[others] > 0, np.ones(len(others), bool)])
        takes &= np.isfinite(of_slowest)
        # [others, gives, takes]: seconds of the slower of the two replicas after the exchange.
        back = np.where(takes, of_others, 0)[:, None, :]
        taken_on = np.where(takes, of_slowest, np.inf)[:, None, :]
        ours = busy[slowest] - of_slowest[gives][:, None] + taken_on
        slower = np.maximum(ours, busy[others, None, None] + of_others[:, gives, None] - back)
        partner, gift, taken = np.unravel_index(slower.argmin(), slower.shape)
        if slower[partner, gift, taken] >= busy[slowest] * (1 - 1e-9):
            break
        other, moved = others[partner], gives[gift]
        held[slowest, moved] -= 1
        held[other, moved] += 1
        if taken < held.shape[1]:
            held[other, taken] -= 1
            held[slowest, taken] += 1
        pair = [slowest, other]
        busy[pair] = costs.constant[pair] + costs.of(pair).seconds_of(held[pair])
    return held, float(busy.max())


# With this many sequences or fewer, an even division among a configuration's replicas may be much
# too slow. Then an integer program with variables for each replica is solved, with this many times
# the time limit.
_FEW_SEQUENCES = 50
_MORE_TIME = 10
# After this many halvings, an interval is as short as the rounding error.
_HALVINGS = 50


class SampleDispatch(NamedTuple):
    """The sequences of one round, divided among replicas. `counts` has for each configuration the
    number of sequences of each of the R length bins that each replica serves, int64 [replicas, R].
    No dispatch to these replicas takes fewer seconds than `bound`."""

    counts: dict[Replica, np.ndarray]
    round_seconds: float
    bound: float

    @property
    def gap(self) -> float:
        """Upper bound on the fraction by which `round_seconds` exceeds the least possible."""
        return self.round_seconds / self.bound - 1


def dispatch_samples(
    replicas: Mapping[Replica, int],
    bins: LengthBins,
    model: SequenceCosts,
    gap: float = 0.01,
    time_limit: float = 0.05,
    single_replicas: bool = True,
    node_limit: int | None = None,
) -> SampleDispatch:
    """Divides the sequences of one round among the deployed replicas (LobRA Eq. 3).

    It minimizes max_i T({d_ij / p_i}_j; S_i) subject to Σ_i d_ij = B_j, with T of `SequenceCosts`.
    Of the B_j sequences of length bin j, the p_i replicas of configuration S_i serve d_ij together.
    A greedy dispatch is returned if its time is within the fraction `gap` of a lower bound, or if
    the solver finds no better one within `time_limit` seconds and `node_limit` nodes of its search
    tree. If the limit on nodes ends the search, and never the time, equal calls have equal results.

    With `single_replicas`, a second program assigns at most 50 sequences to single replicas, in ten
    times the time limit, if the first program leaves a gap. It hardly ever finds a faster dispatch,
    but often a better bound. Raises PlanningError if no replica has the memory for some bin.
    """
    deployed = [configuration for configuration, count in replicas.items() if count]
    number = np.array([replicas[configuration] for configuration in deployed], np.int64)
    used = np.flatnonzero(bins.counts)
    demand = np.asarray(bins.counts, np.int64)[used]
    costs = tabulate_costs(deployed, [bins.boundaries[j] for j in used], model)
    if len(used):
        require_service(costs, int(costs.devices @ number))
        limits = {"time_limit": time_limit, "mip_rel_gap": gap}
        if node_limit is not None:
            limits["node_limit"] = node_limit
        dispatch = _dispatch(costs, number, demand, limits, single_replicas)
    else:
        nothing = np.zeros((len(number), 0), np.int64)
        dispatch = _assign_replicas(costs, number, nothing, enough=np.inf)
        dispatch = dispatch._replace(bound=dispatch.round_seconds)
    counts = {}
    for configuration, part in dispatch.counts.items():
        counts[configuration] = np.zeros((len(part), len(bins.counts)), np.int64)
        counts[configuration][:, used] = part
    return SampleDispatch(
        counts, dispatch.round_seconds, min(dispatch.bound, dispatch.round_seconds)
    )


def _dispatch(
    costs: CostTable,
    number: np.ndarray,
    demand: np.ndarray,
    limits: Mapping[str, float],
    single_replicas: bool,
) -> SampleDispatch:
    gap = limits["mip_rel_gap"]
    bound = max(_busy_bound(costs, number, demand), _whole_bound(costs, number, demand))
    greedy = dispatch_greedily(costs, number, demand)
    dispatch = _assign_replicas(costs, number, greedy, (1 + gap) * bound)
    if dispatch.round_seconds > (1 + gap) * bound:
        counts, proven = _solve(costs, number, demand, dispatch.round_seconds, limits)
        bound = max(bound, proven)
        if counts is not None:
            solved = _assign_replicas(costs, number, counts, (1 + gap) * bound)
            dispatch = min(dispatch, solved, key=lambda one: one.round_seconds)
    few = single_replicas and demand.sum() <= _FEW_SEQUENCES
    if few and dispatch.round_seconds > (1 + gap) * bound:
        # Every replica counts as its own configuration, so that nothing is divided evenly.
        each = np.repeat(np.arange(len(number)), number)
        costs_of_each = costs.of(each)
        more_time = {**limits, "time_limit": _MORE_TIME * limits["time_limit"]}
        counts, proven = _solve(
            costs_of_each, np.ones_like(each), demand, dispatch.round_seconds, more_time
        )
        bound = max(bound, proven)
        if counts is not None:
            seconds = float((costs.constant[each] + costs_of_each.seconds_of(counts)).max())
            if seconds < dispatch.round_seconds:
                split = np.split(counts, np.cumsum(number)[:-1])
                dispatch = SampleDispatch(
                    dict(zip(costs.configurations, split, strict=True)), seconds, 0.0
                )
    return dispatch._replace(bound=bound)


def _assign_replicas(
    costs: CostTable, number: np.ndarray, counts: np.ndarray, enough: float
) -> SampleDispatch:
    """Divides the sequences of each configuration, counts [S, R], among its replicas."""
    parts = [
        split_evenly(counts[i], costs.per_sequence[i], int(number[i])) for i in range(len(number))
    ]
    held, slowest = exchange_sequences(costs, number, np.concatenate(parts), enough)
    split = np.split(held, np.cumsum(number)[:-1])
    return SampleDispatch(dict(zip(costs.configurations, split, strict=True)), slowest, 0.0)


def _busy_bound(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> float:
    """Seconds if every sequence took its fewest device seconds and no device were ever idle."""
    cheapest = (costs.devices[:, None] * costs.per_sequence).min(axis=0) @ demand
    held = costs.devices * number
    return max(float((cheapest + held @ costs.constant) / held.sum()), float(costs.constant.max()))


def _whole_bound(costs: CostTable, number: np.ndarray, demand: np.ndarray) -> float:
    """Seconds that are needed to serve whole sequences of each bin and all longer bins. Few
    replicas serve the longest sequences, and each serves few of them, so this bound is often the
    largest."""
    # Within T seconds a replica serves at most ⌊(T - c_i) / t_ij⌋ sequences of bin j or longer,
    # where c_i is its constant and t_ij its time per sequence.
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
    limits: Mapping[str, float],
) -> tuple[np.ndarray | None, float]:
    """Solves Eq. 3 as an integer program. Returns counts int64 [S, R], or None if the solver
    stopped before it found any, and a lower bound in seconds. A known dispatch takes `known`
    seconds. The variables are the round's time divided by `known`, and d_ij for every configuration
    and bin for which a single sequence takes at most `known` seconds."""
    row, column = np.nonzero(costs.alone <= known)
    variables = len(row) + 1
    d = np.arange(1, variables)
    busy = np.zeros((len(number), variables))
    busy[:, 0] = -1
    busy[row, d] = costs.per_sequence[row, column] / (number[row] * known)
    served = np.zeros((len(demand), variables))
    served[column, d] = 1
    answer = milp(
        np.eye(variables)[0],
        integrality=np.arange(variables) > 0,
        bounds=Bounds(0, np.concatenate([[1], demand[column]])),
        constraints=[
            LinearConstraint(busy, -np.inf, -costs.constant / known),
            LinearConstraint(served, demand, demand),
        ],
        options=dict(limits),
    )
    proven = answer.mip_dual_bound
    bound = known * proven if proven is not None and np.isfinite(proven) else 0.0
    if answer.x is None:
        return None, bound
    counts = np.zeros(costs.per_sequence.shape, np.int64)
    counts[row, column] = np.rint(answer.x[1:])
    return counts, bound


# R, the most length bins of a round (LobRA takes 16).
_BINS = 16
# The solver is stopped by the size of its search, not by the clock, so that dividing a round again
# gives the same result. It hardly ever needs more than ten nodes and 0.03 seconds.
_NODES, _SECONDS = 50, 60.0


def round_bins(lengths: Sequence[int]) -> LengthBins:
    """Sorts the samples of a round into length bins whose boundaries are multiples of the shortest
    chunk length."""
    tops = sorted({-(-length // MIN_CHUNK_LEN) * MIN_CHUNK_LEN for length in lengths})
    return choose_length_bins(lengths, tops, _BINS)


def assign_samples(
    replicas: Sequence[Replica],
    costs: SequenceCosts,
    lengths: Mapping[int, Sequence[int]],
) -> list[dict[int, list[int]]]:
    """Divides the samples of a round among replicas by `dispatch_samples`. Returns for each
    replica, by task, the ascending indices of its samples. The samples of a task go to all replicas
    that serve their length bin. Equal calls have equal results. Raises PlanningError if a sample
    fits no replica."""
    every = [(length, task, i) for task, sizes in lengths.items() for i, length in enumerate(sizes)]
    bins = round_bins([length for length, *_ in every])
    dispatch = dispatch_samples(
        Counter(replicas),
        bins,
        costs,
        time_limit=_SECONDS,
        single_replicas=False,
        node_limit=_NODES,
    )
    rows = {configuration: iter(counts) for configuration, counts in dispatch.counts.items()}
    # [replica, bin]: number of samples.
    shares = np.array([next(rows[configuration]) for configuration in replicas])
    assigned: list[dict[int, list[int]]] = [{} for _ in replicas]
    of_bin = np.searchsorted(bins.boundaries, [length for length, *_ in every])
    for j in range(len(bins.boundaries)):
        members = [sample for sample, at in zip(every, of_bin, strict=True) if at == j]
        for replica, (_, task, i) in zip(_dealt(shares[:, j]), members, strict=True):
            assigned[replica].setdefault(task, []).append(i)
    return [{task: sorted(indices) for task, indices in each.items()} for each in assigned]


def _dealt(counts: Sequence[int]) -> list[int]:
    """Each replica's index, as many times as its count says, mixed as evenly as possible."""
    turns = [((turn + 0.5) / n, replica) for replica, n in enumerate(counts) for turn in range(n)]
    return [replica for _, replica in sorted(turns)]
