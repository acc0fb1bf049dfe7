"""Where a live training keeps what has to survive it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from jaxmux.engine import TaskEvaluation, TaskUpdate, TrainedTask
from jaxmux.engine.rounds.results import RoundRecord
from jaxmux.peft import Adapter
from jaxmux.tasks import Task

from .task import Command, Meter, SavedTask

# A reader that falls behind by more events loses the oldest ones.
MOST_UNREAD = 100_000


class Event(NamedTuple):
    """Something that has happened to a task.

    Attributes:
      number: number of the event, from 0. If a reader finds a gap in the numbers, it has lost
        events because it read too slowly.
      time: when it happened, in seconds since 1970.
      task: name of the task.
      kind: "state" (the task's state or its reason has changed), "warning" (something about the
        task is legal but suspicious), "update" (a step of the task has been trained) or
        "evaluation" (its held-out loss has been measured).
      fields: what the event tells: for "state", `state`, `reason`, `priority`, `steps` (None until
        the data have been read), `adapter` (its kind) and `rank` (None if the kind has none); for
        "warning", `warnings`, a list of texts that have not been told before;
        for the others, the fields of `TaskUpdate` or `TaskEvaluation` without the name of the task.
    """

    number: int
    time: float
    task: str
    kind: str
    fields: dict[str, Any]


class EventStream:
    """Passes events on to readers. All methods may be called in any thread."""

    def __init__(self):
        """Creates a stream without readers."""
        self._changed = threading.Condition()
        # By identity, the unread events of each reader. A reader that nobody holds vanishes.
        self._readers: WeakValueDictionary[int, deque[Event]] = WeakValueDictionary()
        self._number = 0
        self._closed = False

    def add(self, time: float, task: str, kind: str, fields: dict[str, Any]) -> Event:
        """Passes an event on to all readers.

        Args:
          time: when it happened, in seconds since 1970.
          task: name of the task.
          kind: kind of the event.
          fields: what it tells.

        Returns:
          The event.
        """
        with self._changed:
            event = Event(self._number, time, task, kind, fields)
            self._number += 1
            for unread in self._readers.values():
                unread.append(event)
            self._changed.notify_all()
        return event

    def read(self) -> Iterator[Event]:
        """Iterates over the events from this call on. The iterator waits for further events until
        the stream is closed."""
        unread: deque[Event] = deque(maxlen=MOST_UNREAD)
        with self._changed:
            self._readers[id(unread)] = unread
        return self._events(unread)

    def close(self) -> None:
        """Ends all iterators when they have passed on their events."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _events(self, unread: deque[Event]) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: unread or self._closed)
                if not unread:
                    return
                event = unread.popleft()
            yield event


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
