"""A task that comes and goes: what is known of it, and what others may see of it."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from jaxmux.engine import PreparedTask, SuspendedTask, TaskProgress
from jaxmux.peft import Adapter
from jaxmux.tasks import Task

from .meter import Meter
from .states import ENDED, FOLLOWING, StateChange


class TaskStatus(NamedTuple):
    """What can be seen of a task; it does not change.

    Attributes:
      name: name of the task.
      state: "queued" (waits for its turn, or for a place), "preparing" (its data are read),
        "running", "paused", "succeeded", "failed" or "cancelled".
      reason: why the task is in this state, in words; None if there is nothing to say.
      priority: its priority; tasks of higher numbers go first.
      step: number of global batches that it has trained.
      steps: number of global batches that it is to train; None until its data have been read.
      loss: loss of the last update, in nats per target token; None before the first.
      meter: what the task has used.
      history: the states so far, with reasons and times; the last one is the present state.
    """

    name: str
    state: str
    reason: str | None
    priority: int
    step: int
    steps: int | None
    loss: float | None
    meter: Meter
    history: tuple[StateChange, ...]


@dataclasses.dataclass
class LiveTask:
    """A task that comes and goes. Only the thread that owns the engine reads and changes it.

    Attributes:
      task: the task as it was registered, or as it was extended.
      priority: its priority; tasks of higher numbers go first.
      arrival: number of its arrival; tasks that arrived together have the same number.
      history: the states so far.
      prepared: the task with its data; None until they have been read.
      suspended: what the task needs to go on, while it has begun and does not train.
      progress: its progress; None until it has begun.
      result: function that waits for the final adapter, once the task has succeeded.
      meter: what the task has used.
      passes: number of later tasks of its priority that have begun before it.
    """

    task: Task
    priority: int
    arrival: int
    history: list[StateChange]
    prepared: PreparedTask | None = None
    suspended: SuspendedTask | None = None
    progress: TaskProgress | None = None
    result: Callable[[], Adapter] | None = None
    meter: Meter = dataclasses.field(default_factory=Meter)
    passes: int = 0

    @property
    def name(self) -> str:
        return self.task.name

    @property
    def state(self) -> str:
        return self.history[-1].state

    @property
    def reason(self) -> str | None:
        return self.history[-1].reason

    @property
    def ended(self) -> bool:
        """Whether the task never trains again."""
        return self.state in ENDED

    def enter(self, state: str, reason: str | None, time: float) -> bool:
        """Enters a state, or replaces the reason of the present one.

        Args:
          state: the state.
          reason: why, in words.
          time: seconds since 1970.

        Returns:
          Whether anything has changed.
        """
        if (state, reason) == (self.state, self.reason):
            return False
        if state == self.state:
            self.history[-1] = self.history[-1]._replace(reason=reason)
            return True
        if state not in FOLLOWING[self.state]:
            raise RuntimeError(f"task {self.name!r}: {state} does not follow {self.state}")
        self.history.append(StateChange(state, reason, time))
        return True

    def status(self) -> TaskStatus:
        """What others may see of the task now."""
        progress = self.progress or TaskProgress()
        return TaskStatus(
            self.name,
            self.state,
            self.reason,
            self.priority,
            progress.step,
            self.prepared.steps if self.prepared else self.task.steps,
            progress.train_loss_last,
            dataclasses.replace(self.meter),
            tuple(self.history),
        )
