"""The compiled steps: accumulate one microbatch's gradients, update the tasks whose global batch is
complete.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    chunk_losses,
    head_kernel,
    hidden_states,
)
from jaxmux.optimizers import transform
from jaxmux.pallas_kernels.slot_sum import add_to_slots
from jaxmux.peft import Adapter, Factors

from .train_state import KindSlots, TrainState, optax_state, replace_optax_state

Hyperparameters = Mapping[str, Mapping[str, np.ndarray]]


class UpdateStats(NamedTuple):
    """What an update saw, per slot; meaningless for slots that were not due.

    Attributes:
      loss: mean cross entropy of the global batch; NaN where anything in the task's forward pass
        was not finite.
      grad_norm: global norm of the gradient before clipping.
      applied: False where the loss, the norm or the updated parameters were not finite.
    """

    loss: Float[Array, "T"]
    grad_norm: Float[Array, "T"]
    applied: Bool[Array, "T"]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def accumulate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Adapter,
    grads: Adapter,
    total: Float[Array, "T"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Adapter, Float[Array, "T"]]:
    """Forward and backward of one microbatch; adds its gradients and losses to those of its tasks.

    Returns:
      The accumulators `grads` and `total` with the microbatch added.
    """

    def forward(grads: Adapter):
        return _losses(config, options, weights, adapters, grads, microbatch, slots)

    (losses, _), backward = jax.vjp(forward, grads)
    # Every chunk's cotangent is one, whatever the others' losses: a NaN changes nothing there. The
    # accumulators start as their own cotangents and come out as the next: see
    # `grouped_lora_linear`.
    (new_grads,) = backward((jnp.ones_like(losses), grads))
    return new_grads, add_to_slots(total, losses, microbatch.chunk_slot)


@partial(jax.jit, static_argnums=(0, 1))
def evaluate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Adapter,
    losses: Float[Array, "T"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> Float[Array, "T"]:
    """Adds a microbatch's losses to those of its tasks; no gradients."""
    chunk, _ = _losses(config, options, weights, adapters, None, microbatch, slots)
    return add_to_slots(losses, chunk, microbatch.chunk_slot)


def update(
    state: TrainState, due: Bool[np.ndarray, "T"], hyper: Hyperparameters, kinds: KindSlots
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due and clears their accumulators; others keep their bits.

    A due slot whose loss, gradient or new parameters are not finite keeps its parameters, moments
    and update count. Each optimizer kind has a program of its own that updates all its slots at
    once and in place: in one pool, a task's bits do not depend on how many others there are or on
    their optimizers. On GPU temporaries are far smaller than a slot.

    Args:
      state: donated.
      due: slots whose global batch is complete.
      hyper: by optimizer kind and name, float32 [T_kind].
      kinds: by optimizer kind, int32 [T_kind]: the slots that use it.
    """

    def spread(values: np.ndarray, members: np.ndarray) -> np.ndarray:
        pool = np.zeros(len(due), values.dtype)
        pool[members] = values
        return pool

    none = np.zeros(len(due), np.float32)
    stats = UpdateStats(none, none, none > 0)
    for kind, members in kinds.items():
        if not due[members].any():
            continue
        own_due = spread(due[members], members)
        own_hyper = {name: spread(values, members) for name, values in hyper[kind].items()}
        state, stats = _update_kind(kind, state, stats, own_due, own_hyper)
    return state, stats


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update_kind(
    kind: str,
    state: TrainState,
    stats: UpdateStats,
    due: Bool[Array, "T"],
    hyper: Mapping[str, Float[Array, "T"]],
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due, all of one optimizer kind, and enters them in `stats`."""
    optimizer = optax_state(kind, state.moments, state.count)
    axes = jax.tree.map(lambda x: 0 if x.ndim == 1 else 1, optimizer)
    update_slots = jax.vmap(
        partial(_update_slot, kind), in_axes=(1, 1, axes, 0, 0), out_axes=(1, axes)
    )
    norm = jnp.sqrt(_reduce_slots(jnp.sum, jax.tree.map(jnp.square, state.grads)))

    def new(hyper):
        return update_slots(state.adapters, state.grads, optimizer, hyper, norm)

    # Computed once to look at and once to be written, which costs less memory traffic than to store
    # it in between. The barrier hides from XLA that both are the same.
    candidates, _ = new(jax.lax.optimization_barrier(hyper))
    finite = _reduce_slots(jnp.all, jax.tree.map(jnp.isfinite, candidates))
    applied = due & finite & jnp.isfinite(norm) & jnp.isfinite(state.loss)
    old = state.adapters, optimizer
    adapters, optimizer = jax.tree.map(partial(_select, applied), new(hyper), old)

    cleared = state._replace(
        adapters=adapters,
        grads=jax.tree.map(partial(_select, due, 0), state.grads),
        loss=_select(due, 0, state.loss),
    )
    seen = UpdateStats(state.loss, norm, applied)
    stats = jax.tree.map(partial(_select, due), seen, stats)
    return replace_optax_state(cleared, optimizer), stats


def _losses(
    config, options, weights, adapters, grads, microbatch, slots
) -> tuple[Float[Array, "C"], Adapter | None]:
    hidden, grads, finite = hidden_states(
        config, weights, adapters, grads, microbatch, slots, options
    )
    losses = chunk_losses(
        hidden,
        head_kernel(weights),
        microbatch.targets.reshape(-1),
        microbatch.loss_weight.reshape(-1),
        microbatch.chunk_slot,
    )
    return jnp.where(finite, losses, jnp.nan), grads


def _update_slot(kind: str, params: Adapter, grads: Adapter, optimizer, hyper, norm):
    clip = jnp.minimum(1.0, hyper["clip_norm"] / (norm + 1e-6))
    grads = jax.tree.map(lambda g: clip * g, grads)
    direction, optimizer = transform(kind, hyper).update(grads, optimizer, params)
    lr_a, lr_b = hyper["learning_rate"], hyper["learning_rate"] * hyper["loraplus_ratio"]
    params = {
        module: Factors(p.a - lr_a * direction[module].a, p.b - lr_b * direction[module].b)
        for module, p in params.items()
    }
    return params, optimizer


def _select(chosen: Bool[Array, "T"], new, old: Array) -> Array:
    """`new` in the chosen slots, `old` in the others; leaves [T] or [L, T, k, n]."""
    return jnp.where(chosen if old.ndim == 1 else chosen[:, None, None], new, old)


def _reduce_slots(reduce, tree: Adapter) -> Array:
    """Reduces leaves [L, T, k, n] to one value [T] of every slot."""

    def rows(x: Array) -> Array:
        # GPUs reduce many rows of moderate length at memory speed, a whole array to one number not.
        columns = math.gcd(math.prod(x.shape[2:]), 4096)
        return reduce(x.reshape(*x.shape[:2], -1, columns), axis=-1)

    leaves = [rows(x) for x in jax.tree.leaves(tree)]
    return reduce(jnp.concatenate(leaves, axis=-1), axis=(0, 2))
