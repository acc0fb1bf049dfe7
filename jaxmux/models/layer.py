"""One decoder layer as a pure function of weights, adapters and a stream of tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxmux.pallas_kernels.residual_norm import residual_norm

from .adapted_linears import Adapters, Dispatch, adapted_linears, adapted_mlp, joined
from .adapter_ops import LOW_RANK_KIND, AdapterOps, AllAdapters, LayerAdapters, layer_adapters
from .architectures import BackboneConfig
from .attention import AttentionOptions, Segments, attend
from .attention_cache import CachedTokens, KeysValues, attend_cached
from .modules import Weights
from .remat_policies import BLOCK_OUTPUT, HEADS, MIDDLE, NORMED, checkpoint_name
from .weight_sharding import UNDIVIDED, WeightSharding, enter, layer_weights, own_key_heads


class LayerOptions(NamedTuple):
    """Static choices, with the same meaning as in `ForwardOptions`."""

    attention: AttentionOptions
    grouped_lora: str | None
    sharding: WeightSharding = UNDIVIDED
    adapter_ops: AdapterOps = ()
    norm: str | None = None


class Stream(NamedTuple):
    """Properties of a microbatch's tokens, the same for every layer.

    Attributes:
      cos, sin: float32, cosines and sines of the rotary angles.
      segments: the sequences of every row.
      dispatch: owners and dropout of the tokens.
      cached: the layer's cache of earlier tokens; None if the microbatch holds whole sequences and
        nothing is cached.
    """

    cos: Float[Array, "rows row_len half"]
    sin: Float[Array, "rows row_len half"]
    segments: Segments
    dispatch: Dispatch
    cached: CachedTokens | None = None


# The second result of attention: for every token whether its inputs were finite; with a cache, the
# cache with the new tokens instead.
Attended = Bool[Array, "rows row_len"] | KeysValues


class _Turn(NamedTuple):
    """The last output of one stream's attention or MLP, from the linear `module`. `joined` has not
    yet added it to the residual stream."""

    stream: int
    module: str
    output: Float[Array, "n d"]


def decoder_layer(
    config: BackboneConfig,
    options: LayerOptions,
    weights: Weights,
    adapters: AllAdapters,
    streams: Sequence[Stream],
    xs: Sequence[Float[Array, "n d"]],
    accumulators: AllAdapters | None,
    layer: Int[Array, ""] | int,
    behind: Any = None,
) -> tuple[tuple[Float[Array, "n d"], ...], AllAdapters | None, list[Attended]]:
    """One pre-norm layer: attention, then the gated MLP, each added to the residual stream.

    Tokens may come in two independent streams. The streams take turns, first with their attention
    and then with their MLP. If several devices sum up their outputs, the sum of one stream can then
    run beside the products of the other (MuxTune 3.4.2). The last sum of a layer runs beside
    products only if the compiler begins the next layer early; in the backward pass with
    rematerialisation, it does not.

    Args:
      weights: weights of all layers.
      adapters: by name of the kind, the arrays of all layers and slots.
      xs: the residual stream of each of `streams`, in the compute dtype.
      accumulators: gradient accumulators, which are passed through (see `grouped_lora_linear`), or
        None.
      behind: arrays that are computed before the layer's weights are gathered (`layer_weights`).

    Returns:
      The residual streams; the accumulators; and for each stream, whether the attention inputs of
      every token were finite (see `attention.attend`), or the cache with the new tokens.
    """
    eps, sharding = config.rms_norm_eps, options.sharding
    weights = layer_weights(weights, layer, sharding, behind)
    xs, attended, others = list(xs), [], []
    for stream in streams:
        slots = stream.dispatch.routing.chunk_slot
        of_stream, accumulators = layer_adapters(
            options.adapter_ops, adapters, accumulators, slots, layer
        )
        others.append(of_stream)
    factors = adapters[LOW_RANK_KIND]
    sums = None if accumulators is None else accumulators[LOW_RANK_KIND]

    def attention(i, h, residual, sums):
        y, sums, beside = _attention(
            config,
            options,
            weights["self_attn"],
            factors,
            sums,
            streams[i],
            layer,
            others=others[i],
            h=h,
            residual=residual,
        )
        attended.append(beside)
        return y, sums

    def mlp(i, h, residual, sums):
        return adapted_mlp(
            h,
            weights["mlp"],
            factors,
            sums,
            streams[i].dispatch,
            layer,
            options.grouped_lora,
            residual,
            sharding,
            others=others[i],
        )

    def join(turn: _Turn) -> None:
        block, linear = turn.module.split(".")
        of_stream, before = others[turn.stream], xs[turn.stream]
        bias = None if of_stream.touch(turn.module) else weights[block][linear].get("bias")
        if of_stream.touch(block):
            h = joined(turn.output, None, bias, layer, sharding)
            h = checkpoint_name(h, BLOCK_OUTPUT)
            x = before + of_stream.apply("block_output", block, before, h)
        else:
            x = joined(turn.output, before, bias, layer, sharding)
        xs[turn.stream] = checkpoint_name(x, MIDDLE) if block == "self_attn" else x

    blocks = (
        ("input_layernorm", attention, "self_attn.o_proj"),
        ("post_attention_layernorm", mlp, "mlp.down_proj"),
    )
    last: _Turn | None = None
    for norm, compute, module in blocks:
        for i in range(len(streams)):
            if last and last.stream == i:
                join(last)
                last = None
            xs[i], h = residual_norm(xs[i], weights[norm]["weight"][layer], eps, options.norm)
            h = others[i].apply("norm_output", norm, xs[i], h, eps=eps)
            h = enter(checkpoint_name(h, NORMED), sharding)
            if last:
                # This turn's products begin after those of the last turn, but do not wait for the
                # last turn's sum over the devices. Gradients are computed in the opposite order.
                h, output = jax.lax.optimization_barrier((h, last.output))
                join(last._replace(output=output))
            residual = None if others[i].touch(module.split(".")[0]) else xs[i]
            output, sums = compute(i, h, residual, sums)
            last = _Turn(i, module, output)
    join(last)
    if accumulators is not None:
        accumulators = {**accumulators, LOW_RANK_KIND: sums}
    return tuple(xs), accumulators, attended


def _attention(
    config: BackboneConfig,
    options: LayerOptions,
    weights: Weights,
    adapters: Adapters,
    accumulators: Adapters | None,
    stream: Stream,
    layer: Int[Array, ""] | int,
    others: LayerAdapters,
    h: Float[Array, "n d"],
    residual: Float[Array, "n d"] | None,
) -> tuple[Float[Array, "n d"], Adapters | None, Attended]:
    """Attention with the linears before and after it, which have the `weights` of the block and the
    low-rank factors `adapters`. `h` is the normed residual stream. The output, for `joined`,
    includes `residual` if it is not None. Also returns the accumulators, and the second result of
    attention."""
    sharding = options.sharding

    def linears(h, accumulators, *names: str, residual=None):
        return adapted_linears(
            h,
            weights,
            adapters,
            accumulators,
            stream.dispatch,
            layer,
            tuple(f"self_attn.{name}" for name in names),
            options.grouped_lora,
            residual,
            sharding,
            others,
        )

    def heads(y: Float[Array, "n m"]) -> Float[Array, "rows row_len H D"]:
        return y.reshape(*stream.segments.ids.shape, -1, config.head_dim)

    projected, accumulators = linears(h, accumulators, "q_proj", "k_proj", "v_proj")
    q, k, v = map(heads, projected)
    if config.qk_norm:
        q, k = (
            residual_norm(
                checkpoint_name(y, HEADS),
                weights[name]["weight"][layer],
                config.rms_norm_eps,
                "xla",
            )[1]
            for y, name in ((q, "q_norm"), (k, "k_norm"))
        )
    k, v = (own_key_heads(y, q.shape[2], sharding) for y in (k, v))
    q, k = (rotate(y, stream.cos, stream.sin) for y in (q, k))
    if stream.cached is None:
        out, beside = attend(q, k, v, stream.segments, options.attention)
    else:
        out, beside = attend_cached(q, k, v, stream.cached, stream.segments, options.attention)
    out = out.reshape(h.shape[0], -1)
    (y,), accumulators = linears(out, accumulators, "o_proj", residual=residual)
    return y, accumulators, beside


def rotary_angles(
    config: BackboneConfig, positions: Int[Array, "*tokens"]
) -> tuple[Float[Array, "*tokens half"], Float[Array, "*tokens half"]]:
    """Cosines and sines of the rotary angles, float32: half = head_dim / 2 of each for every token.
    `positions` is int32, the position of each token in its sequence."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(_frequencies(config))
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "*tokens heads head_dim"],
    cos: Float[Array, "*tokens half"],
    sin: Float[Array, "*tokens half"],
) -> Float[Array, "*tokens heads head_dim"]:
    """Rotates queries or keys by their positions (RoFormer, arXiv 2104.09864, equation 34). As in
    Hugging Face, the two halves of a head form the pairs. Computes in float32 and returns the dtype
    of `x`. `cos` and `sin` are from `rotary_angles`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _frequencies(config: BackboneConfig) -> Float[np.ndarray, " half"]:
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    frequencies = (1.0 / config.rope_theta**exponents).astype(np.float32)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    # As in Llama 3.1, frequencies of long wavelengths are divided by `factor`, frequencies of short
    # wavelengths are kept, and those in between are interpolated linearly.
    turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return (kept * frequencies + (1 - kept) * frequencies / scaling.factor).astype(np.float32)
