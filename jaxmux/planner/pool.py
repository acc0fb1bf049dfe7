"""What the compiled step has room for, as far as costs depend on it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .profile import BackboneSize
from .shape_class import PlanningError

# Pools of moments of each optimizer kind.
_MOMENTS: Mapping[str, int] = {"adamw": 2, "sgd": 1, "lion": 1}
_FLOAT32 = 4


class Pool(NamedTuple):
    """The stacked adapters of all slots.

    Attributes:
      slots: T, tasks that are live together.
      rank: R; all slots are padded to it.
      modules: adapted linears by module path; None for all.
      dropout: whether any task drops.
      optimizer: the kind with most moments among those of the tasks.
    """

    slots: int
    rank: int
    modules: tuple[str, ...] | None = None
    dropout: bool = False
    optimizer: str = "adamw"

    def share(self, backbone: BackboneSize) -> float:
        """Parameters over those of a pool that adapts every linear.

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
        """float32 masters, gradient accumulators and moments of all slots and layers.

        Raises:
          PlanningError: an unknown optimizer.
        """
        if self.optimizer not in _MOMENTS:
            known = ", ".join(_MOMENTS)
            raise PlanningError(f"optimizer: unknown kind {self.optimizer!r}; known: {known}")
        return (2 + _MOMENTS[self.optimizer]) * _FLOAT32 * self.parameters(backbone)


def merge_pools(pools: Sequence[Pool], least: Pool | None = None) -> Pool:
    """The pool of all together: ranks are padded to the highest, every adapted linear is in it, and
    moments are those of the neediest optimizer.

    Args:
      pools: what there is at least one of, or `least` has to be given.
      least: what there is room for at least, whoever uses it.
    """
    everything = [*pools, *([least] if least else [])]
    modules = dict.fromkeys(module for pool in everything for module in pool.modules or ())
    return Pool(
        slots=max(sum(pool.slots for pool in pools), least.slots if least else 0),
        rank=max(pool.rank for pool in everything),
        modules=None if any(pool.modules is None for pool in everything) else tuple(modules),
        dropout=any(pool.dropout for pool in everything),
        optimizer=max((pool.optimizer for pool in pools or everything), key=_need),
    )


def _need(optimizer: str) -> tuple[int, str]:
    return _MOMENTS.get(optimizer, 0), optimizer
