"""What layers keep for the backward pass in the memory that there is."""

import logging
from itertools import groupby

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
from jaxmux.peft import Adapter
from jaxmux.planner.costs.attention_memory import PackedBytes
from jaxmux.planner.costs.layer_policies import USABLE, fill_layers, keeps_attention, working_bytes

_log = logging.getLogger("jaxmux")


def step_room(backbone: Backbone, adapters: Adapter, memory: int) -> int:
    """Bytes that a step may use besides weights and train state.

    Args:
      adapters: of all slots.
      memory: bytes that all may take together.
    """
    weights, masters = (
        sum(array.nbytes for array in jax.tree.leaves(tree))
        for tree in (backbone.weights, adapters)
    )
    # Masters, accumulators, and as many moments as the neediest optimizer has: what is kept does
    # not depend on which optimizers are in use.
    return int(USABLE * memory) - weights - 4 * masters


def choose_remat(
    backbone: Backbone,
    options: ForwardOptions,
    adapters: Adapter,
    microbatch: Microbatch,
    slots: SlotTable,
    room: int,
) -> tuple[str, ...]:
    """The remat policy of every layer that recomputes least in `room` bytes of memory.

    Args:
      options: those of the step; their `remat` is not read.
      adapters: of all slots.
      microbatch: one of the run's; only shapes and dtypes are read, here and of all other arrays.
      room: see `step_room`.
    """
    config, weights = backbone.config, backbone.weights
    # What bears a name is nearly the same in every implementation (less than a percent apart are
    # the softmax's totals and padded ranks), and plain XLA is traced fastest. Rows of several
    # sequences take cuDNN more.
    plain = options._replace(attention="xla", grouped_lora="xla", unroll=False)
    chunk_len = microbatch.tokens.size // len(microbatch.chunk_slot)
    loss_bytes = block_bytes(config.vocab_size, chunk_len)
    packed_kept, packed_needed = _packed_attention(backbone, options, microbatch)
    sizes: dict[str, float] = {}
    for policy in NAMED_POLICIES:
        sizes[policy] = packed_kept * keeps_attention(policy) + kept_bytes(
            config, plain._replace(remat=policy), weights, adapters, microbatch, slots
        )
        working = working_bytes(sizes, loss_bytes, packed_needed)
        if config.num_layers * sizes[policy] <= room - working:
            # No layer needs to keep less, and each policy takes a while to trace.
            break
    policies = fill_layers(sizes, config.num_layers, room - working)
    needed = working + sum(sizes[policy] for policy in policies)
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
            "a step needs about %.1f GiB besides weights and train state, there are %.1f GiB; use "
            "smaller microbatches (tokens_per_microbatch)",
            needed / 2**30,
            room / 2**30,
        )
    return policies


def _packed_attention(
    backbone: Backbone, options: ForwardOptions, microbatch: Microbatch
) -> tuple[float, float]:
    """Bytes that attention takes besides in a layer: kept, and needed by its backward pass."""
    if options.attention != "cudnn":
        return 0.0, 0.0
    config, itemsize = backbone.config, backbone.dtype.itemsize
    packed = PackedBytes.of(config.num_heads, config.num_kv_heads, config.head_dim, itemsize)
    size = microbatch.tokens.size, options.max_sequences
    return packed.kept_by(*size), packed.needed_by(*size)
