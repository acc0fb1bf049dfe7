"""Lower bounds on the time of any schedule of a workload with one virtual stage per stage."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .workload import Workload


def least_makespan(workload: Workload) -> float:
    """Returns a lower bound on the makespan of every schedule, in the unit of the workload.

    It holds in lockstep and for stages that run at their own pace. It is the larger of two bounds:

    - the work of a stage, plus the shortest time in which a microbatch reaches the stage, plus the
      shortest time from the stage's last backward pass to the end;
    - for a task, the sum of that bound over the microbatches of each of its global batches, which
      run one after another.
    """
    everything = list(range(len(workload.microbatches)))
    chains = (
        sum(_least_alone(workload, members) for members in steps.values())
        for steps in _global_batches(workload).values()
    )
    return max([_least_alone(workload, everything), *chains])


def least_paired_ticks(workload: Workload) -> int:
    """Returns a lower bound on the ticks of a schedule with paired ticks.

    A global batch of n microbatches takes n + 2S - 1 ticks until its task may go on (see
    `bubble_lemma`).
    """
    pipeline_ticks = 2 * workload.stages - 1
    chains = (
        sum(len(members) + pipeline_ticks for members in steps.values())
        for steps in _global_batches(workload).values()
    )
    return max([len(workload.microbatches) + pipeline_ticks, *chains])


def _least_alone(workload: Workload, microbatches: Sequence[int]) -> float:
    """The first bound of `least_makespan` for some of the microbatches."""
    times = workload.forward[microbatches], workload.backward[microbatches]
    # The time on all earlier stages, of the microbatch for which it is the shortest: float64 [S].
    before = [(np.cumsum(time, axis=1) - time).min(axis=0) for time in times]
    work = [time.sum(axis=0) for time in times]
    return float((work[0] + work[1] + before[0] + before[1]).max())


def _global_batches(workload: Workload) -> dict[int, dict[int, list[int]]]:
    """By task and step, the microbatches of the global batch."""
    found: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, microbatch in enumerate(workload.microbatches):
        for task, step in microbatch.global_batches:
            found[task][step].append(index)
    return found
