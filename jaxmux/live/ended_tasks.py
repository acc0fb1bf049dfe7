"""The tasks of a live training that have ended: whether that is kept, and how long it is known."""

from collections.abc import Callable, Iterable


class EndedTasks:
    """The names of the tasks that have ended, in the order of their ends.

    The thread that owns the engine changes it. `is_kept` and `know_while` may be called in any
    thread.
    """

    def __init__(self, most: int):
        """Starts without tasks.

        Args:
          most: number of tasks that are known after their end.
        """
        self._most = most
        self._names: dict[str, None] = {}
        self._unkept: dict[str, None] = {}
        self._is_needed: Callable[[str], bool] = lambda name: False

    def is_kept(self, name: str) -> bool:
        """Whether a task has ended, and will have ended whatever happens: its end is kept with what
        it has used, and its adapter if it has succeeded.

        Args:
          name: name of the task.
        """
        return name in self._names and name not in self._unkept

    def know_while(self, is_needed: Callable[[str], bool]) -> None:
        """Lets tasks be known as long as somebody needs them, even if too many have ended.

        Args:
          is_needed: function that returns whether the task of a name is needed. It is called in the
            thread that owns the engine.
        """
        self._is_needed = is_needed

    @property
    def unkept(self) -> list[str]:
        """The tasks whose ends have not been kept, or that have used more since."""
        return list(self._unkept)

    @property
    def forgettable(self) -> str | None:
        """The task that ended longest ago, of those that are kept and that nobody needs; None if
        there is none, or not too many have ended."""
        if len(self._names) <= self._most:
            return None
        free = (n for n in self._names if n not in self._unkept and not self._is_needed(n))
        return next(free, None)

    def restore(self, names: Iterable[str]) -> None:
        """Takes the tasks of an earlier training, whose ends have been kept.

        Args:
          names: all tasks that have ended, in the order of their ends.
        """
        self._names, self._unkept = dict.fromkeys(names), {}

    def add(self, name: str) -> None:
        """Takes note that a task has ended, or that one which has ended has used more.

        Args:
          name: name of the task.
        """
        # In this order: other threads must not take its end for kept.
        self._unkept[name] = None
        self._names[name] = None

    def note_kept(self, name: str) -> None:
        """Takes note that the end of a task has been kept, with all that it has used.

        Args:
          name: name of the task.
        """
        del self._unkept[name]

    def forget(self, name: str) -> None:
        """Forgets a task.

        Args:
          name: name of the task.
        """
        self._names.pop(name, None)
        self._unkept.pop(name, None)
