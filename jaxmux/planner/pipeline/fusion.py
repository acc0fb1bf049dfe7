"""Fuses tasks into hTasks, whose samples share microbatches (MuxTune 3.3, Eq. 4 and 6)."""

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, pairwise
from typing import NamedTuple

import numpy as np

from ..contiguous_ranges import cheapest_ranges
from ..errors import PlanningError

# Indices of the tasks of an hTask, in ascending order of their tokens.
HTask = tuple[int, ...]


class Fusion(NamedTuple):
    """A partition of the tasks into hTasks.

    Attributes:
      htasks: every task once. The tasks, and so the hTasks, ascend in tokens.
      latency: F, the estimated seconds from end to end of C microbatches of every hTask.
    """

    htasks: tuple[HTask, ...]
    latency: float


def fusions(tokens: Sequence[int], latency: Callable[[HTask], float], stages: int) -> list[Fusion]:
    """Returns, for every number of hTasks, the partition of least latency F (Eq. 6).

    The tasks are sorted by tokens, and every hTask is a contiguous range of them:

        F(m, n) = min_i F(i, n-1) + L(H_{i+1→m}) / S,   F(m, 1) = L(H_{1→m}).

    The first hTask fills and drains the pipeline, and each further one adds its average latency per
    stage, which is less than its time in a full pipeline. So the partition of least F is not always
    the fastest, and a caller that can simulate the pipeline should choose among these partitions.
    `latency` is called once for each of the M(M+1)/2 contiguous hTasks.

    Args:
      tokens: n_i, tokens of a microbatch of each of the M tasks.
      latency: L, end-to-end latency in seconds of an hTask alone in the pipeline, for example
        `pipeline_latency`; infinite for an hTask that is not allowed. Numbers of hTasks for which
        no partition is allowed are left out.
      stages: S, the number of pipeline stages.

    Raises:
      PlanningError: there are no tasks, or no partition has a finite latency.
    """
    ascending = sorted(range(len(tokens)), key=lambda task: (tokens[task], task))
    costs = np.full((len(ascending), len(ascending)), np.inf)
    for first, last in combinations_with_replacement(range(len(ascending)), 2):
        costs[first, last] = latency(tuple(ascending[first : last + 1]))
    return [
        Fusion(tuple(tuple(ascending[first : last + 1]) for first, last in ranges), total)
        for ranges, total in fuse_ranges(costs, stages)
    ]


def fuse_ranges(costs: np.ndarray, stages: int) -> list[tuple[list[tuple[int, int]], float]]:
    """Returns the best partitions of sorted tasks into contiguous ranges (Eq. 6).

    Args:
      costs: float [M, M]; entry [i, k] is the latency in seconds of the hTask of the tasks i to k,
        both included; infinite where it does not fit. Entries below the diagonal are not read.
      stages: S, the number of pipeline stages.

    Returns:
      For every possible number of hTasks, the first and the last task of each hTask, and the
      latency F in seconds.

    Raises:
      PlanningError: there are no tasks, or no partition has a finite latency.
    """
    tasks = len(costs)
    if not tasks:
        raise PlanningError("no tasks to fuse")
    further = np.full((tasks + 1, tasks + 1), np.inf)
    further[:-1, 1:] = np.where(np.tri(tasks, dtype=bool).T, costs / stages, np.inf)
    first = np.concatenate([[np.inf], costs[0]])
    found = [
        ([(begin, end - 1) for begin, end in pairwise((0, *ends))], total)
        for ends, total in cheapest_ranges(first, further, tasks)
        if np.isfinite(total)
    ]
    if not found:
        raise PlanningError(f"no partition of the {tasks} tasks into hTasks fits in memory")
    return found


def pipeline_latency(stages: Sequence[float], microbatches: int) -> float:
    """Returns the end-to-end latency of an hTask alone in the pipeline, in seconds (Eq. 4).

    L = 2 Σ_{s<S} L⁽ˢ⁾ + 2C max_s L⁽ˢ⁾: warm-up and drain, then the steady phase.

    Args:
      stages: L⁽ˢ⁾, seconds of one pass of a microbatch on each stage: the mean of its forward and
        its backward pass.
      microbatches: C, the number of microbatches.
    """
    return 2 * sum(stages[:-1]) + 2 * microbatches * max(stages)
