"""Reads the data of tasks in threads beside training."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from jaxmux.engine import PreparedTask
from jaxmux.tasks import Task, TaskError


class Prepared(NamedTuple):
    """The end of a preparation.

    Attributes:
      task: the task.
      result: the prepared task, or the exception that ended its preparation.
    """

    task: Task
    result: PreparedTask | Exception


class Preparation:
    """Prepares tasks in the order in which they come, a few at a time.

    A source of data may hang, and Python cannot end a thread. So a preparation that takes too long
    is given up: its task gets an error, and its thread no longer counts among the few. The thread
    ends with the process.
    """

    def __init__(
        self,
        prepare: Callable[[Task], PreparedTask],
        changed: Callable[[], None],
        at_once: int = 2,
        most_seconds: float = 600.0,
    ):
        """Starts without tasks.

        Args:
          prepare: function that prepares a task; it is called in several threads.
          changed: function that is called, in another thread, when a preparation has ended.
          at_once: number of tasks that are prepared at the same time.
          most_seconds: the longest that a preparation may take, in seconds.
        """
        self._prepare, self._changed = prepare, changed
        self._at_once, self._most_seconds = at_once, most_seconds
        self._lock = threading.Lock()
        self._waiting: deque[Task] = deque()
        # By thread, the task that it prepares and when it has to have ended.
        self._active: dict[threading.Thread, tuple[Task, float]] = {}
        self._ended: list[Prepared] = []

    def add(self, task: Task) -> None:
        """Prepares a task when its turn has come.

        Args:
          task: the task.
        """
        with self._lock:
            self._waiting.append(task)
            self._start_threads()

    def take(self) -> list[Prepared]:
        """The preparations that have ended since the last call."""
        now = time.monotonic()
        with self._lock:
            for thread, (task, end) in list(self._active.items()):
                if now >= end:
                    del self._active[thread]
                    self._ended.append(Prepared(task, self._too_slow(task)))
            self._start_threads()
            ended, self._ended = self._ended, []
        return ended

    @property
    def seconds_left(self) -> float | None:
        """Seconds until a preparation takes too long; None if there is none."""
        with self._lock:
            ends = [end for _, end in self._active.values()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _too_slow(self, task: Task) -> TaskError:
        return TaskError(
            f"task {task.name!r}: its data were not read within {self._most_seconds:g} s"
        )

    def _start_threads(self) -> None:
        while self._waiting and len(self._active) < self._at_once:
            task = self._waiting.popleft()
            thread = threading.Thread(
                target=self._run, args=(task,), name=f"prepare {task.name}", daemon=True
            )
            self._active[thread] = task, time.monotonic() + self._most_seconds
            thread.start()

    def _run(self, task: Task) -> None:
        try:
            result: PreparedTask | Exception = self._prepare(task)
        except Exception as e:
            result = e
        with self._lock:
            # The lock is held while threads start, so this thread is known here unless it was
            # given up.
            if self._active.pop(threading.current_thread(), None) is None:
                return
            self._ended.append(Prepared(task, result))
            self._start_threads()
        self._changed()
