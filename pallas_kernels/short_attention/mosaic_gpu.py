"""The public function of causal attention of short rows, for Hopper GPUs."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ..grouped_lora.tilings import is_hopper
from .kernels_sm90 import BLOCK, Heads, backward, forward

# Checkpoint name by which a remat policy can keep the softmax's denominators.
TOTALS = "attention_totals"


def refusal(q, k, v) -> str | None:
    """Why `short_attention` cannot serve a call; None if it can. It needs a Hopper GPU, half
    precision, rows of 64 or 128 tokens and heads of size 64 or 128.

    Args:
      q: queries [rows, row_len, H, D], or a `jax.ShapeDtypeStruct`.
      k: keys [rows, row_len, K, D], or a `jax.ShapeDtypeStruct`.
      v: values; not read.
    """
    del v
    if not is_hopper():
        return "it needs a Hopper GPU"
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype:
        return f"it multiplies bfloat16 or float16, found {q.dtype}, {k.dtype}"
    if q.shape[1] not in (BLOCK, 2 * BLOCK):
        return f"rows of {q.shape[1]} tokens; expected {BLOCK} or {2 * BLOCK}"
    if q.shape[3] not in (64, 128):
        return f"heads of {q.shape[3]}; expected 64 or 128"
    return None


@jax.custom_vjp
def short_attention(
    q: Float[Array, "rows row_len H D"],
    k: Float[Array, "rows row_len K D"],
    v: Float[Array, "rows row_len K D"],
    firsts: Int[Array, "rows row_len"] | None = None,
) -> Float[Array, "rows row_len H D"]:
    """Causal grouped-query attention within each row, scaled by 1 / sqrt(D), for short rows.

    It is one kernel for Hopper GPUs; call it only if `refusal` returns None. It is differentiable
    with respect to q, k and v.

    Args:
      q: queries [rows, row_len, H, D], bfloat16 or float16, for H query heads of size D; row_len
        and D are 64 or 128.
      k: keys [rows, row_len, K, D], in the dtype of `q`, for K key heads; K divides H.
      v: values, with the shape and dtype of `k`.
      firsts: int32 [rows, row_len], for each token the index in its row of the first token that it
        attends to, at most its own index; so several sequences can share a row. None if every token
        attends to its row from the first token on.

    Returns:
      The outputs, with the shape and dtype of `q`.
    """
    return _forward(q, k, v, firsts)[0]


def _forward(q, k, v, firsts):
    firsts = None if firsts is None else firsts.reshape(-1)
    out, log_total = forward(*map(_flat, (q, k, v)), firsts, _heads(q, k))
    return out.reshape(q.shape), (q, k, v, firsts, checkpoint_name(log_total, TOTALS))


def _backward(residuals, d_out):
    q, k, v, firsts, log_total = residuals
    gradients = backward(*map(_flat, (q, k, v)), firsts, log_total, _flat(d_out), _heads(q, k))
    return *(d.reshape(x.shape) for d, x in zip(gradients, (q, k, v), strict=True)), None


short_attention.defvjp(_forward, _backward)


def _heads(q, k) -> Heads:
    _, row_len, count, size = q.shape
    return Heads(row_len, k.shape[2], count // k.shape[2], size)


def _flat(x):
    return x.reshape(x.shape[0] * x.shape[1], -1)
