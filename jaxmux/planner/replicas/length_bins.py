"""Length bins that leave the least padding (dynamic bucketing, LobRA 4.3, Eq. 4)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..contiguous_ranges import cheapest_ranges
from ..errors import PlanningError


class LengthBins(NamedTuple):
    """Training sequences sorted by length into bins. Each bin has an upper boundary in tokens, to
    which its sequences are padded, and a number of sequences. `padding` is the number of padding
    tokens in all bins."""

    boundaries: tuple[int, ...]
    counts: tuple[int, ...]
    padding: int


def choose_length_bins(
    lengths: Sequence[int], boundaries: Sequence[int], most_bins: int
) -> LengthBins:
    """Sorts sequences into the length bins that need the least padding (LobRA Eq. 4).

    The candidate boundaries u_1 ... u_U divide the lengths into U intervals, and I_i is the set of
    sequences in interval i. State_{i,j} is the least padding with which the first i intervals form
    j bins (Eq. 4, where i is the last interval of a bin):

        State_{i,j} = min_{i' < i} State_{i',j-1} + Σ_{i' < i'' ≤ i} |I_{i''}| (u_i - u_{i''}).

    Prefix sums give the inner sum in constant time, so the time for B sequences in at most R bins
    is O(B log U + R U²). Bins without sequences are left out.

    Raises:
      PlanningError: a sequence is longer than every boundary, there are no boundaries or they do
        not ascend, or `most_bins` is less than 1.
    """
    candidates, sizes = np.asarray(boundaries, np.int64), np.asarray(lengths, np.int64)
    if not len(candidates) or (np.diff(candidates) <= 0).any():
        raise PlanningError(f"boundaries of length bins {list(boundaries)} are not ascending")
    if most_bins < 1:
        raise PlanningError(f"{most_bins} length bins: at least one is needed")
    if not len(sizes):
        return LengthBins((), (), 0)
    if sizes.max() > candidates[-1]:
        raise PlanningError(
            f"sequence {int(sizes.argmax())} has {int(sizes.max())} tokens, the longest length bin "
            f"ends at {int(candidates[-1])}"
        )
    per_interval = np.bincount(np.searchsorted(candidates, sizes), minlength=len(candidates))
    used = np.flatnonzero(per_interval)
    ends, per_interval = candidates[used], per_interval[used]
    # In the first i intervals: the number of sequences, and of tokens after padding to the
    # interval's end.
    sequences = np.concatenate([[0], np.cumsum(per_interval)])
    tokens = np.concatenate([[0], np.cumsum(per_interval * ends)])
    paddings = _paddings(ends, sequences, tokens)
    last, _ = cheapest_ranges(paddings[0], paddings, min(most_bins, len(ends)))[-1]
    tops = [int(ends[end - 1]) for end in last]
    counts = np.diff(sequences[[0, *last]])
    return LengthBins(
        tuple(tops), tuple(int(n) for n in counts), int(np.dot(tops, counts) - sizes.sum())
    )


def _paddings(ends: np.ndarray, sequences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Entry [i', i]: the padding of a bin of the intervals i' + 1 to i; infinite unless i' < i."""
    intervals = len(ends)
    table = np.full((intervals + 1, intervals + 1), np.inf)
    table[:, 1:] = ends * (sequences[1:] - sequences[:, None]) - (tokens[1:] - tokens[:, None])
    return np.where(np.tri(intervals + 1, dtype=bool), np.inf, table)
