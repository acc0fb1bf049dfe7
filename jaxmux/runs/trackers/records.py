"""What is remembered of trackers from one call of a training run, or of a server, to the next."""

import json
import math
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxmux.atomic_files import write_atomically

FILE = "trackers.json"
# Seconds from one writing of what has been delivered to the next.
_EVERY = 1.0
# Most names of tasks that are remembered; the oldest are forgotten.
_MOST_NAMES = 100_000


class Records:
    """A file trackers.json: the ids that trackers have given their runs, how far they have got, and
    the names of a server's tasks. All methods may be called in any thread."""

    def __init__(self, folder: Path):
        """Reads the file. Without it, trackers begin new runs.

        Args:
          folder: its folder.
        """
        self._path = folder / FILE
        # Whoever follows training must not wait for the disk, so writing has a lock of its own.
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._written = -math.inf
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            found = {}
        found = found if isinstance(found, dict) else {}
        self._ids = {name: id for name, id in found.items() if isinstance(id, str)}
        self._delivered: dict[str, list[int]] = _part(found, "delivered")
        # By name, when the last task of this name was registered, and how many have had it.
        self._names: dict[str, list[Any]] = _part(found, "names")
        # Whether the file lacks a name.
        self._names_changed = False

    def id(self, tracker: str) -> str | None:
        """The id of a tracker's run; None if it has none yet.

        Args:
          tracker: a key of `TRACKERS`.
        """
        return self._ids.get(tracker)

    def keep(self, tracker: str, id: str) -> None:
        """Keeps the id of a tracker's run.

        Args:
          tracker: a key of `TRACKERS`.
          id: the id.
        """
        with self._lock:
            self._ids[tracker], self._delivered[tracker] = id, [-1, -1]
        self._write()

    def delivered(self, tracker: str) -> list[int]:
        """The last rounds of which a tracker has got updates, and held-out losses; -1 for none.

        Args:
          tracker: a key of `TRACKERS`.
        """
        # Earlier versions have not recorded it, and have not told trackers of a round again.
        unknown = sys.maxsize if tracker in self._ids else -1
        return list(self._delivered.get(tracker, (unknown, unknown)))

    def deliver(self, tracker: str, rounds: list[int], at_once: bool = False) -> None:
        """Notes what a tracker has got. It is written once a second, so a process that is killed
        may tell trackers of its last second again, but leaves nothing out.

        Args:
          tracker: a key of `TRACKERS`.
          rounds: as from `delivered`.
          at_once: whether to write at once.
        """
        with self._lock:
            self._delivered[tracker] = list(rounds)
        if at_once or time.monotonic() - self._written > _EVERY:
            with suppress(OSError):
                self._write()

    def register(self, task: str, time: float) -> None:
        """Notes that a task has been registered, which may have been told before.

        Args:
          task: its name.
          time: when it was registered, in seconds since 1970.
        """
        with self._lock:
            last, count = self._names.pop(task, (0.0, 0))
            self._names[task] = [max(last, time), count + (time > last)]
            self._names_changed |= time > last
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]

    def keep_names(self) -> None:
        """Writes the file if it lacks a name. A tracker has to be told of a task after that, or its
        curves would have another name when training goes on after a crash."""
        if self._names_changed:
            with suppress(OSError):
                self._write()

    def series(self, task: str) -> str:
        """The name of a task's curves. It is that of the task, but if earlier tasks have had this
        name, it is one that no task can have, such as "_2_billing".

        Args:
          task: name of the task.
        """
        with self._lock:
            count = self._names.get(task, (0.0, 1))[1]
        return f"_{count}_{task}" if count > 1 else task

    def _write(self) -> None:
        with self._writing:
            self._written = time.monotonic()
            with self._lock:
                self._names_changed = False
                parts = {"delivered": self._delivered, "names": self._names}
                text = json.dumps(self._ids | {key: own for key, own in parts.items() if own})
            write_atomically(self._path, text + "\n")


def _part(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The lists of two values of an entry; what is damaged is left out."""
    part = found.get(name)
    items = part.items() if isinstance(part, dict) else ()
    return {
        key: own
        for key, own in items
        if isinstance(own, list) and len(own) == 2 and all(isinstance(v, int | float) for v in own)
    }
