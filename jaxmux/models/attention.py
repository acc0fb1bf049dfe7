"""Packed causal attention: a token attends only to tokens of its own sequence.

Several tasks can share a row. Attention is therefore the only operation of the model in which
values of two tasks enter one matrix product; the attention probability between them is zero. But
zero times NaN is NaN. `attend` therefore replaces non-finite values before the product, forward and
backward, and reports which tokens had them, so that a task with non-finite values affects no other
task.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxmux.pallas_kernels import short_attention

from .architectures import BackboneConfig
from .blockwise_attention import blockwise_attention
from .remat_policies import ATTENTION_INPUT, ATTENTION_OUTPUT, checkpoint_name


class Segments(NamedTuple):
    """The positions of the sequences in every row.

    Attributes:
      ids: int32, for each token, the number of its sequence in the row (0, 1, … in order); -1 for
        padding.
      starts: int32, for each sequence, the index of its first token; row_len for absent sequences.
      lengths: int32, for each sequence, its number of tokens; 0 for absent sequences.
      firsts: int32, for each token, the index of the first token of its sequence; for padding, the
        index of the token itself.
    """

    ids: Int[Array, "rows row_len"]
    starts: Int[Array, "rows max_sequences"]
    lengths: Int[Array, "rows max_sequences"]
    firsts: Int[Array, "rows row_len"]


def find_segments(segment_ids: Int[Array, "rows row_len"], max_sequences: int) -> Segments:
    """The positions of the sequences in every row, from `Segments.ids`."""
    member = segment_ids[:, None, :] == jnp.arange(max_sequences)[None, :, None]
    positions = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    starts = jnp.where(member, positions, len(positions)).min(axis=-1)
    lengths = member.sum(axis=-1, dtype=jnp.int32)
    firsts = jnp.take_along_axis(starts, jnp.maximum(segment_ids, 0), axis=1)
    return Segments(segment_ids, starts, lengths, jnp.where(segment_ids < 0, positions, firsts))


# From fastest to slowest.
IMPLEMENTATIONS = ("short", "cudnn", "xla")


class AttentionOptions(NamedTuple):
    """Static choices of attention: the implementation (see `pick_implementation`); the number of
    tokens in a block of the XLA implementation, which is the smaller of the chunk length and the
    row length; and the sliding window in tokens, or None."""

    implementation: str
    block: int
    window: int | None


def pick_implementation(config: BackboneConfig, dtype: jnp.dtype, row_len: int) -> str:
    """The fastest implementation of attention on the default device, for
    `ForwardOptions.attention`: "short" (a kernel for Hopper GPUs, rows of 64 or 128 tokens, half
    precision), else "cudnn" (GPU, half precision), else "xla". `dtype` is the compute dtype,
    `row_len` the number of tokens in a row."""
    return next(name for name in IMPLEMENTATIONS if refusal(name, config, dtype, row_len) is None)


def refusal(
    implementation: str, config: BackboneConfig, dtype: jnp.dtype, row_len: int
) -> str | None:
    """Why an implementation cannot serve rows of `row_len` tokens on the default device; None if it
    can. `dtype` is the compute dtype."""
    if implementation == "xla":
        return None
    if jax.default_backend() != "gpu" or dtype not in (jnp.bfloat16, jnp.float16):
        return "needs a GPU and a half-precision dtype"
    if implementation == "cudnn":
        return None
    if config.sliding_window is not None and config.sliding_window < row_len:
        return "has no sliding window"
    q, k = (
        jax.ShapeDtypeStruct((1, row_len, heads, config.head_dim), dtype)
        for heads in (config.num_heads, config.num_kv_heads)
    )
    return short_attention.refusal(q, k, k)


def attend(
    q: Float[Array, "rows row_len H D"],
    k: Float[Array, "rows row_len K D"],
    v: Float[Array, "rows row_len K D"],
    segments: Segments,
    options: AttentionOptions,
) -> tuple[Float[Array, "rows row_len H D"], Bool[Array, "rows row_len"]]:
    """Causal grouped-query attention within each sequence, scaled by 1 / sqrt(D), in the compute
    dtype. K divides H. Raises ValueError if `options.implementation` is "short" and the kernel
    cannot serve the call.

    Returns:
      The outputs, which are finite but otherwise undefined on padding; and for every token whether
      its query, key and value were finite. If not, the outputs of this token's sequence are wrong
      and its task must not use them. If the cotangent of an output is not finite, the cotangents of
      the token's query, key and value are NaN. If each row holds only one sequence, non-finite
      values stay within their row; they are then not replaced, and all tokens are reported as
      finite.
    """
    if options.implementation != "xla" and segments.starts.shape[1] == 1:
        # Attention does not mix rows, and each row holds one sequence of one task, so non-finite
        # values do not reach other tasks.
        q, k, v = (checkpoint_name(x, ATTENTION_INPUT) for x in (q, k, v))
        return _attention(options, segments, q, k, v), jnp.ones(q.shape[:2], bool)
    finite = _finite_tokens(q) & _finite_tokens(k) & _finite_tokens(v)
    return _isolated_attention(options, q, k, v, segments), finite


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _isolated_attention(options, q, k, v, segments):
    return _attention(options, segments, *map(_hide_non_finite, (q, k, v)))


def _isolated_forward(options, q, k, v, segments):
    inputs = (checkpoint_name(_hide_non_finite(x), ATTENTION_INPUT) for x in (q, k, v))
    return jax.vjp(partial(_attention, options, segments), *inputs)


def _isolated_backward(options, attention_vjp, d_out):
    dq, dk, dv = attention_vjp(_hide_non_finite(d_out))
    finite = _finite_tokens(d_out)[..., None, None]
    return *(jnp.where(finite, d, jnp.nan) for d in (dq, dk, dv)), None


_isolated_attention.defvjp(_isolated_forward, _isolated_backward)


def _attention(options: AttentionOptions, segments: Segments, q, k, v):
    if options.implementation == "cudnn":
        return _cudnn_attention(options, segments, q, k, v)
    if options.implementation == "short":
        out = _short_attention(options, segments, q, k, v)
    else:
        out = blockwise_attention(q, k, v, segments.ids, options.block, options.window)
    return checkpoint_name(out, ATTENTION_OUTPUT)


def _short_attention(options: AttentionOptions, segments: Segments, q, k, v):
    reason = short_attention.refusal(q, k, v)
    if options.window is not None and options.window < q.shape[1]:
        reason = f"a window of {options.window} tokens"
    if reason:
        raise ValueError(f"attention 'short' cannot serve this call: {reason}")
    several = segments.starts.shape[1] > 1
    return short_attention.short_attention(q, k, v, segments.firsts if several else None)


def _cudnn_attention(options: AttentionOptions, segments: Segments, q, k, v):
    scale = q.shape[-1] ** -0.5
    if segments.starts.shape[1] == 1:
        # With one sequence per row, the causal mask excludes the padding after it. The output has
        # no checkpoint name: policies keep all outputs of cuDNN's call, and a named output would be
        # kept twice.
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scale,
            is_causal=True,
            implementation="cudnn",
            local_window_size=None if options.window is None else (options.window - 1, 0),
        )
    # jax.nn does not offer the packed layout, but JAX's private binding of cuDNN does. It is
    # imported here, so that a JAX version without it fails only for packed rows.
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # cuDNN does not write the outputs and gradients of padding. The gradients of the inputs
    # replaced here are zero.
    is_padding = (segments.ids < 0)[..., None, None]
    q, k, v = (jnp.where(is_padding, 0, x) for x in (q, k, v))
    padded = jnp.full_like(segments.starts[:, :1], -1)
    present = segments.lengths > 0
    offsets = jnp.concatenate([jnp.where(present, segments.starts, -1), padded], axis=1)
    lengths = jnp.where(present, segments.lengths, -1)
    out = cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=scale,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        sliding_window_length=options.window,
    )
    return checkpoint_name(jnp.where(is_padding, 0, out), ATTENTION_OUTPUT)


def _hide_non_finite(x: Array) -> Array:
    return jnp.where(jnp.isfinite(x), x, 0)


def _finite_tokens(x: Float[Array, "rows row_len H D"]) -> Bool[Array, "rows row_len"]:
    return jnp.isfinite(x).all(axis=(-2, -1))
