"""Bin packing: puts items of given sizes into as few bins of one capacity as possible.

Three constructions nearly always meet a lower bound, so the answer is known to be optimal without a
solver. A bin may also have a limit on its number of items.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from itertools import groupby

import numpy as np


def least_bins(sizes: Sequence[int], capacity: int, most_items: int | None = None) -> int:
    """Returns a lower bound on the number of bins of any packing.

    It is the larger of Martello and Toth's L2 and the bound by the number of items. For a threshold
    α, an item above `capacity` - α shares a bin with no item of at least α, and two items above
    half the capacity never share one. The items from α to half the capacity fill the room beside
    those; items that do not fit there need further bins. L2 is the best such bound over all α
    (Martello and Toth, Lower bounds and reduction procedures for the bin packing problem, 1990).

    Args:
      sizes: size of each item, positive and at most `capacity`.
      capacity: capacity of a bin, in the unit of the sizes.
      most_items: the most items that a bin may hold; None for no limit.
    """
    if not len(sizes):
        return 0
    ascending = np.sort(np.asarray(sizes, np.int64))
    sums = np.concatenate([[0], np.cumsum(ascending)])
    half = np.searchsorted(ascending, capacity // 2, side="right")
    thresholds = np.concatenate([[0], ascending[:half]])
    from_threshold = np.searchsorted(ascending, thresholds)
    alone = np.searchsorted(ascending, capacity - thresholds, side="right")
    small = sums[half] - sums[from_threshold]
    room = (alone - half) * capacity - (sums[alone] - sums[half])
    beyond = np.maximum(0, -((room - small) // capacity))
    bound = int((len(ascending) - half + beyond).max())
    return bound if most_items is None else max(bound, -(-len(ascending) // most_items))


def first_fit_decreasing(
    sizes: Sequence[int], capacity: int, most_items: int | None = None
) -> list[list[int]]:
    """Packs items, longest first, each into the first bin with room.

    Arguments as in `least_bins`. Returns the indices of the items of each bin.
    """
    bins: list[list[int]] = []
    rooms: list[int] = []
    for size, items in groupby(_longest_first(sizes), key=sizes.__getitem__):
        # A bin without room for one item has none for the next item of the same size.
        i = 0
        for item in items:
            while i < len(bins) and (size > rooms[i] or len(bins[i]) == most_items):
                i += 1
            if i == len(bins):
                bins.append([])
                rooms.append(capacity)
            bins[i].append(item)
            rooms[i] -= size
    return bins


def fullest_bins(
    sizes: Sequence[int], capacity: int, most_items: int | None = None
) -> list[list[int]]:
    """Packs items so that every bin is as full as the remaining items allow.

    A bin takes the longest remaining item and those further items that leave the least room. Of
    several such choices it takes one with the fewest items, so that short items remain for gaps in
    later bins (minimum bin slack; Gupta and Ho, A new heuristic algorithm for the one-dimensional
    bin-packing problem, 1999).

    Arguments as in `least_bins`. Returns the indices of the items of each bin.
    """
    most_items = most_items or len(sizes)
    order = _longest_first(sizes)
    left = {size: deque(items) for size, items in groupby(order, key=sizes.__getitem__)}
    bins = []
    while left:
        first = next(iter(left))
        room = capacity - first
        others = [
            size
            for size, items in left.items()
            for _ in range(min(len(items) - (size == first), room // size))
        ]
        chosen = _fullest_of_descending(others, room, most_items - 1)
        content = [first, *(others[i] for i in chosen)]
        needed = Counter(content)
        # Items only become fewer, so the best content stays the best while its items last.
        while all(len(left[size]) >= count for size, count in needed.items()):
            bins.append([left[size].popleft() for size in content])
        left = {size: items for size, items in left.items() if items}
    return bins


def balanced_bins(
    sizes: Sequence[int], count: int, capacity: int, most_items: int | None = None
) -> list[list[int]] | None:
    """Packs items into a given number of bins, longest first, each into the emptiest bin with room
    for one more item (Graham's longest processing time rule).

    Where the limit on the number of items is nearly reached, it finds packings that the other
    constructions miss: these fill some bins with few long items, and short items are left over.

    Other arguments as in `least_bins`.

    Args:
      count: number of bins.

    Returns:
      The indices of the items of each bin; None if an item does not fit.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, i) for i in range(count)]
    for item in _longest_first(sizes):
        if not emptiest or emptiest[0][0] + sizes[item] > capacity:
            return None
        load, i = emptiest[0]
        bins[i].append(item)
        if len(bins[i]) == most_items:
            heapq.heappop(emptiest)
        else:
            heapq.heapreplace(emptiest, (load + sizes[item], i))
    return bins


def fullest_subset(sizes: Sequence[int], capacity: int, most_items: int | None = None) -> list[int]:
    """Returns the indices, ascending, of the fewest items with the largest sum within `capacity`.

    Of several such choices it takes the one that leaves the shortest items over, so the answer is
    unique. Arguments as in `least_bins`.
    """
    fitting = [i for i in _longest_first(sizes) if sizes[i] <= capacity]
    chosen = _fullest_of_descending([sizes[i] for i in fitting], capacity, most_items or len(sizes))
    return sorted(fitting[i] for i in chosen)


def _fullest_of_descending(sizes: Sequence[int], capacity: int, most_items: int) -> list[int]:
    """`fullest_subset` of descending sizes.

    Most items are never looked at: the search ends as soon as the items so far reach the largest
    possible sum and no choice with a later item could reach it with fewer items.
    """
    most = _largest_sum(sizes, min(capacity, sum(sizes[:most_items])))
    never = most_items + 1
    # fewest[t] is the least number of the items so far that sum to t.
    fewest = np.full(most + 1, never, np.int32)
    fewest[0] = 0
    # longest[n] is the sum of the n longest items.
    longest = [0]
    takes = []
    for size in sizes:
        count = int(fewest[most])
        if count < never and longest[max(count - 2, 0)] + size < most:
            break
        longest.append(longest[-1] + size)
        with_item = fewest[: max(0, most + 1 - size)] + 1
        takes.append(with_item < fewest[size:])
        np.minimum(fewest[size:], with_item, out=fewest[size:])
    total = int(np.flatnonzero(fewest < never)[-1])
    chosen = []
    for i in reversed(range(len(takes))):
        if total >= sizes[i] and takes[i][total - sizes[i]]:
            chosen.append(i)
            total -= sizes[i]
    return chosen[::-1]


def _largest_sum(sizes: Sequence[int], most: int) -> int:
    """The largest sum of any of the sizes that is at most `most`."""
    # Bit t is set where some of the sizes sum to t.
    sums, within = 1, (2 << most) - 1
    for size in sizes:
        if sums >> most:
            break
        sums |= (sums << size) & within
    return sums.bit_length() - 1


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])
