"""Updates the low-rank factors of a state one layer after another.

What an update computes of neighbouring ranks cannot be written in place, so it needs temporaries
(`paired_ranks`). Of one layer they are small. Programs of states without pairs of ranks update all
layers at once, which takes fewer kernels.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmux.models.adapter_ops import LOW_RANK_KIND

from .train_state import TrainState

Layer = Int[Array, ""]


def divided(state: TrainState) -> tuple[TrainState, TrainState]:
    """A state without the pool of low-rank factors, and the state with this pool alone. Both have
    the losses and counts. `joined` is the inverse.

    Args:
      state: arrays, or their descriptions.
    """

    def of_pools(is_wanted: Callable[[str], bool]) -> TrainState:
        def some(pools: Any) -> Any:
            return {name: tree for name, tree in pools.items() if is_wanted(name)}

        return state._replace(
            adapters=some(state.adapters),
            accumulators=some(state.accumulators),
            moments=tuple(map(some, state.moments)),
        )

    return of_pools(lambda name: name != LOW_RANK_KIND), of_pools(
        lambda name: name == LOW_RANK_KIND
    )


def joined(rest: TrainState, factors: TrainState) -> TrainState:
    """The state whose parts `divided` returns, with the losses and counts of the first one.

    Args:
      rest: the state without the pool of low-rank factors.
      factors: the state with this pool.
    """
    return rest._replace(
        adapters=rest.adapters | factors.adapters,
        accumulators=rest.accumulators | factors.accumulators,
        moments=tuple(a | b for a, b in zip(rest.moments, factors.moments, strict=True)),
    )


def divided_rates(
    specs: TrainState, rates: Float[Array, "leaves L T"]
) -> tuple[Float[Array, "leaves L T"], Float[Array, "leaves L T"]]:
    """The rates of the two parts that `divided` returns.

    Args:
      specs: the description of the state.
      rates: the rates of its accumulators.
    """
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(specs.accumulators))
    of_factors = np.array([path[0].key == LOW_RANK_KIND for path in paths])
    return rates[~of_factors], rates[of_factors]


def layer_of(specs: TrainState, state: TrainState, layer: Layer) -> TrainState:
    """The arrays of one layer, whose axis stays. Others are as they are.

    Args:
      specs: the description of the state.
      state: the state.
      layer: the layer.
    """

    def take(spec: Any, leaf: Array) -> Array:
        if "layer" not in spec.axes:
            return leaf
        return jax.lax.dynamic_slice_in_dim(leaf, layer, 1, spec.axes.index("layer"))

    return jax.tree.map(take, specs, state)


def layer_by_layer(
    change: Callable[[TrainState, Layer], TrainState], specs: TrainState, state: TrainState
) -> TrainState:
    """The state with the arrays of every layer changed in place. Losses and counts stay.

    Args:
      change: function of the state of one layer, as `layer_of` returns it, and the layer.
      specs: the description of the state.
      state: the state, with at least one array that has layers.
    """

    def put(spec: Any, leaf: Array, new: Array, layer: Layer) -> Array:
        if "layer" not in spec.axes:
            return leaf
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, layer, spec.axes.index("layer"))

    def one(layer: Layer, state: TrainState) -> TrainState:
        new = change(layer_of(specs, state, layer), layer)
        return jax.tree.map(lambda *own: put(*own, layer), specs, state, new)

    return jax.lax.fori_loop(0, _layers_of(specs, state), one, state)


def _layers_of(specs: TrainState, state: TrainState) -> int:
    leaves = zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True)
    return next(x.shape[spec.axes.index("layer")] for spec, x in leaves if "layer" in spec.axes)
