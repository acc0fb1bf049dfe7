"""The data of tasks of a live training: read and tokenized in threads, and checked for changes
since the task was registered."""

import dataclasses
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from jaxmux.data import Source
from jaxmux.data.chat_templates import TemplateClock, template_file
from jaxmux.data.file_kinds import files_of, is_pattern
from jaxmux.data.hugging_face import is_saved_data_set
from jaxmux.data.sources import HUGGING_FACE_PREFIX
from jaxmux.engine import PreparedTask
from jaxmux.installation import resolve_path
from jaxmux.tasks import Task, TaskError


def file_identities(task: Task) -> dict[str, str]:
    """Identifies the files of a task's data without reading them: by path, a text of the file's
    size, the time of its last change and its inode.

    A pattern of names is identified by the names that match it, a link by the file to which it
    leads. The inode differs if another file with the same time has replaced a file. Missing files
    are left out, and so are data sets of the Hugging Face hub, which have no file of their own. A
    change in place that keeps the size is not noticed if the time stamps of the file system have
    not advanced since the previous change: for milliseconds, on some network disks for up to two
    seconds.
    """
    found = {}
    for path in _paths(task):
        try:
            stat = os.stat(path)
        except (OSError, ValueError):
            # Reading the data reports the problem with the path.
            continue
        found[path] = f"{stat.st_size} bytes, {stat.st_mtime_ns} ns, inode {stat.st_ino}"
    for path in map(_path_of, _sources(task)):
        if is_pattern(path):
            names = "\0".join(files_of(path)).encode(errors="surrogateescape")
            found[path] = f"files named {hashlib.sha256(names).hexdigest()[:16]}"
    return found


def read_unchanged(
    prepare: Callable[[Task], PreparedTask], task: Task, files: Mapping[str, str]
) -> PreparedTask:
    """Prepares a task with `prepare`, if its files are those that were registered and do not change
    meanwhile. `files` are the files at the registration, from `file_identities`; empty accepts any
    files. Raises TaskError if a file has changed; the message names it. `prepare` may raise other
    exceptions."""
    before = file_identities(task)
    for path, identity in before.items():
        if files.get(path, identity) != identity:
            raise TaskError(
                f"{path}: changed after the task was registered; register another task for the "
                "data as they are now"
            )
    try:
        return prepare(task)
    finally:
        # Reading may have failed because a file was being written; then report the change instead.
        after = file_identities(task)
        for path in sorted({*before, *after}):
            if before.get(path) != after.get(path):
                raise TaskError(
                    f"{path}: changed after the task was registered, while the data were read; "
                    "register another task, or resume this one if it is paused, when the file is "
                    "complete"
                )


def _paths(task: Task) -> Iterator[str]:
    """The paths of the local files with a task's training and held-out data."""
    for source in _sources(task):
        yield from _files_of(source)
        if template := template_file(source):
            yield template


def _sources(task: Task) -> list[Source]:
    return [*task.sources, *([task.eval_data] if task.eval_data else [])]


def _path_of(source: Source) -> str:
    return resolve_path(source.path)


def _files_of(source: Source) -> list[str]:
    path = _path_of(source)
    if not path.startswith(HUGGING_FACE_PREFIX):
        return files_of(path)
    folder = Path(path.removeprefix(HUGGING_FACE_PREFIX))
    try:
        if is_saved_data_set(folder):
            return sorted(str(file) for file in folder.rglob("*") if file.is_file())
    except OSError:
        # Reading the data reports the problem with the folder.
        pass
    return []


# Maximum number of readings at the same time, including slow ones and those of paused tasks.
MOST_READINGS = 32


@dataclasses.dataclass(eq=False)
class Reading:
    """The reading of one task's data. If the task is registered again, there is a new reading.

    Attributes:
      task: the task when the reading was requested.
      files: the task's files at its registration, from `file_identities`; empty if its data were
        read before.
      aside: whether no one waits for the data, because the task is paused.
      begins: False if the task has begun before.
      registered: time of the registration, in seconds since 1970. Chat templates that write the
        date use this time, in UTC, whenever the data are read.
    """

    task: Task
    files: Mapping[str, str]
    aside: bool = False
    begins: bool = True
    registered: float | None = None


class Prepared(NamedTuple):
    """The end of a preparation: the `reading` that `Preparation.add` returned, and the prepared
    task or the exception that ended its preparation."""

    reading: Reading
    result: PreparedTask | Exception


class Preparation:
    """Prepares tasks in the order in which they come, a few at the same time.

    A source of data may hang, and Python cannot end a thread. A slow preparation therefore no
    longer counts among the few, and the next task is prepared beside it. A preparation that takes
    too long is given up, and its task gets an error. The thread of a preparation that was given up
    or dropped no longer counts; it ends with its source or with the process, and its result is
    ignored.

    Initial adapters that take long keep all processors busy and need memory. They wait for their
    turn after the data have been read. A computation counts until it has ended, even if it was
    given up or dropped.
    """

    def __init__(
        self,
        prepare: Callable[[Task], PreparedTask],
        changed: Callable[[], None],
        at_once: int = 2,
        slow_seconds: float = 30.0,
        most_seconds: float = 600.0,
        begin: Callable[[PreparedTask], PreparedTask] = lambda prepared: prepared,
        begins_slowly: Callable[[PreparedTask], bool] = lambda prepared: False,
    ):
        """Starts without tasks.

        Args:
          prepare: prepares a task; it is called in several threads.
          changed: called, in another thread, when a preparation has ended.
          at_once: number of tasks whose data are read at the same time, and number of initial
            adapters that are computed at the same time.
          slow_seconds: seconds after which a reading no longer counts among `at_once`. There are at
            most `MOST_READINGS` readings in total, or `at_once` if that is more.
          most_seconds: longest time in seconds that a reading, or a computation, may take.
          begin: computes the initial adapter of a prepared task. It is called after `prepare`, for
            tasks that have not begun before.
          begins_slowly: whether `begin` takes long for a prepared task and has to wait for its
            turn.
        """
        self._begin, self._begins_slowly = begin, begins_slowly
        self._prepare, self._changed = prepare, changed
        self._at_once, self._most_readings = at_once, max(at_once, MOST_READINGS)
        self._slow_seconds, self._most_seconds = slow_seconds, most_seconds
        self._lock = threading.Lock()
        # The readings that wait to begin, in order, as the keys of a dict.
        self._waiting: dict[Reading, None] = {}
        # Start times, by the monotonic clock, of the readings that run.
        self._active: dict[Reading, float] = {}
        # Tasks whose data have been read and whose initial adapters wait to be computed, in order.
        self._read: dict[Reading, PreparedTask] = {}
        # Start times of the computations whose results are awaited, and the number of all
        # computations.
        self._computing: dict[Reading, float] = {}
        self._computations = 0
        self._ended: list[Prepared] = []
        self._closed = False

    def add(
        self,
        task: Task,
        files: Mapping[str, str],
        aside: bool = False,
        begins: bool = True,
        registered: float | None = None,
    ) -> Reading:
        """Prepares a task when its turn has come.

        Args:
          files: the task's files at its registration, from `file_identities`. If they have changed
            when they are read, the result is an error. Empty accepts any files.
          aside: whether the task is paused, as for `set_aside`.
          begins: False if the task has begun before.
          registered: time of the registration, in seconds since 1970; None means now.
        """
        reading = Reading(task, files, aside, begins, registered)
        with self._lock:
            self._waiting[reading] = None
            self._start_threads()
        return reading

    def drop(self, reading: Reading) -> None:
        """Drops a preparation whose result is not needed. If it waits for its turn, it never
        begins. Its place is free at once; the place of a computation is free when the computation
        has ended."""
        with self._lock:
            for readings in (self._waiting, self._active, self._read, self._computing):
                readings.pop(reading, None)
            self._ended = [end for end in self._ended if end.reading is not reading]
            self._start_threads()

    def set_aside(self, reading: Reading, aside: bool) -> None:
        """With `aside`, lets other preparations go before this one, because no one waits for it. If
        it has begun, it goes on, but its place is free at once; otherwise it begins when no other
        preparation waits. False takes this back."""
        with self._lock:
            reading.aside = aside
            self._start_threads()

    def take(self) -> list[Prepared]:
        """The preparations that have ended since the last call."""
        now = time.monotonic()
        with self._lock:
            for running, what in self._running():
                for reading, begun in list(running.items()):
                    if now >= begun + self._most_seconds:
                        del running[reading]
                        self._ended.append(Prepared(reading, self._too_slow(reading.task, what)))
            self._start_threads()
            ended, self._ended = self._ended, []
        return ended

    @property
    def waiting(self) -> list[Reading]:
        """Readings that wait to begin, in order, without those that are set aside."""
        with self._lock:
            return [reading for reading in self._waiting if not reading.aside]

    @property
    def waiting_to_begin(self) -> list[Reading]:
        """Tasks whose initial adapters wait to be computed, in order, without those that are set
        aside."""
        with self._lock:
            return [reading for reading in self._read if not reading.aside]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until `take` has to be called; None if nothing is being prepared."""
        with self._lock:
            ends = [
                begun + self._most_seconds
                for running, _ in self._running()
                for begun in running.values()
            ]
            if self._waiting:
                ends += [self._active[reading] + self._slow_seconds for reading in self._quick()]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def close(self) -> None:
        """Begins no further preparation. Those that have begun end with their sources or with the
        process."""
        with self._lock:
            self._closed = True

    def _running(self) -> list[tuple[dict[Reading, float], str]]:
        """The start times of what is running, each with the text for an error that it takes too
        long."""
        return [
            (self._active, "its data were not read"),
            (self._computing, "its initial adapter was not computed"),
        ]

    def _too_slow(self, task: Task, what: str) -> TaskError:
        return TaskError(f"task {task.name!r}: {what} within {self._most_seconds:g} s")

    def _quick(self) -> list[Reading]:
        """Readings that run and are not slow yet."""
        began = time.monotonic() - self._slow_seconds
        return [reading for reading, begun in self._active.items() if begun > began]

    def _start_threads(self) -> None:
        if self._closed:
            return
        while len(self._active) < self._most_readings and (reading := self._next()):
            del self._waiting[reading]
            self._active[reading] = time.monotonic()
            _start(self._read_data, reading)
        while self._read and self._computations < self._at_once:
            # Tasks that are set aside go last.
            reading = min(self._read, key=lambda reading: reading.aside)
            prepared = self._read.pop(reading)
            self._computing[reading] = time.monotonic()
            self._computations += 1
            _start(self._compute, reading, prepared)

    def _next(self) -> Reading | None:
        """The next reading to begin; None if none has a place."""
        quick = self._quick()
        if sum(not reading.aside for reading in quick) < self._at_once:
            for reading in self._waiting:
                if not reading.aside:
                    return reading
        # All readings that wait are set aside, or there is no place for others.
        return next(iter(self._waiting), None) if len(quick) < self._at_once else None

    def _read_data(self, reading: Reading) -> None:
        slowly = False
        try:
            prepare = self._prepare if reading.begins else self._prepare_again
            with TemplateClock(_utc(reading.registered)):
                result: PreparedTask | Exception = read_unchanged(
                    prepare, reading.task, reading.files
                )
            slowly = reading.begins and self._begins_slowly(result)
            if reading.begins and not slowly:
                result = self._begin(result)
        except Exception as e:
            result = e
        with self._lock:
            # The lock is held while threads start, so the reading is in `_active` unless it was
            # given up or dropped.
            if self._active.pop(reading, None) is None:
                return
            if slowly and not isinstance(result, Exception):
                self._read[reading] = result
            else:
                self._ended.append(Prepared(reading, result))
            self._start_threads()
        self._changed()

    def _prepare_again(self, task: Task) -> PreparedTask:
        """Prepares a task that has begun before; the adapter with which it began may no longer
        exist."""
        prepared = self._prepare(dataclasses.replace(task, resume_from=None))
        return dataclasses.replace(prepared, task=task)

    def _compute(self, reading: Reading, prepared: PreparedTask) -> None:
        try:
            result: PreparedTask | Exception = self._begin(prepared)
        except Exception as e:
            result = e
        with self._lock:
            self._computations -= 1
            if self._computing.pop(reading, None) is not None:
                self._ended.append(Prepared(reading, result))
            self._start_threads()
        self._changed()


def _utc(seconds: float | None) -> datetime | None:
    return seconds and datetime.fromtimestamp(seconds, UTC).replace(microsecond=0, tzinfo=None)


def _start(target: Callable[..., None], reading: Reading, *more: PreparedTask) -> None:
    name = f"prepare {reading.task.name}"
    threading.Thread(target=target, args=(reading, *more), name=name, daemon=True).start()
