"""The adapter kinds that tasks can use.

A kind is one file and one entry of `KINDS`. The engine, checkpoints and commands find a kind here,
by its name or by the class of a task's specification.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxmux.models import BackboneConfig

from .lora import LoRA, initial_adapter, lora_leaves, relative_rates
from .targets import LayerMask


class AdapterKind(NamedTuple):
    """One kind of adapter: a name and the functions that describe and create its arrays.

    The adapters of all tasks are stacked in one *pool* of arrays, in which every task has a place,
    its *slot*. A pool, and the adapter of a single task, is a tree: its keys are the paths of the
    adapted linears within a layer ("mlp.up_proj"), and below each key are the arrays of that linear
    (for LoRA: `Factors` with a and b).

    Attributes:
      name: name of the kind in pools and checkpoints, for example "lora".
      specification: class of the values that describe one task's adapter, for example `LoRA`.
      leaves: function (config, modules, slots, rank) that describes a pool. It takes the backbone's
        configuration, the paths of the adapted linears, the number of slots T and the pool's rank
        R, at least the largest rank of any task. It returns a tree of `LeafSpec`, which give the
        shape and the axes of each array.
      initial: function (specification, targets, config, seed) that returns the arrays with which a
        task begins, at the task's own rank and without the slot axis. `targets` is the result of
        `resolve_targets`: by path of a linear, a bool mask [L] of the layers that are adapted.
      relative_rates: function (specification, targets) that returns a tree with a float32 array [L]
        for each trained array: its learning rate in each of the L layers, divided by the task's
        learning rate; 0 in layers that are not adapted.
    """

    name: str
    specification: type
    leaves: Callable[[BackboneConfig, Sequence[str], int, int], Any]
    initial: Callable[[Any, Mapping[str, LayerMask], BackboneConfig, int], Any]
    relative_rates: Callable[[Any, Mapping[str, LayerMask]], Any]


# By name, all adapter kinds.
KINDS: Mapping[str, AdapterKind] = {
    kind.name: kind
    for kind in (AdapterKind("lora", LoRA, lora_leaves, initial_adapter, relative_rates),)
}


def kind_of(specification: Any) -> AdapterKind:
    """The kind (name and functions, `AdapterKind`) to which an adapter specification belongs.

    Args:
      specification: the specification of a task's adapter, for example a `LoRA`.

    Raises:
      ValueError: no kind has such a specification.
    """
    for kind in KINDS.values():
        if isinstance(specification, kind.specification):
            return kind
    known = ", ".join(kind.specification.__name__ for kind in KINDS.values())
    raise ValueError(f"adapter should be one of {known}, found {specification!r}")
