"""What the two kernels of the gated activation share."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

# Rows or columns of one computing warpgroup's part of a tile; two of them share a tile.
PART = 64
GATED_RANKS = (16, 32, 48, 64)


WARPGROUPS = dict(
    num_threads=3,
    thread_name="wg",
    compiler_params=plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=True
    ),
)


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    # Where the exponential overflows, the inverse root is zero. It is one instruction, a division
    # many.
    root = lax.rsqrt(1 + jnp.exp(-x))
    return root * root


def load_float32(smem) -> Float[Array, "_ _"]:
    return plgpu.load(smem, layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def release(consumed):
    """Gives a stage back to the loader, once the products and the store in flight have read it."""
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
