"""Divides items into parts whose sums are as equal as possible.

Sizes are float64 [N] with N items. A part is a list of item indices.
"""

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

# Two parts exchange at most this many items at once; all 2^n divisions of them are compared.
_EXCHANGED_ITEMS = 12
# Sums that differ by less than this fraction of the mean sum count as equal.
_NEGLIGIBLE = 1e-3
# Relative error of a sum of float64 numbers.
_ROUNDING = 1e-12

Parts = Sequence[Sequence[int]]


def largest_sum(parts: Parts, sizes: np.ndarray) -> float:
    """Returns the largest sum of any part."""
    return max(sizes[list(part)].sum() for part in parts)


def deal_largest_first(sizes: np.ndarray, count: int) -> list[list[int]]:
    """Deals the items in descending order to `count` parts, each to the smallest part so far."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = np.zeros(count)
    for item in np.argsort(-sizes, kind="stable"):
        smallest = int(sums.argmin())
        parts[smallest].append(int(item))
        sums[smallest] += sizes[item]
    return parts


class _Layer(NamedTuple):
    """The states of the dynamic program after some of the parts are filled.

    Attributes:
      members: int64, for each state the set of items in the filled parts, as bits.
      variance: float64, the sum of squared distances of these parts from the mean of all parts.
      parent: int64, index of the state in the layer before.
      part: int64, the items of the part that was filled last, as bits.
    """

    members: np.ndarray
    variance: np.ndarray
    parent: np.ndarray
    part: np.ndarray


def least_variance(parts: Parts, sizes: np.ndarray, limit: float = np.inf) -> list[list[int]]:
    """Returns the division into as many parts of least variance, with no sum above `limit`.

    A dynamic program over sets of items fills one part after another. Each next part holds the
    largest item that is left, so every division comes up once. The variance of the given division
    bounds the search: a part at distance d from the mean forces a total distance of d on all others
    together, which leaves few subsets for a part and few sets to continue from.

    Args:
      parts: any division that keeps the limit.
      sizes: sizes of the items; at most about 16.
      limit: most that a part may sum to.
    """
    descending = np.argsort(-sizes, kind="stable")
    sums = _subset_sums(sizes[descending])
    count, mean = len(parts), sums[-1] / len(parts)
    most = sum((sizes[list(part)].sum() - mean) ** 2 for part in parts) + _ROUNDING * mean**2
    distance = (sums - mean) ** 2
    near = distance * count <= most * (count - 1) + _ROUNDING * mean**2
    near = 1 + np.flatnonzero(near[1:] & (sums[1:] <= limit))
    empty = np.zeros(1, np.int64)
    layers = [_Layer(empty, np.zeros(1), empty, empty)]
    for left in reversed(range(count)):
        layer = _fill_part(layers[-1], near, distance, len(sizes))
        off = sums[-1] - sums[layer.members] - left * mean
        within = layer.variance + off**2 / max(left, 1) <= most
        if not left:
            # Leaving out a short item may cost less variance than `most` allows.
            within = layer.members == 2 ** len(sizes) - 1
        layers.append(_Layer(*(field[within] for field in layer)))
    found, index = [], 0
    for layer in reversed(layers[1:]):
        part = int(layer.part[index])
        found.append([int(item) for n, item in enumerate(descending) if part >> n & 1])
        index = int(layer.parent[index])
    return found


def _fill_part(layer: _Layer, near: np.ndarray, distance: np.ndarray, items: int) -> _Layer:
    """The states after one more part, the one of least variance for each set of items.

    Args:
      near: int64, the subsets that a part may hold, as bits.
      distance: float64 [2^items], the squared distance of each subset's sum from the mean.
    """
    everything = 2**items - 1
    # The lowest bit is the largest item that is left.
    next_item = ~layer.members & everything
    next_item &= -next_item
    grown = []
    for bit in np.unique(next_item[next_item > 0]):
        states = np.flatnonzero(next_item == bit)
        choices = near[near & -near == bit]
        row, column = np.nonzero(layer.members[states][:, None] & choices == 0)
        parent, part = states[row], choices[column]
        members = layer.members[parent] | part
        grown.append(_Layer(members, layer.variance[parent] + distance[part], parent, part))
    merged = _Layer(*(np.concatenate(fields) for fields in zip(*grown, strict=True)))
    order = np.lexsort((merged.variance, merged.members))
    members = merged.members[order]
    best = order[np.concatenate([[True], members[1:] != members[:-1]])]
    return _Layer(*(field[best] for field in merged))


def small_largest_sum(parts: Parts, sizes: np.ndarray, precision: float) -> list[list[int]]:
    """Returns, of the divisions with the smallest largest sum, the one of least variance.

    Args:
      parts: any division into the wanted number of parts.
      sizes: sizes of the items; at most about 16.
      precision: the largest sum may exceed the smallest possible one by this fraction; bisection
        ends there.
    """
    count, best = len(parts), parts
    low, high = max(sizes.sum() / count, sizes.max()), largest_sum(parts, sizes)
    while high > low * (1 + precision):
        limit = (low + high) / 2
        packed = _fewest_bins(sizes, limit)
        if len(packed) > count:
            low = limit
        else:
            best, high = packed, largest_sum(packed, sizes)
    return least_variance(_spread(best, count), sizes, high * (1 + _ROUNDING))


def _fewest_bins(sizes: np.ndarray, limit: float) -> list[list[int]]:
    """The items in the fewest bins of at most `limit`, by a dynamic program over sets.

    For each set it keeps the packing of fewest bins, and of those the one whose last bin is least
    full, as one number: (bins - 1) · limit + sum of the last bin.
    """
    members = np.arange(2 ** len(sizes))
    used = np.full(len(members), np.inf)
    used[0] = 0.0
    last = np.zeros(len(members), np.int64)
    item_count = np.bitwise_count(members)
    slack = _ROUNDING * limit
    for count in range(1, len(sizes) + 1):
        layer = members[item_count == count]
        for item, size in enumerate(sizes):
            sets = layer[layer >> item & 1 == 1]
            before = used[sets ^ (1 << item)]
            full = np.ceil((before - slack) / limit) * limit
            after = np.where(before + size <= full + slack, before, full) + size
            better = after < used[sets]
            used[sets[better]], last[sets[better]] = after[better], item
    bins: list[list[int]] = []
    rest, opened = len(members) - 1, np.inf
    while rest:
        item = int(last[rest])
        number = int(np.ceil((used[rest] - slack) / limit))
        if number != opened:
            bins.append([])
            opened = number
        bins[-1].append(item)
        rest ^= 1 << item
    return bins


def _spread(parts: Parts, count: int) -> list[list[int]]:
    """As many parts as `count`: items of parts that hold several move to new ones."""
    spread = [list(part) for part in parts]
    while len(spread) < count:
        spread.append([max(spread, key=len).pop()])
    return spread


def _subset_sums(sizes: np.ndarray) -> np.ndarray:
    """The sum of every subset of the items: float64 [2^N], the subset as the bits of the index."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums, sums + size])
    return sums


def divide_pairs_again(parts: list[list[int]], sizes: np.ndarray) -> list[list[int]]:
    """Divides pairs of parts again, those of most different sums first, until no pair improves."""
    sums = [sizes[part].sum() for part in parts]
    negligible = _NEGLIGIBLE * sizes.sum() / len(parts)
    changed = set(range(len(parts)))
    while changed:
        pairs = [
            (one, two)
            for one, two in combinations(range(len(parts)), 2)
            if (one in changed or two in changed) and abs(sums[one] - sums[two]) > negligible
        ]
        pairs.sort(key=lambda pair: -abs(sums[pair[0]] - sums[pair[1]]))
        changed = set()
        for one, two in pairs:
            divided = _halve(parts[one] + parts[two], sizes)
            halves = [sizes[half].sum() for half in divided]
            if abs(halves[0] - halves[1]) < abs(sums[one] - sums[two]) - negligible:
                (parts[one], parts[two]), (sums[one], sums[two]) = divided, halves
                changed |= {one, two}
    return parts


def _halve(items: list[int], sizes: np.ndarray) -> tuple[list[int], list[int]]:
    """Two parts of nearly equal sums: the 12 shortest items are divided best, the others dealt."""
    descending = sorted(items, key=lambda i: -sizes[i])
    dealt, free = descending[:-_EXCHANGED_ITEMS], descending[-_EXCHANGED_ITEMS:]
    one, two = ([dealt[i] for i in part] for part in deal_largest_first(sizes[dealt], 2))
    sums = _subset_sums(sizes[free])
    target = sizes[items].sum() / 2 - sizes[one].sum()
    chosen = int(np.abs(sums - target).argmin())
    one += [item for n, item in enumerate(free) if chosen >> n & 1]
    two += [item for n, item in enumerate(free) if not chosen >> n & 1]
    return one, two
