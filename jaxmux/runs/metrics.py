"""Metrics of a training run, written to metrics.jsonl and to TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX import SummaryWriter

from jaxmux.engine import TaskEvaluation, TaskUpdate

from .json_lines import json_line
from .run_checkpoint import RunPosition
from .run_directory import RunDirectory

# The fields without which a line of metrics.jsonl counts as damaged.
_NEEDED = {"task", "task_step", "loss", "skipped"}


class MetricsWriter:
    """Appends every task update to metrics.jsonl, every held-out loss to held_out.jsonl, and both
    to TensorBoard; and every round to rounds.jsonl."""

    def __init__(self, directory: RunDirectory, position: RunPosition, say: Callable[[str], None]):
        """Opens the files and removes everything that was written after the last checkpoint.

        Args:
          directory: the run directory.
          position: the position of the checkpoint.
          say: function that prints one line; it is told of lost metrics.
        """
        self._metrics = _Lines(directory.metrics, position.metrics_bytes, say)
        self._held_out = _Lines(directory.held_out, position.held_out_bytes, say)
        self._rounds = _Lines(directory.rounds, position.rounds_bytes, say)
        self._say = say
        self._tensorboard: SummaryWriter | None = SummaryWriter(
            str(directory.tensorboard), purge_step=position.rounds
        )

    def write(self, updates: Iterable[TaskUpdate], evaluations: Iterable[TaskEvaluation]) -> None:
        """Appends one line for each update and for each held-out loss, with the time of day in
        seconds since 1970. Numbers that are not finite become null.

        Args:
          updates: the updates.
          evaluations: the held-out losses.
        """
        updates, evaluations = list(updates), list(evaluations)
        self._metrics.append([update._asdict() for update in updates])
        self._held_out.append([done._asdict() for done in evaluations])
        for update in updates:
            for name in ("loss", "lr", "grad_norm"):
                self._add_scalar(f"{name}/{update.task}", getattr(update, name), update.step)
        for done in evaluations:
            self._add_scalar(f"held_out_loss/{done.task}", done.loss, done.step)

    def write_round(self, line: Mapping[str, Any]) -> None:
        """Appends the line of a round, with the time of day.

        Args:
          line: the result of `round_line`.
        """
        self._rounds.append([line])

    def tell(self, position: RunPosition) -> None:
        """Waits until the lines are on disk, and enters the lengths of the files.

        Args:
          position: the position of the training run; it is changed.
        """
        position.metrics_bytes = self._metrics.length()
        position.held_out_bytes = self._held_out.length()
        position.rounds_bytes = self._rounds.length()

    def close(self) -> None:
        """Closes the files."""
        self._metrics.close()
        self._held_out.close()
        self._rounds.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _add_scalar(self, name: str, value: float, step: int) -> None:
        """Writes a value to TensorBoard if it is finite. Its writer is a thread that ends when the
        disk is full, and then adding values would block for ever."""
        if self._tensorboard is None or not math.isfinite(value):
            return
        if self._tensorboard.file_writer.event_writer._worker.is_alive():
            self._tensorboard.add_scalar(name, value, step)
        else:
            self._tensorboard = None
            self._say("TensorBoard's files cannot be written; training goes on without them")


class _Lines:
    """A file of JSON lines that is continued from a checkpoint."""

    def __init__(self, path: Path, length: int, say: Callable[[str], None]):
        """Opens the file and cuts it off at the end of its last line that the checkpoint knows.

        Args:
          path: the file.
          length: its length at the checkpoint, in bytes.
          say: function that prints one line; it is told of lost lines.
        """
        self._file = open(path, "a+b")
        if (size := self._file.seek(0, os.SEEK_END)) < length:
            say(
                f"{path}: {length - size} bytes are lost; training is not affected, and later "
                "metrics are appended"
            )
            length = _end_of_line(self._file, size)
        self._file.truncate(length)

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines, with the time of day."""
        try:
            for fields in lines:
                self._file.write(json_line({**fields, "time": round(time.time(), 3)}))
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
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and _NEEDED <= found.keys():
            lines.append(found)
    return lines


def _end_of_line(file: BinaryIO, size: int) -> int:
    """The length of the complete lines in the first `size` bytes of a file."""
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1
