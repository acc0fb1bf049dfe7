"""The state of trackers that is kept from one call of a training run or a server to the next."""

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
# At least this many seconds pass between two writes of the delivered rounds.
_EVERY = 1.0
# At most this many task names are kept; the oldest are dropped first.
_MOST_NAMES = 100_000


class Records:
    """The file trackers.json: the ids of the trackers' runs, the last rounds delivered to each
    tracker, and the names of a server's tasks. Every thread may call all methods."""

    def __init__(self, folder: Path):
        """Reads the file in `folder`. If there is none, trackers begin new runs."""
        self._path = folder / FILE
        # Writing has a separate lock, so that the training thread does not wait for the disk.
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._written = -math.inf
        try:
            content = json.loads(self._path.read_text())
        except (OSError, ValueError):
            content = {}
        content = content if isinstance(content, dict) else {}
        self._ids = {name: id for name, id in content.items() if isinstance(id, str)}
        self._delivered: dict[str, list[int]] = _part(content, "delivered")
        # By name, the time at which the last task of this name was registered, and the number of
        # tasks that have had the name.
        self._names: dict[str, list[Any]] = _part(content, "names")
        # Whether there is a name that has not been written yet.
        self._names_changed = False

    def id(self, tracker: str) -> str | None:
        """The id of a tracker's run; None if it has none yet. `tracker` is a key of `TRACKERS`."""
        return self._ids.get(tracker)

    def keep(self, tracker: str, id: str) -> None:
        with self._lock:
            self._ids[tracker], self._delivered[tracker] = id, [-1, -1]
        self._write()

    def delivered(self, tracker: str) -> list[int]:
        """The last round whose updates a tracker has received, and the last round whose held-out
        losses it has received; -1 for none."""
        # Earlier versions did not record this, and did not send a round again.
        unknown = sys.maxsize if tracker in self._ids else -1
        return list(self._delivered.get(tracker, (unknown, unknown)))

    def deliver(self, tracker: str, rounds: list[int], at_once: bool = False) -> None:
        """Records the rounds that a tracker has received, in the form that `delivered` returns.

        The file is written once a second, or now with `at_once`. After a kill, a tracker may
        therefore get the rounds of the last second again, but misses none.
        """
        with self._lock:
            self._delivered[tracker] = list(rounds)
        if at_once or time.monotonic() - self._written > _EVERY:
            with suppress(OSError):
                self._write()

    def register(self, task: str, time: float) -> None:
        """Records that a task was registered at `time` (seconds since 1970). Recording the same
        registration again changes nothing."""
        with self._lock:
            last, count = self._names.pop(task, (0.0, 0))
            self._names[task] = [max(last, time), count + (time > last)]
            self._names_changed |= time > last
            if len(self._names) > _MOST_NAMES:
                del self._names[next(iter(self._names))]

    def keep_names(self) -> None:
        """Writes the file if it lacks a name. Call it before a tracker gets metrics of a task;
        otherwise the task's curves could have another name after a crash."""
        if self._names_changed:
            with suppress(OSError):
                self._write()

    def series(self, task: str) -> str:
        """The name of a task's curves: the task's name or, if earlier tasks had the same name, a
        name that no task can have, such as "_2_billing"."""
        with self._lock:
            count = self._names.get(task, (0.0, 1))[1]
        return f"_{count}_{task}" if count > 1 else task

    def _write(self) -> None:
        with self._writing:
            self._written = time.monotonic()
            with self._lock:
                self._names_changed = False
                parts = {"delivered": self._delivered, "names": self._names}
                text = json.dumps(self._ids | {key: part for key, part in parts.items() if part})
            write_atomically(self._path, text + "\n")


def _part(content: dict[str, Any], name: str) -> dict[str, Any]:
    """The pairs of numbers in an entry of the file; damaged pairs are left out."""
    part = content.get(name)
    items = part.items() if isinstance(part, dict) else ()
    return {
        key: pair
        for key, pair in items
        if isinstance(pair, list)
        and len(pair) == 2
        and all(isinstance(v, int | float) for v in pair)
    }
