"""The compiled programs that update the tasks whose global batch is complete."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmux.models import Weights
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.optimizers import optimizer_class
from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import trained, with_trained

from .due_updates import DueUpdates, UpdateStats, no_stats
from .factors_by_layer import Layer, divided, divided_rates, joined, layer_by_layer, layer_of
from .paired_ranks import Paired, directions_of_pairs, gradients_of_pairs, parameters_of_pairs
from .renewal import renewed
from .train_state import TrainState, optax_parts, optax_state, replace_moments


def update(
    state: TrainState,
    layout: Layout,
    updates: DueUpdates,
    layers: Weights | None = None,
    warm: bool = False,
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due and clears their accumulators. Other slots keep their bits.

    A due slot whose loss, gradient or new parameters are not finite keeps its parameters, moments
    and update count. Each optimizer kind has its own program, which updates all slots at once and
    in place. In one pool, a task's bits therefore do not depend on the number of the other tasks or
    on their optimizers. On a GPU the program's temporaries are far smaller than a slot.

    Args:
      state: the train state; it is donated.
      layout: the description of the state.
      updates: the updates that are due.
      layers: weights of the layers of the backbone; only `updates.renewed` needs them.
      warm: True runs the programs of all optimizer kinds, so that they are compiled. Without due
        updates the state keeps its bits.

    Returns:
      The new state, and the results of the update by slot.
    """
    stats = no_stats(len(updates.due))
    if drops_foreign(layout, updates) and (warm or updates.due.any()):
        state = without_foreign(layout, state, updates.due, updates.own, updates.paired)
    for kind, due, hyper in updates.by_kind(every=warm):
        numbers = updates.rates, hyper, updates.paired
        state, stats = update_kind(kind, layout, state, stats, due, *numbers)
    if updates.renewed and (warm or updates.due.any()):
        state = renewed(state, layers, updates.renewed, stats.applied)
    return state, stats


def has_foreign_gradients(layout: Layout) -> bool:
    """Whether a slot has accumulators that do not belong to its task and may not be zero. Those of
    low-rank factors are zero, because padded factors are.

    Args:
      layout: the description of the state.
    """
    return any(tree for name, tree in layout.tree.adapters.items() if name != LOW_RANK_KIND)


def drops_foreign(layout: Layout, updates: DueUpdates) -> bool:
    """Whether `without_foreign` has something to do before updates."""
    return updates.own is not None and has_foreign_gradients(layout)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def without_foreign(
    layout: Layout,
    state: TrainState,
    due: Bool[Array, " T"],
    own: Bool[Array, "leaves L T"],
    paired: Paired = None,
) -> TrainState:
    """The state with the gradients of what the tasks of due slots train: zeros in place of those
    that do not belong to them, and of pairs of ranks the gradients of both parameters.

    Args:
      layout: the description of the state.
      state: the state; donated.
      due: the slots.
      own, paired: as in `DueUpdates`.
    """
    specs, structure = jax.tree.flatten(layout.tree.accumulators)
    leaves = []
    for spec, leaf, mask in zip(specs, jax.tree.leaves(state.accumulators), own, strict=True):
        foreign = due & ~(mask if "layer" in spec.axes else mask[spec.place][None])
        shape = [1] * leaf.ndim
        shape[spec.slot_axis] = len(due)
        if "layer" in spec.axes:
            shape[spec.axes.index("layer")] = len(mask)
        leaves.append(jnp.where(foreign.reshape(shape), 0, leaf))
    state = state._replace(accumulators=jax.tree.unflatten(structure, leaves))
    if paired is None:
        return state
    (_, factor_specs), (rest, factors) = divided(layout.tree), divided(state)

    def change(own: TrainState, _: Layer) -> TrainState:
        gradients = gradients_of_pairs(factor_specs.accumulators, own.accumulators, due & paired)
        return own._replace(accumulators=gradients)

    return joined(rest, layer_by_layer(change, factor_specs, factors))


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update_kind(
    kind: str,
    layout: Layout,
    state: TrainState,
    stats: UpdateStats,
    due: Bool[Array, " T"],
    rates: Float[Array, "leaves L T"],
    hyper: Mapping[str, Float[Array, " T"]],
    paired: Paired = None,
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due, all of one optimizer kind, and their entries in `stats`."""
    norm = norm_of_layers([layer_squares(layout, state.accumulators)])
    # The new state is computed twice, once to check that it is finite and once to write it: that
    # costs less memory traffic than storing it in between. The barrier keeps XLA from merging the
    # two computations.
    finite = finite_candidates(
        kind, layout, state, rates, jax.lax.optimization_barrier(hyper), paired, norm
    )
    stats = decide(stats, due, state.loss, norm, [finite])
    return apply_updates(kind, layout, state, due, stats.applied, rates, hyper, paired, norm), stats


@partial(jax.jit, static_argnums=0)
def layer_squares(layout: Layout, accumulators: Any) -> Float[Array, "L T"]:
    """The sum of the squares of the gradients, by layer and slot.

    On CPU the layers are summed one after another, so that a layer's sum has the same bits whatever
    layers lie beside it.
    """
    specs = jax.tree.leaves(layout.tree.accumulators)
    leaves = list(zip(specs, jax.tree.leaves(accumulators), strict=True))
    of_layers = [
        jnp.moveaxis(x, (spec.axes.index("layer"), spec.slot_axis), (0, 1))
        for spec, x in leaves
        if "layer" in spec.axes
    ]
    before, behind = (
        [
            jnp.moveaxis(x, s.slot_axis, 0)
            for s, x in leaves
            if "layer" not in s.axes and s.place == place
        ]
        for place in (0, -1)
    )

    def of_slots(leaves: Sequence[Float[Array, "T ..."]]) -> Float[Array, " T"]:
        sums = [_partial(jnp.sum, jnp.square(x), kept=1) for x in leaves]
        return jnp.concatenate(sums, axis=-1).sum(axis=-1)

    by_layer = jax.lax.map if jax.default_backend() == "cpu" else _all_at_once
    if not of_layers:
        return jnp.stack([of_slots(others) for others in (before, behind) if others])
    squares = by_layer(of_slots, of_layers)
    # What belongs to no layer counts with the first or the last one.
    for place, others in ((0, before), (-1, behind)):
        if others:
            squares = squares.at[place].add(of_slots(others))
    return squares


def _all_at_once(function: Callable[[Any], Array], values: Any) -> Array:
    return jax.vmap(function)(values)


@jax.jit
def norm_of_layers(squares: Sequence[Float[Array, "_ T"]]) -> Float[Array, " T"]:
    """The global L2 norm of each slot's gradient.

    Args:
      squares: from `layer_squares`, by part of the layers.
    """
    # One layer after another, so that the bits do not depend on how the layers are divided.
    return jnp.sqrt(reduce(jnp.add, [layer for part in squares for layer in part]))


@partial(jax.jit, static_argnums=(0, 1))
def finite_candidates(kind, layout, state, rates, hyper, paired, norm) -> Bool[Array, " T"]:
    """Whether all new parameters of a slot would be finite, for all slots.

    Args:
      kind: the optimizer kind.
      layout: the description of the state.
      state: the state.
      rates, hyper, paired: as in `DueUpdates`, `hyper` with one value for each slot.
      norm: float32 [T], global norm of each gradient.
    """
    specs: TrainState = layout.tree
    if paired is None:
        return _finite_in(kind, specs, state, rates, hyper, None, norm)
    (rest_specs, factor_specs), (rest, factors) = divided(specs), divided(state)
    of_rest, of_factors = divided_rates(specs, rates)

    def also_finite(layer: Layer, finite: Bool[Array, " T"]) -> Bool[Array, " T"]:
        own = layer_of(factor_specs, factors, layer)
        numbers = _rates_of(layer, of_factors), hyper, paired, norm
        return finite & _finite_in(kind, factor_specs, own, *numbers)

    finite = _finite_in(kind, rest_specs, rest, of_rest, hyper, None, norm)
    return jax.lax.fori_loop(0, rates.shape[1], also_finite, finite)


def _finite_in(kind, specs: TrainState, state, rates, hyper, paired, norm) -> Bool[Array, " T"]:
    """`finite_candidates` of all layers at once."""
    candidates, _ = _candidates(kind, specs, state, rates, hyper, paired, norm)
    finite = jax.tree.map(jnp.isfinite, candidates)

    def rows(spec: LeafSpec, x: Array) -> Bool[Array, "T _"]:
        # The large array is reduced where it lies, and only the small result is transposed.
        found = _partial(jnp.all, x, kept=spec.slot_axis + 1)
        return jnp.moveaxis(found, spec.slot_axis, 0).reshape(x.shape[spec.slot_axis], -1)

    leaves = jax.tree.leaves(jax.tree.map(rows, specs.accumulators, finite))
    if not leaves:
        return jnp.ones(norm.shape, bool)
    return jnp.concatenate(leaves, axis=-1).all(axis=-1)


@jax.jit
def decide(stats: UpdateStats, due, loss, norm, finite: Sequence[Bool[Array, " T"]]) -> UpdateStats:
    """The results of the due slots; other slots keep theirs.

    Args:
      stats: the results so far.
      due: bool [T], the slots.
      loss, norm: float32 [T], losses and norms of the gradients.
      finite: whether the new parameters are finite, by part of the layers. The update of a slot is
        applied if they all are, and so are its loss and norm.
    """
    applied = due & jnp.isfinite(norm) & jnp.isfinite(loss)
    for part in finite:
        applied &= part
    return jax.tree.map(partial(select_slots, due), UpdateStats(loss, norm, applied), stats)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def apply_updates(kind, layout, state, due, applied, rates, hyper, paired, norm) -> TrainState:
    """The state with the new values of the applied slots, and without the gradients of those that
    were due.

    Args:
      kind: the optimizer kind.
      layout: the description of the state.
      state: the state; donated.
      due, applied: bool [T], the slots that are due, and those whose update is applied.
      rates, hyper, paired, norm: as in `finite_candidates`.
    """
    specs: TrainState = layout.tree
    if paired is None:
        return _apply_in(kind, specs, state, due, applied, rates, hyper, None, norm)
    (rest_specs, factor_specs), (rest, factors) = divided(specs), divided(state)
    of_rest, of_factors = divided_rates(specs, rates)

    def change(own: TrainState, layer: Layer) -> TrainState:
        numbers = _rates_of(layer, of_factors), hyper, paired, norm
        return _apply_in(kind, factor_specs, own, due, applied, *numbers)

    return joined(
        _apply_in(kind, rest_specs, rest, due, applied, of_rest, hyper, None, norm),
        layer_by_layer(change, factor_specs, factors),
    )


def _rates_of(layer: Layer, rates: Float[Array, "leaves L T"]) -> Float[Array, "leaves 1 T"]:
    return jax.lax.dynamic_slice_in_dim(rates, layer, 1, axis=1)


def _apply_in(
    kind, specs: TrainState, state, due, applied, rates, hyper, paired, norm
) -> TrainState:
    """`apply_updates` for all layers at once."""
    applied = applied & due

    def keep_or_replace(spec: LeafSpec, new: Array, old: Array) -> Array:
        return select_slots(applied, new, old, spec.slot_axis)

    adapters, optimizer = jax.tree.map(
        keep_or_replace,
        (specs.accumulators, optax_state(kind, specs.moments, specs.count)),
        _candidates(kind, specs, state, rates, hyper, paired, norm),
        (trained(specs.adapters, state.adapters), optax_state(kind, state.moments, state.count)),
    )
    cleared = state._replace(
        adapters=with_trained(specs.adapters, state.adapters, adapters),
        accumulators=jax.tree.map(
            lambda spec, x: select_slots(due, 0, x, spec.slot_axis),
            specs.accumulators,
            state.accumulators,
        ),
        loss=select_slots(due, 0, state.loss),
    )
    return replace_moments(cleared, *optax_parts(kind, optimizer))


def _candidates(kind, specs: TrainState, state, rates, hyper, paired, norm) -> tuple[Any, Any]:
    """The new parameters and optimizer states of all slots, as if all were due."""
    own_specs = jax.tree.map(LeafSpec.of_slot, specs.accumulators)
    optimizer_specs = optax_state(kind, specs.moments, specs.count)
    axes, optimizer_axes = jax.tree.map(
        lambda spec: spec.slot_axis, (specs.accumulators, optimizer_specs)
    )
    update_slots = jax.vmap(
        partial(_update_slot, kind, own_specs),
        in_axes=(axes, axes, optimizer_axes, -1, 0, 0, 0),
        out_axes=(axes, optimizer_axes),
    )
    adapters = trained(specs.adapters, state.adapters)
    optimizer = optax_state(kind, state.moments, state.count)
    return update_slots(adapters, state.accumulators, optimizer, rates, hyper, paired, norm)


def _update_slot(
    kind: str, specs: Any, params: Any, gradients: Any, optimizer: Any, rates, hyper, paired, norm
) -> tuple[Any, Any]:
    """The new parameters and optimizer state of one slot.

    Args:
      specs: tree of `LeafSpec` of the slot's trained leaves.
      rates: float32 [leaves, L].
      paired: whether the slot's low-rank factors have pairs of ranks; None if no slot's do.
      norm: global norm of the gradient.
    """
    clip = jnp.minimum(1.0, hyper["clip_norm"] / (norm + 1e-6))
    gradients = jax.tree.map(lambda g: clip * g, gradients)
    transform = optimizer_class(kind).transform(hyper)
    seen = parameters_of_pairs(specs, params, paired)
    direction, optimizer = transform.update(gradients, optimizer, seen)
    direction = directions_of_pairs(specs, direction, paired)

    def descend(spec: LeafSpec, param: Array, direction: Array, rate: Float[Array, " L"]) -> Array:
        if "layer" not in spec.axes:
            return param - rate[spec.place] * direction
        shape = [1] * param.ndim
        shape[spec.axes.index("layer")] = -1
        return param - rate.reshape(shape) * direction

    rate_tree = jax.tree.unflatten(jax.tree.structure(params), list(rates))
    return jax.tree.map(descend, specs, params, direction, rate_tree), optimizer


def select_slots(chosen: Bool[Array, " T"], new, old: Array, slot_axis: int = 0) -> Array:
    """`new` in the chosen slots, `old` in the others.

    Args:
      chosen: the slots.
      new: an array like `old`, or a number.
      old: the array.
      slot_axis: axis of `old` over the slots.
    """
    shape = [1] * old.ndim
    shape[slot_axis] = -1
    return jnp.where(chosen.reshape(shape), new, old)


def _partial(reduction, x: Array, kept: int) -> Array:
    """Reduces what lies behind the first `kept` axes to few values.

    A GPU reduces many rows of moderate length at memory bandwidth, but not one long row.
    """
    columns = math.gcd(math.prod(x.shape[kept:]), 4096)
    return reduction(x.reshape(*x.shape[:kept], -1, columns), axis=-1)
