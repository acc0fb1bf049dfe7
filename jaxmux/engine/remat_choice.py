"""Chooses the remat policy of every layer by the memory that is free for kept values."""

import logging
from itertools import groupby
from typing import Any

import jax

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    NAMED_POLICIES,
    Backbone,
    ForwardOptions,
    SlotTable,
    block_bytes,
    kept_bytes,
)
from jaxmux.models.head_adapters import bytes_at_head
from jaxmux.planner.costs.device_profile import PackedBytes
from jaxmux.planner.costs.memory_model import USABLE, fill_layers, keeps_attention, working_bytes

_log = logging.getLogger("jaxmux")


def step_room(weights: Any, adapters: Any, memory: int) -> int:
    """Bytes that a microbatch's forward and backward pass may use, besides weights and train state.

    Args:
      weights: tree of the weights on the device.
      adapters: tree of the float32 master weights of all slots on the device.
      memory: bytes that everything on the device may take together.
    """
    weight_bytes, master_bytes = bytes_of(weights), bytes_of(adapters)
    # Masters, accumulators and the two moments of the optimizer with most moments, so that the
    # policies do not depend on the optimizers in use.
    return int(USABLE * memory) - weight_bytes - 4 * master_bytes


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays of a tree, which may be `jax.ShapeDtypeStruct`s."""
    return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(tree))


def choose_remat(
    backbone: Backbone,
    options: ForwardOptions,
    adapters: Any,
    microbatch: Microbatch,
    slots: SlotTable,
    room: int,
    in_flight: int = 1,
) -> tuple[str, ...]:
    """The remat policy of every layer: the least recomputation that fits into `room` bytes.

    The function logs its choice, and a warning if even the most recomputation does not fit.

    Args:
      backbone: the frozen backbone.
      options: static options of the forward pass; `options.remat` is not read.
      adapters: adapters of all slots; only shapes and dtypes are read.
      microbatch: a microbatch of the training run's shape class; only shapes and dtypes are read.
      slots: scale and dropout of every slot.
      room: bytes for the forward and backward pass of a microbatch (`step_room`).
      in_flight: number of microbatches between their forward and their backward pass, which all
        keep values.
    """
    config, weights = backbone.config, backbone.weights
    # Plain XLA is traced fastest, and every implementation keeps nearly the same values: softmax
    # totals and padded ranks differ by less than 1%. Only cuDNN's attention keeps more, in rows of
    # several sequences.
    plain = options._replace(attention="xla", grouped_lora="xla", unroll=False)
    chunks = len(microbatch.chunk_slot)
    chunk_len = microbatch.tokens.size // chunks
    at_head = bytes_at_head(adapters, chunks)
    room -= in_flight * at_head
    loss_bytes = block_bytes(config.vocab_size, chunk_len if at_head else 1)
    packed_kept, packed_needed = _packed_attention(backbone, options, microbatch)
    sizes: dict[str, float] = {}
    for policy in NAMED_POLICIES:
        sizes[policy] = packed_kept * keeps_attention(policy) + kept_bytes(
            config, plain._replace(remat=policy), weights, adapters, microbatch, slots
        )
        working = working_bytes(sizes, loss_bytes, packed_needed)
        if in_flight * config.num_layers * sizes[policy] <= room - working:
            # All layers fit under this policy, and tracing further policies takes seconds.
            break
    policies = fill_layers(sizes, config.num_layers, (room - working) / in_flight)
    needed = working + in_flight * sum(sizes[policy] for policy in policies)
    _log.info(
        "kept for the backward pass: %s; about %.1f of %.1f GiB",
        ", ".join(
            f"{policy!r} in {len(list(group))} layers" for policy, group in groupby(policies)
        ),
        needed / 2**30,
        room / 2**30,
    )
    if needed > room:
        _log.warning(
            "a microbatch needs about %.1f GiB besides weights and train state, there are %.1f "
            "GiB; use smaller microbatches (tokens_per_microbatch)",
            needed / 2**30,
            room / 2**30,
        )
    return policies


def _packed_attention(
    backbone: Backbone, options: ForwardOptions, microbatch: Microbatch
) -> tuple[float, float]:
    """Bytes that cuDNN's attention of one layer takes in rows of several sequences: kept for the
    backward pass, and needed while it runs. Both are 0 for other implementations."""
    if options.attention != "cudnn":
        return 0.0, 0.0
    config, itemsize = backbone.config, backbone.compute_dtype.itemsize
    packed = PackedBytes.of(config.num_heads, config.num_kv_heads, config.head_dim, itemsize)
    size = microbatch.tokens.size, options.max_sequences
    return packed.kept_by(*size), packed.needed_by(*size)
