"""The implementation for Hopper: one Pallas Mosaic GPU kernel forward and one backward."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ..grouped_lora.tilings import is_hopper, multiprocessors
from .base import STREAM
from .kernels_sm90 import Tiling, add_and_normalize, normalize, stream_gradient

# Of a multiprocessor, less what it reserves and what barriers and sums take of two thread blocks.
_SHARED_MEMORY = 216 * 1024
# Elements that a warpgroup works on at a time: at least a row, and enough to pay for its steps.
_BLOCK = 4096
# One row must fit into the registers of a warpgroup, of the gradient three times.
_WIDEST = 8192


def refusal(x, branch, weight) -> str | None:
    """Why this implementation cannot serve a call; None if it can."""
    if not is_hopper():
        return "it needs a Hopper GPU"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it reads bfloat16 or float16, found {x.dtype}"
    others = [str(array.dtype) for array in (branch, weight) if array is not None]
    if any(dtype != str(x.dtype) for dtype in others):
        return f"x is {x.dtype}, branch and weight {others}"
    rows, width = x.shape
    if width % 256 or width > _WIDEST:
        return f"rows of {width} columns; expected a multiple of 256, at most {_WIDEST}"
    if rows % _rows(width):
        return f"{rows} rows; expected a multiple of {_rows(width)}"
    return None


def residual_norm_mosaic_gpu(
    eps: float,
    x: Float[Array, "N d"],
    branch: Float[Array, "N d"] | None,
    weight: Float[Array, "d"],
) -> tuple[Float[Array, "N d"], Float[Array, "N d"]]:
    """See `api.residual_norm`; `eps` is static."""
    if branch is None:
        return _norm(eps, x, weight)
    return _add_and_norm(eps, x, branch, weight)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(eps, x, weight):
    return _norm_forward(eps, x, weight)[0]


def _norm_forward(eps, x, weight):
    return (x, normalize(x, weight, eps, tiling=_tiling(x, 1))), (x, weight)


def _norm_backward(eps, residuals, cotangents):
    return _gradient(eps, residuals, cotangents), None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_and_norm(eps, x, branch, weight):
    return _add_and_norm_forward(eps, x, branch, weight)[0]


def _add_and_norm_forward(eps, x, branch, weight):
    stream, normed = add_and_normalize(x, branch, weight, eps, tiling=_tiling(x, 2))
    stream = checkpoint_name(stream, STREAM)
    return (stream, normed), (stream, weight)


def _add_and_norm_backward(eps, residuals, cotangents):
    dx = _gradient(eps, residuals, cotangents)
    return dx, dx, None


def _gradient(eps, residuals, cotangents) -> Float[Array, "N d"]:
    stream, weight = residuals
    d_stream, d_normed = cotangents
    return stream_gradient(stream, d_normed, d_stream, weight, eps, tiling=_tiling(stream, 3))


_norm.defvjp(_norm_forward, _norm_backward)
_add_and_norm.defvjp(_add_and_norm_forward, _add_and_norm_backward)


def _rows(width: int) -> int:
    """Rows of a block, a power of two."""
    return 1 << max(0, (_BLOCK // width).bit_length() - 1)


def _tiling(x: Float[Array, "N d"], inputs: int) -> Tiling:
    """Two thread blocks a multiprocessor where their shared memory suffices for four stages, so
    that one loads and stores while the other computes; else a single one.
    """
    rows = _rows(x.shape[1])
    stage = inputs * rows * x.shape[1] * x.dtype.itemsize
    share = 2 if _SHARED_MEMORY // 2 // stage >= 4 else 1
    stages = min(8, _SHARED_MEMORY // share // stage)
    return Tiling(rows=rows, stages=stages, blocks=share * multiprocessors())
