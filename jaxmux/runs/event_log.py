"""The events of a server, as lines of events.jsonl."""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .json_lines import json_line

if TYPE_CHECKING:
    from jaxmux.live import Event

EVENTS_BYTES = 64 * 2**20
# Names of the files that have been set aside. Those of higher numbers are newer.
EVENTS_SET_ASIDE = re.compile(r"events\.(\d+)\.jsonl")
# Number of these files that are kept.
_KEPT = 3
# Times in the file are rounded to so many digits of a second.
_DIGITS = 3


class EventLog:
    """Appends events to a file. Nothing depends on the file but what it tells its readers, so a
    full disk does not stop training.

    A file that has become large is set aside: it is renamed from events.jsonl to events.<n>.jsonl,
    with a number that is higher than all others, and a new file is begun. Only the last of these
    files are kept.
    """

    def __init__(self, path: Path, say: Callable[[str], None], most_bytes: int = EVENTS_BYTES):
        """Opens the file.

        Args:
          path: the file events.jsonl.
          say: function that prints one line; it is told if events are lost.
          most_bytes: size in bytes at which the file is set aside.
        """
        self._path, self._say, self._fails = path, say, False
        self._most_bytes = most_bytes
        # What the next event begins with: the end of a line that was cut off.
        self._first = b""
        self._file = self._open()
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._first = b"\n"

    def reached(self, registered: Mapping[str, float]) -> dict[str, int]:
        """By task, the number of steps that the kept events tell of.

        Args:
          registered: by name of the tasks of interest, when they were registered, in seconds since
            1970. Earlier events belong to other tasks of the same names.
        """
        steps: dict[str, int] = {}
        for line in self._lines(min(registered.values(), default=math.inf)):
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
        if self._size >= self._most_bytes:
            try:
                self._set_aside()
            except OSError as e:
                self._complain(f"cannot be set aside ({e.strerror}); it grows")
        line = self._first + json_line(fields | event.fields)
        try:
            written = self._append(line)
            # A full disk takes the beginning of a line, and says so at the next write.
            while written < len(line):
                self._first = b"\n"
                written += self._append(line[written:])
            self._first = b""
        except OSError as e:
            self._complain(f"cannot be written ({e.strerror}); events are lost")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.open(self._path, flags, 0o666)

    def _complain(self, problem: str) -> None:
        """Tells of a problem with the file, if it is the first one."""
        if not self._fails:
            self._say(f"{self._path}: {problem}")
        self._fails = True

    def _append(self, content: bytes) -> int:
        written = os.write(self._file, content)
        self._size += written
        return written

    def _set_aside(self) -> None:
        """Begins a new file. If none can be created, the present one goes on."""
        number = max(self._numbers(), default=0) + 1
        self._path.rename(self._numbered(number))
        try:
            file = self._open()
        except OSError:
            self._numbered(number).rename(self._path)
            raise
        os.close(self._file)
        self._file, self._size, self._first = file, 0, b""
        for old in self._numbers()[:-_KEPT]:
            self._numbered(old).unlink()

    def _numbers(self) -> list[int]:
        """The numbers of the files that were set aside, ascending."""
        names = map(EVENTS_SET_ASIDE.fullmatch, os.listdir(self._path.parent))
        return sorted(int(name[1]) for name in names if name)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"events.{number}.jsonl")

    def _lines(self, since: float) -> Iterator[bytes]:
        """The lines of all files that were changed since then, from the oldest on."""
        for path in (*map(self._numbered, self._numbers()), self._path):
            # File systems may round times down, by up to two seconds.
            if path.stat().st_mtime >= since - 2:
                with path.open("rb") as file:
                    yield from file
