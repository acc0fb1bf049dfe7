"""Saves the tasks of a live training: their rows in a table, and copies of them in checkpoints."""

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

# When all tasks are being saved, this many are copied to the host at the same time.
_COPIED_AT_ONCE = 4
# The tasks' usage is written at least every this many seconds.
_USE_EVERY = 1.0


class Saving:
    """Gives the rows of tasks and their copies to a store. Only the thread that owns the engine may
    use it. `changed` is True if something has been trained since the tasks were copied."""

    def __init__(
        self,
        engine: Engine,
        tasks: LiveTasks,
        store: Store,
        every: int,
        show_end: Callable[[LiveTask], None],
    ):
        """Begins with tasks that are saved in their present state. A checkpoint is made every
        `every` rounds. `show_end` is called when the end of a task is on disk."""
        self.changed = False
        self._engine, self._tasks, self._store, self._every = engine, tasks, store, every
        self._show_end = show_end
        # Time of the last attempt to write rows, and whether it failed.
        self._written_at, self._has_failed = time.monotonic(), False
        # The round in which the tasks were copied.
        self._saved_at = engine.rounds
        # The round in which copying began.
        self._began_at = 0
        # While a checkpoint is being made, the copies of tasks by key; otherwise None.
        self._copied: dict[str, TaskCopy] | None = None

    @property
    def wanted(self) -> bool:
        """Whether there is anything for a checkpoint, or the last checkpoint could not be
        written."""
        return self.changed or self._store.behind

    @property
    def has_rows(self) -> bool:
        """Whether there is anything to write to the table. This is so as long as an end waits for
        its adapter."""
        forgotten, news = bool(self._tasks.forgotten), self._store.has_news
        return forgotten or news or any(task.dirty for task in self._tasks)

    def write(self, commanded: Sequence[LiveTask] = ()) -> None:
        """Writes the rows of all tasks that have changed, in one transaction. `commanded` has new
        tasks, and copies of tasks as they will be after the commands that the caller carries out
        next. If it raises OSError, nothing was written."""
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
        # Counts as failed until it has succeeded.
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
        """Writes the rows of tasks that have changed, if there is news, if some time has passed, or
        `now`. A write that fails is tried again later."""
        is_late = now or time.monotonic() - self._written_at >= _USE_EVERY
        has_ends = any(not self._store.is_exporting(name) for name in self._tasks.unkept)
        is_urgent = (has_ends or self._tasks.is_news) and not self._has_failed
        if is_urgent or (is_late and self.has_rows):
            with suppress(OSError):
                self.write()

    def begin(self) -> dict[str, Callable[[], SlotArrays]]:
        """When a checkpoint is due, begins to copy some tasks, and returns, by name, functions that
        wait for the copies. Pass them to `go_on` after the round.

        The tasks are not all copied at once, because the devices keep the copies until the host has
        them. But after as many rounds as there are places, all remaining tasks are copied:
        otherwise new tasks could come as fast as others are copied.
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
        """Notes the tasks that were copied before a round; after the last ones, writes the
        checkpoint. `snapshots` is from `begin`; all results of earlier rounds must have been
        fetched."""
        if self._copied is not None:
            with self._engine.device_time.waiting(CHECKPOINTS):
                self._note(self._tasks.copies(snapshots))
                if all(self._tasks[name].key in self._copied for name in self._tasks.running):
                    self._finish(wait=False)

    def save(self, wait: bool) -> None:
        """Writes a checkpoint of all tasks in their present state, if anything has been trained.
        All results must have been fetched. With `wait`, waits until the previous checkpoint is on
        disk; otherwise, nothing is written while the disk is busy."""
        if wait:
            # A failed write makes `wanted` true.
            self._store.wait()
        if self.wanted:
            self._copied = {}
            for name in self._tasks.running:
                # One after another, for the reason given in `begin`.
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
        # The usage is written first, so the table counts at least what the checkpoint contains.
        with suppress(OSError):
            self.write()
            if self._store.save(copies, wait):
                self.changed = False
