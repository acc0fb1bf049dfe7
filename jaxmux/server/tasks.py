"""The tasks of a live training, and the effects of commands and results on them."""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxmux.engine import (
    Computed,
    Engine,
    PreparedTask,
    TaskProgress,
    TaskUpdate,
    TrainedTask,
)
from jaxmux.errors import first_line
from jaxmux.peft import Adapter, SlotArrays
from jaxmux.planner.numbers import numbered
from jaxmux.planner.scheduling import Candidate, schedule, tokens_per_microbatch
from jaxmux.printable import shown_state
from jaxmux.tasks import TaskError

from .data import Preparation, Reading
from .task import (
    CANCELLED,
    FAILED,
    PAUSED,
    PREPARING,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    Command,
    Counted,
    LiveTask,
    Meter,
    StateChange,
    TaskCopy,
    TaskStatus,
)


class StatusBoard:
    """The statuses of all tasks, and their total usage. Every thread may call all methods."""

    def __init__(self):
        self._lock = threading.Lock()
        # By name, in the order of registration.
        self._statuses: dict[str, TaskStatus] = {}
        self._totals = Meter()

    def status(self, name: str) -> TaskStatus:
        """The status of a task. Raises TaskError if there is no such task."""
        with self._lock:
            if name in self._statuses:
                return self._statuses[name]
        raise TaskError(f"task {name!r}: there is no such task")

    def statuses(self) -> list[TaskStatus]:
        """The statuses of all tasks, in the order of registration."""
        with self._lock:
            return list(self._statuses.values())

    def totals(self) -> Meter:
        with self._lock:
            return self._totals.copy()

    def show(self, status: TaskStatus) -> None:
        with self._lock:
            self._statuses[status.name] = status

    def show_totals(self, totals: Meter) -> None:
        with self._lock:
            self._totals = totals.copy()

    def forget(self, name: str) -> None:
        with self._lock:
            del self._statuses[name]


# At most this many ended tasks are checked per round for whether they can be forgotten.
_LOOKED_AT = 64
# At most this many names are in a reason.
_MOST_NAMES = 3
# What tasks wait for before they are prepared.
_DATA, _ADAPTER = "its data to be read", "its initial adapter to be computed"


class LiveTasks:
    """The tasks of a live training by name. Only the thread that owns the engine may use it. Every
    change of a task's state, through commands, results of training or the room in the pool, is made
    here.

    Attributes:
      changed: whether the choice of the tasks that train has to be made again.
      totals: the total usage of all tasks, including forgotten ones.
      unkept: names of the tasks that have ended and whose ends are not in the table, as the keys of
        a dict.
      forgotten: the keys of forgotten tasks that are still in the table.
      is_news: whether fingerprints of newly read data are not in the table yet.
      is_needed: returns whether the ended task of a name must not be forgotten. Called in the
        thread that owns the engine.
      growing: number of places for which programs are being compiled; None if there are none.
    """

    def __init__(
        self,
        engine: Engine,
        preparation: Preparation,
        export: Callable[[TrainedTask, Callable[[], Adapter]], None],
        show: Callable[[LiveTask], None],
        forget: Callable[[str], None],
        clock: Callable[[], float],
        most_ended: int,
        warnings: Callable[[PreparedTask, TaskProgress | None], Sequence[str]],
        warn: Callable[[str, Sequence[str]], None],
    ):
        """Starts without tasks.

        Args:
          engine: the engine, whose tasks no other code may change.
          preparation: prepares tasks; `enter_prepared` gets the results.
          export: keeps the adapter of a task that has succeeded, like `Store.export`.
          show: called when a task's state, reason, priority or length has changed.
          forget: called with the name of a forgotten task.
          clock: returns the time in seconds since 1970.
          most_ended: number of ended tasks that are kept.
          warnings: as for `LiveTraining`.
          warn: called with the name of a task and the warnings about its settings and data.
        """
        self._warnings, self._warn = warnings, warn
        self.changed = False
        self.growing: int | None = None
        self.totals = Meter()
        self.forgotten: list[str] = []
        self.unkept: dict[str, None] = {}
        self.is_news = False
        self.is_needed: Callable[[str], bool] = lambda name: False
        self._engine, self._preparation, self._export = engine, preparation, export
        self._show, self._clock = show, clock
        self._forget = forget
        self._tasks: dict[str, LiveTask] = {}
        # The names of the tasks that have ended, in the order of their ends, as the keys of a dict.
        self._ended: dict[str, None] = {}
        self._most_ended = most_ended
        # For each reading that waits: what it waits for, and the number of readings before it, as
        # its task was told last.
        self._told: dict[Reading, tuple[str, int]] = {}

    def __getitem__(self, name: str) -> LiveTask:
        return self._tasks[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def __iter__(self) -> Iterator[LiveTask]:
        """The tasks in the order of registration."""
        return iter(self._tasks.values())

    def check(self, command: Command) -> None:
        """Raises TaskError if a command cannot be carried out; the message says why."""
        name, task = command.task, self._tasks.get(command.task)
        if command.kind == "register":
            if task:
                raise TaskError(f"task {name!r}: a task of this name is registered already")
            return
        if task is None:
            raise TaskError(f"task {name!r}: there is no such task")
        if task.ended:
            raise TaskError(f"task {name!r}: it has ended ({task.state})")
        if command.kind == "resume" and task.state != PAUSED:
            raise TaskError(f"task {name!r}: it is not paused but {task.state}")
        if command.kind == "extend":
            if task.steps is None:
                raise TaskError(f"task {name!r}: its data have not been read yet")
            if command.value <= task.steps:
                raise TaskError(f"task {name!r}: it has {task.steps} steps already")
            if task.specification.objective.needs_reference:
                if task.prepared is None:
                    raise TaskError(f"task {name!r}: its data have not been read yet")
                if reason := task.prepared.refused_extension:
                    raise TaskError(reason)

    def new_task(self, command: Command, arrival: int) -> LiveTask:
        """The task that a command of the kind "register" registers, for `add`. `arrival` is the
        number of its arrival."""
        specification, priority, files, origin = command.value
        first = StateChange(PREPARING, None, self._clock())
        return LiveTask(
            specification,
            priority,
            arrival,
            [first],
            origin=origin,
            steps=specification.steps,
            files=files,
        )

    def changes(self, command: Command) -> dict[str, Any]:
        """The attributes of its task that a command changes, by name, for `carry_out`. `check` must
        permit the command, and its kind must not be "register"."""
        task, now = self[command.task], self._clock()
        match command.kind:
            case "cancel":
                return task.entered(CANCELLED, None, now)
            case "pause":
                return task.entered(PAUSED, None, now)
            case "resume":
                return task.entered(QUEUED if task.prepared else PREPARING, None, now)
            case "set_priority":
                return {"priority": command.value, "told": False}
            case "extend":
                return task.extended(command.value, self._dispatched(task))
        raise ValueError(f"there is no command {command.kind!r}")

    def carry_out(self, command: Command, changes: Mapping[str, Any]) -> None:
        """Carries out a command of another kind than "register". `changes` is from the method
        `changes`; no other command may have been carried out since then."""
        task, self.changed = self[command.task], True
        match command.kind:
            case "cancel" if self._has_place(task):
                self._engine.release(task.name)
            case "pause":
                self._leave(task)
                if task.reading:
                    self._preparation.set_aside(task.reading, True)
            case "resume" if task.reading:
                self._preparation.set_aside(task.reading, False)
            case "extend" if self._has_place(task):
                self._engine.extend(task.name, command.value)
        self._change(task, changes)
        if command.kind == "resume" and not (task.reading or task.prepared):
            self._read_data(task)

    def _dispatched(self, task: LiveTask) -> int:
        """Number of a task's updates that have been dispatched."""
        if self._has_place(task) or task.suspended:
            return self._engine.steps_dispatched(task.suspended or task.name)
        return task.progress.step if task.progress else 0

    def add(self, task: LiveTask) -> None:
        """Adds a task that has been registered, from `new_task`."""
        self._tasks[task.name] = task
        self._read_data(task)
        self._show(task)

    def restore(self, tasks: Iterable[LiveTask]) -> None:
        """Adds the tasks of an earlier training, in the order of registration. The data of tasks
        that have not ended are read again, so that these go on."""
        self._tasks |= {task.name: task for task in tasks}
        ended = sorted(
            (task for task in self if task.ended), key=lambda task: task.history[-1].time
        )
        self._ended |= dict.fromkeys(task.name for task in ended)
        for task in self:
            if not task.ended:
                if task.state != PAUSED:
                    self._enter(task, PREPARING, note="training was started again")
                self._read_data(task)

    def note_kept(self, name: str) -> None:
        """Notes that the end of a task is in the table."""
        task = self[name]
        task.kept, task.unkept = True, None
        self.unkept.pop(name, None)

    def tell_waiting(self, to_be_read: Sequence[Reading], to_begin: Sequence[Reading]) -> None:
        """Tells tasks that wait for their preparation how many come before them. `to_be_read` is
        `Preparation.waiting`, `to_begin` is `Preparation.waiting_to_begin`. A task is told again
        when the number has halved, because thousands of tasks may wait."""
        told, self._told = self._told, {}
        for what, waiting in ((_DATA, to_be_read), (_ADAPTER, to_begin)):
            for before, reading in enumerate(waiting):
                known = told.pop(reading, None)
                news = known is None or known[0] != what or 2 * before <= known[1]
                self._told[reading] = (what, before) if news else known
                if news and self._waits_for(reading):
                    reason = _waits_behind(what, before)
                    self._enter(self._tasks[reading.task.name], PREPARING, reason)
        for reading in told:
            # The turn of this reading has come.
            if self._waits_for(reading):
                self._enter(self._tasks[reading.task.name], PREPARING)

    def enter_prepared(self, reading: Reading, result: PreparedTask | Exception) -> None:
        """Handles the end of a preparation, with its result or its exception. It has no effect if
        the task no longer waits for this reading."""
        task = self._tasks.get(reading.task.name)
        if task is None or task.reading is not reading:
            return
        task.reading = None
        try:
            if isinstance(result, Exception):
                raise result
            self._engine.refuse_outgrowing(result)
        except Exception as e:
            # A problem with a tenant's data concerns only this task. Its training so far is kept:
            # the data may come back, or the pool may become larger.
            begun = task.progress or task.reached != Counted()
            self._enter(task, PAUSED if begun else FAILED, first_line(e))
            return
        known = task.fingerprints
        try:
            task.set_prepared(result)
        except TaskError as e:
            self._enter(task, FAILED, first_line(e))
            return
        task.warnings = tuple(self._warnings(task.prepared, None))
        if not known:
            self.is_news = True
            if task.warnings:
                self._warn(task.name, task.warnings)
        if task.state == PREPARING:
            self._enter(task, QUEUED)
            self.changed = True
        else:
            # The number of steps may only be known now.
            self._show(task)

    def choose(self) -> None:
        """Chooses the tasks that train, and changes their places."""
        self.changed = False
        found = schedule(
            [
                Candidate(
                    task.name, task.priority, task.arrival, task.state == RUNNING, task.passes
                )
                for task in self.candidates
            ],
            self._refusal,
            self._worth,
        )
        for name in found.passed:
            self[name].change({"passes": self[name].passes + 1})
        for name, reason in found.waits.items():
            takers = found.takers.get(name)
            self._leave(self[name])
            self._enter(self[name], QUEUED, reason, note=takers and _taken_by(takers))
        for name in found.runs:
            if self[name].state != RUNNING:
                self._start(self[name])

    def requeue(self, most: int, why: str) -> None:
        """Takes the places from all but `most` tasks: first from those of the lowest priority, and
        among these from the last that came. `why` is reported as long as they wait."""
        running = [task for task in self if task.state == RUNNING]
        running.sort(key=lambda task: (-task.priority, task.arrival))
        for task in running[most:]:
            self._leave(task)
            self._enter(task, QUEUED, "the task waits for a place", note=why)
        self.changed = True

    def take_results(
        self, updates: Sequence[TaskUpdate], computed: Computed, seconds: float
    ) -> None:
        """Meters the results, and ends the tasks whose training has ended with them. Then forgets
        the tasks that ended longest ago, if there are too many. `seconds` is the time that the
        devices have spent on `computed`."""
        by_task = computed.by_task
        tokens = max(1, sum(by_task.values()))
        changed = [self[name] for name in {*by_task, *(update.task for update in updates)}]
        before = {task.name: task.meter.copy() for task in changed}
        for part in (*computed.turns, *computed.held_out):
            self[part.task].count_seconds(part, seconds * part.tokens / tokens)
        for turn in computed.turns:
            self[turn.task].count_turn(turn)
        for update in updates:
            self[update.task].count_update(update)
        for measured in computed.measured:
            self[measured.task].count_measured(measured)
        for task in changed:
            task.dirty = True
            if task.name in by_task:
                task.share = by_task[task.name] / tokens
            self.totals.replace(before[task.name], task.meter)
        for name in self._engine.names:
            progress = self._engine.progress(name)
            self[name].measures = self._engine.measures(name)
            if progress.status != RUNNING:
                self._end(self[name], progress)
        self._forget_some()

    def _forget_some(self) -> None:
        """Forgets the tasks that ended longest ago, if there are too many. Tasks that must be kept
        move to the end of the queue."""
        for name in list(itertools.islice(self._ended, _LOOKED_AT)):
            if len(self._ended) <= self._most_ended:
                return
            # The name of a task may be used again only if no result of the task is still awaited.
            is_free = self[name].kept and name not in self._engine.awaited
            if is_free and not self.is_needed(name):
                self._forget_task(name)
            else:
                self._ended[name] = self._ended.pop(name)

    def _forget_task(self, name: str) -> None:
        del self._ended[name]
        self.forgotten.append(self._tasks.pop(name).key)
        self._forget(name)

    @property
    def candidates(self) -> list[LiveTask]:
        """The tasks that train or wait for a place."""
        return [task for task in self if task.state in (QUEUED, RUNNING)]

    @property
    def running(self) -> list[str]:
        return self._engine.names

    def copies(self, snapshots: Mapping[str, Callable[[], SlotArrays]]) -> dict[str, TaskCopy]:
        """By name, copies of the tasks that still train, as of the updates before `snapshots` were
        taken; the results of these updates must have arrived. `snapshots` has results of
        `Engine.snapshot` from before a round."""
        return {
            name: self[name].copy(self._engine.with_kept(name, snapshot))
            for name, snapshot in snapshots.items()
            if name in self and self[name].state == RUNNING
        }

    def _read_data(self, task: LiveTask) -> None:
        # A task that goes on has its arrays and needs no initial adapter.
        begins, aside = task.saved_arrays is None, task.state == PAUSED
        registered = task.history[0].time
        task.reading = self._preparation.add(
            task.specification, task.files, aside, begins, registered
        )

    def _waits_for(self, reading: Reading) -> bool:
        """Whether a task waits for this reading of its data and is not paused."""
        task = self._tasks.get(reading.task.name)
        return task is not None and task.reading is reading and task.state == PREPARING

    def _refusal(self, names: Sequence[str]) -> str | None:
        """Why tasks cannot train together; None if they can."""
        capacity = self._engine.size.slots
        if len(names) <= capacity:
            return None
        taken = f"all {capacity} places are taken" if capacity > 1 else "the only place is taken"
        if self.growing:
            taken += f"; programs for {self.growing} places are being compiled"
        return taken

    def _worth(self, names: Sequence[str]) -> float:
        """The throughput of tasks that train together, up to a factor."""
        options = self._engine.options
        return tokens_per_microbatch(
            [self[name].batch_tokens for name in names], options.shape, options.round_tokens
        )

    def _start(self, task: LiveTask) -> None:
        try:
            if task.suspended:
                self._engine.resume(task.suspended)
            else:
                self._engine.register_tasks([task.prepared])
                self._engine.begin_evaluation([task.name])
        except (ValueError, KeyError, TypeError, OSError, MemoryError) as e:
            # These are errors of a tenant's files; errors of the devices concern all tasks and are
            # not caught.
            if task.name in self._engine.names:
                self._engine.release(task.name)
            self._enter(task, FAILED, first_line(e))
            self.changed = True
            return
        progress = self._engine.progress(task.name)
        task.change({"suspended": None, "passes": 0, "progress": progress})
        self._enter(task, RUNNING)

    def _has_place(self, task: LiveTask) -> bool:
        """Whether a task is in the engine. A restored task is not, whatever its state."""
        return task.name in self._engine.names

    def _leave(self, task: LiveTask) -> None:
        """Suspends a task, if it has a place."""
        if self._has_place(task):
            task.suspended = self._engine.suspend(task.name)

    def _end(self, task: LiveTask, progress: TaskProgress) -> None:
        if progress.status == SUCCEEDED:
            trained = TrainedTask.of(task.prepared, progress, task.fingerprints)
            snapshot = self._engine.snapshot(task.name)
            self._export(trained, self._engine.result(task.name, snapshot))
            task.unkept = self._engine.with_kept(task.name, snapshot)
        task.last_warnings = tuple(self._warnings(task.prepared, progress))
        self._engine.release(task.name)
        state = shown_state(progress.status, progress.stopped_early)
        self._enter(task, state, progress.error or progress.stopped_early)
        self.changed = True

    def _enter(
        self, task: LiveTask, state: str, reason: str | None = None, note: str | None = None
    ) -> None:
        """Lets a task enter a state, or changes the reason of its present state."""
        self._change(task, task.entered(state, reason, self._clock(), note))

    def _change(self, task: LiveTask, changes: Mapping[str, Any]) -> None:
        """Changes a task, and shows it if the change is visible."""
        task.change(changes)
        if task.ended and task.name not in self._ended:
            self._ended[task.name] = None
            if not task.kept:
                self.unkept[task.name] = None
            if task.reading:
                self._preparation.drop(task.reading)
                task.reading = None
        if "told" in changes:
            self._show(task)


def _waits_behind(what: str, count: int) -> str:
    are = "is" if count == 1 else "are"
    place = f"at most {numbered(count, 'task')} {are} before it" if count else "it is the next one"
    return f"waits for {what}; {place}"


def _taken_by(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    if len(names) == 1:
        return f"task {shown} of higher priority took its place"
    return f"tasks {shown}{more} of higher priority took places"
