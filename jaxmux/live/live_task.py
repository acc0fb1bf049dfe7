"""A task that comes and goes: what is known of it, and what others may see of it."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxmux.data.stored_samples import stream_lengths
from jaxmux.engine import ComputedTurn, PreparedTask, SuspendedTask, TaskProgress, train_on
from jaxmux.peft import SlotArrays
from jaxmux.tasks import Task, TaskError

from .commands import End
from .meter import Meter
from .preparation import Reading
from .saved_task import Extension, SavedTask
from .states import ENDED, FOLLOWING, RUNNING, StateChange

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
