"""Where a live training keeps what has to survive it: in memory, or in the folder of a server."""

import errno
import json
import math
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakValueDictionary

from jaxmux.atomic_files import sync
from jaxmux.engine import TaskEvaluation, TaskProgress, TaskUpdate, TrainedTask
from jaxmux.engine.rounds.results import RoundRecord
from jaxmux.engine.tasks.progress import as_line
from jaxmux.errors import first_line
from jaxmux.field_checks import to_object
from jaxmux.models import Backbone, checkpoint_tensors, devices_bytes
from jaxmux.peft import Adapter, export_adapter, import_adapter
from jaxmux.planner.numbers import numbered
from jaxmux.runs.checkpoints import Checkpoints, Found
from jaxmux.runs.metrics import LOG_BYTES, LineLog, has_details, host_bytes, round_line
from jaxmux.runs.summary import notes_of_task
from jaxmux.runs.trackers import RunTrackers
from jaxmux.sharding import PlacedBackbone
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import Task, TaskError

from .database import Checkpoint, Database, Rows, unusable
from .folder import ServerDirectory
from .task import ENDED, LiveTask, Meter, TaskCopy

# A reader that falls behind by more events loses the oldest ones.
MOST_UNREAD = 100_000
# Seconds until a failed write is tried again: after the first failure, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


class Event(NamedTuple):
    """Something that has happened to a task.

    Attributes:
      number: number of the event, from 0. If a reader finds a gap in the numbers, it has lost
        events because it read too slowly.
      time: when it happened, in seconds since 1970.
      task: name of the task.
      kind: "state" (the task's state or its reason has changed), "warning" (something about the
        task is legal but suspicious), "update" (a step of the task has been trained) or
        "evaluation" (its held-out loss has been measured).
      fields: what the event tells: for "state", `state`, `reason`, `priority`, `steps` (None until
        the data have been read), `adapter` (its kind) and `rank` (None if the kind has none); for
        "warning", `warnings`, a list of texts that have not been told before;
        for the others, the fields of `TaskUpdate` or `TaskEvaluation` without the name of the task.
    """

    number: int
    time: float
    task: str
    kind: str
    fields: dict[str, Any]


class EventStream:
    """Passes events on to readers. All methods may be called in any thread."""

    def __init__(self):
        """Creates a stream without readers."""
        self._changed = threading.Condition()
        # By identity, the unread events of each reader. A reader that nobody holds vanishes.
        self._readers: WeakValueDictionary[int, deque[Event]] = WeakValueDictionary()
        self._number = 0
        self._closed = False

    def add(self, time: float, task: str, kind: str, fields: dict[str, Any]) -> Event:
        """Passes an event on to all readers.

        Args:
          time: when it happened, in seconds since 1970.
          task: name of the task.
          kind: kind of the event.
          fields: what it tells.

        Returns:
          The event.
        """
        with self._changed:
            event = Event(self._number, time, task, kind, fields)
            self._number += 1
            for unread in self._readers.values():
                unread.append(event)
            self._changed.notify_all()
        return event

    def read(self) -> Iterator[Event]:
        """Iterates over the events from this call on. The iterator waits for further events until
        the stream is closed."""
        unread: deque[Event] = deque(maxlen=MOST_UNREAD)
        with self._changed:
            self._readers[id(unread)] = unread
        return self._events(unread)

    def close(self) -> None:
        """Ends all iterators when they have passed on their events."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _events(self, unread: deque[Event]) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: unread or self._closed)
                if not unread:
                    return
                event = unread.popleft()
            yield event


class Restored(NamedTuple):
    """What an earlier training has kept.

    Attributes:
      tasks: its tasks, in the order in which they were registered.
      totals: what all tasks together had used.
      rounds: number of rounds that had been trained.
    """

    tasks: list[LiveTask]
    totals: Meter
    rounds: int


class Store(Protocol):
    """Keeps tasks, their adapters, and what they have used. The thread that owns the engine calls
    all methods but `adapter`, and none of them waits for the devices."""

    @property
    def behind(self) -> bool:
        """Whether the checkpoint that `save` was given last could not be written."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether the next `write` notes something even without rows."""
        ...

    @property
    def problem(self) -> str | None:
        """Why not all has been written that was given; None if it has."""
        ...

    def read(self) -> Restored:
        """What an earlier training has kept. It is called once, before any other method."""
        ...

    def check(self, task: Task) -> None:
        """Checks that a task can be kept.

        Args:
          task: the task.

        Raises:
          TaskError: it would not be read back as it is.
        """
        ...

    def write(self, tasks: Rows, totals: Meter, rounds: int) -> None:
        """Writes rows of tasks, all of them or none.

        Args:
          tasks: the rows.
          totals: what all tasks together have used.
          rounds: number of rounds that have been trained.

        Raises:
          OSError: nothing is written.
        """
        ...

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        """Keeps the adapter of a task that has succeeded, before whatever is saved later.

        Args:
          trained: the task.
          adapter: function that waits for the adapter.
        """
        ...

    def is_exporting(self, name: str) -> bool:
        """Whether an adapter that `export` was given has not been kept yet.

        Args:
          name: name of the task.
        """
        ...

    def when_written(self, call: Callable[[], None]) -> None:
        """Calls a function whenever adapters have been kept.

        Args:
          call: the function; it is called in any thread.
        """
        ...

    def adapter(self, task: Task) -> Adapter:
        """An adapter that `export` was given. It may be called in any thread.

        Args:
          task: the task.
        """
        ...

    def save(self, copies: Mapping[str, TaskCopy], wait: bool = False) -> bool:
        """Writes a checkpoint.

        Args:
          copies: by key, the copies of the tasks that have begun and may go on.
          wait: whether to wait until an earlier checkpoint has been written.

        Returns:
          False if nothing is written this time: the earlier one is still being written, or could
          not be a short time ago, or the disk is full.
        """
        ...

    def retry(self) -> None:
        """Tries again to keep adapters that could not be kept, if that was some time ago."""
        ...

    def wait(self) -> None:
        """Waits until everything has been written, or could not be. Adapters that could not be
        written before are tried again."""
        ...

    def tell(self, event: Event) -> bool:
        """Writes down an event; returns whether it could be. It raises no error.

        Args:
          event: the event.
        """
        ...

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        """Writes down what a round held. It raises no error.

        Args:
          record: what it held.
          spent: where the time went since the round before, or since there was something to train
            again, in seconds by kind.
        """
        ...

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        """Shows results to whoever follows the training. It neither waits nor raises an error.

        Args:
          updates: the updates of a round, which are also told as events.
          evaluations: the held-out losses that have arrived with them.
          time: time of day in seconds since 1970.
        """
        ...


class MemoryStore:
    """Keeps adapters in memory, and nothing else: the `Store` of a training without a folder."""

    behind, has_news, problem = False, False, None

    def __init__(self):
        """Starts empty."""
        self._adapters: dict[str, Callable[[], Adapter]] = {}

    def read(self) -> Restored:
        return Restored([], Meter(), 0)

    def check(self, task: Task) -> None:
        pass

    def write(self, tasks: Rows, totals: Meter, rounds: int) -> None:
        pass

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        self._adapters[trained.task.name] = adapter

    def is_exporting(self, name: str) -> bool:
        return False

    def when_written(self, call: Callable[[], None]) -> None:
        pass

    def adapter(self, task: Task) -> Adapter:
        return self._adapters[task.name]()

    def save(self, copies: Mapping[str, TaskCopy], wait: bool = False) -> bool:
        return True

    def retry(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def tell(self, event: Event) -> bool:
        return True

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        pass

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        pass


# Times in events.jsonl are rounded to so many digits of a second.
_DIGITS = 3
# A line of rounds.jsonl has details at least so often, in seconds.
_DETAILS_EVERY = 60.0
# So many problems are told together.
_MOST_PROBLEMS = 5
# Keys of `ServerStore._problems`.
_TABLE, _CHECKPOINT = "table", "checkpoint"


class _Retry:
    """Tells when to try again after failures: one second after the first of several failures in a
    row, then each time twice as long, but at most a minute. Threads may share it.

    Attributes:
      has_failed: whether the last attempt has failed.
    """

    def __init__(self):
        self.has_failed = False
        self._seconds = 0.0
        self._at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next attempt may be made now."""
        return time.monotonic() >= self._at

    def note_failure(self) -> None:
        """Records a failed attempt."""
        self.has_failed = True
        self._seconds = min(max(_FIRST_WAIT, 2 * self._seconds), _LONGEST_WAIT)
        self._at = time.monotonic() + self._seconds

    def note_success(self) -> None:
        """Records a successful attempt."""
        self.has_failed = False
        self._seconds = self._at = 0.0


class ServerStore:
    """The `Store` of a server with a folder.

    The table of tasks is the truth: what is in it holds. Checkpoints have the arrays of the tasks
    that go on. Checkpoints and adapters are written by one thread, in the order in which they come.
    If they cannot be written, training goes on: adapters are tried again with the next checkpoint
    or by `retry`.
    """

    def __init__(
        self,
        directory: ServerDirectory,
        backbone: Backbone | PlacedBackbone,
        keep: int,
        trackers: RunTrackers,
        say: Callable[[str], None],
        events_bytes: int = LOG_BYTES,
    ):
        """Opens the files.

        Args:
          directory: the folder of the server.
          backbone: the backbone, whose name and fingerprint adapters record.
          keep: number of checkpoints to keep.
          trackers: the trackers, which `close` closes.
          say: function that prints one line; it is told what cannot be written or read, and how
            many warnings tasks have.
          events_bytes: size in bytes at which events.jsonl and rounds.jsonl are set aside.

        Raises:
          RunDirectoryError: the database is damaged, or a later version of jaxmux has written it.
        """
        self._directory, self._backbone, self._say = directory, backbone, say
        self._base = checkpoint_tensors(
            backbone.name_or_path, backbone.compute_dtype, backbone.config.backbone_format
        )
        self._keep = keep
        self._database = Database(directory.database)
        self._checkpoints = Checkpoints(directory.checkpoints, keep, say)
        self._events = LineLog(directory.events, say, events_bytes)
        self._rounds = LineLog(directory.rounds, say, events_bytes)
        # Whether a state was told since the last commit.
        self._has_told = False
        # When the last line of rounds.jsonl with details was written, by `time.monotonic`.
        self._detailed_at = -math.inf
        self._trackers = trackers
        self._writer = ThreadPoolExecutor(1)
        # The adapters that have not been written.
        self._adapters: dict[str, tuple[TrainedTask, Callable[[], Adapter]]] = {}
        # Whether some of these have been tried in vain, and when to try again.
        self._has_unwritten, self._adapters_retry = False, _Retry()
        # The number of the last checkpoint, and how many could be written.
        self._number = self._count = 0
        # The checkpoints that the table does not know yet, which the writer adds.
        self._new: list[Checkpoint] = []
        self._last: Future[None] | None = None
        # Whether the last checkpoint could not be written, and when to write another one.
        self._checkpoint_retry = _Retry()
        # By kind, why the last thing of it could not be written, without and with its name.
        self._problems: dict[str, tuple[str, str]] = {}
        self._written: Callable[[], None] = lambda: None

    def read(self) -> Restored:
        """What an earlier server has kept in the folder. It is called once, before any other
        method.

        Raises:
          RunDirectoryError: the database or all checkpoints are damaged, or missing.
          OSError: the database cannot be read.
        """
        rows, server = self._database.read()
        if server is None and self._checkpoints.numbers:
            what = "it is missing, but its checkpoints are not"
            raise unusable(self._directory.database, what)
        self._count = server["checkpoints"] if server else 0
        going = {row["key"]: row for row in rows if row["state"] not in ENDED}
        named = [row["checkpoint"] for row in going.values() if row["checkpoint"] is not None]
        # While fewer checkpoints were written than are kept, none has been deleted, so tasks may
        # begin anew instead.
        may_begin_anew = not named or self._count < self._keep
        found = self._checkpoints.newest(
            lambda record: {key: None for key in record["tasks"] if key in going},
            beginning=may_begin_anew,
        )
        if not (found or may_begin_anew):
            what = f"checkpoint {max(named)} is missing, with which tasks go on"
            raise unusable(self._directory.checkpoints, what)
        self._number = max([0, *self._checkpoints.numbers, *named])
        tasks = [self._task(row, found) for row in rows]
        for task in tasks:
            if not task.ended:
                self._trackers.register(task.name, task.history[0].time)
        if server is None:
            return Restored(tasks, Meter(), 0)
        totals = Meter.of(server)
        # Remove lines that were written after the last commit: their events will happen again.
        self._events.cut(server["events_bytes"])
        self._rounds.cut(server["rounds_bytes"])
        # A file that was set aside since then would otherwise be cut to another one's length.
        with suppress(OSError):
            self._write(Rows(), totals, server["rounds"])
        return Restored(tasks, totals, server["rounds"])

    def _task(self, row: Mapping[str, Any], found: Found | None) -> LiveTask:
        """The task of a row, with its copy in the checkpoint that was found."""
        try:
            return LiveTask.of(row, self._copy(row, found))
        except (ValueError, KeyError, TypeError) as e:
            what = f"damaged (the row of task {row['name']!r}: {e})"
            raise unusable(self._directory.database, what) from None

    def _copy(self, row: Mapping[str, Any], found: Found | None) -> TaskCopy | None:
        """The copy of a task that goes on, if it is in the checkpoint that was found."""
        key = row["key"]
        if row["state"] in ENDED:
            return None
        if found and key in found.record["tasks"]:
            progress = TaskProgress.from_json(found.record["tasks"][key]["progress"])
            arrays = found.arrays[key]
            return TaskCopy(progress, lambda: arrays)
        if row["checkpoint"] is not None:
            self._say(f"task {row['name']!r}: no intact checkpoint has it, so it begins anew")
        return None

    @property
    def behind(self) -> bool:
        return self._checkpoint_retry.has_failed

    @property
    def has_news(self) -> bool:
        return bool(self._new)

    @property
    def problem(self) -> str | None:
        texts = [text for _, text in self._problems.values()]
        if (more := len(texts) - _MOST_PROBLEMS) > 0:
            texts[_MOST_PROBLEMS:] = [f"and {more} more"]
        return "; ".join(texts) or None

    def check(self, task: Task) -> None:
        try:
            same = from_json(json.loads(json.dumps(to_object(task)))) == task
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise TaskError(
                f"task {task.name!r}: a server that is started again could not read it; neither it "
                "nor its adapter, optimizer or data may be of a subclass"
            )

    def write(self, tasks: Rows, totals: Meter, rounds: int) -> None:
        try:
            if self._has_told:
                # Otherwise the table might know of an event that is lost with the power.
                self._events.sync()
            self._write(tasks, totals, rounds)
        except OSError as e:
            what = Path(e.filename or self._directory.database).name
            self._note(_TABLE, what, f"cannot be written ({e.strerror})")
            raise
        self._problems.pop(_TABLE, None)
        self._has_told = False
        for row in tasks.new:
            self._trackers.register(row["name"], row["history"][0]["time"])
        # The commit covers every event, so the files may be set aside now.
        if any([log.set_aside_if_large() for log in (self._events, self._rounds)]):
            with suppress(OSError):
                self._write(Rows(), totals, rounds)

    def _write(self, tasks: Rows, totals: Meter, rounds: int) -> None:
        """Commits rows, with the lengths of the logs and the checkpoints that are new."""
        checkpoints = list(self._new)
        server = {"rounds": rounds, "checkpoints": self._count, **vars(totals)}
        server |= {"events_bytes": self._events.size, "rounds_bytes": self._rounds.size}
        last = checkpoints[-1] if checkpoints else None
        self._database.write(tasks, server, last)
        del self._new[: len(checkpoints)]

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        self._adapters[trained.task.name] = trained, adapter
        self._writer.submit(self._write_adapters)

    def is_exporting(self, name: str) -> bool:
        return name in self._adapters

    def when_written(self, call: Callable[[], None]) -> None:
        self._written = call

    def adapter(self, task: Task) -> Adapter:
        if (waiting := self._adapters.get(task.name)) is not None:
            return waiting[1]()
        folder = self._directory.adapter(task.name)
        return import_adapter(folder, self._backbone.config, base=self._base)[1]

    def save(self, copies: Mapping[str, TaskCopy], wait: bool = False) -> bool:
        is_ready = not self._last or self._last.done()
        if not (wait or is_ready and self._checkpoint_retry.is_due):
            # The disk is slower than training, or full: a later call saves more.
            return False
        self._number += 1
        self._last = self._writer.submit(self._write_checkpoint, self._number, copies)
        return True

    def retry(self) -> None:
        if self._has_unwritten and self._adapters_retry.is_due:
            self._has_unwritten = False
            self._writer.submit(self._write_adapters)

    def wait(self) -> None:
        self._writer.submit(self._write_adapters).result()

    def tell(self, event: Event) -> bool:
        fields = {"time": round(event.time, _DIGITS), "task": event.task, "kind": event.kind}
        is_written = self._events.append(fields | event.fields)
        self._has_told |= event.kind == "state"
        if event.kind == "warning":
            count = len(event.fields["warnings"])
            it = "it" if count == 1 else "them"
            self._say(f"{event.task}: {numbered(count, 'warning')}; its status tells {it}")
        return is_written

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        # Tasks come and go, so what microbatches hold is told now and then in any case.
        now = time.monotonic()
        is_detailed = has_details(record.index) or now - self._detailed_at > _DETAILS_EVERY
        if is_detailed:
            self._detailed_at = now
        line = round_line(record, spent, devices_bytes(), host_bytes(), is_detailed)
        self._rounds.append({**line, "time": round(time.time(), 3)})

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        for results in (updates, evaluations):
            lines = [{**as_line(result), "time": time} for result in results]
            self._trackers.log(lines, held_out=results is evaluations)

    def close(self) -> None:
        """Waits until everything is on disk, and closes the files."""
        self._writer.shutdown()
        self._checkpoints.close()
        self._database.close()
        self._events.close()
        self._rounds.close()
        self._trackers.close(finished=False)

    def _note(self, kind: str, what: str, problem: str) -> None:
        """Says why something cannot be written, unless that was said of the last of its kind."""
        before, _ = self._problems.get(kind, (None, None))
        self._problems[kind] = problem, f"{what}: {problem}"
        if problem != before:
            self._say(f"{what}: {problem}; training goes on")

    def _write_adapters(self) -> None:
        """Writes the adapters that have not been written."""
        before = len(self._adapters)
        for waiting in list(self._adapters.values()):
            trained, adapter = waiting
            task = trained.task
            what, folder = f"adapter {task.name}", self._directory.adapter(task.name)
            try:
                export_adapter(
                    folder,
                    adapter(),
                    task.adapter,
                    self._backbone.config,
                    self._backbone.name_or_path,
                    base_fingerprint=self._backbone.fingerprint,
                    base=self._base,
                    notes=notes_of_task(trained),
                    rendering=trained.rendering,
                )
                for parent in (folder.parent, self._directory.path):
                    sync(parent)
            except Exception as e:  # of the disk, of the devices, or of what the task holds
                self._note(what, what, f"cannot be written yet ({_why(e)})")
                continue
            self._problems.pop(what, None)
            del self._adapters[task.name]
        if self._adapters:
            self._adapters_retry.note_failure()
        else:
            self._adapters_retry.note_success()
        self._has_unwritten = bool(self._adapters)
        if len(self._adapters) < before:
            self._written()

    def _write_checkpoint(self, number: int, copies: Mapping[str, TaskCopy]) -> None:
        self._write_adapters()
        try:
            arrays = {key: copy.arrays() for key, copy in copies.items()}
            tasks = {key: {"progress": copy.progress.to_json()} for key, copy in copies.items()}
            self._refuse_too_large(sum(x.nbytes for each in arrays.values() for x in each.values()))
            self._checkpoints.save(number, {"tasks": tasks}, arrays)
            self._checkpoints.wait()
        except Exception as e:  # of the disk, of the devices, or of what the tasks hold
            self._checkpoint_retry.note_failure()
            self._note(_CHECKPOINT, f"checkpoint {number}", f"cannot be written ({_why(e)})")
            return
        self._checkpoint_retry.note_success()
        self._problems.pop(_CHECKPOINT, None)
        self._count += 1
        self._new.append(Checkpoint(number, list(copies)))

    def _refuse_too_large(self, needed: int) -> None:
        """OSError if the disk has no room for arrays of so many bytes. Otherwise it would be full
        until writing them fails, also for commands and adapters."""
        if shutil.disk_usage(self._directory.checkpoints).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why(error: Exception) -> str:
    """Why something could not be written, in the same words whichever file it was."""
    text = getattr(error, "strerror", None) or first_line(error)
    full = os.strerror(errno.ENOSPC)
    return full if full in text else text
