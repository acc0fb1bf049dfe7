"""What the planner needs to know of a backbone, counted without a weight in memory."""

import math

import jax
import jax.numpy as jnp

from jaxmux.data import Microbatch
from jaxmux.models import MODULES, NAMED_POLICIES, BackboneConfig, ForwardOptions, SlotTable
from jaxmux.models.loss import block_bytes
from jaxmux.models.memory import kept_bytes
from jaxmux.models.modules import abstract_weights
from jaxmux.peft import empty_pool
from jaxmux.peft.targets import linear_sizes
from jaxmux.planner.costs.attention_memory import PackedBytes
from jaxmux.planner.costs.device_profile import BackboneSize

# What layers keep is counted for one small microbatch: it is proportional to the tokens.
_ROW_LEN, _CHUNK_LEN = 256, 128


def size_of(config: BackboneConfig, dtype: jnp.dtype) -> BackboneSize:
    """The backbone's sizes with its weights and stream in `dtype`; `kept` is left empty."""
    weights = abstract_weights(config, dtype)
    return BackboneSize(
        name=config.architecture,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        linears={module: linear_sizes(config, module) for module in MODULES},
        layer_bytes=_nbytes(weights["layers"]) // config.num_layers,
        outside_bytes=_nbytes({name: w for name, w in weights.items() if name != "layers"}),
        stream_bytes=jnp.dtype(dtype).itemsize,
        kept={},
        head_block_bytes=block_bytes(config.vocab_size),
        packed=PackedBytes.of(
            config.num_heads, config.num_kv_heads, config.head_dim, jnp.dtype(dtype).itemsize
        ),
    )


def kept_by_policy(config: BackboneConfig, dtype: jnp.dtype) -> dict[str, tuple[float, float]]:
    """`BackboneSize.kept`; it takes seconds to trace."""
    weights = abstract_weights(config, dtype)
    return {policy: _kept(config, weights, policy) for policy in NAMED_POLICIES}


def _kept(config: BackboneConfig, weights, policy: str) -> tuple[float, float]:
    """Bytes per token, and per token and rank."""
    one, two = (_kept_at_rank(config, weights, policy, rank) for rank in (1, 2))
    return (2 * one - two) / _ROW_LEN, (two - one) / _ROW_LEN


def _kept_at_rank(config: BackboneConfig, weights, policy: str, rank: int) -> int:
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    row, slot = (1, _ROW_LEN), (1,)
    integers = array(row, jnp.int32)
    microbatch = Microbatch(
        tokens=integers,
        targets=integers,
        loss_weight=array(row, jnp.float32),
        positions=integers,
        segment_ids=integers,
        sample_id=array(row, jnp.uint32),
        chunk_slot=array((_ROW_LEN // _CHUNK_LEN,), jnp.int32),
    )
    slots = SlotTable(*(array(slot, d) for d in (jnp.float32, jnp.float32, jnp.uint32)))
    # The plain implementation keeps the same as any other, and is traced fastest.
    options = ForwardOptions("xla", "xla", policy, max_sequences=1)
    adapters = jax.eval_shape(lambda: empty_pool(config, MODULES, 1, rank))
    return kept_bytes(config, options, weights, adapters, microbatch, slots)


def _nbytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
