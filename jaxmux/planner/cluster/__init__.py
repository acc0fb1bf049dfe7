"""Replays a cluster in which many fine-tuning jobs come and go, by simulation (MuxTune 5.4).

`random_jobs` draws the jobs of a day. `replay` simulates them on like GPUs, with a policy that
places each job on a GPU: alone (`one_task_per_gpu`), on the first GPU with memory (`first_fit`), on
the GPU with the fewest tasks (`fewest_tasks`), or where the predicted throughput rises most
(`most_throughput`). `RoundTimes` predicts the time of a round of the tasks that share a GPU.
"""

from .arrivals import random_jobs
from .placement import fewest_tasks, first_fit, most_throughput, one_task_per_gpu
from .replay import Job, Policy, ReplayResult, Tasks, replay, with_task
from .round_times import RoundTimes, TaskKind

__all__ = [
    "Job",
    "Policy",
    "ReplayResult",
    "RoundTimes",
    "TaskKind",
    "Tasks",
    "fewest_tasks",
    "first_fit",
    "most_throughput",
    "one_task_per_gpu",
    "random_jobs",
    "replay",
    "with_task",
]
