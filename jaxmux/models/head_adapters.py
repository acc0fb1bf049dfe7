"""What adapters do at the head: they change the logits of their tasks' chunks.

The loss computes logits block by block, so the arrays of the chunks' owners are gathered before,
and go into it as arguments. Where embedding and head are one table, what changes it acts at both
places. Its arrays are then gathered once, so that the gradients of both places are added up within
a chunk, before those of chunks are added up in the order of the stream.
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

# The head among the linears of the first layer, in dropout's hash.
_HEAD_MODULE = 1 << 16
# By name of the kind and point, the arrays of every chunk's owner.
HeadArrays = dict[str, dict[str, Any]]


def head_adapters(
    ops: AdapterOps,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    chunk_slot: Int[Array, " chunks"],
    dropout: Dropout | None = None,
) -> tuple[LayerAdapters | None, AllAdapters | None]:
    """The adapters of the head for the chunks of a stream, None if no kind has arrays there; and
    the accumulators. They are read before the embedding, see `embed`.

    Args:
      ops: what the kinds compute, by name of the kind.
      adapters, accumulators: as for `hidden_states`.
      chunk_slot: owner slot of each chunk.
      dropout: dropout of the slots and tokens; None if no task uses it.
    """
    if not any(point in adapters[name] for name, _ in ops for point in AT_HEAD):
        return None, accumulators
    found, accumulators = layer_adapters(ops, adapters, accumulators, chunk_slot, 0, AT_HEAD)
    if dropout is None:
        return found, accumulators
    slot = jnp.maximum(chunk_slot, 0)
    owner = jnp.repeat(slot, len(dropout.position) // len(slot))
    counters = token_counters(dropout, owner, 0, _HEAD_MODULE).reshape(len(slot), -1)
    dropped = {COUNTERS: counters, RATE: dropout.rate[slot]}
    own = dict(found.own)
    for name, op in ops:
        if op.low_rank and HEAD in own[name]:
            own[name] = {**own[name], HEAD: {**own[name][HEAD], **dropped}}
    return found._replace(own=own), accumulators


def changed_logits(
    ops: AdapterOps,
    own: HeadArrays,
    hidden: Float[Array, "chunks l d"],
    logits: Float[Array, "chunks l vocab"],
    first_token: Int[Array, ""] | int,
) -> Float[Array, "chunks l vocab"]:
    """The logits of chunks with what their owners' adapters change.

    Args:
      ops: what the kinds compute, by name of the kind.
      own: the arrays of the chunks' owners, `LayerAdapters.own`.
      hidden, logits, first_token: as for `AdapterOp.logits`.
    """
    for name, op in ops:
        for point in AT_HEAD:
            if point in own[name]:
                logits = op.logits(own[name][point], hidden, logits, first_token)
    return logits


def differentiable(own: HeadArrays) -> HeadArrays:
    """The arrays with None in place of those of integers, which have no gradient."""
    return jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, own)


def with_others(floats: HeadArrays, own: HeadArrays) -> HeadArrays:
    """The inverse of `differentiable`.

    Args:
      floats: the arrays that have gradients.
      own: all arrays; those that have none are taken from here.
    """
    return jax.tree.map(
        lambda x, other: other if x is None else x, floats, own, is_leaf=lambda x: x is None
    )


def enter_head(own: HeadArrays, sharding: WeightSharding) -> HeadArrays:
    """The arrays on a device that has some tokens of the head: their gradients are summed over the
    devices.

    Args:
      own: the arrays.
      sharding: how weights are divided.
    """
    floats = jax.tree.map(lambda x: enter(x, sharding), differentiable(own))
    return with_others(floats, own)


def bytes_at_head(adapters: AllAdapters, chunks: int) -> int:
    """Bytes of the arrays of the chunks' owners at the head, and of their gradients.

    Args:
      adapters: arrays of all slots, or their shapes and dtypes.
      chunks: number of chunks of a microbatch.
    """
    leaves = jax.tree.leaves(
        [tree[point] for tree in adapters.values() for point in AT_HEAD if point in tree]
    )
    return 2 * chunks * sum(x.size * x.dtype.itemsize // x.shape[1] for x in leaves)
