"""The bytes that a layer keeps for its backward pass under every remat policy, for a profile."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.data import fill_microbatch
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
    # Only the shapes and dtypes of the arrays matter.
    microbatch = fill_microbatch((), {}, rows=1, row_len=_ROW_LEN, chunk_len=_CHUNK_LEN)
    slots = SlotTable(*(np.zeros(1, dtype) for dtype in (np.float32, np.float32, np.uint32)))
    # Every implementation keeps the same values, and the plain one is traced fastest.
    options = ForwardOptions("xla", "xla", policy, max_sequences=1)
    adapters = {"lora": jax.eval_shape(lambda: empty_pool(config, MODULES, 1, rank))}
    return kept_bytes(config, options, weights, adapters, microbatch, slots)
