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

from .state import KindSlots, SlotState, TrainState, read_slot, write_slot

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


@partial(jax.jit, donate_argnums=(0,))
def update(
    state: TrainState, due: Bool[Array, "T"], hyper: Hyperparameters, kinds: KindSlots
) -> tuple[TrainState, UpdateStats]:
    """Updates the slots that are due and clears their accumulators; others keep their bits.

    A due slot whose loss, gradient or new parameters are not finite keeps its parameters, moments
    and update count. Slots are updated one after the other, by a program that knows of one slot
    only: a task's bits do not depend on how many others there are, and temporaries are one slot's.

    Args:
      due: slots whose global batch is complete.
      hyper: by optimizer kind and name, float32 [T_kind].
      kinds: by optimizer kind, int32 [T_kind]: the slots that use it.
    """
    slots = len(due)
    stats = UpdateStats(state.loss, jnp.zeros(slots), jnp.zeros(slots, bool))
    for kind, members in kinds.items():
        body = partial(_update_member, kind, due, hyper[kind], jnp.asarray(members))
        state, stats = jax.lax.fori_loop(0, len(members), body, (state, stats))
    return state, stats


def _update_member(kind: str, due, hyper, members, i, carry: tuple[TrainState, UpdateStats]):
    """Updates the i-th slot of an optimizer kind, if it is due."""
    state, stats = carry
    slot = members[i]
    own = read_slot(state, kind, slot, i)
    own_hyper = {name: values[i] for name, values in hyper.items()}

    norm = jnp.sqrt(
        sum(jnp.square(_rows(g)).sum(axis=-1).sum() for g in jax.tree.leaves(own.grads))
    )
    new = _update_slot(kind, own.adapter, own.grads, own.optimizer, own_hyper, norm)
    finite = jnp.isfinite(norm) & jnp.isfinite(own.loss) & _all_finite(new[0])
    applied = due[slot] & finite
    old = own.adapter, own.optimizer
    adapter, optimizer = jax.tree.map(partial(jnp.where, applied), new, old)
    grads, loss = jax.tree.map(lambda g: jnp.where(due[slot], 0, g), (own.grads, own.loss))
    state = write_slot(state, kind, slot, i, SlotState(adapter, grads, loss, optimizer))
    stats = stats._replace(
        grad_norm=stats.grad_norm.at[slot].set(norm), applied=stats.applied.at[slot].set(applied)
    )
    return state, stats


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


def _all_finite(tree: Adapter) -> Bool[Array, ""]:
    return jnp.stack(
        [jnp.isfinite(_rows(x)).all(axis=-1).all() for x in jax.tree.leaves(tree)]
    ).all()


def _rows(x: Float[Array, "L k n"]) -> Float[Array, "L rows columns"]:
    # GPUs reduce many rows of moderate length at memory speed, a whole array to one number not.
    return x.reshape(x.shape[0], -1, math.gcd(math.prod(x.shape[1:]), 4096))
