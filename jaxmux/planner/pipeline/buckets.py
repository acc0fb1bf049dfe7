"""Groups hTasks into buckets that are interleaved in the pipeline (MuxTune 3.4, Eq. 7)."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError

# Indices of the hTasks of each bucket; the buckets descend in load, as the pipeline template asks.
Buckets = tuple[tuple[int, ...], ...]

# Up to so many hTasks every subset is looked at.
_EXACT_HTASKS = 16
# How far above the least possible the largest bucket of a grouping may be.
_LARGEST_ABOVE_LEAST = 0.01
# Two buckets exchange at most so many hTasks at once: 2^N divisions.
_EXCHANGED_HTASKS = 12
# Loads that differ by less than this part of the mean are as good as equal.
_NEGLIGIBLE = 1e-3


class Grouping(NamedTuple):
    """hTasks in buckets.

    Attributes:
      buckets: every hTask once.
      latency: simulated end-to-end latency in seconds.
      gap: how far the largest bucket may be above the least possible: it is so much larger than
        max(mean load, largest hTask); 0.01 is 1%.
    """

    buckets: Buckets
    latency: float
    gap: float


def choose_buckets(loads: Sequence[float], simulate: Callable[[Buckets], float]) -> Grouping:
    """The balanced grouping, of any number of buckets P, of the least simulated latency.

    Args:
      loads: L⁽¹⁾(H_i), latency in seconds of each hTask on the first stage.
      simulate: end-to-end latency in seconds of a grouping.
    """
    groupings = candidate_buckets(loads)
    latencies = [simulate(buckets) for buckets in groupings]
    best = int(np.argmin(latencies))
    return Grouping(groupings[best], float(latencies[best]), balance_gap(loads, groupings[best]))


def candidate_buckets(loads: Sequence[float], most: int | None = None) -> list[Buckets]:
    """For each P, groupings with a small largest bucket and a small variance of the buckets.

    A clock of the pipeline is as long as its largest bucket, but the least variance (Eq. 7) is not
    always the least maximum. Up to 16 hTasks there are for each P the grouping of the least
    variance, if its largest bucket is at most 1% above the least possible; and the one of the least
    variance among those whose largest bucket is the least possible (to 0.1%). Beyond, there is the
    grouping of `balanced_buckets` alone.

    Args:
      loads: latency of each hTask.
      most: the largest P; None for all.

    Raises:
      PlanningError: no hTasks, or one whose latency is not positive and finite.
    """
    candidates = []
    sizes = np.asarray(loads, float)
    for balanced in balanced_buckets(loads, most):
        smallest = balanced
        if len(sizes) <= _EXACT_HTASKS and balance_gap(loads, balanced) > _NEGLIGIBLE:
            smallest = _smallest_largest(balanced, sizes)
        limit = (1 + _LARGEST_ABOVE_LEAST) * _largest(smallest, sizes)
        candidates += [smallest] if smallest != balanced else []
        candidates += [balanced] if _largest(balanced, sizes) <= limit else []
    return candidates


def balanced_buckets(loads: Sequence[float], most: int | None = None) -> list[Buckets]:
    """For each P = 1 ... N, the grouping into P buckets of least variance (Eq. 7).

    Their mean is given by P, so the least variance is the least sum of squares. It is exact up to
    16 hTasks. Beyond, hTasks are dealt out longest first, and then pairs of buckets divided anew,
    each as well as can be, until none improves. Arguments as of `candidate_buckets`.

    Raises:
      PlanningError: no hTasks, or one whose latency is not positive and finite.
    """
    if not len(loads):
        raise PlanningError("no hTasks to group")
    for htask, load in enumerate(loads):
        if not 0 < load < np.inf:
            raise PlanningError(f"hTask {htask} has a latency of {load} s, expected more than 0")
    sizes = np.asarray(loads, float)
    counts = range(1, 1 + min(len(sizes), most or len(sizes)))
    dealt = [_deal(sizes, count) for count in counts]
    improve = _least_variance if len(sizes) <= _EXACT_HTASKS else _divide_pairs
    return [_in_order(improve(buckets, sizes), sizes) for buckets in dealt]


def balance_gap(loads: Sequence[float], buckets: Buckets) -> float:
    """The largest bucket over max(mean load, largest hTask), less 1."""
    sizes = np.asarray(loads, float)
    return _largest(buckets, sizes) / max(sizes.sum() / len(buckets), sizes.max()) - 1


def _largest(buckets: Sequence[Sequence[int]], sizes: np.ndarray) -> float:
    return max(sizes[list(bucket)].sum() for bucket in buckets)


def _in_order(buckets: Sequence[Sequence[int]], sizes: np.ndarray) -> Buckets:
    tidy = (tuple(sorted(int(i) for i in bucket)) for bucket in buckets)
    return tuple(sorted(tidy, key=lambda bucket: (-sizes[list(bucket)].sum(), bucket)))


class _Layer(NamedTuple):
    """Sets of hTasks that the first few buckets can hold, and for each the least variance.

    Attributes:
      members: int64, the sets, as bits.
      variance: of those buckets, against the mean of all.
      parent: index in the layer before.
      bucket: the set that the last bucket holds.
    """

    members: np.ndarray
    variance: np.ndarray
    parent: np.ndarray
    bucket: np.ndarray


def _least_variance(
    buckets: Sequence[Sequence[int]], sizes: np.ndarray, limit: float = np.inf
) -> list[list[int]]:
    """The grouping into as many buckets, none above the limit, of least variance, by a dynamic
    program over sets. The grouping given must keep the limit itself.

    Each next bucket holds the longest hTask left, so that every grouping comes up once. A given
    grouping's variance leaves few subsets for a bucket, and few sets to go on from: a bucket d from
    the mean has all others d off together.
    """
    descending = np.argsort(-sizes, kind="stable")
    sums = _subset_sums(sizes[descending])
    count, mean = len(buckets), sums[-1] / len(buckets)
    most = sum((sizes[list(bucket)].sum() - mean) ** 2 for bucket in buckets) + 1e-12 * mean**2
    distance = (sums - mean) ** 2
    near = distance * count <= most * (count - 1) + 1e-12 * mean**2
    near = 1 + np.flatnonzero(near[1:] & (sums[1:] <= limit))
    empty = np.zeros(1, np.int64)
    layers = [_Layer(empty, np.zeros(1), empty, empty)]
    for left in reversed(range(count)):
        layer = _add_bucket(layers[-1], near, distance, len(sizes))
        off = sums[-1] - sums[layer.members] - left * mean
        within = layer.variance + off**2 / max(left, 1) <= most
        if not left:
            # A short hTask that is left out may cost less variance than the limit allows.
            within = layer.members == 2 ** len(sizes) - 1
        layers.append(_Layer(*(field[within] for field in layer)))
    grouping, index = [], 0
    for layer in reversed(layers[1:]):
        bucket = int(layer.bucket[index])
        grouping.append([int(htask) for n, htask in enumerate(descending) if bucket >> n & 1])
        index = int(layer.parent[index])
    return grouping


def _add_bucket(layer: _Layer, near: np.ndarray, distance: np.ndarray, htasks: int) -> _Layer:
    everything = 2**htasks - 1
    next_htask = ~layer.members & everything
    next_htask &= -next_htask
    parts = []
    for bit in np.unique(next_htask[next_htask > 0]):
        sets = np.flatnonzero(next_htask == bit)
        choices = near[near & -near == bit]
        row, column = np.nonzero(layer.members[sets][:, None] & choices == 0)
        parent, bucket = sets[row], choices[column]
        members = layer.members[parent] | bucket
        parts.append(_Layer(members, layer.variance[parent] + distance[bucket], parent, bucket))
    grown = _Layer(*(np.concatenate(fields) for fields in zip(*parts, strict=True)))
    order = np.lexsort((grown.variance, grown.members))
    members = grown.members[order]
    best = order[np.concatenate([[True], members[1:] != members[:-1]])]
    return _Layer(*(field[best] for field in grown))


def _smallest_largest(buckets: Buckets, sizes: np.ndarray) -> Buckets:
    """The grouping into as many buckets of least variance among those with the least largest
    bucket, found to 0.1% by bisection."""
    count, best = len(buckets), buckets
    low, high = max(sizes.sum() / count, sizes.max()), _largest(buckets, sizes)
    while high > low * (1 + _NEGLIGIBLE):
        limit = (low + high) / 2
        packed = _fewest_bins(sizes, limit)
        if len(packed) > count:
            low = limit
        else:
            best, high = packed, _largest(packed, sizes)
    return _in_order(_least_variance(_spread(best, count), sizes, high * (1 + 1e-12)), sizes)


def _fewest_bins(sizes: np.ndarray, limit: float) -> list[list[int]]:
    """The hTasks in the fewest bins of at most `limit`, by a dynamic program over sets.

    Of each set it keeps the packing of fewest bins, and of those the one whose last bin is least
    full, as one number: (bins − 1) · limit + load of the last bin.
    """
    members = np.arange(2 ** len(sizes))
    used = np.full(len(members), np.inf)
    used[0] = 0.0
    last = np.zeros(len(members), np.int64)
    held = np.bitwise_count(members)
    slack = 1e-12 * limit
    for number in range(1, len(sizes) + 1):
        layer = members[held == number]
        for htask, size in enumerate(sizes):
            sets = layer[layer >> htask & 1 == 1]
            before = used[sets ^ (1 << htask)]
            full = np.ceil((before - slack) / limit) * limit
            after = np.where(before + size <= full + slack, before, full) + size
            better = after < used[sets]
            used[sets[better]], last[sets[better]] = after[better], htask
    bins: list[list[int]] = []
    rest, opened = len(members) - 1, np.inf
    while rest:
        htask = int(last[rest])
        number = int(np.ceil((used[rest] - slack) / limit))
        if number != opened:
            bins.append([])
            opened = number
        bins[-1].append(htask)
        rest ^= 1 << htask
    return bins


def _spread(bins: list[list[int]], count: int) -> list[list[int]]:
    """As many bins as asked for: hTasks of bins that hold several move to new ones."""
    bins = [list(members) for members in bins]
    while len(bins) < count:
        bins.append([max(bins, key=len).pop()])
    return bins


def _subset_sums(sizes: np.ndarray) -> np.ndarray:
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums, sums + size])
    return sums


def _deal(sizes: np.ndarray, buckets: int) -> list[list[int]]:
    """Longest first, each to the least loaded bucket."""
    dealt: list[list[int]] = [[] for _ in range(buckets)]
    held = np.zeros(buckets)
    for htask in np.argsort(-sizes, kind="stable"):
        lightest = int(held.argmin())
        dealt[lightest].append(int(htask))
        held[lightest] += sizes[htask]
    return dealt


def _divide_pairs(buckets: list[list[int]], sizes: np.ndarray) -> list[list[int]]:
    """Divides pairs of buckets anew, those of most different loads first, while that helps."""
    held = [sizes[bucket].sum() for bucket in buckets]
    negligible = _NEGLIGIBLE * sizes.sum() / len(buckets)
    changed = set(range(len(buckets)))
    while changed:
        pairs = [
            (one, two)
            for one, two in combinations(range(len(buckets)), 2)
            if (one in changed or two in changed) and abs(held[one] - held[two]) > negligible
        ]
        pairs.sort(key=lambda pair: -abs(held[pair[0]] - held[pair[1]]))
        changed = set()
        for one, two in pairs:
            divided = _halve(buckets[one] + buckets[two], sizes)
            loads = [sizes[part].sum() for part in divided]
            if abs(loads[0] - loads[1]) < abs(held[one] - held[two]) - negligible:
                (buckets[one], buckets[two]), (held[one], held[two]) = divided, loads
                changed |= {one, two}
    return buckets


def _halve(members: list[int], sizes: np.ndarray) -> tuple[list[int], list[int]]:
    """Two parts as equal as can be; of many members the longest are dealt, the others chosen."""
    descending = sorted(members, key=lambda i: -sizes[i])
    fixed, free = descending[:-_EXCHANGED_HTASKS], descending[-_EXCHANGED_HTASKS:]
    one, two = ([fixed[i] for i in part] for part in _deal(sizes[fixed], 2))
    sums = _subset_sums(sizes[free])
    target = sizes[members].sum() / 2 - sizes[one].sum()
    chosen = int(np.abs(sums - target).argmin())
    one += [i for n, i in enumerate(free) if chosen >> n & 1]
    two += [i for n, i in enumerate(free) if not chosen >> n & 1]
    return one, two
