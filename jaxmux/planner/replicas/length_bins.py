"""Buckets of sequence lengths that leave the least padding (LobRA 4.3, dynamic bucketing)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError


class LengthBins(NamedTuple):
    """Lengths that sequences are padded to.

    Attributes:
      boundaries: length in tokens of each bucket, ascending.
      counts: sequences of each bucket.
      padding: tokens of padding over all sequences, within the intervals included.
    """

    boundaries: tuple[int, ...]
    counts: tuple[int, ...]
    padding: int


def choose_length_bins(
    lengths: Sequence[int], boundaries: Sequence[int], buckets: int
) -> LengthBins:
    """The at most `buckets` boundaries that pad a batch least.

    State_{i,j}, the least padding when the first i intervals make j buckets, follows Eq. 4:
    State_{i,j} = min_{i' < i} State_{i',j-1} + Σ_{i' < i'' ≤ i} |I_{i''}| (u_i - u_{i''}).
    With prefix sums the inner sum takes constant time, and everything O(B log U + R U²). Intervals
    without sequences take no part, as in the paper.

    Args:
      lengths: tokens of each of the B sequences.
      boundaries: u_1 < ... < u_U, the lengths to choose from.
      buckets: R.

    Raises:
      PlanningError: a sequence is longer than every boundary, or there is nothing to choose.
    """
    candidates, sizes = np.asarray(boundaries, np.int64), np.asarray(lengths, np.int64)
    if not len(candidates) or (np.diff(candidates) <= 0).any():
        raise PlanningError(f"bucket boundaries {list(boundaries)} are not ascending")
    if buckets < 1:
        raise PlanningError(f"{buckets} buckets: at least one is needed")
    if not len(sizes):
        return LengthBins((), (), 0)
    if sizes.max() > candidates[-1]:
        raise PlanningError(
            f"sequence {int(sizes.argmax())} has {int(sizes.max())} tokens, the longest bucket "
            f"holds {int(candidates[-1])}"
        )
    per_interval = np.bincount(np.searchsorted(candidates, sizes), minlength=len(candidates))
    used = np.flatnonzero(per_interval)
    ends, per_interval = candidates[used], per_interval[used]
    number = np.concatenate([[0], np.cumsum(per_interval)])
    padded = np.concatenate([[0], np.cumsum(per_interval * ends)])
    chosen = _cut(_paddings(ends, number, padded), min(buckets, len(ends)))
    tops = [int(ends[end - 1]) for end in chosen]
    counts = np.diff(number[[0, *chosen]])
    return LengthBins(
        tuple(tops), tuple(int(n) for n in counts), int(np.dot(tops, counts) - sizes.sum())
    )


def _paddings(ends, number, padded) -> np.ndarray:
    """[i', i]: padding when the intervals behind the first i', up to the i-th, make a bucket."""
    intervals = len(ends)
    table = np.full((intervals + 1, intervals + 1), np.inf)
    table[:, 1:] = ends * (number[1:] - number[:, None]) - (padded[1:] - padded[:, None])
    return np.where(np.tri(intervals + 1, dtype=bool), np.inf, table)


def _cut(paddings: np.ndarray, buckets: int) -> list[int]:
    """For each bucket, up to which interval it reaches, in the best division."""
    state = np.full(len(paddings), np.inf)
    state[0] = 0
    came_from = []
    for _ in range(buckets):
        through = state[:, None] + paddings
        came_from.append(through.argmin(axis=0))
        state = through.min(axis=0)
    chosen = [len(paddings) - 1]
    for before in reversed(came_from):
        chosen.append(int(before[chosen[-1]]))
    return chosen[-2::-1]
