"""Policies that place the jobs of a cluster on GPUs.

Each function here returns a policy for `replay`, which serves the jobs in the order of their
arrivals. Policies differ in the GPU that the next job gets, and in whether it waits.
"""

import math
from collections.abc import Callable, Sequence

from .replay import Policy, Tasks, with_task

# A function from the tasks of a GPU to the seconds of a round, infinite if they do not fit into
# memory, such as `RoundTimes.seconds`.
RoundSeconds = Callable[[Tasks], float]


def one_task_per_gpu() -> Policy:
    """Returns the policy that gives every job the first empty GPU for itself."""

    def place(gpus: Sequence[Tasks], kind: int) -> int | None:
        del kind
        return next((i for i, tasks in enumerate(gpus) if not tasks), None)

    return place


def first_fit(round_seconds: RoundSeconds) -> Policy:
    """Returns the policy that puts a job on the first GPU with memory for it, however slow the
    tasks of this GPU become.

    Args:
      round_seconds: seconds of a round of tasks that share a GPU.
    """

    def place(gpus: Sequence[Tasks], kind: int) -> int | None:
        return next((i for i, tasks in enumerate(gpus) if _fits(round_seconds, tasks, kind)), None)

    return place


def fewest_tasks(round_seconds: RoundSeconds) -> Policy:
    """Returns the policy that puts a job on the GPU with the fewest tasks, of those that have
    memory for it.

    Args:
      round_seconds: seconds of a round of tasks that share a GPU.
    """

    def place(gpus: Sequence[Tasks], kind: int) -> int | None:
        order = sorted(range(len(gpus)), key=lambda i: len(gpus[i]))
        return next((i for i in order if _fits(round_seconds, gpus[i], kind)), None)

    return place


def most_throughput(round_seconds: RoundSeconds, work: Sequence[float]) -> Policy:
    """Returns the policy that puts a job where it raises the predicted throughput of the cluster
    most.

    The throughput is the work of all tasks' rounds per second. If `work` is the tokens of a global
    batch, it is the effective throughput, which does not count padding (MuxTune 5.3). A job waits
    while no GPU has memory for it or no GPU's throughput would rise. Every empty GPU takes a job.

    Args:
      round_seconds: seconds of a round of tasks that share a GPU.
      work: for each kind of task, the work of its rounds in any unit, more than 0.
    """

    def throughput(tasks: Tasks) -> float:
        return sum(work[kind] for kind in tasks) / round_seconds(tasks) if tasks else 0.0

    def place(gpus: Sequence[Tasks], kind: int) -> int | None:
        gains = {
            tasks: throughput(with_task(tasks, kind)) - throughput(tasks)
            for tasks in dict.fromkeys(gpus)
            if _fits(round_seconds, tasks, kind)
        }
        best = max(gains, key=gains.__getitem__, default=None)
        return None if best is None or gains[best] <= 0 else gpus.index(best)

    return place


def _fits(round_seconds: RoundSeconds, tasks: Tasks, kind: int) -> bool:
    return math.isfinite(round_seconds(with_task(tasks, kind)))
