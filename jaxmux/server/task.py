"""One task of a live training: its states, its commands, its usage, and its row in the table of a
server."""

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np

from jaxmux.data.stored_samples import stream_lengths
from jaxmux.engine import (
    ComputedTurn,
    HeldOutTokens,
    PreparedTask,
    SuspendedTask,
    TaskProgress,
    TaskUpdate,
    train_on,
)
from jaxmux.field_checks import to_object
from jaxmux.peft import SlotArrays
from jaxmux.printable import STOPPED_EARLY
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import Task, TaskError

from .data import Reading

QUEUED = "queued"
PREPARING = "preparing"
RUNNING = "running"
PAUSED = "paused"
SUCCEEDED = "succeeded"
FAILED = "failed"
CANCELLED = "cancelled"

# A task in one of these states has an adapter.
TRAINED = frozenset({SUCCEEDED, STOPPED_EARLY})
# A task in one of these states never trains again.
ENDED = TRAINED | {FAILED, CANCELLED}

# For each state, the states that may follow it.
FOLLOWING = {
    PREPARING: {QUEUED, PAUSED, FAILED, CANCELLED},
    QUEUED: {PREPARING, RUNNING, PAUSED, FAILED, CANCELLED},
    # When training is started again, the data of a task are read again.
    RUNNING: {PREPARING, QUEUED, PAUSED} | ENDED,
    PAUSED: {PREPARING, QUEUED, FAILED, CANCELLED},
    **dict.fromkeys(ENDED, frozenset()),
}


class StateChange(NamedTuple):
    """The beginning of a state: the state, why the task is in it (None if there is nothing to say),
    and the time in seconds since 1970."""

    state: str
    reason: str | None
    time: float


@dataclasses.dataclass
class Meter:
    """The usage so far of one task, or of all tasks together (the totals).

    Attributes:
      effective_tokens: tokens of the samples of the task's updates, without padding, and without
        the virtual tokens of a trained prompt, which belong to the adapter.
      computed_tokens: tokens of the chunks with training samples that have been computed, with
        padding and virtual tokens, whether or not an update followed.
      recomputed_tokens: tokens of this kind that were computed again and do not count as computed a
        second time. Reasons are: training was started again from an earlier state; a device ran out
        of memory; the task left a round, or on some meshes a global batch, that had begun.
      trained_tokens: target tokens (tokens that count in the loss) of the updates that were
        applied.
      held_out_tokens: tokens of the chunks with held-out samples, with padding, in completed
        measurements.
      device_seconds: the task's share of the time of its rounds, in proportion to all tokens that
        were computed in them, held-out tokens included. Tokens that are computed again because
        training was started again cost no time.
    """

    effective_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    trained_tokens: int = 0
    held_out_tokens: int = 0
    device_seconds: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Meter":
        """The meter in a row of the table, given by column."""
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    def replace(self, old: "Meter", new: "Meter") -> None:
        """Replaces one meter by another in a total."""
        for field in dataclasses.fields(self):
            name = field.name
            change = getattr(new, name) - getattr(old, name)
            setattr(self, name, getattr(self, name) + change)

    def copy(self) -> "Meter":
        """Returns an independent copy."""
        return dataclasses.replace(self)


class Counted(NamedTuple):
    """How far a task's usage has been counted. Work before this point is a repetition, and is
    metered as recomputed.

    Attributes:
      step: index of the last global batch of which tokens were counted.
      tokens: number of that batch's tokens, with padding, that were counted.
      updates: number of updates that were counted.
      measuring: number of steps after which the held-out loss was last measured, at least in part;
        -1 before the first measurement.
      measured: number of steps after which the last completed measurement was made; -1 before it.
    """

    step: int = 0
    tokens: int = 0
    updates: int = 0
    measuring: int = -1
    measured: int = -1

    def covers(self, turn: ComputedTurn) -> int:
        """Number of a turn's tokens that were counted before."""
        # On other devices, a global batch may have more tokens, padding included, than before.
        if turn.step < max(self.step, self.updates):
            return turn.tokens
        if turn.step > self.step:
            return 0
        return min(turn.tokens, max(0, self.tokens - turn.before))


class Command(NamedTuple):
    """A wish to change a task.

    Attributes:
      kind: "register", "cancel", "pause", "resume", "set_priority" or "extend".
      task: name of the task.
      value: for "register", the `Task`, its priority, its files from `file_identities`, and its
        `LiveTask.origin`; for "set_priority", the priority; for "extend", the number of steps;
        otherwise None.
    """

    kind: str
    task: str
    value: Any


# A command, and the future that is done when the command has been carried out.
Waiting = tuple[Command, Future[None]]


class CommandQueue:
    """Commands in the order in which they were given. Every thread may call all methods."""

    def __init__(self):
        self._changed = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._woken = False
        self._closed = False

    def put(self, command: Command) -> Future[None]:
        """Adds a command. Returns a future that is done when the command has been carried out, and
        has the exception if that is not possible. Raises RuntimeError if the queue is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"task {command.task!r}: the server takes no more commands")
            future: Future[None] = Future()
            self._waiting.append((command, future))
            self._changed.notify_all()
            return future

    def take(self) -> list[Waiting]:
        """Takes the waiting commands, in order. The caller sets their futures. Commands whose
        future was cancelled are left out."""
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            self._woken = False
        return [each for each in waiting if each[1].set_running_or_notify_cancel()]

    def wait(self, seconds: float | None) -> None:
        """Waits until there is a command, or `wake` or `close` is called; at most `seconds` if
        given."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._woken or self._closed, seconds)

    def wake(self) -> None:
        """Ends a `wait`, even one that begins after this call and before the next `take`."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Takes no more commands. Those that wait can still be carried out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# The first state of a task is kept, and this many of its last states.
_LAST_STATES = 100
# The reason why a task that trains makes no steps.
_MEASURED = "its held-out loss is being measured"
# The reason why the status of a task does not show its end.
_UNKEPT = "its end is being written to disk"


class TaskStatus(NamedTuple):
    """The visible state of a task at one time.

    Attributes:
      name: name of the task.
      state: "queued" (waits for its turn, or for a place), "preparing" (its data are read, or its
        initial adapter is computed), "running", "paused", "succeeded", "stopped early" (it has an
        adapter, but did not train its last steps), "failed" or "cancelled".
      reason: why the task is in this state, in words; None if there is nothing to say.
      priority: its priority; tasks with higher numbers go first.
      step: number of global batches that it has trained.
      steps: number of global batches that it is to train; None until its data have been read.
      loss: loss of the last update; None before the first update, NaN if the last update was
        skipped because a value was not finite. Losses are values of the task's objective, for `SFT`
        in nats per target token.
      held_out_loss: last measured loss of the held-out data; None before the first measurement. If
        a task that keeps its best adapter has succeeded, the loss of this adapter.
      best_step: number of steps after which the task's `best_metric` was best; None before the
        first measurement.
      share: the task's fraction of the tokens of the last round, padding included; 0 unless it
        trains.
      meter: the task's usage.
      history: the states so far, with reasons and times; the last one is the present state. If
        there are more than 101, only the first and the last 100 are kept.
      rank: the rank of its adapter; None if its kind has none.
      warnings: legal but suspicious facts about its settings and data, which are known when the
        data have been read, and about its results.
      held_out_metrics: the other metrics of its objective, measured after a step together with
        `held_out_loss`.
    """

    name: str
    state: str
    reason: str | None
    priority: int
    step: int
    steps: int | None
    loss: float | None
    held_out_loss: float | None
    best_step: int | None
    share: float
    meter: Meter
    history: tuple[StateChange, ...]
    rank: int | None = None
    warnings: tuple[str, ...] = ()
    held_out_metrics: Mapping[str, float] = MappingProxyType({})


class TaskCopy(NamedTuple):
    """The content of a checkpoint for a task that has begun: its progress, and a function that
    waits for its arrays and returns them by path."""

    progress: TaskProgress
    arrays: Callable[[], SlotArrays]


@dataclasses.dataclass
class LiveTask:
    """A task that comes and goes. Only the thread that owns the engine reads and changes it.

    Attributes:
      specification: the task as it was registered.
      priority: its priority; tasks with higher numbers go first.
      arrival: number of its arrival; tasks that arrived together have the same number.
      history: the states so far.
      key: random text that identifies the task in checkpoints, even among tasks of the same name.
      is_new: whether it is not in the table yet.
      origin: the task as its tenant specified it, with the tenant's own name and paths; None if it
        does not come from a watched directory.
      prepared: the task with its data; None until they have been read, and after its end.
      reading: the reading of its data; None if no reading runs or waits.
      files: its files at the registration, from `file_identities`; empty when its data have been
        read.
      note: the cause of its present state; it is reported together with every reason in this state.
      steps: number of steps that it is to train; None if this depends on data that have not been
        read.
      fingerprints: hashes of its data; empty until they have been read.
      suspended: what the task needs to go on, if it has begun and does not train; otherwise None.
      progress: its progress; None until it has begun.
      saved_arrays: returns the arrays with which it goes on, until its data have been read again;
        otherwise None.
      share: its fraction of the tokens of the last round.
      meter: its usage.
      counted: how far its usage has been counted.
      reached: `counted` at the start of this process; work before it costs no device seconds.
      passes: number of later tasks of its priority that have begun before it.
      extensions: the commands that have extended it, in order: the number of updates that are
        dispatched before the longer schedule begins, and the number of steps from then on.
      measures: whether it waits for a measurement of its held-out loss before it trains on.
      unkept: while its success is not in the table, returns its final arrays, with which a restart
        ends it again; otherwise None.
      kept: whether its end is in the table.
      told: whether an event has reported its present state.
      dirty: whether it has changed since its row was written.
      warnings: as in `TaskStatus`.
      last_warnings: the warnings about its end, until they are reported with it.
    """

    specification: Task
    priority: int
    arrival: int
    history: list[StateChange]
    key: str = dataclasses.field(default_factory=lambda: uuid4().hex)
    is_new: bool = True
    origin: Task | None = None
    prepared: PreparedTask | None = None
    reading: Reading | None = None
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    note: str | None = None
    steps: int | None = None
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    suspended: SuspendedTask | None = None
    progress: TaskProgress | None = None
    saved_arrays: Callable[[], SlotArrays] | None = None
    share: float = 0.0
    meter: Meter = dataclasses.field(default_factory=Meter)
    counted: Counted = Counted()
    reached: Counted = Counted()
    passes: int = 0
    extensions: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    measures: bool = False
    unkept: Callable[[], SlotArrays] | None = None
    kept: bool = False
    told: bool = False
    dirty: bool = False
    warnings: tuple[str, ...] = ()
    last_warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: Mapping[str, Any], copy: TaskCopy | None) -> "LiveTask":
        """A task from a row of the table, before its data are read again. `copy` is the task's copy
        in a checkpoint; None if it begins anew, or has ended."""
        progress = row["progress"] and TaskProgress.from_json(row["progress"])
        history = [StateChange(**change) for change in row["history"]]
        counted, has_ended = Counted(*row["counted"]), row["state"] in ENDED
        task = cls(
            from_json(row["specification"]),
            row["priority"],
            row["arrival"],
            history,
            key=row["key"],
            is_new=False,
            origin=row["origin"] and from_json(row["origin"]),
            files=row["files"],
            steps=row["steps"],
            fingerprints=row["fingerprints"],
            progress=progress if has_ended else copy and copy.progress,
            saved_arrays=copy and copy.arrays,
            meter=Meter.of(row),
            counted=counted,
            reached=counted,
            passes=row["passes"],
            extensions=[(at, steps) for at, steps in row["extensions"]],
            kept=has_ended,
            told=row["told"],
            warnings=tuple(row["warnings"]),
        )
        if copy and task.steps and copy.progress.step < task.steps:
            # The task had trained its last step before it was extended.
            train_on(copy.progress, task.specification)
        return task

    def first_row(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "name": self.name,
            "specification": to_object(self.specification),
            "origin": self.origin and to_object(self.origin),
            "arrival": self.arrival,
        }

    def row(self, ends: bool) -> dict[str, Any]:
        """The columns that may change, by name. With `ends` False, a task that has ended is written
        as it was before its end, because its adapter is not on disk."""
        history = self.history[:-1] if self.ended and not ends else self.history
        return {
            "state": history[-1].state,
            "priority": self.priority,
            "passes": self.passes,
            "steps": self.steps,
            "extensions": self.extensions,
            "files": dict(self.files),
            "fingerprints": dict(self.fingerprints),
            "history": [change._asdict() for change in history],
            "warnings": self.warnings + (self.last_warnings if ends else ()),
            "progress": self.progress and self.progress.to_json(),
            "counted": self.counted,
            "told": self.told,
            **vars(self.meter),
        }

    @property
    def name(self) -> str:
        return self.specification.name

    @property
    def state(self) -> str:
        return self.history[-1].state

    @property
    def reason(self) -> str | None:
        return self.history[-1].reason

    @cached_property
    def batch_tokens(self) -> int:
        """Mean number of tokens of a global batch, without padding. The data must have been
        read."""
        samples, objective = self.prepared.samples.samples, self.specification.objective
        total = int(stream_lengths(objective.trained(samples)).sum(dtype=np.int64))
        return round(self.specification.batch_size * total / objective.count(samples))

    @property
    def _paths(self) -> str:
        sources = (*self.specification.sources, self.specification.eval_data)
        return ", ".join(source.path for source in sources if source)

    @property
    def ended(self) -> bool:
        """Whether the task never trains again."""
        return self.state in ENDED

    def entered(
        self, state: str, reason: str | None, time: float, note: str | None = None
    ) -> dict[str, Any]:
        """The attributes that change if the task enters a state, or if the reason of its present
        state changes. `note` is the cause of the state, if it is to be reported with every reason
        in this state. `time` is in seconds since 1970."""
        note = note if note or state != self.state else self.note
        reason = "; ".join(filter(None, (note, reason))) or None
        if state != self.state:
            if state not in FOLLOWING[self.state]:
                raise RuntimeError(f"task {self.name!r}: {state} does not follow {self.state}")
            history = [*self.history, StateChange(state, reason, time)]
            # The first state is kept.
            del history[1:-_LAST_STATES]
        elif reason != self.reason:
            history = [*self.history[:-1], self.history[-1]._replace(reason=reason)]
        else:
            return {"note": note} if note != self.note else {}
        return {"note": note, "history": history, "told": False}

    def extended(self, steps: int, at: int) -> dict[str, Any]:
        """The attributes that change if the task is to train `steps` steps. `at` is the number of
        updates that are dispatched before the longer schedule begins."""
        # Extensions that would have begun later have no effect any more.
        kept = [extension for extension in self.extensions if extension[0] < at]
        return {"extensions": [*kept, (at, steps)], "steps": steps, "told": False}

    def change(self, changes: Mapping[str, Any]) -> None:
        """Sets attributes of the task by name."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.dirty = True
        if self.ended:
            self.prepared = self.suspended = self.saved_arrays = None
        elif "extensions" in changes:
            self._train_longer()

    def _train_longer(self) -> None:
        """Applies the last extension to a task that is not in the engine."""
        at, steps = self.extensions[-1]
        if self.prepared:
            self.prepared = self.prepared.extended(steps, at)
        if self.suspended:
            self.suspended.slot.prepared = self.prepared
        if self.progress:
            # The task may have lost its place after its last step was dispatched.
            train_on(self.progress, self.specification)

    def set_prepared(self, prepared: PreparedTask) -> None:
        """Stores the task with its data. Raises TaskError if the data differ from those that were
        read before."""
        found = prepared.fingerprints
        changed = [what for what, old in self.fingerprints.items() if found.get(what) != old]
        if changed:
            since = "since the task began" if self.progress else "after the task was registered"
            raise TaskError(
                f"the {' and the '.join(changed)} changed {since} ({self._paths}); register "
                "another task for them"
            )
        for at, steps in self.extensions:
            prepared = prepared.extended(steps, at)
        # From now on, the fingerprints show whether the data are the same.
        self.fingerprints, self.files, self.dirty = found, {}, True
        self.prepared, self.steps = prepared, prepared.steps
        if self.saved_arrays:
            self.suspended = SuspendedTask.of(self.prepared, self.progress, self.saved_arrays)
            self.saved_arrays = None

    def count_turn(self, turn: ComputedTurn) -> None:
        """Counts the computed part of a global batch."""
        again = self.counted.covers(turn)
        self.meter.computed_tokens += turn.tokens - again
        self.meter.recomputed_tokens += again
        if again < turn.tokens:
            tokens = turn.before + turn.tokens
            self.counted = self.counted._replace(step=turn.step, tokens=tokens)

    def count_update(self, update: TaskUpdate) -> None:
        """Counts an update. Its turns are counted separately."""
        if update.task_step > self.counted.updates:
            self.counted = self.counted._replace(updates=update.task_step)
            self.meter.effective_tokens += update.tokens
            self.meter.trained_tokens += 0 if update.skipped else update.target_tokens

    def count_measured(self, measured: HeldOutTokens) -> None:
        """Counts a completed measurement of the held-out loss."""
        # A task that was extended may be measured twice after the same step.
        if measured.step > self.reached.measured:
            self.meter.held_out_tokens += measured.tokens
            self.counted = self.counted._replace(measured=max(self.counted.measured, measured.step))

    def count_seconds(self, part: ComputedTurn | HeldOutTokens, seconds: float) -> None:
        """Counts the device time of a computed part, unless it was counted before training was
        started again."""
        if isinstance(part, ComputedTurn):
            seconds *= 1 - self.reached.covers(part) / max(part.tokens, 1)
        else:
            seconds *= part.step > self.reached.measuring
            self.counted = self.counted._replace(measuring=max(self.counted.measuring, part.step))
        self.meter.device_seconds += seconds

    def copy(self, arrays: Callable[[], SlotArrays] | None) -> TaskCopy | None:
        """The copy of the task for a checkpoint; None if it has not begun or has ended for good.
        `arrays` waits for the task's arrays, if it is in the engine."""
        if self.suspended:
            arrays = self.suspended.with_kept()
        # A success that has not been kept is none if training is started again.
        arrays = self.unkept if self.ended else arrays or self.saved_arrays
        return arrays and TaskCopy(dataclasses.replace(self.progress), arrays)

    def status(self, ends: bool = True) -> TaskStatus:
        """The visible state of the task. With `ends` False, a task that has ended is shown as it
        was before its end."""
        if not ends:
            before = self.history[:-1]
            shown = self.status()._replace(state=before[-1].state, history=tuple(before))
            return shown._replace(reason=_UNKEPT)
        progress = self.progress or TaskProgress()
        measured = progress.best_step is not None or progress.evaluations_since_best > 0
        runs = self.state == RUNNING
        return TaskStatus(
            self.name,
            self.state,
            self.reason or (_MEASURED if runs and self.measures else None),
            self.priority,
            progress.step,
            self.steps,
            math.nan if progress.bad_streak else progress.train_loss_last,
            progress.eval_loss if measured else progress.eval_loss_first,
            progress.best_step,
            self.share if runs else 0.0,
            self.meter.copy(),
            tuple(self.history),
            getattr(self.specification.adapter, "rank", None),
            self.warnings,
            progress.eval_metrics,
        )
