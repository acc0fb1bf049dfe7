"""Gives every chunk the values of the slot that owns it, and collects their gradients."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from .slot_sum import add_to_slots


def values_of_chunks(
    values: Any,
    accumulators: Any | None,
    chunk_slot: Int[Array, " chunks"],
    layer: Int[Array, ""] | int,
) -> tuple[Any, Any | None]:
    """The values that each chunk's owner has in one layer (MuxTune 3.2: Dispatch).

    What is computed from them is differentiable by JAX as usual. Their gradients are added to
    accumulators, in the unusual sense of `grouped_lora_linear`: the accumulators are returned
    unchanged, and if they are given as their own cotangents, their gradient is the sum with this
    call's gradients added, in the order of the chunks. `values` themselves get no gradient.

    Args:
      values: tree of arrays [L, T, ...], for L layers and T slots.
      accumulators: tree like `values`, float32, with None in place of arrays that are not trained;
        None where no gradients are wanted.
      chunk_slot: int32, owner slot of each chunk; -1 for an empty chunk.
      layer: index of the layer.

    Returns:
      A tree like `values` of arrays [chunks, ...], zero for empty chunks; and the accumulators.
    """
    if accumulators is None:
        return _gather(values, chunk_slot, layer), None
    return _values_of_chunks(values, accumulators, chunk_slot, layer)


@jax.custom_vjp
def _values_of_chunks(values, accumulators, chunk_slot, layer):
    return _gather(values, chunk_slot, layer), accumulators


def _forward(values, accumulators, chunk_slot, layer):
    return _values_of_chunks(values, accumulators, chunk_slot, layer), (chunk_slot, layer)


def _backward(residuals, cotangents):
    chunk_slot, layer = residuals
    of_chunks, accumulators = cotangents

    def add(accumulator, gradient):
        if accumulator is None:
            return None
        summed = add_to_slots(accumulator[layer], gradient, chunk_slot)
        return accumulator.at[layer].set(summed)

    accumulators = jax.tree.map(add, accumulators, of_chunks, is_leaf=lambda leaf: leaf is None)
    return None, accumulators, None, None


_values_of_chunks.defvjp(_forward, _backward)


def _gather(values, chunk_slot, layer):
    def own(leaf: Array) -> Array:
        owner = jnp.where(chunk_slot < 0, leaf.shape[1], chunk_slot)
        return leaf[layer].at[owner].get(mode="fill", fill_value=0)

    return jax.tree.map(own, values)
