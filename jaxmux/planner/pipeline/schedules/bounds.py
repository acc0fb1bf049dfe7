"""What no schedule of some jobs can be faster than."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .workload import Workload


def least_makespan(load: Workload) -> float:
    """A lower bound on the makespan of every schedule, in lockstep or free-running, of one chunk a
    stage: the larger of

    - the work of a stage, with the shortest way to it forward and from it backward;
    - for a task, the sum over its global batches, which run one after another, of that same bound
      on the jobs of each alone.
    """
    jobs = list(range(len(load.jobs)))
    chains = (
        sum(_alone(load, members) for members in batches.values())
        for batches in _batches(load).values()
    )
    return max([_alone(load, jobs), *chains])


def least_paired_ticks(load: Workload) -> int:
    """A lower bound on the ticks of a schedule with a forward and a backward in a tick: a global
    batch of n jobs takes n + 2S − 1 of them until its task may go on (see `bubble_lemma`)."""
    each = 2 * load.stages - 1
    chains = (
        sum(len(members) + each for members in batches.values())
        for batches in _batches(load).values()
    )
    return max([len(load.jobs) + each, *chains])


def _alone(load: Workload, jobs: Sequence[int]) -> float:
    forward, backward = load.forward[jobs], load.backward[jobs]
    before = [(np.cumsum(times, axis=1) - times).min(axis=0) for times in (forward, backward)]
    return float((forward.sum(axis=0) + backward.sum(axis=0) + before[0] + before[1]).max())


def _batches(load: Workload) -> dict[int, dict[int, list[int]]]:
    """By task and step, the jobs of the global batch."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for j, job in enumerate(load.jobs):
        for task, step in job.batches:
            found[task][step].append(j)
    return found
