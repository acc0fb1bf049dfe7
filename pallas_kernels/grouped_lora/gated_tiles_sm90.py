"""Functions that the two kernels of the gated activation share."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import plgpu

# Rows or columns of the part of a tile that one warpgroup computes; two warpgroups share a tile.
PART = 64
GATED_RANKS = (16, 32, 48, 64)


def sigmoid(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The logistic function. If the exponential overflows, it is 0."""
    # A reciprocal square root is one instruction, and a division is many.
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def load_float32(smem) -> Float[Array, "rows columns"]:
    return plgpu.load(smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def release(consumed):
    """Returns a stage to the loading warpgroup, after the products and stores that read it are
    complete."""
    plgpu.wgmma_wait(0)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(consumed)


def check_width(width: int, size: int):
    if width % size or size % PART:
        raise ValueError(
            f"arrays of {width} columns; expected a multiple of {size}, the columns that a thread "
            f"block takes at once, itself a multiple of {PART}"
        )


def check_gated_rank(rank: int):
    if rank not in GATED_RANKS:
        raise ValueError(f"rank {rank}; expected 16, 32, 48 or 64")
