"""The updates of a train state that is divided into parts on several devices."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxmux.models import Weights
from jaxmux.models.weight_sharding import TP
from jaxmux.peft import Layout, LeafSpec
from jaxmux.sharding import StageMesh

from .due_updates import DueUpdates, UpdateStats, no_stats
from .renewal import renewed_part
from .stored_state import StoredState, with_copies
from .train_state import TrainState
from .updates import (
    apply_updates,
    decide,
    drops_foreign,
    finite_candidates,
    layer_squares,
    norm_of_layers,
    select_slots,
    without_foreign,
)


def update_parts(
    stored: StoredState, updates: DueUpdates, weights: Sequence[Weights], warm: bool = False
) -> UpdateStats:
    """Updates a state that is divided into parts on several devices, with the results of `update`.

    A task's gradient is clipped by its norm over all parts, and its update is skipped in all parts
    or in none.

    Args:
      stored: the state; its parts are replaced.
      updates: the updates that are due.
      weights: the weights of each part.
      warm: True runs the programs of all optimizer kinds, so that they are compiled. Without due
        updates the state keeps its bits.

    Returns:
      The results of the update by slot, which every process can read.
    """
    homes, parts = stored.homes, range(len(stored.parts))
    last = homes[-1]

    def gather(values: Sequence[Array]) -> list[Array]:
        pairs = zip(homes, values, strict=True)
        return [home.move(value, last, P()) for home, value in pairs]

    def scatter(value: Array) -> list[Array]:
        return [last.move(value, home, P()) for home in homes]

    rates = [updates.rates[:, part.slice] for part in stored.parts]
    stats = no_stats(len(updates.due))
    for i in parts:
        stored.states[i] = _sum_copies(homes[i], stored.summed[i], stored.states[i], updates)
        if drops_foreign(stored.layouts[i], updates):
            own = updates.own[:, stored.parts[i].slice]
            arguments = stored.layouts[i], stored.states[i], updates.due, own, updates.paired
            stored.states[i] = homes[i].run(without_foreign, *arguments)
    for kind, due, hyper in updates.by_kind(every=warm):
        own = [(homes[i], stored.summed[i], stored.states[i]) for i in parts]
        squares = [home.run(_stage_squares, home, *rest) for home, *rest in own]
        norm = last.run(norm_of_layers, gather([each for each, _ in squares]))
        numbers = [
            (rate, hyper, updates.paired, norm)
            for rate, norm in zip(rates, scatter(norm), strict=True)
        ]
        finite = [homes[i].run(_stage_finite, kind, *own[i], *numbers[i]) for i in parts]
        stats = last.run(decide, stats, due, squares[-1][1], norm, gather(finite))
        applied = scatter(stats.applied)
        stored.states = [
            homes[i].run(_stage_apply, kind, *own[i], due, applied[i], *numbers[i]) for i in parts
        ]
    if updates.renewed and (warm or updates.due.any()):
        for i, applied in enumerate(scatter(stats.applied)):
            given = homes[i], stored.summed[i], stored.states[i], weights[i]
            stored.states[i] = renewed_part(*given, updates.renewed, applied)
    return last.share(stats)


def _per_device(
    function: Callable[..., Any],
    home: StageMesh,
    summed: Layout,
    state: TrainState,
    *others: Any,
    out_specs: Any,
) -> Any:
    """`function(state, *others)` on every device of a stage, with that device's copy of the
    accumulators and losses and its part of all other arrays; `others` are the same everywhere."""

    def on_device(state: TrainState, *others: Any) -> Any:
        accumulators, loss = jax.tree.map(
            lambda copies: jnp.squeeze(copies, 0), (state.accumulators, state.loss)
        )
        return function(state._replace(accumulators=accumulators, loss=loss), *others)

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
        accumulators, loss = jax.tree.map(lambda own: own[None], (new.accumulators, new.loss))
        return new._replace(accumulators=accumulators, loss=loss)

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

    described = specs.accumulators, specs.loss
    # The first axis of an array with copies is divided among the devices whose copies are summed.
    divided = home.leaf_specs(home.with_copies(described))

    def on_device(state: TrainState, due: Bool[Array, " T"]) -> TrainState:
        def total(spec: LeafSpec, copies: P, own: Array) -> Array:
            return select_slots(due, jax.lax.psum(own, copies[0]), own, spec.slot_axis)

        own = state.accumulators, state.loss
        accumulators, loss = jax.tree.map(total, described, divided, own)
        return state._replace(accumulators=accumulators, loss=loss)

    return _new_state(on_device, home, summed, state, due)


@partial(jax.jit, static_argnums=(0, 1))
def _stage_squares(
    home: StageMesh, summed: Layout, state: TrainState
) -> tuple[Float[Array, "L T"], Float[Array, " T"]]:
    """`layer_squares` of a stage whose copies are sums, and its losses."""

    def on_device(state: TrainState) -> tuple[Array, Array]:
        accumulators = state.accumulators
        if home.weights.tp > 1:
            # What all tensor-parallel devices have counts on the first one.
            first = jax.lax.axis_index(TP) == 0
            accumulators = jax.tree.map(
                lambda spec, x: x if TP in spec else jnp.where(first, x, 0),
                home.leaf_specs(summed.tree.accumulators),
                accumulators,
            )
            return jax.lax.psum(layer_squares(summed, accumulators), TP), state.loss
        return layer_squares(summed, accumulators), state.loss

    return _per_device(on_device, home, summed, state, out_specs=P())


@partial(jax.jit, static_argnums=(0, 1, 2))
def _stage_finite(
    kind: str, home: StageMesh, summed: Layout, state: TrainState, rates, hyper, paired, norm
) -> Bool[Array, " T"]:
    """`finite_candidates` of a stage."""

    def on_device(state: TrainState, *numbers: Any) -> Bool[Array, " T"]:
        finite = finite_candidates(kind, summed, state, *numbers)
        if home.weights.tp == 1:
            return finite
        return jax.lax.pmin(finite.astype(jnp.int32), TP) > 0

    return _per_device(on_device, home, summed, state, rates, hyper, paired, norm, out_specs=P())


@partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _stage_apply(
    kind: str, home: StageMesh, summed: Layout, state: TrainState, due, applied, *numbers: Any
) -> TrainState:
    """`apply_updates` for a stage."""

    numbers = due, applied, *numbers
    return _new_state(partial(apply_updates, kind, summed), home, summed, state, *numbers)
