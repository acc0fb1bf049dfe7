"""The dropout of `counter_dropout` inside Mosaic GPU kernels: the same bits, tile by tile."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, UInt32

from ..counter_dropout import keep_columns
from .tiles_sm90 import swizzled


class Masks(NamedTuple):
    """The dropout of an activation, see `counter_dropout`.

    Attributes:
      counters: uint32 [N] each, the `token_counters` for every matrix that the activation meets.
      rate: float32 [T], probability in [0, 1) that a feature is dropped.
    """

    counters: tuple[UInt32[Array, "N"], ...]
    rate: Float[Array, "T"]


class MaskOperands(NamedTuple):
    """What a kernel takes of `Masks`: the counters, the rates and the factors of what is kept."""

    counters: tuple
    rate: Any
    scale: Any


def mask_operands(masks: Masks | None) -> MaskOperands | None:
    if masks is None:
        return None
    return MaskOperands(masks.counters, masks.rate, 1 / (1 - masks.rate))


def load_counters(masks: MaskOperands | None, rows) -> list:
    """The counters of some rows in registers, for each of the matrices."""
    if masks is None:
        return []
    layout = plgpu.Layout.WGMMA.reduce(1)
    return [plgpu.load(c.at[rows], layout=layout, optimized=False) for c in masks.counters]


def drop(value, masks: MaskOperands, counters, slot, first_column):
    """Inverted dropout of a tile [rows, columns] in the WGMMA layout; scaled in float32."""
    column = plgpu.broadcasted_iota(jnp.int32, value.shape, 1, layout=plgpu.Layout.WGMMA)
    per_token = lax.broadcast_in_dim(counters, value.shape, (0,))
    keep = keep_columns(per_token, column + first_column, masks.rate[slot])
    scaled = (value.astype(jnp.float32) * masks.scale[slot]).astype(value.dtype)
    return jnp.where(keep, scaled, jnp.zeros_like(scaled))


def drop_tile(z_smem, dropped_smem, masks: MaskOperands, counters, slot, first_column):
    """Writes the tile of `z` to another place with the owner's dropout applied."""
    # The product before may still read the place.
    plgpu.wgmma_wait(0)
    width = 64
    for start in range(0, z_smem.shape[1], width):
        part = pl.ds(start, width)
        z = plgpu.load(z_smem.at[:, part], layout=plgpu.Layout.WGMMA)
        dropped = drop(z, masks, counters, slot, first_column + start)
        dropped_smem.at[:, part][...] = dropped
    plgpu.commit_smem()


def with_dropped_tile(masks: MaskOperands | None, shape, dtype, function):
    """Calls the function with a place for a dropped tile, or with None where nothing drops."""
    if masks is None:
        function(None)
    else:
        pl.run_scoped(function, plgpu.SMEM(shape, dtype, transforms=swizzled(dtype)))


def dropped_size(masks: MaskOperands | None, shape) -> int:
    return 0 if masks is None else shape[0] * shape[1]
