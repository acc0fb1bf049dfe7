"""The compiled programs: add the gradients of one microbatch, update the tasks whose global batch
is complete, evaluate held-out samples."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    chunk_losses,
    head_kernel,
    hidden_states,
)
from jaxmux.optimizers import optimizer_class
from jaxmux.pallas_kernels.slot_sum import add_to_slots
from jaxmux.peft import Layout, LeafSpec
from jaxmux.peft.leaves import trained, with_trained

from .train_state import TrainState, optax_parts, optax_state, replace_moments

# By optimizer kind and name, float32 [T_kind].
Hyperparameters = Mapping[str, Mapping[str, np.ndarray]]
# By optimizer kind, the numbers of the slots that use it, int32 [T_kind].
SlotsByOptimizer = Mapping[str, np.ndarray]


class UpdateStats(NamedTuple):
    """Results of an update, one value for each slot. Values of slots without a due update have no
    meaning.

    Attributes:
      loss: float32 [T], mean cross entropy of the task's global batch in nats per target token; NaN
        if a value in the task's forward pass was not finite.
      grad_norm: float32 [T], global L2 norm of the task's gradient before clipping.
      applied: bool [T], False if the loss, the norm or the updated parameters were not finite, so
        that the update was skipped.
    """

    loss: Float[Array, "T"]
    grad_norm: Float[Array, "T"]
    applied: Bool[Array, "T"]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def accumulate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    loss: Float[Array, "T"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Any, Float[Array, "T"]]:
    """Runs the forward and backward pass of one microbatch and adds its gradients and losses.

    Args:
      config: configuration of the backbone.
      options: static options of the forward pass.
      weights: the frozen weights.
      adapters: adapters of all slots, as in `TrainState`.
      accumulators: gradients accumulated so far, as in `TrainState`; donated.
      loss: float32 [T], losses accumulated so far; donated.
      microbatch: the samples.
      slots: scale and dropout of every slot.

    Returns:
      The accumulators and the losses with those of the microbatch added.
    """

    def forward(accumulators):
        return _losses(config, options, weights, adapters, accumulators, microbatch, slots)

    (losses, _), backward = jax.vjp(forward, accumulators)
    # The cotangent of every chunk is 1, so a NaN in one task's loss does not reach the others. The
    # accumulators are passed in as their own cotangents, and the next accumulators come out: see
    # `grouped_lora_linear`.
    (new_accumulators,) = backward((jnp.ones_like(losses), accumulators))
    return new_accumulators, add_to_slots(loss, losses, microbatch.chunk_slot)


def accumulate_arguments(
    backbone: Backbone,
    options: ForwardOptions,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Any, ...]:
    """The arguments of `accumulate`, in order."""
    return (
        backbone.config,
        options,
        backbone.weights,
        state.adapters,
        state.accumulators,
        state.loss,
        microbatch,
        slots,
    )


@partial(jax.jit, static_argnums=(0, 1))
def evaluate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Any,
    losses: Float[Array, "T"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> Float[Array, "T"]:
    """Runs the forward pass of one microbatch and adds its losses, without gradients.

    Args:
      config: configuration of the backbone.
      options: static options of the forward pass.
      weights: the frozen weights.
      adapters: adapters of all slots, as in `TrainState`.
      losses: float32 [T], losses accumulated so far.
      microbatch: the samples.
      slots: scale and dropout of every slot.

    Returns:
      The losses, float32 [T], with the losses of the microbatch added.
    """
    chunk, _ = _losses(config, options, weights, adapters, None, microbatch, slots)
    return add_to_slots(losses, chunk, microbatch.chunk_slot)


def update(
    state: TrainState,
    layout: Layout,
    due: Bool[np.ndarray, "T"],
    rates: Float[np.ndarray, "leaves L T"],
    hyper: Hyperparameters,
    members: SlotsByOptimizer,
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due and clears their accumulators. Other slots keep their bits.

    A due slot whose loss, gradient or new parameters are not finite keeps its parameters, moments
    and update count. Each optimizer kind has its own program, which updates all slots at once and
    in place. In one pool, a task's bits therefore do not depend on the number of the other tasks or
    on their optimizers. On a GPU the program's temporaries are far smaller than a slot.

    Args:
      state: the train state; it is donated.
      layout: the description of the state.
      due: bool [T], True for slots whose global batch is complete.
      rates: float32, the learning rate of every trained leaf, layer and slot. A leaf without a
        layer axis uses the rate of layer 0.
      hyper: by optimizer kind and name of the number, float32 [T_kind]: one value for each slot in
        `members` of this kind.
      members: by optimizer kind, int32 [T_kind]: the numbers of the slots that use this kind.

    Returns:
      The new state, and the results of the update by slot.
    """

    def spread(values: np.ndarray, slots: np.ndarray) -> np.ndarray:
        pool = np.zeros(len(due), values.dtype)
        pool[slots] = values
        return pool

    none = np.zeros(len(due), np.float32)
    stats = UpdateStats(none, none, none > 0)
    for kind, slots in members.items():
        if not due[slots].any():
            continue
        own_due = spread(due[slots], slots)
        own_hyper = {name: spread(values, slots) for name, values in hyper[kind].items()}
        state, stats = update_kind(kind, layout, state, stats, own_due, rates, own_hyper)
    return state, stats


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def update_kind(
    kind: str,
    layout: Layout,
    state: TrainState,
    stats: UpdateStats,
    due: Bool[Array, "T"],
    rates: Float[Array, "leaves L T"],
    hyper: Mapping[str, Float[Array, "T"]],
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due, all of one optimizer kind, and their entries in `stats`."""
    specs: TrainState = layout.tree
    optimizer = optax_state(kind, state.moments, state.count)
    optimizer_specs = optax_state(kind, specs.moments, specs.count)
    adapters = trained(specs.adapters, state.adapters)
    own_specs = jax.tree.map(LeafSpec.of_slot, specs.accumulators)
    axes, optimizer_axes = jax.tree.map(
        lambda spec: spec.slot_axis, (specs.accumulators, optimizer_specs)
    )
    update_slots = jax.vmap(
        partial(_update_slot, kind, own_specs),
        in_axes=(axes, axes, optimizer_axes, -1, 0, 0),
        out_axes=(axes, optimizer_axes),
    )
    squares = jax.tree.map(jnp.square, state.accumulators)
    norm = jnp.sqrt(_reduce_slots(jnp.sum, specs.accumulators, squares))

    def new(hyper):
        return update_slots(adapters, state.accumulators, optimizer, rates, hyper, norm)

    # The new state is computed twice, once to check that it is finite and once to write it: that
    # costs less memory traffic than storing it in between. The barrier keeps XLA from merging the
    # two computations.
    candidates, _ = new(jax.lax.optimization_barrier(hyper))
    finite = jax.tree.map(jnp.isfinite, candidates)
    applied = due & _reduce_slots(jnp.all, specs.accumulators, finite)
    applied &= jnp.isfinite(norm) & jnp.isfinite(state.loss)

    def keep_or_replace(spec: LeafSpec, new: Array, old: Array) -> Array:
        return _select(applied, new, old, spec.slot_axis)

    adapters, optimizer = jax.tree.map(
        keep_or_replace, (specs.accumulators, optimizer_specs), new(hyper), (adapters, optimizer)
    )
    cleared = state._replace(
        adapters=with_trained(specs.adapters, state.adapters, adapters),
        accumulators=jax.tree.map(
            lambda spec, x: _select(due, 0, x, spec.slot_axis),
            specs.accumulators,
            state.accumulators,
        ),
        loss=_select(due, 0, state.loss),
    )
    seen = UpdateStats(state.loss, norm, applied)
    stats = jax.tree.map(partial(_select, due), seen, stats)
    return replace_moments(cleared, *optax_parts(kind, optimizer)), stats


def _losses(
    config, options, weights, adapters, accumulators, microbatch, slots
) -> tuple[Float[Array, "chunks"], Any]:
    """The loss of every chunk, NaN where its forward pass is not finite, and the accumulators.

    The forward pass applies LoRA, the only adapter kind so far.
    """
    lora = None if accumulators is None else accumulators["lora"]
    hidden, lora, finite = hidden_states(
        config, weights, adapters["lora"], lora, microbatch, slots, options
    )
    losses = chunk_losses(
        hidden,
        head_kernel(weights),
        microbatch.targets.reshape(-1),
        microbatch.loss_weight.reshape(-1),
        microbatch.chunk_slot,
    )
    if accumulators is not None:
        accumulators = accumulators | {"lora": lora}
    return jnp.where(finite, losses, jnp.nan), accumulators


def _update_slot(
    kind: str, specs: Any, params: Any, gradients: Any, optimizer: Any, rates, hyper, norm
) -> tuple[Any, Any]:
    """The new parameters and optimizer state of one slot.

    Args:
      specs: tree of `LeafSpec` of the slot's trained leaves.
      rates: float32 [leaves, L].
      norm: global norm of the gradient.
    """
    clip = jnp.minimum(1.0, hyper["clip_norm"] / (norm + 1e-6))
    gradients = jax.tree.map(lambda g: clip * g, gradients)
    transform = optimizer_class(kind).transform(hyper)
    direction, optimizer = transform.update(gradients, optimizer, params)

    def descend(spec: LeafSpec, param: Array, direction: Array, rate: Float[Array, "L"]) -> Array:
        if "layer" not in spec.axes:
            return param - rate[0] * direction
        shape = [1] * param.ndim
        shape[spec.axes.index("layer")] = -1
        return param - rate.reshape(shape) * direction

    rate_tree = jax.tree.unflatten(jax.tree.structure(params), list(rates))
    return jax.tree.map(descend, specs, params, direction, rate_tree), optimizer


def _select(chosen: Bool[Array, "T"], new, old: Array, slot_axis: int = 0) -> Array:
    """`new` in the chosen slots, `old` in the others."""
    shape = [1] * old.ndim
    shape[slot_axis] = -1
    return jnp.where(chosen.reshape(shape), new, old)


def _reduce_slots(reduce, specs: Any, tree: Any) -> Array:
    """Reduces all leaves to one value [T] of every slot."""

    def rows(spec: LeafSpec, x: Array) -> Array:
        # A GPU reduces many rows of moderate length at memory bandwidth, but not one long row.
        kept = spec.slot_axis + 1
        columns = math.gcd(math.prod(x.shape[kept:]), 4096)
        partial_sums = reduce(x.reshape(*x.shape[:kept], -1, columns), axis=-1)
        return jnp.moveaxis(partial_sums, spec.slot_axis, 0).reshape(x.shape[spec.slot_axis], -1)

    leaves = jax.tree.leaves(jax.tree.map(rows, specs, tree))
    return reduce(jnp.concatenate(leaves, axis=-1), axis=-1)
