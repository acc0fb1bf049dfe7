"""Weights & Biases. Its environment variables, such as WANDB_MODE and WANDB_PROJECT, choose the
settings."""

import os
import uuid
from collections.abc import Callable

import wandb

from .tracker import Point, TrackedRun

_PROJECT = "jaxmux"
# The axis of all charts. The built-in steps of Weights & Biases must rise, but a held-out loss may
# come one round late.
_ROUND = "round"


class WeightsAndBiases:
    """The `Tracker` of Weights & Biases."""

    def __init__(self, run: TrackedRun, id: str):
        """Opens the run with this id in Weights & Biases."""
        is_offline = wandb.setup().settings.mode not in ("online", "shared")
        # `wandb.init` would ask for the key in the terminal, in the middle of training.
        if not (is_offline or wandb.login(prompt=False)):
            raise RuntimeError("no API key; run `wandb login`, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            id=id,
            name=run.name,
            resume="allow",
            config=dict(run.config),
            allow_val_change=True,
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            # Keep jaxmux's output out of Weights & Biases.
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric(_ROUND, hidden=True)
        self._run.define_metric("*", step_metric=_ROUND)

    def log(self, point: Point) -> None:
        self._run.log({_ROUND: point.step, **point.values})

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def open_tracker(run: TrackedRun, id: str | None, keep: Callable[[str], None]) -> WeightsAndBiases:
    """As `OpenTracker`."""
    if id is None:
        keep(id := uuid.uuid4().hex[:8])
    return WeightsAndBiases(run, id)
