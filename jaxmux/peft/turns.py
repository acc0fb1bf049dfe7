"""Loops over the owners of chunks, for products whose operands are too large to be gathered for
every chunk.

A loop goes over groups of neighbouring chunks and, in each group, over the slots that own a chunk
of the group. Every turn of the loop computes one owner's contribution to all chunks of the group,
and selects the chunks that belong to this owner. A group whose chunks need no turn costs nothing.
The number of turns is not known when a program is compiled. Every turn has the same shape, so a
chunk gets the same bits whatever owners its neighbours have.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int

# A group has at most this many tokens, unless a chunk has more. This is enough for a product to use
# a whole GPU.
_GROUP_TOKENS = 2048


def in_turns[T](
    owners: Int[Array, " chunks"],
    none: int,
    turn: Callable[[Int[Array, ""], Any, T], T],
    inputs: Any,
    values: T,
    group: int,
) -> T:
    """Sets the values of each chunk to the result of `turn(owner, inputs, values)`. In every group
    of `group` chunks, `turn` is called once for each different owner, in ascending order.

    Args:
      owners: a number for each chunk.
      none: the owner of chunks that need no turn; all other owners are smaller.
      turn: takes an owner and a group's parts of `inputs` and `values`; returns the group's next
        values.
      inputs: tree of arrays [chunks, ...].
      values: tree of arrays [chunks, ...], the first values.
      group: number of chunks in a group, a divisor of the number of all chunks.
    """
    chunks = len(owners)
    end = chunks // group * none
    # Each turn has one number, from which the group and the owner are computed.
    turns = jnp.where(owners < none, jnp.arange(chunks) // group * none + owners, end)

    def step(carry):
        number, values = carry
        first, owner = number // none * group, number % none

        def of_group(x: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(x, first, group)

        group_inputs, before = jax.tree.map(of_group, (inputs, values))
        chosen = of_group(owners) == owner

        def replaced(all_values: Array, new: Array, old: Array) -> Array:
            selected = select_chunks(chosen, new, old)
            return jax.lax.dynamic_update_slice_in_dim(all_values, selected, first, 0)

        values = jax.tree.map(replaced, values, turn(owner, group_inputs, before), before)
        return jnp.where(turns > number, turns, end).min(), values

    return jax.lax.while_loop(lambda carry: carry[0] < end, step, (turns.min(), values))[1]


def group_size(x: Float[Array, "chunks l k"]) -> int:
    chunks, length, _ = x.shape
    most = max(1, _GROUP_TOKENS // length)
    return max(size for size in range(1, min(chunks, most) + 1) if chunks % size == 0)


def stream_product(
    x: Float[Array, "chunks l k"], w: Float[Array, "k n"], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "chunks l n"]:
    """The product of all chunks with one matrix, which is rounded to the dtype of `x`. Sums are
    float32; the result has `dtype`."""
    flat = x.reshape(-1, x.shape[-1])
    y = jnp.dot(flat, w.astype(x.dtype), preferred_element_type=dtype)
    return y.reshape(*x.shape[:2], -1)


def select_chunks(
    chosen: Bool[Array, " chunks"],
    new: Float[Array, " chunks *value"],
    old: Float[Array, " chunks *value"],
) -> Float[Array, " chunks *value"]:
    return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def token_sums(x: Float[Array, "chunks l n"]) -> Float[Array, "chunks n"]:
    # Otherwise XLA moves the tokens to the last axis before it adds them up, which would transpose
    # the whole stream in every turn of a loop.
    return with_layout_constraint(x, Layout((0, 1, 2))).sum(axis=1)
