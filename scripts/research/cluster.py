"""Replays a cluster in which many fine-tuning jobs come and go, by simulation (MuxTune 5.4).

`random_jobs` draws the jobs of a day. `replay` simulates them on like GPUs, with a policy that
places each job on a GPU: alone (`one_task_per_gpu`), on the first GPU with memory (`first_fit`), on
the GPU with the fewest tasks (`fewest_tasks`), or where the predicted throughput rises most
(`most_throughput`). `RoundTimes` predicts the time of a round of the tasks that share a GPU.

A job trains one task for a number of rounds. A GPU trains all of its tasks together, and a round is
one global batch of every task, so the jobs of a GPU advance by one round at the same time. Jobs
start in the order in which they arrive: while the policy finds no GPU for the first of the waiting
jobs, the others wait as well. So no job starves, neither in the queue nor beside other tasks. A job
stays on its GPU until it ends. Rounds take the predicted time of the tasks that the GPU has at the
moment; the start of a job and a change of tasks take no time.

MuxTune replays a trace of a cluster of which it states the mean and the standard deviation of the
durations and the mean arrival rate. Here jobs arrive as a Poisson process, and durations are
lognormal with these two moments: most jobs are short and a few are very long, as in the trace.

The planner's `choose_shape` packs rounds of samples to find the shape class in which tasks train
fastest, which takes a tenth of a second and more. A day needs a million placements, so `RoundTimes`
cuts a few global batches of every kind of task into spans once, in every layout of rows, with the
function that training uses. For tasks together it then adds up the chunks of their spans instead of
laying them into rows, because packed rows are nearly always full. Microbatches take the time that
`ReplicaCosts` predicts, as in `choose_shape`.
"""

import dataclasses
import functools
import heapq
import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.packing.rows import RowShape, ShapeClass, cut_spans

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


# MuxTune 5.4: mean and standard deviation of the durations in minutes, and arrivals per minute.
MEAN_MINUTES, DEVIATION_MINUTES, ARRIVALS_PER_MINUTE = 372.6, 612.9, 2.59


def random_jobs(
    rng: np.random.Generator,
    seconds_alone: Sequence[float],
    minutes: float = 24 * 60,
    arrivals_per_minute: float = ARRIVALS_PER_MINUTE,
    mean: float = MEAN_MINUTES,
    deviation: float = DEVIATION_MINUTES,
) -> list[Job]:
    """Returns the jobs that arrive in a span of time, in the order of their arrivals.

    The duration of a job is the time that it takes alone on a GPU. A job has the rounds that it
    trains alone in this time. All kinds are equally likely, and independent of the durations.

    Args:
      rng: source of the random numbers.
      seconds_alone: for each kind of task, the seconds of a round alone on a GPU.
      minutes: length of the span in minutes.
      arrivals_per_minute: mean number of arrivals per minute.
      mean: mean duration in minutes.
      deviation: standard deviation of the durations in minutes.
    """
    count = rng.poisson(arrivals_per_minute * minutes)
    arrivals = np.sort(rng.uniform(0, 60 * minutes, count))
    variance = math.log1p((deviation / mean) ** 2)
    durations = 60 * rng.lognormal(math.log(mean) - variance / 2, math.sqrt(variance), count)
    kinds = rng.integers(len(seconds_alone), size=count)
    rounds = durations / np.asarray(seconds_alone)[kinds]
    return [
        Job(*job) for job in zip(arrivals.tolist(), kinds.tolist(), rounds.tolist(), strict=True)
    ]


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


# The shape classes among which a round takes the fastest: tokens of a row, tokens of a chunk, and
# the most sequences of a row. Microbatches grow in steps of `_STEP` tokens, as in `choose_shape`.
_ROW_LENS, _CHUNK_LENS, _SEQUENCES, _STEP = (64, 128, 256, 512), (128, 256), (1, 4, 8, 16, 32), 512
# A row has room for at most one sequence per this number of tokens, as in `smallest_shape_class`.
_SHORTEST_AVERAGE = 16


class TaskKind(NamedTuple):
    """What a task needs of a GPU. Tasks of one kind differ only in the number of their rounds.

    Attributes:
      name: the kind in words, for error messages.
      pool: sizes of the pool that a task of this kind needs alone.
      batches: stream lengths in tokens of the samples of a few typical global batches.
      longest: most tokens of a sample of the task.
    """

    name: str
    pool: PoolSpec
    batches: tuple[tuple[int, ...], ...]
    longest: int

    @property
    def tokens(self) -> float:
        """Mean tokens of a global batch, without padding."""
        return sum(map(sum, self.batches)) / len(self.batches)


class _PoolCosts(NamedTuple):
    """Predicted costs with one pool.

    Attributes:
      half: float64 [shapes], seconds of a microbatch of which half of the chunks are empty.
      full: float64 [shapes], seconds of a microbatch without empty chunks.
      fits: bool [shapes], whether a microbatch fits into memory.
      update: seconds of a round besides its microbatches.
    """

    half: np.ndarray
    full: np.ndarray
    fits: np.ndarray
    update: float


class RoundTimes:
    """Predicts the seconds of a round of any tasks together on one GPU.

    A round is one global batch of every task with the optimizer updates, in the shape class in
    which it takes the least time. Answers are kept, because replays ask for the same tasks again.

    Attributes:
      kinds: the kinds of tasks. Tasks are given as the indices of their kinds.
    """

    def __init__(
        self,
        kinds: Sequence[TaskKind],
        costs: ReplicaCosts,
        tokens: int = 8192,
        least_chunk_len: int = 128,
    ):
        """Cuts the global batches of all kinds into spans.

        Args:
          kinds: the kinds of tasks, at least one.
          costs: cost model of the GPU. Its pool is ignored.
          tokens: N, the most tokens of a microbatch, at least 512.
          least_chunk_len: tokens of the shortest chunk that the kernels accept, at most 256.

        Raises:
          PlanningError: a sample is longer than the longest rows, which have 512 tokens.
        """
        self.kinds = tuple(kinds)
        for kind in self.kinds:
            if kind.longest > _ROW_LENS[-1]:
                longest = f"samples of up to {kind.longest} tokens"
                raise PlanningError(f"{kind.name}: {longest}; rows have at most {_ROW_LENS[-1]}")
        self._model = costs
        layouts = list(_layouts(least_chunk_len))
        sized = [
            (i, dataclasses.replace(layout, rows=layout.rows * steps))
            for i, layout in enumerate(layouts)
            for steps in range(1, tokens // _STEP + 1)
        ]
        self._layout = np.array([i for i, _ in sized])
        self._shapes = [shape for _, shape in sized]
        self._row_len = np.array([shape.row_len for shape in self._shapes])
        self._chunks = np.array([shape.chunks for shape in self._shapes])
        # [chunks or sequences, shapes]
        self._room = np.array([_room(shape) for shape in self._shapes]).T
        # Kinds of different ranks often share their batches, and cutting takes a while.
        needs = functools.cache(functools.partial(_needs, layouts))
        # [kinds, mean or variance, chunks or sequences, layouts]
        self._needs = np.array([needs(kind.batches, kind.longest) for kind in self.kinds])
        self._longest = np.array([kind.longest for kind in self.kinds])
        self._pools: dict[PoolSpec, _PoolCosts] = {}
        self._rounds: dict[Tasks, tuple[float, int]] = {}

    def seconds(self, tasks: Tasks) -> float:
        """Returns the seconds of a round of these tasks, at least one; infinite if they do not fit
        into memory together in any shape class."""
        if tasks not in self._rounds:
            self._rounds[tasks] = self._fastest(tasks)
        return self._rounds[tasks][0]

    def shape(self, tasks: Tasks) -> ShapeClass:
        """Returns the shape class in which a round of these tasks takes the least time."""
        self.seconds(tasks)
        return self._shapes[self._rounds[tasks][1]]

    def pool(self, tasks: Tasks) -> PoolSpec:
        """Returns the sizes of the pool that holds these tasks, at least one."""
        return merge_pool_specs([self.kinds[task].pool for task in tasks])

    def _fastest(self, tasks: Tasks) -> tuple[float, int]:
        """Returns the seconds of a round, and the index of its shape class."""
        members = np.bincount(tasks, minlength=len(self.kinds))
        mean, variance = np.tensordot(members, self._needs, axes=1)[..., self._layout]
        microbatches = _expected_ceil(mean, variance, self._room).max(axis=0)
        costs = self._costs(self.pool(tasks))
        owned = mean[0] / (microbatches * self._chunks)
        one = costs.half + (2 * owned - 1) * (costs.full - costs.half)
        possible = costs.fits & (self._row_len >= self._longest[list(tasks)].max())
        total = np.where(possible, microbatches * one, math.inf)
        best = int(total.argmin())
        return float(total[best]) + costs.update, best

    def _costs(self, pool: PoolSpec) -> _PoolCosts:
        if pool not in self._pools:
            model = dataclasses.replace(self._model, pool=pool)
            half, full = np.array(
                [
                    [model.microbatch(shape, part * shape.tokens) for shape in self._shapes]
                    for part in (0.5, 1.0)
                ]
            )
            fits = np.isfinite(full)
            half[~fits] = full[~fits] = 0.0
            self._pools[pool] = _PoolCosts(half, full, fits, model.update())
        return self._pools[pool]


def _layouts(least_chunk_len: int) -> Iterator[ShapeClass]:
    """Yields the layouts of rows, as shape classes of the smallest microbatches."""
    for row_len, chunk_len, sequences in product(_ROW_LENS, _CHUNK_LENS, _SEQUENCES):
        # Longer rows of one task do as well as chunks that cover several rows, except for the
        # shortest chunk.
        if chunk_len < least_chunk_len or chunk_len > max(row_len, least_chunk_len):
            continue
        if sequences * _SHORTEST_AVERAGE <= row_len:
            yield ShapeClass(_STEP // row_len, row_len, chunk_len, sequences)


def _room(shape: ShapeClass) -> tuple[int, int]:
    """Returns the chunks and the sequences for which a microbatch has room."""
    row = RowShape.of(shape)
    rows = shape.rows // row.block
    return rows * row.chunks, rows * row.max_sequences


def _needs(
    layouts: Sequence[ShapeClass], batches: Sequence[Sequence[int]], longest: int
) -> np.ndarray:
    """Returns the mean and the variance of the chunks and of the sequences of the spans of a global
    batch: float64 [mean or variance, chunks or sequences, layouts]. They are 0 in rows that are too
    short for the longest sample."""
    counts = np.zeros((len(batches), 2, len(layouts)))
    for i, layout in enumerate(layouts):
        if layout.row_len < longest:
            continue
        for batch, lengths in enumerate(batches):
            spans = cut_spans(lengths, layout)
            chunks, sequences = (sum(sizes) for sizes in zip(*(s[1:] for s in spans), strict=True))
            counts[batch, :, i] = chunks, sequences
    return np.stack([counts.mean(axis=0), counts.var(axis=0)])


def _expected_ceil(mean: np.ndarray, variance: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Returns the expected number of microbatches with this room for a number of chunks that
    varies from round to round.

    A whole number x needs ceil(x / room) microbatches, as does every number in (x - 1, x]. The
    numbers are taken to be uniform over an interval with the given mean and variance, shifted by
    half a chunk; the variance of (x - 1, x] is 1/12.
    """
    # A round has at least one chunk; layouts with too short rows count none.
    middle, half_width = np.maximum(mean, 1.0) - 0.5, np.sqrt(3 * (variance + 1 / 12))
    low, high = np.maximum(0.0, middle - half_width) / room, (middle + half_width) / room
    return np.maximum(1.0, (_ceil_integral(high) - _ceil_integral(low)) / (high - low))


def _ceil_integral(x: np.ndarray) -> np.ndarray:
    """Returns the integral of ceil from 0 to x."""
    whole = np.floor(x)
    return (whole + 1) * (x - whole / 2)
