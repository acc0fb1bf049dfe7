"""The trackers of a training run, each in a thread of its own, which training never waits for."""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jaxmux.atomic_files import write_atomically
from jaxmux.errors import first_line

from .tracker import TRACKERS, Point, TrackedRun, TrackerKind

IDS = "trackers.json"
# Rounds that a tracker may be behind before it is given up.
_MOST_BEHIND = 10_000
# What a tracker may take for its last metrics, in seconds, when all else is done.
_PATIENCE = 60.0


class RunTrackers:
    """Hands metrics to all trackers of a training run. A tracker that fails, or is far behind, is
    given up with one warning."""

    def __init__(self, names: Sequence[str], run: TrackedRun, say: Callable[[str], None]):
        """Begins to open the trackers.

        Args:
          names: keys of `TRACKERS`.
          run: the training run.
          say: function that prints one line.
        """
        ids = _Ids(run.folder / IDS)
        self._threads = [_Thread(name, run, ids, say) for name in names]

    def log(self, point: Point) -> None:
        """Hands metrics to the trackers.

        Args:
          point: the metrics.
        """
        if point.values:
            for own in self._threads:
                own.log(point)

    def close(self, finished: bool) -> None:
        """Waits until the trackers have kept all metrics, but no longer than a minute.

        Args:
          finished: as for `Tracker.close`.
        """
        for own in self._threads:
            own.end(finished)
        for own in self._threads:
            own.wait()


class _Ids:
    """The ids that trackers have given the training run, by the names of the trackers: a file in
    the run directory."""

    def __init__(self, path: Path):
        self._path, self._lock = path, threading.Lock()
        self._ids: dict[str, str] = {}
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            # Without the file, trackers begin new runs.
            return
        if isinstance(found, dict):
            self._ids = {name: id for name, id in found.items() if isinstance(id, str)}

    def get(self, name: str) -> str | None:
        return self._ids.get(name)

    def keep(self, name: str, id: str) -> None:
        with self._lock:
            self._ids[name] = id
            write_atomically(self._path, json.dumps(self._ids, indent=2) + "\n")


class _Thread:
    """A tracker in its thread. The thread does not keep the process from ending."""

    def __init__(self, name: str, run: TrackedRun, ids: _Ids, say: Callable[[str], None]):
        self._kind: TrackerKind = TRACKERS[name]
        self._points: queue.Queue[Point | bool] = queue.Queue(_MOST_BEHIND)
        self._say, self._off = say, False
        arguments = run, ids.get(name), partial(ids.keep, name)
        self._thread = threading.Thread(
            target=self._work, args=arguments, name=f"tracker {name}", daemon=True
        )
        self._thread.start()

    def log(self, point: Point) -> None:
        self._put(point)

    def end(self, finished: bool) -> None:
        self._put(finished)

    def wait(self) -> None:
        if not self._off:
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                self._give_up(f"takes longer than {_PATIENCE:.0f} s to keep the last metrics")

    def _put(self, item: Point | bool) -> None:
        if self._off:
            return
        try:
            self._points.put_nowait(item)
        except queue.Full:
            self._give_up(f"is {_MOST_BEHIND} rounds behind")

    def _work(self, run: TrackedRun, id: str | None, keep: Callable[[str], None]) -> None:
        try:
            tracker = self._kind.open(run, id, keep)
            while isinstance(item := self._points.get(), Point):
                if self._off:
                    return
                tracker.log(item)
            tracker.close(item)
        except Exception as e:  # the packages pass on the errors of networks, files and servers
            self._give_up(first_line(e))

    def _give_up(self, reason: str) -> None:
        if not self._off:
            self._off = True
            self._say(f"{self._kind.title}: {reason}; training goes on without it")
