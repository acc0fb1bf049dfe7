"""Reports of a server: a live table on a terminal, plain lines elsewhere."""

import math
import time
from collections import deque
from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live

from jaxmux.errors import without_task
from jaxmux.planner.numbers import numbered
from jaxmux.printable import STOPPED_EARLY, escaped
from jaxmux.runs.console import RunConsole, counted, hours, live_table

from . import TaskStatus
from .inbox.status import places_in_queue
from .task import CANCELLED, ENDED, FAILED, PAUSED, PREPARING, QUEUED, RUNNING, SUCCEEDED

# States in the order in which the table shows their tasks.
_STATES = (RUNNING, PREPARING, QUEUED, PAUSED)
# Rates are means over this number of seconds.
_WINDOW = 15.0
# At most this many characters of a reason are printed; a status file has all of them.
_LONGEST_REASON = 500
# Without a terminal, seconds between two lines about all tasks.
_SECONDS_A_LINE = 60.0


class ServerConsole:
    """Prints the state and the progress of a server's tasks."""

    def __init__(self, console: Console | None = None, log_every: int | None = None):
        """Prints to `console`; None means standard output. Without a terminal, prints a line every
        `log_every` steps of a task; None means only a line about all tasks once a minute."""
        lines = RunConsole(console)
        self.say, self._console, self._log_every = lines.say, lines.console, log_every
        self._live: Live | None = None
        # The statuses of the tasks when they were shown last.
        self._statuses: dict[str, TaskStatus] = {}
        # For each task that trains, its (time, tokens, steps) at some moments of the last seconds.
        self._trained: dict[str, deque[tuple[float, int, int]]] = {}
        self._said_at = time.monotonic()

    def start(self, statuses: Sequence[TaskStatus]) -> None:
        """Begins to show the tasks. `statuses` are those of an earlier server in the same
        folder."""
        self._statuses = {status.name: status for status in statuses}
        if statuses:
            self.say(f"tasks of an earlier start: {_counted(statuses)}")
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def show(self, statuses: Sequence[TaskStatus], adapters: str) -> None:
        """Shows what has changed. `statuses` are those of all tasks, `adapters` is the folder of
        the adapters."""
        now = time.monotonic()
        known, self._statuses = self._statuses, {status.name: status for status in statuses}
        for name in self._trained.keys() - self._statuses.keys():
            del self._trained[name]
        for status in statuses:
            before = known.get(status.name)
            if status is before:
                continue
            self._count(status, now)
            self._say_skipped(status, before)
            if before is None or before.state != status.state:
                self._say_state(status, before, adapters)
            elif self._says_steps(before, status):
                self.say(self._step_line(status))
        trains = any(status.state == RUNNING for status in statuses)
        if self._live:
            self._live.update(self._table(statuses, now))
        elif trains and now - self._said_at >= _SECONDS_A_LINE:
            self._said_at = now
            self.say(self._totals(statuses, now))

    def stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def _say_state(self, status: TaskStatus, before: TaskStatus | None, adapters: str) -> None:
        name, begins = status.name, before is None or before.step == 0
        match status.state:
            case "running" if self._live is None and begins:
                self.say(f"{name}: running, {numbered(status.steps or 0, 'step')}")
            case "succeeded" | "stopped early":
                loss = "" if status.loss is None else f", loss {status.loss:.4f}"
                why = f" ({_shown(status.reason)})" if status.reason else ""
                self.say(f"{name}: {status.state} after {numbered(status.step, 'step')}{loss}{why}")
                self.say(f"adapter {name}: {adapters}/{name}")
            case "failed":
                reason = without_task(status.reason or "", name)
                self.say(f"FAILED {name}: {_shown(reason)}")
            case "cancelled":
                self.say(f"{name}: cancelled after {numbered(status.step, 'step')}")

    def _say_skipped(self, status: TaskStatus, before: TaskStatus | None) -> None:
        """Warns if an update of a task is skipped. It does not warn again until an update has been
        applied."""
        loss = None if before is None else before.loss
        if _is_nan(status.loss) and not _is_nan(loss):
            self.say(
                f"{status.name}: warning: the update of step {status.step} is skipped, because its "
                "loss, gradient or update is not finite; the loss is shown as nan until an update "
                "is applied"
            )

    def _says_steps(self, before: TaskStatus, status: TaskStatus) -> bool:
        every = self._log_every
        return bool(every and self._live is None and status.step // every > before.step // every)

    def _count(self, status: TaskStatus, now: float) -> None:
        if status.state != RUNNING:
            self._trained.pop(status.name, None)
            return
        readings = self._trained.setdefault(status.name, deque())
        readings.append((now, status.meter.effective_tokens, status.step))
        # A step may take longer than the window, so at least one earlier reading is kept.
        while now - readings[0][0] > _WINDOW and readings[1][2] < status.step:
            readings.popleft()

    def _rates(self, name: str, now: float) -> tuple[float, float]:
        """Tokens without padding and steps of a task per second; 0 while they are unknown."""
        readings = self._trained.get(name)
        if not readings or len(readings) < 2:
            return 0.0, 0.0
        (first, *before), (last, *present) = readings[0], readings[-1]
        # The rate of a task falls while it waits.
        seconds = max(last - first, now - last, 1e-9)
        tokens, steps = (b - a for a, b in zip(before, present, strict=True))
        return tokens / seconds, steps / seconds

    def _eta(self, status: TaskStatus, now: float) -> str:
        """Time until a task ends, as h:mm:ss; empty while it is unknown."""
        _, rate = self._rates(status.name, now)
        return hours((status.steps - status.step) / rate) if status.steps and rate else ""

    def _step_line(self, status: TaskStatus) -> str:
        loss = "" if status.loss is None else f" loss {status.loss:.4f}"
        eta = self._eta(status, time.monotonic())
        return f"{status.name} step {status.step}/{status.steps}{loss}{eta and f' ETA {eta}'}"

    def _totals(self, statuses: Sequence[TaskStatus], now: float) -> str:
        rate = sum(self._rates(name, now)[0] for name in self._trained)
        return _counted(statuses) + (f"; {rate:,.0f} tokens/s without padding" if rate else "")

    def _table(self, statuses: Sequence[TaskStatus], now: float) -> Group:
        places = places_in_queue(statuses)
        shown = [status for status in statuses if status.state not in ENDED]
        shown.sort(key=lambda s: (_STATES.index(s.state), places.get(s.name, 0)))
        footer = self._totals(statuses, now) if statuses else "no tasks yet"
        if self._trained:
            footer += f"\ntokens/s: without padding, over the last {_WINDOW:.0f} s"
        rows = []
        ranked = any(status.rank for status in shown)
        for status in shown:
            (rate, _), place = self._rates(status.name, now), places.get(status.name)
            rows.append(
                (
                    status.name,
                    status.state,
                    *((str(status.rank or ""),) if ranked else ()),
                    f"{status.step}/{'?' if status.steps is None else status.steps}",
                    "" if status.loss is None else f"{status.loss:.4f}",
                    f"{rate:,.0f}" if rate else "",
                    self._eta(status, now) if place is None else f"place {place}",
                )
            )
        rank = ("rank",) if ranked else ()
        headings = ("task", "state", *rank, "step", "loss", "tokens/s", "ETA")
        return live_table(self._console, headings, rows, footer, texts=2)


def _is_nan(loss: float | None) -> bool:
    return loss is not None and math.isnan(loss)


def _shown(text: str) -> str:
    """A text that a tenant may have written, with the control characters of terminals escaped."""
    return escaped(text[:_LONGEST_REASON]) + "…" * (len(text) > _LONGEST_REASON)


def _counted(statuses: Sequence[TaskStatus]) -> str:
    """The numbers of tasks by state, for example "3 running, 12 queued"."""
    ends = (SUCCEEDED, STOPPED_EARLY, FAILED, CANCELLED)
    return counted((status.state for status in statuses), (*_STATES, *ends))
