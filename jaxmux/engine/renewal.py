"""Renews the arrays of adapters that follow from trained ones, after an update.

DoRA divides by the norms of the adapted weights, for example. They are the same for all
microbatches of a global batch, so they are computed once an update, and not in every forward pass.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from jaxmux.models import Weights
from jaxmux.models.adapter_ops import LOW_RANK_KIND, AdapterOp
from jaxmux.models.weight_sharding import TP, UNDIVIDED, WeightSharding, layer_weights
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.peft import KINDS, Layout
from jaxmux.peft.leaves import trained
from jaxmux.sharding import StageMesh

from .train_state import TrainState

# Rows of a product with a frozen weight: so many ranks of slots are renewed at once.
_ROWS = 512


def slots_to_renew(layout: Layout, kinds: Mapping[int, str]) -> dict[str, Int[np.ndarray, " T"]]:
    """By adapter kind with arrays that follow from others, the numbers of slots, filled up with T.
    Only kinds for which the state has room are there.

    Args:
      layout: the description of the state.
      kinds: by number of the slot, its adapter kind.
    """
    (capacity,) = layout.tree.loss.shape
    found = {}
    for name in layout.tree.adapters:
        if _renews(name):
            own = [number for number, kind in kinds.items() if kind == name]
            found[name] = np.int32(own + [capacity] * (capacity - len(own)))
    return found


def renewed(
    state: TrainState,
    layers: Weights,
    slots: Mapping[str, Int[np.ndarray, " T"]],
    applied: Bool[Array, " T"],
) -> TrainState:
    """The state on one device with the arrays that follow from others as they now are.

    Args:
      state: the state; the pools of the kinds in `slots` are donated.
      layers: weights of the layers of the backbone.
      slots: from `slots_to_renew`, the slots that were due.
      applied: whether the update of a slot was applied; others keep their bits.
    """
    for name, numbers in slots.items():
        factors, own = state.adapters[LOW_RANK_KIND], state.adapters[name]
        own = _renew(KINDS[name].op, UNDIVIDED, layers, factors, own, numbers, applied)
        state = state._replace(adapters=state.adapters | {name: own})
    return state


def renewed_part(
    home: StageMesh,
    layout: Layout,
    state: TrainState,
    weights: Weights,
    slots: Mapping[str, Int[np.ndarray, " T"]],
    applied: Bool[Array, " T"],
) -> TrainState:
    """`renewed` for a part of the state on a mesh.

    Args:
      home: the mesh of the part.
      layout: the description of the part's state.
      state: the part's state; the pools of the kinds in `slots` are donated.
      weights: the part's weights.
      slots, applied: as for `renewed`.
    """
    for name, numbers in slots.items():
        pools = state.adapters[LOW_RANK_KIND], state.adapters[name]
        own = home.run(
            _renew_on_mesh, name, home, layout, weights["layers"], *pools, numbers, applied
        )
        state = state._replace(adapters=state.adapters | {name: own})
    return state


def compile_renewal(layout: Layout, layers: Weights, adapters: Any) -> None:
    """Compiles `renewed` for a state.

    Args:
      layout: the description of the state.
      layers: weights of the layers of the backbone.
      adapters: the state's adapters, or their shapes and dtypes.
    """
    for name, slots in slots_to_renew(layout, {}).items():
        pools = adapters[LOW_RANK_KIND], adapters[name]
        given = UNDIVIDED, layers, *pools, slots, np.zeros(len(slots), bool)
        _renew.lower(KINDS[name].op, *given).compile()


def changed_by_updates(specs: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Adapters with None in place of the arrays that updates leave as they are.

    Args:
      specs: by adapter kind, the description of its pool.
      adapters: the pools, arrays or their descriptions.
    """
    return {
        name: adapters[name] if _renews(name) else trained(own, adapters[name])
        for name, own in specs.items()
    }


def _renews(kind: str) -> bool:
    op = KINDS[kind].op
    return op is not None and type(op).after_update is not AdapterOp.after_update


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _renew_on_mesh(name, home, layout, layers, factors, own, slots, applied) -> Any:
    specs = home.leaf_specs(layout.tree.adapters)
    function = partial(_renew, KINDS[name].op, home.weights)
    return jax.shard_map(
        function,
        mesh=home.mesh,
        in_specs=(home.weight_specs(layers), specs[LOW_RANK_KIND], specs[name], P(), P()),
        out_specs=specs[name],
        check_vma=False,
    )(layers, factors, own, slots, applied)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _renew(
    op: AdapterOp,
    sharding: WeightSharding,
    layers: Weights,
    factors: Mapping[str, Factors],
    own: Mapping[str, Mapping[str, Array]],
    slots: Int[Array, " T"],
    applied: Bool[Array, " T"],
) -> Any:
    """The arrays of a kind, renewed in some slots: by groups of slots, and layer by layer."""
    capacity, rank = len(slots), next(iter(factors.values())).a.shape[-1]
    size = min(capacity, max(1, _ROWS // rank))
    count = (slots < capacity).sum()
    slots = jnp.where(applied[jnp.minimum(slots, capacity - 1)], slots, capacity)
    slots = jnp.pad(slots, (0, -capacity % size), constant_values=capacity)

    def of_group(group: Array, own: Any) -> Any:
        chosen = jax.lax.dynamic_slice_in_dim(slots, group * size, size)
        return jax.lax.fori_loop(0, _layers(own), partial(of_layer, chosen), own)

    def of_layer(chosen: Array, layer: Array, own: Any) -> Any:
        weights = layer_weights(layers, layer, sharding)

        def taken(pool: Array) -> Array:
            return pool[layer].at[chosen].get(mode="fill", fill_value=0)

        def of_point(point: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
            block, linear = point.split(".")
            new = op.after_update(
                jax.tree.map(taken, arrays),
                jax.tree.map(taken, factors[point]),
                weights[block][linear]["kernel"].at_layer(layer),
                _total if sharding.divided_axis(point) == "input" else _own,
            )
            written = {
                name: arrays[name].at[layer, chosen].set(value, mode="drop")
                for name, value in new.items()
            }
            return {**arrays, **written}

        return {point: of_point(point, arrays) for point, arrays in own.items()}

    return jax.lax.fori_loop(0, (count + size - 1) // size, of_group, own)


def _layers(own: Any) -> int:
    return jax.tree.leaves(own)[0].shape[0]


def _total(summand: Array) -> Array:
    return jax.lax.psum(summand, TP)


def _own(value: Array) -> Array:
    return value
