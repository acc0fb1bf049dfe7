"""The train state: stacked adapters, gradient accumulators and optimizer states of all slots."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmux.models import BackboneConfig
from jaxmux.optimizers import transform
from jaxmux.peft import Adapter, empty_pool

# Slots of each optimizer kind.
KindSlots = Mapping[str, np.ndarray]


class TrainState(NamedTuple):
    """Everything that training changes, on the device.

    Attributes:
      adapters: float32 masters by module, a [L, T, k, R] and b [L, T, R, n].
      grads: accumulators of the current global batches, of the same shapes.
      loss: float32 [T], accumulated over the current global batch.
      moments: pools of the same shapes, as many as the optimizer kind with most moments has. A slot
        uses as many as its own kind has, from the first.
      count: int32 [T], updates so far, for optimizer kinds that count.
    """

    adapters: Adapter
    grads: Adapter
    loss: Float[Array, "T"]
    moments: tuple[Adapter, ...]
    count: Int[Array, "T"]


def empty_state(
    config: BackboneConfig, modules: Sequence[str], kinds: KindSlots, slots: int, rank: int
) -> TrainState:
    """A state in which every slot is empty."""
    pool = empty_pool(config, modules, slots, rank)
    zeros = partial(jax.tree.map, jnp.zeros_like)
    moments = max(len(_moments(fresh_optimizer(kind, {}))) for kind in kinds)
    return TrainState(
        pool,
        zeros(pool),
        jnp.zeros(slots),
        tuple(zeros(pool) for _ in range(moments)),
        jnp.zeros(slots, jnp.int32),
    )


def fresh_optimizer(kind: str, adapter: Adapter) -> Any:
    """The optimizer state of a slot that has not been updated yet."""
    hyper = dict.fromkeys(("b1", "b2", "eps", "weight_decay", "momentum"), 0.0)
    return transform(kind, hyper).init(adapter)


def optax_state(kind: str, moments: Sequence[Adapter], count: Int[Array, "..."]) -> Any:
    """The optax state of an optimizer kind, of the first of these moments and the count, as far as
    the kind has them."""
    leaves, structure = jax.tree.flatten(fresh_optimizer(kind, {}), is_leaf=_is_adapter)
    unused = iter(moments)
    return structure.unflatten([next(unused) if _is_adapter(x) else count for x in leaves])


def replace_optax_state(state: TrainState, optimizer: Any) -> TrainState:
    """The state with what `optax_state` took from it replaced."""
    moments, count = _moments(optimizer), _count(optimizer)
    return state._replace(
        moments=(*moments, *state.moments[len(moments) :]),
        count=state.count if count is None else count,
    )


def _moments(optimizer: Any) -> list[Adapter]:
    return [x for x in jax.tree.leaves(optimizer, is_leaf=_is_adapter) if _is_adapter(x)]


def _count(optimizer: Any) -> Int[Array, "..."] | None:
    counts = [x for x in jax.tree.leaves(optimizer, is_leaf=_is_adapter) if not _is_adapter(x)]
    return counts[0] if counts else None


def _is_adapter(node: Any) -> bool:
    return isinstance(node, dict)


class SlotState(NamedTuple):
    """The part of a `TrainState` that belongs to one slot; leaves without the slot axis."""

    adapter: Adapter
    grads: Adapter
    loss: Float[Array, ""]
    optimizer: Any


@partial(jax.jit, static_argnums=1)
def read_slot(state: TrainState, kind: str, slot: Int[Array, ""] | int) -> SlotState:
    """The state of a slot that uses an optimizer of this kind."""
    adapter, grads, moments = jax.tree.map(
        lambda x: x[:, slot], (state.adapters, state.grads, state.moments)
    )
    optimizer = optax_state(kind, moments, state.count[slot])
    return SlotState(adapter, grads, state.loss[slot], optimizer)


@partial(jax.jit, static_argnums=1, donate_argnums=0)
def write_slot(
    state: TrainState, kind: str, slot: Int[Array, ""] | int, value: SlotState
) -> TrainState:
    """The state with one slot replaced; every other slot keeps its bits."""

    def put(pool: Array, one: Array) -> Array:
        return pool.at[slot].set(one) if one.ndim == 0 else pool.at[:, slot].set(one)

    stacked = SlotState(
        state.adapters, state.grads, state.loss, optax_state(kind, state.moments, state.count)
    )
    adapters, grads, loss, optimizer = jax.tree.map(put, stacked, value)
    state = state._replace(adapters=adapters, grads=grads, loss=loss)
    return replace_optax_state(state, optimizer)
