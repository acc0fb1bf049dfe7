"""Adapters at the head, which change the logits of their tasks' chunks.

The loss computes logits block by block. The arrays of the chunks' owners are therefore gathered
before the loss, and passed to it. If embedding and head are one table, an adapter of the table
changes both. Its arrays are then gathered once, so that the gradients from both uses are added up
within a chunk, before the gradients of chunks are added up in the order of the stream.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.counter_dropout import Dropout, token_counters

from .adapter_ops import (
    AT_HEAD,
    COUNTERS,
    HEAD,
    RATE,
    AdapterOps,
    AllAdapters,
    LayerAdapters,
    layer_adapters,
)
from .weight_sharding import WeightSharding, enter

# The index of the head in the dropout hash. There, the head belongs to layer 0.
_HEAD_MODULE = 1 << 16
# By name of the kind and by point, the arrays of every chunk's owner.
HeadArrays = dict[str, dict[str, Any]]


def head_adapters(
    ops: AdapterOps,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    chunk_slot: Int[Array, " chunks"],
    dropout: Dropout | None = None,
) -> tuple[LayerAdapters | None, AllAdapters | None]:
    """The adapters of the head for the chunks of a stream, or None if no kind has arrays there; and
    the accumulators. The arrays are read before those of the embedding (see `embed`). `dropout` is
    None if no task uses dropout; other arguments are as for `layer_adapters`."""
    if not any(point in adapters[name] for name, _ in ops for point in AT_HEAD):
        return None, accumulators
    at_head, accumulators = layer_adapters(ops, adapters, accumulators, chunk_slot, 0, AT_HEAD)
    if dropout is None:
        return at_head, accumulators
    slot = jnp.maximum(chunk_slot, 0)
    owner = jnp.repeat(slot, len(dropout.position) // len(slot))
    counters = token_counters(dropout, owner, 0, _HEAD_MODULE).reshape(len(slot), -1)
    dropped = {COUNTERS: counters, RATE: dropout.rate[slot]}
    arrays = dict(at_head.own)
    for name, op in ops:
        if op.low_rank and HEAD in arrays[name]:
            arrays[name] = {**arrays[name], HEAD: {**arrays[name][HEAD], **dropped}}
    return at_head._replace(own=arrays), accumulators


def changed_logits(
    ops: AdapterOps,
    arrays: HeadArrays,
    hidden: Float[Array, "chunks l d"],
    logits: Float[Array, "chunks l vocab"],
    first_token: Int[Array, ""] | int,
) -> Float[Array, "chunks l vocab"]:
    """The logits of chunks after the changes of their owners' adapters. `arrays` are
    `LayerAdapters.own`; other arguments are as for `AdapterOp.logits`."""
    for name, op in ops:
        for point in AT_HEAD:
            if point in arrays[name]:
                logits = op.logits(arrays[name][point], hidden, logits, first_token)
    return logits


def differentiable(arrays: HeadArrays) -> HeadArrays:
    """The arrays, with None in place of arrays of integers, which have no gradient."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, arrays)


def with_others(floats: HeadArrays, arrays: HeadArrays) -> HeadArrays:
    """The inverse of `differentiable`: `floats`, with the other arrays taken from `arrays`."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, floats, arrays, is_leaf=lambda x: x is None
    )


def enter_head(arrays: HeadArrays, sharding: WeightSharding) -> HeadArrays:
    """The arrays on a device that has only some tokens of the head: their gradients are summed over
    the devices."""
    floats = jax.tree.map(lambda x: enter(x, sharding), differentiable(arrays))
    return with_others(floats, arrays)


def bytes_at_head(adapters: AllAdapters, chunks: int) -> int:
    """Bytes of the arrays at the head and of their gradients, for a microbatch of `chunks` chunks.
    `adapters` are the arrays of all slots, or their shapes and dtypes."""
    leaves = jax.tree.leaves(
        [tree[point] for tree in adapters.values() for point in AT_HEAD if point in tree]
    )
    return 2 * chunks * sum(x.size * x.dtype.itemsize // x.shape[1] for x in leaves)
