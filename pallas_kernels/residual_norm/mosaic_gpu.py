"""The implementation of the residual norm for Hopper GPUs: one Pallas Mosaic GPU kernel for each
pass. The kernel of the backward pass also adds the gradient of the returned stream."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..grouped_lora.tilings import is_hopper, multiprocessors
from .kernels_sm90 import Tiling, normalize, stream_gradient

# Bytes of a multiprocessor's shared memory for stages: all except the bytes that the hardware
# reserves and those for the barriers and sums of two thread blocks.
_SHARED_MEMORY = 216 * 1024
# Number of elements that a warpgroup computes at a time, unless a row has more: enough to make the
# fixed cost of a step small.
_BLOCK_ELEMENTS = 4096
# Widest row: the gradient holds three rows in the registers of a warpgroup.
_MAX_WIDTH = 8192


def refusal(x, weight) -> str | None:
    if not is_hopper():
        return "it needs a Hopper GPU"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it reads bfloat16 or float16, found {x.dtype}"
    if weight.dtype != x.dtype:
        return f"x is {x.dtype}, weight {weight.dtype}"
    rows, width = x.shape
    if width % 256 or width > _MAX_WIDTH:
        return f"rows of {width} columns; expected a multiple of 256, at most {_MAX_WIDTH}"
    if rows % _rows(width):
        return f"{rows} rows; expected a multiple of {_rows(width)}"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def residual_norm_mosaic_gpu(
    x: Float[Array, "N d"], weight: Float[Array, " d"], eps: float
) -> tuple[Float[Array, "N d"], Float[Array, "N d"]]:
    return _forward(x, weight, eps)[0]


def _forward(x, weight, eps):
    return (x, normalize(x, weight, eps, tiling=_tiling(x, 1))), (x, weight)


def _backward(eps, residuals, cotangents):
    x, weight = residuals
    d_x, d_normed = cotangents
    return stream_gradient(x, d_normed, d_x, weight, eps, tiling=_tiling(x, 3)), None


residual_norm_mosaic_gpu.defvjp(_forward, _backward)


def _rows(width: int) -> int:
    """The number of rows in a block, a power of two."""
    return 1 << max(0, (_BLOCK_ELEMENTS // width).bit_length() - 1)


def _tiling(x: Float[Array, "N d"], inputs: int) -> Tiling:
    """The tiling for a kernel with `inputs` inputs of the shape of `x`. Two thread blocks share a
    multiprocessor, so that one loads and stores while the other computes, unless shared memory has
    no room for four stages of each."""
    rows = _rows(x.shape[1])
    stage = inputs * rows * x.shape[1] * x.dtype.itemsize
    share = 2 if _SHARED_MEMORY // 2 // stage >= 4 else 1
    stages = min(8, _SHARED_MEMORY // share // stage)
    return Tiling(rows=rows, stages=stages, blocks=share * multiprocessors())
