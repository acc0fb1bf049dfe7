"""Fuses tasks into hTasks, which are batched spatially (MuxTune 3.3, Eq. 6)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError

# Indices of the tasks of an hTask, in ascending order of their tokens.
HTask = tuple[int, ...]


class Fusion(NamedTuple):
    """A plan of task fusion.

    Attributes:
      htasks: every task once; tasks, and so hTasks, ascend in tokens.
      latency: F*, the estimated end-to-end latency of a step, in seconds.
    """

    htasks: tuple[HTask, ...]
    latency: float


def fuse_tasks(
    tokens: Sequence[int],
    latency: Callable[[HTask], float],
    stages: int,
    fits: Callable[[HTask], bool] = lambda htask: True,
) -> Fusion:
    """The partition of the tasks, sorted by tokens, into contiguous hTasks of least latency.

    F(m, n) = min_i F(i, n-1) + L(H_{i+1→m}) / S with F(m, 1) = L(H_{1→m}), and
    F* = min_n F(M, n): the first hTask fills and drains the pipeline, and each further one adds
    its average latency per stage. `latency` and `fits` are called once for each of the M(M+1)/2
    contiguous hTasks; with the O(S) of Eq. 4 that makes O(M²(S + M)) in all.

    Args:
      tokens: n_i, tokens of each task's microbatch.
      latency: L, end-to-end latency in seconds of an hTask alone in the pipeline (Eq. 4).
      stages: S, of the pipeline.
      fits: whether an hTask's memory suffices (Eq. 5).

    Raises:
      PlanningError: a task does not fit even alone; or there are no tasks.
    """
    return min(fusions(tokens, latency, stages, fits), key=lambda fusion: fusion.latency)


def fusions(
    tokens: Sequence[int],
    latency: Callable[[HTask], float],
    stages: int,
    fits: Callable[[HTask], bool] = lambda htask: True,
) -> list[Fusion]:
    """For every number of hTasks, from the least possible on, the best partition into so many.

    F charges a further hTask its average latency per stage, which is less than what it takes in a
    full pipeline; who can simulate one chooses among these. Arguments and errors as of
    `fuse_tasks`.
    """
    ascending = sorted(range(len(tokens)), key=lambda task: (tokens[task], task))
    for task in ascending:
        if not fits((task,)):
            raise PlanningError(
                f"task {task} with {tokens[task]} tokens a microbatch does not fit in memory even "
                "alone"
            )
    costs = np.full((len(ascending), len(ascending)), np.inf)
    for i in range(len(ascending)):
        for k in range(i, len(ascending)):
            htask = tuple(ascending[i : k + 1])
            if fits(htask):
                costs[i, k] = latency(htask)
    return [
        Fusion(tuple(tuple(ascending[i : k + 1]) for i, k in ranges), total)
        for ranges, total in fuse_ranges(costs, stages)
    ]


def fuse_ranges(costs: np.ndarray, stages: int) -> list[tuple[list[tuple[int, int]], float]]:
    """The dynamic program of `fusions` over a table of costs.

    Args:
      costs: float [M, M]; entry [i, k] is the latency in seconds of the hTask of the tasks i to k
        in sorted order, both included; infinite where it does not fit. Entries below the diagonal
        are not read.
      stages: S.

    Returns:
      For every possible number of hTasks, first and last task of each, and F.

    Raises:
      PlanningError: there are no tasks, or no partition has a finite cost.
    """
    tasks = len(costs)
    if not tasks:
        raise PlanningError("no tasks to fuse")
    # added[i, m]: what an hTask of the tasks from i up to m, without it, adds to what is before.
    added = np.full((tasks + 1, tasks + 1), np.inf)
    added[:-1, 1:] = np.where(np.tri(tasks, dtype=bool).T, costs / stages, np.inf)
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
    """The ranges that end where each round of the program cut last."""
    ranges, end = [], tasks
    for cuts in reversed(cut_at):
        start = int(cuts[end])
        ranges.append((start, end - 1))
        end = start
    ranges.append((0, end - 1))
    return ranges[::-1]


def pipeline_latency(stages: Sequence[float], microbatches: int) -> float:
    """End-to-end latency of an hTask alone in the pipeline, in seconds (MuxTune Eq. 4).

    L = 2 Σ_{s<S} L⁽ˢ⁾ + 2 C max_s L⁽ˢ⁾: warm-up and drain, then the steady phase.

    Args:
      stages: L⁽ˢ⁾, seconds of one pass of each stage: the mean of its forward and its backward.
      microbatches: C, the number of microbatches.
    """
    return 2 * sum(stages[:-1]) + 2 * microbatches * max(stages)
