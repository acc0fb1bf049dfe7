"""The adapter kinds that tasks can ask for.

A kind is one file and one entry of `KINDS`. The engine, checkpoints and commands find it here, by
its name or by the class of a task's specification.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmux.models import BackboneConfig

from .lora import LoRA, initial_adapter, lora_leaves, relative_rates
from .targets import LayerMask


class AdapterKind(NamedTuple):
    """One kind of adapter. Its trees have the adapted modules as keys and, below each, the same
    leaves.

    Attributes:
      name: of the kind in pools and checkpoints.
      specification: class of the values by which a task asks for it.
      leaves: from (config, modules, slots, rank) to the tree of `LeafSpec` of its pool.
      initial: from (specification, targets, config, seed) to the arrays that a task begins with, at
        the task's own rank and without the slot axis.
      relative_rates: from (specification, targets) to a tree of float32 [L]: the learning rate of
        each trained leaf in each layer, divided by the task's; 0 in layers that are not adapted.
    """

    name: str
    specification: type
    leaves: Callable[[BackboneConfig, Sequence[str], int, int], Any]
    initial: Callable[[Any, Mapping[str, LayerMask], BackboneConfig, int], Any]
    relative_rates: Callable[[Any, Mapping[str, LayerMask]], Any]


KINDS: Mapping[str, AdapterKind] = {
    kind.name: kind
    for kind in (AdapterKind("lora", LoRA, lora_leaves, initial_adapter, relative_rates),)
}


def kind_of(specification: Any) -> AdapterKind:
    """The kind of a task's adapter specification.

    Raises:
      ValueError: it is a specification of no kind.
    """
    for kind in KINDS.values():
        if isinstance(specification, kind.specification):
            return kind
    known = ", ".join(kind.specification.__name__ for kind in KINDS.values())
    raise ValueError(f"adapter should be one of {known}, found {specification!r}")
