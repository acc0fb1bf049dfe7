"""Carries out the commands of other threads, at the end of a round."""

from collections.abc import Sequence

from jaxmux.tasks import TaskError

from .commands import CommandQueue, Waiting
from .live_tasks import LiveTasks
from .store import Store


class CommandRunner:
    """Takes commands from their queue, keeps them, and lets the tasks change. Only the thread that
    owns the engine uses it.

    Attributes:
      is_busy: whether commands are being carried out.
    """

    def __init__(self, queue: CommandQueue, tasks: LiveTasks, store: Store, arrivals: int):
        """Starts without commands.

        Args:
          queue: the commands that wait.
          tasks: the tasks.
          store: keeps commands before they are carried out.
          arrivals: number of the next arrival of a task.
        """
        self._queue, self._tasks, self._store = queue, tasks, store
        self._arrivals = arrivals
        self.is_busy = False
        # The commands that are being carried out.
        self._taken: Sequence[Waiting] = ()

    def carry_out(self) -> bool:
        """Carries out the commands that wait: first those up to the second one for the same task,
        and so on. These do not depend on each other, so they are checked and recorded together.

        Returns:
          Whether any of them could be carried out.
        """
        self._taken = waiting = self._queue.take()
        # Tasks that are registered at the same end of a round have arrived together.
        self._arrivals += bool(waiting)
        changed, self.is_busy = False, True
        try:
            while waiting:
                names: set[str] = set()
                independent = 0
                for command, _ in waiting:
                    if command.task in names:
                        break
                    names.add(command.task)
                    independent += 1
                changed |= self._carry_out_independent(waiting[:independent])
                waiting = waiting[independent:]
            self._taken = ()
        finally:
            self.is_busy = False
        return changed

    def end(self, why: str) -> None:
        """Gives an error to all commands that have not been carried out.

        Args:
          why: what has ended before them.
        """
        for _, future in (*self._taken, *self._queue.take()):
            if not future.done():
                future.set_exception(RuntimeError(f"{why} before the command"))

    def _carry_out_independent(self, waiting: Sequence[Waiting]) -> bool:
        permitted: list[Waiting] = []
        for command, future in waiting:
            try:
                self._tasks.check(command)
                if command.kind == "register":
                    self._store.check(command.value[0])
            except TaskError as e:
                future.set_exception(e)
            else:
                permitted.append((command, future))
        recorded = [self._tasks.with_at(command) for command, _ in permitted]
        try:
            if recorded:
                self._store.record(recorded)
        except OSError as e:
            for _, future in permitted:
                future.set_exception(e)
            return False
        for command, (_, future) in zip(recorded, permitted, strict=True):
            self._tasks.carry_out(command, self._arrivals)
            future.set_result(None)
        return bool(recorded)
