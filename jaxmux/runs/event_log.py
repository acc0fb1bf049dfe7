"""The events of a server, as lines of events.jsonl."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from .line_log import LineLog

if TYPE_CHECKING:
    from jaxmux.live import Event

# Times in the file are rounded to so many digits of a second.
_DIGITS = 3


class Told(NamedTuple):
    """What events tell of a task.

    Attributes:
      steps: number of steps that it had trained.
      state: its last state; None if they tell of none.
    """

    steps: int
    state: str | None


class EventLog(LineLog):
    """The file events.jsonl, with those before it."""

    def told(self, registered: Mapping[str, float]) -> dict[str, Told]:
        """By task, what the kept events tell of it.

        Args:
          registered: by name of the tasks of interest, when they were registered, in seconds since
            1970. Earlier events belong to other tasks of the same names.
        """
        tasks: dict[str, Told] = {}
        for line in self.lines(min(registered.values(), default=math.inf)):
            try:
                event = json.loads(line)
                name, kind = event["task"], event["kind"]
                since = registered.get(name)
                if since is None or event["time"] < round(since, _DIGITS):
                    continue
                before = tasks.get(name, Told(0, None))
                if kind == "update":
                    # A task that was started again from an earlier step may not be back yet.
                    steps = max(before.steps, event["task_step"])
                    tasks[name] = before._replace(steps=steps)
                elif kind == "state":
                    tasks[name] = before._replace(state=event["state"])
            except (ValueError, KeyError, TypeError):
                pass  # A line that a crash has cut off.
        return tasks

    def write(self, event: "Event") -> None:
        """Appends an event.

        Args:
          event: the event. Numbers that are not finite become null.
        """
        fields = {"time": round(event.time, _DIGITS), "task": event.task, "kind": event.kind}
        self.append(fields | event.fields)
