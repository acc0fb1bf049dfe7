"""Metrics of a training run, written to metrics.jsonl and handed to the trackers."""

import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxmux.engine import TaskEvaluation, TaskUpdate

from .json_lines import json_line, objects, objects_backwards
from .run_checkpoint import RunPosition
from .run_directory import RunDirectory
from .trackers import RunTrackers

# The fields without which a line of metrics.jsonl counts as damaged.
_NEEDED = {"task", "task_step", "loss", "skipped"}


class MetricsWriter:
    """Appends every task update to metrics.jsonl, every held-out loss to held_out.jsonl, and hands
    both to the trackers; and every round to rounds.jsonl."""

    def __init__(
        self,
        directory: RunDirectory,
        position: RunPosition,
        trackers: RunTrackers,
        say: Callable[[str], None],
    ):
        """Opens the files and removes everything that was written after the last checkpoint.

        Args:
          directory: the run directory.
          position: the position of the checkpoint.
          trackers: the trackers, which `close` closes.
          say: function that prints one line; it is told of lost metrics.
        """
        self._metrics = _Lines(directory.metrics, position.metrics_bytes, say)
        self._held_out = _Lines(directory.held_out, position.held_out_bytes, say)
        self._rounds = _Lines(directory.rounds, position.rounds_bytes, say)
        self._trackers, self._finished = trackers, False
        for own in (self._metrics, self._held_out):
            lines = own.since(trackers.lacking)
            trackers.log(lines, own is self._held_out, repeated_to=sys.maxsize)

    def write(self, updates: Iterable[TaskUpdate], evaluations: Iterable[TaskEvaluation]) -> None:
        """Appends one line for each update and for each held-out loss, with the time of day in
        seconds since 1970. Numbers that are not finite become null.

        Args:
          updates: the updates.
          evaluations: the held-out losses.
        """
        now = _now()
        for own, results in ((self._metrics, updates), (self._held_out, evaluations)):
            lines = [{**result._asdict(), "time": now} for result in results]
            own.append(lines)
            self._trackers.log(lines, own is self._held_out, own.last_removed)

    def write_round(self, line: Mapping[str, Any]) -> None:
        """Appends the line of a round, with the time of day.

        Args:
          line: the result of `round_line`.
        """
        self._rounds.append([{**line, "time": _now()}])

    def tell(self, position: RunPosition) -> None:
        """Waits until the lines are on disk, and enters the lengths of the files.

        Args:
          position: the position of the training run; it is changed.
        """
        position.metrics_bytes = self._metrics.length()
        position.held_out_bytes = self._held_out.length()
        position.rounds_bytes = self._rounds.length()

    def finish(self) -> None:
        """Notes that the training run has ended, which `close` tells the trackers."""
        self._finished = True

    def close(self) -> None:
        """Closes the files and the trackers."""
        self._metrics.close()
        self._held_out.close()
        self._rounds.close()
        self._trackers.close(self._finished)


def _now() -> float:
    return round(time.time(), 3)


class _Lines:
    """A file of JSON lines that is continued from a checkpoint.

    Attributes:
      last_removed: the last round of which lines have been removed, because they were written after
        the checkpoint; -1 if there are none.
    """

    def __init__(self, path: Path, length: int, say: Callable[[str], None]):
        """Opens the file and cuts it off at the end of its last line that the checkpoint knows. If
        the file was changed or cut since, that length may lie within a line: such a line is removed
        as a whole, so the next one never goes on with it.

        Args:
          path: the file.
          length: its length at the checkpoint, in bytes.
          say: function that prints one line; it is told of lost lines.
        """
        self._file = open(path, "a+b")
        size = self._file.seek(0, os.SEEK_END)
        if (kept := _end_of_line(self._file, min(size, length))) < length:
            say(
                f"{path}: {length - kept} bytes are lost; training is not affected, and later "
                "metrics are appended"
            )
            length = kept
        self._file.seek(length)
        removed = [line.get("step") for line in objects(self._file.read())]
        self.last_removed = max((s for s in removed if isinstance(s, int)), default=-1)
        self._file.truncate(length)

    def since(self, step: int) -> list[dict[str, Any]]:
        """The last lines, from the first one of a round on."""
        if not (end := self._file.seek(0, os.SEEK_END)):
            return []
        found: list[dict[str, Any]] = []
        with mmap.mmap(self._file.fileno(), end, access=mmap.ACCESS_READ) as content:
            for own in objects_backwards(content):
                if not own.keys() >= {"step", "task", "time"}:
                    continue  # a line of an early version
                if own["step"] < step:
                    break
                found.append(own)
        return found[::-1]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines."""
        try:
            for fields in lines:
                self._file.write(json_line(fields))
            self._file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, self._file.name) from None

    def length(self) -> int:
        """Waits until the file is on disk; returns its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts with the fields of `TaskUpdate`, and "time". Damaged
    lines are left out. Lines of older versions of jaxmux may lack some fields.

    Args:
      path: path of metrics.jsonl.
    """
    return _read_lines(path, _NEEDED)


def read_held_out_losses(path: Path) -> list[dict[str, Any]]:
    """The lines of held_out.jsonl as dicts with the fields of `TaskEvaluation`, and "time". Damaged
    lines are left out.

    Args:
      path: path of held_out.jsonl.
    """
    return _read_lines(path, {"task", "task_step", "loss"})


def _read_lines(path: Path, needed: set[str]) -> list[dict[str, Any]]:
    return [found for found in objects(path.read_bytes()) if needed <= found.keys()]


def _end_of_line(file: BinaryIO, size: int) -> int:
    """The length of the complete lines in the first `size` bytes of a file."""
    file.seek(max(size - 1, 0))
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1
