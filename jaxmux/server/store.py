"""Keeps everything of a live training that must survive it: in memory, or in the folder of a
server."""

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

# A reader that is this many events behind loses the oldest ones.
MOST_UNREAD = 100_000
# Seconds until a failed write is tried again: after the first failure, and at most.
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0


class Event(NamedTuple):
    """An event in the life of a task.

    Attributes:
      number: number of the event, from 0. A reader that finds a gap in the numbers has lost events
        because it read too slowly.
      time: time of the event, in seconds since 1970.
      task: name of the task.
      kind: "state" (the task's state or its reason has changed), "warning" (something about the
        task is legal but suspicious), "update" (a step of the task has been trained) or
        "evaluation" (its held-out loss has been measured).
      fields: the content of the event. For "state": `state`, `reason`, `priority`, `steps` (None
        until the data have been read), `adapter` (its kind), `rank` (None if the kind has none) and
        `best_metric`. For "warning": `warnings`, texts that have not been reported before. For the
        other kinds: the fields of `TaskUpdate` or `TaskEvaluation` without the name of the
        task.
    """

    number: int
    time: float
    task: str
    kind: str
    fields: dict[str, Any]


class EventStream:
    """Passes events on to readers. Every thread may call all methods."""

    def __init__(self):
        self._changed = threading.Condition()
        # The unread events of each reader, by identity. A reader to which no reference is left
        # vanishes.
        self._readers: WeakValueDictionary[int, deque[Event]] = WeakValueDictionary()
        self._number = 0
        self._closed = False

    def add(self, time: float, task: str, kind: str, fields: dict[str, Any]) -> Event:
        """Passes an event on to all readers, and returns it. The arguments are those of `Event`."""
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
        """Ends each iteration after its remaining events."""
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
    """The state of an earlier training: its tasks in the order of registration, what all tasks
    together had used, and the number of rounds that had been trained."""

    tasks: list[LiveTask]
    totals: Meter
    rounds: int


class Store(Protocol):
    """Keeps tasks, their adapters and their usage. The thread that owns the engine calls all
    methods but `adapter`. No method waits for the devices."""

    @property
    def behind(self) -> bool:
        """Whether the last checkpoint given to `save` could not be written."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether the next `write` would write something even without rows."""
        ...

    @property
    def problem(self) -> str | None:
        """Why something that was given could not be written; None if everything has been
        written."""
        ...

    def read(self) -> Restored:
        """The state of an earlier training. Called once, before any other method."""
        ...

    def check(self, task: Task) -> None:
        """Raises TaskError if a task would not be read back as it is."""
        ...

    def write(self, tasks: Rows, totals: Meter, rounds: int) -> None:
        """Writes rows of tasks: all of them, or none if it raises OSError. `totals` is what all
        tasks together have used, `rounds` the number of rounds that have been trained."""
        ...

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        """Keeps the adapter of a task that has succeeded, before anything that is saved later.
        `adapter` waits for the adapter and returns it."""
        ...

    def is_exporting(self, name: str) -> bool:
        """Whether an adapter of this task was given to `export` and has not been kept yet."""
        ...

    def when_written(self, call: Callable[[], None]) -> None:
        """Calls `call`, in any thread, whenever adapters have been kept."""
        ...

    def adapter(self, task: Task) -> Adapter:
        """An adapter that was given to `export`. Every thread may call this method."""
        ...

    def save(self, copies: Mapping[str, TaskCopy], wait: bool = False) -> bool:
        """Writes a checkpoint of `copies`, the tasks that have begun and may go on, by key. With
        `wait`, waits until the previous checkpoint has been written. Returns False if nothing is
        written this time: the previous checkpoint is still being written, or failed a short time
        ago, or the disk is full."""
        ...

    def retry(self) -> None:
        """Tries again to write adapters that could not be written, if the last attempt was some
        time ago."""
        ...

    def wait(self) -> None:
        """Waits until everything has been written, or has failed. Tries again to write adapters
        that could not be written before."""
        ...

    def tell(self, event: Event) -> bool:
        """Records an event; returns whether this succeeded. Raises no error."""
        ...

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        """Records the contents of a round. `spent` has the seconds by activity since the previous
        round, or since there was something to train again. Raises no error."""
        ...

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        """Shows results to the trackers: the updates of a round, which are also recorded as events,
        and the held-out losses that have arrived with them. `time` is the time of day in seconds
        since 1970. Neither waits nor raises an error."""
        ...


class MemoryStore:
    """The `Store` of a training without a folder: keeps adapters in memory, and nothing else."""

    behind, has_news, problem = False, False, None

    def __init__(self):
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


# Times in events.jsonl are rounded to this number of digits of a second.
_DIGITS = 3
# A line of rounds.jsonl has details at least every this many seconds.
_DETAILS_EVERY = 60.0
# At most this many problems are reported together.
_MOST_PROBLEMS = 5
# Keys of `ServerStore._problems`.
_TABLE, _CHECKPOINT = "table", "checkpoint"


class _Retry:
    """Decides when to try again after failures: one second after the first of several failures in a
    row, then each time twice as long, but at most a minute. Threads may share it. `has_failed` is
    True if the last attempt has failed."""

    def __init__(self):
        self.has_failed = False
        self._seconds = 0.0
        self._at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether the next attempt may be made now."""
        return time.monotonic() >= self._at

    def note_failure(self) -> None:
        self.has_failed = True
        self._seconds = min(max(_FIRST_WAIT, 2 * self._seconds), _LONGEST_WAIT)
        self._at = time.monotonic() + self._seconds

    def note_success(self) -> None:
        self.has_failed = False
        self._seconds = self._at = 0.0


class ServerStore:
    """The `Store` of a server with a folder.

    The table of tasks is authoritative; checkpoints have the arrays of the tasks that go on. One
    thread writes checkpoints and adapters, in the order in which they come. If they cannot be
    written, training goes on; adapters are tried again with the next checkpoint or by `retry`.
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
          backbone: the backbone, whose name and fingerprint are recorded in adapters.
          keep: number of checkpoints to keep.
          trackers: the trackers, which `close` closes.
          say: prints one line. It is called for files that cannot be written or read, and with the
            number of a task's warnings.
          events_bytes: size in bytes at which events.jsonl and rounds.jsonl are set aside.

        Raises:
          RunDirectoryError: the database is damaged, or was written by a later version of jaxmux.
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
        # Whether a state was recorded in events.jsonl since the last commit.
        self._has_told = False
        # Time of the last line of rounds.jsonl with details, by `time.monotonic`.
        self._detailed_at = -math.inf
        self._trackers = trackers
        self._writer = ThreadPoolExecutor(1)
        # The adapters that have not been written.
        self._adapters: dict[str, tuple[TrainedTask, Callable[[], Adapter]]] = {}
        # Whether an attempt to write some of these has failed, and when to try again.
        self._has_unwritten, self._adapters_retry = False, _Retry()
        # The number of the last checkpoint, and how many checkpoints have been written.
        self._number = self._count = 0
        # The checkpoints that the writer has written and the table does not know yet.
        self._new: list[Checkpoint] = []
        self._last: Future[None] | None = None
        # Whether the last checkpoint could not be written, and when to write another one.
        self._checkpoint_retry = _Retry()
        # By kind of file, why the last one could not be written, without and with the file's name.
        self._problems: dict[str, tuple[str, str]] = {}
        self._written: Callable[[], None] = lambda: None

    def read(self) -> Restored:
        """The state that an earlier server has left in the folder. Called once, before any other
        method. Raises RunDirectoryError if the database or all checkpoints are damaged or missing,
        and OSError if the database cannot be read."""
        rows, server = self._database.read()
        if server is None and self._checkpoints.numbers:
            what = "it is missing, but its checkpoints are not"
            raise unusable(self._directory.database, what)
        self._count = server["checkpoints"] if server else 0
        going = {row["key"]: row for row in rows if row["state"] not in ENDED}
        named = [row["checkpoint"] for row in going.values() if row["checkpoint"] is not None]
        # If no more checkpoints were written than are kept, none has been deleted. Then tasks may
        # begin anew.
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
        # Record the new lengths. A file that was set aside since the commit would otherwise be cut
        # to the length of another file.
        with suppress(OSError):
            self._write(Rows(), totals, server["rounds"])
        return Restored(tasks, totals, server["rounds"])

    def _task(self, row: Mapping[str, Any], found: Found | None) -> LiveTask:
        """The task of a row, with its copy in the checkpoint `found`."""
        try:
            return LiveTask.of(row, self._copy(row, found))
        except (ValueError, KeyError, TypeError) as e:
            what = f"damaged (the row of task {row['name']!r}: {e})"
            raise unusable(self._directory.database, what) from None

    def _copy(self, row: Mapping[str, Any], found: Found | None) -> TaskCopy | None:
        """The copy of a task that goes on, if the checkpoint `found` has it."""
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
                "nor its adapter, objective, optimizer or data may be of a subclass"
            )

    def write(self, tasks: Rows, totals: Meter, rounds: int) -> None:
        try:
            if self._has_told:
                # Otherwise the table could know of an event that a power failure has removed.
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
        """Commits rows, with the lengths of the logs and the new checkpoints."""
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
            # The disk is slower than training, or full. A later call saves more.
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
        # Tasks come and go, so the content of microbatches is also recorded at regular times.
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
        """Reports why something cannot be written, unless the same reason was reported for the last
        one of its kind."""
        before, _ = self._problems.get(kind, (None, None))
        self._problems[kind] = problem, f"{what}: {problem}"
        if problem != before:
            self._say(f"{what}: {problem}; training goes on")

    def _write_adapters(self) -> None:
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
            except Exception as e:  # errors of the disk, of the devices, or of the task's contents
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
        except Exception as e:  # errors of the disk, of the devices, or of the tasks' contents
            self._checkpoint_retry.note_failure()
            self._note(_CHECKPOINT, f"checkpoint {number}", f"cannot be written ({_why(e)})")
            return
        self._checkpoint_retry.note_success()
        self._problems.pop(_CHECKPOINT, None)
        self._count += 1
        self._new.append(Checkpoint(number, list(copies)))

    def _refuse_too_large(self, needed: int) -> None:
        """Raises OSError if the disk has no room for arrays of `needed` bytes. Otherwise the disk
        would be full, also for commands and adapters, until writing the arrays fails."""
        if shutil.disk_usage(self._directory.checkpoints).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why(error: Exception) -> str:
    """The reason why something could not be written, in words that do not depend on the file."""
    text = getattr(error, "strerror", None) or first_line(error)
    full = os.strerror(errno.ENOSPC)
    return full if full in text else text
