"""loss.png: the training loss of every task."""

from pathlib import Path

import numpy as np

from .metrics import read_metrics

# Points of the running mean drawn over the raw losses.
_SMOOTHING = 10
# Most characters of names beside each other in the legend.
_LEGEND = 100


def plot_losses(metrics: Path, path: Path) -> None:
    """Draws the loss of every task over its steps, raw and as a running mean. Skipped updates are
    left out.

    Args:
      metrics: path of metrics.jsonl.
      path: the PNG file to write.
    """
    # Importing matplotlib takes half a second, which the start of training need not wait for.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    lines = read_metrics(metrics)
    tasks = list(dict.fromkeys(line["task"] for line in lines))
    for i, task in enumerate(tasks):
        kept = [
            m for m in lines if m["task"] == task and m["loss"] is not None and not m["skipped"]
        ]
        if not kept:
            continue
        steps = np.array([m["task_step"] for m in kept])
        losses = np.array([m["loss"] for m in kept])
        sums = np.convolve(losses, np.ones(_SMOOTHING))[: len(losses)]
        means = sums / np.minimum(np.arange(1, len(losses) + 1), _SMOOTHING)
        color = f"C{i % 10}"
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, means, color=color, linewidth=2, label=task)
    axes.set_xlabel("task step (global batches)")
    axes.set_ylabel("training loss (nats per target token)")
    axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.25)
    columns, labels = 1 + len(tasks) // 12, axes.get_legend_handles_labels()[1]
    # Long names of many tasks would leave no room for the losses.
    if labels and columns * max(map(len, labels)) <= _LEGEND:
        axes.legend(ncols=columns)
    figure.savefig(path, dpi=120)
