"""The dropout of `counter_dropout` inside Mosaic GPU kernels: the same bits, tile by tile."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from .. import plgpu
from ..counter_dropout import KEEP_ALL, counters_from, draws, keep_threshold, salts
from .tiles_sm90 import load_unoptimized


class Masks(NamedTuple):
    """The dropout of an activation, see `counter_dropout`.

    Attributes:
      counters: the `token_counters`, one array for each matrix that multiplies the activation.
      rate: float32, probability in [0, 1) that a feature of a slot is dropped.
      first_column: see `counter_dropout.Dropout`.
    """

    counters: tuple[UInt32[Array, " N"], ...]
    rate: Float[Array, " T"]
    first_column: Int[Array, ""] | int | None = None


class MaskOperands(NamedTuple):
    """`Masks` as operands of a kernel: the counters, the `keep_threshold` of every slot, and the
    first column in an array of one element, or None."""

    counters: tuple
    threshold: Any
    first_column: Any


def mask_operands(masks: Masks | None) -> MaskOperands | None:
    if masks is None:
        return None
    first_column = masks.first_column
    if first_column is not None:
        first_column = jnp.asarray(first_column, jnp.int32).reshape(1)
    return MaskOperands(masks.counters, keep_threshold(masks.rate), first_column)


class Tokens(NamedTuple):
    """The counters of some rows, shifted so that column 0 is the activation's first column; and the
    salts, which are computed from the counters before the shift."""

    counters: UInt32[Array, " rows"]
    salts: UInt32[Array, " rows"]

    @classmethod
    def of(cls, counters: UInt32[Array, " rows"], first_column) -> "Tokens":
        """The tokens for some `token_counters` and the result of `load_first_column`."""
        shifted = counters if first_column is None else counters_from(counters, first_column)
        return cls(shifted, salts(counters))


def load_counters(masks: MaskOperands | None, rows) -> list[Tokens]:
    """Loads the tokens of some rows, for each of the matrices; an empty list without dropout."""
    if masks is None:
        return []
    first_column = load_first_column(masks)
    return [Tokens.of(each, first_column) for each in load_raw_counters(masks, rows)]


def load_raw_counters(masks: MaskOperands, rows) -> list[UInt32[Array, " rows"]]:
    layout = plgpu.Layout.WGMMA.reduce(1)
    return [load_unoptimized(c.at[rows], layout) for c in masks.counters]


def load_first_column(masks: MaskOperands):
    """Loads the index of the activation's first column in the linear's whole input; None for 0."""
    return None if masks.first_column is None else masks.first_column[0]


def drop(value, masks: MaskOperands, tokens: Tokens, slot, first_column):
    """A tile [rows, columns] in the WGMMA layout with the dropped features set to zero. `slot` is
    the tile's owner, and `first_column` its first column in the activation, a multiple of
    `counter_dropout.PERIOD`."""
    threshold = masks.threshold[slot]

    def dropped():
        drawn = _draws(value.shape, tokens, first_column)
        select = _select_packed if value.dtype.itemsize == 2 else _select
        return select(value, drawn, threshold)

    return lax.cond(threshold < KEEP_ALL, dropped, lambda: value)


def _draws(shape, tokens: Tokens, first_column):
    counters = counters_from(tokens.counters, first_column)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    return draws(*(lax.broadcast_in_dim(t, shape, (0,)) for t in (counters, tokens.salts)), column)


def _select(value, drawn, threshold):
    return jnp.where(drawn < threshold << 16, value, jnp.zeros_like(value))


def _select_packed(value, drawn, threshold):
    """`_select` with instructions that compute two 16-bit numbers at a time. None of them compares,
    so the draw is clamped to [threshold - 1, threshold]. Less the threshold, it is 0 or -1. The
    bits of -1 are all set, so this number is a bit mask for the value."""
    lowest, highest, minus = (t.astype(jnp.int16) for t in (threshold - 1, threshold, -threshold))
    clamped = jnp.minimum(jnp.maximum((drawn >> 16).astype(jnp.int16), lowest), highest)
    # -threshold is added because no instruction subtracts pairs of numbers.
    bits = lax.bitcast_convert_type(value, jnp.int16) & (clamped + minus)
    return lax.bitcast_convert_type(bits, value.dtype)


def dropped_tiles(z_smem, masks: MaskOperands, tokens: list[Tokens], slot, first_column):
    """Overwrites a tile of `z` in shared memory with its owner's dropout applied.

    This is a generator, which does it for one matrix after another, each with its own mask. After
    each yield, the caller starts the product that reads the tile.
    """
    z = plgpu.load(z_smem, layout=plgpu.Layout.WGMMA)
    for i, each in enumerate(tokens):
        dropped = drop(z, masks, each, slot, first_column)
        if i > 0:
            # The previous product may still be reading the tile.
            plgpu.wgmma_wait(0)
        z_smem[...] = dropped
        plgpu.commit_smem()
        yield
