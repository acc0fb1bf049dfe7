"""One task of a live training: its states, its commands, what it has used, and its row in the table
of a server."""

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
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

# A task in one of these states has given an adapter.
TRAINED = frozenset({SUCCEEDED, STOPPED_EARLY})
# A task in one of these states never trains again.
ENDED = TRAINED | {FAILED, CANCELLED}

# By state, the states that may follow.
FOLLOWING = {
    PREPARING: {QUEUED, PAUSED, FAILED, CANCELLED},
    QUEUED: {PREPARING, RUNNING, PAUSED, FAILED, CANCELLED},
    # Where training is started again, the data of a task are read again.
    RUNNING: {PREPARING, QUEUED, PAUSED} | ENDED,
    PAUSED: {PREPARING, QUEUED, FAILED, CANCELLED},
    **dict.fromkeys(ENDED, frozenset()),
}


class StateChange(NamedTuple):
    """The beginning of a state.

    Attributes:
      state: the state.
      reason: why the task is in it, in words; None if there is nothing to say.
      time: when it began, in seconds since 1970.
    """

    state: str
    reason: str | None
    time: float


@dataclasses.dataclass
class Meter:
    """What a task, or all tasks together, have used so far. The sums over all tasks are the totals.

    Attributes:
      effective_tokens: tokens of the samples of the task's updates, without padding, and without
        the virtual tokens of a trained prompt, which belong to the adapter and not to the data.
      computed_tokens: tokens of the chunks with training samples that have been computed, with
        padding and virtual tokens. It makes no difference whether an update followed.
      recomputed_tokens: tokens of this kind that were computed once more, because training was
        started again from an earlier moment, because a device ran out of memory, or because the
        task left a round, or on some meshes a global batch, that had begun. They do not count as
        computed a second time.
      trained_tokens: target tokens (tokens that count in the loss) of the updates that were
        applied.
      held_out_tokens: tokens of the chunks with held-out samples, with padding, of the
        measurements that have been completed.
      device_seconds: the task's part of the time of its rounds, in proportion to all tokens that
        were computed in them, held-out ones included. What is computed once more because training
        was started again costs nothing.
    """

    effective_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    trained_tokens: int = 0
    held_out_tokens: int = 0
    device_seconds: float = 0.0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Meter":
        """The meter in a row of the table.

        Args:
          row: the row's columns by name.
        """
        return cls(**{field.name: row[field.name] for field in dataclasses.fields(cls)})

    def replace(self, old: "Meter", new: "Meter") -> None:
        """Counts one meter in place of another in a total.

        Args:
          old: the meter that was counted.
          new: the meter that counts from now on.
        """
        for field in dataclasses.fields(self):
            name = field.name
            change = getattr(new, name) - getattr(old, name)
            setattr(self, name, getattr(self, name) + change)

    def copy(self) -> "Meter":
        """Returns a copy, which does not change with this meter."""
        return dataclasses.replace(self)


class Counted(NamedTuple):
    """How far a task's use has been counted. Work below this point is a repetition, and is metered
    as recomputed.

    Attributes:
      step: index of the last global batch of which tokens were counted.
      tokens: number of that batch's tokens, with padding, that were counted.
      updates: number of updates that were counted.
      measuring: number of steps after which the held-out loss was last measured, at least in part;
        -1 before the first time.
      measured: the same for measurements that were completed.
    """

    step: int = 0
    tokens: int = 0
    updates: int = 0
    measuring: int = -1
    measured: int = -1

    def covers(self, turn: ComputedTurn) -> int:
        """Number of a turn's tokens that were counted before.

        Args:
          turn: what has been computed of a global batch.
        """
        # On other devices, a global batch may have more tokens with padding than it had.
        if turn.step < max(self.step, self.updates):
            return turn.tokens
        if turn.step > self.step:
            return 0
        return min(turn.tokens, max(0, self.tokens - turn.before))


class Command(NamedTuple):
    """A wish to change a task.

    Attributes:
      kind: what is to be done: "register", "cancel", "pause", "resume", "set_priority" or "extend".
      task: name of the task.
      value: what the kind needs: for "register", the `Task`, its priority, its files from
        `file_identities`, and its `LiveTask.origin`; for "set_priority", the priority; for
        "extend", the number of steps; else None.
    """

    kind: str
    task: str
    value: Any


# A command, and the future that tells whether it has been carried out.
Waiting = tuple[Command, Future[None]]


class CommandQueue:
    """Commands in the order in which they were given. All methods may be called in any thread."""

    def __init__(self):
        """Creates an empty queue."""
        self._changed = threading.Condition()
        self._waiting: deque[Waiting] = deque()
        self._woken = False
        self._closed = False

    def put(self, command: Command) -> Future[None]:
        """Adds a command.

        Args:
          command: the command.

        Returns:
          A future that is done when the command has been carried out; it has the exception if the
          command could not be carried out.

        Raises:
          RuntimeError: the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(f"task {command.task!r}: the server takes no more commands")
            future: Future[None] = Future()
            self._waiting.append((command, future))
            self._changed.notify_all()
            return future

    def take(self) -> list[Waiting]:
        """The commands that wait, in their order. Whoever takes them sets their futures. Commands
        whose future was cancelled are left out."""
        with self._changed:
            waiting, self._waiting = list(self._waiting), deque()
            self._woken = False
        return [each for each in waiting if each[1].set_running_or_notify_cancel()]

    def wait(self, seconds: float | None) -> None:
        """Waits until there is a command, or `wake` or `close` is called.

        Args:
          seconds: the longest time to wait; None for no limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._woken or self._closed, seconds)

    def wake(self) -> None:
        """Ends a `wait`, also one that begins after this call and before the next `take`."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Takes no more commands. Those that wait can still be carried out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# So many states of a task are known, besides the first one.
_LAST_STATES = 100
# Why a task that trains makes no steps.
_MEASURED = "its held-out loss is being measured"
# Why a task that has ended does not show it.
_UNKEPT = "its end is being written to disk"


class TaskStatus(NamedTuple):
    """What can be seen of a task; it does not change.

    Attributes:
      name: name of the task.
      state: "queued" (waits for its turn, or for a place), "preparing" (its data are read, or its
        initial adapter is computed), "running", "paused", "succeeded", "stopped early" (it has
        given an adapter before its last step), "failed" or "cancelled".
      reason: why the task is in this state, in words; None if there is nothing to say.
      priority: its priority; tasks of higher numbers go first.
      step: number of global batches that it has trained.
      steps: number of global batches that it is to train; None until its data have been read.
      loss: loss of the last update, in nats per target token; None before the first, NaN if the
        last one was skipped because a value was not finite.
      held_out_loss: loss of the held-out data when it was measured last, in nats per target token;
        None before the first time. That of the exported adapter when a task that keeps its best
        one has succeeded.
      best_step: number of steps after which it was lowest; None before the first time.
      share: the task's part of the tokens of the last round, padding included; 0 unless it trains.
      meter: what the task has used.
      history: the states so far, with reasons and times; the last one is the present state. Of more
        than 101, only the first one and the last 100 are there.
      rank: the rank of its adapter; None if its kind has none.
      warnings: what is legal but suspicious about its settings and data, known when these have been
        read, and about its results.
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


class TaskCopy(NamedTuple):
    """What a checkpoint keeps of a task that has begun, as of one moment.

    Attributes:
      progress: its progress.
      arrays: function that waits for its arrays, and returns them by path.
    """

    progress: TaskProgress
    arrays: Callable[[], SlotArrays]


@dataclasses.dataclass
class LiveTask:
    """A task that comes and goes. Only the thread that owns the engine reads and changes it.

    Attributes:
      specification: the task as it was registered.
      priority: its priority; tasks of higher numbers go first.
      arrival: number of its arrival; tasks that arrived together have the same number.
      history: the states so far.
      key: random text that no other task has, also of the same name. Checkpoints have it.
      is_new: whether it is not in the table yet.
      origin: the task as its tenant had specified it, with the tenant's own name and paths; None if
        it comes from no watched directory.
      prepared: the task with its data; None until they have been read, and after its end.
      reading: the reading of its data; None if they are neither being read nor about to be.
      files: its files at the time of its registration, from `file_identities`; empty when its data
        have been read.
      note: what has brought it into its present state; it is told with every reason there.
      steps: number of steps that it is to train; None if that depends on data that have not been
        read.
      fingerprints: hashes of its data; empty until they have been read.
      suspended: what the task needs to go on, while it has begun and does not train.
      progress: its progress; None until it has begun.
      saved_arrays: function that returns the arrays with which it goes on, until its data have been
        read again; else None.
      share: its part of the tokens of the last round.
      meter: what the task has used.
      counted: how far this has been counted.
      reached: `counted` at the start of this process; work below it costs no device seconds.
      passes: number of later tasks of its priority that have begun before it.
      extensions: the commands that have extended it, in their order: the number of updates that are
        dispatched before the longer schedule begins, and the number of steps from then on.
      measures: whether it trains on only when its held-out loss has been measured.
      unkept: function that returns its final arrays while its success is not in the table; a
        restart ends it again with them. Else None.
      kept: whether it has ended for good: its end is in the table.
      told: whether an event has told of its present state.
      dirty: whether it has changed since its row was written.
      warnings: as in `TaskStatus`.
      last_warnings: those of its end, until they are told with it.
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
        """A task from the table, before its data are read again.

        Args:
          row: its row, as `row` and `first_row` have made it.
          copy: its copy in a checkpoint; None if it begins anew, or has ended.
        """
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
            # It had trained its last step before it was extended.
            train_on(copy.progress, task.specification)
        return task

    def first_row(self) -> dict[str, Any]:
        """The columns that do not change, by name."""
        return {
            "key": self.key,
            "name": self.name,
            "specification": to_object(self.specification),
            "origin": self.origin and to_object(self.origin),
            "arrival": self.arrival,
        }

    def row(self, ends: bool) -> dict[str, Any]:
        """The columns that may change, by name.

        Args:
          ends: whether to write that it has ended. False writes it as it was before, because its
            adapter is not on disk.
        """
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
        """Number of tokens of a global batch on average, without padding. The data have been
        read."""
        samples = self.prepared.samples.samples
        total = int(stream_lengths(samples).sum(dtype=np.int64))
        return round(self.specification.batch_size * total / len(samples))

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
        """What changes if the task enters a state, or the reason of its present one changes.

        Args:
          state: the state.
          reason: why, in words.
          time: seconds since 1970.
          note: what has brought it into the state, if that is to be told with every reason there.

        Returns:
          The attributes that change, by name.
        """
        note = note if note or state != self.state else self.note
        reason = "; ".join(filter(None, (note, reason))) or None
        if state != self.state:
            if state not in FOLLOWING[self.state]:
                raise RuntimeError(f"task {self.name!r}: {state} does not follow {self.state}")
            history = [*self.history, StateChange(state, reason, time)]
            # The state in which it began stays.
            del history[1:-_LAST_STATES]
        elif reason != self.reason:
            history = [*self.history[:-1], self.history[-1]._replace(reason=reason)]
        else:
            return {"note": note} if note != self.note else {}
        return {"note": note, "history": history, "told": False}

    def extended(self, steps: int, at: int) -> dict[str, Any]:
        """What changes if the task is to train another number of steps.

        Args:
          steps: the number of steps.
          at: number of updates that are dispatched before the longer schedule begins.

        Returns:
          The attributes that change, by name.
        """
        # Extensions that were to have effect later have none.
        kept = [extension for extension in self.extensions if extension[0] < at]
        return {"extensions": [*kept, (at, steps)], "steps": steps, "told": False}

    def change(self, changes: Mapping[str, Any]) -> None:
        """Changes attributes of the task.

        Args:
          changes: the new values, by name.
        """
        for name, value in changes.items():
            setattr(self, name, value)
        self.dirty = True
        if self.ended:
            self.prepared = self.suspended = self.saved_arrays = None
        elif "extensions" in changes:
            self._train_longer()

    def _train_longer(self) -> None:
        """Lets the task go on with its last extension, unless it is in the engine."""
        at, steps = self.extensions[-1]
        if self.prepared:
            self.prepared = self.prepared.extended(steps, at)
        if self.suspended:
            self.suspended.slot.prepared = self.prepared
        if self.progress:
            # It may have lost its place when its last step had been dispatched.
            train_on(self.progress, self.specification)

    def set_prepared(self, prepared: PreparedTask) -> None:
        """Takes the data of the task.

        Args:
          prepared: the task as it was registered.

        Raises:
          TaskError: these are not the data that were read before.
        """
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
        # From now on the fingerprints tell whether the data are the same.
        self.fingerprints, self.files, self.dirty = found, {}, True
        self.prepared, self.steps = prepared, prepared.steps
        if self.saved_arrays:
            self.suspended = SuspendedTask.of(self.prepared, self.progress, self.saved_arrays)
            self.saved_arrays = None

    def count_turn(self, turn: ComputedTurn) -> None:
        """Counts what has been computed of a global batch.

        Args:
          turn: what has been computed.
        """
        again = self.counted.covers(turn)
        self.meter.computed_tokens += turn.tokens - again
        self.meter.recomputed_tokens += again
        if again < turn.tokens:
            tokens = turn.before + turn.tokens
            self.counted = self.counted._replace(step=turn.step, tokens=tokens)

    def count_update(self, update: TaskUpdate) -> None:
        """Counts an update, whose turns are counted by themselves.

        Args:
          update: the update.
        """
        if update.task_step > self.counted.updates:
            self.counted = self.counted._replace(updates=update.task_step)
            self.meter.effective_tokens += update.tokens
            self.meter.trained_tokens += 0 if update.skipped else update.target_tokens

    def count_measured(self, measured: HeldOutTokens) -> None:
        """Counts a measurement of the held-out loss that has been completed.

        Args:
          measured: its tokens.
        """
        # A task that was extended may be measured twice after the same step.
        if measured.step > self.reached.measured:
            self.meter.held_out_tokens += measured.tokens
            self.counted = self.counted._replace(measured=max(self.counted.measured, measured.step))

    def count_seconds(self, part: ComputedTurn | HeldOutTokens, seconds: float) -> None:
        """Counts the time of what has been computed, unless it was counted before training was
        started again.

        Args:
          part: what has been computed.
          seconds: the time that the devices have spent on it.
        """
        if isinstance(part, ComputedTurn):
            seconds *= 1 - self.reached.covers(part) / max(part.tokens, 1)
        else:
            seconds *= part.step > self.reached.measuring
            self.counted = self.counted._replace(measuring=max(self.counted.measuring, part.step))
        self.meter.device_seconds += seconds

    def copy(self, arrays: Callable[[], SlotArrays] | None) -> TaskCopy | None:
        """The task as a checkpoint keeps it now; None if it has not begun or has ended for good.

        Args:
          arrays: function that waits for its arrays, if it is in the engine.
        """
        if self.suspended:
            arrays = self.suspended.with_kept()
        # A success that has not been kept is none if training is started again.
        arrays = self.unkept if self.ended else arrays or self.saved_arrays
        return arrays and TaskCopy(dataclasses.replace(self.progress), arrays)

    def status(self, ends: bool = True) -> TaskStatus:
        """What others may see of the task now.

        Args:
          ends: False shows a task that has ended as it was before.
        """
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
        )
