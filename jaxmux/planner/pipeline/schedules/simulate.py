"""Predicts the time of a schedule: in lockstep, or with stages that run at their own pace."""

import dataclasses

import numpy as np

from .schedule import PipelineSchedule
from .workload import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """The predicted times at which the passes of a schedule start and end.

    `simulate_lockstep` and `simulate_asynchronous` return it. Times are in the unit of the
    `Workload`'s times and count from the start of the schedule. M is the number of microbatches, S
    the number of stages and V the number of virtual stages. In an interleaved pipeline a stage
    holds several parts of the model, its virtual stages; virtual stage v lies on stage v mod S.
    Otherwise V = S.

    Attributes:
      forward_start: float64 [V, M], start of each microbatch's forward pass on each virtual stage.
      forward_end: float64 [V, M], end of each forward pass.
      backward_start: float64 [V, M], start of each microbatch's backward pass on each virtual
        stage.
      backward_end: float64 [V, M], end of each backward pass.
      makespan: time from the start of the first pass to the end of the last pass. In lockstep it
        includes the messages after the last tick (column of the schedule).
      peak_buffers: int64 [S], the most buffers (units of memory for activations, see
        `ScheduledMicrobatch.buffers`) that are in use at the same time on each stage.
    """

    forward_start: np.ndarray
    forward_end: np.ndarray
    backward_start: np.ndarray
    backward_end: np.ndarray
    makespan: float
    peak_buffers: np.ndarray

    @property
    def stages(self) -> int:
        """S, the number of pipeline stages."""
        return len(self.peak_buffers)

    def busy(self, window: tuple[float, float] | None = None) -> np.ndarray:
        """Returns float64 [S]: the time for which each stage runs forward and backward passes.

        Args:
          window: begin and end of the time that counts, in the unit of the simulation; None for the
            whole makespan.
        """
        begin, end = window or (0.0, self.makespan)
        time = np.zeros(len(self.forward_start))
        for start, stop in (
            (self.forward_start, self.forward_end),
            (self.backward_start, self.backward_end),
        ):
            time += np.clip(np.minimum(stop, end) - np.maximum(start, begin), 0, None).sum(axis=1)
        return time.reshape(-1, self.stages).sum(axis=0)

    def bubble_ratio(self, window: tuple[float, float] | None = None) -> float:
        """Returns the fraction of the stages' time in which they run no pass.

        The bubble ratio is 1 - Σ_s busy_s / (S · time): 0 for a full pipeline, 0.25 if the stages
        are idle for a quarter of the time on average.

        Args:
          window: begin and end of the time that counts, in the unit of the simulation; None for the
            whole makespan, which includes the warm-up and drain of the pipeline. The window that
            `steady_window()` returns leaves them out.
        """
        begin, end = window or (0.0, self.makespan)
        return 1.0 - float(self.busy(window).sum()) / (self.stages * (end - begin))

    def steady_window(self) -> tuple[float, float]:
        """Returns begin and end of the time between warm-up and drain, a window for `bubble_ratio`.

        The window begins at the first backward pass on the first stage. It ends at the start of the
        last forward pass on the first stage. If there are too few microbatches, no forward pass
        starts after the begin. The end is then not after the begin, and the window is of no use.
        """
        return float(self.backward_start[0].min()), float(self.forward_start[0].max())


def simulate_lockstep(
    schedule: PipelineSchedule, workload: Workload, permute_time: float = 0.0
) -> Simulation:
    """Predicts the time of a schedule whose stages start every tick (column of the table) together.

    A tick ends when its slowest stage has run its passes and the messages between stages have
    arrived. Compiled pipelines that exchange activations with one collective per tick run in this
    way. `simulate_asynchronous` is for stages that do not wait for each other's ticks.

    Args:
      schedule: the schedule.
      workload: times of the schedule's microbatches, in the order of `schedule.microbatches`. If
        the schedule is interleaved, the times may be given per stage instead of per virtual stage
        (part of the model on a stage); the virtual stages of a stage then share its times equally.
      permute_time: time of the messages between stages at the end of every tick, in the unit of
        `workload`.

    Returns:
      The times of all passes, in the unit of `workload`.
    """
    forward, backward = _times(schedule, workload)
    forward_tick, backward_tick = schedule.forward_ticks(), schedule.backward_ticks()
    stage = np.arange(schedule.virtual_stages)[:, None] % schedule.stages
    # A stage runs the backward pass of a tick before the forward pass.
    backward_work = np.zeros((schedule.stages, schedule.ticks))
    backward_work[stage, backward_tick] = backward
    work = backward_work.copy()
    work[stage, forward_tick] += forward
    tick_end = np.cumsum(work.max(axis=0) + permute_time)
    tick_start = np.concatenate([[0.0], tick_end[:-1]])
    backward_start = tick_start[backward_tick]
    forward_start = tick_start[forward_tick] + backward_work[stage, forward_tick]
    return Simulation(
        forward_start,
        forward_start + forward,
        backward_start,
        backward_start + backward,
        float(tick_end[-1]),
        schedule.peak_buffers(),
    )


def simulate_asynchronous(
    schedule: PipelineSchedule, workload: Workload, hop_time: float = 0.0
) -> Simulation:
    """Predicts the time of a schedule whose stages run at their own pace.

    Each stage runs its row of the table in order and starts each pass as soon as the stage is free
    and the pass's input has arrived. The ticks (columns of the table) give only the order.
    `simulate_lockstep` is for stages that start every tick together.

    Args:
      schedule: the schedule.
      workload: times of the schedule's microbatches, in the order of `schedule.microbatches`. If
        the schedule is interleaved, the times may be given per stage instead of per virtual stage
        (part of the model on a stage); the virtual stages of a stage then share its times equally.
      hop_time: time from the end of a pass until its output has arrived at the neighbouring stage,
        in the unit of `workload`; ignored if the pipeline has a single stage.

    Returns:
      The times of all passes, in the unit of `workload`.
    """
    forward, backward = (time.tolist() for time in _times(schedule, workload))
    stages, last = schedule.stages, schedule.virtual_stages - 1
    forward_end = np.zeros((last + 1, len(schedule.microbatches))).tolist()
    backward_end = np.zeros((last + 1, len(schedule.microbatches))).tolist()
    # A pipeline of one stage sends no messages.
    hop_time = hop_time if stages > 1 else 0.0
    free = [0.0] * stages
    for _, direction, v, m in _passes_by_tick(schedule):
        stage = v % stages
        if direction == "B":
            ready = forward_end[v][m] if v == last else backward_end[v + 1][m] + hop_time
            free[stage] = max(free[stage], ready) + backward[v][m]
            backward_end[v][m] = free[stage]
        else:
            ready = forward_end[v - 1][m] + hop_time if v else 0.0
            free[stage] = max(free[stage], ready) + forward[v][m]
            forward_end[v][m] = free[stage]
    forward_end, backward_end = np.array(forward_end), np.array(backward_end)
    return Simulation(
        forward_end - forward,
        forward_end,
        backward_end - backward,
        backward_end,
        max(free),
        schedule.peak_buffers(),
    )


def _passes_by_tick(schedule: PipelineSchedule) -> list[tuple[int, str, int, int]]:
    """(tick, "F" or "B", virtual stage, microbatch) of all passes by tick, backward first."""
    return sorted(
        (tick, direction, v, m)
        for direction, ticks in (("F", schedule.forward_ticks()), ("B", schedule.backward_ticks()))
        for (v, m), tick in np.ndenumerate(ticks)
    )


def _times(schedule: PipelineSchedule, workload: Workload) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward times, float64 [V, M] each."""
    if schedule.virtual_per_stage != workload.virtual_per_stage:
        workload = workload.with_virtual_stages(schedule.virtual_per_stage)
    return workload.forward.T, workload.backward.T
