"""A pipeline schedule as a value: its input, its table of ops, and its predicted time.

Every schedule generator takes a `Workload`, the microbatches to pipeline and their times, and
returns a `PipelineSchedule`, a table of the ops that every stage runs in every tick. The time of a
schedule is predicted in lockstep, or with stages that run at their own pace.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import PlanningError

# Times of the passes where none are given: a backward pass takes about twice as long as a forward
# pass.
FORWARD, BACKWARD = 1.0, 2.0


class ScheduledMicrobatch(NamedTuple):
    """The facts about one microbatch that its order in the pipeline depends on.

    A *step* of a task is one global batch of the task and the optimizer update after it. Samples of
    a task's next step may run forward only after that update. The step numbers of a task ascend but
    need not start at 0.

    Attributes:
      tasks: indices of the tasks that have samples in the microbatch, and of those that are updated
        together with them; empty for a no-op microbatch, which holds no samples.
      steps: for each entry of `tasks`, the step of this task. All microbatches that name one (task,
        step) together make up its global batch.
      bucket: index of the bucket (a group of tasks that are packed together) that the microbatch
        comes from. Only `template` and `template_order` use it.
      buffers: number of buffers that the microbatch takes on each stage (in an interleaved
        pipeline: for each virtual stage, that is, for each part of the model on the stage). A
        buffer is a unit of memory for residuals, the activations that a forward pass keeps for its
        backward pass. The microbatch takes its buffers from the forward pass to the backward pass.
    """

    tasks: tuple[int, ...]
    steps: tuple[int, ...]
    bucket: int = 0
    buffers: int = 1

    @property
    def global_batches(self) -> tuple[tuple[int, int], ...]:
        """The (task, step) pairs that have samples in the microbatch."""
        return tuple(zip(self.tasks, self.steps, strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """The input of schedule generators: M microbatches in order, with their times on every stage.

    The microbatches and their order are called the stream. In an ordinary pipeline a stage is one
    virtual stage. In an interleaved pipeline (Narayanan et al. 2021, 2.2) a stage holds several
    parts of the model, and each part is a virtual stage. Of S stages, stage s holds the virtual
    stages s, s + S, s + 2S and so on, so that the output of a virtual stage always goes to the next
    stage.

    `uniform_workload` makes a workload in which all microbatches take the same time.

    Attributes:
      microbatches: the M microbatches in the order of the stream.
      forward: float64 [M, V], time of the forward pass of each microbatch on each of V virtual
        stages. The unit is free; simulations return their times in this unit.
      backward: float64 [M, V], time of the backward pass of each microbatch on each virtual stage,
        in the unit of `forward`.
      buffer_limit: for each of the S stages, its number of buffers for residuals (see
        `ScheduledMicrobatch.buffers`); None for no limit.
      virtual_per_stage: number of virtual stages of one stage, 1 for an ordinary pipeline; V = S ·
        virtual_per_stage.

    Raises:
      PlanningError: there are no microbatches, an array has another shape, a time is not positive,
        `buffer_limit` has not one entry per stage, or a microbatch takes less than one buffer or
        more than a stage has.
    """

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
        """S, the number of pipeline stages."""
        return np.shape(self.forward)[1] // self.virtual_per_stage

    @property
    def virtual_stages(self) -> int:
        """V, the number of virtual stages of all stages together."""
        return np.shape(self.forward)[1]

    def reorder(self, order: Sequence[int]) -> "Workload":
        """Returns a new workload with these microbatches, and their times, in another order.

        Args:
          order: a permutation of the M indices. Microbatch i of the new workload is microbatch
            `order[i]` of this workload.
        """
        order = np.asarray(order)
        return dataclasses.replace(
            self,
            microbatches=tuple(self.microbatches[index] for index in order),
            forward=self.forward[order],
            backward=self.backward[order],
        )

    def with_virtual_stages(self, virtual_per_stage: int) -> "Workload":
        """Returns a new workload in which every stage is divided into equal virtual stages.

        Each virtual stage takes 1 / virtual_per_stage of its stage's times.

        Args:
          virtual_per_stage: number of virtual stages of each stage in the new workload.

        Raises:
          PlanningError: this workload has more than one virtual stage per stage already.
        """
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
    """Returns a workload in which all microbatches take equal times on a stage.

    Args:
      microbatches: the microbatches in order, for example from `round_robin_microbatches`.
      forward: for each of S stages, the time of a microbatch's forward pass, in any unit.
      backward: for each stage, the time of a microbatch's backward pass, in the unit of `forward`.
      buffer_limit: for each stage, its number of buffers for residuals (see
        `ScheduledMicrobatch.buffers`); None for no limit.

    Raises:
      PlanningError: there are no microbatches, `forward`, `backward` and `buffer_limit` are not of
        equal lengths, a time is not positive, or a microbatch takes less than one buffer or more
        than a stage has.
    """
    return Workload(
        tuple(microbatches),
        np.tile(np.asarray(forward, float), (len(microbatches), 1)),
        np.tile(np.asarray(backward, float), (len(microbatches), 1)),
        None if buffer_limit is None else tuple(buffer_limit),
    )


def round_robin_microbatches(
    tasks: int, steps: int, microbatches: int = 1
) -> tuple[ScheduledMicrobatch, ...]:
    """Returns microbatches in an order in which tasks take turns, as in mLoRA's pipeline (3.2.1).

    Use it to make a `Workload` with `uniform_workload`. A step is one global batch of a task with
    its update. Step 0 of every task comes first, in the order of the tasks, then step 1 of every
    task, and so on. The microbatches of one global batch are consecutive. Each microbatch holds
    samples of one task and takes one buffer; its bucket (see `ScheduledMicrobatch`) is the index of
    its task.

    Args:
      tasks: number of tasks.
      steps: number of steps of each task.
      microbatches: number of microbatches of each global batch.

    Returns:
      A tuple of tasks · steps · microbatches entries.
    """
    return tuple(
        ScheduledMicrobatch((task,), (step,), bucket=task)
        for step in range(steps)
        for task in range(tasks)
        for _ in range(microbatches)
    )


def independent_series(workload: Workload, longest: int | None = None) -> list[list[int]]:
    """Cuts the stream, as late as possible, into series of independent microbatches.

    Microbatches are independent if none of them needs an update that another one of the series
    contributes to.

    Args:
      workload: the stream.
      longest: most microbatches of a series; None for no limit.

    Returns:
      The indices of the consecutive microbatches of each series.
    """
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
    """The optimizer update of one task after one step, in a `PipelineSchedule`.

    A step is one global batch of the task with the update after it.

    Attributes:
      task: index of the task.
      step: number of the step whose global batch has run completely.
      ticks: for each of the S stages, the tick (column of the schedule) at whose end the stage
        updates its part of the task's adapter. It differs between stages, because they finish their
        backward passes in different ticks.
    """

    task: int
    step: int
    ticks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineSchedule:
    """The order in which S stages run M microbatches: a table with one column per tick.

    A generator such as `one_forward_one_backward` makes a schedule from a `Workload`; the schedule
    itself holds no times. `validate` checks it, `simulate_lockstep` and `simulate_asynchronous`
    predict its time, and `print` shows its table.

    A *tick* is one column of the table. There are T ticks. In a tick a stage runs at most one
    backward and one forward pass, the backward pass first. A pass uses only outputs of passes of
    earlier ticks. Stages may run all together, tick by tick, or each stage may run its row in order
    at its own pace. The loss of a microbatch is part of its forward pass on the last virtual stage.

    A buffer is a unit of memory for the activations that a forward pass keeps for its backward
    pass. A microbatch takes `ScheduledMicrobatch.buffers` buffers on a stage from its forward to
    its backward pass there. A forward pass can take buffers that the backward pass of the same tick
    frees.

    In an interleaved pipeline a stage holds several parts of the model, called virtual stages:
    virtual stage v lies on stage v mod S. In an ordinary pipeline the virtual stages are the
    stages.

    Attributes:
      microbatches: the M microbatches; the tables refer to them by index.
      forward_microbatch: int32 [S, T], index of the microbatch that stage s runs forward in tick t;
        -1 where stage s runs no forward pass.
      backward_microbatch: int32 [S, T], index of the microbatch that stage s runs backward in tick
        t; -1 where stage s runs no backward pass.
      forward_virtual_stage: int32 [S, T], the virtual stage, between 0 and V - 1, of the forward
        pass of stage s in tick t; -1 where stage s runs no forward pass.
      backward_virtual_stage: int32 [S, T], the virtual stage of the backward pass of stage s in
        tick t; -1 where stage s runs no backward pass.
      updates: one update for each task and step (global batch), ordered by its tick on the first
        stage.
      virtual_per_stage: number of virtual stages of one stage, 1 for an ordinary pipeline; V = S ·
        virtual_per_stage.
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
        """S, the number of pipeline stages."""
        return self.forward_microbatch.shape[0]

    @property
    def ticks(self) -> int:
        """T, the number of ticks."""
        return self.forward_microbatch.shape[1]

    @property
    def virtual_stages(self) -> int:
        """V, the number of virtual stages of all stages together."""
        return self.stages * self.virtual_per_stage

    def forward_ticks(self) -> np.ndarray:
        """Returns int32 [V, M]: the tick of each forward pass, by virtual stage and microbatch."""
        return self._ticks(self.forward_microbatch, self.forward_virtual_stage)

    def backward_ticks(self) -> np.ndarray:
        """Returns int32 [V, M]: the tick of each backward pass, by virtual stage and microbatch."""
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
        """Returns int64 [G]: the most buffers that are in use at the same time in each group of
        virtual stages. The group of each virtual stage is given, int64 [V]."""
        change, group = np.zeros((group.max() + 1, self.ticks), int), group[:, None]
        buffers = np.array([microbatch.buffers for microbatch in self.microbatches])
        # The backward pass comes first in its tick, so its buffers are free within the tick.
        np.add.at(change, (group, self.forward_ticks()), buffers)
        np.subtract.at(change, (group, self.backward_ticks()), buffers)
        return np.max(np.cumsum(change, axis=1), axis=1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipelineSchedule) and self.to_json() == other.to_json()

    def __str__(self) -> str:
        """Returns the table as text: a row for each stage, a column for each tick.

        `F3` is the forward pass of microbatch 3, `B0` is the backward pass of microbatch 0. In an
        interleaved pipeline `F3.1` runs on the second virtual stage of its stage.
        """
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
        """Returns a plain dict for `json.dump`: each attribute under its name, arrays as lists.

        Each microbatch and each update is a dict of its fields. The key "format" holds the version
        of the format. `from_json` reads the dict.
        """
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
        """Returns the schedule that `to_json` was called on. It does not call `validate`.

        Args:
          data: a dict from `to_json`, also after it was written to a JSON file and read again.

        Raises:
          ValueError: the dict is of another format.
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
    """Returns a value for JSON with lists in place of all tuples, also within dicts and lists."""
    if isinstance(value, dict):
        return {key: as_lists(entry) for key, entry in value.items()}
    return [as_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


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
