"""The hTasks and the buckets that MuxTune itself chooses (MuxTune 3.3 and 3.4).

MuxTune takes the partition into hTasks of least latency by Eq. 6, and then the fastest buckets of
these hTasks. The planner instead simulates the best partition into every number of hTasks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline.groupings import (
    Buckets,
    Fusion,
    HTask,
    balance_gap,
    candidate_buckets,
    fusions,
)


def fuse_tasks(
    tokens: Sequence[int],
    latency: Callable[[HTask], float],
    stages: int,
    fits: Callable[[HTask], bool] = lambda htask: True,
) -> Fusion:
    """Returns the partition of least latency, F* = min_n F(M, n) (Eq. 6).

    `latency` and `fits` are called once for each of the M(M+1)/2 hTasks that are contiguous in
    tokens, and `fits` once more for each task alone.

    Args:
      tokens: n_i, tokens of a microbatch of each of the M tasks.
      latency: L, end-to-end latency in seconds of an hTask alone in the pipeline.
      stages: S, the number of pipeline stages.
      fits: whether the memory suffices for an hTask (Eq. 5).

    Raises:
      PlanningError: a task does not fit even alone, or there are no tasks.
    """
    for task, own in sorted(enumerate(tokens), key=lambda pair: pair[1]):
        if not fits((task,)):
            raise PlanningError(
                f"task {task} with {own} tokens a microbatch does not fit in memory even alone"
            )

    def allowed_latency(htask: HTask) -> float:
        return latency(htask) if fits(htask) else np.inf

    return min(fusions(tokens, allowed_latency, stages), key=lambda fusion: fusion.latency)


class BucketChoice(NamedTuple):
    """The buckets that `choose_buckets` chose.

    Attributes:
      buckets: every hTask once.
      latency: simulated end-to-end latency in seconds.
      gap: bound on how far the largest bucket is above the smallest possible largest bucket, as a
        fraction of it (see `balance_gap`); 0.01 is 1%.
    """

    buckets: Buckets
    latency: float
    gap: float


def choose_buckets(
    latencies: Sequence[float], simulate: Callable[[Buckets], float]
) -> BucketChoice:
    """Returns the balanced buckets, of any number P, of least simulated latency.

    Args:
      latencies: L⁽¹⁾(H_i), seconds of a microbatch of each hTask on the first stage.
      simulate: returns the end-to-end latency in seconds with the given buckets.

    Raises:
      PlanningError: there are no hTasks, or a latency is not positive and finite.
    """
    candidates = candidate_buckets(latencies)
    simulated = [simulate(buckets) for buckets in candidates]
    best = int(np.argmin(simulated))
    gap = balance_gap(latencies, candidates[best])
    return BucketChoice(candidates[best], float(simulated[best]), gap)
