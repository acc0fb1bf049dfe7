"""Saves the tasks of a live training again and again, beside its rounds."""

from collections.abc import Callable, Mapping

from jaxmux.engine import Engine
from jaxmux.engine.rounds.results import CHECKPOINTS
from jaxmux.peft import SlotArrays

from .store import Store
from .task import RUNNING, LiveTask, SavedTask
from .tasks import LiveTasks

# Tasks that are copied to the host at the same time, while all are being saved.
_COPIED_AT_ONCE = 4


class Saving:
    """Copies tasks to the host, and gives all of them to a store. Only the thread that owns the
    engine uses it.

    Attributes:
      changed: whether anything has changed since the tasks were saved.
    """

    def __init__(self, engine: Engine, tasks: LiveTasks, store: Store, every: int):
        """Begins with tasks that are saved as they are.

        Args:
          engine: the engine that trains the tasks.
          tasks: the tasks.
          store: what keeps them.
          every: number of rounds from one time to the next.
        """
        self.changed = False
        self._engine, self._tasks, self._store, self._every = engine, tasks, store, every
        # The round in which the tasks were saved.
        self._saved_at = engine.rounds
        # The round in which copying began.
        self._began_at = 0
        # By name, the tasks that have been copied while they are being saved, with their copies;
        # else None. Another task may have taken a name since.
        self._copied: dict[str, tuple[LiveTask, SavedTask]] | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything to save, or the store could not write what it was given."""
        return self.changed or self._store.behind

    def begin(self) -> dict[str, Callable[[], SlotArrays]]:
        """Begins to copy some tasks, when it is time to save. They are not all copied at once,
        because the devices keep the copies until they have arrived. But after as many rounds as
        there are places, all that are left are: tasks may come as fast as they are copied.

        Returns:
          By name, functions that wait for the copies, for `go_on` after the round.
        """
        if self._copied is None:
            if not self.wanted or self._engine.rounds - self._saved_at < self._every:
                return {}
            self._copied, self._began_at = {}, self._engine.rounds
        left = [name for name in self._tasks.running if self._copy_of(self._tasks[name]) is None]
        has_time = self._engine.rounds - self._began_at < self._engine.size.slots
        begun: dict[str, Callable[[], SlotArrays]] = {}
        with self._engine.device_time.waiting(CHECKPOINTS):
            for name in left:
                is_enough = len(begun) == _COPIED_AT_ONCE or self._engine.snapshot_waits(name)
                if has_time and begun and is_enough:
                    break
                begun[name] = self._engine.snapshot(name)
        return begun

    def go_on(self, snapshots: Mapping[str, Callable[[], SlotArrays]]) -> None:
        """Notes the tasks that were copied before a round; after the last ones, all tasks are
        saved.

        Args:
          snapshots: from `begin`; all results from before have been fetched.
        """
        if self._copied is not None:
            with self._engine.device_time.waiting(CHECKPOINTS):
                self._note(self._tasks.saved(snapshots))
                if all(self._copy_of(self._tasks[name]) for name in self._tasks.running):
                    self._finish(wait=False)

    def save(self, wait: bool) -> None:
        """Saves all tasks as they are, if anything has changed. All results have been fetched.

        Args:
          wait: whether to wait until the tasks that were saved before are on disk. False saves
            nothing as long as the disk is busy.
        """
        if wait:
            # A write that fails makes `wanted` true.
            self._store.wait()
        if self.wanted:
            self._copied = {}
            for name in self._tasks.running:
                # One after another, as in `begin`.
                arrays = self._engine.snapshot(name)()
                self._note(self._tasks.saved({name: lambda arrays=arrays: arrays}))
            self._finish(wait)

    def _note(self, copied: Mapping[str, SavedTask]) -> None:
        self._copied |= {name: (self._tasks[name], saved) for name, saved in copied.items()}

    def _copy_of(self, own: LiveTask) -> SavedTask | None:
        """The copy of a task, if it has been made."""
        task, saved = self._copied.get(own.name, (None, None))
        return saved if task is own else None

    def _finish(self, wait: bool) -> None:
        # Commands since a task was copied may have changed it, or ended it.
        tasks = [
            own.saved_again(self._copy_of(own)) if own.state == RUNNING else own.saved(None)
            for own in self._tasks
        ]
        totals = self._tasks.totals.copy()
        for own, saved in zip(self._tasks, tasks, strict=True):
            totals.replace(own.meter, saved.meter)
        self._copied, self._saved_at = None, self._engine.rounds
        if self._store.save(tasks, totals, self._saved_at, wait):
            self.changed = False
