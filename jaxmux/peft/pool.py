"""The pool, which stacks the adapters of all slots, and conversions between a slot and a task.

The pool has the largest rank and all modules of its tasks. For one task, higher ranks and modules
that it does not adapt are padding. LoRA's padding is zero and stays zero in training: the gradient
of a zero column of A is a product with the zero row of B, and the gradient of that row of B is a
product with the zero column of A.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import LOW_RANK_KIND

from .kinds import kind_of
from .leaves import LeafSpec, named_leaves
from .lora import Adapter, lora_leaves

# The NumPy arrays of one task, at its rank and with its modules only, by path
# ("adapter/mlp.up_proj/a"), as checkpoints hold them.
SlotArrays = dict[str, np.ndarray]


def empty_pool(config: BackboneConfig, modules: Sequence[str], slots: int, rank: int) -> Adapter:
    """The LoRA arrays for several tasks, before any task uses them: zero factors.

    Args:
      modules: paths of the adapted linears within a layer, for example "mlp.up_proj"; KeyError if
        one names no linear.
      slots: number of slots T, one for each task.
      rank: rank R of the pool, at least the largest rank of any task.

    Returns:
      By path of a linear, `Factors` with a [L, T, k, R] and b [L, T, R, n], float32.
    """
    return jax.tree.map(LeafSpec.empty, lora_leaves(config, modules, slots, rank))


def own_leaves(spec: Any, modules: Sequence[str], config: BackboneConfig) -> Any:
    """Describes the arrays of one adapter alone: with a single slot, its rank and its modules.

    Args:
      spec: specification of the adapter, for example a `LoRA`; ValueError if it is of no kind.
      modules: the points at which the adapter does something, the keys of `AdapterKind.targets`.

    Returns:
      A tree of `LeafSpec`, with the modules as keys and a slot axis of size 1. Without the slot
      axis (`LeafSpec.of_slot`), `crop` takes such a tree to cut the adapter out of a larger pool.
    """
    kind = kind_of(spec)
    pools = {kind.name: kind.leaves(config, modules, 1, kind.rank(spec))}
    if kind.low_rank:
        rank = kind.rank_in(LOW_RANK_KIND, spec)
        pools[LOW_RANK_KIND] = lora_leaves(config, modules, 1, rank)
    return kind.from_pools(pools)


def crop(tree: Any, own: Any) -> SlotArrays:
    """Cuts the arrays of a task out of its slot, which has the largest rank and all modules of any
    task. `pad` is the inverse.

    Args:
      tree: arrays of one slot, without the slot axis, at the pool's rank and modules. They are
        copied to the host as a whole.
      own: tree of `LeafSpec` with the task's own shapes and modules, without the slot axis.

    Returns:
      The task's arrays as NumPy arrays, by their path in the tree ("mlp.up_proj/a").

    Raises:
      KeyError: `tree` lacks an array that `own` describes.
    """
    leaves = named_leaves(tree)
    return {
        name: np.asarray(np.asarray(leaves[name])[tuple(map(slice, spec.shape))], order="C")
        for name, spec in named_leaves(own).items()
    }


def pad(arrays: Mapping[str, np.ndarray], specs: Any) -> Any:
    """Enlarges the arrays of a task, by path, to the size of a slot. `crop` is the inverse.

    Args:
      specs: tree of `LeafSpec` of the slot, at the pool's rank and modules, without the slot axis.

    Returns:
      A tree of NumPy arrays with the structure of `specs`. Ranks and modules that the task does not
      have hold the padding value of their `LeafSpec`.

    Raises:
      ValueError: `specs` does not describe one of the arrays, describes it with a smaller size or
        another number of axes, or describes a scalar that `arrays` lacks.
    """
    used = set()

    def fill(name: str, spec: LeafSpec) -> np.ndarray:
        if name not in arrays:
            if not spec.axes:
                raise ValueError(f"{name} is missing")
            return _empty(spec)
        used.add(name)
        value = np.asarray(arrays[name], spec.dtype)
        missing = [full - size for full, size in zip(spec.shape, value.shape, strict=True)]
        if min(missing, default=0) < 0:
            raise ValueError(f"{name} has shape {value.shape}, its place {spec.shape}")
        if not any(missing):
            return value
        padded = _empty(spec)
        padded[tuple(map(slice, value.shape))] = value
        return padded

    filled = [fill(name, spec) for name, spec in named_leaves(specs).items()]
    if unknown := sorted(set(arrays) - used):
        raise ValueError(f"no place for {unknown[0]}")
    return jax.tree.unflatten(jax.tree.structure(specs), filled)


def _empty(spec: LeafSpec) -> np.ndarray:
    if spec.padding:
        return np.full(spec.shape, spec.padding, spec.dtype)
    # Tasks wait for this array between two rounds. The operating system provides memory of zeros
    # without writing it, which is several times as fast as `np.pad` for large backbones.
    return np.zeros(spec.shape, spec.dtype)


def adapter_of(arrays: SlotArrays, spec: Any, config: BackboneConfig) -> Any:
    """Extracts a task's adapter from the arrays in its checkpoint, for example to export it.

    Args:
      arrays: the task's arrays by path, from `runs.read_task` or `Engine.task_arrays`.

    Returns:
      The adapter at its own rank. For LoRA: by path of a linear within a layer ("mlp.up_proj"), the
      NumPy arrays a [L, k, r] and b [L, r, n].

    Raises:
      ValueError: the adapter does something nowhere in the backbone.
      KeyError: `arrays` lacks an array of the adapter.
    """
    specs = own_leaves(spec, list(kind_of(spec).targets(spec, config)), config)
    values = [np.asarray(arrays[f"adapter/{name}"]) for name in named_leaves(specs)]
    return jax.tree.unflatten(jax.tree.structure(specs), values)
