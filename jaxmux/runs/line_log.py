"""Files of JSON lines that a server appends to for weeks, and that stay bounded in size."""

import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .json_lines import json_line, objects_backwards

# Size in bytes at which a file is set aside.
LOG_BYTES = 64 * 2**20
# Names of the files that have been set aside. Those of higher numbers are newer.
SET_ASIDE = re.compile(r"(?:events|rounds)\.(\d+)\.jsonl")
# Number of these files that are kept.
_KEPT = 3


class LineLog:
    """Appends lines to a file. Nothing depends on the file but what it tells its readers, so a
    full disk does not stop training.

    A file that has become large is set aside: "events.jsonl" is renamed to "events.<n>.jsonl", with
    a number that is higher than all others, and a new file is begun. Only the last of these files
    are kept.
    """

    def __init__(self, path: Path, say: Callable[[str], None], most_bytes: int = LOG_BYTES):
        """Opens the file.

        Args:
          path: the file, "events.jsonl" or "rounds.jsonl".
          say: function that prints one line; it is told if lines are lost.
          most_bytes: size in bytes at which the file is set aside.
        """
        self._path, self._say, self._fails = path, say, False
        self._most_bytes = most_bytes
        # What the next line begins with: the end of a line that was cut off.
        self._first = b""
        self._file = self._open()
        self._size = os.fstat(self._file).st_size
        if self._size and os.pread(self._file, 1, self._size - 1) != b"\n":
            self._first = b"\n"

    def append(self, fields: Mapping[str, Any]) -> None:
        """Appends a line.

        Args:
          fields: the entries of its object. Numbers that are not finite become null.
        """
        if self._size >= self._most_bytes:
            try:
                self._set_aside()
            except OSError as e:
                self._complain(f"cannot be set aside ({e.strerror}); it grows")
        line = self._first + json_line(fields)
        try:
            written = self._append(line)
            # A full disk takes the beginning of a line, and says so at the next write.
            while written < len(line):
                self._first = b"\n"
                written += self._append(line[written:])
            self._first = b""
        except OSError as e:
            self._complain(f"cannot be written ({e.strerror}); lines are lost")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    def lines(self, since: float) -> Iterator[bytes]:
        """The lines of all files that were changed since then, from the oldest on.

        Args:
          since: time in seconds since 1970.
        """
        for path in self._paths():
            # File systems may round times down, by up to two seconds.
            if path.stat().st_mtime >= since - 2:
                with path.open("rb") as file:
                    yield from file

    def last(self) -> dict[str, Any] | None:
        """The object of the last line that is not damaged; None if there is none."""
        for path in reversed(self._paths()):
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if not size:
                    continue
                with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
                    for found in objects_backwards(content):
                        return found
        return None

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
        own = f"{self._path.stem}."
        names = [name for name in os.listdir(self._path.parent) if name.startswith(own)]
        return sorted(int(name[1]) for name in map(SET_ASIDE.fullmatch, names) if name)

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.stem}.{number}.jsonl")

    def _paths(self) -> list[Path]:
        """All files, from the oldest on."""
        return [*map(self._numbered, self._numbers()), self._path]
