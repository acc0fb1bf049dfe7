"""Keeps the tasks of a live training: their rows in a table, and copies of them in checkpoints."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from jaxmux.engine import Engine
from jaxmux.engine.rounds.results import CHECKPOINTS
from jaxmux.peft import SlotArrays

from .database import Rows
from .store import Store
from .task import RUNNING, LiveTask, TaskCopy
from .tasks import LiveTasks

# Tasks that are copied to the host at the same time, while all are being saved.
_COPIED_AT_ONCE = 4
# What tasks have used is written at least so often, in seconds.
_USE_EVERY = 1.0


class Saving:
    """Gives the rows of tasks and their copies to a store. Only the thread that owns the engine
    uses it.

    Attributes:
      changed: whether anything has been trained since the tasks were copied.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: LiveTasks,
        store: Store,
        every: int,
        show_end: Callable[[LiveTask], None],
    ):
        """Begins with tasks that are kept as they are.

        Args:
          engine: the engine that trains the tasks.
          tasks: the tasks.
          store: what keeps them.
          every: number of rounds from one checkpoint to the next.
          show_end: function that is called when the end of a task has been kept.
        """
        self.changed = False
        self._engine, self._tasks, self._store, self._every = engine, tasks, store, every
        self._show_end = show_end
        # When rows were written last, or it was tried, and whether it failed.
        self._written_at, self._has_failed = time.monotonic(), False
        # The round in which the tasks were copied.
        self._saved_at = engine.rounds
        # The round in which copying began.
        self._began_at = 0
        # By key, the copies of tasks while a checkpoint is made; else None.
        self._copied: dict[str, TaskCopy] | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything for a checkpoint, or the last one could not be written."""
        return self.changed or self._store.behind

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to write to the table. It is true as long as an end waits for
        its adapter."""
        forgotten, news = bool(self._tasks.forgotten), self._store.has_news
        return forgotten or news or any(task.dirty for task in self._tasks)

    def write(self, commanded: Sequence[LiveTask] = ()) -> None:
        """Writes the rows of all tasks that have changed, in one transaction.

        Args:
          commanded: new tasks, and copies of tasks as they will be after commands that the caller
            carries out next.

        Raises:
          OSError: nothing of this was written.
        """
        replaced = {task.name for task in commanded}
        written = [task for task in self._tasks if task.dirty and task.name not in replaced]
        written += commanded
        ended = {task.name for task in written if task.ended}
        ends = {name for name in ended if not self._store.is_exporting(name)}
        new, changed = [], {}
        for task in written:
            row = task.row(task.name in ends)
            if task.is_new:
                new.append(task.first_row() | row)
            else:
                changed[task.key] = row
        # It has failed until it has succeeded.
        self._written_at, self._has_failed = time.monotonic(), True
        rows = Rows(new, changed, self._tasks.forgotten)
        self._store.write(rows, self._tasks.totals, self._engine.rounds)
        self._has_failed = self._tasks.is_news = False
        self._tasks.forgotten.clear()
        for task in written:
            # A task whose end waits for its adapter stays dirty.
            task.is_new, task.dirty = False, task.ended and task.name not in ends
        for name in ends:
            task = self._tasks[name]
            is_new_end = not task.kept and name not in replaced
            self._tasks.note_kept(name)
            if is_new_end:
                self._show_end(task)

    def write_if_due(self, now: bool = False) -> None:
        """Writes the rows of tasks that have changed, if there is news or some time has passed.
        What cannot be written is tried again later.

        Args:
          now: whether to write whatever has changed.
        """
        is_late = now or time.monotonic() - self._written_at >= _USE_EVERY
        has_ends = any(not self._store.is_exporting(name) for name in self._tasks.unkept)
        is_urgent = (has_ends or self._tasks.is_news) and not self._has_failed
        if is_urgent or (is_late and self.has_rows):
            with suppress(OSError):
                self.write()

    def begin(self) -> dict[str, Callable[[], SlotArrays]]:
        """Begins to copy some tasks, when it is time for a checkpoint. They are not all copied at
        once, because the devices keep the copies until they have arrived. But after as many rounds
        as there are places, all that are left are: tasks may come as fast as they are copied.

        Returns:
          By name, functions that wait for the copies, for `go_on` after the round.
        """
        if self._copied is None:
            if not self.wanted or self._engine.rounds - self._saved_at < self._every:
                return {}
            self._copied, self._began_at = {}, self._engine.rounds
        left = [name for name in self._tasks.running if self._tasks[name].key not in self._copied]
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
        """Notes the tasks that were copied before a round; after the last ones, the checkpoint is
        written.

        Args:
          snapshots: from `begin`; all results from before have been fetched.
        """
        if self._copied is not None:
            with self._engine.device_time.waiting(CHECKPOINTS):
                self._note(self._tasks.copies(snapshots))
                if all(self._tasks[name].key in self._copied for name in self._tasks.running):
                    self._finish(wait=False)

    def save(self, wait: bool) -> None:
        """Writes a checkpoint of all tasks as they are, if anything has been trained. All results
        have been fetched.

        Args:
          wait: whether to wait until the checkpoint before is on disk. False writes nothing as long
            as the disk is busy.
        """
        if wait:
            # A write that fails makes `wanted` true.
            self._store.wait()
        if self.wanted:
            self._copied = {}
            for name in self._tasks.running:
                # One after another, as in `begin`.
                arrays = self._engine.snapshot(name)()
                self._note(self._tasks.copies({name: lambda arrays=arrays: arrays}))
            self._finish(wait)

    def _note(self, copied: Mapping[str, TaskCopy]) -> None:
        self._copied |= {self._tasks[name].key: copy for name, copy in copied.items()}

    def _finish(self, wait: bool) -> None:
        copies = {}
        for task in self._tasks:
            copy = self._copied.get(task.key) if task.state == RUNNING else task.copy(None)
            if copy:
                copies[task.key] = copy
        self._copied, self._saved_at = None, self._engine.rounds
        # The use is written first, so the table counts at least what the checkpoint contains.
        with suppress(OSError):
            self.write()
            if self._store.save(copies, wait):
                self.changed = False
