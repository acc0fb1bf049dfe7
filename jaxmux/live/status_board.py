"""What other threads see of the tasks of a live training."""

import threading

from jaxmux.tasks import TaskError

from .live_task import TaskStatus
from .meter import Meter
from .states import ENDED


class StatusBoard:
    """The statuses of all tasks, and what these have used together. All methods may be called in
    any thread."""

    def __init__(self):
        """Creates a board without tasks."""
        self._lock = threading.Lock()
        # By name, in the order in which the tasks were registered.
        self._statuses: dict[str, TaskStatus] = {}
        self._totals = Meter()

    def status(self, name: str) -> TaskStatus:
        """The status of a task.

        Args:
          name: name of the task.

        Raises:
          TaskError: there is no such task.
        """
        with self._lock:
            if name in self._statuses:
                return self._statuses[name]
        raise TaskError(f"task {name!r}: there is no such task")

    def shows_end(self, name: str) -> bool:
        """Whether a task is shown as one that has ended.

        Args:
          name: name of the task, which need not be shown.
        """
        with self._lock:
            return name in self._statuses and self._statuses[name].state in ENDED

    def statuses(self) -> list[TaskStatus]:
        """The statuses of all tasks, in the order in which they were registered."""
        with self._lock:
            return list(self._statuses.values())

    def totals(self) -> Meter:
        """What all tasks have used together."""
        with self._lock:
            return self._totals.copy()

    def show(self, status: TaskStatus) -> None:
        """Shows the present status of a task.

        Args:
          status: the status.
        """
        with self._lock:
            self._statuses[status.name] = status

    def show_totals(self, totals: Meter) -> None:
        """Shows what all tasks have used together.

        Args:
          totals: the sum.
        """
        with self._lock:
            self._totals = totals.copy()

    def forget(self, name: str) -> None:
        """Shows a task no longer.

        Args:
          name: name of the task.
        """
        with self._lock:
            del self._statuses[name]
