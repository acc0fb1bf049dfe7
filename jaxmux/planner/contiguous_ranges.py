"""Divides N items into contiguous ranges of least cost, by dynamic programming."""

from typing import NamedTuple

import numpy as np


class Ranges(NamedTuple):
    """A division of N items into ranges. `ends` holds, for each range, the number of items up to
    its end. `cost` is the sum of the ranges' costs; it is infinite if no division is allowed."""

    ends: tuple[int, ...]
    cost: float


def cheapest_ranges(first: np.ndarray, further: np.ndarray, most: int) -> list[Ranges]:
    """Returns, for each number of ranges from 1 to `most`, the division of least cost.

    Args:
      first: float [N + 1]; entry [k] is the cost of the first range if it holds k items. Infinite
        means that the range is not allowed; entry [0] must be infinite.
      further: float [N + 1, N + 1]; entry [i, k] is the cost of a later range that holds the items
        i to k - 1. Entries with k <= i must be infinite.
    """
    # Entry [k]: the least cost of the first k items in the current number of ranges.
    best, begins, divisions = first, [], []
    for count in range(most):
        if count:
            through = best[:, None] + further
            begins.append(through.argmin(axis=0))
            best = through.min(axis=0)
        ends = [len(first) - 1]
        for begin in reversed(begins):
            ends.append(int(begin[ends[-1]]))
        divisions.append(Ranges(tuple(reversed(ends)), float(best[-1])))
    return divisions
