"""One task of a live training: its states, its commands, what it has used, and what is saved of
it."""

import dataclasses
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxmux.data.stored_samples import stream_lengths
from jaxmux.engine import (
    ComputedTurn,
    PreparedTask,
    SuspendedTask,
    TaskProgress,
    TaskUpdate,
    train_on,
)
from jaxmux.peft import SlotArrays
from jaxmux.printable import STOPPED_EARLY, shown_state
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

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "StateChange":
        """The change from its fields by name, as files keep them.

        Args:
          fields: the fields. Earlier versions wrote "succeeded" for tasks that stopped early.
        """
        change = cls(**fields)
        return change._replace(state=shown_state(change.state, change.reason))


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
        were computed in them, held-out ones included.
    """

    effective_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    trained_tokens: int = 0
    held_out_tokens: int = 0
    device_seconds: float = 0.0

    def add_turn(self, turn: ComputedTurn, counted: int, again: bool) -> None:
        """Counts what has been computed of a global batch.

        Args:
          turn: what has been computed.
          counted: number of tokens of the global batch that have been counted so far. If it has
            begun again since, they do not count a second time.
          again: whether the global batch was computed before, by a process that ended before it was
            saved.
        """
        new = min(turn.tokens, max(0, turn.before + turn.tokens - counted))
        self.computed_tokens += new
        self.recomputed_tokens += turn.tokens if again else turn.tokens - new

    def add_update(self, update: TaskUpdate) -> None:
        """Counts an update, whose turns are counted by themselves.

        Args:
          update: the update.
        """
        self.effective_tokens += update.tokens
        self.trained_tokens += 0 if update.skipped else update.target_tokens

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


def shares_of(computed: Mapping[str, int]) -> dict[str, float]:
    """By name of the task, its part of all tokens that were computed.

    Args:
      computed: by name of the task, the number of tokens.
    """
    total = sum(computed.values())
    return {name: tokens / max(total, 1) for name, tokens in computed.items()}


class Extension(NamedTuple):
    """A command that has let a task train more steps.

    Attributes:
      step: number of the task's updates that had been dispatched.
      steps: number of steps that the task is to train since then.
    """

    step: int
    steps: int


class SavedTask(NamedTuple):
    """A task at the end of a round, with all that it needs to go on from there.

    Attributes:
      task: the task as it was registered.
      priority: its priority.
      arrival: number of its arrival.
      passes: number of later tasks of its priority that have begun before it.
      history: its states so far; the last one is the present state.
      meter: what it has used.
      fingerprints: hashes of its data, from `PreparedTask`; empty if they have not been read.
      progress: its progress; None if it has not begun.
      arrays: function that waits for its arrays, and returns them by path; None if it has not begun
        or has ended.
      reached: number of steps that it is known to have trained, some of them perhaps after it was
        saved.
      steps: number of steps that it is to train; None if that is not known yet.
      extensions: the commands that have extended it, in their order. Their steps may come after
        the progress.
      begun_tokens: number of tokens, with padding, that its meter has counted of the global batch
        that comes next. The batch begins again.
      files: its files at the time of its registration, from `file_identities`; empty if its data
        have been read.
      warnings: as in `TaskStatus`.
    """

    task: Task
    priority: int
    arrival: int
    passes: int
    history: tuple[StateChange, ...]
    meter: Meter
    fingerprints: Mapping[str, str]
    progress: TaskProgress | None
    arrays: Callable[[], SlotArrays] | None
    reached: int = 0
    steps: int | None = None
    extensions: tuple[Extension, ...] = ()
    begun_tokens: int = 0
    files: Mapping[str, str] = MappingProxyType({})
    warnings: tuple[str, ...] = ()


class At(NamedTuple):
    """Where a task was when a command was carried out.

    Attributes:
      step: number of its updates that had been dispatched.
      meter: what it had used.
    """

    step: int
    meter: Meter


class End(NamedTuple):
    """How a task has ended.

    Attributes:
      history: all its states; the last one is that of its end.
      progress: its progress; None if it had not begun.
      steps: number of steps that it was to train; None if that was not known yet.
      warnings: as in `TaskStatus`.
    """

    history: tuple[StateChange, ...]
    progress: TaskProgress | None
    steps: int | None
    warnings: tuple[str, ...] = ()


class Command(NamedTuple):
    """A wish to change a task.

    Attributes:
      kind: what is to be done: "register", "cancel", "pause", "resume", "set_priority" or "extend".
        Others are no wishes: "read" keeps which data have been read for a task; "end" keeps how a
        task has ended and what it has used, and again when results of it have arrived after that;
        "used" is what earlier versions have kept of these.
      task: name of the task.
      value: what the kind needs: for "register", the `Task`, its priority and its files, from
        `file_identities`; for "set_priority", the priority; for "extend", the number of steps; for
        "read", the `PreparedTask.fingerprints`; for "end", an `End`; else None.
      time: when it was given, in seconds since 1970.
      at: where the task was when it was carried out; None before, for "register", and for commands
        that an earlier version has kept.
    """

    kind: str
    task: str
    value: Any
    time: float
    at: At | None = None


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
        return [own for own in waiting if own[1].set_running_or_notify_cancel()]

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


@dataclasses.dataclass
class LiveTask:
    """A task that comes and goes. Only the thread that owns the engine reads and changes it.

    Attributes:
      task: the task as it was registered.
      priority: its priority; tasks of higher numbers go first.
      arrival: number of its arrival; tasks that arrived together have the same number.
      history: the states so far.
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
      passes: number of later tasks of its priority that have begun before it.
      reached: number of steps that it had trained before training was started again.
      extensions: the commands that have extended it, as `SavedTask.extensions`.
      counted: index of the last global batch of which tokens have been counted, and their number.
      measured: whether it trains on only when its held-out loss has been measured.
      unkept: function that returns the arrays with which it ends once more if training is started
        again before its success has been kept; else None.
      warnings: as in `TaskStatus`.
    """

    task: Task
    priority: int
    arrival: int
    history: list[StateChange]
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
    passes: int = 0
    reached: int = 0
    extensions: list[Extension] = dataclasses.field(default_factory=list)
    counted: tuple[int, int] = (0, 0)
    measured: bool = False
    unkept: Callable[[], SlotArrays] | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, saved: SavedTask) -> "LiveTask":
        """A task as it was saved, before its data are read again."""
        return cls(
            saved.task,
            saved.priority,
            saved.arrival,
            list(saved.history),
            steps=saved.steps,
            fingerprints=saved.fingerprints,
            progress=saved.progress,
            saved_arrays=saved.arrays,
            meter=saved.meter,
            passes=saved.passes,
            reached=saved.reached,
            extensions=list(saved.extensions),
            counted=(saved.progress.step if saved.progress else 0, saved.begun_tokens),
            files=saved.files,
            warnings=saved.warnings,
        )

    @property
    def name(self) -> str:
        return self.task.name

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
        return round(self.task.batch_size * total / len(samples))

    @property
    def _paths(self) -> str:
        sources = (*self.task.sources, self.task.eval_data)
        return ", ".join(source.path for source in sources if source)

    @property
    def ended(self) -> bool:
        """Whether the task never trains again."""
        return self.state in ENDED

    def enter(self, state: str, reason: str | None, time: float, note: str | None = None) -> bool:
        """Enters a state, or replaces the reason of the present one.

        Args:
          state: the state.
          reason: why, in words.
          time: seconds since 1970.
          note: what has brought it into the state, if that is to be told with every reason there.

        Returns:
          Whether anything has changed.
        """
        if note or state != self.state:
            self.note = note
        reason = "; ".join(filter(None, (self.note, reason))) or None
        if (state, reason) == (self.state, self.reason):
            return False
        if state == self.state:
            self.history[-1] = self.history[-1]._replace(reason=reason)
            return True
        if state not in FOLLOWING[self.state]:
            raise RuntimeError(f"task {self.name!r}: {state} does not follow {self.state}")
        self.history.append(StateChange(state, reason, time))
        # The state in which it began stays.
        del self.history[1:-_LAST_STATES]
        if self.ended:
            self._forget_data()
        return True

    @property
    def end(self) -> End:
        """How the task has ended."""
        return End(tuple(self.history), self.progress, self.steps, self.warnings)

    @end.setter
    def end(self, end: End) -> None:
        """Ends the task as it had ended in a process that has ended since."""
        self.history, self.progress, self.steps = list(end.history), end.progress, end.steps
        self.warnings = end.warnings
        self._forget_data()

    def _forget_data(self) -> None:
        self.prepared = self.suspended = self.saved_arrays = None

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
        # From now on the fingerprints tell whether the data are the same.
        self.fingerprints, self.files = found, {}
        for extension in self.extensions:
            prepared = prepared.extended(extension.steps, extension.step)
        self.prepared, self.steps = prepared, prepared.steps
        if self.saved_arrays:
            self.suspended = SuspendedTask.of(self.prepared, self.progress, self.saved_arrays)
            self.saved_arrays = None

    def extend(self, steps: int, at: int) -> None:
        """Lets the task train another number of steps, wherever it is but in the engine.

        Args:
          steps: the number of steps.
          at: number of updates that are dispatched before the longer schedule begins.
        """
        # Extensions that were to have effect later have none.
        kept = [own for own in self.extensions if own.step < at]
        self.extensions = [*kept, Extension(at, steps)]
        self.steps = steps
        if self.prepared:
            self.prepared = self.prepared.extended(steps, at)
        if self.suspended:
            self.suspended.slot.prepared = self.prepared
        if self.progress:
            # It may have lost its place when its last step had been dispatched.
            train_on(self.progress, self.task)

    def counted_of(self, step: int) -> int:
        """Number of tokens of a global batch that have been counted.

        Args:
          step: index of the global batch, not smaller than that of one that has been counted.
        """
        counted_step, tokens = self.counted
        return tokens if counted_step == step else 0

    def count(self, turn: ComputedTurn, totals: Meter) -> None:
        """Counts what has been computed of a global batch of the task.

        Args:
          turn: what has been computed.
          totals: the meter of all tasks together.
        """
        counted, again = self.counted_of(turn.step), turn.step < self.reached
        for meter in (self.meter, totals):
            meter.add_turn(turn, counted, again)
        self.counted = turn.step, max(counted, turn.before + turn.tokens)

    def saved(self, arrays: Callable[[], SlotArrays] | None) -> SavedTask:
        """The task as it is saved now.

        Args:
          arrays: function that waits for its arrays, if it is in the engine.
        """
        if self.suspended:
            arrays = self.suspended.with_best()
        # A success that has not been kept is none if training is started again.
        history = self.history[:-1] if self.unkept else self.history
        step = self.progress.step if self.progress else 0
        return SavedTask(
            self.task,
            self.priority,
            self.arrival,
            self.passes,
            tuple(history),
            self.meter.copy(),
            self.fingerprints,
            dataclasses.replace(self.progress) if self.progress else None,
            self.unkept if self.ended else arrays or self.saved_arrays,
            max(self.reached, step),
            self.steps,
            tuple(self.extensions),
            self.counted_of(step),
            self.files,
            self.warnings,
        )

    def saved_again(self, before: SavedTask) -> SavedTask:
        """The task as it was copied some rounds ago, with what commands have changed since.

        Args:
          before: the task as it was copied.
        """
        return before._replace(
            priority=self.priority,
            passes=self.passes,
            history=tuple(self.history),
            reached=max(before.reached, self.progress.step),
            steps=self.steps,
            extensions=tuple(self.extensions),
        )

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
            self.reason or (_MEASURED if runs and self.measured else None),
            self.priority,
            progress.step,
            self.steps,
            math.nan if progress.bad_streak else progress.train_loss_last,
            progress.eval_loss if measured else progress.eval_loss_first,
            progress.best_step,
            self.share if runs else 0.0,
            self.meter.copy(),
            tuple(self.history),
            getattr(self.task.adapter, "rank", None),
            self.warnings,
        )
