"""What the card of an adapter tells of its training."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmux.data.hugging_face import is_saved_data_set
from jaxmux.data.sources import HUGGING_FACE_PREFIX
from jaxmux.engine import TaskProgress, TrainedTask
from jaxmux.peft import Notes

from .task_json import task_to_json

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?", re.ASCII)


def notes_of_task(trained: TrainedTask) -> Notes:
    """What a card tells of the training of a task.

    Args:
      trained: the task.
    """
    fields = task_to_json(trained.task)
    samples = {"training": trained.samples, "held_out": trained.held_out_samples}
    fingerprints = trained.fingerprints
    name, progress = trained.task.name, trained.progress
    is_best = trained.task.keep_best and progress.best_loss is not None
    return notes_of_record(name, fields, samples, fingerprints, progress, is_best)


def notes_of_record(
    name: str,
    fields: Mapping[str, Any],
    samples: Mapping[str, int],
    fingerprints: Mapping[str, str],
    progress: TaskProgress,
    is_best: bool,
) -> Notes:
    """The same as `notes_of_task`, from what a run directory records.

    Args:
      name: name of the task.
      fields: the task as JSON, with or without its name.
      samples: number of "training" and "held_out" samples; empty if they are not known.
      fingerprints: hashes of the data, from `PreparedTask.fingerprints`.
      progress: the progress of the task.
      is_best: whether the adapter is the one with the lowest loss of the held-out data.
    """
    sources = fields["data"] if isinstance(fields["data"], list) else [fields["data"]]
    held_out_data = fields["eval_data"] and _shown(fields["eval_data"])
    if (fraction := fields.get("validation_fraction")) is not None:
        held_out_data = f"{100 * fraction:.4g}% of the training records, which were not trained on"
    hub = [own["path"].removeprefix(HUGGING_FACE_PREFIX) for own in sources if _is_on_hub(own)]
    sections = {
        "Data": {
            "Training data": [_shown(source) for source in sources],
            "Training samples": samples.get("training"),
            "Fingerprint of the training data": fingerprints.get(f"data of task {name!r}"),
            "Held-out data": held_out_data,
            "Held-out samples": samples.get("held_out") if held_out_data else None,
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
            "Adapter": fields["adapter"],
            "Optimizer and schedule": fields["optimizer"],
        },
        "Losses in nats per target token": {
            "Training, first step": progress.train_loss_first,
            "Training, last step": progress.train_loss_last,
            "Held-out data, before training": progress.eval_loss_first,
            "Held-out data, after training": progress.eval_loss,
            "Held-out data, lowest": progress.best_loss,
            "Steps until the lowest": progress.best_step,
            "This adapter": "that of the lowest loss" if is_best else "the last one",
        },
        "Tokens trained": {
            "All": progress.tokens,
            "Those that count in the loss": progress.target_tokens,
        },
    }
    return Notes(name, sections, hub)


def _shown(source: Mapping[str, Any]) -> str:
    """The name of a source. It does not tell in which folder of this machine a file lies."""
    if _is_on_hub(source):
        return source["path"]
    return Path(source["path"].removeprefix(HUGGING_FACE_PREFIX)).name


def _is_on_hub(source: Mapping[str, Any]) -> bool:
    path = source["path"]
    name = path.removeprefix(HUGGING_FACE_PREFIX)
    is_name = path.startswith(HUGGING_FACE_PREFIX) and _HUB_NAME.fullmatch(name)
    return bool(is_name) and not is_saved_data_set(Path(name))
