"""The results of a training run, as summary.json holds them."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.engine import Engine

from .checkpoints import RunPosition

_TASK_FIELDS = (
    "status",
    "error",
    "train_loss_first",
    "train_loss_last",
    "eval_loss_first",
    "eval_loss",
)
_TASK_FIELDS += ("eval_target_tokens", "target_tokens", "tokens", "skipped")


class Summary(NamedTuple):
    """The results of a training run.

    Attributes:
      tasks: by name, the task's status ("succeeded" or "failed"), error, steps, losses (nats per
        target token) and numbers of tokens.
      tokens_per_second: computed tokens, padding included, per second of training.
      effective_tokens_per_second: the same without padding.
      padding_fraction: the part of the computed tokens that is padding.
      wall_seconds: seconds spent training, summed over all resumptions.
      versions: versions of jaxmux, JAX, Flax and optax.
    """

    tasks: dict[str, dict[str, Any]]
    tokens_per_second: float
    effective_tokens_per_second: float
    padding_fraction: float
    wall_seconds: float
    versions: dict[str, str]

    @property
    def succeeded(self) -> bool:
        return all(task["status"] == "succeeded" for task in self.tasks.values())

    @classmethod
    def of(cls, engine: Engine, position: RunPosition) -> "Summary":
        tasks = {name: _task_summary(engine, name) for name in engine.names}
        useful = sum(task["tokens"] for task in tasks.values())
        seconds = max(position.train_seconds, 1e-9)
        return cls(
            tasks=tasks,
            tokens_per_second=position.computed_tokens / seconds,
            effective_tokens_per_second=useful / seconds,
            padding_fraction=1 - useful / max(1, position.computed_tokens),
            wall_seconds=position.train_seconds,
            versions={p: version(p) for p in ("jaxmux", "jax", "jaxlib", "flax", "optax")},
        )

    @classmethod
    def load(cls, path: Path) -> "Summary | None":
        """Reads summary.json; None if the file does not exist."""
        return cls(**json.loads(path.read_text())) if path.exists() else None

    def to_json(self) -> str:
        return json.dumps(self._asdict(), indent=2) + "\n"


def _task_summary(engine: Engine, name: str) -> dict[str, Any]:
    fields, samples = engine.progress(name).to_json(), engine.prepared(name).samples
    progress = {"steps": fields["step"]} | {field: fields[field] for field in _TASK_FIELDS}
    return progress | {"samples_truncated": samples.truncated, "samples_dropped": samples.dropped}
