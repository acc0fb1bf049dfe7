"""Dropout from an integer counter hash, so that every implementation recomputes the same mask.

A mask bit is a pure function of (task key at its step, layer, module, sample id, position, column).
It does not depend on where in a microbatch a sample lies or with whom it shares it, and no mask is
ever stored.

The columns fall into groups of eight, and one hash of token and group gives all eight a draw:
hash times M, M², …, M⁸, for the multiplier M of a linear congruential generator whose eight
successive values cover the unit cube evenly (L'Ecuyer 1999, "Tables of linear congruential
generators of different sizes and good lattice structure"). So a draw costs one multiplication,
which a GPU does beside the hashing. The members of a group are those that one thread holds in the
registers of a Hopper matrix product: columns c and c + 1, c even, and those 8, 16 and 24 further.

A feature is dropped with its `rate` rounded to a multiple of 2^-16; with rate 0, never.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# After so many columns the members of groups repeat.
PERIOD = 32
# No draw reaches this threshold.
KEEP_ALL = 1 << 15
_GOLDEN = 0x9E3779B9
_MULTIPLIER = 2891336453


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
    drawn = draws(counters[:, None], salts(counters)[:, None], column[None, :])
    return drawn >> 16 < keep_threshold(rate)[:, None]


def keep_threshold(rate: Float[Array, "*rates"]) -> Int[Array, "*rates"]:
    """A feature survives if the upper, signed half of its draw is less than this number."""
    return KEEP_ALL - (rate * (1 << 16) + 0.5).astype(jnp.int32)


def salts(counters: UInt32[Array, "*tokens"]) -> UInt32[Array, "*tokens"]:
    """A second word of every token, without which tokens whose counters differ by a multiple of
    the step between groups would have the same draws, shifted."""
    return (counters ^ (counters >> 15)) * jnp.uint32(0xC2B2AE35)


def counters_from(
    counters: UInt32[Array, "*tokens"], first_column: Int[Array, ""] | int
) -> UInt32[Array, "*tokens"]:
    """Counters whose column 0 is `first_column`, a multiple of `PERIOD`, of the old ones."""
    first_group = jnp.asarray(first_column, jnp.int32) >> 3
    return counters + first_group.astype(jnp.uint32) * jnp.uint32(_GOLDEN)


def draws(
    counters: UInt32[Array, "*tile"], salts: UInt32[Array, "*tile"], column: Int[Array, "*tile"]
) -> Int[Array, "*tile"]:
    """One int32 draw per token and column. Elementwise, so that kernels can call it on a tile,
    where a compiler that knows the bits of `column` hashes once for all members of a group."""
    # Two summands, of which kernels compute one per thread and one while they are compiled.
    h = counters + ((column >> 1) & 3).astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    h += (column >> 5).astype(jnp.uint32) * jnp.uint32(4 * _GOLDEN & 0xFFFFFFFF)
    h = (h ^ (h >> 16) ^ salts) * jnp.uint32(0x85EBCA6B)
    return ((h ^ (h >> 15)) * _member_multiplier(column)).astype(jnp.int32)


def _member_multiplier(column: Int[Array, "*tile"]) -> UInt32[Array, "*tile"]:
    """M^(i + 1) for member i of a group, whose bits are bits 0, 3 and 4 of the column."""

    def power(exponent: int):
        return jnp.uint32(pow(_MULTIPLIER, exponent, 1 << 32))

    multiplier = power(1)
    for i, bit in enumerate((0, 3, 4)):
        multiplier *= jnp.where((column >> bit) & 1 == 1, power(1 << i), power(0))
    return multiplier


def _mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """The finaliser of MurmurHash3: every input bit changes every output bit with probability
    1/2."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
