"""A pipeline schedule as a value: its input, its table of ops, and its predicted time.

M is the number of microbatches, S the number of stages and V the number of virtual stages. In an
interleaved pipeline (Narayanan et al. 2021, 2.2), a stage holds several parts of the model, its
virtual stages; virtual stage v lies on stage v mod S. In an ordinary pipeline V = S. A *step* of a
task is one global batch and the optimizer update after it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import PlanningError

# Default times of the passes: a backward pass takes about twice as long as a forward pass.
FORWARD, BACKWARD = 1.0, 2.0


class ScheduledMicrobatch(NamedTuple):
    """The facts about one microbatch that determine its order in the pipeline. All microbatches
    that name the same (task, step) together make up this global batch.

    Attributes:
      tasks: the tasks that have samples in the microbatch, and the tasks that are updated together
        with these; empty for a no-op microbatch.
      steps: for each entry of `tasks`, the step of this task.
      buffers: number of buffers for residuals that the microbatch takes on each virtual stage, from
        its forward to its backward pass.
    """

    tasks: tuple[int, ...]
    steps: tuple[int, ...]
    bucket: int = 0
    buffers: int = 1

    @property
    def global_batches(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.tasks, self.steps, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """The input of schedule generators: M microbatches in order, with the times of their forward
    and backward passes, float64 [M, V] each, in any unit. `buffer_limit` is the number of buffers
    for residuals on each stage; None for no limit."""

    microbatches: tuple[ScheduledMicrobatch, ...]
    forward: np.ndarray
    backward: np.ndarray
    buffer_limit: tuple[int, ...] | None = None
    virtual_per_stage: int = 1

    def __post_init__(self):
        count, shape = len(self.microbatches), np.shape(self.forward)
        if not count:
            raise PlanningError("a workload needs at least one microbatch")
        if len(shape) != 2 or shape != np.shape(self.backward) or shape[0] != count:
            raise PlanningError(
                f"forward times {shape} and backward times {np.shape(self.backward)} must both be "
                f"[microbatches={count}, virtual stages]"
            )
        if shape[1] == 0 or shape[1] % self.virtual_per_stage:
            raise PlanningError(
                f"{shape[1]} virtual stages cannot be divided into stages of "
                f"{self.virtual_per_stage}"
            )
        if min(np.min(self.forward), np.min(self.backward)) <= 0:
            raise PlanningError("stage times must be positive")
        if self.buffer_limit is not None and len(self.buffer_limit) != self.stages:
            raise PlanningError(
                f"buffer_limit has {len(self.buffer_limit)} entries for {self.stages} stages"
            )
        self._check_buffers()

    def _check_buffers(self) -> None:
        for index, microbatch in enumerate(self.microbatches):
            if microbatch.buffers < 1:
                raise PlanningError(
                    f"microbatch {index} takes {microbatch.buffers} buffers, expected at least 1"
                )
            for stage, limit in enumerate(self.buffer_limit or ()):
                if microbatch.buffers > limit:
                    raise PlanningError(
                        f"microbatch {index} takes {microbatch.buffers} buffers, stage {stage} "
                        f"has {limit}"
                    )

    @property
    def stages(self) -> int:
        return np.shape(self.forward)[1] // self.virtual_per_stage

    @property
    def virtual_stages(self) -> int:
        return np.shape(self.forward)[1]

    def reorder(self, order: Sequence[int]) -> "Workload":
        """Returns a new workload whose microbatch i is microbatch `order[i]` of this one."""
        order = np.asarray(order)
        return dataclasses.replace(
            self,
            microbatches=tuple(self.microbatches[index] for index in order),
            forward=self.forward[order],
            backward=self.backward[order],
        )

    def with_virtual_stages(self, virtual_per_stage: int) -> "Workload":
        """Returns a new workload in which every stage is divided into equal virtual stages."""
        if self.virtual_per_stage != 1:
            raise PlanningError(
                f"every stage is already divided into {self.virtual_per_stage} virtual stages"
            )
        return dataclasses.replace(
            self,
            forward=np.tile(self.forward / virtual_per_stage, virtual_per_stage),
            backward=np.tile(self.backward / virtual_per_stage, virtual_per_stage),
            virtual_per_stage=virtual_per_stage,
        )


def uniform_workload(
    microbatches: Sequence[ScheduledMicrobatch],
    forward: Sequence[float],
    backward: Sequence[float],
    buffer_limit: Sequence[int] | None = None,
) -> Workload:
    return Workload(
        tuple(microbatches),
        np.tile(np.asarray(forward, float), (len(microbatches), 1)),
        np.tile(np.asarray(backward, float), (len(microbatches), 1)),
        None if buffer_limit is None else tuple(buffer_limit),
    )


def round_robin_microbatches(
    tasks: int, steps: int, microbatches: int = 1
) -> tuple[ScheduledMicrobatch, ...]:
    """Returns microbatches of tasks that take turns, as in mLoRA's pipeline (3.2.1): step 0 of
    every task, then step 1 of every task, and so on. Each global batch has `microbatches`
    microbatches."""
    return tuple(
        ScheduledMicrobatch((task,), (step,), bucket=task)
        for step in range(steps)
        for task in range(tasks)
        for _ in range(microbatches)
    )


def independent_series(workload: Workload, longest: int | None = None) -> list[list[int]]:
    """Cuts the stream, as late as possible, into series of at most `longest` independent
    microbatches. Microbatches are independent if none needs an update to which another one
    contributes."""
    series: list[list[int]] = [[]]
    steps: dict[int, int] = {}
    for index, microbatch in enumerate(workload.microbatches):
        batches = microbatch.global_batches
        needs_update = any(steps.get(task, step) != step for task, step in batches)
        if needs_update or len(series[-1]) == longest:
            series.append([])
            steps = {}
        series[-1].append(index)
        steps.update(batches)
    return series


FORMAT = "jaxmux.schedule/2"
NONE = -1


class Update(NamedTuple):
    """The optimizer update of one task after one step, in a `PipelineSchedule`. `ticks` has, for
    each stage, the tick at whose end the stage updates its part of the adapter."""

    task: int
    step: int
    ticks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """The order in which S stages run M microbatches: a table with T columns, the ticks.

    In a tick, a stage runs at most one backward and one forward pass. The backward pass comes first
    and frees its buffers. A pass uses only outputs from earlier ticks. The loss of a microbatch is
    part of its forward pass on the last virtual stage.

    Attributes:
      forward_microbatch: int32 [S, T], index of the microbatch that stage s runs forward in tick t;
        -1 where the stage runs no forward pass. The other tables have the same form.
      updates: one update for each task and step, ordered by its tick on the first stage.
    """

    microbatches: tuple[ScheduledMicrobatch, ...]
    forward_microbatch: np.ndarray
    backward_microbatch: np.ndarray
    forward_virtual_stage: np.ndarray
    backward_virtual_stage: np.ndarray
    updates: tuple[Update, ...]
    virtual_per_stage: int = 1

    @property
    def stages(self) -> int:
        return self.forward_microbatch.shape[0]

    @property
    def ticks(self) -> int:
        return self.forward_microbatch.shape[1]

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.virtual_per_stage

    def forward_ticks(self) -> np.ndarray:
        """Returns int32 [V, M]: the tick of each forward pass."""
        return self._ticks(self.forward_microbatch, self.forward_virtual_stage)

    def backward_ticks(self) -> np.ndarray:
        """Returns int32 [V, M]: the tick of each backward pass."""
        return self._ticks(self.backward_microbatch, self.backward_virtual_stage)

    def _ticks(self, microbatch: np.ndarray, virtual_stage: np.ndarray) -> np.ndarray:
        ticks = np.full((self.virtual_stages, len(self.microbatches)), NONE, np.int32)
        stage, tick = np.nonzero(microbatch != NONE)
        ticks[virtual_stage[stage, tick], microbatch[stage, tick]] = tick
        return ticks

    def peak_buffers(self) -> np.ndarray:
        """Returns int64 [S]: the most buffers that are in use at the same time on each stage."""
        return self._peaks(np.arange(self.virtual_stages) % self.stages)

    def virtual_peak_buffers(self) -> np.ndarray:
        """Returns int64 [V]: the most buffers that each virtual stage uses at the same time."""
        return self._peaks(np.arange(self.virtual_stages))

    def _peaks(self, group: np.ndarray) -> np.ndarray:
        """int64 [G]: the most buffers in use at the same time in each group. `group`, int64 [V],
        has the group of each virtual stage."""
        change, group = np.zeros((group.max() + 1, self.ticks), int), group[:, None]
        buffers = np.array([microbatch.buffers for microbatch in self.microbatches])
        # The backward pass comes first in its tick, so its buffers are free for the forward pass.
        np.add.at(change, (group, self.forward_ticks()), buffers)
        np.subtract.at(change, (group, self.backward_ticks()), buffers)
        return np.max(np.cumsum(change, axis=1), axis=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """Returns the table as text: a row for each stage, a column for each tick. `F3` is the
        forward pass of microbatch 3, `B0` the backward pass of microbatch 0. In an interleaved
        pipeline, `F3.1` runs on the second virtual stage of its stage."""
        cells = [
            [self._cell(stage, tick) for tick in range(self.ticks)] for stage in range(self.stages)
        ]
        width = max(len(cell) for row in cells for cell in row)
        return "\n".join(
            f"stage {stage} |" + "|".join(cell.center(width) for cell in row) + "|"
            for stage, row in enumerate(cells)
        )

    def _cell(self, stage: int, tick: int) -> str:
        parts = []
        for letter, microbatch, virtual_stage in (
            ("B", self.backward_microbatch, self.backward_virtual_stage),
            ("F", self.forward_microbatch, self.forward_virtual_stage),
        ):
            if microbatch[stage, tick] != NONE:
                part = virtual_stage[stage, tick] // self.stages
                suffix = f".{part}" if self.virtual_per_stage > 1 else ""
                parts.append(f"{letter}{microbatch[stage, tick]}{suffix}")
        return " ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Returns a dict for `json.dump`; `from_json` reads it."""
        fields = {
            "format": FORMAT,
            "microbatches": [microbatch._asdict() for microbatch in self.microbatches],
            **{name: getattr(self, name).tolist() for name in _TABLES},
            "updates": [update._asdict() for update in self.updates],
            "virtual_per_stage": self.virtual_per_stage,
        }
        return as_lists(fields)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "PipelineSchedule":
        """Returns the schedule from the result of `to_json`, without validating it.

        Raises:
          ValueError: the dict has another format.
        """
        if data.get("format") != FORMAT:
            raise ValueError(f"not a schedule: format is {data.get('format')!r}, not {FORMAT!r}")
        microbatches = tuple(
            ScheduledMicrobatch(tuple(m["tasks"]), tuple(m["steps"]), m["bucket"], m["buffers"])
            for m in data["microbatches"]
        )
        tables = {name: np.array(data[name], np.int32) for name in _TABLES}
        updates = tuple(Update(u["task"], u["step"], tuple(u["ticks"])) for u in data["updates"])
        return cls(
            microbatches=microbatches,
            updates=updates,
            virtual_per_stage=data["virtual_per_stage"],
            **tables,
        )


_TABLES = (
    "forward_microbatch",
    "backward_microbatch",
    "forward_virtual_stage",
    "backward_virtual_stage",
)


def as_lists(value: Any) -> Any:
    """Returns `value` with all tuples replaced by lists, also within dicts and lists, for JSON."""
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    return [as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


@dataclasses.dataclass(frozen=True, eq=False)
class Simulation:
    """The predicted start and end of the passes of a schedule, float64 [V, M] each, in the unit of
    the `Workload`'s times. In lockstep, `makespan` includes the messages after the last tick.
    `peak_buffers`, int64 [S], is the most buffers that each stage uses at the same time."""

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
        """Returns float64 [S]: for how long each stage runs passes within the window; None means
        the whole makespan."""
        begin, end = window or (0.0, self.makespan)
        time = np.zeros(len(self.forward_start))
        for start, stop in (
            (self.forward_start, self.forward_end),
            (self.backward_start, self.backward_end),
        ):
            time += np.clip(np.minimum(stop, end) - np.maximum(start, begin), 0, None).sum(axis=1)
        return time.reshape(-1, self.stages).sum(axis=0)

    def bubble_ratio(self, window: tuple[float, float] | None = None) -> float:
        """Returns the fraction of the stages' time in which they run no pass: 1 - Σ_s busy_s / (S ·
        time). It is 0 for a full pipeline, and 0.25 if the stages are idle a quarter of the time on
        average."""
        begin, end = window or (0.0, self.makespan)
        return 1.0 - float(self.busy(window).sum()) / (self.stages * (end - begin))

    def steady_window(self) -> tuple[float, float]:
        """Returns begin and end of the time between warm-up and drain, as a window for
        `bubble_ratio`: from the first backward pass to the start of the last forward pass, both on
        the first stage. With too few microbatches, the end does not come after the begin."""
        return float(self.backward_start[0].min()), float(self.forward_start[0].max())


def simulate_lockstep(
    schedule: PipelineSchedule, workload: Workload, permute_time: float = 0.0
) -> Simulation:
    """Predicts the time of a schedule whose stages start every tick together. A tick ends when the
    slowest stage has run its passes and the messages between stages, which take `permute_time`,
    have arrived. If the workload gives times per stage, the virtual stages of a stage share them
    equally."""
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
    """Predicts the time of a schedule whose stages run at their own pace. Each stage runs its row
    of the table in order. A pass starts as soon as its stage is free and its input has arrived,
    which is `hop_time` after another stage computed it. The workload is as in
    `simulate_lockstep`."""
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
    """(tick, "F" or "B", virtual stage, microbatch) of all passes by tick, backward passes
    first."""
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
