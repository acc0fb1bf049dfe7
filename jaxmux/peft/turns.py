"""Loops that compute the whole stream once for each of several owners.

What large arrays of a slot add to its chunks is computed for all chunks at once, owner by owner,
and selected. Their number is not known when a program is compiled. Every turn has the same shape,
so a chunk gets the same bits whatever owners its neighbours have.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def in_turns[T](
    owners: Int[Array, " chunks"], none: int, turn: Callable[[Int[Array, ""], T], T], value: T
) -> T:
    """Applies `turn(owner, value)` for every different owner, in ascending order.

    Args:
      owners: a number for each chunk.
      none: the number of chunks that need no turn; all others are smaller.
      turn: function that returns the next value.
      value: the first value.
    """

    def step(carry):
        owner, value = carry
        following = jnp.where(owners > owner, owners, none).min()
        return following, turn(owner, value)

    return jax.lax.while_loop(lambda carry: carry[0] < none, step, (owners.min(), value))[1]


def stream_product(
    x: Float[Array, "chunks l k"], w: Float[Array, "k n"]
) -> Float[Array, "chunks l n"]:
    """The product of all chunks with one matrix, in float32.

    Args:
      x: activations, in the compute dtype.
      w: the matrix, which is rounded to that dtype.
    """
    flat = x.reshape(-1, x.shape[-1])
    y = jnp.dot(flat, w.astype(x.dtype), preferred_element_type=jnp.float32)
    return y.reshape(*x.shape[:2], -1)


def select_chunks(
    chosen: Bool[Array, " chunks"],
    new: Float[Array, " chunks *value"],
    old: Float[Array, " chunks *value"],
) -> Float[Array, " chunks *value"]:
    """`new` for the chosen chunks, `old` for the others."""
    return jnp.where(chosen.reshape(-1, *[1] * (new.ndim - 1)), new, old)
