"""Dropout from an integer counter hash, so that every implementation recomputes the same mask.

A mask bit is a pure function of (task key at its step, layer, module, sample id, position, column).
It does not depend on where in a microbatch a sample lies or with whom it shares it, and no mask is
ever stored.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

_GOLDEN = 0x9E3779B9


class Dropout(NamedTuple):
    """Per-slot dropout and the identity of every token of the stream.

    Attributes:
      rate: float32 [T], probability in [0, 1) that an input feature is dropped.
      key: uint32 [T], the task's key at its current step.
      sample_id: uint32 [N], identity of the sample a token belongs to.
      position: int32 [N], position of the token in its sequence.
    """

    rate: Float[Array, "T"]
    key: UInt32[Array, "T"]
    sample_id: UInt32[Array, "N"]
    position: Int[Array, "N"]


def token_counters(
    dropout: Dropout, token_slot: Int[Array, "N"], layer: Int[Array, ""] | int, module: int
) -> UInt32[Array, "N"]:
    """Hashes everything but the column into one counter per token."""
    h = _mix(dropout.key[token_slot] + jnp.uint32(_GOLDEN) * jnp.asarray(layer, jnp.uint32))
    h = _mix(h ^ jnp.uint32((module + 1) * 0x85EBCA77 & 0xFFFFFFFF))
    h = _mix(h ^ dropout.sample_id)
    return _mix(h + jnp.uint32(_GOLDEN) * dropout.position.astype(jnp.uint32))


def keep_mask(
    counters: UInt32[Array, "N"], rate: Float[Array, "N"], columns: int
) -> Bool[Array, "N columns"]:
    """True where a feature survives."""
    column = jnp.arange(columns, dtype=jnp.int32)
    return keep_columns(counters[:, None], column[None, :], rate[:, None])


def keep_columns(
    counters: UInt32[Array, "*tile"], column: Int[Array, "*tile"], rate: Float[Array, "*tile"]
) -> Bool[Array, "*tile"]:
    """True where a feature survives: the hash of counter and column is at least `rate` of the
    uint32 range. Elementwise, so that kernels can call it on a tile."""
    hashed = _mix(counters + column.astype(jnp.uint32) * jnp.uint32(_GOLDEN))
    # 24 bits are what a float32 rate resolves, and keep the comparison exact. Through int32,
    # because GPUs convert no unsigned numbers here.
    draw = (hashed >> 8).astype(jnp.int32).astype(jnp.float32)
    return draw >= rate * jnp.float32(1 << 24)


def _mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finaliser of MurmurHash3: every input bit changes every output bit with probability
    1/2."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
