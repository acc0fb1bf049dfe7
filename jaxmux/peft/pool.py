"""The stacked adapters of all slots, and what goes into and comes out of one slot.

In a pool, ranks below the pool's and modules that a task does not adapt are padding. LoRA's padding
is zero and stays zero in training: the gradient of a zero column of A is a product with the zero
row of B, and the other way round.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.models import BackboneConfig

from .kinds import kind_of
from .leaves import LeafSpec, named_leaves
from .lora import Adapter, lora_leaves
from .targets import resolve_targets

# Arrays of one task at its own rank and modules, by their path: what checkpoints hold.
SlotArrays = dict[str, np.ndarray]


def empty_pool(config: BackboneConfig, modules: Sequence[str], slots: int, rank: int) -> Adapter:
    """Zero LoRA factors, float32, of `slots` slots at rank `rank` for each module."""
    return jax.tree.map(LeafSpec.empty, lora_leaves(config, modules, slots, rank))


def own_leaves(spec: Any, modules: Sequence[str], config: BackboneConfig) -> Any:
    """The tree of `LeafSpec` of a pool with this adapter alone: one slot, the adapter's own rank
    and modules."""
    return kind_of(spec).leaves(config, modules, 1, spec.rank)


def crop(tree: Any, own: Any) -> SlotArrays:
    """A task's own arrays, taken out of the tree of its slot.

    Args:
      tree: arrays without the slot axis, at the pool's rank and modules.
      own: tree of `LeafSpec` with the task's own shapes and modules.
    """
    leaves = named_leaves(tree)
    return {
        name: np.asarray(leaves[name][tuple(map(slice, spec.shape))])
        for name, spec in named_leaves(own).items()
    }


def pad(arrays: Mapping[str, np.ndarray], specs: Any) -> Any:
    """The inverse of `crop`: a slot's tree, with padding where the task has no values.

    Args:
      specs: tree of `LeafSpec` of the slot, at the pool's rank and modules.

    Raises:
      ValueError: `specs` has no place or not enough room for an array, or a leaf that belongs to no
        module has no array. The message names the path.
    """
    used = set()

    def fill(name: str, spec: LeafSpec) -> np.ndarray:
        if name not in arrays:
            if not spec.axes:
                raise ValueError(f"{name} is missing")
            return np.full(spec.shape, spec.padding, spec.dtype)
        used.add(name)
        value = np.asarray(arrays[name], spec.dtype)
        missing = [full - own for full, own in zip(spec.shape, value.shape, strict=True)]
        if min(missing, default=0) < 0:
            raise ValueError(f"{name} has shape {value.shape}, its place {spec.shape}")
        if not any(missing):
            return value
        return np.pad(value, [(0, m) for m in missing], constant_values=spec.padding)

    filled = [fill(name, spec) for name, spec in named_leaves(specs).items()]
    if unknown := sorted(set(arrays) - used):
        raise ValueError(f"no place for {unknown[0]}")
    return jax.tree.unflatten(jax.tree.structure(specs), filled)


def adapter_of(arrays: SlotArrays, spec: Any, config: BackboneConfig) -> Any:
    """A task's adapter, from its arrays in a checkpoint.

    Args:
      spec: the task's adapter specification.
    """
    own = own_leaves(spec, list(resolve_targets(spec.target_modules, config)), config)
    values = [np.asarray(arrays[f"adapter/{name}"]) for name in named_leaves(own)]
    return jax.tree.unflatten(jax.tree.structure(own), values)
