"""The sizes of a pool, on which the compiled programs and the costs depend."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmux.optimizers import OPTIMIZERS

from ..errors import PlanningError
from .device_profile import BackboneSize

_FLOAT32 = 4


class PoolSpec(NamedTuple):
    """Sizes of the stacked adapters of all slots.

    Attributes:
      slots: T, most tasks that are live together.
      rank: R; the adapters of all slots are padded to it.
      modules: module paths of the adapted linears; None for all.
      dropout: whether any task drops input features of its adapter.
      optimizer: of the tasks' optimizer kinds, the one with the most moments.
    """

    slots: int
    rank: int
    modules: tuple[str, ...] | None = None
    dropout: bool = False
    optimizer: str = "adamw"

    def share(self, backbone: BackboneSize) -> float:
        """Adapter parameters, divided by those of a pool that adapts every linear.

        Raises:
          PlanningError: the backbone has no such linear.
        """
        if self.modules is None:
            return 1.0
        for module in self.modules:
            if module not in backbone.linears:
                known = ", ".join(backbone.linears)
                raise PlanningError(f"modules: {module!r} is no linear of the backbone: {known}")
        width = sum(sum(backbone.linears[module]) for module in self.modules)
        return width / backbone.adapter_width

    def parameters(self, backbone: BackboneSize) -> int:
        """Adapter parameters of all slots and layers, padding included."""
        width = round(self.share(backbone) * backbone.adapter_width)
        return backbone.layers * self.slots * self.rank * width

    def state_bytes(self, backbone: BackboneSize) -> int:
        """Bytes of the float32 masters, gradient accumulators and moments of all slots and layers.

        Raises:
          PlanningError: the optimizer is unknown.
        """
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise PlanningError(f"optimizer: unknown kind {self.optimizer!r}; known: {known}")
        moments = OPTIMIZERS[self.optimizer].moments
        return (2 + moments) * _FLOAT32 * self.parameters(backbone)


def merge_pool_specs(pools: Sequence[PoolSpec], least: PoolSpec | None = None) -> PoolSpec:
    """The pool of all tasks together.

    Ranks are padded to the highest, every adapted linear is included, and the optimizer is the one
    with the most moments.

    Args:
      pools: the pool that each task needs alone. It may be empty only if `least` is given.
      least: the pool has room for at least this, whoever uses it.
    """
    everything = [*pools, *([least] if least else [])]
    modules = dict.fromkeys(module for pool in everything for module in pool.modules or ())
    return PoolSpec(
        slots=max(sum(pool.slots for pool in pools), least.slots if least else 0),
        rank=max(pool.rank for pool in everything),
        modules=None if any(pool.modules is None for pool in everything) else tuple(modules),
        dropout=any(pool.dropout for pool in everything),
        optimizer=max((pool.optimizer for pool in pools or everything), key=_moments),
    )


def _moments(optimizer: str) -> tuple[int, str]:
    return OPTIMIZERS[optimizer].moments if optimizer in OPTIMIZERS else 0, optimizer
