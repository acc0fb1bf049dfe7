"""Trains tasks that come and go on one engine (MuxTune 3.2, mLoRA 3.4)."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from jaxmux.engine import Engine, EngineSize, PreparedTask, TaskProgress, TaskUpdate
from jaxmux.engine.tasks.progress import as_line
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.field_checks import LARGEST_INTEGER
from jaxmux.peft import Adapter, kind_of
from jaxmux.tasks import Task, TaskError

from .data import Preparation, file_identities
from .saving import Saving
from .size import ElasticSize
from .store import Event, EventStream, MemoryStore, Store
from .task import FAILED, TRAINED, Command, CommandQueue, LiveTask, Meter, TaskStatus, Waiting
from .tasks import LiveTasks, StatusBoard


class CommandRunner:
    """Takes commands from their queue, writes their changes to the table, and applies them to the
    tasks. Only the thread that owns the engine may use it. `is_busy` is True while commands are
    being carried out."""

    def __init__(self, queue: CommandQueue, tasks: LiveTasks, store: Store, saving: Saving):
        """Starts without commands. `tasks` has the tasks of an earlier training; `saving` writes
        the changes of commands before they are carried out."""
        self._queue, self._tasks, self._store, self._saving = queue, tasks, store, saving
        # Number of the last arrival of a task.
        self._arrivals = max((task.arrival for task in tasks), default=-1)
        self.is_busy = False
        # The commands that are being carried out.
        self._taken: Sequence[Waiting] = ()

    def carry_out(self) -> None:
        """Carries out the waiting commands: first those before the second command for the same
        task, and so on. Commands in one such group are independent, so they are checked and written
        together."""
        self._taken = waiting = self._queue.take()
        # Tasks that are registered before the same end of a round have arrived together.
        self._arrivals += bool(waiting)
        self.is_busy = True
        try:
            while waiting:
                names: set[str] = set()
                independent = 0
                for command, _ in waiting:
                    if command.task in names:
                        break
                    names.add(command.task)
                    independent += 1
                self._carry_out_independent(waiting[:independent])
                waiting = waiting[independent:]
            self._taken = ()
        finally:
            self.is_busy = False

    def end(self, why: str) -> None:
        """Gives an error to all commands that have not been carried out. `why` says what has ended
        before them."""
        for _, future in (*self._taken, *self._queue.take()):
            if not future.done():
                future.set_exception(RuntimeError(f"{why} before the command"))

    def _carry_out_independent(self, waiting: Sequence[Waiting]) -> None:
        # Each entry also has the task as the command will leave it, and the changes of a known
        # task.
        permitted: list[tuple[Waiting, LiveTask, dict[str, Any]]] = []
        for command, future in waiting:
            try:
                self._tasks.check(command)
                if command.kind == "register":
                    specification, *_, origin = command.value
                    self._store.check(specification)
                    if origin:
                        self._store.check(origin)
            except TaskError as e:
                future.set_exception(e)
                continue
            if command.kind == "register":
                changes, task = {}, self._tasks.new_task(command, self._arrivals)
            else:
                changes = self._tasks.changes(command)
                task = dataclasses.replace(self._tasks[command.task], **changes)
            permitted.append(((command, future), task, changes))
        try:
            if permitted:
                self._saving.write([task for _, task, _ in permitted])
        except OSError as e:
            for (_, future), _, _ in permitted:
                future.set_exception(e)
            return
        for (command, future), task, changes in permitted:
            if command.kind == "register":
                self._tasks.add(task)
            else:
                self._tasks.carry_out(command, changes)
            future.set_result(None)


_log = logging.getLogger("jaxmux")

# Seconds after which saving is tried again when the disk was busy or full.
_RETRY = 1.0


class LiveTraining:
    """Trains tasks that come and go while training goes on.

    One thread owns the engine: it calls `run`, or `step` again and again. Every thread may call the
    other methods. Commands (`register`, `cancel`, `pause`, `resume`, `set_priority` and `extend`)
    are carried out at the next end of a round, in the order in which they were given. Their results
    are futures: `result()` waits until the command has been carried out, and raises its error.
    Functions that are added to a future (`add_done_callback`) are called in the thread that owns
    the engine, so they must not wait for another command.

    Tasks with higher priority train first. Among equal priorities, earlier tasks go first; among
    tasks that came before the same end of a round, those with the highest throughput. A task that
    cannot train yet waits, and its status tells why. A running task makes room for a task of higher
    priority and goes on later, as after `pause`. A task that does not fit into the engine's pool
    and microbatches even alone is refused, so programs are never compiled again.

    Attributes:
      problem: why something was not on disk after the last call of `save`, with which `run` ends;
        None if everything was.
    """

    def __init__(
        self,
        engine: Engine,
        prepare: Callable[[Task], PreparedTask],
        *,
        store: Store | None = None,
        save_every: int = 50,
        prepared_at_once: int = 2,
        slow_preparation_seconds: float = 30.0,
        most_preparation_seconds: float = 600.0,
        most_ended: int = 10_000,
        most: EngineSize | None = None,
        quiet_rounds: int = 100,
        clock: Callable[[], float] = time.time,
        warnings: Callable[[PreparedTask, TaskProgress | None], Sequence[str]] = lambda *_: (),
    ):
        """Starts with the tasks that the store has kept.

        Args:
          engine: an engine without tasks. The pool in `engine.options.reserved` determines the
            number of places, and the largest rank, the linears and the dropout that tasks may have.
          prepare: prepares a task, for example `prepare_task` with the backbone's configuration and
            tokenizer. It is called in other threads, during training.
          store: keeps tasks and adapters; None keeps them in memory.
          save_every: number of rounds from one checkpoint to the next.
          prepared_at_once, slow_preparation_seconds, most_preparation_seconds: as in
            `ServerOptions`.
          most_ended: number of ended tasks whose status is kept, and more while they are needed
            (`know_while`). The name of a forgotten task can be used again.
          most: the size up to which the engine grows; it shrinks down to its present size again.
            The programs are compiled during training. A task's results then depend on the load, but
            only in the order of sums. None keeps the engine's size.
          quiet_rounds: number of rounds for which a smaller size must have sufficed before the
            engine shrinks.
          clock: returns the time of events, in seconds since 1970.
          warnings: returns legal but suspicious facts about a task: about its settings and data
            when these have been read, and about its results when the function is given the task's
            final progress.
        """
        self._engine, self._clock = engine, clock
        self._store = store or MemoryStore()
        kept = self._store.read()
        engine.warm_up()
        engine.rounds = kept.rounds
        self._size = ElasticSize(engine, most, quiet_rounds) if most else None
        # Number of tokens of the last round, with padding.
        self._round_tokens = 0
        self._commands = CommandQueue()
        self._preparation = Preparation(
            partial(_prepared, engine, prepare),
            self._commands.wake,
            prepared_at_once,
            slow_preparation_seconds,
            most_preparation_seconds,
            PreparedTask.with_adapter,
            lambda prepared: prepared.begins_slowly,
        )
        self._events = EventStream()
        self._board = StatusBoard()
        self._tasks = LiveTasks(
            engine,
            self._preparation,
            self._store.export,
            self._show_state,
            self._board.forget,
            clock,
            most_ended,
            warnings,
            lambda name, told: self._tell(name, "warning", {"warnings": list(told)}),
        )
        self._saving = Saving(engine, self._tasks, self._store, save_every, self._show_end)
        self._store.when_written(self._commands.wake)
        self._tasks.totals = kept.totals
        for task in kept.tasks:
            self._show(task)
        self._tasks.restore(kept.tasks)
        # From here on, only the tasks that have not gone on yet hold their arrays.
        del kept
        for task in self._tasks:
            if not task.told:
                self._show_state(task)
        self._board.show_totals(self._tasks.totals)
        self._runner = CommandRunner(self._commands, self._tasks, self._store, self._saving)
        # The thread that owns the engine, and the exception that has ended `run`.
        self._owner: threading.Thread | None = None
        self._failure: BaseException | None = None
        # The time up to which the devices' time has been divided among tasks, and the time at which
        # the last round was dispatched; None while the devices are idle.
        self._metered_until: float | None = None
        self._dispatched_at: float | None = None
        self.problem: str | None = None
        # Whether `close` has been called, and whether no thread trains any more.
        self._closed = self._has_ended = False
        # Held while `run` runs.
        self._running = threading.Lock()

    def register(
        self, task: Task, priority: int = 0, *, origin: Task | None = None
    ) -> Future[None]:
        """Adds a task. Its data are read during training; it begins as soon as it has a place. It
        fails if files with its data change after this call and before they have been read.

        Args:
          task: the task. Its name must differ from that of every other task of this training.
          priority: tasks with higher numbers go first.
          origin: the task as its tenant has specified it; `origins` returns it.

        Returns:
          A future; it has a `TaskError` if the name is taken, or the store cannot keep the task.
        """
        if not isinstance(task, Task):
            raise TypeError(f"task should be a Task, found {task!r}")
        if not isinstance(origin, Task | None):
            raise TypeError(f"origin should be a Task, found {origin!r}")
        value = task, _integer("priority", priority), file_identities(task), origin
        return self._command("register", task.name, value)

    def cancel(self, name: str) -> Future[None]:
        """Ends a task without a result. The returned future has a `TaskError` if there is no such
        task, or it has ended."""
        return self._command("cancel", name)

    def pause(self, name: str) -> Future[None]:
        """Lets a task give up its place until `resume` is called. It later goes on to the same bits
        as without the pause; with several replicas of the backbone, or a pool that follows its
        load, to the same values up to rounding. The returned future has a `TaskError` if there is
        no such task, or it has ended."""
        return self._command("pause", name)

    def resume(self, name: str) -> Future[None]:
        """Lets a paused task wait for a place again. The returned future has a `TaskError` if there
        is no such task, or it is not paused."""
        return self._command("resume", name)

    def set_priority(self, name: str, priority: int) -> Future[None]:
        """Changes the priority of a task; tasks with higher numbers go first. The returned future
        has a `TaskError` if there is no such task, or it has ended."""
        return self._command("set_priority", name, _integer("priority", priority))

    def extend(self, name: str, steps: int) -> Future[None]:
        """Lets a task train more steps. The updates that have not been dispatched follow a
        learning-rate schedule over the new number of steps.

        Args:
          steps: the new number of steps, including those that the task has trained.

        Returns:
          A future; it has a `TaskError` if there is no such task, it has ended, it already has at
          least this many steps, or its number of steps is unknown because its data have not been
          read.
        """
        return self._command("extend", name, _integer("steps", steps))

    def status(self, name: str) -> TaskStatus:
        """The status of a task at the last end of a round. Raises TaskError if there is no such
        task."""
        return self._board.status(name)

    def statuses(self) -> list[TaskStatus]:
        """The statuses of all tasks, in the order of registration."""
        return self._board.statuses()

    def origins(self) -> dict[str, Task]:
        """By name, the tasks of an earlier training as their tenants specified them. Call it before
        `run`."""
        return {task.name: task.origin for task in self._tasks if task.origin}

    def know_while(self, is_needed: Callable[[str], bool]) -> None:
        """Keeps ended tasks as long as `is_needed` returns True for their names. It is called in
        the thread that owns the engine."""
        self._tasks.is_needed = is_needed

    def totals(self) -> Meter:
        """The total usage of all tasks at the last end of a round, including forgotten tasks."""
        return self._board.totals()

    def events(self) -> Iterator[Event]:
        """Iterates over the events from now on. The iterator waits for further events until `close`
        is called."""
        return self._events.read()

    def adapter(self, name: str) -> Adapter:
        """The adapter of a task that has succeeded or stopped early.

        Returns:
          By path of a linear within a layer ("mlp.up_proj"), its LoRA `Factors`, as from
          `Engine.adapter`.

        Raises:
          TaskError: there is no such task, or it has no adapter yet.
        """
        state = self.status(name).state
        if state not in TRAINED:
            raise TaskError(f"task {name!r}: it has no final adapter, because it is {state}")
        try:
            task = self._tasks[name].specification
        except KeyError:
            # The task has been forgotten since.
            raise TaskError(f"task {name!r}: there is no such task") from None
        return self._store.adapter(task)

    def close(self) -> None:
        """Lets `run` return at the next end of a round. Tasks that have not ended stay as they are,
        and no more commands are taken."""
        self._take_no_more()
        # If `run` is not running, this call itself ends what waits. While commands are being
        # carried out, `step` calls `close` again afterwards.
        if self._is_owner and not self._runner.is_busy and self._running.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._running.release()

    def _take_no_more(self) -> None:
        self._closed = True
        self._commands.close()
        self._preparation.close()

    @property
    def _is_owner(self) -> bool:
        """Whether this thread may use the engine."""
        return self._owner in (None, threading.current_thread())

    def run(self) -> None:
        """Trains until `close` is called, and waits while there is nothing to train. Saves all
        tasks at the end."""
        with self._running:
            try:
                while not self._closed:
                    if not self.step():
                        # Save now, because no later event would.
                        self.save(wait=False)
                        longest = self._preparation.seconds_left
                        left = self._saving.wanted or self._saving.has_rows
                        self._commands.wait(_RETRY if left else longest)
                if self._owner:
                    self.save()
            except BaseException as e:
                self._failure = e
                raise
            finally:
                self._end()

    def wait(self) -> None:
        """Waits until `run` has returned, if it has been called. Raises RuntimeError if `run` has
        ended with an exception in another thread."""
        with self._running:
            if self._closed:
                self._end()
            if self._failure is not None and self._owner is not threading.current_thread():
                raise RuntimeError("training has ended with an exception") from self._failure

    def _end(self) -> None:
        """Ends the commands that have not been carried out, and all iterators over events."""
        self._take_no_more()
        self._runner.end("training has ended" if self._failure else "training was closed")
        self._events.close()
        self._has_ended = True

    def step(self) -> bool:
        """Carries out the waiting commands, chooses the tasks that train, and trains a round.
        Returns False if there was nothing to train."""
        self._owner = threading.current_thread()
        self._runner.carry_out()
        if self._closed:
            self.close()
        for prepared in self._preparation.take():
            self._tasks.enter_prepared(prepared.reading, prepared.result)
        self._tasks.tell_waiting(self._preparation.waiting, self._preparation.waiting_to_begin)
        wanting = len(self._tasks.candidates)
        if self._size and wanting:
            resized = self._size.adjust(wanting, self._round_tokens)
            # Tell the waiting tasks of places that are coming.
            growing, self._tasks.growing = self._tasks.growing, self._size.growing
            self._tasks.changed |= resized or growing != self._tasks.growing
        if self._tasks.changed:
            self._tasks.choose()
        trains = not self._engine.finished
        if trains and self._metered_until is None:
            self._metered_until = self._dispatched_at = time.monotonic()
        try:
            snapshots = self._saving.begin()
            updates = self._engine.train_round()
        except OutOfDeviceMemory as e:
            self._leave_slots(e)
            return True
        self._tell_round()
        self._take_results(updates)
        self._saving.go_on(snapshots)
        if not trains:
            self._metered_until = None
            self._store.retry()
        return trains or bool(updates) or self._tasks.changed

    def _tell_round(self) -> None:
        """Records the contents of the last dispatched round, unless this has been done."""
        record, now = self._engine.take_round(), time.monotonic()
        if record is not None:
            spent = self._engine.device_time.spent(self._dispatched_at, now)
            self._store.tell_round(record, spent)
        self._dispatched_at = now

    def _leave_slots(self, error: OutOfDeviceMemory) -> None:
        """Goes on with half of the slots, or fewer, because the device has too little memory."""
        self._take_results(self._engine.drain())
        before = self._engine.size
        rows, slots = self._size.least.rows if self._size else before.rows, before.slots
        while slots > 1:
            slots //= 2
            self._tasks.requeue(slots, "the device ran out of memory")
            with suppress(OutOfDeviceMemory):
                self._engine.resize(EngineSize(slots, rows))
                break
        else:
            raise error
        if self._size:
            self._size.note_full(before)
        _log.warning("%s; training goes on with %d of %d slots", error, slots, before.slots)

    def save(self, wait: bool = True) -> None:
        """Waits for the devices, and saves all tasks as they are, if anything has changed. `run`
        calls it; other callers need it only if they call `step`.

        Args:
          wait: whether to wait until everything is on disk. If False, no checkpoint is written
            while the disk is busy.

        Raises:
          RuntimeError: another thread owns the engine, and training has not been closed.
        """
        if not (self._is_owner or self._has_ended):
            raise RuntimeError("only the thread that trains can save; `run` saves by itself")
        self._take_results(self._engine.drain())
        self._saving.save(wait)
        if wait:
            self._store.wait()
        self._saving.write_if_due(now=True)
        if wait:
            self.problem = self._store.problem
            if self._saving.changed and not self.problem:
                self.problem = "the tasks could not be saved as they are"

    def _command(self, kind: str, name: str, value: Any = None) -> Future[None]:
        if not isinstance(name, str):
            raise TypeError(f"the name of a task should be a string, found {name!r}")
        return self._commands.put(Command(kind, name, value))

    def _take_results(self, updates: Sequence[TaskUpdate]) -> None:
        """Passes on the results of updates."""
        now, seconds = time.monotonic(), 0.0
        computed = self._engine.take_computed()
        if computed.turns:
            self._round_tokens = sum(turn.tokens for turn in computed.turns)
        by_task = computed.by_task
        if by_task:
            self._saving.changed = True
            if self._metered_until is not None:
                seconds, self._metered_until = now - self._metered_until, now
        evaluations = self._engine.take_evaluations()
        told = [("update", update) for update in updates]
        told += [("evaluation", done) for done in evaluations]
        for kind, done in told:
            fields = as_line(done)
            del fields["task"]
            self._tell(done.task, kind, fields)
        self._store.track(updates, evaluations, self._clock())
        # A task's last update is reported before its end.
        self._tasks.take_results(updates, computed, seconds)
        self._saving.write_if_due()
        for name in {*by_task, *(done.task for _, done in told)}:
            if name in self._tasks:
                self._show(self._tasks[name])
        self._board.show_totals(self._tasks.totals)

    def _show_state(self, task: LiveTask) -> None:
        """Shows and reports that a task's state, reason, priority or length has changed. Success
        and failure are reported only when they are in the table."""
        self._show(task)
        if self._shows_end(task):
            adapter = task.specification.adapter
            fields = {"state": task.state, "reason": task.reason, "priority": task.priority}
            fields |= {"steps": task.steps, "adapter": kind_of(adapter).name}
            fields["rank"] = getattr(adapter, "rank", None)
            fields["best_metric"] = task.specification.best_metric
            if self._tell(task.name, "state", fields):
                task.change({"told": True})

    def _show_end(self, task: LiveTask) -> None:
        """Shows and reports the end of a task, which is in the table, and the warnings about it."""
        if task.last_warnings:
            self._tell(task.name, "warning", {"warnings": list(task.last_warnings)})
            task.warnings, task.last_warnings = task.warnings + task.last_warnings, ()
        self._show_state(task)

    def _tell(self, name: str, kind: str, fields: dict[str, Any]) -> bool:
        """Reports an event; returns whether it is written to a file."""
        return self._store.tell(self._events.add(self._clock(), name, kind, fields))

    def _show(self, task: LiveTask) -> None:
        self._board.show(task.status(ends=self._shows_end(task)))

    def _shows_end(self, task: LiveTask) -> bool:
        """Whether the end of a task, if it has ended, may be shown."""
        return task.kept or task.state not in TRAINED | {FAILED}


def _integer(what: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what} should be an integer, found {value!r}")
    if abs(value) > LARGEST_INTEGER:
        raise ValueError(f"{what} should be at most 2^53 - 1 without its sign")
    return value


def _prepared(engine: Engine, prepare: Callable[[Task], PreparedTask], task: Task) -> PreparedTask:
    """The prepared task. Raises TaskError if the pool has no room for it."""
    prepared = prepare(task)
    engine.refuse_outgrowing(prepared)
    return prepared
