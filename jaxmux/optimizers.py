"""Optimizers and learning-rate schedules: the numbers that a task sets, and the optax transform
that applies them.

To add an optimizer, write its class and list it in `OPTIMIZERS`. The only other list of optimizers
is the one of public names in `jaxmux/__init__.py`. It cannot be made from this one, because this
file imports pydantic, which takes longer than the help of a command should.

The numbers of an optimizer reach the compiled update as float32 data, so one program serves all
tasks that use the same optimizer kind.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from .field_checks import EXACT, Natural, Part, Positive, checked_dataclass

if TYPE_CHECKING:
    import optax

SCHEDULES = ("constant", "linear", "cosine")

_Decay = Annotated[float, Field(ge=0, lt=1), EXACT]
_SCHEDULE = f"a Schedule or one of {', '.join(map(repr, SCHEDULES))}"
_NotNegative = Annotated[float, Field(ge=0), EXACT]


@checked_dataclass
class Schedule:
    """How a task's learning rate changes over its optimizer updates, as in Hugging Face's Trainer.

    Each task (fine-tuning job) sets the schedule in its optimizer. The peak of the learning rate is
    the optimizer's `learning_rate`.

    Attributes:
      kind: the learning rate after the warm-up. "constant" stays at the peak. "linear" falls in a
        straight line, and "cosine" along half a cosine wave, from the peak to 0 at the end of
        training.
      warmup_steps: number of the task's updates over which the learning rate rises linearly from 0
        to the peak.
      warmup_ratio: length of the warm-up as a fraction, in [0, 1], of the updates that the task
        plans; rounded up to whole updates. It is used only if `warmup_steps` is 0. If both are 0,
        there is no warm-up.

    Raises:
      ValueError: a value is outside its range.
    """

    kind: Literal[*SCHEDULES] = "constant"
    warmup_steps: Natural = 0
    warmup_ratio: Annotated[float, Field(ge=0, le=1), EXACT] = 0.0

    def _error(self, message: str) -> ValueError:
        return ValueError(f"schedule: {message}")

    def factor(self, update: int, total: int) -> float:
        """Returns the learning rate of one update, divided by the peak: a number in [0, 1].

        Args:
          update: number of updates that the task has applied before this one.
          total: number of updates that the task plans, one for each of its global batches.
        """
        warmup = self.warmup_steps or math.ceil(self.warmup_ratio * total)
        if update < warmup:
            return update / warmup
        progress = min(1.0, (update - warmup) / max(1, total - warmup))
        if self.kind == "linear":
            return 1 - progress
        return 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1.0


@checked_dataclass
class Optimizer:
    """The fields that all optimizers have. A subclass adds its own numbers as fields.

    Attributes:
      learning_rate: learning rate at the peak of the schedule.
      schedule: learning rate over the task's updates, relative to the peak. "cosine" is short for
        `Schedule("cosine")`, and likewise the other kinds.
      weight_decay: coefficient of the weight decay; each optimizer says how it applies the decay.
      clip_norm: largest global L2 norm of a task's gradient. A gradient with a larger norm is
        scaled down to `clip_norm`, as by `torch.nn.utils.clip_grad_norm_`. None does not clip.
      kind: name of the optimizer in configs, checkpoints and profiles, set by the subclass.
      moments: number of arrays of the parameters' shape in the optimizer's state, set by the
        subclass.

    Raises:
      ValueError: a value is outside its range.
    """

    learning_rate: _NotNegative = 2e-4
    schedule: Annotated[Schedule, Part({"": Schedule}, _SCHEDULE, short="kind")] = Schedule()
    weight_decay: _NotNegative = 0.0
    clip_norm: Positive | None = 1.0

    kind: ClassVar[str]
    moments: ClassVar[int]

    def _error(self, message: str) -> ValueError:
        return ValueError(f"{self.kind}: {message}")

    def hyperparameters(self) -> dict[str, float]:
        """Returns the numbers that the compiled update takes as data, by field name.

        The learning rate and its schedule are left out, because the engine applies them. A
        `clip_norm` of None becomes infinity.
        """
        numbers = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("learning_rate", "schedule", "clip_norm")
        }
        return numbers | {"clip_norm": math.inf if self.clip_norm is None else self.clip_norm}

    @staticmethod
    def transform(hyper: Mapping[str, Any]) -> "optax.GradientTransformation":
        """Returns the optax transform that turns the gradients of one slot into a direction. The
        engine then subtracts the direction times the learning rate from the parameters.

        The structure of the transform's state must not depend on the values in `hyper`, which may
        be traced scalars. Every entry of the state is a tree with the parameters' structure (a
        moment) or an integer count of updates.

        Args:
          hyper: by field name, the numbers that `hyperparameters` returns.
        """
        raise NotImplementedError


# optax is imported only where a transform is built, because it imports JAX, which the planner and
# the help of the commands do not need.
@checked_dataclass
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019), as `torch.optim.AdamW`.

    It is the default of `Task.optimizer`: every task (fine-tuning job) has an optimizer of its own.

    Attributes:
      learning_rate: learning rate at the peak of the schedule, not negative.
      schedule: how the learning rate changes over the task's updates, relative to the peak;
        constant by default.
      weight_decay: coefficient of the decay, not negative. An update subtracts current learning
        rate · weight_decay · parameter from each parameter, in addition to Adam's step.
      clip_norm: largest L2 norm of the task's gradient over all its parameters, positive. A
        gradient with a larger norm is scaled down to `clip_norm`. None does not clip.
      b1: decay rate of the running mean of the gradients, in [0, 1).
      b2: decay rate of the running mean of the squared gradients, in [0, 1).
      eps: number added to the denominator of Adam's step, positive.

    Raises:
      ValueError: a value is outside its range.
    """

    b1: _Decay = 0.9
    b2: _Decay = 0.999
    eps: Positive = 1e-8

    kind: ClassVar[str] = "adamw"
    moments: ClassVar[int] = 2

    @staticmethod
    def transform(hyper):
        import optax

        return optax.chain(
            optax.scale_by_adam(hyper["b1"], hyper["b2"], hyper["eps"]),
            optax.add_decayed_weights(hyper["weight_decay"]),
        )


@checked_dataclass
class SGD(Optimizer):
    """Gradient descent with momentum, as `torch.optim.SGD`.

    It is a value of `Task.optimizer`: every task (fine-tuning job) has an optimizer of its own.

    Attributes:
      learning_rate: learning rate at the peak of the schedule, not negative.
      schedule: how the learning rate changes over the task's updates, relative to the peak;
        constant by default.
      weight_decay: coefficient of L2 regularisation, not negative: weight_decay · parameter is
        added to the gradient before the momentum.
      clip_norm: largest L2 norm of the task's gradient over all its parameters, positive. A
        gradient with a larger norm is scaled down to `clip_norm`. None does not clip.
      momentum: decay rate of the accumulated gradient, in [0, 1); 0 is plain gradient descent.

    Raises:
      ValueError: a value is outside its range.
    """

    momentum: _Decay = 0.9

    kind: ClassVar[str] = "sgd"
    moments: ClassVar[int] = 1

    @staticmethod
    def transform(hyper):
        import optax

        return optax.chain(
            optax.add_decayed_weights(hyper["weight_decay"]), optax.trace(hyper["momentum"])
        )


@checked_dataclass
class Lion(Optimizer):
    """Lion (Chen et al. 2023): every parameter steps by the sign of an interpolated momentum.

    It is a value of `Task.optimizer`: every task (fine-tuning job) has an optimizer of its own.

    Attributes:
      learning_rate: learning rate at the peak of the schedule, not negative.
      schedule: how the learning rate changes over the task's updates, relative to the peak;
        constant by default.
      weight_decay: coefficient of the decoupled decay, not negative. An update subtracts current
        learning rate · weight_decay · parameter from each parameter, in addition to Lion's step.
      clip_norm: largest L2 norm of the task's gradient over all its parameters, positive. A
        gradient with a larger norm is scaled down to `clip_norm`. None does not clip.
      b1: weight of the momentum, in [0, 1), in the interpolation of momentum and gradient whose
        sign is taken.
      b2: decay rate of the momentum, in [0, 1).

    Raises:
      ValueError: a value is outside its range.
    """

    b1: _Decay = 0.9
    b2: _Decay = 0.99

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
    """Returns the optimizer class of a kind such as "adamw".

    Raises:
      ValueError: the kind is unknown. There is no Adafactor, because its factored moments would
        average over the zero padding of ranks.
    """
    if kind not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {kind!r}; known: {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[kind]


__all__ = ["Schedule", *(o.__name__ for o in OPTIMIZERS.values())]
