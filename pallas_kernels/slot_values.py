"""Gathers for every chunk the values of the slot that owns it, and sums up their gradients."""

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
    """The values of each chunk's owner in one layer (MuxTune 3.2: Dispatch).

    JAX differentiates computations with these values as usual. Their gradients are added to
    accumulators, in the unusual sense of `grouped_lora_linear`: the accumulators are returned
    unchanged, and if they are also passed as their own cotangents, their gradient is the sum with
    this call's gradients added, in the order of the chunks. `values` themselves get no gradient.

    Args:
      values: tree of arrays [L, T, ...], for L layers and T slots.
      accumulators: tree like `values`, float32, with None in place of arrays that are not trained;
        None if no gradients are wanted.
      chunk_slot: int32, owner slot of each chunk; -1 for an empty chunk.

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


def rows_of_tokens(
    tables: Any,
    accumulators: Any | None,
    chunk_slot: Int[Array, " chunks"],
    tokens: Int[Array, "chunks l"],
) -> tuple[Any, Any | None]:
    """`values_of_chunks` for tables [1, T, vocab, r] with a row for every token: only the rows of
    the tokens are read, [chunks, l, r], zero for empty chunks and for tokens that are not in the
    tables. A chunk's gradients are first summed for each different token, and then added to the
    accumulators, one chunk after another, so the order of sums is fixed on a GPU too."""
    if accumulators is None:
        return _look_up(tables, chunk_slot, tokens), None
    return _rows_of_tokens(tables, accumulators, chunk_slot, tokens)


@jax.custom_vjp
def _rows_of_tokens(tables, accumulators, chunk_slot, tokens):
    return _look_up(tables, chunk_slot, tokens), accumulators


def _rows_forward(tables, accumulators, chunk_slot, tokens):
    return _rows_of_tokens(tables, accumulators, chunk_slot, tokens), (chunk_slot, tokens)


def _rows_backward(residuals, cotangents):
    chunk_slot, tokens = residuals
    rows, accumulators = cotangents
    is_same = tokens[:, :, None] == tokens[:, None, :]
    is_first = is_same.argmax(axis=2) == jnp.arange(tokens.shape[1])
    counts = is_first & (tokens >= 0) & (chunk_slot >= 0)[:, None]

    def add(accumulator, gradient):
        if accumulator is None:
            return None
        totals = jnp.einsum(
            "cij,cjr->cir",
            is_same.astype(jnp.float32),
            gradient,
            precision="highest",
            preferred_element_type=jnp.float32,
        )
        # Indices beyond the table are dropped. They differ, because indices must be unique.
        beyond = accumulator.shape[2] + jnp.arange(tokens.shape[1])
        indices = jnp.where(counts, tokens, beyond)

        def add_chunk(sums, chunk):
            slot, index, total = chunk
            added = sums.at[0, slot, index].add(total, mode="drop", unique_indices=True)
            return added, None

        return jax.lax.scan(add_chunk, accumulator, (chunk_slot, indices, totals))[0]

    accumulators = jax.tree.map(add, accumulators, rows, is_leaf=lambda leaf: leaf is None)
    return None, accumulators, None, None


_rows_of_tokens.defvjp(_rows_forward, _rows_backward)


def _look_up(tables, chunk_slot, tokens):
    def rows(leaf: Array) -> Array:
        owner = jnp.where(chunk_slot < 0, leaf.shape[1], chunk_slot)[:, None]
        row = jnp.where(tokens < 0, leaf.shape[2], tokens)
        return leaf[0].at[owner, row].get(mode="fill", fill_value=0)

    return jax.tree.map(rows, tables)


def _gather(values, chunk_slot, layer):
    def values_of(leaf: Array) -> Array:
        owner = jnp.where(chunk_slot < 0, leaf.shape[1], chunk_slot)
        return leaf[layer].at[owner].get(mode="fill", fill_value=0)

    return jax.tree.map(values_of, values)
