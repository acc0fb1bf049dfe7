"""Turns the files of a watched directory into commands, and the answers into status files.

The files say what tenants want, and every poll compares this with the statuses of the server's
tasks. Changes that come while the directory is not watched are therefore not lost.
"""

import dataclasses
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import write_atomically
from jaxmux.errors import first_line, without_task
from jaxmux.specifications.limits import TenantLimits
from jaxmux.specifications.schema import (
    WatchedSpecification,
    refused_change,
    registered_task,
    watched_specification,
)
from jaxmux.tasks import TaskError

from .. import LiveTraining, TaskStatus
from ..task import ENDED, PAUSED
from .accepted import AcceptedTasks, Intake, TryLater, tenant_of
from .directory import Place, Scan, Signature, WatchedDirectory
from .status import Shown, StatusFiles, places_in_queue


@dataclasses.dataclass
class WatchedTask:
    """The state of a specification.

    Attributes:
      task: the task's name in the server.
      seen: signature of the specification in the last poll; None if it was missing.
      missing: number of polls in a row in which it was missing.
      changes: number of polls in a row in which it, or a file that it names, had changed.
      read: its signature when it was read; None if it has not been read.
      wanted: its content; None if it is refused.
      files: the files that it names, with their signatures in the last poll.
      refused: `files` at the time when they were refused.
      retry_at: time until which nothing is tried again.
      resume_at: time until which a task that the server has paused is not resumed.
      error: why the specification, or a change of it, is refused, or what it waits for.
      waits: whether it is not refused but waits.
      commands: the commands that have been given and not answered yet.
    """

    task: str
    seen: Signature | None = None
    missing: int = 0
    changes: int = 0
    read: Signature | None = None
    wanted: WatchedSpecification | None = None
    files: Mapping[str, Signature | None] | None = None
    refused: Mapping[str, Signature | None] | None = None
    retry_at: float = 0.0
    resume_at: float = 0.0
    error: str | None = None
    waits: bool = False
    commands: list[tuple[str, Future[None]]] = dataclasses.field(default_factory=list)


# At most this many lines about specifications are printed per minute; tenants can cause any number.
_LINES_A_MINUTE = 10
# A problem with a folder is reported again if it was gone for this number of seconds.
_SECONDS_GONE = 60


class WatchLines:
    """Prints problems with files, but not too often. Only one thread may use it."""

    def __init__(self, directory: Path, say: Callable[[str], None]):
        self._directory, self._say = directory, say
        self._count, self._since = 0, float("-inf")
        # The problems of tenants' folders, and the time at which each was present last.
        self._seen: dict[tuple[str, str], float] = {}

    def say_refused(self, place: Place, error: str, waits: bool) -> None:
        """Prints why a specification is refused, or what it waits for, with the `error` of its
        status file."""
        now = time.monotonic()
        if now - self._since > 60:
            self._count, self._since = 0, now
        self._count += 1
        if self._count <= _LINES_A_MINUTE:
            # `error` already begins with the name of the file.
            error = without_task(error.removeprefix(f"{place.name}.json: "), place.name)
            self._say(f"{place}: {'waits' if waits else 'refused'}: {error}")
        elif self._count == _LINES_A_MINUTE + 1:
            self._say("more specifications are refused or wait; their status files tell why")

    def say_problems(self, problems: Mapping[str, str]) -> None:
        """Prints the problems that have not been present for some time. `problems` are by tenant;
        "" means the directory."""
        now = time.monotonic()
        self._seen = {watched: at for watched, at in self._seen.items() if now - at < _SECONDS_GONE}
        for name, problem in problems.items():
            if (name, problem) not in self._seen:
                self._say(f"{self._directory}{name and '/'}{name}: {problem}")
            self._seen[name, problem] = now


_log = logging.getLogger("jaxmux")

# A file that is missing in this number of polls counts as deleted. Some editors move a file away
# and write it again, so it is missing for a moment.
_POLLS_OF_DELETION = 2
# A tenant is told of a file that has changed in this number of polls in a row.
_POLLS_OF_CHANGE = 10
# A poll accepts tasks for at most this number of seconds.
_SECONDS_A_POLL = 0.5
_SECONDS_TO_RETRY = 10.0
_SECONDS_TO_RESUME = 60.0
# At most this fraction of a core is spent on polls.
_SHARE = 0.1
# The file in the server's folder that lists the refused specifications; the most entries in it, and
# the most characters of an error.
REFUSED, _MOST_REFUSED, _LONGEST_ERROR = "refused.json", 256, 2000


class DirectoryWatcher:
    """Watches a directory for a server. One thread calls `run`, or calls `poll` again and again."""

    def __init__(
        self,
        directory: WatchedDirectory,
        live: LiveTraining,
        folder: Path,
        limits: TenantLimits,
        say: Callable[[str], None],
        every: float = 1.0,
    ):
        """Goes on with the tasks that an earlier server in the same folder has accepted.

        Args:
          folder: the folder of the server.
          limits: the most that tenants may ask for.
          say: prints one line.
          every: seconds from one poll to the next, and from one status of a task to the next.
        """
        self._directory, self._live, self._limits = directory, live, limits
        self._lines, self._every = WatchLines(directory.path, say), every
        self._status_files = StatusFiles(directory, folder / "adapters", every)
        origins = live.origins()
        ended = {status.name for status in live.statuses() if status.state in ENDED}
        self._accepted = AcceptedTasks(folder, origins, origins.keys() - ended)
        self._watched = {_place_of(name): WatchedTask(name) for name in origins}
        # The server remembers tasks of the directory, because a forgotten task would look like a
        # new one.
        live.know_while(lambda name: name in self._accepted and _place_of(name) in self._watched)
        self._intake = Intake(directory, self._accepted, limits)
        self._stopped = threading.Event()
        self._folder = folder
        self._refused: dict[str, Any] | None = None
        # The specifications that were not read in the last poll because there are too many.
        self._ignored: dict[Place, str] = {}

    def run(self) -> None:
        """Polls until `stop` is called."""
        failed = None
        while not self._stopped.is_set():
            # Thread time leaves out waiting for a disk, which takes no processor.
            began = time.thread_time()
            try:
                self.poll()
                failed = None
            except OSError as e:
                self._lines.say_problems({"": f"cannot be read ({e.strerror}); tasks go on"})
            except Exception as e:
                # A server that has failed takes no more commands, and soon calls `stop`.
                if self._stopped.wait(self._every):
                    return
                if str(e) != failed:
                    _log.exception("a look at the watched directory failed; tasks go on")
                failed = str(e)
            seconds = time.thread_time() - began
            self._stopped.wait(max(self._every, seconds / _SHARE))

    def stop(self) -> None:
        """Lets `run` return after its present poll."""
        self._stopped.set()

    def poll(self) -> None:
        """Reads all files once. Raises OSError if the directory cannot be read, in which case
        nothing has been done, and RuntimeError if the server takes no more commands."""
        scan = self._directory.scan(self._watched.keys(), self._ignored.keys())
        self._lines.say_problems(scan.problems)
        for place in scan.files:
            if place not in self._watched:
                self._watched[place] = WatchedTask(place.task)
        # Answers come first, so that the statuses include every answered command.
        waiting = [(place, watched) for place, watched in self._watched.items() if watched.commands]
        unanswered = {place for place, watched in waiting if not self._answered(place, watched)}
        statuses = self._live.statuses()
        by_name = {status.name: status for status in statuses}
        for name in self._accepted:
            place = _place_of(name)
            if name not in by_name and place not in unanswered:
                # The server has forgotten the task, because it was no longer needed.
                self._accepted.forget(name)
                if place in self._watched:
                    # A new file has appeared at the same time.
                    self._watched[place] = WatchedTask(name)
        self._accepted.delete_copies(by_name)
        new: list[Place] = []
        for place, watched in list(self._watched.items()):
            if place in unanswered:
                continue
            signature = scan.files.get(place)
            if signature is None:
                if place.tenant not in scan.unread:
                    self._miss(place, watched, by_name.get(watched.task))
            elif self._is_new(place, watched, signature, by_name.get(watched.task)):
                new.append(place)
            watched.seen = signature
        self._take_in(new, by_name)
        self._note_ignored(scan)
        places = places_in_queue(statuses)
        shown = (
            (place, self._shown(watched, by_name, places.get(watched.task)))
            for place, watched in self._watched.items()
        )
        ignored = ((place, Shown(place.task, error=why)) for place, why in self._ignored.items())
        self._status_files.write((*shown, *ignored))
        self._lines.say_problems(self._status_files.problems)
        self._record_refused()

    def _is_new(
        self, place: Place, watched: WatchedTask, signature: Signature, status: TaskStatus | None
    ) -> bool:
        """Reads a specification that has changed, and gives its commands. Returns whether its task
        is to be accepted."""
        watched.missing = 0
        if signature != watched.read:
            if signature != watched.seen:
                # It may still be being written. It is read in a later poll, even if it is then as
                # before.
                watched.read = None
                self._note_change(place, watched, "the file")
                return False
            watched.read, watched.refused, watched.retry_at, watched.changes = (
                signature,
                None,
                0.0,
                0,
            )
            watched.wanted = self._read(place, watched)
            if watched.wanted and watched.task in self._accepted:
                self._check_change(place, watched, status)
        if watched.wanted is None:
            return False
        if watched.task not in self._accepted:
            return time.monotonic() >= watched.retry_at
        if status and status.state not in ENDED:
            self._command(place, watched, status)
        elif watched.error and watched.waits:
            # The task has ended while a command for it waited.
            watched.error = None
            self._check_change(place, watched, status)
        return False

    def _read(self, place: Place, watched: WatchedTask) -> WatchedSpecification | None:
        try:
            self._intake.check_name(place)
            data = self._directory.read(place)
            wanted = watched_specification(data, place.name, self._limits)
        except TaskError as e:
            self._refuse(place, watched, str(e))
            return None
        except Exception as e:
            # Nothing in one tenant's file may stop the others.
            _log.exception("%s cannot be read", place)
            self._refuse(place, watched, f"cannot be read: {first_line(e)}")
            return None
        watched.error = None
        return wanted

    def _check_change(self, place: Place, watched: WatchedTask, status: TaskStatus | None) -> None:
        """Refuses a change that is not permitted; then no part of the specification takes
        effect."""
        new = watched.wanted.task
        old = registered_task(self._accepted[watched.task], new, status.steps if status else None)
        problem = refused_change(old, new)
        has_ended = status and status.state in ENDED
        if has_ended and (old != new or came_too_late(watched.wanted, status)):
            problem = f"has ended ({status.state}); give the file and the task another name"
        if problem:
            watched.wanted = None
            self._refuse(place, watched, f"{place.name}.json: {problem}")

    def _command(self, place: Place, watched: WatchedTask, status: TaskStatus) -> None:
        """Gives the commands that bring a task to the state that its specification wants."""
        wanted, name = watched.wanted, watched.task
        if time.monotonic() < watched.retry_at:
            return
        if wanted.priority != status.priority:
            watched.commands.append(("priority", self._live.set_priority(name, wanted.priority)))
        if wanted.paused and status.state != PAUSED:
            watched.commands.append(("paused", self._live.pause(name)))
        if not wanted.paused and status.state == PAUSED and time.monotonic() >= watched.resume_at:
            # The server itself has paused a task if there is a reason, and the reason may last.
            watched.resume_at = time.monotonic() + (_SECONDS_TO_RESUME if status.reason else 0)
            watched.commands.append(("paused", self._live.resume(name)))
        # The number of steps may be unknown until the data have been read.
        steps = wanted.task.steps
        if None in (steps, status.steps):
            return
        if steps != status.steps:
            watched.commands.append(("steps", self._live.extend(name, steps)))

    def _answered(self, place: Place, watched: WatchedTask) -> bool:
        """Notes the answers to commands; returns whether all have been answered."""
        if any(not future.done() for _, future in watched.commands):
            return False
        failed = [(what, e) for what, future in watched.commands if (e := future.exception())]
        if any(isinstance(error, RuntimeError) for _, error in failed):
            # The server has ended. The next server knows whether the command was written to the
            # table.
            return False
        commands, watched.commands = watched.commands, []
        if commands and not failed and (watched.wanted or watched.missing):
            watched.error = None
        for what, error in failed[:1]:
            if what == "register":
                self._accepted.forget(watched.task)
            if isinstance(error, OSError):
                watched.retry_at = time.monotonic() + _SECONDS_TO_RETRY
                why = f"{what} cannot be kept yet ({error.strerror})"
                self._refuse(place, watched, why, waits=True)
            elif isinstance(error, TaskError):
                status = self._status(watched.task)
                if what == "cancel":
                    # The task has ended, which its status shows once the end is in the table; the
                    # command was legal.
                    watched.retry_at = time.monotonic() + _SECONDS_TO_RETRY
                elif not (status and status.state in ENDED):
                    watched.wanted = None
                    self._refuse(place, watched, str(error))
                elif watched.wanted:
                    # The task has ended meanwhile, so the change came too late.
                    self._check_change(place, watched, status)
        return True

    def _status(self, name: str) -> TaskStatus | None:
        """The present status of a task in the server; None if the server does not know it."""
        with suppress(TaskError):
            return self._live.status(name)
        return None

    def _miss(self, place: Place, watched: WatchedTask, status: TaskStatus | None) -> None:
        """Handles a specification that is missing."""
        watched.missing += 1
        if watched.missing < _POLLS_OF_DELETION:
            return
        goes_on = watched.task in self._accepted and status and status.state not in ENDED
        if watched.missing == _POLLS_OF_DELETION or not goes_on:
            watched.read = watched.wanted = watched.error = None
            watched.retry_at = 0.0
        if watched.task not in self._accepted:
            self._status_files.remove(place)
            del self._watched[place]
        elif goes_on:
            if time.monotonic() >= watched.retry_at:
                watched.commands.append(("cancel", self._live.cancel(watched.task)))
        elif watched.missing > _POLLS_OF_DELETION and self._status_files.tells(place, status):
            self._status_files.forget(place)
            del self._watched[place]

    def _note_ignored(self, scan: Scan) -> None:
        """Notes the specifications that are not read, for their status files."""
        for place in self._ignored.keys() - scan.ignored.keys() - self._watched.keys():
            if place.tenant not in scan.unread:
                self._status_files.remove(place)
        self._ignored = scan.ignored

    def _take_in(self, places: list[Place], by_name: Mapping[str, TaskStatus]) -> None:
        """Accepts tasks; tenants take turns."""
        if not places:
            return
        end = time.monotonic() + _SECONDS_A_POLL
        unfinished = Counter(
            tenant_of(name)
            for name in self._accepted
            if name not in by_name or by_name[name].state not in ENDED
        )
        for place in self._intake.in_turns(places):
            watched = self._watched[place]
            files = self._directory.files(place.tenant, watched.wanted.task)
            before, watched.files = watched.files, files
            stable = files == before
            if not stable:
                watched.refused = None
                changed = (p for p in files if before is None or files[p] != before.get(p))
                self._note_change(place, watched, next(changed, "data"))
                continue
            watched.changes = 0
            # Refused files are not read again until they change.
            if files == watched.refused:
                continue
            try:
                task = self._intake.take(
                    place, watched.wanted.task, files, unfinished[place.tenant]
                )
            except TryLater as e:
                watched.retry_at = time.monotonic() + _SECONDS_TO_RETRY
                self._refuse(place, watched, str(e), waits=True)
            except TaskError as e:
                watched.refused = files
                self._refuse(place, watched, str(e))
            except OSError as e:
                watched.retry_at = time.monotonic() + _SECONDS_TO_RETRY
                why = f"its files cannot be copied yet ({e.strerror or e})"
                self._refuse(place, watched, why, waits=True)
            else:
                watched.error = watched.refused = None
                unfinished[place.tenant] += 1
                origin = watched.wanted.task
                registered = self._live.register(task, watched.wanted.priority, origin=origin)
                watched.commands.append(("register", registered))
                if watched.wanted.paused:
                    watched.commands.append(("paused", self._live.pause(task.name)))
            if time.monotonic() > end:
                return

    def _shown(
        self, watched: WatchedTask, by_name: Mapping[str, TaskStatus], place: int | None
    ) -> Shown:
        """The content of the status file of a specification."""
        # A task of this name may have been registered in another way than through this directory.
        status = by_name.get(watched.task) if watched.task in self._accepted else None
        copies = self._accepted.copies(watched.task)
        place = place if status else None
        return Shown(watched.task, status, place, None, watched.error, copies, watched.waits)

    def _record_refused(self) -> None:
        """Writes which specifications are refused or wait, for the page of the server."""
        refused = [
            (p, watched.error, watched.waits)
            for p, watched in self._watched.items()
            if watched.error
        ]
        refused += [(place, why, False) for place, why in self._ignored.items()]
        refused.sort(key=itemgetter(0))
        rows = [
            {"task": place.task, "error": error[:_LONGEST_ERROR], "waits": waits}
            for place, error, waits in refused[:_MOST_REFUSED]
        ]
        record = {"count": len(refused), "refused": rows}
        if record != self._refused:
            try:
                write_atomically(self._folder / REFUSED, json.dumps(record, indent=2) + "\n")
                self._refused = record
            except OSError as e:
                # The status files have the same information, and the next poll tries again.
                _log.debug("%s cannot be written (%s)", REFUSED, e.strerror)

    def _note_change(self, place: Place, watched: WatchedTask, what: str) -> None:
        """Tells a tenant if a file changes all the time."""
        watched.changes += 1
        if watched.changes >= _POLLS_OF_CHANGE:
            why = f"{what} still changes; it is read when two looks find it the same"
            self._refuse(place, watched, why, waits=True)

    def _refuse(self, place: Place, watched: WatchedTask, error: str, waits: bool = False) -> None:
        if error != watched.error:
            watched.error, watched.waits = error, waits
            self._lines.say_refused(place, error, waits)


def _place_of(name: str) -> Place:
    return Place(*name.split(".", 1))


def came_too_late(wanted: WatchedSpecification, status: TaskStatus) -> bool:
    """Whether the specification wants another priority, or another paused state, than its task had
    when it ended."""
    before = status.history[-2]
    # If the server paused the task itself, there is a reason.
    by_server = before.state == PAUSED and before.reason is not None
    paused = wanted.paused if by_server else before.state == PAUSED
    return (wanted.priority, wanted.paused) != (status.priority, paused)
