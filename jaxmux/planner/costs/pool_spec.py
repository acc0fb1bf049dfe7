"""The sizes of a pool, which determine the compiled programs and the costs."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmux.optimizers import OPTIMIZERS

from ..errors import PlanningError
from .device_profile import BackboneSize

_FLOAT32 = 4


class PoolSpec(NamedTuple):
    """Sizes of a pool: the stacked LoRA adapters of several tasks, with gradients and optimizer
    state.

    A slot is the place of one task in the pool. `PreparedTask.pool` gives the pool of a single
    task; `merge_pool_specs` gives the pool of several tasks.

    Attributes:
      slots: T, number of slots, the most tasks that train at the same time.
      rank: R, rank of the pool. The adapters of all slots are zero-padded to this rank.
      modules: module paths, for example "self_attn.q_proj", of the linears that carry an adapter;
        they are keys of `BackboneSize.linears` and of the result of `peft.resolve_targets`. None
        stands for all linears of `BackboneSize.linears`, and an empty tuple for none.
      dropout: whether any task applies dropout to the input of its adapter.
      optimizer: kind of the optimizer for which memory is reserved, a key of
        `jaxmux.optimizers.OPTIMIZERS`. If the tasks use several kinds, it is the kind with the most
        moments (state values per adapter parameter).
    """

    slots: int
    rank: int
    modules: tuple[str, ...] | None = None
    dropout: bool = False
    optimizer: str = "adamw"

    def share(self, backbone: BackboneSize) -> float:
        """Returns the pool's adapter parameters as a fraction of those of a pool that adapts every
        linear.

        Both pools have equal slots and ranks.

        Args:
          backbone: sizes of the backbone.

        Raises:
          PlanningError: the backbone has no linear of a module path in `modules`.
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
        """Returns the number of adapter parameters of all slots and layers, padding to `rank`
        included.

        Args:
          backbone: sizes of the backbone.

        Raises:
          PlanningError: the backbone has no linear of a module path in `modules`.
        """
        width = round(self.share(backbone) * backbone.adapter_width)
        return backbone.layers * self.slots * self.rank * width

    def state_bytes(self, backbone: BackboneSize) -> int:
        """Returns the bytes of the train state of all slots and layers together.

        The train state holds, all in float32, the adapter parameters, their accumulated gradients
        and the optimizer's moments.

        Args:
          backbone: sizes of the backbone.

        Raises:
          PlanningError: the kind of optimizer is unknown, or the backbone has no linear of a module
            path in `modules`.
        """
        if self.optimizer not in OPTIMIZERS:
            known = ", ".join(OPTIMIZERS)
            raise PlanningError(f"optimizer: unknown kind {self.optimizer!r}; known: {known}")
        moments = OPTIMIZERS[self.optimizer].moments
        return (2 + moments) * _FLOAT32 * self.parameters(backbone)


def merge_pool_specs(pools: Sequence[PoolSpec], least: PoolSpec | None = None) -> PoolSpec:
    """Returns the sizes of one pool (stack of LoRA adapters) that holds several tasks together.

    Its number of slots (places of tasks) is the sum of those of `pools`. Its rank is the highest
    rank, it adapts every linear that any task adapts, and it has dropout if any task has. Its
    optimizer is the kind in `pools` with the most moments (state values per adapter parameter).

    Args:
      pools: for each task, the pool that the task needs alone (`PreparedTask.pool`). It may be
        empty only if `least` is given.
      least: a pool whose slots, rank, linears and dropout the result provides at least; None for no
        such minimum. Its optimizer counts only if `pools` is empty.
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
