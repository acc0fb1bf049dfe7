"""The tasks of a live training, and what commands and results do to them."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    ENDED,
    FAILED,
    PAUSED,
    PREPARING,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    At,
    Command,
    LiveTask,
    Meter,
    SavedTask,
    StateChange,
    TaskStatus,
    shares_of,
)


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


# So many names are in a reason.
_MOST_NAMES = 3
# What tasks may wait for before they are prepared.
_DATA, _ADAPTER = "its data to be read", "its initial adapter to be computed"


class LiveTasks:
    """The tasks of a live training by name. Only the thread that owns the engine uses it.

    It decides what becomes of every task: commands, results of training and the room in the pool
    change states here and nowhere else.

    Attributes:
      changed: whether the choice of the tasks that train has to be made anew.
      totals: what all tasks have used together, those included that are not known any more. It is
        counted by itself, and equals the sum of their meters.
      ended: the tasks that have ended.
      read: names of the tasks whose data have been read for the first time, until that is kept; the
        values have no meaning.
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
          engine: the engine, whose tasks no one else changes.
          preparation: prepares tasks; `enter_prepared` gets the results.
          export: function that keeps the adapter of a task that has succeeded, as `Store.export`.
          show: function that is called whenever a task's state, reason, priority or length has
            changed.
          forget: function that is called with the name of a task that is no longer known.
          clock: function that returns the time in seconds since 1970.
          most_ended: number of tasks that are known after their end.
          warnings: as for `LiveTraining`.
          warn: function that is called with the name of a task and warnings, once for each warning.
        """
        self._warnings, self._warn = warnings, warn
        self.changed = False
        self.growing: int | None = None
        self.totals = Meter()
        self.ended = EndedTasks(most_ended)
        self.read: dict[str, None] = {}
        self._engine, self._preparation, self._export = engine, preparation, export
        self._show, self._clock = show, clock
        self._forget = forget
        self._tasks: dict[str, LiveTask] = {}
        # Of the readings that wait, what for and behind how many, when its task was told last.
        self._told: dict[Reading, tuple[str, int]] = {}

    def __getitem__(self, name: str) -> LiveTask:
        return self._tasks[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def __iter__(self) -> Iterator[LiveTask]:
        """The tasks in the order in which they were registered."""
        return iter(self._tasks.values())

    def check(self, command: Command, again: bool = False) -> None:
        """Checks that a command can be carried out.

        Args:
          command: the command.
          again: whether it was carried out before, by a process that has ended. The data of its
            task had then been read.

        Raises:
          TaskError: it cannot; the message says why.
        """
        name, own = command.task, self._tasks.get(command.task)
        if command.kind == "register":
            # A task of this name that has ended was forgotten then, and is forgotten again.
            if own and not (again and own.ended):
                raise TaskError(f"task {name!r}: a task of this name is registered already")
            return
        if own is None:
            raise TaskError(f"task {name!r}: there is no such task")
        if command.kind in ("end", "read"):
            return
        if command.kind == "used":
            if not own.ended:
                raise TaskError(f"task {name!r}: it goes on, and uses the same again")
            return
        if own.ended:
            raise TaskError(f"task {name!r}: it has ended ({own.state})")
        if command.kind == "resume" and own.state != PAUSED:
            raise TaskError(f"task {name!r}: it is not paused but {own.state}")
        if command.kind == "extend":
            if own.steps is None and not again:
                raise TaskError(f"task {name!r}: its data have not been read yet")
            if own.steps is not None and command.value <= own.steps:
                raise TaskError(f"task {name!r}: it has {own.steps} steps already")

    def with_at(self, command: Command) -> Command:
        """The command, with where its task is now; one that registers a task is returned as it is.

        Args:
          command: a command that `check` permits.
        """
        if command.kind == "register":
            return command
        own = self[command.task]
        if own.progress is None:
            step = 0
        elif self._has_place(own) or own.suspended:
            step = self._engine.steps_dispatched(own.suspended or own.name)
        else:
            step = own.progress.step
        return command._replace(at=At(step, own.meter.copy()))

    def carry_out(self, command: Command, arrival: int, again: bool = False) -> None:
        """Carries out a command that `check` permits. If it is carried out once more, a task that
        ends has used then what it had used the first time, and a task that is extended trains with
        its shorter schedule up to the same step.

        Args:
          command: the command.
          arrival: number of the arrival of a task that is registered.
          again: as for `check`. `go_on` has to be called after the last of these commands.
        """
        if command.kind == "register":
            task, priority, files = command.value
            if task.name in self._tasks:
                self._drop(task.name)
            first = StateChange(PREPARING, None, command.time)
            own = LiveTask(task, priority, arrival, [first], steps=task.steps, files=files)
            self._tasks[task.name] = own
            if not again:
                self._read_data(own)
            self._show(own)
            return
        own, at = self._tasks[command.task], command.at or self.with_at(command).at
        # The first time, other things may have happened since the command was given.
        time = max(command.time, own.history[-1].time) if again else None
        if command.kind in ("cancel", "end", "used"):
            self.totals.replace(own.meter, at.meter)
            own.meter = at.meter.copy()
        if command.kind in ("end", "used"):
            if command.kind == "end":
                own.end = command.value
            self._show(own)
            return
        if command.kind == "read":
            own.fingerprints, own.files = command.value, {}
            return
        self.changed = True
        if command.kind == "cancel":
            if self._has_place(own):
                self._engine.release(own.name)
            self._enter(own, CANCELLED, time=time)
        elif command.kind == "pause":
            self._leave(own)
            self._enter(own, PAUSED, time=time)
            if own.reading:
                self._preparation.set_aside(own.reading, True)
        elif command.kind == "resume":
            self._enter(own, QUEUED if own.prepared else PREPARING, time=time)
            if own.reading:
                self._preparation.set_aside(own.reading, False)
            elif not (own.prepared or again):
                self._read_data(own)
        elif command.kind == "set_priority":
            own.priority = command.value
            self._show(own)
        else:
            self._extend(own, command.value, at.step)

    def restore(self, saved: SavedTask) -> None:
        """Adds a task as it was saved. `go_on` has to be called when all have been added, and the
        commands since then have been carried out again.

        Args:
          saved: the task.
        """
        own = self._tasks[saved.task.name] = LiveTask.of(saved)
        self._show(own)

    def go_on(self) -> None:
        """Lets the tasks go on that have not ended: their data are read again."""
        ended = sorted((own for own in self if own.ended), key=lambda own: own.history[-1].time)
        self.ended.restore(own.name for own in ended)
        for own in self:
            if not own.ended:
                if own.state != PAUSED:
                    self._enter(own, PREPARING, note="training was started again")
                self._read_data(own)

    def tell_waiting(self, to_be_read: Sequence[Reading], to_begin: Sequence[Reading]) -> None:
        """Tells tasks that wait for their preparation how many come before them. A task is told
        again when the number has halved, so that thousands of tasks do not hear of every one.

        Args:
          to_be_read: `Preparation.waiting`.
          to_begin: `Preparation.waiting_to_begin`.
        """
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
            # Its turn has come.
            if self._waits_for(reading):
                self._enter(self._tasks[reading.task.name], PREPARING)

    def enter_prepared(self, reading: Reading, result: PreparedTask | Exception) -> None:
        """Takes note of the end of a preparation.

        Args:
          reading: what was prepared. It changes nothing if its task no longer waits for it.
          result: the prepared task, or the exception that ended its preparation.
        """
        own = self._tasks.get(reading.task.name)
        if own is None or own.reading is not reading:
            return
        own.reading = None
        try:
            if isinstance(result, Exception):
                raise result
            self._engine.refuse_outgrowing(result)
        except Exception as e:
            # Whatever is wrong with a tenant's data concerns this task only. What has been trained
            # is kept: the data may be there again later, or the pool be larger.
            begun = own.progress or own.reached
            self._enter(own, PAUSED if begun else FAILED, first_line(e))
            return
        known = own.fingerprints
        try:
            own.set_prepared(result)
        except TaskError as e:
            self._enter(own, FAILED, first_line(e))
            return
        own.warnings = tuple(self._warnings(own.prepared, None))
        if not known:
            self.read[own.name] = None
            if own.warnings:
                self._warn(own.name, own.warnings)
        if own.state == PREPARING:
            self._enter(own, QUEUED)
            self.changed = True
        else:
            # Its number of steps may be known only now.
            self._show(own)

    def choose(self) -> None:
        """Chooses the tasks that train, and lets them take and leave their places."""
        self.changed = False
        found = schedule(
            [
                Candidate(own.name, own.priority, own.arrival, own.state == RUNNING, own.passes)
                for own in self.candidates
            ],
            self._refusal,
            self._worth,
        )
        for name in found.passed:
            self[name].passes += 1
        for name, reason in found.waits.items():
            takers = found.takers.get(name)
            self._leave(self[name])
            self._enter(self[name], QUEUED, reason, note=takers and _taken_by(takers))
        for name in found.runs:
            if self[name].state != RUNNING:
                self._start(self[name])

    def requeue(self, most: int, why: str) -> None:
        """Lets the tasks that came last, and among the lowest priority, give up their places.

        Args:
          most: number of tasks that keep theirs.
          why: the reason, in words; it is told as long as they wait.
        """
        running = [own for own in self if own.state == RUNNING]
        running.sort(key=lambda own: (-own.priority, own.arrival))
        for own in running[most:]:
            self._leave(own)
            self._enter(own, QUEUED, "the task waits for a place", note=why)
        self.changed = True

    def take_results(
        self, updates: Sequence[TaskUpdate], computed: Computed, seconds: float
    ) -> None:
        """Meters what has been trained, and ends the tasks whose training has ended with it. The
        tasks that ended longest ago are forgotten.

        Args:
          updates: the updates.
          computed: what has been computed.
          seconds: the time that the devices have spent on it.
        """
        for turn in computed.turns:
            self[turn.task].count(turn, self.totals)
        for update in updates:
            for meter in (self[update.task].meter, self.totals):
                meter.add_update(update)
        for name, tokens in computed.measured.items():
            self[name].meter.held_out_tokens += tokens
        self.totals.held_out_tokens += sum(computed.measured.values())
        self.totals.device_seconds += seconds
        for name, share in shares_of(computed.by_task).items():
            self[name].share = share
            self[name].meter.device_seconds += share * seconds
            if self[name].ended:
                self.ended.add(name)
        for name in self._engine.names:
            progress = self._engine.progress(name)
            self[name].measured = self._engine.measures(name)
            if progress.status != RUNNING:
                self._end(self[name], progress)
        # A name may be used again when no result of its task is still on its way.
        while (first := self.ended.forgettable) and first not in self._engine.awaited:
            self._drop(first)

    def _drop(self, name: str) -> None:
        """Forgets a task that has ended."""
        self.ended.forget(name)
        self.read.pop(name, None)
        del self._tasks[name]
        self._forget(name)

    @property
    def candidates(self) -> list[LiveTask]:
        """The tasks that train or wait for a place."""
        return [own for own in self if own.state in (QUEUED, RUNNING)]

    @property
    def running(self) -> list[str]:
        """Names of the tasks that train."""
        return self._engine.names

    def saved(self, snapshots: Mapping[str, Callable[[], SlotArrays]]) -> dict[str, SavedTask]:
        """By name, tasks that still train, as they are saved after the results of the updates
        before `snapshots`.

        Args:
          snapshots: by name, results of `Engine.snapshot` from before a round was trained.
        """
        return {
            name: self[name].saved(self._engine.with_best(name, snapshot))
            for name, snapshot in snapshots.items()
            if name in self and self[name].state == RUNNING
        }

    def _read_data(self, own: LiveTask) -> None:
        # A task that goes on has its arrays, and needs no initial adapter.
        begins, aside = own.saved_arrays is None, own.state == PAUSED
        registered = own.history[0].time
        own.reading = self._preparation.add(own.task, own.files, aside, begins, registered)

    def _waits_for(self, reading: Reading) -> bool:
        """Whether a task waits for this reading of its data, and is not paused."""
        own = self._tasks.get(reading.task.name)
        return own is not None and own.reading is reading and own.state == PREPARING

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
        """The throughput of tasks that train together."""
        options = self._engine.options
        return tokens_per_microbatch(
            [self[name].batch_tokens for name in names], options.shape, options.round_tokens
        )

    def _extend(self, own: LiveTask, steps: int, at: int) -> None:
        if self._has_place(own):
            self._engine.extend(own.name, steps)
        own.extend(steps, at)
        self._show(own)

    def _start(self, own: LiveTask) -> None:
        """Gives a task a place."""
        try:
            if own.suspended:
                self._engine.resume(own.suspended)
            else:
                self._engine.register_tasks([own.prepared])
                self._engine.begin_evaluation([own.name])
        except (ValueError, KeyError, TypeError, OSError, MemoryError) as e:
            # The errors of a tenant's files. Those of the devices concern all tasks.
            if own.name in self._engine.names:
                self._engine.release(own.name)
            self._enter(own, FAILED, first_line(e))
            self.changed = True
            return
        own.suspended, own.passes = None, 0
        own.progress = self._engine.progress(own.name)
        self._enter(own, RUNNING)

    def _has_place(self, own: LiveTask) -> bool:
        """Whether a task is in the engine. One that is restored is not, whatever its state."""
        return own.name in self._engine.names

    def _leave(self, own: LiveTask) -> None:
        """Lets a task give up its place, if it has one."""
        if self._has_place(own):
            own.suspended = self._engine.suspend(own.name)

    def _end(self, own: LiveTask, progress: TaskProgress) -> None:
        """Ends a task whose training has ended."""
        if progress.status == SUCCEEDED:
            trained = TrainedTask.of(own.prepared, progress, own.fingerprints)
            snapshot = self._engine.snapshot(own.name)
            self._export(trained, self._engine.result(own.name, snapshot))
            own.unkept = self._engine.with_best(own.name, snapshot)
        if warnings := self._warnings(own.prepared, progress):
            own.warnings += tuple(warnings)
            self._warn(own.name, warnings)
        self._engine.release(own.name)
        state = shown_state(progress.status, progress.stopped_early)
        self._enter(own, state, progress.error or progress.stopped_early)
        self.changed = True

    def _enter(
        self,
        own: LiveTask,
        state: str,
        reason: str | None = None,
        note: str | None = None,
        time: float | None = None,
    ) -> None:
        """Lets a task enter a state, now unless a time is given."""
        if own.enter(state, reason, self._clock() if time is None else time, note):
            if own.ended:
                self.ended.add(own.name)
                if own.reading:
                    self._preparation.drop(own.reading)
                    own.reading = None
            self._show(own)


def _waits_behind(what: str, count: int) -> str:
    """Says why a task is not being prepared yet."""
    are = "is" if count == 1 else "are"
    place = f"at most {numbered(count, 'task')} {are} before it" if count else "it is the next one"
    return f"waits for {what}; {place}"


def _taken_by(names: Sequence[str]) -> str:
    """Says which tasks of higher priority have taken a place."""
    shown = ", ".join(map(repr, names[:_MOST_NAMES]))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    if len(names) == 1:
        return f"task {shown} of higher priority took its place"
    return f"tasks {shown}{more} of higher priority took places"
