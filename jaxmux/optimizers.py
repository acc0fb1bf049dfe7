"""Optimizer specifications of a task, and the optax transforms that carry them out.

Every number of a specification reaches the compiled update as float32 data, so one program serves
all tasks of an optimizer kind whatever their learning rates. What differs between kinds is the
transform, and with it the state.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import optax
from jaxtyping import Array, Float

SCHEDULES = ("constant", "linear", "cosine")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate over a task's updates, as in Hugging Face's Trainer.

    Attributes:
      kind: after warm-up "constant", "linear" to 0 or "cosine" to 0 at the task's last step.
      warmup_steps: updates over which the rate rises linearly from 0.
      warmup_ratio: the same as a fraction of all steps; used where `warmup_steps` is 0.

    Raises:
      ValueError: a value is outside its range.
    """

    kind: str = "constant"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0

    def __post_init__(self):
        if self.kind not in SCHEDULES:
            raise ValueError(f"unknown schedule {self.kind!r}; known: {', '.join(SCHEDULES)}")
        if self.warmup_steps < 0 or not 0 <= self.warmup_ratio <= 1:
            raise ValueError(
                f"warm-up of {self.warmup_steps} steps, ratio {self.warmup_ratio}: "
                "warmup_steps should not be negative and warmup_ratio lie in [0, 1]"
            )

    def factor(self, update: int, total: int) -> float:
        """The factor of the peak rate at an update (from 0) of a task of `total` steps."""
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * total)
        if update < warmup:
            return update / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        if self.kind == "linear":
            return 1 - progress
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """What all optimizers share.

    Attributes:
      learning_rate: at the peak of the schedule.
      schedule: its course over the task's updates.
      weight_decay: see the optimizer.
      clip_norm: largest global norm of the task's gradient, as `torch.nn.utils.clip_grad_norm_`;
        None for no limit.
    """

    learning_rate: float = 2e-4
    schedule: Schedule = Schedule()
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    kind: ClassVar[str]

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "schedule" or (field.name == "clip_norm" and value is None):
                continue
            below = 1 if field.name in ("b1", "b2", "momentum") else math.inf
            if not isinstance(value, int | float) or not 0 <= value < below:
                raise ValueError(
                    f"{self.kind}: {field.name} should be a number in [0, {below}), found {value!r}"
                )
            if field.name in ("clip_norm", "eps") and value == 0:
                hint = "; None stands for no clipping" if field.name == "clip_norm" else ""
                raise ValueError(f"{self.kind}: {field.name} should be positive, found 0{hint}")

    def hyperparameters(self) -> dict[str, float]:
        """All numbers that the compiled update takes as data."""
        numbers = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("schedule", "clip_norm")
        }
        return numbers | {"clip_norm": math.inf if self.clip_norm is None else self.clip_norm}


@dataclasses.dataclass(frozen=True)
class AdamW(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as `torch.optim.AdamW`."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    kind: ClassVar[str] = "adamw"


@dataclasses.dataclass(frozen=True)
class SGD(_Optimizer):
    """Gradient descent with momentum; weight decay is added to the gradient, as
    `torch.optim.SGD`."""

    momentum: float = 0.9

    kind: ClassVar[str] = "sgd"


@dataclasses.dataclass(frozen=True)
class Lion(_Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023), decoupled weight decay."""

    b1: float = 0.9
    b2: float = 0.99

    kind: ClassVar[str] = "lion"


Optimizer = AdamW | SGD | Lion
OPTIMIZERS: Mapping[str, type[Optimizer]] = {o.kind: o for o in (AdamW, SGD, Lion)}


def transform(kind: str, hyper: Mapping[str, Float[Array, ""]]) -> optax.GradientTransformation:
    """The optax transform of one slot: from gradients to a direction that is still to be scaled by
    −learning rate.

    The state's structure depends on `kind` alone, so `hyper` may hold traced scalars.

    Raises:
      ValueError: an unknown kind. Adafactor is refused: its factored moments would see the padded
        rank columns.
    """
    if kind == "adamw":
        return optax.chain(
            optax.scale_by_adam(hyper["b1"], hyper["b2"], hyper["eps"]),
            optax.add_decayed_weights(hyper["weight_decay"]),
        )
    if kind == "sgd":
        return optax.chain(
            optax.add_decayed_weights(hyper["weight_decay"]), optax.trace(hyper["momentum"])
        )
    if kind == "lion":
        return optax.chain(
            optax.scale_by_lion(hyper["b1"], hyper["b2"]),
            optax.add_decayed_weights(hyper["weight_decay"]),
        )
    raise ValueError(f"unknown optimizer {kind!r}; known: {', '.join(OPTIMIZERS)}")
