"""Replays the jobs of a cluster by discrete-event simulation (MuxTune 5.4).

A job trains one task for a number of rounds. A GPU trains all of its tasks together, and a round is
one global batch of every task, so the jobs of a GPU advance by one round at the same time. Jobs
start in the order in which they arrive: while the policy finds no GPU for the first of the waiting
jobs, the others wait as well. So no job starves, neither in the queue nor beside other tasks. A job
stays on its GPU until it ends. Rounds take the predicted time of the tasks that the GPU has at the
moment; the start of a job and a change of tasks take no time.
"""

import heapq
import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError

# The tasks that share a GPU: the indices of their kinds, ascending.
Tasks = tuple[int, ...]
# A function from the tasks of every GPU and the kind of a new task to the index of the GPU that
# takes the task; None if it has to wait.
Policy = Callable[[Sequence[Tasks], int], int | None]


class Job(NamedTuple):
    """A task that is to be trained.

    Attributes:
      arrival: seconds from the start of the replay to the arrival of the job.
      kind: index of the task's kind.
      rounds: number of rounds for which the task trains, more than 0; it need not be whole.
    """

    arrival: float
    kind: int
    rounds: float


class ReplayResult(NamedTuple):
    """What became of the jobs. Times are in seconds from the start of the replay.

    Attributes:
      arrivals: float64 [jobs], times at which the jobs arrived.
      starts: float64 [jobs], times at which the jobs were placed on a GPU.
      ends: float64 [jobs], times at which the jobs ended.
      gpus: int64 [jobs], index of the GPU of each job.
      gpu_seconds: float64 [gpus], seconds during which each GPU had at least one task.
      most_tasks: the most tasks that shared a GPU.
    """

    arrivals: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    gpus: np.ndarray
    gpu_seconds: np.ndarray
    most_tasks: int

    @property
    def completion_seconds(self) -> np.ndarray:
        """Seconds from the arrival of each job to its end: float64 [jobs]."""
        return self.ends - self.arrivals

    def finished(self, time: float) -> int:
        """Returns the number of jobs that have ended at a time, in seconds."""
        return int((self.ends <= time).sum())


def with_task(tasks: Tasks, kind: int) -> Tasks:
    """Returns the tasks of a GPU with one more task of this kind."""
    place = bisect(tasks, kind)
    return (*tasks[:place], kind, *tasks[place:])


def replay(
    jobs: Sequence[Job], policy: Policy, gpus: int, round_seconds: Callable[[Tasks], float]
) -> ReplayResult:
    """Simulates jobs on like GPUs until all jobs have ended.

    Jobs that end at a moment leave before others are placed at this moment.

    Args:
      jobs: the jobs in the order of their arrivals.
      policy: chooses the GPU of each job.
      gpus: number of GPUs.
      round_seconds: seconds of a round of tasks that share a GPU, infinite if they do not fit into
        its memory. `RoundTimes.seconds` is such a function.

    Raises:
      PlanningError: the jobs are not in the order of their arrivals, the policy places a job where
        it does not fit, or it places the first job nowhere although all GPUs are empty.
    """
    if any(later.arrival < earlier.arrival for earlier, later in pairwise(jobs)):
        raise PlanningError("jobs: they are not in the order of their arrivals")
    cluster = [_Gpu() for _ in range(gpus)]
    tasks: list[Tasks] = [()] * gpus
    starts, ends, places = np.empty(len(jobs)), np.empty(len(jobs)), np.empty(len(jobs), int)
    waiting: deque[int] = deque()
    arrived = most_tasks = 0
    while True:
        arrival = jobs[arrived].arrival if arrived < len(jobs) else math.inf
        time = min(arrival, *(gpu.next_end for gpu in cluster))
        if math.isinf(time):
            break
        for index, gpu in enumerate(cluster):
            if gpu.next_end <= time:
                ended = gpu.take_ended(time)
                ends[ended] = time
                gpu.train(_without(gpu.tasks, [jobs[job].kind for job in ended]), round_seconds)
                tasks[index] = gpu.tasks
        while arrived < len(jobs) and jobs[arrived].arrival <= time:
            waiting.append(arrived)
            arrived += 1
        while waiting and (place := policy(tasks, jobs[waiting[0]].kind)) is not None:
            job = waiting.popleft()
            gpu, kind = cluster[place], jobs[job].kind
            gpu.advance(time)
            gpu.train(with_task(gpu.tasks, kind), round_seconds)
            if math.isinf(gpu.round_seconds):
                raise PlanningError(f"job {job}: its kind {kind} does not fit on GPU {place}")
            gpu.add(job, jobs[job].rounds)
            tasks[place] = gpu.tasks
            starts[job], places[job] = time, place
            most_tasks = max(most_tasks, len(gpu.tasks))
    if waiting:
        kind = jobs[waiting[0]].kind
        raise PlanningError(f"job {waiting[0]}: its kind {kind} is placed on no empty GPU")
    arrivals = np.array([job.arrival for job in jobs])
    seconds = np.array([gpu.busy for gpu in cluster])
    return ReplayResult(arrivals, starts, ends, places, seconds, most_tasks)


class _Gpu:
    """The tasks of a GPU, and the rounds that it has trained.

    A job ends when the GPU has trained a number of rounds that is known when the job is placed.

    Attributes:
      tasks: the tasks.
      round_seconds: seconds of a round of the tasks; infinite without tasks.
      next_end: time at which the next job ends; infinite without tasks.
      busy: seconds during which the GPU had tasks, until the last change.
    """

    def __init__(self):
        self.tasks: Tasks = ()
        self.round_seconds = self.next_end = math.inf
        self.busy = self._time = self._trained = 0.0
        # A heap of pairs (rounds that the GPU will have trained when the job ends, job).
        self._last_rounds: list[tuple[float, int]] = []

    def advance(self, time: float) -> None:
        """Trains the tasks until `time`, at which no job ends."""
        if self.tasks:
            self.busy += time - self._time
            self._trained += (time - self._time) / self.round_seconds
        self._time = time

    def take_ended(self, time: float) -> list[int]:
        """Trains the tasks until `time`, which is `next_end`, and returns the jobs that end."""
        self.advance(time)
        # Without rounding errors, this is the number of rounds already.
        self._trained = self._last_rounds[0][0]
        ended = []
        while self._last_rounds and self._last_rounds[0][0] <= self._trained:
            ended.append(heapq.heappop(self._last_rounds)[1])
        return ended

    def add(self, job: int, rounds: float) -> None:
        """Adds a job whose task is among `tasks` already."""
        heapq.heappush(self._last_rounds, (self._trained + rounds, job))
        self._set_next_end()

    def train(self, tasks: Tasks, round_seconds: Callable[[Tasks], float]) -> None:
        """Replaces the tasks, from the time of the last call of `advance`."""
        self.tasks = tasks
        self.round_seconds = round_seconds(tasks) if tasks else math.inf
        self._set_next_end()

    def _set_next_end(self) -> None:
        self.next_end = math.inf
        if self._last_rounds:
            left = self._last_rounds[0][0] - self._trained
            self.next_end = self._time + left * self.round_seconds


def _without(tasks: Tasks, kinds: Sequence[int]) -> Tasks:
    left = list(tasks)
    for kind in kinds:
        left.remove(kind)
    return tuple(left)
