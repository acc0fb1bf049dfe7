"""Metrics of a run as files: metrics.jsonl and TensorBoard."""

import json
import math
import os
from collections.abc import Iterable
from typing import Any

from tensorboardX import SummaryWriter

from jaxmux.engine import TaskUpdate

from .run_directory import RunDirectory


class MetricsWriter:
    """Appends every task update to metrics.jsonl and to TensorBoard, from a known position on."""

    def __init__(self, directory: RunDirectory, position_bytes: int, rounds: int):
        """Cuts off what an interrupted run had written behind its last checkpoint."""
        self._file = open(directory.metrics, "a+b")
        self._file.truncate(position_bytes)
        self._tensorboard = SummaryWriter(str(directory.tensorboard), purge_step=rounds)

    def write(self, updates: Iterable[TaskUpdate]) -> None:
        for update in updates:
            line = {key: _json_number(value) for key, value in update._asdict().items()}
            self._file.write(json.dumps(line).encode() + b"\n")
            for name in ("loss", "lr", "grad_norm"):
                if math.isfinite(value := getattr(update, name)):
                    self._tensorboard.add_scalar(f"{name}/{update.task}", value, update.step)
        self._file.flush()

    def position(self) -> int:
        """Bytes written, safely on disk."""
        os.fsync(self._file.fileno())
        return self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        self._file.close()
        self._tensorboard.close()


def read_metrics(directory: RunDirectory) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl."""
    return [json.loads(line) for line in directory.metrics.read_text().splitlines()]


def _json_number(value: Any) -> Any:
    """JSON has no NaN: a number that is not finite becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
