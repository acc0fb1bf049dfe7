"""The trackers of a training run or of a server. Each has a thread, and training never waits for
it."""

import math
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from jaxmux.errors import first_line

from .records import Records
from .tracker import TRACKERS, Point, TrackedRun

# A tracker is dropped if it is more than this number of rounds behind.
_MOST_BEHIND = 10_000
# Seconds that a tracker may take for its last metrics when training has ended.
_PATIENCE = 60.0
# By name of a metric, the field of an update or of a held-out loss that holds its value.
_UPDATE = {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm"}
_HELD_OUT = {"held_out_loss": "loss"}


class RunTrackers:
    """Passes metrics to all trackers of a training run or of a server. A tracker that fails, or
    falls far behind, is dropped with one warning.

    Attributes:
      lacking: the first round that a tracker may lack although it was trained before the checkpoint
        from which the run continues. Pass the rounds from this one on to `log` again, as repeated
        rounds.
    """

    def __init__(self, names: Sequence[str], run: TrackedRun, say: Callable[[str], None]):
        """Starts to open the trackers `names`, which are keys of `TRACKERS`. `say` prints one
        line."""
        self._records = Records(run.folder)
        self._threads = [_Thread(name, run, self._records, say) for name in names]
        known = [thread.known for thread in self._threads if thread.known is not None]
        rounds = run.rounds or 0
        self.lacking = max(min([rounds, *known]), rounds - _MOST_BEHIND // 2)

    def register(self, task: str, time: float) -> None:
        """Records that a server registered a task at `time` (seconds since 1970), so that tasks of
        the same name get separate curves."""
        if self._threads:
            self._records.register(task, time)

    def log(
        self, lines: Iterable[Mapping[str, Any]], held_out: bool, repeated_to: int = -1
    ) -> None:
        """Passes results to the trackers, with arguments as for `points_of`."""
        if self._threads:
            for point in points_of(lines, held_out, self._records.series, repeated_to):
                for thread in self._threads:
                    thread.log(point)

    def close(self, finished: bool) -> None:
        """Waits, for at most a minute, until the trackers have stored all metrics. `finished` is as
        for `Tracker.close`."""
        for thread in self._threads:
            thread.end(finished)
        for thread in self._threads:
            thread.wait()


def points_of(
    lines: Iterable[Mapping[str, Any]],
    held_out: bool,
    series: Callable[[str], str] = str,
    repeated_to: int = -1,
) -> Iterator[Point]:
    """Yields the finite numbers of results, one point per round.

    Args:
      lines: dicts with the fields of `as_line`, and "time", in the order of the rounds.
      held_out: whether `lines` are held-out losses; otherwise they are updates.
      series: takes the name of a task, returns the name of its curves.
      repeated_to: the last round that trackers may have received already.
    """
    for step, of_round in groupby(lines, lambda line: line["step"]):
        same = list(of_round)
        values = {
            f"{name}/{series(line['task'])}": value
            for line in same
            for name, value in _numbers(line, held_out).items()
            if value is not None and math.isfinite(value)
        }
        if values:
            yield Point(step, values, same[0]["time"], held_out, step <= repeated_to)


def _numbers(line: Mapping[str, Any], held_out: bool) -> dict[str, float | None]:
    """The numbers of a result by the name of the metric, those of the task's objective included."""
    fields, prefix = (_HELD_OUT, "held_out_") if held_out else (_UPDATE, "")
    of_objective = line.get("metrics", {}).items()
    return {name: line.get(field) for name, field in fields.items()} | {
        f"{prefix}{name}": value for name, value in of_objective
    }


class _Thread:
    """A tracker in its own thread. The process may end while the thread runs."""

    def __init__(self, name: str, run: TrackedRun, records: Records, say: Callable[[str], None]):
        self._name, self._kind = name, TRACKERS[name]
        self._run, self._records, self._say = run, records, say
        self._points: queue.Queue[Point | bool] = queue.Queue(_MOST_BEHIND)
        self._off = False
        # The last round whose updates the tracker has received, and the last round whose held-out
        # losses it has received.
        self._delivered = records.delivered(name)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    @property
    def known(self) -> int | None:
        """The first round that the tracker may lack; None if every repeated round must be sent."""
        # A held-out loss may come one round after the updates.
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
        except Exception as e:  # trackers pass on the errors of networks, files and servers
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
        # The names of a server's tasks are written together with this.
        if self._run.rounds is None or not self._kind.forgets:
            self._records.deliver(self._name, self._delivered, at_once)

    def _give_up(self, reason: str) -> None:
        if not self._off:
            self._off = True
            self._say(f"{self._kind.title}: {reason}; training goes on without it")
