"""Lower bounds on the time of any schedule of a workload with one virtual stage per stage."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from jaxmux.planner.pipeline.schedules import Workload


def least_makespan(workload: Workload) -> float:
    """Returns a lower bound on the makespan of every schedule, to compare a schedule with.

    The bound holds for every tick rule, in lockstep and for stages that run at their own pace.
    Messages between stages count as taking no time. The bound is the larger of two bounds:

    - for a stage, the time of all its passes, plus the shortest time in which a microbatch reaches
      the stage, plus the shortest time from the stage's last backward pass to the end;
    - for a task, the sum over its global batches of the first bound for the microbatches of that
      global batch alone, because a task's global batches run one after another.

    Args:
      workload: the stream, with one virtual stage per stage.

    Returns:
      The bound, in the unit of the workload's times.
    """
    everything = list(range(len(workload.microbatches)))
    chains = (
        sum(_least_alone(workload, members) for members in steps.values())
        for steps in _global_batches(workload).values()
    )
    return max([_least_alone(workload, everything), *chains])


def least_paired_ticks(workload: Workload) -> int:
    """Returns a lower bound on the number of ticks of every schedule with the tick rule "paired".

    A global batch of n microbatches on S stages takes at least n + 2S - 1 ticks until the task's
    next global batch may start. A task's global batches add up, and all microbatches together take
    at least as many ticks as one global batch of them.

    Args:
      workload: the stream, with one virtual stage per stage. Its times are not used.
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
