"""How long a schedule takes: in lockstep, as the executor runs it, or with free-running stages."""

import dataclasses

import numpy as np

from .schedule import NONE, PipelineSchedule
from .workload import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """When every op of a schedule runs. V virtual stages, S stages, M jobs; times in the unit of
    the workload.

    Attributes:
      forward_start: float64[V, M].
      forward_end: float64[V, M].
      backward_start: float64[V, M].
      backward_end: float64[V, M].
      makespan: time from the start to the end of the last op, with a last permute in lockstep.
      peak_buffers: int64[S], most residual slots in use at a time.
    """

    forward_start: np.ndarray
    forward_end: np.ndarray
    backward_start: np.ndarray
    backward_end: np.ndarray
    makespan: float
    peak_buffers: np.ndarray

    @property
    def stages(self) -> int:
        return len(self.peak_buffers)

    def busy(self, window: tuple[float, float] | None = None) -> np.ndarray:
        """float64[S]: time that each stage computes, within the window or altogether."""
        begin, end = window or (0.0, self.makespan)
        time = np.zeros(len(self.forward_start))
        for start, stop in (
            (self.forward_start, self.forward_end),
            (self.backward_start, self.backward_end),
        ):
            time += np.clip(np.minimum(stop, end) - np.maximum(start, begin), 0, None).sum(axis=1)
        return time.reshape(-1, self.stages).sum(axis=0)

    def bubble_ratio(self, window: tuple[float, float] | None = None) -> float:
        """1 − busy / (stages × time), over the window or the makespan."""
        begin, end = window or (0.0, self.makespan)
        return 1.0 - float(self.busy(window).sum()) / (self.stages * (end - begin))

    def steady_window(self) -> tuple[float, float]:
        """From the first backward on stage 0 to the last forward there: the pipeline without its
        warm-up and drain."""
        return float(self.backward_start[0].min()), float(self.forward_start[0].max())


def simulate_lockstep(
    schedule: PipelineSchedule, load: Workload, permute_time: float = 0.0
) -> Simulation:
    """A tick lasts as long as its slowest stage, a stage its backward plus its forward; then
    `permute_time` for the messages."""
    forward, backward = _times(schedule, load)
    forward_tick, backward_tick = schedule.forward_ticks(), schedule.backward_ticks()
    stage = np.arange(schedule.virtual_stages)[:, None] % schedule.stages
    first = np.zeros((schedule.stages, schedule.ticks))
    first[stage, backward_tick] = backward
    work = first.copy()
    work[stage, forward_tick] += forward
    tick_end = np.cumsum(work.max(axis=0) + permute_time)
    tick_start = np.concatenate([[0.0], tick_end[:-1]])
    backward_start = tick_start[backward_tick]
    forward_start = tick_start[forward_tick] + first[stage, forward_tick]
    return Simulation(
        forward_start,
        forward_start + forward,
        backward_start,
        backward_start + backward,
        float(tick_end[-1]),
        schedule.peak_buffers(),
    )


def simulate_asynchronous(
    schedule: PipelineSchedule, load: Workload, hop_time: float = 0.0
) -> Simulation:
    """Every stage runs its ops in the order of the table (backward before forward in a tick), each
    as soon as its input has arrived, `hop_time` after the neighbour has produced it."""
    forward, backward = (time.tolist() for time in _times(schedule, load))
    stages, last = schedule.stages, schedule.virtual_stages - 1
    forward_end = np.zeros((last + 1, len(schedule.jobs))).tolist()
    backward_end = np.zeros((last + 1, len(schedule.jobs))).tolist()
    # One stage alone sends itself nothing.
    hop_time = hop_time if stages > 1 else 0.0
    free = [0.0] * stages
    for is_backward, v, j in _ops_by_tick(schedule):
        stage = v % stages
        if is_backward:
            ready = forward_end[v][j] if v == last else backward_end[v + 1][j] + hop_time
            free[stage] = max(free[stage], ready) + backward[v][j]
            backward_end[v][j] = free[stage]
        else:
            ready = forward_end[v - 1][j] + hop_time if v else 0.0
            free[stage] = max(free[stage], ready) + forward[v][j]
            forward_end[v][j] = free[stage]
    forward_end, backward_end = np.array(forward_end), np.array(backward_end)
    return Simulation(
        forward_end - forward,
        forward_end,
        backward_end - backward,
        backward_end,
        max(free),
        schedule.peak_buffers(),
    )


def _ops_by_tick(schedule: PipelineSchedule) -> list[tuple[bool, int, int]]:
    """(is backward, virtual stage, job) by tick, backwards first."""
    ops = []
    for is_backward, table, chunk in (
        (True, schedule.backward_mb, schedule.backward_chunk),
        (False, schedule.forward_mb, schedule.forward_chunk),
    ):
        stage, tick = np.nonzero(table != NONE)
        virtual = chunk[stage, tick] * schedule.stages + stage
        keys = zip(tick, virtual, table[stage, tick], strict=True)
        ops += [(int(t), is_backward, int(v), int(j)) for t, v, j in keys]
    ops.sort(key=lambda op: (op[0], not op[1]))
    return [op[1:] for op in ops]


def _times(schedule: PipelineSchedule, load: Workload) -> tuple[np.ndarray, np.ndarray]:
    """float64[V, M] forward and backward times."""
    if schedule.chunks != load.chunks:
        load = load.split_layers(schedule.chunks)
    return load.forward.T, load.backward.T
