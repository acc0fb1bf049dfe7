"""Work that follows an update of the trained arrays: derived arrays, and low-rank factors in pairs.

DoRA divides by the norms of the adapted weights, for example. They are the same for all
microbatches of a global batch, so they are computed once an update, and not in every forward pass.

Some tasks have low-rank factors whose ranks form pairs (`AdapterOp.paired_ranks`). In the slot of
such a task, ranks 2i and 2i + 1 of factor a hold A and A - A0, and those of factor b hold B - B0
and B0. The task trains A and B, so gradients, norms, moments and weight decay are those of A and B.
The optimizer sees A and B in the even ranks and zeros in the odd ones, which therefore get no
moments. Afterwards A - A0 makes the same step as A, and B - B0 the same step as B. The functions
for pairs take trees by the name of the pool and change only the pool of low-rank factors. Their
`paired` tells which slots have pairs.

States with pairs of ranks are updated one layer after another. New values that depend on
neighbouring ranks cannot be written in place, so the update needs temporaries, which are small for
one layer. States without pairs update all layers at once, which takes fewer kernels.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxmux.models import Weights
from jaxmux.models.adapter_ops import LOW_RANK_KIND, AdapterOp
from jaxmux.models.weight_sharding import TP, UNDIVIDED, WeightSharding, layer_weights
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.peft import KINDS, Layout, LeafSpec
from jaxmux.peft.leaves import trained
from jaxmux.sharding import StageMesh

from .train_state import TrainState

# Whether a slot has pairs: a scalar for one slot, [T] where arrays have a slot axis. None if the
# state has no room for pairs, so that its programs contain no code for them.
Paired = Bool[Array, "..."] | None

_Change = Callable[[LeafSpec, Array], Array]


def slots_with_pairs(layout: Layout, kinds: Mapping[int, str]) -> Bool[np.ndarray, " T"] | None:
    """The slots whose ranks form pairs; None if the state has no room for pairs. `kinds` has the
    adapter kind of each slot."""

    def has_pairs(name: str) -> bool:
        op = KINDS[name].op
        return op is not None and op.paired_ranks

    if not any(map(has_pairs, layout.tree.adapters)):
        return None
    paired = np.zeros(layout.tree.count.shape, bool)
    paired[[number for number, name in kinds.items() if has_pairs(name)]] = True
    return paired


def gradients_of_pairs(specs: Any, gradients: Any, paired: Paired) -> Any:
    """The gradients of A and B, in the even ranks, from those of the factors. A occurs in both
    ranks of a pair, and B in one."""
    return _changed(specs, gradients, paired, a=_sum, b=_first)


def parameters_of_pairs(specs: Any, adapters: Any, paired: Paired) -> Any:
    """A and B, in the even ranks, from the factors: the parameters that an optimizer sees."""
    return _changed(specs, adapters, paired, a=_first, b=_sum)


def directions_of_pairs(specs: Any, directions: Any, paired: Paired) -> Any:
    """The directions in which the factors move, from those of A and B in the even ranks. The given
    directions are zero in the odd ranks."""
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
            where_paired(a, specs[LOW_RANK_KIND][module].a, pool.a),
            where_paired(b, specs[LOW_RANK_KIND][module].b, pool.b),
        )
        for module, pool in tree[LOW_RANK_KIND].items()
    }
    return {**tree, LOW_RANK_KIND: factors}


def _first(spec: LeafSpec, leaf: Array) -> Array:
    """The first rank of every pair, and zero in the second one."""
    return jnp.where(_number_in_pair(spec, leaf) == 1, 0, leaf)


def _sum(spec: LeafSpec, leaf: Array) -> Array:
    """In the first rank of each pair, the sum of both ranks; in the second one, zero. A last rank
    without a partner is unchanged."""
    number = _number_in_pair(spec, leaf)
    second = jnp.roll(leaf, -1, spec.axes.index("rank"))
    return jnp.where(number == 1, 0, jnp.where(number == 0, leaf + second, leaf))


def _both(spec: LeafSpec, leaf: Array) -> Array:
    """The first rank of every pair, in both of its ranks."""
    first = jnp.roll(leaf, 1, spec.axes.index("rank"))
    return jnp.where(_number_in_pair(spec, leaf) == 1, first, leaf)


def _number_in_pair(spec: LeafSpec, leaf: Array) -> np.ndarray:
    """For every rank, whether it is the first (0) or the second (1) of its pair, in a shape that
    broadcasts with the array. The last rank of an odd number is neither (2)."""
    axis = spec.axes.index("rank")
    size = leaf.shape[axis]
    number = np.where(np.arange(size) < size - size % 2, np.arange(size) % 2, 2)
    return number.reshape([-1 if i == axis else 1 for i in range(leaf.ndim)])


Layer = Int[Array, ""]


def divided(state: TrainState) -> tuple[TrainState, TrainState]:
    """A state without the pool of low-rank factors, and the state with only this pool. Both have
    the losses and counts. `joined` is the inverse."""

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
    """The state whose parts `divided` returns, with the losses and counts of the first one."""
    return rest._replace(
        adapters=rest.adapters | factors.adapters,
        accumulators=rest.accumulators | factors.accumulators,
        moments=tuple(a | b for a, b in zip(rest.moments, factors.moments, strict=True)),
    )


def divided_rates(
    specs: TrainState, rates: Float[Array, "leaves L T"]
) -> tuple[Float[Array, "leaves L T"], Float[Array, "leaves L T"]]:
    """The learning rates of the two states that `divided` returns."""
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(specs.accumulators))
    of_factors = np.array([path[0].key == LOW_RANK_KIND for path in paths])
    return rates[~of_factors], rates[of_factors]


def layer_of(specs: TrainState, state: TrainState, layer: Layer) -> TrainState:
    def take(spec: Any, leaf: Array) -> Array:
        if "layer" not in spec.axes:
            return leaf
        return jax.lax.dynamic_slice_in_dim(leaf, layer, 1, spec.axes.index("layer"))

    return jax.tree.map(take, specs, state)


def layer_by_layer(
    change: Callable[[TrainState, Layer], TrainState], specs: TrainState, state: TrainState
) -> TrainState:
    """The state with the arrays of every layer changed in place. Losses and counts stay. `change`
    takes the state of one layer, as `layer_of` returns it, and the layer's index."""

    def put(spec: Any, leaf: Array, new: Array, layer: Layer) -> Array:
        if "layer" not in spec.axes:
            return leaf
        return jax.lax.dynamic_update_slice_in_dim(leaf, new, layer, spec.axes.index("layer"))

    def one(layer: Layer, state: TrainState) -> TrainState:
        new = change(layer_of(specs, state, layer), layer)
        return jax.tree.map(
            lambda spec, leaf, value: put(spec, leaf, value, layer), specs, state, new
        )

    return jax.lax.fori_loop(0, _layers_of(specs, state), one, state)


def _layers_of(specs: TrainState, state: TrainState) -> int:
    leaves = zip(jax.tree.leaves(specs), jax.tree.leaves(state), strict=True)
    return next(x.shape[spec.axes.index("layer")] for spec, x in leaves if "layer" in spec.axes)


# Maximum number of rows of a product with a frozen weight, which limits how many slots are renewed
# at once.
_ROWS = 512


def slots_to_renew(layout: Layout, kinds: Mapping[int, str]) -> dict[str, Int[np.ndarray, " T"]]:
    """For each adapter kind with derived arrays, the numbers of the slots that have it in `kinds`,
    padded with T to T numbers. Kinds for which the state has no room are left out."""
    (capacity,) = layout.tree.count.shape
    slots = {}
    for name in layout.tree.adapters:
        if _renews(name):
            numbers = [number for number, kind in kinds.items() if kind == name]
            slots[name] = np.int32(numbers + [capacity] * (capacity - len(numbers)))
    return slots


def renewed(
    state: TrainState,
    layers: Weights,
    slots: Mapping[str, Int[np.ndarray, " T"]],
    applied: Bool[Array, " T"],
    run: Callable[..., Any],
) -> TrainState:
    """The state on one device with derived arrays computed from the present trained arrays, for
    `slots` that were due (from `slots_to_renew`). Slots whose update was not applied keep their
    bits. The pools of the renewed kinds are donated. `run` calls a program."""
    for name, numbers in slots.items():
        factors, derived = state.adapters[LOW_RANK_KIND], state.adapters[name]
        operator = KINDS[name].op
        derived = run(_renew, operator, UNDIVIDED, layers, factors, derived, numbers, applied)
        state = state._replace(adapters=state.adapters | {name: derived})
    return state


def renewed_part(
    home: StageMesh,
    layout: Layout,
    state: TrainState,
    weights: Weights,
    slots: Mapping[str, Int[np.ndarray, " T"]],
    applied: Bool[Array, " T"],
) -> TrainState:
    for name, numbers in slots.items():
        derived = home.run(
            _renew_on_mesh,
            name,
            home,
            layout,
            weights["layers"],
            state.adapters[LOW_RANK_KIND],
            state.adapters[name],
            numbers,
            applied,
        )
        state = state._replace(adapters=state.adapters | {name: derived})
    return state


def changed_by_updates(specs: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Adapters with None in place of arrays that updates do not change. `specs` has, by adapter
    kind, the description of its pool."""
    return {
        name: adapters[name] if _renews(name) else trained(pool_specs, adapters[name])
        for name, pool_specs in specs.items()
    }


def _renews(kind: str) -> bool:
    op = KINDS[kind].op
    return op is not None and type(op).after_update is not AdapterOp.after_update


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _renew_on_mesh(name, home, layout, layers, factors, derived, slots, applied) -> Any:
    specs = home.leaf_specs(layout.tree.adapters)
    function = partial(_renew, KINDS[name].op, home.weights)
    return jax.shard_map(
        function,
        mesh=home.mesh,
        in_specs=(home.weight_specs(layers), specs[LOW_RANK_KIND], specs[name], P(), P()),
        out_specs=specs[name],
        check_vma=False,
    )(layers, factors, derived, slots, applied)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=4)
def _renew(
    op: AdapterOp,
    sharding: WeightSharding,
    layers: Weights,
    factors: Mapping[str, Factors],
    derived: Mapping[str, Mapping[str, Array]],
    slots: Int[Array, " T"],
    applied: Bool[Array, " T"],
) -> Any:
    """Computes the derived arrays of a kind in some slots: group of slots by group, and layer by
    layer."""
    capacity, rank = len(slots), next(iter(factors.values())).a.shape[-1]
    size = min(capacity, max(1, _ROWS // rank))
    count = (slots < capacity).sum()
    slots = jnp.where(applied[jnp.minimum(slots, capacity - 1)], slots, capacity)
    slots = jnp.pad(slots, (0, -capacity % size), constant_values=capacity)

    def of_group(group: Array, derived: Any) -> Any:
        chosen = jax.lax.dynamic_slice_in_dim(slots, group * size, size)
        return jax.lax.fori_loop(0, _layers(derived), partial(of_layer, chosen), derived)

    def of_layer(chosen: Array, layer: Array, derived: Any) -> Any:
        weights = layer_weights(layers, layer, sharding)

        def taken(pool: Array) -> Array:
            return pool[layer].at[chosen].get(mode="fill", fill_value=0)

        def of_point(point: str, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
            block, linear = point.split(".")
            new = op.after_update(
                jax.tree.map(taken, arrays),
                jax.tree.map(taken, factors[point]),
                weights[block][linear]["kernel"].at_layer(layer),
                _total if sharding.divided_axis(point) == "input" else _unchanged,
            )
            written = {
                name: arrays[name].at[layer, chosen].set(value, mode="drop")
                for name, value in new.items()
            }
            return {**arrays, **written}

        return {point: of_point(point, arrays) for point, arrays in derived.items()}

    return jax.lax.fori_loop(0, (count + size - 1) // size, of_group, derived)


def _layers(arrays: Any) -> int:
    return jax.tree.leaves(arrays)[0].shape[0]


def _total(summand: Array) -> Array:
    return jax.lax.psum(summand, TP)


def _unchanged(value: Array) -> Array:
    return value
