"""The time of adapter kinds other than LoRA, which are computed beside the fused products."""

from . import h200
from .device_profile import BackboneSize
from .pool_spec import PoolSpec

# A kind's backward pass, in forward passes: gradients of the stream and of the trained values.
BACKWARD = 2
# Bytes of an adapter's value. Every chunk gets a copy of its task's, which is written and read.
_OF_CHUNK = 2 * 4
# FLOPs of the frozen linears in the time in which a byte is read or written, on an H200.
_FLOPS_OF_BYTE = h200.FLOPS / h200.BYTES_PER_SECOND


def share_of_linears(pool: PoolSpec, backbone: BackboneSize, chunk_len: int) -> float:
    """Returns the time of the forward pass of all kinds but LoRA in a layer, divided by the time of
    the forward and the backward pass of its frozen linears.

    Every kind of the pool is computed for all chunks, whoever owns them: for chunks of other tasks
    its values are padding. FLOPs count as those of the linears, and bytes as the FLOPs that take as
    long. The bytes are those of the stream, and those of every chunk's own copy of the adapter.

    Args:
      pool: sizes of the pool that holds all tasks.
      backbone: sizes of the backbone.
      chunk_len: tokens of a chunk.
    """
    flops = 0.0
    for own in pool.others:
        work = own.work
        moved = backbone.stream_bytes * work.moved
        moved += _OF_CHUNK * (own.trained + own.frozen) / chunk_len
        flops += (work.flops + _FLOPS_OF_BYTE * moved) / backbone.layers
    # Forward, and backward only to the inputs: two FLOPs each for every weight.
    return flops / (4 * sum(k * n for k, n in backbone.linears.values()))
