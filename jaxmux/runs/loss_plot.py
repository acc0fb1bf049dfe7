"""loss.png: the training loss of every task."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

# Points of the running mean drawn over the raw losses.
_SMOOTHING = 10


def plot_losses(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws the loss of every task over its steps, raw and as a running mean. Skipped updates are
    left out.

    Args:
      metrics: lines of metrics.jsonl.
      path: the PNG file to write.
    """
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    tasks = list(dict.fromkeys(line["task"] for line in metrics))
    for i, task in enumerate(tasks):
        kept = [
            m for m in metrics if m["task"] == task and m["loss"] is not None and not m["skipped"]
        ]
        if not kept:
            continue
        steps = np.array([m["task_step"] for m in kept])
        losses = np.array([m["loss"] for m in kept])
        color = f"C{i % 10}"
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, _running_mean(losses), color=color, linewidth=2, label=task)
    axes.set_xlabel("task step (global batches)")
    axes.set_ylabel("training loss (nats per target token)")
    axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.25)
    if tasks:
        axes.legend(ncols=1 + len(tasks) // 12)
    figure.savefig(path, dpi=120)


def _running_mean(values: np.ndarray) -> np.ndarray:
    total = np.cumsum(np.insert(values, 0, 0.0))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - _SMOOTHING)
    return (total[ends] - total[starts]) / (ends - starts)
