"""Packed causal attention in plain XLA, with sums over tokens in a fixed order.

Every sum over tokens is first taken within blocks of a chunk's length; then the blocks are added
one after another. Blocks outside a sequence add exact zeros. A sequence that starts at a block
border therefore gets the same bits wherever it lies in the row, and whatever other sequences are in
the row. On CPU, a task that shares microbatches with others thus gets the same bits as alone. XLA's
softmax and matrix products do not have this property in rows of 512 tokens or more, because the
order of their sums depends on the position in the row.
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
    """Causal grouped-query attention within each sequence, scaled by 1 / sqrt(D). A padding token
    attends only to itself.

    `segment_ids` are int32, the number of the token's sequence in its row, -1 for padding. `block`
    is the number of tokens in a block; it divides row_len. With a `window`, a token attends to
    itself and the `window - 1` tokens before it. Inputs and outputs are in the compute dtype; sums
    are float32. K divides H.
    """
    return _forward(q, k, v, segment_ids, block, window)[0]


def _forward(q, k, v, segment_ids, block, window):
    mask = _attention_mask(segment_ids, window)
    scores = jnp.where(mask, _scores(q, k), -jnp.inf)
    peak = scores.max(axis=-1, keepdims=True)
    p = jnp.exp(scores - peak)
    total = _fold(p.reshape(*p.shape[:-1], -1, block).sum(axis=-1))[..., None]
    p = jnp.where(mask, p / total, 0)
    out = _fold_product("rkgts,rskd->rtkgd", p.astype(v.dtype), v, block, axes=(4, 1))
    return out.reshape(q.shape).astype(q.dtype), (q, k, v, segment_ids, peak + jnp.log(total))


def _backward(block, window, residuals, d_out):
    q, k, v, segment_ids, log_total = residuals
    # Masked elements are replaced by zero, not multiplied by zero: large finite values of another
    # sequence may overflow in these products, and zero times infinity is NaN.
    mask = _attention_mask(segment_ids, window)
    p = jnp.where(mask, jnp.exp(_scores(q, k) - log_total), 0)
    d_out = _grouped(d_out, k)
    dp = jnp.einsum("rtkgd,rskd->rkgts", d_out, v, preferred_element_type=jnp.float32)
    dp = jnp.where(mask, dp, 0)
    weighted = (p * dp).reshape(*p.shape[:-1], -1, block).sum(axis=-1)
    ds = p * (dp - _fold(weighted)[..., None]) * q.shape[-1] ** -0.5
    ds, p = jnp.where(mask, ds, 0).astype(q.dtype), p.astype(q.dtype)
    dq = _fold_product("rkgts,rskd->rtkgd", ds, k, block, axes=(4, 1))
    dk = _fold_product("rkgts,rtkgd->rskd", ds, _grouped(q, k), block, axes=(3, 1))
    dv = _fold_product("rkgts,rtkgd->rskd", p, d_out, block, axes=(3, 1))
    return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


blockwise_attention.defvjp(_forward, _backward)


def _scores(q, k) -> Float[Array, "rows K G row_len row_len"]:
    scores = jnp.einsum("rtkgd,rskd->rkgts", _grouped(q, k), k, preferred_element_type=jnp.float32)
    return scores * q.shape[-1] ** -0.5


def _attention_mask(segment_ids, window: int | None) -> Bool[Array, "rows 1 1 row_len row_len"]:
    """Whether a token's query (second to last axis) attends to a token's key (last axis)."""
    t = jnp.arange(segment_ids.shape[1])
    mask = (segment_ids[:, :, None] == segment_ids[:, None, :]) & (segment_ids[:, :, None] >= 0)
    mask &= t[:, None] >= t[None, :]
    if window is not None:
        mask &= t[:, None] - t[None, :] < window
    return (mask | (t[:, None] == t[None, :]))[:, None, None]


def _grouped(x: Float[Array, "rows row_len H D"], k) -> Float[Array, "rows row_len K G D"]:
    """Splits the query heads into the groups that share a key head."""
    rows, row_len, kv_heads, size = k.shape
    return x.reshape(rows, row_len, kv_heads, -1, size)


def _fold_product(spec: str, left: Array, right: Array, block: int, axes: tuple[int, int]) -> Array:
    """The product contracted over `axes` of left and right, summed one block of tokens after
    another."""

    def add_block(total, start):
        pieces = (
            jax.lax.dynamic_slice_in_dim(operand, start, block, axis)
            for operand, axis in zip((left, right), axes, strict=True)
        )
        return total + jnp.einsum(spec, *pieces, preferred_element_type=jnp.float32), None

    shape = jax.eval_shape(lambda: jnp.einsum(spec, left, right)).shape
    starts = jnp.arange(0, left.shape[axes[0]], block)
    return jax.lax.scan(add_block, jnp.zeros(shape, jnp.float32), starts)[0]


def _fold(x: Array) -> Array:
    """The sum over the last axis, which is short, strictly from left to right."""
    parts = jnp.moveaxis(x, -1, 0)
    zero = jnp.zeros_like(parts[0])
    return jax.lax.scan(lambda total, part: (total + part, None), zero, parts)[0]
