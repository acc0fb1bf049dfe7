"""Bin packing of one kind of item: sizes into as few bins of one capacity as possible.

Two constructions and a bound that nearly always meet, so that the answer is known to be optimal
without a solver. A bin may have *seats*: the most items it holds, whatever their sizes.
"""

from collections.abc import Sequence

import numpy as np


def least_bins(sizes: Sequence[int], capacity: int, seats: int | None = None) -> int:
    """A lower bound on the bins of any packing: Martello and Toth's L2, and the seats.

    For a threshold α, items above `capacity` - α share a bin with no item of at least α, and two
    items above half the capacity never share one; what the items from α to half the capacity need
    beyond the room beside those is a further bound. L2 is the best over all α (Martello and Toth,
    Lower bounds and reduction procedures for the bin packing problem, 1990).

    Args:
      sizes: positive, at most `capacity` each.
      capacity: of a bin, in the unit of the sizes.
      seats: most items of a bin; None for no limit.
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
    return bound if seats is None else max(bound, -(-len(ascending) // seats))


def first_fit_decreasing(
    sizes: Sequence[int], capacity: int, seats: int | None = None
) -> list[list[int]]:
    """Indices of the items of each bin: longest item first, into the first bin with room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in _longest_first(sizes):
        for i, room in enumerate(rooms):
            if sizes[item] <= room and (seats is None or len(bins[i]) < seats):
                bins[i].append(item)
                rooms[i] -= sizes[item]
                break
        else:
            bins.append([item])
            rooms.append(capacity - sizes[item])
    return bins


def fullest_bins(sizes: Sequence[int], capacity: int, seats: int | None = None) -> list[list[int]]:
    """Indices of the items of each bin, every bin filled as far as the items left allow.

    A bin takes the longest item left and beside it those that leave the least room, of such
    choices one of the fewest items (minimum bin slack; Gupta and Ho, A new heuristic algorithm for
    the one-dimensional bin-packing problem, 1999). So short items stay for later gaps.
    """
    left = _longest_first(sizes)
    bins = []
    while left:
        first, *others = left
        chosen = fullest_subset(
            [sizes[item] for item in others],
            capacity - sizes[first],
            None if seats is None else seats - 1,
        )
        bins.append([first, *(others[i] for i in chosen)])
        taken = set(bins[-1])
        left = [item for item in left if item not in taken]
    return bins


def fullest_subset(sizes: Sequence[int], capacity: int, seats: int | None = None) -> list[int]:
    """Indices, ascending, of items with the largest sum within `capacity`, as few as can be."""
    if sum(sizes) <= capacity and (seats is None or len(sizes) <= seats):
        return list(range(len(sizes)))
    never = np.iinfo(np.int32).max // 2
    # fewest[t]: the fewest of the items so far that sum to t.
    fewest = np.full(capacity + 1, never, np.int32)
    fewest[0] = 0
    takes = []
    limit = never if seats is None else seats + 1
    for size in sizes:
        if size > capacity:
            takes.append(None)
            continue
        with_item = fewest[: capacity + 1 - size] + 1
        better = with_item < np.minimum(fewest[size:], limit)
        takes.append(better)
        fewest[size:] = np.where(better, with_item, fewest[size:])
    total = int(np.flatnonzero(fewest < never)[-1])
    chosen = []
    for i in reversed(range(len(sizes))):
        if takes[i] is not None and total >= sizes[i] and takes[i][total - sizes[i]]:
            chosen.append(i)
            total -= sizes[i]
    return chosen[::-1]


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])
