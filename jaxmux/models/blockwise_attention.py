"""Packed causal attention in plain XLA, summed block by block in a fixed order.

Every sum over tokens is taken within blocks of a chunk's length and then as a left fold over the
blocks. Blocks outside a sequence add exact zeros, so a sequence gets the same bits wherever in a
row it starts (on a block border) and whatever lies beside it: what makes a co-located task bit for
bit equal to the same task alone on CPU. XLA's own softmax and matrix products group their sums by
position in the row and lack this property from 512 tokens on.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def blockwise_attention(
    q: Float[Array, "rows row_len H D"],
    k: Float[Array, "rows row_len K D"],
    v: Float[Array, "rows row_len K D"],
    segment_ids: Int[Array, "rows row_len"],
    block: int,
    window: int | None,
) -> Float[Array, "rows row_len H D"]:
    """Causal grouped-query attention inside each segment; a padding token (segment -1) sees itself
    alone.

    Args:
      block: tokens per block; divides row_len.
      window: a token sees itself and the `window - 1` tokens before it; None for all.
    """
    return _forward(q, k, v, segment_ids, block, window)[0]


def _forward(q, k, v, segment_ids, block, window):
    seen = _seen(segment_ids, window)
    scores = jnp.where(seen, _scores(q, k), -jnp.inf)
    peak = scores.max(axis=-1, keepdims=True)
    p = jnp.exp(scores - peak)
    total = _fold(p.reshape(*p.shape[:-1], -1, block).sum(axis=-1), axis=-1)[..., None]
    p = jnp.where(seen, p / total, 0)
    out = _fold_product("rkgts,rskd->rtkgd", p.astype(v.dtype), v, block, axes=(4, 1))
    return out.reshape(q.shape).astype(q.dtype), (q, k, v, segment_ids, peak + jnp.log(total))


def _backward(block, window, residuals, d_out):
    q, k, v, segment_ids, log_total = residuals
    # Outside `seen` everything is set to zero, not multiplied by it: a neighbour's huge but finite
    # values overflow in these products, and zero times infinity is NaN.
    seen = _seen(segment_ids, window)
    p = jnp.where(seen, jnp.exp(_scores(q, k) - log_total), 0)
    d_out = _grouped(d_out, k)
    dp = jnp.einsum("rtkgd,rskd->rkgts", d_out, v, preferred_element_type=jnp.float32)
    dp = jnp.where(seen, dp, 0)
    weighted = (p * dp).reshape(*p.shape[:-1], -1, block).sum(axis=-1)
    ds = p * (dp - _fold(weighted, axis=-1)[..., None]) * q.shape[-1] ** -0.5
    ds, p = jnp.where(seen, ds, 0).astype(q.dtype), p.astype(q.dtype)
    dq = _fold_product("rkgts,rskd->rtkgd", ds, k, block, axes=(4, 1))
    dk = _fold_product("rkgts,rtkgd->rskd", ds, _grouped(q, k), block, axes=(3, 1))
    dv = _fold_product("rkgts,rtkgd->rskd", p, d_out, block, axes=(3, 1))
    return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


blockwise_attention.defvjp(_forward, _backward)


def _scores(q, k) -> Float[Array, "rows K G row_len row_len"]:
    scores = jnp.einsum("rtkgd,rskd->rkgts", _grouped(q, k), k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5


def _seen(segment_ids, window: int | None) -> Bool[Array, "rows 1 1 row_len row_len"]:
    """Which token (last axis) each token sees."""
    t = jnp.arange(segment_ids.shape[1])
    seen = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] >= 0)
    seen &= t[:, None] >= t[None, :]
    if window is not None:
        seen &= t[:, None] - t[None, :] < window
    return (seen | (t[:, None] == t[None, :]))[:, None, None]


def _grouped(x: Float[Array, "rows row_len H D"], k) -> Float[Array, "rows row_len K G D"]:
    """Splits the query heads into the groups that share a key head."""
    rows, row_len, kv_heads, size = k.shape
    return x.reshape(rows, row_len, kv_heads, -1, size)


def _fold_product(spec: str, left: Array, right: Array, block: int, axes: tuple[int, int]) -> Array:
    """The product contracted over `axes` of left and right, one block of tokens after the other."""

    def add_block(total, start):
        pieces = (
            jax.lax.dynamic_slice_in_dim(operand, start, block, axis)
            for operand, axis in zip((left, right), axes, strict=True)
        )
        return total + jnp.einsum(spec, *pieces, preferred_element_type=jnp.float32), None

    shape = jax.eval_shape(lambda: jnp.einsum(spec, left, right)).shape
    starts = jnp.arange(0, left.shape[axes[0]], block)
    return jax.lax.scan(add_block, jnp.zeros(shape, jnp.float32), starts)[0]


def _fold(x: Array, axis: int) -> Array:
    """Sum over a short axis, strictly from left to right."""
    parts = jnp.moveaxis(x, axis, 0)
    return jax.lax.scan(lambda total, part: (total + part, None), jnp.zeros_like(parts[0]), parts)[
        0
    ]
