"""Where a live training keeps what has to survive it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxmux.engine import TaskEvaluation, TaskUpdate, TrainedTask
from jaxmux.engine.round_record import RoundRecord
from jaxmux.peft import Adapter
from jaxmux.tasks import Task

from .commands import Command
from .events import Event
from .meter import Meter
from .saved_task import SavedTask


class Store(Protocol):
    """Keeps commands, tasks and adapters. The thread that owns the engine calls all methods but
    `adapter`, and none of them waits for the devices."""

    @property
    def behind(self) -> bool:
        """Whether the tasks that `save` was given last could not be written."""
        ...

    def check(self, task: Task) -> None:
        """Checks that a task can be kept.

        Args:
          task: the task.

        Raises:
          TaskError: it would not be read back as it is.
        """
        ...

    def record(self, commands: Sequence[Command]) -> None:
        """Keeps commands that are about to be carried out.

        Args:
          commands: the commands, in their order.

        Raises:
          OSError: they cannot be kept. None of them is carried out.
        """
        ...

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        """Keeps the adapter of a task that has succeeded, before whatever is saved later.

        Args:
          trained: the task.
          adapter: function that waits for the adapter.
        """
        ...

    def is_exporting(self, name: str) -> bool:
        """Whether an adapter that `export` was given has not been kept yet.

        Args:
          name: name of the task.
        """
        ...

    def when_written(self, call: Callable[[], None]) -> None:
        """Calls a function whenever adapters have been kept.

        Args:
          call: the function; it is called in any thread.
        """
        ...

    def adapter(self, task: Task) -> Adapter:
        """An adapter that `export` was given. It may be called in any thread.

        Args:
          task: the task.
        """
        ...

    def save(
        self, tasks: Sequence[SavedTask], totals: Meter, rounds: int, wait: bool = False
    ) -> bool:
        """Keeps all tasks as they are after the commands that have been recorded so far.

        Args:
          tasks: the tasks.
          totals: what they have used together, with those that are not known any more.
          rounds: number of rounds that have been trained.
          wait: whether to wait until the tasks of an earlier call have been kept.

        Returns:
          False if nothing is kept this time: those tasks are still being written, or could not be
          a short time ago, or the disk is full.
        """
        ...

    def retry(self) -> None:
        """Tries again to keep adapters that could not be kept, if that was some time ago."""
        ...

    def wait(self) -> str | None:
        """Waits until everything has been kept, or could not be. What could not be before is tried
        again.

        Returns:
          Why not all has been kept; None if it has.
        """
        ...

    def tell(self, event: Event) -> None:
        """Writes down an event. It raises no error.

        Args:
          event: the event.
        """
        ...

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        """Writes down what a round held. It raises no error.

        Args:
          record: what it held.
          spent: where the time went since the round before, or since there was something to train
            again, in seconds by kind.
        """
        ...

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        """Shows results to whoever follows the training. It neither waits nor raises an error.

        Args:
          updates: the updates of a round, which are also told as events.
          evaluations: the held-out losses that have arrived with them.
          time: time of day in seconds since 1970.
        """
        ...


class MemoryStore:
    """Keeps adapters in memory, and nothing else: the `Store` of a training without a folder."""

    behind = False

    def __init__(self):
        """Starts empty."""
        self._adapters: dict[str, Callable[[], Adapter]] = {}

    def check(self, task: Task) -> None:
        pass

    def record(self, commands: Sequence[Command]) -> None:
        pass

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        self._adapters[trained.task.name] = adapter

    def is_exporting(self, name: str) -> bool:
        return False

    def when_written(self, call: Callable[[], None]) -> None:
        pass

    def adapter(self, task: Task) -> Adapter:
        return self._adapters[task.name]()

    def save(
        self, tasks: Sequence[SavedTask], totals: Meter, rounds: int, wait: bool = False
    ) -> bool:
        return True

    def retry(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def tell(self, event: Event) -> None:
        pass

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        pass

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        pass
