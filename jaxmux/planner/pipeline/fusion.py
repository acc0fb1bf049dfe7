"""Fuses tasks into hTasks, whose samples share microbatches (MuxTune 3.3, Eq. 4 and 6)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

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


def fuse_tasks(
    tokens: Sequence[int],
    latency: Callable[[HTask], float],
    stages: int,
    fits: Callable[[HTask], bool] = lambda htask: True,
) -> Fusion:
    """Returns the partition of least latency F* (Eq. 6).

    The tasks are sorted by tokens, and every hTask is a contiguous range of them:

        F(m, n) = min_i F(i, n-1) + L(H_{i+1→m}) / S,   F(m, 1) = L(H_{1→m}),   F* = min_n F(M, n).

    The first hTask fills and drains the pipeline, and each further one adds its average latency per
    stage. `latency` and `fits` are called once for each of the M(M+1)/2 contiguous hTasks.

    Args:
      tokens: n_i, tokens of a microbatch of each of the M tasks.
      latency: L, end-to-end latency in seconds of an hTask alone in the pipeline, for example
        `pipeline_latency`.
      stages: S, the number of pipeline stages.
      fits: whether the memory suffices for an hTask (Eq. 5).

    Raises:
      PlanningError: a task does not fit even alone, or there are no tasks.
    """
    return min(fusions(tokens, latency, stages, fits), key=lambda fusion: fusion.latency)


def fusions(
    tokens: Sequence[int],
    latency: Callable[[HTask], float],
    stages: int,
    fits: Callable[[HTask], bool] = lambda htask: True,
) -> list[Fusion]:
    """Returns, for every number of hTasks from the least possible one on, the best partition.

    Eq. 6 charges each further hTask its average latency per stage, which is less than its time in a
    full pipeline. A caller that can simulate the pipeline should choose among these partitions.
    Arguments and errors are those of `fuse_tasks`.
    """
    ascending = sorted(range(len(tokens)), key=lambda task: (tokens[task], task))
    for task in ascending:
        if not fits((task,)):
            raise PlanningError(
                f"task {task} with {tokens[task]} tokens a microbatch does not fit in memory even "
                "alone"
            )
    costs = np.full((len(ascending), len(ascending)), np.inf)
    for first in range(len(ascending)):
        for last in range(first, len(ascending)):
            htask = tuple(ascending[first : last + 1])
            if fits(htask):
                costs[first, last] = latency(htask)
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
    # added[i, m]: seconds that an hTask of the tasks i to m - 1 adds to those before it.
    added = np.full((tasks + 1, tasks + 1), np.inf)
    added[:-1, 1:] = np.where(np.tri(tasks, dtype=bool).T, costs / stages, np.inf)
    # best[m]: F(m, n) for the current number n of hTasks.
    best = np.concatenate([[np.inf], costs[0]])
    totals, cut_at = [best[tasks]], []
    for _ in range(1, tasks):
        through = best[:, None] + added
        cut_at.append(through.argmin(axis=0))
        best = through.min(axis=0)
        totals.append(best[tasks])
    found = [
        (_ranges(cut_at[:count], tasks), float(total))
        for count, total in enumerate(totals)
        if np.isfinite(total)
    ]
    if not found:
        raise PlanningError(f"no partition of the {tasks} tasks into hTasks fits in memory")
    return found


def _ranges(cut_at: Sequence[np.ndarray], tasks: int) -> list[tuple[int, int]]:
    """First and last task of each hTask, read back from the argmins of the dynamic program."""
    ranges, end = [], tasks
    for cuts in reversed(cut_at):
        start = int(cuts[end])
        ranges.append((start, end - 1))
        end = start
    ranges.append((0, end - 1))
    return ranges[::-1]


def pipeline_latency(stages: Sequence[float], microbatches: int) -> float:
    """Returns the end-to-end latency of an hTask alone in the pipeline, in seconds (Eq. 4).

    L = 2 Σ_{s<S} L⁽ˢ⁾ + 2C max_s L⁽ˢ⁾: warm-up and drain, then the steady phase.

    Args:
      stages: L⁽ˢ⁾, seconds of one pass of a microbatch on each stage: the mean of its forward and
        its backward pass.
      microbatches: C, the number of microbatches.
    """
    return 2 * sum(stages[:-1]) + 2 * microbatches * max(stages)
