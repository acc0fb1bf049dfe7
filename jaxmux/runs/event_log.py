"""The events of a server, as lines of events.jsonl."""

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .line_log import LineLog

if TYPE_CHECKING:
    from jaxmux.live import Event

# Times in the file are rounded to so many digits of a second.
_DIGITS = 3


class EventLog(LineLog):
    """The file events.jsonl, with those before it."""

    def reached(self, registered: Mapping[str, float]) -> dict[str, int]:
        """By task, the number of steps that the kept events tell of.

        Args:
          registered: by name of the tasks of interest, when they were registered, in seconds since
            1970. Earlier events belong to other tasks of the same names.
        """
        steps: dict[str, int] = {}
        for line in self.lines(min(registered.values(), default=math.inf)):
            try:
                event = json.loads(line)
                since = registered.get(event["task"])
                if event["kind"] == "update" and since is not None:
                    if event["time"] >= round(since, _DIGITS):
                        # A task that was started again from an earlier step may not be back yet.
                        reached = steps.get(event["task"], 0)
                        steps[event["task"]] = max(reached, event["task_step"])
            except (ValueError, KeyError, TypeError):
                pass  # A line that a crash has cut off.
        return steps

    def write(self, event: "Event") -> None:
        """Appends an event.

        Args:
          event: the event. Numbers that are not finite become null.
        """
        fields = {"time": round(event.time, _DIGITS), "task": event.task, "kind": event.kind}
        self.append(fields | event.fields)
