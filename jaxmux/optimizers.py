"""Optimizers: what a task specifies, and the optax transform that carries it out.

To add one, write its class and list it in `OPTIMIZERS`; nothing else knows the optimizers by name.

Every number of a specification reaches the compiled update as float32 data, so one program serves
all tasks of an optimizer kind, whatever their learning rates. Kinds differ in the transform, and
with it in the state.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .learning_rates import Schedule

if TYPE_CHECKING:
    import optax


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The part of a specification that all optimizers share.

    A subclass adds its own numbers as fields, all of which `transform` finds in `hyper`.

    Attributes:
      learning_rate: the rate at the peak of the schedule.
      schedule: its course over the task's updates.
      weight_decay: see the optimizer.
      clip_norm: largest global norm of the task's gradient, as in
        `torch.nn.utils.clip_grad_norm_`; None for no limit.
      kind: name of the optimizer in configs, checkpoints and profiles.
      moments: number of arrays of the parameters' shape that its state holds.

    Raises:
      ValueError: a value is outside its range.
    """

    learning_rate: float = 2e-4
    schedule: Schedule = Schedule()
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    kind: ClassVar[str]
    moments: ClassVar[int]

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
        """By field, the numbers that the compiled update takes as data besides the learning rate;
        no clipping is infinity."""
        numbers = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("learning_rate", "schedule", "clip_norm")
        }
        return numbers | {"clip_norm": math.inf if self.clip_norm is None else self.clip_norm}

    @staticmethod
    def transform(hyper: Mapping[str, Any]) -> "optax.GradientTransformation":
        """The optax transform of one slot: from gradients to a direction, which the engine then
        scales by minus the learning rate.

        The structure of its state must not depend on `hyper`, which may hold traced scalars. Every
        entry of the state is either a tree of the parameters' shapes (a moment) or an integer count
        of updates.

        Args:
          hyper: by name, the numbers of `hyperparameters`.
        """
        raise NotImplementedError


# optax is imported where a transform is built, because the planner and the command lines read these
# specifications and need no device code.
@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as `torch.optim.AdamW`."""

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    kind: ClassVar[str] = "adamw"
    moments: ClassVar[int] = 2

    @staticmethod
    def transform(hyper):
        import optax

        return optax.chain(
            optax.scale_by_adam(hyper["b1"], hyper["b2"], hyper["eps"]),
            optax.add_decayed_weights(hyper["weight_decay"]),
        )


@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent with momentum; weight decay is added to the gradient, as in
    `torch.optim.SGD`."""

    momentum: float = 0.9

    kind: ClassVar[str] = "sgd"
    moments: ClassVar[int] = 1

    @staticmethod
    def transform(hyper):
        import optax

        return optax.chain(
            optax.add_decayed_weights(hyper["weight_decay"]), optax.trace(hyper["momentum"])
        )


@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """Sign of an interpolated momentum (Chen et al. 2023), decoupled weight decay."""

    b1: float = 0.9
    b2: float = 0.99

    kind: ClassVar[str] = "lion"
    moments: ClassVar[int] = 1

    @staticmethod
    def transform(hyper):
        import optax

        return optax.chain(
            optax.scale_by_lion(hyper["b1"], hyper["b2"]),
            optax.add_decayed_weights(hyper["weight_decay"]),
        )


OPTIMIZERS: Mapping[str, type[Optimizer]] = {o.kind: o for o in (AdamW, SGD, Lion)}


def optimizer_class(kind: str) -> type[Optimizer]:
    """The optimizer of this kind.

    Raises:
      ValueError: the kind is unknown. Adafactor is refused: its factored moments would see the
        zero padding of mixed ranks.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {kind!r}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[kind]


__all__ = ["Schedule", *(o.__name__ for o in OPTIMIZERS.values())]
