"""The bytes that a layer keeps for its backward pass under every remat policy, for a profile."""

import jax
import jax.numpy as jnp

from jaxmux.data import Microbatch
from jaxmux.models import (
    MODULES,
    NAMED_POLICIES,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    kept_bytes,
)
from jaxmux.models.modules import Weights, abstract_weights
from jaxmux.peft import empty_pool

# The bytes are proportional to the tokens, so they are counted for one small microbatch.
_ROW_LEN, _CHUNK_LEN = 256, 128


def kept_by_policy(config: BackboneConfig, dtype: jnp.dtype) -> dict[str, tuple[float, float]]:
    """Counts the bytes that a layer keeps for its backward pass under each remat policy.

    Nothing is computed on a device, but tracing the layers takes seconds.

    Args:
      config: configuration of the backbone.
      dtype: dtype of the weights and of the stream.

    Returns:
      For each policy, bytes per token, and bytes per token and rank: the field `BackboneSize.kept`.
    """
    weights = abstract_weights(config, dtype)
    return {policy: _kept(config, weights, policy) for policy in NAMED_POLICIES}


def _kept(config: BackboneConfig, weights: Weights, policy: str) -> tuple[float, float]:
    one, two = (_kept_at_rank(config, weights, policy, rank) for rank in (1, 2))
    return (2 * one - two) / _ROW_LEN, (two - one) / _ROW_LEN


def _kept_at_rank(config: BackboneConfig, weights: Weights, policy: str, rank: int) -> int:
    """Returns the bytes that a layer keeps of one row, with adapters of one slot and this rank."""

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
    # Every implementation keeps the same values, and the plain one is traced fastest.
    options = ForwardOptions("xla", "xla", policy, max_sequences=1)
    adapters = jax.eval_shape(lambda: empty_pool(config, MODULES, 1, rank))
    return kept_bytes(config, options, weights, adapters, microbatch, slots)
