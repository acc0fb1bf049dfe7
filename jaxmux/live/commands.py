"""Commands of any thread, which the thread that owns the engine carries out."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A wish to change a task.

    Attributes:
      kind: what is to be done: "register", "cancel", "pause", "resume", "set_priority" or "extend".
      task: name of the task.
      value: what the kind needs: for "register", the `Task` and its priority; for "set_priority",
        the priority; for "extend", the number of steps; else None.
    """

    kind: str
    task: str
    value: Any = None


class CommandQueue:
    """Commands in the order in which they were given. All methods may be called in any thread."""

    def __init__(self):
        """Creates an empty queue."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Command, Future[None]]] = deque()
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

    def carry_out(self, apply: Callable[[Command], None]) -> int:
        """Carries out all commands that wait.

        Args:
          apply: function that carries out a command. If it raises an exception, the command's
            future gets it, and the next command follows.

        Returns:
          The number of the commands.
        """
        with self._changed:
            commands, self._waiting = self._waiting, deque()
            self._woken = False
        for command, future in commands:
            try:
                apply(command)
            except Exception as e:
                future.set_exception(e)
            else:
                future.set_result(None)
        return len(commands)

    def wait(self, seconds: float | None) -> None:
        """Waits until there is a command, or `wake` or `close` is called.

        Args:
          seconds: the longest time to wait; None for no limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._woken or self._closed, seconds)

    def wake(self) -> None:
        """Ends a `wait`, also one that begins after this call and before the next `carry_out`."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def close(self) -> None:
        """Takes no more commands. Those that wait can still be carried out."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
