"""The summary of a training run: its table, loss.png, and the training notes in adapters' cards."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmux.data.hugging_face import is_saved_data_set
from jaxmux.data.sources import HUGGING_FACE_PREFIX
from jaxmux.engine import Engine, TaskProgress, TrainedTask
from jaxmux.installation import installed_versions
from jaxmux.models import device_peak
from jaxmux.objectives import LOSS, OBJECTIVES, SFT, Comparison, CustomLoss
from jaxmux.peft import Notes
from jaxmux.printable import shown_state
from jaxmux.specifications.reading import task_to_json

from .checkpoints import RunPosition
from .metrics import read_metrics

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", re.ASCII)


def notes_of_task(trained: TrainedTask) -> Notes:
    fields = task_to_json(trained.task)
    samples = {"training": trained.samples, "held_out": trained.held_out_samples}
    fingerprints = trained.fingerprints
    name, progress = trained.task.name, trained.progress
    is_best = trained.task.keep_best and progress.best_step is not None
    return notes_of_record(name, fields, samples, fingerprints, progress, is_best)


def notes_of_record(
    name: str,
    fields: Mapping[str, Any],
    samples: Mapping[str, int],
    fingerprints: Mapping[str, str],
    progress: TaskProgress,
    is_best: bool,
) -> Notes:
    """Like `notes_of_task`, from the entries of a run directory.

    Args:
      fields: the task as JSON, with or without its name.
      samples: number of "training" and "held_out" samples or pairs; empty if unknown.
      fingerprints: hashes of the data, from `PreparedTask.fingerprints`.
      is_best: whether the adapter is the one with the best value of `Task.best_metric`.
    """
    sources = fields["data"] if isinstance(fields["data"], list) else [fields["data"]]
    held_out_data = fields["eval_data"] and _shown(fields["eval_data"])
    if (fraction := fields.get("validation_fraction")) is not None:
        held_out_data = f"{100 * fraction:.4g}% of the training records, which were not trained on"
    # Earlier versions have recorded no objective.
    objective = OBJECTIVES.get(fields.get("objective", {"kind": SFT.kind})["kind"], CustomLoss)
    losses = "Losses" + " in nats per target token" * (objective is SFT)
    compared = Comparison(fields.get("best_metric", LOSS))
    which = "" if compared.metric == LOSS else f" {compared.metric}"
    hub = [each["path"].removeprefix(HUGGING_FACE_PREFIX) for each in sources if _is_on_hub(each)]
    sections = {
        "Data": {
            "Training data": [_shown(source) for source in sources],
            f"Training {objective.unit}s": samples.get("training"),
            "Fingerprint of the training data": fingerprints.get(f"data of task {name!r}"),
            "Held-out data": held_out_data,
            f"Held-out {objective.unit}s": samples.get("held_out") if held_out_data else None,
            "Fingerprint of the held-out data": (
                fingerprints.get(f"held-out data of task {name!r}") if held_out_data else None
            ),
        },
        "Hyperparameters": {
            "Batch size": fields["batch_size"],
            "Epochs": fields["epochs"],
            "Steps": progress.step,
            "Longest sample in tokens": fields["max_length"],
            "Seed": fields["seed"],
            "Began with the adapter": fields["resume_from"] and Path(fields["resume_from"]).name,
            "Objective": None if objective is SFT else fields["objective"],
            "Adapter": fields["adapter"],
            "Optimizer and schedule": fields["optimizer"],
        },
        losses: {
            "Training, first step": progress.train_loss_first,
            "Training, last step": progress.train_loss_last,
            "Held-out data, before training": progress.eval_loss_first,
            "Held-out data, after training": progress.eval_loss,
            f"Held-out data, {compared.best}{which}": compared.value(
                progress.best_loss, progress.best_metrics
            ),
            f"Steps until the {compared.best}{which}": progress.best_step,
            "This adapter": (
                f"that of the {compared.best}{which or ' loss'}" if is_best else "the last one"
            ),
        },
        "Tokens trained": {
            "All": progress.tokens,
            "Those that count in the loss": progress.target_tokens,
        },
    }
    return Notes(name, sections, hub)


def _shown(source: Mapping[str, Any]) -> str:
    """The name of a source; for a file, without its folder on this machine."""
    if _is_on_hub(source):
        return source["path"]
    return Path(source["path"].removeprefix(HUGGING_FACE_PREFIX)).name


def _is_on_hub(source: Mapping[str, Any]) -> bool:
    path = source["path"]
    name = path.removeprefix(HUGGING_FACE_PREFIX)
    is_name = path.startswith(HUGGING_FACE_PREFIX) and _HUB_NAME.fullmatch(name)
    return bool(is_name) and not is_saved_data_set(Path(name))


# The running mean over the raw losses averages this number of points.
_SMOOTHING = 10
# The legend is drawn only if its names side by side have at most this number of characters.
_LEGEND = 100


def plot_losses(metrics: Path, path: Path) -> None:
    """Draws the loss of every task over its steps to a PNG file, raw and as a running mean. Skipped
    updates are left out."""
    # Imported here because importing matplotlib takes half a second, which would delay training.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.add_subplot()
    lines = read_metrics(metrics)
    # Only objectives other than SFT have metrics.
    unit = "" if any(line.get("metrics") for line in lines) else " (nats per target token)"
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
    axes.set_ylabel(f"training loss{unit}")
    # The losses of some objectives may be negative.
    axes.set_yscale("log" if all((line["loss"] or 1) > 0 for line in lines) else "linear")
    axes.grid(True, which="both", alpha=0.25)
    columns, labels = 1 + len(tasks) // 12, axes.get_legend_handles_labels()[1]
    # Long names of many tasks would leave no room for the losses.
    if labels and columns * max(map(len, labels)) <= _LEGEND:
        axes.legend(ncols=columns)
    figure.savefig(path, dpi=120)


_TASK_FIELDS = ("status", "error", "train_loss_first", "train_loss_last", "eval_loss_first")
_TASK_FIELDS += ("eval_loss", "eval_target_tokens", "target_tokens", "tokens", "skipped")
# Summaries of earlier versions lack these.
_LATER_FIELDS = ("eval_metrics", "best_step", "stopped_early", "bad_streak")

_RESULTS = {"steps", *_TASK_FIELDS}


class Summary(NamedTuple):
    """The results of a training run (one call of `fine_tune`).

    A target token is a token that counts in the loss.

    Attributes:
      tasks: by name, a dict with the task's results. "status" is "succeeded" (all steps are
        trained), "stopped early" (the task has an adapter too) or "failed", and "error" is the
        reason for a failure or None. "steps" is the number of global batches trained, and
        "objective" the kind of the task's objective. "train_loss_first" and "train_loss_last" are
        the losses of the first and last applied update; "eval_loss_first" and "eval_loss" are the
        losses of the held-out data before and after training. Losses are values of the objective
        (of "sft" in nats per target token), or None if there is none. "eval_metrics" has the other
        metrics of the objective after training by name. "tokens" and "target_tokens"
        count all tokens and the target tokens that were trained;
        "eval_target_tokens" counts the target tokens of the held-out data. "skipped" is the number
        of updates that were skipped because a value was not finite, and "bad_streak" the number of
        consecutive skipped updates at the end of training. "samples_truncated" and
        "samples_dropped" count the training samples that were cut or left out because of their
        length. "best_step" is the number of steps after which "best_metric", the metric that
        `Task.best_metric` names, was best, or None; "stopped_early" is the reason why a task
        stopped before its last step, or None.
      tokens_per_second: computed tokens, padding included, per second of training.
      effective_tokens_per_second: computed tokens without padding per second of training.
      padding_fraction: fraction of the computed tokens that is padding, from 0 to 1.
      wall_seconds: seconds spent training, summed over all calls that continued the training run.
        Compilation is included; loading and the evaluations are not.
      versions: versions of the packages jaxmux, jax, jaxlib, flax and optax.
      peak_memory_bytes: most bytes of a device's memory in use at the same time in this process (in
        the first of several processes); None if the device does not report it, for example a CPU.
      predicted_memory_bytes: the peak that the memory model predicted before training; None if it
        is not known.
      round_seconds: median of the seconds from one round (one global batch of every task) to the
        next, in the later half of this call's rounds; None if there were too few.
      predicted_round_seconds: mean seconds of a round that the time model predicted before
        training; None without measured costs for this kind of device.
      sweeps: by name of a sweep and of the task of each configuration, the swept values by path, as
        JSON.
    """

    tasks: dict[str, dict[str, Any]]
    tokens_per_second: float
    effective_tokens_per_second: float
    padding_fraction: float
    wall_seconds: float
    versions: dict[str, str]
    peak_memory_bytes: int | None = None
    predicted_memory_bytes: int | None = None
    round_seconds: float | None = None
    predicted_round_seconds: float | None = None
    sweeps: dict[str, dict[str, dict[str, Any]]] = {}

    @property
    def succeeded(self) -> bool:
        """Whether no task failed."""
        return all(task["status"] != "failed" for task in self.tasks.values())

    @classmethod
    def of(
        cls,
        engine: Engine,
        position: RunPosition,
        sweeps: dict[str, dict[str, dict[str, Any]]],
        **others: float | None,
    ) -> "Summary":
        """The summary of a finished training run, after training and at its final position.
        `others` are `round_seconds` and the fields whose names begin with "predicted"."""
        tasks = {name: _task_summary(engine, name) for name in engine.names}
        useful = sum(task["tokens"] for task in tasks.values())
        seconds = max(position.train_seconds, 1e-9)
        return cls(
            tasks=tasks,
            tokens_per_second=position.computed_tokens / seconds,
            effective_tokens_per_second=useful / seconds,
            padding_fraction=1 - useful / max(1, position.computed_tokens),
            wall_seconds=position.train_seconds,
            versions=installed_versions("jaxmux", "jax", "jaxlib", "flax", "optax"),
            peak_memory_bytes=device_peak(),
            sweeps=sweeps,
            **others,
        )

    @classmethod
    def load(cls, path: Path) -> "Summary | None":
        """Reads summary.json; None if the file does not exist or is damaged."""
        try:
            summary = cls(**json.loads(path.read_text()))
            # Callers rely on every result being present.
            complete = all(_RESULTS <= task.keys() for task in summary.tasks.values())
            for task in summary.tasks.values():
                # Earlier versions wrote "succeeded" for tasks that stopped early.
                task["status"] = shown_state(task["status"], task.get("stopped_early"))
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return summary if complete else None

    def to_json(self) -> str:
        return json.dumps(self._asdict(), indent=2) + "\n"


def last_loss(task: Mapping[str, Any]) -> float | None:
    """The last training loss of a task, from its entry in `Summary.tasks`; nan if its last update
    was skipped."""
    return math.nan if task.get("bad_streak") else task["train_loss_last"]


def _task_summary(engine: Engine, name: str) -> dict[str, Any]:
    fields, samples = engine.progress(name).to_json(), engine.prepared(name).samples
    names = (*_TASK_FIELDS, *_LATER_FIELDS)
    progress = {"steps": fields["step"]} | {field: fields[field] for field in names}
    progress["status"] = shown_state(fields["status"], fields["stopped_early"])
    task = engine.prepared(name).task
    progress |= {"objective": task.objective.kind, "best_metric": task.best_metric}
    return progress | {"samples_truncated": samples.truncated, "samples_dropped": samples.dropped}
