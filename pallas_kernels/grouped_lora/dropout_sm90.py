"""The dropout of `counter_dropout` inside Mosaic GPU kernels: the same bits, tile by tile."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from ..counter_dropout import KEEP_ALL, counters_from, draws, keep_threshold, salts


class Masks(NamedTuple):
    """The dropout of an activation, see `counter_dropout`.

    Attributes:
      counters: uint32 [N] each, the `token_counters` for every matrix that the activation meets.
      rate: float32 [T], probability in [0, 1) that a feature is dropped.
    """

    counters: tuple[UInt32[Array, "N"], ...]
    rate: Float[Array, "T"]


class MaskOperands(NamedTuple):
    """What a kernel takes of `Masks`: the counters, and the `keep_threshold` of every slot."""

    counters: tuple
    threshold: Any


def mask_operands(masks: Masks | None) -> MaskOperands | None:
    if masks is None:
        return None
    return MaskOperands(masks.counters, keep_threshold(masks.rate))


class Tokens(NamedTuple):
    """The counters of some rows, and what is derived of them alone."""

    counters: UInt32[Array, "rows"]
    salts: UInt32[Array, "rows"]

    @classmethod
    def of(cls, counters: UInt32[Array, "rows"]) -> "Tokens":
        return cls(counters, salts(counters))


def load_counters(masks: MaskOperands | None, rows) -> list[Tokens]:
    """What the dropout of some rows needs, for each of the matrices; nothing without dropout."""
    return [] if masks is None else list(map(Tokens.of, load_raw_counters(masks, rows)))


def load_raw_counters(masks: MaskOperands, rows) -> list[UInt32[Array, "rows"]]:
    """The counters of some rows in registers, for each of the matrices."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    return [plgpu.load(c.at[rows], layout=layout, optimized=False) for c in masks.counters]


def drop(value, masks: MaskOperands, tokens: Tokens, slot, first_column):
    """Zeros where the mask of a tile [rows, columns] in the WGMMA layout says so.

    Its first column is a multiple of `counter_dropout.PERIOD`.
    """
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
    """`_select` with instructions for two 16-bit numbers, of which a comparison is not one: clamped
    between threshold - 1 and threshold, a draw less the threshold is all ones or zero."""
    lowest, highest, minus = (t.astype(jnp.int16) for t in (threshold - 1, threshold, -threshold))
    clamped = jnp.minimum(jnp.maximum((drawn >> 16).astype(jnp.int16), lowest), highest)
    # Added, because there is no subtraction of pairs.
    bits = lax.bitcast_convert_type(value, jnp.int16) & (clamped + minus)
    return lax.bitcast_convert_type(bits, value.dtype)


def dropped_tiles(z_smem, masks: MaskOperands, tokens: list[Tokens], slot, first_column):
    """Writes a tile of `z` in its own place with the owner's dropout applied, for one matrix after
    the other; between them, the caller starts the product that reads it.
    """
    z = plgpu.load(z_smem, layout=plgpu.Layout.WGMMA)
    for i, each in enumerate(tokens):
        dropped = drop(z, masks, each, slot, first_column)
        if i > 0:
            # The product before may still read the place.
            plgpu.wgmma_wait(0)
        z_smem[...] = dropped
        plgpu.commit_smem()
        yield
