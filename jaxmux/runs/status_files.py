"""Writes the status files of a watched directory: when they change, and not too often."""

import errno
import time
from collections.abc import Iterable
from pathlib import Path

from jaxmux.live import TaskStatus
from jaxmux.live.states import TRAINED
from jaxmux.peft.peft_folder import is_adapter_folder

from .status_file import Shown
from .watched_directory import Place, WatchedDirectory

# Status files are written for at most so many seconds in a row; the others come next time.
_SECONDS = 0.5
# The folder may be gone, or the name may be too long for that of a status file.
_FAULTS_OF_TENANTS = (errno.ENOENT, errno.ENAMETOOLONG)


class StatusFiles:
    """The status files. One thread uses it."""

    def __init__(self, directory: WatchedDirectory, adapters: Path, every: float):
        """Starts without knowing what the files tell, so each is written anew.

        Args:
          directory: the directory of the specifications.
          adapters: the folder of the server's adapters.
          every: seconds between two statuses of a task.
        """
        self._directory, self._adapters, self._every = directory, adapters, every
        # What the file of a specification tells, and since when.
        self._shown: dict[Place, tuple[Shown, float]] = {}
        # The places whose files have yet to tell what they should.
        self._late: set[Place] = set()
        # The places whose files could not be written, and why; None for faults of the tenant.
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
        """Whether the file tells a status, and the adapter of a task that has one, or it was tried
        to write it.

        Args:
          place: the place of the specification.
          status: the status.
        """
        shown, _ = self._shown.get(place, (None, 0.0))
        return shown is not None and shown.status is status and place not in self._late

    def forget(self, place: Place) -> None:
        """Leaves a status file as it is.

        Args:
          place: the place of the specification.
        """
        self._shown.pop(place, None)
        self._unwritten.pop(place, None)

    def remove(self, place: Place) -> None:
        """Deletes the status file of a specification, if it was written.

        Args:
          place: the place of the specification.
        """
        self._unwritten.pop(place, None)
        if self._shown.pop(place, None):
            self._directory.remove_status(place)

    def write(self, wanted: Iterable[tuple[Place, Shown]]) -> None:
        """Writes the files that do not tell what they should, those first that were written longest
        ago.

        Args:
          wanted: what the files of specifications should tell, but for the adapters.
        """
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
                # A call may come a little earlier than the one before.
                if now - at >= 0.9 * self._every:
                    due.append((at, place, shown))
        due.sort(key=lambda own: own[0])
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
        """The folder of a task's adapter, once it is there."""
        if before and before.adapter:
            return before.adapter
        folder = self._adapters / name
        return folder if is_adapter_folder(folder) else None
