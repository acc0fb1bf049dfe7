"""A growing file of JSON lines, read piece by piece."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# At most this many bytes are read at a time, so that callers can use the first lines early.
_PIECE = 4 * 2**20
# If the last this many bytes before the current position change, the file was replaced.
_PROOF = 64


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


# Refuse NaN and Infinity, because browsers cannot read them.
_DECODER = json.JSONDecoder(parse_constant=_refuse)


class Line(NamedTuple):
    """A line of the file: its JSON object, the position of its first byte in the file, and its
    length in bytes."""

    fields: dict[str, Any]
    offset: int
    length: int


class LineFile:
    """Reads the lines that another process has appended to a file since the last call.

    Attributes:
      path: the file, which need not exist yet.
      damaged: number of lines that are not JSON objects and were skipped.
      left: number of bytes of the file that have not been read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.damaged = 0
        self.left = 0
        self._position, self._proof = 0, b""
        self._identity: tuple[int, int] | None = None

    def replaced(self) -> bool:
        """Whether lines that have been read are no longer in the file, because the file was cut
        when a training run continued from a checkpoint, or another file has taken its place."""
        if self._identity is None:
            return False
        with _open(self.path) as file:
            if file is None:
                return True
            status = os.fstat(file.fileno())
            if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._position:
                return True
            return self._before(file) != self._proof

    def read(self) -> Iterator[Line]:
        """Yields the complete lines of the next piece of the file."""
        with _open(self.path) as file:
            if file is None:
                return
            status = os.fstat(file.fileno())
            self._identity = status.st_dev, status.st_ino
            file.seek(self._position)
            piece = file.read(_PIECE)
            end = piece.rfind(b"\n") + 1
            if not end and len(piece) == _PIECE:
                # jaxmux writes no line of this length.
                self.damaged, end = self.damaged + 1, len(piece)
            begin, self._position = self._position, self._position + end
            self.left = status.st_size - self._position if end else 0
            self._proof = self._before(file)
        for text in io.BytesIO(piece[:end]):
            try:
                fields = _DECODER.decode(text.decode())
                if not isinstance(fields, dict):
                    raise ValueError
            except (ValueError, RecursionError):
                self.damaged += bool(text.strip())
            else:
                yield Line(fields, begin, len(text))
            begin += len(text)

    def _before(self, file: Any) -> bytes:
        begin = max(0, self._position - _PROOF)
        file.seek(begin)
        return file.read(self._position - begin)


def line_at(path: Path, offset: int, length: int) -> dict[str, Any]:
    """The line at this position (as in `Line`), which has been read before. Raises ValueError if
    the file has changed."""
    with _open(path) as file:
        if file is None:
            raise ValueError(f"{path} is gone")
        file.seek(offset)
        return _DECODER.decode(file.read(length).decode())


def _open(path: Path) -> Any:
    """The open file, or a context manager that gives None if the file cannot be opened. Links are
    not followed, so that nothing outside the run directory is read."""
    try:
        return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb")
    except OSError:
        return _Nothing()


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        pass
