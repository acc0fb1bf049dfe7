"""The mathematics of one decoder layer, as a pure function of weights, adapters and a stream of
tokens.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .attention import AttentionOptions, Segments, attend
from .base_op import Dispatch, LoraFactors, adapted_linears
from .config import BackboneConfig
from .modules import Weights
from .rope import rotate


class Stream(NamedTuple):
    """What every layer needs to know of a microbatch.

    Attributes:
      cos, sin: float32 [rows, row_len, head_dim / 2], rotary angles.
      segments: the sequences of every row.
      dispatch: which task owns which chunk.
    """

    cos: Float[Array, "rows row_len half"]
    sin: Float[Array, "rows row_len half"]
    segments: Segments
    dispatch: Dispatch


def decoder_layer(
    config: BackboneConfig,
    attention: AttentionOptions,
    weights: Weights,
    adapters: dict[str, LoraFactors],
    x: Float[Array, "N d"],
    stream: Stream,
    layer: Int[Array, ""] | int,
) -> tuple[Float[Array, "N d"], Bool[Array, "rows row_len"]]:
    """One pre-norm block: attention, then the gated MLP, each added to the residual stream.

    Returns:
      The stream, and for every token whether its attention inputs were finite (see
      `attention.attend`).
    """
    h = rms_norm(x, weights["input_layernorm"]["weight"], config.rms_norm_eps)
    out, finite = _self_attention(
        config, attention, weights["self_attn"], adapters, h, stream, layer
    )
    x = x + out
    h = rms_norm(x, weights["post_attention_layernorm"]["weight"], config.rms_norm_eps)
    return x + _mlp(weights["mlp"], adapters, h, stream, layer), finite


def rms_norm(
    x: Float[Array, "*stack d"], weight: Float[Array, "d"], eps: float
) -> Float[Array, "*stack d"]:
    """Root-mean-square norm over the last axis, computed in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * normed.astype(x.dtype)


def _self_attention(config, attention, weights, adapters, h, stream, layer):
    rows, row_len = stream.segments.ids.shape

    def heads(y: Float[Array, "N n"]) -> Float[Array, "rows row_len H D"]:
        return y.reshape(rows, row_len, -1, config.head_dim)

    inputs = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q, k, v = map(heads, adapted_linears(h, weights, adapters, stream.dispatch, layer, inputs))
    if config.qk_norm:
        q = rms_norm(q, weights["q_norm"]["weight"], config.rms_norm_eps)
        k = rms_norm(k, weights["k_norm"]["weight"], config.rms_norm_eps)
    q, k = (rotate(y, stream.cos, stream.sin) for y in (q, k))
    out, finite = attend(q, k, v, stream.segments, attention)
    out = out.reshape(rows * row_len, -1)
    return adapted_linears(out, weights, adapters, stream.dispatch, layer, ("self_attn.o_proj",))[
        0
    ], finite


def _mlp(weights, adapters, h, stream, layer):
    inputs = ("mlp.gate_proj", "mlp.up_proj")
    gate, up = adapted_linears(h, weights, adapters, stream.dispatch, layer, inputs)
    h = jax.nn.silu(gate) * up
    return adapted_linears(h, weights, adapters, stream.dispatch, layer, ("mlp.down_proj",))[0]
