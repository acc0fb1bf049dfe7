"""Commands of any thread, which the thread that owns the engine carries out."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any, NamedTuple

from jaxmux.engine import TaskProgress

from .meter import Meter
from .states import StateChange


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
