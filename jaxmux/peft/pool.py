"""The stacked adapters of all slots, and what goes into and comes out of one slot.

A pool leaf is [L, T, …] at the pool's rank R: layers first, because the backbone scans over them.
Ranks below R are padded with zeros, which stay zero in training: the gradient of a zero column of A
is a product with the zero row of B, and the other way round. Any tree that holds `Factors` nodes
(optimizer moments, accumulators) packs the same way.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.models import BackboneConfig

from .lora import Adapter, Factors
from .targets import linear_sizes

# Arrays of one slot at true rank, by their path in the tree: what checkpoints hold.
SlotArrays = dict[str, np.ndarray]


def empty_pool(config: BackboneConfig, modules: Sequence[str], slots: int, rank: int) -> Adapter:
    """Zero factors, float32, of `slots` slots at rank `rank` for each module."""
    pool = {}
    for module in modules:
        k, n = linear_sizes(config, module)
        pool[module] = Factors(
            jnp.zeros((config.num_layers, slots, k, rank)),
            jnp.zeros((config.num_layers, slots, rank, n)),
        )
    return pool


def slot_arrays(tree: Any, modules: Sequence[str], rank: int) -> SlotArrays:
    """Flattens one slot's tree (leaves without the slot axis) to true rank and to the task's own
    modules."""
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        module, factor = _place(path)
        if module is None:
            arrays[_name(path)] = np.asarray(leaf)
        elif module in modules:
            arrays[_name(path)] = np.asarray(_rank_slice(leaf, factor, rank))
    return arrays


def slot_tree(template: Any, arrays: SlotArrays) -> Any:
    """The inverse of `slot_arrays`: pads ranks and absent modules with zeros to the template's
    shapes.

    Raises:
      ValueError: an array that the template has no place or not enough room for, or one that is
        missing; its path is named.
    """
    used = set()

    def fill(path, leaf):
        name = _name(path)
        if name not in arrays:
            if _place(path) == (None, None):
                raise ValueError(f"{name} is missing")
            return np.zeros(leaf.shape, leaf.dtype)
        used.add(name)
        value = np.asarray(arrays[name], leaf.dtype)
        missing = [full - own for full, own in zip(leaf.shape, value.shape, strict=True)]
        if min(missing, default=0) < 0:
            raise ValueError(f"{name} has shape {value.shape}, its place {leaf.shape}")
        return np.pad(value, [(0, m) for m in missing]) if any(missing) else value

    tree = jax.tree_util.tree_map_with_path(fill, template)
    if unknown := sorted(set(arrays) - used):
        raise ValueError(f"no place for {unknown[0]}")
    return tree


def adapter_of(arrays: SlotArrays) -> Adapter:
    """The task's factors among its arrays, at true rank."""
    prefix = "adapter/"
    names = [name.removeprefix(prefix) for name in arrays if name.startswith(prefix)]
    modules = sorted({name.rpartition("/")[0] for name in names})
    return {
        module: Factors(*(np.asarray(arrays[f"{prefix}{module}/{f}"]) for f in Factors._fields))
        for module in modules
    }


def _name(path: tuple) -> str:
    """`adapter/mlp.up_proj/a`, `optimizer/0/mu/mlp.up_proj/a`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _place(path: tuple) -> tuple[str | None, str | None]:
    """Module and factor ("a" or "b") of a leaf inside a `Factors` node, else (None, None)."""
    if (
        len(path) >= 2
        and isinstance(path[-1], jax.tree_util.GetAttrKey)
        and path[-1].name in ("a", "b")
    ):
        return path[-2].key, path[-1].name
    return None, None


def _rank_slice(leaf: jax.Array, factor: str, rank: int) -> jax.Array:
    return leaf[..., :rank] if factor == "a" else leaf[..., :rank, :]
