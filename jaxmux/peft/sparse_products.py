"""Products of chunks with sparse matrices, one matrix for the owner slot of each chunk."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .turns import group_size, in_turns, stream_product


def first_of_owner(
    chunk_slot: Int[Array, " chunks"], used: Bool[Array, " chunks"]
) -> Int[Array, " chunks"]:
    """For every chunk, the first chunk with the same owner; the number of chunks where `used` says
    that the owner has no sparse matrix."""
    first = jnp.argmax(chunk_slot[:, None] == chunk_slot[None], axis=1)
    return jnp.where(used, first, len(chunk_slot))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sparse_product(
    width: int,
    x: Float[Array, "chunks l k"],
    values: Float[Array, "chunks entries"],
    places: Int[Array, "chunks entries"],
    first: Int[Array, " chunks"],
) -> Float[Array, "chunks l n"]:
    """The product of every chunk with its owner's matrix [k, n]; 0 for chunks without a matrix.

    The matrices are made dense in the compute dtype, for one owner after another, so the device
    holds one dense matrix at a time. In the backward pass, the dense gradient is computed for one
    chunk after another, and the gradients of the entries are read from it.

    Args:
      width: n, number of columns of the matrices.
      x: activations, in the compute dtype.
      values: entries of the matrices, float32.
      places: index of each entry, row · n + column; each index occurs once. Entries with the index
        k · n are left out.
      first: the result of `first_of_owner`.
    """

    def turn(chunk, x, _):
        return stream_product(x, _dense(width, x, values, places, chunk), x.dtype)

    none = jnp.zeros((*x.shape[:2], width), x.dtype)
    return in_turns(first, len(first), turn, x, none, group_size(x))


def _forward(width, x, values, places, first):
    return sparse_product(width, x, values, places, first), (x, values, places, first)


def _backward(width, residuals, dy):
    x, values, places, first = residuals

    def turn(chunk, dy, _):
        return stream_product(dy, _dense(width, x, values, places, chunk).T, x.dtype)

    def gradients(_, inputs, __):
        x, dy, places = (x[0] for x in inputs)
        dense = jnp.dot(x.T, dy, preferred_element_type=jnp.float32)
        return dense.reshape(-1).at[places].get(mode="fill", fill_value=0)[None]

    dx = in_turns(first, len(first), turn, dy, jnp.zeros_like(x), group_size(x))
    inputs, none = (x, dy, places), jnp.zeros(values.shape, jnp.float32)
    alone = (first == len(first)).astype(jnp.int32)
    return dx, in_turns(alone, 1, gradients, inputs, none, 1), None, None


sparse_product.defvjp(_forward, _backward)


def _dense(width, x, values, places, chunk) -> Float[Array, "k n"]:
    zeros = jnp.zeros(x.shape[-1] * width, x.dtype)
    dense = zeros.at[places[chunk]].set(values[chunk].astype(x.dtype), mode="drop")
    return dense.reshape(-1, width)
