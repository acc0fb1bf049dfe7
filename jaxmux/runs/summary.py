"""The results of a training run, as summary.json holds them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.engine import Engine
from jaxmux.installed_versions import installed_versions
from jaxmux.models import device_peak
from jaxmux.printable import shown_state

from .run_checkpoint import RunPosition

_TASK_FIELDS = ("status", "error", "train_loss_first", "train_loss_last", "eval_loss_first")
_TASK_FIELDS += ("eval_loss", "eval_target_tokens", "target_tokens", "tokens", "skipped")
# Summaries of earlier versions lack these.
_LATER_FIELDS = ("best_step", "stopped_early", "bad_streak")

_RESULTS = {"steps", *_TASK_FIELDS}


class Summary(NamedTuple):
    """The results of a training run (one call of `fine_tune`).

    A target token is a token that counts in the loss.

    Attributes:
      tasks: by name, a dict with the task's results. "status" is "succeeded" (all steps are
        trained), "stopped early" (the task has an adapter too) or "failed", and "error" is the
        reason for a failure or None. "steps" is the number of global batches
        trained. "train_loss_first" and "train_loss_last" are the losses of the first and last
        applied update; "eval_loss_first" and "eval_loss" are the losses of the held-out data before
        and after training. Losses are in nats per target token, or None if there is none. "tokens"
        and "target_tokens" count all tokens and the target tokens that were trained;
        "eval_target_tokens" counts the target tokens of the held-out data. "skipped" is the number
        of updates that were skipped because a value was not finite, and "bad_streak" the number of
        those at the end of training. "samples_truncated" and
        "samples_dropped" count the training samples that were cut or left out because of their
        length. "best_step" is the number of steps after which the loss of the held-out data was
        lowest, or None; "stopped_early" is the reason why a task stopped before its last step, or
        None.
      tokens_per_second: computed tokens, padding included, per second of training.
      effective_tokens_per_second: computed tokens without padding per second of training.
      padding_fraction: fraction of the computed tokens that is padding, from 0 to 1.
      wall_seconds: seconds spent training, summed over all calls that continued the training run.
        Compilation is included; loading and the evaluations are not.
      versions: versions of the packages jaxmux, jax, jaxlib, flax and optax.
      peak_memory_bytes: most bytes of a device's memory in use at the same time in this process,
        of several processes in the first one; None if the device does not report it, as a CPU.
      predicted_memory_bytes: the peak that the memory model predicted before training; None if it
        is not known.
      round_seconds: median of the seconds from one round (one global batch of every task) to the
        next, in the later half of this call's rounds; None if there were too few.
      predicted_round_seconds: seconds of a round that the time model predicted before training, on
        average over the run; None if nothing was measured on such a device.
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
        """True if no task failed."""
        return all(task["status"] != "failed" for task in self.tasks.values())

    @classmethod
    def of(
        cls,
        engine: Engine,
        position: RunPosition,
        sweeps: dict[str, dict[str, dict[str, Any]]],
        **others: float | None,
    ) -> "Summary":
        """The summary of a finished training run.

        Args:
          engine: the engine, after training.
          position: the final position of the training run.
          sweeps: as in `Summary`.
          others: the fields that begin with "predicted", and `round_seconds`.
        """
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
        """Reads summary.json; None if the file does not exist or is damaged.

        Args:
          path: path of summary.json.
        """
        try:
            summary = cls(**json.loads(path.read_text()))
            # Whoever has a summary may then rely on every result being there.
            complete = all(_RESULTS <= task.keys() for task in summary.tasks.values())
            for task in summary.tasks.values():
                # Earlier versions wrote "succeeded" for tasks that stopped early.
                task["status"] = shown_state(task["status"], task.get("stopped_early"))
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        return summary if complete else None

    def to_json(self) -> str:
        """The text of summary.json, which holds the fields by name."""
        return json.dumps(self._asdict(), indent=2) + "\n"


def last_loss(task: Mapping[str, Any]) -> float | None:
    """The training loss with which a task has ended: nan if its last update was skipped.

    Args:
      task: the entry of the task in `Summary.tasks`.
    """
    return math.nan if task.get("bad_streak") else task["train_loss_last"]


def _task_summary(engine: Engine, name: str) -> dict[str, Any]:
    fields, samples = engine.progress(name).to_json(), engine.prepared(name).samples
    names = (*_TASK_FIELDS, *_LATER_FIELDS)
    progress = {"steps": fields["step"]} | {field: fields[field] for field in names}
    progress["status"] = shown_state(fields["status"], fields["stopped_early"])
    return progress | {"samples_truncated": samples.truncated, "samples_dropped": samples.dropped}
