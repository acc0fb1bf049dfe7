"""Metrics of a training run, written to metrics.jsonl and to TensorBoard."""

import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX import SummaryWriter

from jaxmux.engine import TaskUpdate

from .run_directory import RunDirectory


class MetricsWriter:
    """Appends every task update to metrics.jsonl and to TensorBoard."""

    def __init__(
        self,
        directory: RunDirectory,
        position_bytes: int,
        rounds: int,
        say: Callable[[str], None],
    ):
        """Opens the files and removes everything that was written after the last checkpoint.

        Args:
          directory: the run directory.
          position_bytes: length of metrics.jsonl at the checkpoint, in bytes; 0 for a new training
            run.
          rounds: rounds completed at the checkpoint.
          say: function that prints one line; it is told of lost metrics.
        """
        self._file = open(directory.metrics, "a+b")
        if (size := self._file.seek(0, os.SEEK_END)) < position_bytes:
            say(
                f"{directory.metrics}: {position_bytes - size} bytes are lost; training is not "
                "affected, and later metrics are appended"
            )
            position_bytes = _end_of_line(self._file, size)
        self._file.truncate(position_bytes)
        self._tensorboard = SummaryWriter(str(directory.tensorboard), purge_step=rounds)

    def write(self, updates: Iterable[TaskUpdate]) -> None:
        """Appends one line for each update. Numbers that are not finite become null."""
        for update in updates:
            line = {key: _json_number(value) for key, value in update._asdict().items()}
            self._file.write(json.dumps(line).encode() + b"\n")
            for name in ("loss", "lr", "grad_norm"):
                if math.isfinite(value := getattr(update, name)):
                    self._tensorboard.add_scalar(f"{name}/{update.task}", value, update.step)
        self._file.flush()

    def position(self) -> int:
        """Waits until metrics.jsonl is on disk; returns its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl as dicts with the fields of `TaskUpdate`. Damaged lines are left
    out.

    Args:
      path: path of metrics.jsonl.
    """
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and TaskUpdate._fields == tuple(found):
            lines.append(found)
    return lines


def _end_of_line(file: BinaryIO, size: int) -> int:
    """The length of the complete lines in the first `size` bytes of a file."""
    file.seek(0)
    return file.read(size).rfind(b"\n") + 1


def _json_number(value: Any) -> Any:
    """The value, or None for a number that is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
