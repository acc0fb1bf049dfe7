"""The train state: stacked adapters, gradient accumulators and optimizer states of all slots."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmux.models import BackboneConfig
from jaxmux.optimizers import transform
from jaxmux.peft import Adapter, empty_pool

# Slots of each optimizer kind, in the order of the kind's stacked states.
KindSlots = Mapping[str, np.ndarray]


class TrainState(NamedTuple):
    """Everything that training changes, on the device.

    Attributes:
      adapters: float32 masters by module, a [L, T, k, R] and b [L, T, R, n].
      grads: accumulators of the current global batches, of the same shapes.
      loss: float32 [T], accumulated over the current global batch.
      optimizers: by kind, the optax states of the slots that use it, stacked on axis 0.
    """

    adapters: Adapter
    grads: Adapter
    loss: Float[Array, "T"]
    optimizers: dict[str, Any]


def empty_state(
    config: BackboneConfig, modules: Sequence[str], kinds: KindSlots, slots: int, rank: int
) -> TrainState:
    """A state in which every slot is empty."""
    pool = empty_pool(config, modules, slots, rank)
    one_slot = jax.tree.map(lambda x: x[:, 0], pool)
    optimizers = {}
    for kind, members in kinds.items():
        fresh = fresh_optimizer(kind, one_slot)
        optimizers[kind] = jax.tree.map(partial(_stack, len(members)), fresh)
    return TrainState(pool, jax.tree.map(jnp.zeros_like, pool), jnp.zeros(slots), optimizers)


def _stack(count: int, leaf: Array) -> Array:
    return jnp.repeat(jnp.asarray(leaf)[None], count, axis=0)


def fresh_optimizer(kind: str, adapter: Adapter) -> Any:
    """The optimizer state of a slot that has not been updated yet."""
    hyper = dict.fromkeys(("b1", "b2", "eps", "weight_decay", "momentum"), 0.0)
    return transform(kind, hyper).init(adapter)


class SlotState(NamedTuple):
    """The part of a `TrainState` that belongs to one slot; leaves without the slot axis."""

    adapter: Adapter
    grads: Adapter
    loss: Float[Array, ""]
    optimizer: Any


def read_slot(state: TrainState, kind: str, slot: int, member: int) -> SlotState:
    """One slot's state; `member` is the slot's place among those of its optimizer kind."""
    return _read_slot(state.adapters, state.grads, state.loss, state.optimizers[kind], slot, member)


@jax.jit
def _read_slot(adapters, grads, loss, optimizer, slot, member) -> SlotState:
    of_slot = partial(jax.tree.map, lambda x: x[:, slot])
    return SlotState(
        of_slot(adapters), of_slot(grads), loss[slot], jax.tree.map(lambda x: x[member], optimizer)
    )


def write_slot(
    state: TrainState, kind: str, slot: int, member: int, value: SlotState
) -> TrainState:
    """The state with one slot replaced; every other slot keeps its bits."""
    written = _write_slot(
        state.adapters, state.grads, state.loss, state.optimizers[kind], slot, member, value
    )
    adapters, grads, loss, optimizer = written
    return TrainState(adapters, grads, loss, state.optimizers | {kind: optimizer})


@partial(jax.jit, donate_argnums=(0, 1, 2, 3))
def _write_slot(adapters, grads, loss, optimizer, slot, member, value: SlotState):
    def put(stacked, one):
        return jax.tree.map(lambda x, y: x.at[:, slot].set(y), stacked, one)

    optimizer = jax.tree.map(lambda x, y: x.at[member].set(y), optimizer, value.optimizer)
    return (
        put(adapters, value.adapter),
        put(grads, value.grads),
        loss.at[slot].set(value.loss),
        optimizer,
    )
