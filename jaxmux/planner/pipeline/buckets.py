"""Groups hTasks into buckets, which take turns in the pipeline (MuxTune 3.4, Eq. 7)."""

from collections.abc import Sequence

import numpy as np

from ..errors import PlanningError
from .balanced_partition import (
    deal_largest_first,
    divide_pairs_again,
    largest_sum,
    least_variance,
    small_largest_sum,
)

# For each bucket, the indices of its hTasks; the buckets descend in latency, as rule 1 of MuxTune's
# pipeline template requires.
Buckets = tuple[tuple[int, ...], ...]

# The exact search looks at all subsets of the hTasks, so it is used for at most this many.
_EXACT_HTASKS = 12
# Buckets of least variance are a candidate if their largest bucket is at most this fraction above
# the smallest possible largest bucket.
_LARGEST_ABOVE_LEAST = 0.01
# Largest buckets that differ by less than this fraction count as equal.
_NEGLIGIBLE = 1e-3


def candidate_buckets(latencies: Sequence[float], most: int | None = None) -> list[Buckets]:
    """Returns, for each number P of buckets, one or two balanced choices of buckets.

    A clock of the pipeline takes as long as its largest bucket, but the buckets of least variance
    (Eq. 7) do not always have the smallest largest bucket. For up to 12 hTasks the candidates are:

    - the buckets of least variance, if their largest bucket is at most 1% above the smallest
      possible one;
    - the buckets of least variance among those whose largest bucket is the smallest possible one,
      to 0.1%.

    For more hTasks the only candidates are those of `balanced_buckets`.

    Args:
      latencies: seconds of each hTask.
      most: the largest P; None for the number of hTasks.

    Raises:
      PlanningError: there are no hTasks, or a latency is not positive and finite.
    """
    candidates = []
    sizes = np.asarray(latencies, float)
    for balanced in balanced_buckets(latencies, most):
        smallest = balanced
        if len(sizes) <= _EXACT_HTASKS and balance_gap(latencies, balanced) > _NEGLIGIBLE:
            smallest = _in_order(small_largest_sum(balanced, sizes, _NEGLIGIBLE), sizes)
        limit = (1 + _LARGEST_ABOVE_LEAST) * largest_sum(smallest, sizes)
        candidates += [smallest] if smallest != balanced else []
        candidates += [balanced] if largest_sum(balanced, sizes) <= limit else []
    return candidates


def balanced_buckets(latencies: Sequence[float], most: int | None = None) -> list[Buckets]:
    """Returns, for each P = 1 ... N, the P buckets of least variance (Eq. 7).

    The result is exact for up to 12 hTasks. For more, hTasks are dealt to buckets in descending
    order; then pairs of buckets are divided again, each as evenly as possible, until no pair
    improves. Arguments and errors are those of `candidate_buckets`.
    """
    if not len(latencies):
        raise PlanningError("no hTasks to group")
    for htask, latency in enumerate(latencies):
        if not 0 < latency < np.inf:
            raise PlanningError(f"hTask {htask} has a latency of {latency} s, expected more than 0")
    sizes = np.asarray(latencies, float)
    counts = range(1, 1 + min(len(sizes), most or len(sizes)))
    dealt = [deal_largest_first(sizes, count) for count in counts]
    improve = least_variance if len(sizes) <= _EXACT_HTASKS else divide_pairs_again
    return [_in_order(improve(buckets, sizes), sizes) for buckets in dealt]


def balance_gap(latencies: Sequence[float], buckets: Buckets) -> float:
    """Returns the largest bucket divided by max(mean bucket, largest hTask), minus 1.

    No choice of the same number of buckets has a largest bucket below that maximum.
    """
    sizes = np.asarray(latencies, float)
    return largest_sum(buckets, sizes) / max(sizes.sum() / len(buckets), sizes.max()) - 1


def _in_order(buckets: Sequence[Sequence[int]], sizes: np.ndarray) -> Buckets:
    """The buckets in descending order of latency, the hTasks of each ascending."""
    tidy = (tuple(sorted(int(i) for i in bucket)) for bucket in buckets)
    return tuple(sorted(tidy, key=lambda bucket: (-sizes[list(bucket)].sum(), bucket)))
