"""Updates of the adapters in their slots: the due updates as arrays for compiled programs, the
programs for a whole train state and for one in parts on several devices, and their results."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxmux.models import Weights
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.models.weight_sharding import TP
from jaxmux.objectives.token_losses import SUMS
from jaxmux.optimizers import optimizer_class
from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import trained, with_trained
from jaxmux.sharding import OneDevice, StageMesh

from .renewal import (
    Layer,
    Paired,
    directions_of_pairs,
    divided,
    divided_rates,
    gradients_of_pairs,
    joined,
    layer_by_layer,
    layer_of,
    parameters_of_pairs,
    renewed,
    renewed_part,
    slots_to_renew,
    slots_with_pairs,
)
from .stored_state import StoredState, with_copies
from .train_state import TrainState, optax_parts, optax_state, replace_moments

# By optimizer kind and name, float32 [T_kind].
Hyperparameters = Mapping[str, Mapping[str, np.ndarray]]
# By optimizer kind, the numbers of the slots that use it, int32 [T_kind].
SlotsByOptimizer = Mapping[str, np.ndarray]


class UpdateStats(NamedTuple):
    """Results of an update, one value for each slot. Values of slots without a due update have no
    meaning.

    Attributes:
      sums: `TrainState.sums`. The loss is NaN if a value in the task's forward pass was not finite.
      grad_norm: global L2 norm of the task's gradient before clipping, float32.
      applied: False if the loss, the norm or the updated parameters were not finite, so that the
        update was skipped.
    """

    sums: Float[Array, "T sums"]
    grad_norm: Float[Array, " T"]
    applied: Bool[Array, " T"]


class DueUpdates(NamedTuple):
    """The due updates as arrays for the compiled programs.

    Attributes:
      due: True for slots whose global batch is complete.
      rates: the learning rate of every trained leaf, layer and slot. A leaf without a layer axis
        uses the rate of the first layer, or with the axis "last" that of the last one.
      hyper: by optimizer kind and name of the hyperparameter, float32 [T_kind]: one value for each
        slot in `members` of this kind.
      members: by optimizer kind, int32 [T_kind]: the numbers of the slots that use this kind.
      own: whether the slot's task trains a leaf in a layer. Every slot has arrays of all adapter
        kinds, and gradients in arrays of other kinds than its task's have no meaning. None if there
        is only LoRA, where these gradients are zero.
      renewed: by adapter kind with derived arrays, the slots to renew, from `slots_to_renew`.
      paired: from `slots_with_pairs`, the slots whose low-rank factors have pairs of ranks.
    """

    due: Bool[np.ndarray, " T"]
    rates: Float[np.ndarray, "leaves L T"]
    hyper: Hyperparameters
    members: SlotsByOptimizer
    own: Bool[np.ndarray, "leaves L T"] | None = None
    renewed: Mapping[str, Int[np.ndarray, " T"]] = MappingProxyType({})
    paired: Bool[np.ndarray, " T"] | None = None

    def by_kind(
        self, every: bool = False
    ) -> Iterator[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
        """Yields, for each optimizer kind with due updates (or for every kind): its name, which
        slots have a due update of this kind, bool [T], and the hyperparameters of all slots,
        float32 [T]."""

        def spread(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
            spread_values = np.zeros(len(self.due), values.dtype)
            spread_values[slots] = values
            return spread_values

        for kind, slots in self.members.items():
            if every or self.due[slots].any():
                hyper = {name: spread(values, slots) for name, values in self.hyper[kind].items()}
                yield kind, spread(self.due[slots], slots), hyper


def no_updates(layout: Layout, layers: int, optimizers: Sequence[str]) -> DueUpdates:
    """Arrays for the compiled programs with which nothing is updated. `layers` is the number of
    layers of the backbone, and `optimizers` the optimizer kinds that tasks may have."""
    none, (slots,) = np.zeros(0, np.int32), layout.tree.count.shape
    hyper = {
        kind: dict.fromkeys(optimizer_class(kind)().hyperparameters(), none.astype(np.float32))
        for kind in optimizers
    }
    rates = np.zeros((len(jax.tree.leaves(layout.tree.accumulators)), layers, slots), np.float32)
    members = dict.fromkeys(optimizers, none)
    return DueUpdates(
        np.zeros(slots, bool),
        rates,
        hyper,
        members,
        own=rates > 0,
        renewed=slots_to_renew(layout, {}),
        paired=slots_with_pairs(layout, {}),
    )


def no_stats(slots: int) -> UpdateStats:
    none = np.zeros(slots, np.float32)
    return UpdateStats(np.zeros((slots, SUMS), np.float32), none, none > 0)


def update(
    state: TrainState,
    layout: Layout,
    updates: DueUpdates,
    layers: Weights | None = None,
    warm: bool = False,
    stats: UpdateStats | None = None,
    run: Callable[..., Any] = lambda program, *arguments: program(*arguments),
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due and clears their accumulators. Other slots keep their bits.
    `state` is donated; only `updates.renewed` needs `layers`, the weights of the backbone's layers.

    A due slot whose loss, gradient or new parameters are not finite keeps its parameters, moments
    and update count. Each optimizer kind has its own program, which updates all slots at once and
    in place. In one pool, a task's bits therefore do not depend on the number of the other tasks or
    on their optimizers. On a GPU the program's temporaries are far smaller than a slot. `warm` runs
    the programs of all optimizer kinds, so that they are compiled. `stats` is `no_stats` on the
    device of the state, and `run` calls a program (see `StageMesh.run`).
    """
    stats = stats or no_stats(len(updates.due))
    paired = updates.paired
    if drops_foreign(layout, updates) and (warm or updates.due.any()):
        state = run(without_foreign, layout, state, updates.due, updates.own, paired)
    for kind, due, hyper in updates.by_kind(every=warm):
        state, stats = run(
            update_kind, kind, layout, state, stats, due, updates.rates, hyper, paired
        )
    if updates.renewed and (warm or updates.due.any()):
        state = renewed(state, layers, updates.renewed, stats.applied, run)
    return state, stats


def has_foreign_gradients(layout: Layout) -> bool:
    """Whether a slot has accumulators that do not belong to its task and may not be zero. Those of
    low-rank factors are always zero, because factors are padded with zeros."""
    return any(tree for name, tree in layout.tree.adapters.items() if name != LOW_RANK_KIND)


def drops_foreign(layout: Layout, updates: DueUpdates) -> bool:
    return updates.own is not None and has_foreign_gradients(layout)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def without_foreign(
    layout: Layout,
    state: TrainState,
    due: Bool[Array, " T"],
    own: Bool[Array, "leaves L T"],
    paired: Paired = None,
) -> TrainState:
    """Prepares the gradients of due slots: gradients that do not belong to the slot's task become
    zero, and those of paired ranks become the gradients of A and B. `state` is donated; `own` and
    `paired` are as in `DueUpdates`."""
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

    def change(layer_state: TrainState, _: Layer) -> TrainState:
        gradients = gradients_of_pairs(
            factor_specs.accumulators, layer_state.accumulators, due & paired
        )
        return layer_state._replace(accumulators=gradients)

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
    norm = norm_of_layers([layer_squares(layout, state.accumulators)])
    # The new state is computed twice, once to check that it is finite and once to write it. This
    # takes less memory traffic than storing it in between. The barrier keeps XLA from merging the
    # two computations.
    finite = finite_candidates(
        kind, layout, state, rates, jax.lax.optimization_barrier(hyper), paired, norm
    )
    stats = decide(stats, due, state.sums, norm, [finite])
    return apply_updates(kind, layout, state, due, stats.applied, rates, hyper, paired, norm), stats


@partial(jax.jit, static_argnums=0)
def layer_squares(layout: Layout, accumulators: Any) -> Float[Array, "L T"]:
    """The sum of the squares of the gradients, by layer and slot.

    On CPU the layers are summed one after another, so that the bits of a layer's sum do not depend
    on the other layers of the state.
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
    # Leaves without a layer axis count with the first or the last layer.
    for place, others in ((0, before), (-1, behind)):
        if others:
            squares = squares.at[place].add(of_slots(others))
    return squares


def _all_at_once(function: Callable[[Any], Array], values: Any) -> Array:
    return jax.vmap(function)(values)


@jax.jit
def norm_of_layers(squares: Sequence[Float[Array, "_ T"]]) -> Float[Array, " T"]:
    """The global L2 norm of each slot's gradient, from the `layer_squares` of all parts."""
    # Layers are added in order, so that the bits do not depend on their division into parts.
    return jnp.sqrt(reduce(jnp.add, [layer for part in squares for layer in part]))


@partial(jax.jit, static_argnums=(0, 1))
def finite_candidates(kind, layout, state, rates, hyper, paired, norm) -> Bool[Array, " T"]:
    """Whether all new parameters of a slot would be finite, for all slots. `rates`, `hyper` and
    `paired` are as in `DueUpdates`, `hyper` with one value for each slot; `norm` is the global norm
    of each gradient."""
    specs: TrainState = layout.tree
    if paired is None:
        return _finite_in(kind, specs, state, rates, hyper, None, norm)
    (rest_specs, factor_specs), (rest, factors) = divided(specs), divided(state)
    of_rest, of_factors = divided_rates(specs, rates)

    def also_finite(layer: Layer, finite: Bool[Array, " T"]) -> Bool[Array, " T"]:
        layer_state = layer_of(factor_specs, factors, layer)
        layer_rates = _rates_of(layer, of_factors)
        return finite & _finite_in(
            kind, factor_specs, layer_state, layer_rates, hyper, paired, norm
        )

    finite = _finite_in(kind, rest_specs, rest, of_rest, hyper, None, norm)
    return jax.lax.fori_loop(0, rates.shape[1], also_finite, finite)


def _finite_in(kind, specs: TrainState, state, rates, hyper, paired, norm) -> Bool[Array, " T"]:
    candidates, _ = _candidates(kind, specs, state, rates, hyper, paired, norm)
    finite = jax.tree.map(jnp.isfinite, candidates)

    def rows(spec: LeafSpec, x: Array) -> Bool[Array, "T _"]:
        # The large array is reduced first, and only the small result is transposed.
        reduced = _partial(jnp.all, x, kept=spec.slot_axis + 1)
        return jnp.moveaxis(reduced, spec.slot_axis, 0).reshape(x.shape[spec.slot_axis], -1)

    leaves = jax.tree.leaves(jax.tree.map(rows, specs.accumulators, finite))
    if not leaves:
        return jnp.ones(norm.shape, bool)
    return jnp.concatenate(leaves, axis=-1).all(axis=-1)


@jax.jit
def decide(stats: UpdateStats, due, sums, norm, finite: Sequence[Bool[Array, " T"]]) -> UpdateStats:
    """The results of the due slots; other slots keep theirs. `finite` tells, for each part of the
    layers, whether the new parameters are finite. An update is applied if they are finite in all
    parts, and its loss and norm are finite."""
    applied = due & jnp.isfinite(norm) & jnp.isfinite(sums[:, 0])
    for part in finite:
        applied &= part
    return jax.tree.map(partial(select_slots, due), UpdateStats(sums, norm, applied), stats)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def apply_updates(kind, layout, state, due, applied, rates, hyper, paired, norm) -> TrainState:
    """The state with the new values of the applied slots, and without the gradients of the due
    slots. `state` is donated; `due` and `applied` are bool [T], the rest is as in
    `finite_candidates`."""
    specs: TrainState = layout.tree
    if paired is None:
        return _apply_in(kind, specs, state, due, applied, rates, hyper, None, norm)
    (rest_specs, factor_specs), (rest, factors) = divided(specs), divided(state)
    of_rest, of_factors = divided_rates(specs, rates)

    def change(layer_state: TrainState, layer: Layer) -> TrainState:
        layer_rates = _rates_of(layer, of_factors)
        return _apply_in(
            kind, factor_specs, layer_state, due, applied, layer_rates, hyper, paired, norm
        )

    return joined(
        _apply_in(kind, rest_specs, rest, due, applied, of_rest, hyper, None, norm),
        layer_by_layer(change, factor_specs, factors),
    )


def _rates_of(layer: Layer, rates: Float[Array, "leaves L T"]) -> Float[Array, "leaves 1 T"]:
    return jax.lax.dynamic_slice_in_dim(rates, layer, 1, axis=1)


def _apply_in(
    kind, specs: TrainState, state, due, applied, rates, hyper, paired, norm
) -> TrainState:
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
        sums=select_slots(due, 0, state.sums),
    )
    return replace_moments(cleared, *optax_parts(kind, optimizer))


def _candidates(kind, specs: TrainState, state, rates, hyper, paired, norm) -> tuple[Any, Any]:
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
    """The new parameters and optimizer state of one slot. `rates` is float32 [leaves, L], `norm`
    the global norm of the gradient; without `paired`, no slot of the state has pairs of ranks."""
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
    shape = [1] * old.ndim
    shape[slot_axis] = -1
    return jnp.where(chosen.reshape(shape), new, old)


def _partial(reduction, x: Array, kept: int) -> Array:
    """Reduces the axes after the first `kept` ones to one axis with few values.

    A GPU reduces many rows of moderate length at memory bandwidth, but not one long row.
    """
    columns = math.gcd(math.prod(x.shape[kept:]), 4096)
    return reduction(x.reshape(*x.shape[:kept], -1, columns), axis=-1)


def update_parts(
    stored: StoredState, updates: DueUpdates, weights: Sequence[Weights], warm: bool = False
) -> UpdateStats:
    """Updates a state that may be divided into parts on several devices, with the results of
    `update`.

    A task's gradient is clipped by its norm over all parts, and its update is skipped in all parts
    or in none. The parts of `stored` are replaced; `weights` are those of each part, and `warm` is
    as for `update`. Every process can read the results.
    """
    homes, parts = stored.homes, range(len(stored.parts))
    last = homes[-1]
    stats = last.put(no_stats(len(updates.due)), P())
    if isinstance(last, OneDevice):
        (state,), layers = stored.states, weights[0]["layers"]
        state, stats = update(state, stored.layout, updates, layers, warm, stats, last.run)
        stored.states = [state]
        return last.share(stats)

    def gather(values: Sequence[Array]) -> list[Array]:
        pairs = zip(homes, values, strict=True)
        return [home.move(value, last, P()) for home, value in pairs]

    def scatter(value: Array) -> list[Array]:
        return [last.move(value, home, P()) for home in homes]

    rates = [updates.rates[:, part.slice] for part in stored.parts]
    for i in parts:
        stored.states[i] = _sum_copies(homes[i], stored.summed[i], stored.states[i], updates)
        if drops_foreign(stored.layouts[i], updates):
            stored.states[i] = homes[i].run(
                without_foreign,
                stored.layouts[i],
                stored.states[i],
                updates.due,
                updates.own[:, stored.parts[i].slice],
                updates.paired,
            )
    summed, paired = stored.summed, updates.paired
    for kind, due, hyper in updates.by_kind(every=warm):
        states = stored.states
        squares = [homes[i].run(_stage_squares, homes[i], summed[i], states[i]) for i in parts]
        norm = last.run(norm_of_layers, gather([each for each, _ in squares]))
        norms = scatter(norm)
        finite = [
            homes[i].run(
                _stage_finite,
                kind,
                homes[i],
                summed[i],
                states[i],
                rates[i],
                hyper,
                paired,
                norms[i],
            )
            for i in parts
        ]
        stats = last.run(decide, stats, due, squares[-1][1], norm, gather(finite))
        applied = scatter(stats.applied)
        stored.states = [
            homes[i].run(
                _stage_apply,
                kind,
                homes[i],
                summed[i],
                states[i],
                due,
                applied[i],
                rates[i],
                hyper,
                paired,
                norms[i],
            )
            for i in parts
        ]
    if updates.renewed and (warm or updates.due.any()):
        for i, applied in enumerate(scatter(stats.applied)):
            stored.states[i] = renewed_part(
                homes[i], summed[i], stored.states[i], weights[i], updates.renewed, applied
            )
    return last.share(stats)


def _per_device(
    function: Callable[..., Any],
    home: StageMesh,
    summed: Layout,
    state: TrainState,
    *others: Any,
    out_specs: Any,
) -> Any:
    """Runs `function(state, *others)` on every device of a stage, with that device's copy of the
    accumulators and losses and its part of all other arrays; `others` are the same on every
    device."""

    def on_device(state: TrainState, *others: Any) -> Any:
        accumulators, sums = jax.tree.map(
            lambda copies: jnp.squeeze(copies, 0), (state.accumulators, state.sums)
        )
        return function(state._replace(accumulators=accumulators, sums=sums), *others)

    return jax.shard_map(
        on_device,
        mesh=home.mesh,
        in_specs=(home.leaf_specs(with_copies(summed.tree, home)), *(P() for _ in others)),
        out_specs=out_specs,
        check_vma=False,
    )(state, *others)


def _new_state(
    function: Callable[..., TrainState],
    home: StageMesh,
    summed: Layout,
    state: TrainState,
    *others: Any,
) -> TrainState:
    """`_per_device` for a function that returns the device's new state."""

    def with_copy_axis(*arguments: Any) -> TrainState:
        new = function(*arguments)
        accumulators, sums = jax.tree.map(lambda x: x[None], (new.accumulators, new.sums))
        return new._replace(accumulators=accumulators, sums=sums)

    out_specs = home.leaf_specs(with_copies(summed.tree, home))
    return _per_device(with_copy_axis, home, summed, state, *others, out_specs=out_specs)


def _sum_copies(
    home: StageMesh, summed: Layout, state: TrainState, updates: DueUpdates
) -> TrainState:
    """The state of a stage in which every copy of due slots' accumulators and losses is the sum."""
    if home.mesh.size == 1:
        return state
    return home.run(_sum_due_copies, home, summed, state, updates.due)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _sum_due_copies(home: StageMesh, summed: Layout, state: TrainState, due) -> TrainState:
    specs = summed.tree

    described = specs.accumulators, specs.sums
    # The first axis of an array with copies is divided among the devices whose copies are summed.
    divided = home.leaf_specs(home.with_copies(described))

    def on_device(state: TrainState, due: Bool[Array, " T"]) -> TrainState:
        def total(spec: LeafSpec, copies: P, x: Array) -> Array:
            return select_slots(due, jax.lax.psum(x, copies[0]), x, spec.slot_axis)

        held = state.accumulators, state.sums
        accumulators, sums = jax.tree.map(total, described, divided, held)
        return state._replace(accumulators=accumulators, sums=sums)

    return _new_state(on_device, home, summed, state, due)


@partial(jax.jit, static_argnums=(0, 1))
def _stage_squares(
    home: StageMesh, summed: Layout, state: TrainState
) -> tuple[Float[Array, "L T"], Float[Array, " T"]]:
    """`layer_squares` and losses of a stage whose copies have been summed."""

    def on_device(state: TrainState) -> tuple[Array, Array]:
        accumulators = state.accumulators
        if home.weights.tp > 1:
            # An array that is whole on every tensor-parallel device counts only on the first.
            first = jax.lax.axis_index(TP) == 0
            accumulators = jax.tree.map(
                lambda spec, x: x if TP in spec else jnp.where(first, x, 0),
                home.leaf_specs(summed.tree.accumulators),
                accumulators,
            )
            return jax.lax.psum(layer_squares(summed, accumulators), TP), state.sums
        return layer_squares(summed, accumulators), state.sums

    return _per_device(on_device, home, summed, state, out_specs=P())


@partial(jax.jit, static_argnums=(0, 1, 2))
def _stage_finite(
    kind: str, home: StageMesh, summed: Layout, state: TrainState, rates, hyper, paired, norm
) -> Bool[Array, " T"]:
    def on_device(state: TrainState, rates, hyper, paired, norm) -> Bool[Array, " T"]:
        finite = finite_candidates(kind, summed, state, rates, hyper, paired, norm)
        if home.weights.tp == 1:
            return finite
        return jax.lax.pmin(finite.astype(jnp.int32), TP) > 0

    return _per_device(on_device, home, summed, state, rates, hyper, paired, norm, out_specs=P())


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _stage_apply(
    kind: str,
    home: StageMesh,
    summed: Layout,
    state: TrainState,
    due,
    applied,
    rates,
    hyper,
    paired,
    norm,
) -> TrainState:
    function = partial(apply_updates, kind, summed)
    return _new_state(function, home, summed, state, due, applied, rates, hyper, paired, norm)
