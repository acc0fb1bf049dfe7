"""Products of chunks with sparse matrices, each of which belongs to the slot of some chunks."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .turns import in_turns, select_chunks, stream_product


def first_of_owner(
    chunk_slot: Int[Array, " chunks"], used: Bool[Array, " chunks"]
) -> Int[Array, " chunks"]:
    """For every chunk, the first chunk with the same owner; the number of chunks for those that
    have no sparse matrix.

    Args:
      chunk_slot: owner slot of each chunk.
      used: whether the chunk's owner has a sparse matrix.
    """
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
    """The product of every chunk with its owner's matrix, 0 for chunks without one.

    The matrix is made dense in the compute dtype, one owner after another, so the device holds one
    of them at a time. The gradient of the values is float32 and takes no dense matrix.

    Args:
      width: n, number of columns of the matrices.
      x: activations, in the compute dtype.
      values: the entries of the matrices [k, n], float32.
      places: their places, row · n + column; each occurs once. Entries at k · n are left out.
      first: the result of `first_of_owner`.
    """

    def turn(chunk, y):
        dense = _dense(width, x, values, places, chunk)
        return select_chunks(first == chunk, stream_product(x, dense).astype(x.dtype), y)

    return in_turns(first, len(first), turn, jnp.zeros((*x.shape[:2], width), x.dtype))


def _forward(width, x, values, places, first):
    return sparse_product(width, x, values, places, first), (x, values, places, first)


def _backward(width, residuals, dy):
    x, values, places, first = residuals

    def turn(chunk, dx):
        dense = _dense(width, x, values, places, chunk)
        return select_chunks(first == chunk, stream_product(dy, dense.T).astype(x.dtype), dx)

    def gradients(of_chunk):
        x, dy, places = of_chunk
        # Features lie side by side, so that every entry reads two rows.
        rows = [
            jnp.take(stream.T, at, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
            for stream, at in ((x, places // width), (dy, places % width))
        ]
        inside = places < x.shape[1] * width
        return jnp.where(inside, (rows[0] * rows[1]).sum(axis=1), 0)

    dx = in_turns(first, len(first), turn, jnp.zeros_like(x))
    # One chunk after another, because a program may store what is read for all entries.
    return dx, jax.lax.map(gradients, (x, dy, places)), None, None


sparse_product.defvjp(_forward, _backward)


def _dense(width, x, values, places, chunk) -> Float[Array, "k n"]:
    """The matrix of a chunk's owner."""
    zeros = jnp.zeros(x.shape[-1] * width, x.dtype)
    dense = zeros.at[places[chunk]].set(values[chunk].astype(x.dtype), mode="drop")
    return dense.reshape(-1, width)
