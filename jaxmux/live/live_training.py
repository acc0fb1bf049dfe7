"""Trains tasks that come and go on one engine (MuxTune 3.2, mLoRA 3.4)."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

from jaxmux.engine import Engine, PreparedTask, TaskProgress, TaskUpdate
from jaxmux.errors import first_line
from jaxmux.peft import Adapter
from jaxmux.planner import PlanningError
from jaxmux.planner.scheduling import Candidate, schedule
from jaxmux.tasks import Task, TaskError

from .commands import Command, CommandQueue
from .events import Event, EventStream
from .live_task import LiveTask, TaskStatus
from .meter import parts_of
from .preparation import Preparation
from .states import (
    CANCELLED,
    FAILED,
    PAUSED,
    PREPARING,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    StateChange,
)


class LiveTraining:
    """Trains tasks that come and go while training goes on.

    One thread owns the engine: it calls `run`, or `step` again and again. All other methods may be
    called in any thread. Commands (`register`, `cancel`, `pause`, `resume`, `set_priority` and
    `extend`) are carried out at the next end of a round, in the order in which they were given.
    Their results are futures: `result()` waits until the command has been carried out, and raises
    its error.

    Tasks are trained by priority; among equals, those that came first go first. A task that cannot
    train yet waits, and its status tells why; a running task makes room for one of higher priority
    and goes on later with the same bits. A task that does not fit into the engine's pool and
    microbatches even alone is refused, so programs are never compiled again.
    """

    def __init__(
        self,
        engine: Engine,
        prepare: Callable[[Task], PreparedTask],
        *,
        prepared_at_once: int = 2,
        most_preparation_seconds: float = 600.0,
        clock: Callable[[], float] = time.time,
    ):
        """Starts without tasks.

        Args:
          engine: an engine without tasks. The pool of `engine.options.reserved` gives the places
            for tasks, and the largest rank, the linears and the dropout that tasks may have.
          prepare: function that prepares a task, for example `prepare_task` with the backbone's
            configuration and tokenizer. It is called in other threads, beside training.
          prepared_at_once: number of tasks whose data are read at the same time.
          most_preparation_seconds: a task fails if reading its data takes longer.
          clock: function that returns the time of events, in seconds since 1970.
        """
        self._engine, self._clock = engine, clock
        # Allocates the pool.
        engine.register_tasks([])
        self._commands = CommandQueue()
        self._preparation = Preparation(
            prepare, self._commands.wake, prepared_at_once, most_preparation_seconds
        )
        self._events = EventStream()
        self._tasks: dict[str, LiveTask] = {}
        self._arrivals = 0
        # Whether the choice of the tasks that train has to be made anew.
        self._changed = False
        # Until when the devices' time has been divided among tasks; None while they are idle.
        self._metered_until: float | None = None
        self._statuses: dict[str, TaskStatus] = {}
        self._lock = threading.Lock()
        self._closed = False

    def register(self, task: Task, priority: int = 0) -> Future[None]:
        """Adds a task. Its data are read beside training; it begins as soon as it has a place.

        Args:
          task: the task. Its name must not be that of another task of this training.
          priority: tasks of higher numbers go first.

        Returns:
          A future; it has a `TaskError` if the name is taken.
        """
        return self._commands.put(Command("register", task.name, (task, priority)))

    def cancel(self, name: str) -> Future[None]:
        """Ends a task without a result.

        Args:
          name: name of the task.

        Returns:
          A future; it has a `TaskError` if there is no such task, or it has ended.
        """
        return self._commands.put(Command("cancel", name))

    def pause(self, name: str) -> Future[None]:
        """Lets a task give up its place until `resume` is called. It goes on later with the bits
        that it would have had without a break.

        Args:
          name: name of the task.

        Returns:
          A future; it has a `TaskError` if there is no such task, or it has ended.
        """
        return self._commands.put(Command("pause", name))

    def resume(self, name: str) -> Future[None]:
        """Lets a paused task wait for a place again.

        Args:
          name: name of the task.

        Returns:
          A future; it has a `TaskError` if there is no such task, or it is not paused.
        """
        return self._commands.put(Command("resume", name))

    def set_priority(self, name: str, priority: int) -> Future[None]:
        """Changes the priority of a task.

        Args:
          name: name of the task.
          priority: tasks of higher numbers go first.

        Returns:
          A future; it has a `TaskError` if there is no such task, or it has ended.
        """
        return self._commands.put(Command("set_priority", name, priority))

    def extend(self, name: str, steps: int) -> Future[None]:
        """Lets a task train more steps. Its learning-rate schedule spreads over all of them.

        Args:
          name: name of the task.
          steps: the new number of steps, those included that the task has trained.

        Returns:
          A future; it has a `TaskError` if there is no such task, it has ended, its data have not
          been read yet, or it has at least so many steps already.
        """
        return self._commands.put(Command("extend", name, steps))

    def status(self, name: str) -> TaskStatus:
        """What can be seen of a task, as of the last end of a round.

        Args:
          name: name of the task.

        Raises:
          TaskError: there is no such task.
        """
        with self._lock:
            if name in self._statuses:
                return self._statuses[name]
        raise TaskError(f"task {name!r}: there is no such task")

    def statuses(self) -> list[TaskStatus]:
        """What can be seen of all tasks, in the order in which they were registered."""
        with self._lock:
            return list(self._statuses.values())

    def events(self) -> Iterator[Event]:
        """Iterates over what happens from now on. The iterator waits for further events until
        `close` is called."""
        return self._events.read()

    def adapter(self, name: str) -> Adapter:
        """The adapter of a task that has succeeded.

        Args:
          name: name of the task.

        Returns:
          By path of a linear within a layer ("mlp.up_proj"), its LoRA `Factors`, as from
          `Engine.adapter`.

        Raises:
          TaskError: there is no such task, or it has not succeeded.
        """
        state = self.status(name).state
        if state != SUCCEEDED:
            raise TaskError(f"task {name!r}: it has no final adapter, because it is {state}")
        return self._tasks[name].result()

    def close(self) -> None:
        """Lets `run` return at the next end of a round. Tasks that have not ended stay as they are,
        and no more commands are taken."""
        self._closed = True
        self._commands.close()

    def run(self) -> None:
        """Trains until `close` is called, and waits while there is nothing to train."""
        try:
            while not self._closed:
                if not self.step():
                    self._commands.wait(self._preparation.seconds_left)
            self._take_results(self._engine.drain())
        finally:
            self.close()
            self._commands.carry_out(self._refuse)
            self._events.close()

    def step(self) -> bool:
        """Carries out the commands that wait, chooses the tasks that train, and trains a round.

        Returns:
          False if there was nothing to train.
        """
        if self._commands.carry_out(self._apply):
            self._arrivals += 1
        for prepared in self._preparation.take():
            self._enter_prepared(prepared.task, prepared.result)
        if self._changed:
            self._choose()
        trains = not self._engine.finished
        if trains and self._metered_until is None:
            self._metered_until = time.monotonic()
        updates = self._engine.train_round()
        self._take_results(updates)
        if not trains:
            self._metered_until = None
        return trains or bool(updates) or self._changed

    def _apply(self, command: Command) -> None:
        """Carries out a command."""
        if command.kind == "register":
            self._register(*command.value)
            return
        own = self._tasks.get(command.task)
        if own is None:
            raise TaskError(f"task {command.task!r}: there is no such task")
        if own.ended:
            raise TaskError(f"task {own.name!r}: it has ended ({own.state})")
        self._changed = True
        if command.kind == "cancel":
            if own.state == RUNNING:
                self._engine.release(own.name)
            own.suspended = None
            self._enter(own, CANCELLED, None)
        elif command.kind == "pause":
            self._leave(own)
            self._enter(own, PAUSED, None)
        elif command.kind == "resume":
            if own.state != PAUSED:
                raise TaskError(f"task {own.name!r}: it is not paused but {own.state}")
            self._enter(own, QUEUED if own.prepared else PREPARING, None)
        elif command.kind == "set_priority":
            own.priority = command.value
            self._show(own)
        else:
            self._extend(own, command.value)

    def _register(self, task: Task, priority: int) -> None:
        if task.name in self._tasks:
            raise TaskError(f"task {task.name!r}: a task of this name is registered already")
        first = StateChange(PREPARING, None, self._clock())
        own = self._tasks[task.name] = LiveTask(task, priority, self._arrivals, [first])
        self._preparation.add(task)
        self._show(own)

    def _extend(self, own: LiveTask, steps: int) -> None:
        if own.prepared is None:
            raise TaskError(f"task {own.name!r}: its data have not been read yet")
        if steps <= own.prepared.steps:
            raise TaskError(f"task {own.name!r}: it has {own.prepared.steps} steps already")
        if own.state == RUNNING:
            self._engine.extend(own.name, steps)
        own.prepared = own.prepared.extended(steps)
        own.task = own.prepared.task
        if own.suspended:
            own.suspended.slot.prepared = own.prepared
        self._show(own)

    def _enter_prepared(self, task: Task, result: PreparedTask | Exception) -> None:
        """Takes note of the end of a preparation."""
        own = self._tasks[task.name]
        if own.ended:
            return
        try:
            if isinstance(result, Exception):
                raise result
            self._engine.refuse_outgrowing(result)
        except Exception as e:
            # Whatever is wrong with a tenant's data is the end of this task only.
            self._enter(own, FAILED, first_line(e))
            return
        own.prepared = result
        if own.state == PREPARING:
            self._enter(own, QUEUED, None)
            self._changed = True

    def _choose(self) -> None:
        """Chooses the tasks that train, and lets them take and leave their places."""
        self._changed = False
        wanting = [own for own in self._tasks.values() if own.state in (QUEUED, RUNNING)]
        found = schedule(
            [
                Candidate(own.name, own.priority, own.arrival, own.state == RUNNING, own.passes)
                for own in wanting
                if own.prepared
            ],
            self._refusal,
        )
        for name in found.passed:
            self._tasks[name].passes += 1
        for name, reason in found.waits.items():
            self._leave(self._tasks[name])
            self._enter(self._tasks[name], QUEUED, reason)
        for name in found.runs:
            if self._tasks[name].state != RUNNING:
                self._start(self._tasks[name])

    def _refusal(self, names: Sequence[str]) -> str | None:
        """Why tasks cannot train together; None if they can."""
        capacity = self._engine.capacity
        return f"all {capacity} places are taken" if len(names) > capacity else None

    def _start(self, own: LiveTask) -> None:
        """Gives a task a place."""
        try:
            if own.suspended:
                self._engine.resume(own.suspended)
            else:
                self._engine.register_tasks([own.prepared])
        except (TaskError, PlanningError, OSError) as e:
            self._enter(own, FAILED, first_line(e))
            return
        own.suspended, own.passes = None, 0
        own.progress = self._engine.progress(own.name)
        self._enter(own, RUNNING, None)

    def _leave(self, own: LiveTask) -> None:
        """Lets a task give up its place, if it has one."""
        if own.state == RUNNING:
            own.suspended = self._engine.suspend(own.name)

    def _take_results(self, updates: Sequence[TaskUpdate]) -> None:
        """Enters the results of updates, and ends the tasks that have ended with them."""
        now = time.monotonic()
        seconds = 0.0
        if updates and self._metered_until is not None:
            seconds, self._metered_until = now - self._metered_until, now
        for update, part in zip(updates, parts_of(seconds, updates), strict=True):
            own = self._tasks[update.task]
            own.meter.add(update, part)
            fields = update._asdict()
            del fields["task"]
            self._events.add(self._clock(), own.name, "update", fields)
            self._show(own, event=False)
        for name in self._engine.names:
            progress = self._engine.progress(name)
            if progress.status != RUNNING:
                self._end(self._tasks[name], progress)

    def _end(self, own: LiveTask, progress: TaskProgress) -> None:
        """Ends a task whose training has ended."""
        if progress.status == SUCCEEDED:
            own.result = self._engine.adapter_snapshot(own.name)
        self._engine.release(own.name)
        self._enter(own, progress.status, progress.error)
        self._changed = True

    def _enter(self, own: LiveTask, state: str, reason: str | None) -> None:
        """Lets a task enter a state."""
        if own.enter(state, reason, self._clock()):
            self._show(own)

    def _show(self, own: LiveTask, event: bool = True) -> None:
        """Shows the present status of a task."""
        with self._lock:
            self._statuses[own.name] = own.status()
        if event:
            fields = {"state": own.state, "reason": own.reason, "priority": own.priority}
            self._events.add(self._clock(), own.name, "state", fields)

    def _refuse(self, command: Command) -> None:
        raise RuntimeError(f"task {command.task!r}: training was closed before the command")
