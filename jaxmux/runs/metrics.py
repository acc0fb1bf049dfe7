"""Metrics of a training run, written to metrics.jsonl and to TensorBoard."""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tensorboardX import SummaryWriter

from jaxmux.engine import TaskUpdate

from .run_checkpoint import RunPosition
from .run_directory import RunDirectory

# The fields without which a line of metrics.jsonl counts as damaged.
_NEEDED = {"task", "task_step", "loss", "skipped"}


class MetricsWriter:
    """Appends every task update to metrics.jsonl and to TensorBoard."""

    def __init__(self, directory: RunDirectory, position: RunPosition, say: Callable[[str], None]):
        """Opens the files and removes everything that was written after the last checkpoint.

        Args:
          directory: the run directory.
          position: the position of the checkpoint.
          say: function that prints one line; it is told of lost metrics.
        """
        self._file = open(directory.metrics, "a+b")
        length = position.metrics_bytes
        if (size := self._file.seek(0, os.SEEK_END)) < length:
            say(
                f"{directory.metrics}: {length - size} bytes are lost; training is not "
                "affected, and later metrics are appended"
            )
            length = _end_of_line(self._file, size)
        self._file.truncate(length)
        self._say = say
        self._tensorboard: SummaryWriter | None = SummaryWriter(
            str(directory.tensorboard), purge_step=position.rounds
        )

    def write(self, updates: Iterable[TaskUpdate]) -> None:
        """Appends one line for each update, with the time of day in seconds since 1970. Numbers
        that are not finite become null.

        Args:
          updates: the updates.
        """
        updates = list(updates)
        try:
            for update in updates:
                line = {key: _json_number(value) for key, value in update._asdict().items()}
                line["time"] = round(time.time(), 3)
                self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
        except OSError as e:
            raise OSError(e.errno, e.strerror, self._file.name) from None
        for update in updates:
            for name in ("loss", "lr", "grad_norm"):
                self._add_scalar(f"{name}/{update.task}", getattr(update, name), update.step)

    def write_held_out(self, losses: Mapping[str, float | None], step: int) -> None:
        """Writes losses of held-out data to TensorBoard.

        Args:
          losses: by task, the loss in nats per target token; None if it is not finite.
          step: number of the round.
        """
        for task, loss in losses.items():
            if loss is not None:
                self._add_scalar(f"held_out_loss/{task}", loss, step)

    def position(self) -> int:
        """Waits until metrics.jsonl is on disk; returns its length in bytes."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
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


def _json_number(value: Any) -> Any:
    """The value, or None for a number that is not finite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
