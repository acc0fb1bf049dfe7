"""Dropout from a hash of integer counters, so that every implementation computes the same mask.

A mask bit is a pure function of (task key at its step, layer, module, sample id, position, column).
It does not depend on the sample's position in a microbatch or on other tasks in it, and no mask is
ever stored.

The columns are divided into groups of eight. One hash of token and group gives a random number
("draw") to each member of the group: the hash times M, M², …, M⁸. M is the multiplier of a linear
congruential generator whose eight successive values cover the unit cube evenly (L'Ecuyer 1999,
"Tables of linear congruential generators of different sizes and good lattice structure"). A draw
thus costs one multiplication. The members of a group are the columns that one thread holds in
registers during a Hopper matrix product: c and c + 1 for an even c, and the columns 8, 16 and 24
after these.

With rate 0, no feature is dropped; other rates are rounded to a multiple of 2^-16.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

# The division of columns into groups repeats after this number of columns.
PERIOD = 32
# All draws are below this threshold.
KEEP_ALL = 1 << 15
_GOLDEN = 0x9E3779B9
_MULTIPLIER = 2891336453


class Dropout(NamedTuple):
    """Dropout of every slot, and the identity of every token of the stream.

    Attributes:
      rate: float32, probability in [0, 1) that an input feature is dropped.
      key: uint32, the task's key at its current step.
      sample_id: uint32, identity of the sample to which a token belongs.
      position: int32, position of the token in its sequence.
      first_layer: index in the model of the first layer of the stacked arrays. It is not 0 if the
        layers of a model are divided among devices.
      first_column: index in the linear's whole input of the first column of the call's input; a
        multiple of `PERIOD`. It is not 0 if the columns of an input are divided among devices.
        None stands for 0 and adds no code to a program. A number 0 would add code, because it
        becomes an array if a `Dropout` is an argument of a traced function.
    """

    rate: Float[Array, " T"]
    key: UInt32[Array, " T"]
    sample_id: UInt32[Array, " N"]
    position: Int[Array, " N"]
    first_layer: Int[Array, ""] | int = 0
    first_column: Int[Array, ""] | int | None = None


@jax.jit
def token_counters(
    dropout: Dropout,
    token_slot: Int[Array, " N"],
    layer: Int[Array, ""] | int,
    module: Int[Array, ""] | int,
) -> UInt32[Array, " N"]:
    """Hashes everything except the column into one counter for each token.

    Args:
      token_slot: slot of each token.
      layer: index of the layer in the stacked arrays.
      module: index of the linear in the layer.
    """
    in_model = jnp.asarray(layer + dropout.first_layer, jnp.uint32)
    h = _mix(dropout.key[token_slot] + jnp.uint32(_GOLDEN) * in_model)
    h = _mix(h ^ (jnp.asarray(module, jnp.uint32) + 1) * jnp.uint32(0x85EBCA77))
    h = _mix(h ^ dropout.sample_id)
    return _mix(h + jnp.uint32(_GOLDEN) * dropout.position.astype(jnp.uint32))


@partial(jax.jit, static_argnames="columns")
def keep_mask(
    counters: UInt32[Array, " N"],
    rate: Float[Array, " N"],
    columns: int,
    first_column: Int[Array, ""] | int | None = None,
) -> Bool[Array, "N {columns}"]:
    """The mask of `columns` consecutive features: True for a feature that is kept.

    Args:
      counters: the `token_counters`.
      rate: dropout rate of each token.
      first_column: index of the first of the features; None for 0.
    """
    column = jnp.arange(columns, dtype=jnp.int32)
    if first_column is not None:
        column += jnp.asarray(first_column, jnp.int32)
    drawn = draws(counters[:, None], salts(counters)[:, None], column[None, :])
    return drawn >> 16 < keep_threshold(rate)[:, None]


def keep_threshold(rate: Float[Array, "*rates"]) -> Int[Array, "*rates"]:
    """A feature is kept if the upper half of its draw, as a signed number, is below this number."""
    return KEEP_ALL - (rate * (1 << 16) + 0.5).astype(jnp.int32)


def salts(counters: UInt32[Array, "*tokens"]) -> UInt32[Array, "*tokens"]:
    """A second hash of every token. Without it, two tokens whose counters differ by a multiple of
    the step between groups would have the same draws at different columns."""
    return (counters ^ (counters >> 15)) * jnp.uint32(0xC2B2AE35)


def counters_from(
    counters: UInt32[Array, "*tokens"], first_column: Int[Array, ""] | int
) -> UInt32[Array, "*tokens"]:
    """Counters whose column 0 is column `first_column` of `counters`; a multiple of `PERIOD`."""
    first_group = jnp.asarray(first_column, jnp.int32) >> 3
    return counters + first_group.astype(jnp.uint32) * jnp.uint32(_GOLDEN)


def draws(
    counters: UInt32[Array, "*#tile"], salts: UInt32[Array, "*#tile"], column: Int[Array, "*#tile"]
) -> Int[Array, "..."]:
    """One int32 random number for each token and column; the arguments are broadcast together.

    The function is elementwise, so that kernels can call it on a tile. A compiler that knows the
    bits of `column` then computes one hash for all members of a group.
    """
    # Kernels compute one of the summands for each thread and the other one at compile time.
    h = counters + ((column >> 1) & 3).astype(jnp.uint32) * jnp.uint32(_GOLDEN)
    h += (column >> 5).astype(jnp.uint32) * jnp.uint32(4 * _GOLDEN & 0xFFFFFFFF)
    h = (h ^ (h >> 16) ^ salts) * jnp.uint32(0x85EBCA6B)
    return ((h ^ (h >> 15)) * _member_multiplier(column)).astype(jnp.int32)


def _member_multiplier(column: Int[Array, "*tile"]) -> UInt32[Array, "*tile"]:
    """M^(i + 1) for member i of a group; bits 0, 3 and 4 of the column are the bits of i."""

    def power(exponent: int):
        return jnp.uint32(pow(_MULTIPLIER, exponent, 1 << 32))

    multiplier = power(1)
    for i, bit in enumerate((0, 3, 4)):
        multiplier *= jnp.where((column >> bit) & 1 == 1, power(1 << i), power(0))
    return multiplier


def _mix(h: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """The finaliser of MurmurHash3: every input bit changes every output bit with probability
    1/2."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
