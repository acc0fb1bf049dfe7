"""The content of a run's page, built line by line from the files of the run directory."""

import math
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmux.objectives import HIGHER_IS_BETTER
from jaxmux.printable import shown_state

from .line_file import Line

_ENDED = {"succeeded", "stopped early", "failed", "cancelled"}
# Maximum numbers of events that are kept and that are shown.
_KEPT, _SHOWN = 3000, 300
# Number of a server's ended tasks that are still shown.
_MOST_ENDED = 256
# Maximum number of rounds whose details can be shown: 32 each time the number of rounds doubles.
_DETAILED = 2048
# Maximum number of rounds whose updates may be read before their own lines.
_AHEAD = 4096
# A task's speed is measured over this many last updates.
_PACED = 32
# Activities of the devices other than training.
_OTHERS = ("evaluation", "checkpoints", "compiling", "idle")
# Maximum number of completions of a task's prompt that are shown.
_MOST_SAMPLES = 16
# Maximum number of skipped updates of a task that are listed one by one.
_MOST_SKIPS = 64


class Series:
    """Means of consecutive values. If there are too many points, pairs of neighbours are merged, so
    a long series has between `most` and 2 `most` points. `stride` is the number of values per
    point; the last point may have fewer."""

    def __init__(self, columns: int, most: int = 256):
        """Creates an empty series of values with `columns` numbers each."""
        self.stride = 1
        self._columns, self._most = columns, most
        # For each point: x of the last value, number of values, sums of the columns, and the least
        # and the largest value of the first column.
        self._points: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._points)

    def add(self, x: float, values: Sequence[float]) -> None:
        """Adds a value: one finite number per column. `x` must ascend from call to call."""
        if self._points and self._points[-1][1] < self.stride:
            self._points[-1] = _merged(self._points[-1], [x, 1, *values, values[0], values[0]])
        else:
            self._points.append([x, 1, *values, values[0], values[0]])
        if len(self._points) > 2 * self._most:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [*(_merged(*pair) for pair in pairs), *odd]
            self.stride *= 2

    def points(self) -> list[list[float]]:
        """For each point: x, the means of all columns, and the least and the largest value of the
        first column."""
        return [
            [point[0]]
            + [_short(total / point[1]) for total in point[2 : 2 + self._columns]]
            + [_short(point[-2]), _short(point[-1])]
            for point in self._points
        ]


def _short(value: float) -> float:
    """A number rounded to six significant digits, which suffice for a picture."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 5 - math.floor(math.log10(abs(value))))


def _merged(first: list[float], second: list[float]) -> list[float]:
    sums = [a + b for a, b in zip(first[1:-2], second[1:-2], strict=True)]
    return [second[0], *sums, min(first[-2], second[-2]), max(first[-1], second[-1])]


def metric_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The entries of a task's row about its `best_metric`, from its settings or its state; none if
    an earlier version wrote them."""
    metric = fields.get("best_metric")
    known = isinstance(metric, str) and metric in HIGHER_IS_BETTER
    return {"metric": metric, "higher": HIGHER_IS_BETTER[metric]} if known else {}


class TaskView:
    """A task as the page shows it.

    Attributes:
      row: its entry in the list of tasks: name, place (its number, from 0, in the order in which
        tasks came, which stays the same when others are dropped; None if the task is refused),
        state, reason, priority, step, steps, kind, rank, loss (of the last update; None if the
        update was skipped), nan (whether the update was skipped), held_out (the last held-out
        loss), metric (the name of its `best_metric`), higher (whether higher values of it are
        better), value (its last value), best (the step with the best value), final and final_value
        (the held-out loss of the trained adapter, and its value of the metric), tokens, skipped
        (number of skipped updates), computed (tokens of its chunks), seconds (its share of the time
        of rounds), error (why its specification, or a change of it, is refused), left (seconds
        until its last step is trained; None if unknown or if it does not train).
      loss: training loss by step.
      rate: learning rate by step.
      norm: norm of the gradient by step, before clipping.
      samples: the completion of a prompt, by step (0 is the bare backbone) and prompt.
      skips: step and reason of the last updates that were skipped.
      trained: the last step whose update has been read.
      held_out: for each measurement, the step, the loss, and whether the metric is the best.
    """

    def __init__(self, name: str, **fields: Any):
        """A task that has not trained. `fields` are entries of `row`."""
        self.row: dict[str, Any] = {
            "name": name,
            "place": None,
            "state": "queued",
            "reason": None,
            "priority": None,
            "step": 0,
            "steps": None,
            "kind": None,
            "rank": None,
            "loss": None,
            "nan": False,
            "error": None,
            "held_out": None,
            "metric": "loss",
            "higher": False,
            "value": None,
            "best": None,
            "final": None,
            "final_value": None,
            "tokens": 0,
            "computed": 0,
            "seconds": 0.0,
            "skipped": 0,
            "left": None,
        } | fields
        self.loss, self.rate, self.norm = Series(1), Series(1), Series(1)
        self.skips: deque[tuple[int, str]] = deque(maxlen=_MOST_SKIPS)
        self.samples: dict[tuple[int, str], str] = {}
        # Round and step of the last updates, from which the speed is computed.
        self.paced: deque[tuple[int, int]] = deque(maxlen=_PACED)
        self.trained = 0
        self.held_out: list[list[Any]] = []


class RunView:
    """The tasks, rounds and events of a run.

    Attributes:
      tasks: the tasks by name.
      rounds: for each round: time, seconds, tokens with padding, tokens of chunks, tokens read,
        device memory in use, its peak, host memory (bytes; 0 if unknown), microbatches.
      details: for each round with details, the file, offset and length of its line.
      events: the last events, ordered by file and line.
      last: time of the newest line, in seconds since 1970; None before the first.
      worked: time of the newest line of a round or an update; 0 before the first.
      trained: totals over all rounds: seconds, tokens with padding, tokens of chunks, and tokens
        read. The seconds leave out the time in which nothing ran or a server had nothing to train.
    """

    def __init__(self, server: bool):
        """Creates an empty view. With `server`, the states of tasks come from events."""
        self.tasks: dict[str, TaskView] = {}
        self.rounds = Series(9)
        self.details: dict[int, tuple[Path, int, int]] = {}
        self.events: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.last: float | None = None
        self.worked = 0.0
        self.trained = {"seconds": 0.0, "tokens": 0.0, "chunks": 0.0, "read": 0.0}
        self.server = server
        # Number of tasks that have come, dropped tasks included.
        self._places = 0
        # The tasks of a server that have ended, in the order of their ends.
        self._ended: deque[TaskView] = deque()
        # Whether rounds.jsonl has lines; otherwise rounds are counted from updates.
        self._has_rounds = False
        # For each round: its seconds, the seconds of training among them, and its tokens with
        # padding; 0 if unknown.
        self._seconds, self._training, self._tokens = array("d"), array("d"), array("d")
        # The seconds of rounds that were spent on activities other than training.
        self._spent: Counter[str] = Counter()
        # Whether the line of some round does not divide its time by activity.
        self._has_untold = False
        # For each round whose line has not been read yet, the tokens of its tasks.
        self._ahead: dict[int, dict[str, int]] = {}
        # The round of the latest updates: number, time, tokens of chunks and tokens read.
        self._counted: list[float] | None = None
        # Additions since the last call of `take_new`.
        self._new: dict[str, Any] = _nothing_new()

    def task(self, name: str, **fields: Any) -> TaskView:
        """The task of this name. A new task is created with these entries of its row."""
        if name not in self.tasks:
            self.tasks[name] = TaskView(name, place=self._places, **fields)
            self._places += 1
        return self.tasks[name]

    def add_metric(self, line: Line) -> bool:
        """Adds a line of metrics.jsonl; returns False if the line is damaged. The other `add_`
        methods do the same for their files."""
        return self._guarded(self._update, line.fields)

    def add_held_out(self, line: Line) -> bool:
        return self._guarded(self._evaluation, line.fields)

    def add_sample(self, line: Line) -> bool:
        return self._guarded(self._sample, line.fields)

    def add_event(self, line: Line) -> bool:
        kinds = {"state": self._state, "update": self._update, "evaluation": self._evaluation}
        add = kinds.get(line.fields.get("kind"))
        return add is None or self._guarded(add, line.fields)

    def add_round(self, path: Path, line: Line) -> bool:
        """Adds a line of rounds.jsonl or of an earlier file with rounds."""

        def add(fields: dict[str, Any]) -> None:
            number = int(fields["round"])
            values = [fields[n] for n in ("seconds", "tokens", "chunk_tokens", "read_tokens")]
            memory = [max(fields.get(n) or [0]) for n in ("memory_in_use", "memory_peak")]
            memory.append(fields.get("host_bytes") or 0)
            numbers = [fields["time"], *values, *memory, fields["microbatches"]]
            spent = dict(fields.get("spent", {"training": fields["seconds"]}))
            spent = {kind: _finite(seconds) for kind, seconds in spent.items()}
            if not self._has_rounds:
                self._has_rounds, self.rounds = True, Series(9)
                self.trained = dict.fromkeys(self.trained, 0.0)
            self._add_round(number, numbers)
            self._has_untold |= "spent" not in fields
            self._spent.update({kind: spent.get(kind, 0.0) for kind in _OTHERS})
            self._share(number, *map(float, values[:2]), spent.get("training", 0.0))
            if "held" in fields:
                self.details[number] = path, line.offset, line.length
                self._new["details"].append(number)
                if len(self.details) > _DETAILED:
                    del self.details[next(iter(self.details))]

        return self._guarded(add, line.fields)

    def newest_events(self) -> list[dict[str, Any]]:
        """The last events, ordered by time."""
        return sorted(self.events, key=lambda event: event["time"])[-_SHOWN:]

    def take_results(self, results: dict[str, Any]) -> None:
        """Enters results of tasks, from summary.json or tasks.json. They override the states that
        follow from the last updates."""
        for name, result in results.items():
            if name in self.tasks and isinstance(result, dict):
                row = self.tasks[name].row
                early = result.get("stopped_early")
                row["state"] = shown_state(str(result.get("status", row["state"])), early)
                row["reason"] = result.get("error") or early
                row["final"] = row["final_value"] = result.get("eval_loss")
                if row["metric"] != "loss":
                    row["final_value"] = (result.get("eval_metrics") or {}).get(row["metric"])

    def seconds_left(self, task: TaskView) -> float | None:
        """Seconds until a task's last step is trained, at the speed of its last rounds; None if the
        task does not train, or its speed is unknown."""
        row = task.row
        if row["state"] != "running" or not row["steps"] or len(task.paced) < 2:
            return None
        (begin, first), (end, last) = task.paced[0], task.paced[-1]
        seconds = sum(self._seconds[begin + 1 : end + 1])
        return (row["steps"] - last) * seconds / (last - first) if seconds else None

    def take_new(self) -> dict[str, Any]:
        """Additions since the last call: rows of tasks, points of the loss and of the held-out loss
        by task, rounds, events and details; and the names of dropped tasks."""
        new, self._new = self._new, _nothing_new()
        return new | {"tasks": [self.tasks[n].row for n in new["tasks"] if n in self.tasks]}

    def _guarded(self, add: Any, fields: dict[str, Any]) -> bool:
        try:
            time = _finite(fields["time"])
            add(fields)
        except (KeyError, TypeError, ValueError, OverflowError):
            return False
        self.last = max(time, self.last or time)
        return True

    def _add_round(self, number: int, numbers: list[float]) -> None:
        numbers = list(map(_finite, numbers))
        self.worked = max(self.worked, numbers[0])
        self.rounds.add(number, numbers)
        for name, value in zip(self.trained, numbers[1:5], strict=True):
            self.trained[name] += value
        # As in `Series.points`, the least and the largest time come last.
        self._new["rounds"].append([number, *numbers, numbers[0], numbers[0]])

    def _update(self, fields: dict[str, Any]) -> None:
        name, step, loss = _name(fields), int(fields["task_step"]), fields["loss"]
        task = self.task(name)
        row, skipped = task.row, bool(fields["skipped"])
        # After a kill, a server trains some steps again, with the same results.
        again, task.trained = step <= task.trained, max(step, task.trained)
        curves = [(task.rate, fields.get("lr")), (task.norm, fields.get("grad_norm"))]
        known = [(curve, _finite(value)) for curve, value in curves if value is not None]
        row["nan"] = skipped
        if not again:
            for curve, value in known:
                curve.add(step, [value])
        if loss is not None:
            loss = _finite(loss)
            if not again:
                task.loss.add(step, [loss])
                point = [step, *[_short(loss)] * 3]
                self._new["loss"].setdefault(name, []).append(point)
        row["loss"] = None if skipped or loss is None else _short(loss)
        self.worked = max(self.worked, float(fields["time"]))
        row["step"], row["state"] = step, "running" if row["state"] == "queued" else row["state"]
        if not again:
            row["tokens"] += int(fields.get("tokens", 0))
            computed, number = int(fields.get("computed_tokens", 0)), int(fields.get("step", -1))
            row["computed"] += computed
            task.paced.append((number, step))
            if self._knows(number):
                row["seconds"] += self._seconds_of(number, computed)
            elif number >= len(self._tokens):
                self._ahead.setdefault(number, {})[name] = computed
                if len(self._ahead) > _AHEAD:
                    del self._ahead[next(iter(self._ahead))]
            row["skipped"] += skipped
        if not self.server and row["steps"] and step >= row["steps"]:
            row["state"] = "succeeded"
        if skipped:
            if not again:
                task.skips.append((step, _why_skipped(fields)))
            self._tell(fields["time"], name, "skipped", f"the update of step {step} was skipped")
        self._count_round(fields)
        self._new["tasks"][name] = None

    def _evaluation(self, fields: dict[str, Any]) -> None:
        name, step, loss = _name(fields), int(fields["task_step"]), fields["loss"]
        task = self.task(name)
        measured = task.held_out[-1][0] if task.held_out else -1
        if loss is not None and step > measured:
            loss, best = _short(_finite(loss)), bool(fields.get("best"))
            point = [step, loss, best]
            task.held_out.append(point)
            if len(task.held_out) > 512:
                task.held_out = task.held_out[::2]
            row, metric = task.row, task.row["metric"]
            row["held_out"] = row["value"] = loss
            text = f"loss {loss:.4g}"
            if metric != "loss":
                value = fields.get("metrics", {}).get(metric)
                row["value"] = None if value is None else _short(_finite(value))
                text += "" if value is None else f", {metric} {value:.4g}"
            if best:
                row["best"] = step
            self._new["held_out"].setdefault(name, []).append(point)
            mark = ", the best so far" if best else ""
            self._tell(fields["time"], name, "held-out", f"{text} at step {step}{mark}")
        self._new["tasks"][name] = None

    def _sample(self, fields: dict[str, Any]) -> None:
        name, key = _name(fields), (int(fields["task_step"]), str(fields["prompt"]))
        samples = self.task(name).samples
        samples[key] = str(fields["completion"])
        if len(samples) > _MOST_SAMPLES:
            del samples[next(iter(samples))]
        self._new["tasks"][name] = None

    def _state(self, fields: dict[str, Any]) -> None:
        name, state = _name(fields), str(fields["state"])
        before = self.tasks.get(name)
        if before is not None and before.row["state"] in _ENDED and state not in _ENDED:
            # Another task has taken the name.
            self.tasks[name] = TaskView(name, place=before.row["place"])
            self._new["again"] = True
        # Measure the speed anew, because rounds continue while this task does not train.
        self.task(name).paced.clear()
        row = self.task(name).row
        state, row["reason"] = shown_state(state, fields.get("reason")), fields.get("reason")
        row["state"] = state
        # Events of earlier versions lack some of these entries.
        row |= {n: fields[n] for n in ("priority", "steps", "rank") if n in fields}
        row["kind"] = fields.get("adapter", row["kind"])
        row |= metric_of(fields)
        reason = f": {row['reason']}" if row["reason"] else ""
        self._tell(fields["time"], name, "state", f"{state}{reason}")
        self._new["tasks"][name] = None
        if state in _ENDED:
            self._ended.append(self.tasks[name])
            self._forget()

    def _forget(self) -> None:
        """Drops the tasks of a server that ended long ago."""
        while len(self._ended) > _MOST_ENDED:
            ended = self._ended.popleft()
            name = ended.row["name"]
            # Another task may have taken the name, or the task may have ended again after a crash.
            if self.tasks.get(name) is ended and ended not in self._ended:
                del self.tasks[name]
                self._new["gone"].append(name)

    def _tell(self, time: float, task: str, kind: str, text: str) -> None:
        event = {"time": time, "task": task, "kind": kind, "text": text}
        self.events.append(event)
        self._new["events"].append(event)

    def _share(self, number: int, seconds: float, tokens: float, training: float) -> None:
        """Adds the time of a round, and divides it among the tasks of the round."""
        numbers = self._seconds, self._tokens, self._training
        for column, value in zip(numbers, (seconds, tokens, training), strict=True):
            # Numbers ascend from line to line. A damaged number must not take much memory.
            if len(column) <= number < len(column) + _AHEAD:
                column.extend([0.0] * (number + 1 - len(column)))
            if number < len(column):
                column[number] += value
        for name, computed in self._ahead.pop(number, {}).items():
            if name in self.tasks:
                self.tasks[name].row["seconds"] += self._seconds_of(number, computed)
                self._new["tasks"][name] = None

    def _seconds_of(self, number: int, computed: int) -> float:
        """The share of a round's seconds that belongs to `computed` of its tokens."""
        return computed * self._seconds[number] / self._tokens[number] if self._knows(number) else 0

    def _knows(self, number: int) -> bool:
        return 0 <= number < len(self._tokens) and self._tokens[number] > 0

    def time_parts(self) -> dict[str, float] | None:
        """How the time of the rounds was spent, in seconds by activity; None without rounds.jsonl.

        Training means forward and backward passes and updates. Its time is divided by tokens into
        "read", "padding" (in chunks) and "unused" (chunks). The lines of rounds give "evaluation",
        "checkpoints", "compiling" and "idle".

        Lines of earlier versions give only the seconds of a round. Then the median time of a token
        over the rounds counts as training; the time beyond that is "first" in the first round, and
        "beyond" in the others.
        """
        tokens = np.array(self._tokens)
        used = tokens > 0
        if not used.any():
            return None
        training, tokens = np.array(self._training)[used], tokens[used]
        others = dict(self._spent)
        if self._has_untold:
            usual = np.minimum(training, np.median(training / tokens) * tokens)
            beyond, training = training - usual, usual
            first = float(beyond[0]) if used[0] else 0.0
            others |= {"first": first, "beyond": float(beyond.sum()) - first}
        read, chunks = self.trained["read"], self.trained["chunks"]
        total = max(self.trained["tokens"], 1.0)
        shares = {"read": read, "padding": chunks - read, "unused": total - chunks}
        parts = {name: float(training.sum()) * share / total for name, share in shares.items()}
        return parts | others

    def _count_round(self, fields: dict[str, Any]) -> None:
        """Counts the tokens of a round from its updates, for runs without rounds.jsonl."""
        if self._has_rounds or "computed_tokens" not in fields:
            return
        number, time = int(fields["step"]), float(fields["time"])
        if self._counted is None or number != self._counted[0]:
            before, self._counted = self._counted, [number, time, 0, 0]
            if before is not None and time > before[1]:
                _, _, chunks, read = before
                self._add_round(
                    int(before[0]), [time, time - before[1], chunks, chunks, read, 0, 0, 0, 0]
                )
        self._counted[2] += int(fields["computed_tokens"])
        self._counted[3] += int(fields["tokens"])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _why_skipped(fields: dict[str, Any]) -> str:
    """The number of a skipped update that is not finite, in words."""
    if fields["loss"] is None:
        return "its loss is not finite"
    if fields.get("grad_norm") is None:
        return "its gradient is not finite"
    return "a new parameter is not finite"


def _name(fields: dict[str, Any]) -> str:
    if not isinstance(fields["task"], str):
        raise ValueError("a task's name should be a text")
    return fields["task"]


def _nothing_new() -> dict[str, Any]:
    return {
        "tasks": {},
        "loss": {},
        "held_out": {},
        "rounds": [],
        "events": [],
        "details": [],
        "gone": [],
        "again": False,
    }
