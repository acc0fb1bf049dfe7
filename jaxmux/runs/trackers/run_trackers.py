"""The trackers of a training run or of a server, each in a thread that training never waits for."""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxmux.errors import first_line

from .points import points_of
from .records import Records
from .tracker import TRACKERS, Point, TrackedRun

# Rounds that a tracker may be behind before it is given up.
_MOST_BEHIND = 10_000
# What a tracker may take for its last metrics, in seconds, when all else is done.
_PATIENCE = 60.0


class RunTrackers:
    """Hands metrics to all trackers of a training run or of a server. A tracker that fails, or is
    far behind, is given up with one warning.

    Attributes:
      lacking: the first round of a training run that a tracker may lack, although it was trained
        before the checkpoint from which the run goes on. Trackers want to be told of the rounds
        from there on, as repeated ones.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, say: Callable[[str], None]):
        """Begins to open the trackers.

        Args:
          names: keys of `TRACKERS`.
          run: the training run.
          say: function that prints one line.
        """
        self._records = Records(run.folder)
        self._threads = [_Thread(name, run, self._records, say) for name in names]
        known = [own.known for own in self._threads if own.known is not None]
        rounds = run.rounds or 0
        self.lacking = max(min([rounds, *known]), rounds - _MOST_BEHIND // 2)

    def register(self, task: str, time: float) -> None:
        """Notes that a server has got a task, so that tasks of the same name are told apart.

        Args:
          task: its name.
          time: when it was registered, in seconds since 1970.
        """
        if self._threads:
            self._records.register(task, time)

    def log(
        self, lines: Iterable[Mapping[str, Any]], held_out: bool, repeated_to: int = -1
    ) -> None:
        """Hands results to the trackers.

        Args:
          lines, held_out, repeated_to: as for `points_of`.
        """
        if self._threads:
            for point in points_of(lines, held_out, self._records.series, repeated_to):
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


class _Thread:
    """A tracker in its thread. The thread does not keep the process from ending."""

    def __init__(self, name: str, run: TrackedRun, records: Records, say: Callable[[str], None]):
        self._name, self._kind = name, TRACKERS[name]
        self._run, self._records, self._say = run, records, say
        self._points: queue.Queue[Point | bool] = queue.Queue(_MOST_BEHIND)
        self._off = False
        # The last rounds of which it has got updates, and held-out losses.
        self._delivered = records.delivered(name)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def known(self) -> int | None:
        """The first round that it may not know; None if it is told of repeated ones in any case."""
        # A held-out loss may come a round after the updates.
        return None if self._kind.forgets else max(0, self._delivered[0] - 1)

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

    def _work(self) -> None:
        name, records = self._name, self._records
        try:
            tracker = self._kind.open(self._run, records.id(name), partial(records.keep, name))
            while isinstance(item := self._points.get(), Point):
                if self._off:
                    return
                if not self._knows(item):
                    records.keep_names()
                    tracker.log(item)
                    self._delivered[item.held_out] = item.step
                    self._note_delivered()
            tracker.close(item)
        except Exception as e:  # the packages pass on the errors of networks, files and servers
            self._give_up(first_line(e))
        finally:
            self._note_delivered(at_once=True)

    def _knows(self, point: Point) -> bool:
        if not point.repeated:
            return False
        if self._kind.forgets:
            return point.step < (self._run.rounds or 0)
        return point.step <= self._delivered[point.held_out]

    def _note_delivered(self, at_once: bool = False) -> None:
        # The names of a server's tasks are noted with it.
        if self._run.rounds is None or not self._kind.forgets:
            self._records.deliver(self._name, self._delivered, at_once)

    def _give_up(self, reason: str) -> None:
        if not self._off:
            self._off = True
            self._say(f"{self._kind.title}: {reason}; training goes on without it")
