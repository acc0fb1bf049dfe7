"""One decoder layer as a pure function of weights, adapters and a stream of tokens."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from jaxmux.pallas_kernels.residual_norm import residual_norm

from .adapted_linears import Adapters, Dispatch, adapted_linears, adapted_mlp
from .architectures import BackboneConfig
from .attention import AttentionOptions, Segments, attend
from .modules import Weights
from .remat_policies import ATTENTION_OUTPUT, HEADS, MIDDLE, NORMED, checkpoint_name
from .rope import rotate
from .weight_sharding import UNDIVIDED, WeightSharding, enter, layer_weights, own_key_heads


class LayerOptions(NamedTuple):
    """Static choices.

    Attributes:
      attention: static choices of the attention.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      sharding: how the weights are divided among devices.
    """

    attention: AttentionOptions
    grouped_lora: str | None
    sharding: WeightSharding = UNDIVIDED


class Stream(NamedTuple):
    """Properties of a microbatch's tokens, the same for every layer.

    Attributes:
      cos: float32, cosines of the rotary angles.
      sin: float32, sines of the rotary angles.
      segments: the sequences of every row.
      dispatch: owners and dropout of the tokens.
    """

    cos: Float[Array, "rows row_len half"]
    sin: Float[Array, "rows row_len half"]
    segments: Segments
    dispatch: Dispatch


def decoder_layer(
    config: BackboneConfig,
    options: LayerOptions,
    weights: Weights,
    adapters: Adapters,
    stream: Stream,
    x: Float[Array, "N d"],
    accumulators: Adapters | None,
    layer: Int[Array, ""] | int,
) -> tuple[Float[Array, "N d"], Adapters | None, Bool[Array, "rows row_len"]]:
    """One pre-norm layer: attention, then the gated MLP, each added to the residual stream.

    Args:
      config: configuration of the backbone.
      options: static choices.
      weights: weights of all layers.
      adapters: factors of all layers and slots.
      stream: properties of the tokens.
      x: the residual stream, in the compute dtype.
      accumulators: gradient accumulators, threaded through (see `grouped_lora_linear`), or None.
      layer: index of this layer.

    Returns:
      The residual stream; the accumulators; and for every token whether its attention inputs were
      finite (see `attention.attend`).
    """

    def linears(h, accumulators, *names: str, residual=None):
        return adapted_linears(
            h,
            weights["self_attn"],
            adapters,
            accumulators,
            stream.dispatch,
            layer,
            tuple(f"self_attn.{name}" for name in names),
            options.grouped_lora,
            residual,
            options.sharding,
        )

    def heads(y: Float[Array, "N n"]) -> Float[Array, "rows row_len H D"]:
        return y.reshape(*stream.segments.ids.shape, -1, config.head_dim)

    eps, sharding = config.rms_norm_eps, options.sharding
    weights = layer_weights(weights, layer, sharding)
    x, h = residual_norm(x, weights["input_layernorm"]["weight"][layer], eps)
    h = enter(checkpoint_name(h, NORMED), sharding)
    projected, accumulators = linears(h, accumulators, "q_proj", "k_proj", "v_proj")
    q, k, v = map(heads, projected)
    if config.qk_norm:
        q, k = (
            residual_norm(
                checkpoint_name(y, HEADS), weights["self_attn"][name]["weight"][layer], eps, "xla"
            )[1]
            for y, name in ((q, "q_norm"), (k, "k_norm"))
        )
    k, v = (own_key_heads(y, q.shape[2], sharding) for y in (k, v))
    q, k = (rotate(y, stream.cos, stream.sin) for y in (q, k))
    out, finite = attend(q, k, v, stream.segments, options.attention)
    out = checkpoint_name(out.reshape(x.shape[0], -1), ATTENTION_OUTPUT)
    (x,), accumulators = linears(out, accumulators, "o_proj", residual=x)
    x = checkpoint_name(x, MIDDLE)

    x, h = residual_norm(x, weights["post_attention_layernorm"]["weight"][layer], eps)
    h = enter(checkpoint_name(h, NORMED), sharding)
    x, accumulators = adapted_mlp(
        h,
        weights["mlp"],
        adapters,
        accumulators,
        stream.dispatch,
        layer,
        options.grouped_lora,
        residual=x,
        sharding=sharding,
    )
    return x, accumulators, finite
