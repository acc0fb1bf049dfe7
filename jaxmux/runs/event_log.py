"""The events of a server, as lines of events.jsonl."""

import json
import os
from collections.abc import Callable
from pathlib import Path

from jaxmux.live import Event

from .json_lines import json_line


class EventLog:
    """Appends events to a file. Nothing depends on the file but what it tells its readers, so a
    full disk does not stop training.

    Attributes:
      steps: by task, the number of steps that the events of earlier servers tell of.
    """

    def __init__(self, path: Path, say: Callable[[str], None]):
        """Opens the file.

        Args:
          path: the file.
          say: function that prints one line; it is told if events are lost.
        """
        self._path, self._say, self._fails = path, say, False
        # What the next event begins with: the end of a line that was cut off.
        self._first = b""
        self.steps: dict[str, int] = {}
        if path.exists():
            for line in path.read_bytes().splitlines():
                self._count(line)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            self._first = b"\n"

    def write(self, event: Event) -> None:
        """Appends an event.

        Args:
          event: the event. Numbers that are not finite become null.
        """
        fields = {"time": round(event.time, 3), "task": event.task, "kind": event.kind}
        line = self._first + json_line(fields | event.fields)
        try:
            written = os.write(self._file, line)
            # A full disk takes the beginning of a line, and says so at the next write.
            while written < len(line):
                self._first = b"\n"
                written += os.write(self._file, line[written:])
            self._first = b""
        except OSError as e:
            if not self._fails:
                self._say(f"{self._path}: cannot be written ({e.strerror}); events are lost")
            self._fails = True

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _count(self, line: bytes) -> None:
        try:
            event = json.loads(line)
            if event["kind"] == "update":
                # A task that was started again from an earlier step may not be back yet.
                reached = self.steps.get(event["task"], 0)
                self.steps[event["task"]] = max(reached, event["task_step"])
        except (ValueError, KeyError, TypeError):
            pass  # A line that a crash has cut off.
