"""One slot of the engine: its arrays on the host, as a suspended task, and the trained task with
its record."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmux.data import Rendering
from jaxmux.data.stored_samples import target_tokens
from jaxmux.peft import SlotArrays, kind_of
from jaxmux.tasks import Task

from ..tasks.prepared_task import PreparedTask
from ..tasks.progress import TaskProgress
from .train_state import SlotKind


class TrainedTask(NamedTuple):
    """A task that has been trained, without its data.

    Attributes:
      task: the task.
      progress: its progress, which does not change any more.
      samples: number of training samples.
      held_out_samples: number of held-out samples.
      fingerprints: hashes of the data, from `PreparedTask.fingerprints`.
      rendering: how the records of its training data became text.
    """

    task: Task
    progress: TaskProgress
    samples: int
    held_out_samples: int
    fingerprints: Mapping[str, str]
    rendering: Rendering

    @classmethod
    def of(
        cls, prepared: PreparedTask, progress: TaskProgress, fingerprints: Mapping[str, str]
    ) -> "TrainedTask":
        """A task with the number of its samples.

        Args:
          prepared: the task with its data.
          progress: its progress.
          fingerprints: hashes of its data.
        """
        counts = len(prepared.samples.samples), len(prepared.eval_samples)
        rendering = prepared.samples.rendering
        return cls(prepared.task, progress, *counts, fingerprints, rendering)


@dataclasses.dataclass
class Measuring:
    """A measurement of the held-out loss of a task that has not been dispatched as a whole.

    Attributes:
      step: number of steps of the task, whose adapter is measured.
      samples: number of held-out samples that have been dispatched.
      loss: sum of the losses of these samples whose results have arrived.
      tokens: number of tokens of the chunks with these samples, with padding.
    """

    step: int
    samples: int = 0
    loss: float = 0.0
    tokens: int = 0


@dataclasses.dataclass
class Slot:
    """The task in a slot, and its progress.

    Attributes:
      prepared: the task.
      progress: its progress, which the engine changes.
      stop_after: number of steps after which the task stops although it has more; None if there is
        no such number.
      pause_after: number of steps after which the task waits for the decision of a rung, see
        `Bracket`; None if it need not wait.
      timed_since: until when the seconds of `progress` have been counted, on `time.monotonic`, or
        when it was given a place since then; None until the first results have arrived, because
        what comes before is mostly compilation.
      measuring: the measurement that has to be over before the task trains on; None if there is
        none.
      best: function that waits for the adapter with the lowest held-out loss, and returns its
        arrays by path; None if it is not kept, or not known yet.
      computed: by step that has not been updated, number of tokens, with padding, that have been
        computed of its global batch, as far as results have been fetched.
      part_of_turn: number of these tokens that belong to a turn of which only a part has been
        computed.
    """

    prepared: PreparedTask
    progress: TaskProgress
    stop_after: int | None = None
    pause_after: int | None = None
    timed_since: float | None = None
    measuring: Measuring | None = None
    best: Callable[[], SlotArrays] | None = None
    computed: Counter[int] = dataclasses.field(default_factory=Counter)
    part_of_turn: int = 0

    @property
    def name(self) -> str:
        return self.prepared.task.name

    @property
    def kind(self) -> SlotKind:
        task = self.prepared.task
        return SlotKind(kind_of(task.adapter).name, task.optimizer.kind)

    @property
    def running(self) -> bool:
        return self.progress.status == "running"

    @property
    def steps(self) -> int:
        """Number of steps that the task trains."""
        return self.prepared.steps if self.stop_after is None else self.stop_after

    @property
    def steps_for_now(self) -> int:
        """Number of steps that the task trains before it has to wait."""
        return self.steps if self.pause_after is None else min(self.steps, self.pause_after)

    @property
    def held_out_tokens(self) -> int:
        """Number of target tokens in the held-out data."""
        return target_tokens(self.prepared.eval_samples)

    def is_measured_after(self, step: int) -> bool:
        """Whether the held-out loss is measured after so many steps."""
        every = self.prepared.task.eval_every
        # A task may be extended when its last step has been dispatched.
        lasts = (self.steps, self.prepared.steps_at(step - 1), self.pause_after)
        return bool(self.prepared.eval_samples) and (
            step in lasts or (every is not None and step % every == 0)
        )

    def restore(self, progress: TaskProgress) -> None:
        """Goes on from a moment that was saved. If the held-out loss was being measured then, it is
        measured once more.

        Args:
          progress: the progress of the task at that moment.
        """
        self.progress, self.measuring = progress, None
        step = progress.step
        # The number of held-out tokens is known since the first measurement.
        known = progress.eval_step == step if step else progress.eval_target_tokens
        if self.prepared.eval_samples and not known and (not step or self.is_measured_after(step)):
            self.measuring = Measuring(step)

    def lose_gradients(self) -> None:
        """Notes that the current global batch begins again."""
        self.computed.clear()
        self.part_of_turn = 0

    def count_seconds(self, begins: bool = False) -> None:
        """Adds the time since the last call to the seconds of the task.

        Args:
          begins: whether time counts from now on, if it has not before.
        """
        now = time.monotonic()
        if self.timed_since is not None:
            self.progress.seconds += now - self.timed_since
        if begins or self.timed_since is not None:
            self.timed_since = now

    def leave_out_seconds(self) -> None:
        """Does not count the time since the last call of `count_seconds`, if there was one."""
        if self.timed_since is not None:
            self.timed_since = time.monotonic()


# What the paths of the best adapter begin with, among the arrays of a task.
BEST = "best/"
# And those of the gradients of the current global batch.
ACCUMULATED = "accumulators/"


class SuspendedTask(NamedTuple):
    """A task that has left the engine, with all that it needs to go on.

    Attributes:
      slot: the task and its progress. The engine may still enter the results of the task's last
        update into the progress.
      arrays: function that waits for the task's arrays, and returns them by path.
      accumulated: indices of the samples of its current global batch whose gradients are among
        these arrays.
    """

    slot: Slot
    arrays: Callable[[], SlotArrays]
    accumulated: Sequence[int] = ()

    @classmethod
    def of(
        cls, prepared: PreparedTask, progress: TaskProgress, arrays: Callable[[], SlotArrays]
    ) -> "SuspendedTask":
        """A task that another engine has suspended.

        Args:
          prepared: the task.
          progress: its progress.
          arrays: function that returns what `with_best` has returned at this progress, as NumPy
            arrays on the host.
        """
        own, best = without_best(arrays())
        slot = Slot(prepared, TaskProgress(), best=best)
        slot.restore(progress)
        return cls(slot, lambda: own)

    def with_best(self) -> Callable[[], SlotArrays]:
        """What has to be kept of the task, as from `Engine.with_best`."""
        best = best_arrays(self.slot)
        return lambda: after_last_update(self.arrays()) | best()


def after_last_update(arrays: SlotArrays) -> SlotArrays:
    """The arrays of a task without what has been accumulated since its last update."""
    kept = {path: array for path, array in arrays.items() if not path.startswith(ACCUMULATED)}
    return kept | {"loss": np.zeros((), np.float32)}


def best_arrays(slot: Slot) -> Callable[[], SlotArrays]:
    """A function that returns the best adapter of a task, if it is kept, as it is saved."""
    if (best := slot.best) is None:
        return dict
    return lambda: {f"{BEST}{path}": array for path, array in best().items()}


def without_best(arrays: SlotArrays) -> tuple[SlotArrays, Callable[[], SlotArrays] | None]:
    """The arrays of a task that lie on the devices, and a function that returns those of its best
    adapter, if there is one."""
    own = {path: array for path, array in arrays.items() if not path.startswith(BEST)}
    best = {path.removeprefix(BEST): x for path, x in arrays.items() if path.startswith(BEST)}
    return own, (lambda: best) if best else None
