"""Products of chunks with random projections that many slots have in common.

The projections of a slot are one pair for all layers, far too large to be gathered for every chunk.
Tasks usually have the same pair, so that one product over the whole stream serves all of them;
there is one turn for each different pair that chunks of the microbatch use.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .turns import in_turns, select_chunks, stream_product


def first_alike(
    fingerprint: Int[Array, "T R"],
    a0: Float[Array, "T k R"],
    b0: Float[Array, "T R n"],
    chunk_slot: Int[Array, " chunks"],
) -> Int[Array, " chunks"]:
    """For every chunk, the first slot with the projections of the chunk's owner; T for chunks whose
    owners have none.

    Projections are the same if their fingerprints are, and the first column of A and the first row
    of B: a fingerprint of rank 1 has 32 bits only, but such projections have nothing else.

    Args:
      fingerprint: hash of the projections, 32 bits for each rank.
      a0: projections of inputs, 0 in slots without one.
      b0: projections to outputs.
      chunk_slot: owner slot of each chunk; -1 for an empty chunk.
    """
    slots = len(a0)

    def same(x: Float[Array, "T _"]):
        return (x[:, None] == x[None]).all(axis=-1)

    # NaN equals nothing, not even itself.
    alike = same(fingerprint) & same(a0[:, :, 0]) & same(b0[:, 0]) | jnp.eye(slots, dtype=bool)
    used = (b0[:, 0] != 0).any(axis=-1)
    first = jnp.where(used, jnp.argmax(alike, axis=1), slots)
    owner = jnp.where(chunk_slot < 0, slots, chunk_slot)
    return first.at[owner].get(mode="fill", fill_value=slots)


@jax.custom_vjp
def projected(
    x: Float[Array, "chunks l k"],
    ld: Float[Array, "chunks R"],
    a0: Float[Array, "T k R"],
    b0: Float[Array, "T R n"],
    group: Int[Array, " chunks"],
) -> Float[Array, "chunks l n"]:
    """`((x A) · ld) B` with the projections of each chunk's group, 0 in chunks without one. The
    gradient of `ld` is float32; the projections have none.

    Args:
      x: activations, in the compute dtype.
      ld: factors of the features between the projections, float32.
      a0: projections of inputs.
      b0: projections to outputs.
      group: the result of `first_alike`.
    """

    def turn(slot, v):
        u = stream_product(x, a0[slot])
        new = stream_product((u * ld[:, None]).astype(x.dtype), b0[slot]).astype(x.dtype)
        return select_chunks(group == slot, new, v)

    return in_turns(group, len(a0), turn, jnp.zeros((*x.shape[:2], b0.shape[2]), x.dtype))


def _forward(x, ld, a0, b0, group):
    return projected(x, ld, a0, b0, group), (x, ld, a0, b0, group)


def _backward(residuals, dv):
    x, ld, a0, b0, group = residuals

    def turn(slot, gradients):
        du = stream_product(dv, b0[slot].T)
        dx = stream_product((du * ld[:, None]).astype(x.dtype), a0[slot].T).astype(x.dtype)
        dld = (du * stream_product(x, a0[slot])).sum(axis=1)
        return tuple(map(lambda *pair: select_chunks(group == slot, *pair), (dx, dld), gradients))

    gradients = in_turns(group, len(a0), turn, (jnp.zeros_like(x), jnp.zeros_like(ld)))
    return *gradients, None, None, None


projected.defvjp(_forward, _backward)
