"""Products of chunks with random projections that many slots share.

A slot has one pair of projections for all layers. A pair is far too large to be gathered for every
chunk. Tasks usually have the same pair, so `in_turns` takes, in each group of chunks, one turn for
each different pair and not for each task.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.grouped_lora import LOW_RANK

from .turns import group_size, in_turns, stream_product, token_sums


def first_alike(
    fingerprint: Int[Array, "T R"],
    a0: Float[Array, "T k R"],
    b0: Float[Array, "T R n"],
    chunk_slot: Int[Array, " chunks"],
) -> Int[Array, " chunks"]:
    """For every chunk, the first slot that has the same projections as the chunk's owner; T if the
    owner has no projections.

    Two slots have the same projections if their fingerprints, first columns of A and first rows of
    B are equal. (At rank 1 the fingerprint has only 32 bits, but then the column and the row are
    the whole of A and B.)

    Args:
      fingerprint: hash of the projections, 32 bits for each rank.
      a0: projections of inputs, 0 in slots without projections.
      b0: projections to outputs.
      chunk_slot: owner slot of each chunk; -1 for an empty chunk.
    """
    slots = len(a0)

    def same(x: Float[Array, "T _"]):
        return (x[:, None] == x[None]).all(axis=-1)

    # NaN does not equal itself, so a slot is compared with itself by `eye`.
    alike = same(fingerprint) & same(a0[:, :, 0]) & same(b0[:, 0]) | jnp.eye(slots, dtype=bool)
    used = (b0[:, 0] != 0).any(axis=-1)
    first = jnp.where(used, jnp.argmax(alike, axis=1), slots)
    owner = jnp.where(chunk_slot < 0, slots, chunk_slot)
    return first.at[owner].get(mode="fill", fill_value=slots)


@jax.custom_vjp
def add_projected(
    y: Float[Array, "chunks l n"],
    x: Float[Array, "chunks l k"],
    ld: Float[Array, "chunks R"],
    lb: Float[Array, "chunks n"],
    a0: Float[Array, "T k R"],
    b0: Float[Array, "T R n"],
    group: Int[Array, " chunks"],
) -> Float[Array, "chunks l n"]:
    """`y + (((x A) · ld) B) · lb` with the projections of each chunk's owner; `y` for chunks
    without projections. The gradients of `ld` and `lb` are float32; the projections have no
    gradients.

    Args:
      y: output of the linear, in the compute dtype.
      x: input of the linear, in the compute dtype.
      ld: factors of the features between the projections, float32.
      lb: factors of the outputs, float32.
      a0: projections of inputs.
      b0: projections to outputs.
      group: the result of `first_alike`.
    """
    return _forward(y, x, ld, lb, a0, b0, group)[0]


def _forward(y, x, ld, lb, a0, b0, group):
    def turn(slot, inputs, values):
        x, ld, lb = inputs
        u = stream_product(x, a0[slot])
        v = stream_product((u * ld[:, None]).astype(x.dtype), b0[slot], x.dtype)
        return u.astype(x.dtype), (values[1] + v * lb[:, None]).astype(x.dtype)

    u = jnp.zeros((*x.shape[:2], a0.shape[2]), x.dtype)
    u, y = in_turns(group, len(a0), turn, (x, ld, lb), (u, y), group_size(x))
    # The backward pass needs no other product of the forward pass.
    return y, (x, checkpoint_name(u, LOW_RANK), ld, lb, a0, b0, group)


def _backward(residuals, dy):
    x, u, ld, lb, a0, b0, group = residuals

    def turn(slot, inputs, _):
        dy, u, ld, lb = inputs
        scaled = (u * ld[:, None]).astype(u.dtype)
        v = stream_product(scaled, b0[slot], u.dtype)
        dlb = token_sums(dy.astype(jnp.float32) * v.astype(jnp.float32))
        du = stream_product((dy * lb[:, None]).astype(u.dtype), b0[slot].T)
        dld = token_sums(du * u)
        dx = stream_product((du * ld[:, None]).astype(u.dtype), a0[slot].T, u.dtype)
        return dx, dld, dlb

    none = tuple(map(jnp.zeros_like, (x, ld, lb)))
    gradients = in_turns(group, len(a0), turn, (dy, u, ld, lb), none, group_size(x))
    return dy, *gradients, None, None, None


add_projected.defvjp(_forward, _backward)
