"""Updates of low-rank factors whose ranks belong together in pairs (`AdapterOp.paired_ranks`).

In the slot of such a task, ranks 2i and 2i + 1 of the factors a and b are A and A - A0, and B - B0
and B0. What the task trains is A and B: their gradients, norms, moments and weight decay count. So
an optimizer sees A and B in the even ranks and zeros in the odd ones, which gives the odd ranks no
moments. Afterwards A - A0 makes the same step as A, and B - B0 the same step as B.

All functions take trees by the name of the pool and change the pool of low-rank factors only.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.peft import KINDS, Layout, LeafSpec

# Whether a slot has pairs: of one slot, or [T] where arrays have an axis of slots. None if the
# state has no room for pairs, so that programs are those of states without them.
Paired = Bool[Array, "..."] | None

_Change = Callable[[LeafSpec, Array], Array]


def slots_with_pairs(layout: Layout, kinds: Mapping[int, str]) -> Bool[np.ndarray, " T"] | None:
    """The slots whose ranks belong together in pairs; None if the state has no room for them.

    Args:
      layout: the description of the state.
      kinds: by number of the slot, its adapter kind.
    """

    def has_pairs(name: str) -> bool:
        op = KINDS[name].op
        return op is not None and op.paired_ranks

    if not any(map(has_pairs, layout.tree.adapters)):
        return None
    paired = np.zeros(layout.tree.loss.shape, bool)
    paired[[number for number, name in kinds.items() if has_pairs(name)]] = True
    return paired


def gradients_of_pairs(specs: Any, gradients: Any, paired: Paired) -> Any:
    """The gradients of A and B, in the even ranks, from those of the factors. A occurs in both
    ranks of a pair, and B in one.

    Args:
      specs: tree of `LeafSpec`.
      gradients: tree of arrays.
      paired: the slots with pairs.
    """
    return _changed(specs, gradients, paired, a=_sum, b=_first)


def parameters_of_pairs(specs: Any, adapters: Any, paired: Paired) -> Any:
    """A and B, in the even ranks, from the factors: the parameters that an optimizer sees.

    Args:
      specs: tree of `LeafSpec`.
      adapters: tree of arrays.
      paired: the slots with pairs.
    """
    return _changed(specs, adapters, paired, a=_first, b=_sum)


def directions_of_pairs(specs: Any, directions: Any, paired: Paired) -> Any:
    """The directions in which the factors move, from those of A and B in the even ranks.

    Args:
      specs: tree of `LeafSpec`.
      directions: tree of arrays, zero in the odd ranks.
      paired: the slots with pairs.
    """
    return _changed(specs, directions, paired, a=_both, b=_first)


def _changed(specs: Any, tree: Any, paired: Paired, a: _Change, b: _Change) -> Any:
    if paired is None:
        return tree

    def where_paired(change: _Change, spec: LeafSpec, leaf: Array) -> Array:
        chosen = paired
        if "slot" in spec.axes:
            chosen = paired.reshape([-1 if axis == "slot" else 1 for axis in spec.axes])
        return jnp.where(chosen, change(spec, leaf), leaf)

    factors = {
        module: Factors(
            where_paired(a, specs[LOW_RANK_KIND][module].a, own.a),
            where_paired(b, specs[LOW_RANK_KIND][module].b, own.b),
        )
        for module, own in tree[LOW_RANK_KIND].items()
    }
    return {**tree, LOW_RANK_KIND: factors}


def _first(spec: LeafSpec, leaf: Array) -> Array:
    """The first rank of every pair, and zero in the second one."""
    return jnp.where(_number_in_pair(spec, leaf) == 1, 0, leaf)


def _sum(spec: LeafSpec, leaf: Array) -> Array:
    """The sum of every pair in its first rank, and zero in the second one."""
    number = _number_in_pair(spec, leaf)
    second = jnp.roll(leaf, -1, spec.axes.index("rank"))
    return jnp.where(number == 1, 0, jnp.where(number == 0, leaf + second, leaf))


def _both(spec: LeafSpec, leaf: Array) -> Array:
    """The first rank of every pair, in both of its ranks."""
    first = jnp.roll(leaf, 1, spec.axes.index("rank"))
    return jnp.where(_number_in_pair(spec, leaf) == 1, first, leaf)


def _number_in_pair(spec: LeafSpec, leaf: Array) -> np.ndarray:
    """For every rank, whether it is the first (0) or the second (1) of its pair, in the shape that
    fits the array. The last one of an odd number of ranks is neither (2)."""
    axis = spec.axes.index("rank")
    size = leaf.shape[axis]
    number = np.where(np.arange(size) < size - size % 2, np.arange(size) % 2, 2)
    return number.reshape([-1 if i == axis else 1 for i in range(leaf.ndim)])
