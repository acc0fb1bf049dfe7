"""The updates that are due as numbers for compiled programs, and what the programs return."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmux.optimizers import optimizer_class
from jaxmux.peft import Layout

from .paired_ranks import slots_with_pairs
from .renewal import slots_to_renew

# By optimizer kind and name, float32 [T_kind].
Hyperparameters = Mapping[str, Mapping[str, np.ndarray]]
# By optimizer kind, the numbers of the slots that use it, int32 [T_kind].
SlotsByOptimizer = Mapping[str, np.ndarray]


class UpdateStats(NamedTuple):
    """Results of an update, one value for each slot. Values of slots without a due update have no
    meaning.

    Attributes:
      loss: float32 [T], mean cross entropy of the task's global batch in nats per target token; NaN
        if a value in the task's forward pass was not finite.
      grad_norm: float32 [T], global L2 norm of the task's gradient before clipping.
      applied: bool [T], False if the loss, the norm or the updated parameters were not finite, so
        that the update was skipped.
    """

    loss: Float[Array, " T"]
    grad_norm: Float[Array, " T"]
    applied: Bool[Array, " T"]


class DueUpdates(NamedTuple):
    """The updates that are due, as numbers for the compiled programs.

    Attributes:
      due: bool [T], True for slots whose global batch is complete.
      rates: float32, the learning rate of every trained leaf, layer and slot. A leaf without a
        layer axis uses the rate of the first layer, or with the axis "last" that of the last one.
      hyper: by optimizer kind and name of the number, float32 [T_kind]: one value for each slot in
        `members` of this kind.
      members: by optimizer kind, int32 [T_kind]: the numbers of the slots that use this kind.
      own: bool, whether the slot's task trains a leaf in a layer. Arrays of several adapter kinds
        have a place in every slot, and the gradients of those that its task does not have mean
        nothing. None if there is only LoRA, where these gradients are zero.
      renewed: by adapter kind with arrays that follow from trained ones, int32 [T]: the numbers of
        the slots whose arrays are renewed, from `slots_to_renew`.
      paired: from `slots_with_pairs`, the slots whose low-rank factors have pairs of ranks.
    """

    due: Bool[np.ndarray, " T"]
    rates: Float[np.ndarray, "leaves L T"]
    hyper: Hyperparameters
    members: SlotsByOptimizer
    own: Bool[np.ndarray, "leaves L T"] | None = None
    renewed: Mapping[str, Int[np.ndarray, " T"]] = MappingProxyType({})
    paired: Bool[np.ndarray, " T"] | None = None

    def by_kind(
        self, every: bool = False
    ) -> Iterator[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
        """For each optimizer kind that has updates: its name, and for all slots, bool [T], whether
        an update of this kind is due, and, float32 [T], the optimizer's numbers.

        Args:
          every: True yields the kinds without updates too.
        """

        def spread(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
            pool = np.zeros(len(self.due), values.dtype)
            pool[slots] = values
            return pool

        for kind, slots in self.members.items():
            if every or self.due[slots].any():
                hyper = {name: spread(values, slots) for name, values in self.hyper[kind].items()}
                yield kind, spread(self.due[slots], slots), hyper


def no_updates(layout: Layout, layers: int, optimizers: Sequence[str]) -> DueUpdates:
    """Numbers for the compiled programs with which nothing is updated.

    Args:
      layout: the description of the whole state.
      layers: number of layers of the backbone.
      optimizers: the optimizer kinds that tasks may have.
    """
    none, (slots,) = np.zeros(0, np.int32), layout.tree.loss.shape
    hyper = {
        kind: dict.fromkeys(optimizer_class(kind)().hyperparameters(), none.astype(np.float32))
        for kind in optimizers
    }
    rates = np.zeros((len(jax.tree.leaves(layout.tree.accumulators)), layers, slots), np.float32)
    members = dict.fromkeys(optimizers, none)
    of_kinds = slots_to_renew(layout, {}), slots_with_pairs(layout, {})
    return DueUpdates(np.zeros(slots, bool), rates, hyper, members, rates > 0, *of_kinds)


def no_stats(slots: int) -> UpdateStats:
    """The results before any update."""
    none = np.zeros(slots, np.float32)
    return UpdateStats(none, none, none > 0)
