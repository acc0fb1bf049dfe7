"""The content of status files, which tell tenants about their tasks."""

import dataclasses
import errno
import json
import re
import time
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.peft.peft_folder import is_adapter_folder
from jaxmux.runs.metrics import finite_or_none

from .. import TaskStatus
from ..task import QUEUED, TRAINED
from .directory import Place, WatchedDirectory

# Matches the names of tasks in a reason.
_TASKS = re.compile(r"\btasks? ('[^']+'(?:, '[^']+')*)")


class Shown(NamedTuple):
    """The facts from which a status file is made. The file is written again when they change.

    Attributes:
      task: the task's name in the server; None if no task can have the name.
      status: the task's status in the server; None if it is not registered.
      place: the place of a waiting task in the queue, from 1; None if it does not wait.
      adapter: the folder of the adapter, once the task has succeeded or stopped early; otherwise
        None.
      error: why the specification, or a change of it, is refused; None if it is not refused.
      copies: the folder with the copies of the task's files; None if there are none.
      waits: whether the specification is not refused but waits; `error` then tells for what.
    """

    task: str | None
    status: TaskStatus | None = None
    place: int | None = None
    adapter: Path | None = None
    error: str | None = None
    copies: Path | None = None
    waits: bool = False

    def is_like(self, other: "Shown | None") -> bool:
        """Whether `other` would give the same file; quick for a status that has not changed."""
        return (
            other is not None
            and self.status is other.status
            and (self.place, self.adapter) == (other.place, other.adapter)
            and (self.error, self.waits) == (other.error, other.waits)
        )

    def text(self) -> str:
        return json.dumps(self.fields(), indent=2) + "\n"

    def fields(self) -> dict[str, Any]:
        status, error = self.status, self.error
        state = "waiting" if self.waits else "refused"
        fields: dict[str, Any] = {"task": self.task, "state": state, "error": error}
        if status:
            fields |= {
                "state": status.state,
                "reason": self._of_tenant(status.reason),
                "priority": status.priority,
                "place_in_queue": self.place,
                "step": status.step,
                "steps": status.steps,
                "rank": status.rank,
                "loss": finite_or_none(status.loss),
                "held_out_loss": finite_or_none(status.held_out_loss),
                "held_out_metrics": finite_or_none(status.held_out_metrics),
                "best_step": status.best_step,
                "share": round(status.share, 4),
                "adapter": self.adapter and str(self.adapter),
                "warnings": [self._of_tenant(warning) for warning in status.warnings],
                "meter": dataclasses.asdict(status.meter),
                "history": [
                    change._asdict() | {"reason": self._of_tenant(change.reason)}
                    for change in status.history
                ],
            }
        return fields

    def _of_tenant(self, reason: str | None) -> str | None:
        """A reason with the tenant's own paths instead of those of the copies, and without names of
        other tenants' tasks."""
        if reason and self.copies:
            reason = reason.replace(f"{self.copies}/", "")
        return reason and _TASKS.sub(self._own_tasks, reason)

    def _own_tasks(self, named: re.Match[str]) -> str:
        """Replaces the names of other tenants' tasks."""
        tenant = f"'{self.task.partition('.')[0]}."
        names = named[1].split(", ")
        tenants = [name for name in names if name.startswith(tenant)]
        if tenants == names:
            return named[0]
        if tenants:
            return f"tasks {', '.join(tenants)} and others"
        return "another tenant's task" if len(names) == 1 else "other tenants' tasks"


def places_in_queue(statuses: Iterable[TaskStatus]) -> dict[str, int]:
    """By name, the places of the waiting tasks in the queue, from 1. `statuses` are in the order of
    registration. Tasks that arrived together have consecutive places, although the scheduler may
    prefer a later one."""
    waiting = [status for status in statuses if status.state == QUEUED]
    waiting.sort(key=lambda status: -status.priority)
    return {status.name: place for place, status in enumerate(waiting, start=1)}


# Status files are written for at most this number of seconds in a row; the rest is written in the
# next call.
_SECONDS = 0.5
# The folder may be gone, or the name may be too long for a status file.
_FAULTS_OF_TENANTS = (errno.ENOENT, errno.ENAMETOOLONG)


class StatusFiles:
    """The status files. Only one thread may use it."""

    def __init__(self, directory: WatchedDirectory, adapters: Path, every: float):
        """Starts without knowing the content of the files, so each one is written anew. `adapters`
        is the folder of the server's adapters; `every` is the number of seconds between two
        statuses of a task."""
        self._directory, self._adapters, self._every = directory, adapters, every
        # For each specification, the content of its status file, and the time since when.
        self._shown: dict[Place, tuple[Shown, float]] = {}
        # The places whose files are out of date.
        self._late: set[Place] = set()
        # For each place whose file could not be written, the reason; None if it is the tenant's
        # fault.
        self._unwritten: dict[Place, str | None] = {}

    @property
    def problems(self) -> dict[str, str]:
        """By tenant, why status files cannot be written."""
        return {
            place.tenant: f"status files cannot be written ({why})"
            for place, why in self._unwritten.items()
            if why
        }

    def tells(self, place: Place, status: TaskStatus | None) -> bool:
        """Whether the file shows this status, and the adapter of a task that has one, or an attempt
        to write it has failed."""
        shown, _ = self._shown.get(place, (None, 0.0))
        return shown is not None and shown.status is status and place not in self._late

    def forget(self, place: Place) -> None:
        """Leaves a status file as it is from now on."""
        self._shown.pop(place, None)
        self._unwritten.pop(place, None)

    def remove(self, place: Place) -> None:
        """Deletes the status file of a specification, if it was written."""
        self._unwritten.pop(place, None)
        if self._shown.pop(place, None):
            self._directory.remove_status(place)

    def write(self, wanted: Iterable[tuple[Place, Shown]]) -> None:
        """Rewrites outdated status files, oldest first. `wanted` has what each file should show,
        except the adapter."""
        now = time.monotonic()
        due: list[tuple[float, Place, Shown]] = []
        self._late.clear()
        for place, shown in wanted:
            if shown.status is None and shown.error is None:
                continue
            before, at = self._shown.get(place, (None, float("-inf")))
            if shown.status and shown.status.state in TRAINED:
                shown = shown._replace(adapter=self._adapter(shown.status.name, before))
            if place in self._unwritten or not shown.is_like(before):
                self._late.add(place)
                # A call may come slightly earlier after the previous one.
                if now - at >= 0.9 * self._every:
                    due.append((at, place, shown))
        due.sort(key=itemgetter(0))
        for _, place, shown in due:
            self._shown[place] = shown, now
            self._late.discard(place)
            self._write(place, shown)
            if time.monotonic() > now + _SECONDS:
                return

    def _write(self, place: Place, shown: Shown) -> None:
        try:
            self._directory.write_status(place, shown.text())
            self._unwritten.pop(place, None)
        except OSError as e:
            self._unwritten[place] = None if e.errno in _FAULTS_OF_TENANTS else e.strerror

    def _adapter(self, name: str, before: Shown | None) -> Path | None:
        """The folder of a task's adapter, once it exists."""
        if before and before.adapter:
            return before.adapter
        folder = self._adapters / name
        return folder if is_adapter_folder(folder) else None
