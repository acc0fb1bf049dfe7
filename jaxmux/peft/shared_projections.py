"""Products of chunks with random projections that many slots have in common.

The projections of a slot are one pair for all layers, far too large to be gathered for every chunk.
Tasks usually have the same pair, so that one product over the whole stream serves all of them;
there is one turn for each different pair that chunks of the microbatch use.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.grouped_lora import LOW_RANK

from .turns import in_turns, select_chunks, stream_product


def first_alike(
    a0: Float[Array, "T k R"], b0: Float[Array, "T R n"], chunk_slot: Int[Array, " chunks"]
) -> Int[Array, " chunks"]:
    """For every chunk, the first slot with the projections of the chunk's owner; T for chunks whose
    owners have none.

    Projections are the same if the first column of A and the first row of B are: those of another
    seed or another size differ in them.

    Args:
      a0: projections of inputs, 0 in slots without one.
      b0: projections to outputs.
      chunk_slot: owner slot of each chunk; -1 for an empty chunk.
    """
    slots = len(a0)

    def same(x: Float[Array, "T _"]):
        return (x[:, None] == x[None]).all(axis=-1)

    # NaN equals nothing, not even itself.
    alike = same(a0[:, :, 0]) & same(b0[:, 0]) | jnp.eye(slots, dtype=bool)
    used = (b0[:, 0] != 0).any(axis=-1)
    first = jnp.where(used, jnp.argmax(alike, axis=1), slots)
    owner = jnp.where(chunk_slot < 0, slots, chunk_slot)
    return first.at[owner].get(mode="fill", fill_value=slots)


@jax.custom_vjp
def projected(
    x: Float[Array, "chunks l k"],
    ld: Float[Array, "chunks R"],
    lb: Float[Array, "chunks n"],
    a0: Float[Array, "T k R"],
    b0: Float[Array, "T R n"],
    group: Int[Array, " chunks"],
) -> Float[Array, "chunks l n"]:
    """`(((x A) · ld) B) · lb` with the projections of each chunk's group, 0 in chunks without one.
    The gradients of `ld` and `lb` are float32; the projections have none.

    Args:
      x: activations, in the compute dtype.
      ld: factors of the features between the projections, float32.
      lb: factors of the outputs, float32.
      a0: projections of inputs.
      b0: projections to outputs.
      group: the result of `first_alike`.
    """
    return _forward(x, ld, lb, a0, b0, group)[0]


def _forward(x, ld, lb, a0, b0, group):
    chunks, length, _ = x.shape

    def turn(slot, before):
        u = stream_product(x, a0[slot])
        v = stream_product((u * ld[:, None]).astype(x.dtype), b0[slot])
        new = u.astype(x.dtype), (v * lb[:, None]).astype(x.dtype)
        return tuple(map(partial(select_chunks, group == slot), new, before))

    none = (jnp.zeros((chunks, length, width), x.dtype) for width in b0.shape[1:])
    u, y = in_turns(group, len(a0), turn, tuple(none))
    # The backward pass needs no product of the forward pass but this one.
    return y, (x, checkpoint_name(u, LOW_RANK), ld, lb, a0, b0, group)


def _backward(residuals, dy):
    x, u, ld, lb, a0, b0, group = residuals
    scaled = (u * ld[:, None]).astype(x.dtype)
    dv = (dy * lb[:, None]).astype(x.dtype)

    def turn(slot, before):
        dlb = (dy * stream_product(scaled, b0[slot])).sum(axis=1)
        du = stream_product(dv, b0[slot].T)
        dld = (du * u).sum(axis=1)
        dx = stream_product((du * ld[:, None]).astype(x.dtype), a0[slot].T).astype(x.dtype)
        return tuple(map(partial(select_chunks, group == slot), (dx, dld, dlb), before))

    none = tuple(map(jnp.zeros_like, (x, ld, lb)))
    return *in_turns(group, len(a0), turn, none), None, None, None


projected.defvjp(_forward, _backward)
