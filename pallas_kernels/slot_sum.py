"""Adds the values of chunks to the accumulators of the slots that own the chunks."""

from functools import reduce

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# Most numbers of a chunk that are added to its owner's one chunk after another.
_FEW = 8


def add_to_slots(
    accumulators: Float[Array, " T *value"],
    per_chunk: Float[Array, " chunks *value"],
    chunk_slot: Int[Array, " chunks"],
) -> Float[Array, " T *value"]:
    """Adds each chunk's value to its owner's accumulator. Chunks without an owner (slot -1) are
    left out.

    Values are selected and never multiplied by a mask, so a NaN in one task's chunk reaches no
    other slot. The order of the sum is fixed. On CPU the chunks are added to the accumulator one
    after another, so a task's sum has the same bits however its chunks are divided among
    microbatches, and whichever tasks own the chunks between them. On a GPU this holds for a few
    numbers, such as losses. Larger arrays are first summed within the microbatch on a GPU, in an
    order that depends on the positions of the chunks.
    """
    few = per_chunk.size <= _FEW * len(per_chunk)
    elsewhere = _unrolled_left_fold if few else _select_and_reduce
    return jax.lax.platform_dependent(
        accumulators, per_chunk, chunk_slot, cpu=_left_fold, default=elsewhere
    )


def _left_fold(accumulators, per_chunk, chunk_slot):
    slots = accumulators.shape[0]
    owner = jnp.where(chunk_slot < 0, slots, chunk_slot)
    return accumulators.at[owner].add(per_chunk, mode="drop")


def _unrolled_left_fold(accumulators, per_chunk, chunk_slot):
    owned = chunk_slot[:, None] == jnp.arange(len(accumulators))
    owned = owned.reshape(*owned.shape, *[1] * (per_chunk.ndim - 1))
    return reduce(jnp.add, jnp.where(owned, per_chunk[:, None], 0), accumulators)


def _select_and_reduce(accumulators, per_chunk, chunk_slot):
    # A scatter-add on GPU uses atomics, whose order differs from one execution to the next.
    slots = jnp.arange(accumulators.shape[0])
    owned = (chunk_slot[None, :] == slots[:, None]).reshape(
        (len(slots), len(chunk_slot)) + (1,) * (per_chunk.ndim - 1)
    )
    return accumulators + jnp.where(owned, per_chunk[None], 0).sum(axis=1)
