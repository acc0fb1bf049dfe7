"""The compiled steps: accumulate one microbatch's gradients, update the tasks whose global batch is
complete."""

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
    LoraFactors,
    SlotTable,
    Weights,
    chunk_losses,
    head_kernel,
    hidden_states,
)
from jaxmux.optimizers import transform
from jaxmux.pallas_kernels.slot_sum import add_to_slots
from jaxmux.peft import Adapter, Factors

from .state import KindSlots, TrainState

Hyperparameters = Mapping[str, Mapping[str, np.ndarray]]


class UpdateStats(NamedTuple):
    """What an update saw, per slot; meaningless for slots that were not due.

    Attributes:
      loss: mean cross entropy of the global batch; NaN where anything in the task's forward pass
        was not finite.
      grad_norm: global norm of the gradient before clipping.
      applied: False where the loss or the norm was not finite.
    """

    loss: Float[Array, "T"]
    grad_norm: Float[Array, "T"]
    applied: Bool[Array, "T"]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3,))
def accumulate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
) -> TrainState:
    """Forward and backward of one microbatch; adds its losses and gradients to the accumulators of
    its tasks."""

    def loss(grads: Adapter):
        losses = _losses(config, options, weights, state.adapters, grads, microbatch, slots)
        # Every chunk's cotangent is one, whatever the others' losses: a NaN among them changes
        # nothing.
        return losses.sum(), losses

    # The derivative by an accumulator is the next accumulator: see `grouped_lora_linear`.
    grads, losses = jax.grad(loss, has_aux=True)(state.grads)
    total = add_to_slots(state.loss, losses, microbatch.chunk_slot)
    return state._replace(grads=grads, loss=total)


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
    grads = jax.tree.map(jnp.zeros_like, adapters)
    chunk = _losses(config, options, weights, adapters, grads, microbatch, slots)
    return add_to_slots(losses, chunk, microbatch.chunk_slot)


@partial(jax.jit, donate_argnums=(0,))
def update(
    state: TrainState, due: Bool[Array, "T"], hyper: Hyperparameters, kinds: KindSlots
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due and clears their accumulators; every other slot keeps its
    bits.

    A due slot whose loss or gradient is not finite keeps its parameters, moments and update count.

    Args:
      due: slots whose global batch is complete.
      hyper: by optimizer kind and name, float32 [T_kind].
      kinds: by optimizer kind, int32 [T_kind]: the slots that use it.
    """
    grad_norm = jnp.sqrt(sum(_per_slot_sum(jnp.square(g)) for g in jax.tree.leaves(state.grads)))
    applied = due & jnp.isfinite(grad_norm) & jnp.isfinite(state.loss)
    adapters, optimizers = state.adapters, dict(state.optimizers)
    for kind, members in kinds.items():
        params, grads = _members(adapters, members), _members(state.grads, members)
        update_slot = jax.vmap(
            partial(_update_slot, kind), in_axes=(1, 1, 0, 0, 0), out_axes=(1, 0)
        )
        new = update_slot(params, grads, optimizers[kind], hyper[kind], grad_norm[members])
        chosen = applied[members]
        params = jax.tree.map(partial(_select, chosen, 1), new[0], params)
        adapters = jax.tree.map(partial(_put_members, members), adapters, params)
        optimizers[kind] = jax.tree.map(partial(_select, chosen, 0), new[1], optimizers[kind])
    cleared = jax.tree.map(lambda g: _select(due, 1, jnp.zeros_like(g), g), state.grads)
    stats = UpdateStats(state.loss, grad_norm, applied)
    return TrainState(adapters, cleared, jnp.where(due, 0, state.loss), optimizers), stats


def _losses(config, options, weights, adapters, grads, microbatch, slots) -> Float[Array, "C"]:
    dtype = weights["embed_tokens"]["weight"].dtype
    lora = {
        module: LoraFactors(f.a.astype(dtype), f.b.astype(dtype), *grads[module])
        for module, f in adapters.items()
    }
    hidden, finite = hidden_states(config, weights, lora, microbatch, slots, options)
    losses = chunk_losses(
        hidden,
        head_kernel(weights),
        microbatch.targets.reshape(-1),
        microbatch.loss_weight.reshape(-1),
        microbatch.chunk_slot,
    )
    return jnp.where(finite, losses, jnp.nan)


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


def _members(pool: Adapter, members: np.ndarray) -> Adapter:
    return jax.tree.map(lambda x: x[:, members], pool)


def _put_members(members: np.ndarray, stacked: Array, values: Array) -> Array:
    return stacked.at[:, members].set(values)


def _per_slot_sum(x: Float[Array, "L T ..."]) -> Float[Array, "T"]:
    return x.sum(axis=tuple(axis for axis in range(x.ndim) if axis != 1))


def _select(chosen: Bool[Array, "T"], axis: int, new: Array, old: Array) -> Array:
    shape = [1] * new.ndim
    shape[axis] = len(chosen)
    return jnp.where(chosen.reshape(shape), new, old)
