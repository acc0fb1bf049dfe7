"""The forward pass over new tokens of sequences whose earlier tokens are in a cache."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmux.data.batches import Microbatch

from .adapter_ops import AllAdapters, LayerAdapters
from .architectures import BackboneConfig
from .attention import AttentionOptions
from .attention_cache import CachedTokens, KeysValues
from .forward import ForwardOptions, SlotTable, embed, finish, stream_of
from .layer import LayerOptions, decoder_layer
from .modules import Weights


def single_layers(layers: Weights, count: int) -> tuple[Weights, ...]:
    """For each of `count` layers, stacks that hold only this layer (see
    `FrozenWeight.stack_index`)."""

    def alone(layer: int) -> Weights:
        return jax.tree.map(lambda leaf: leaf[layer : layer + 1], layers)

    return tuple(map(alone, range(count)))


def cached_hidden_states(
    config: BackboneConfig,
    weights: Weights,
    adapters: AllAdapters,
    of_layers: Sequence[AllAdapters],
    cache: Sequence[KeysValues],
    place: Int[Array, " rows"] | None,
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
    at_head: LayerAdapters | None = None,
) -> tuple[Float[Array, "N d"], tuple[KeysValues, ...]]:
    """`hidden_states` [N, d] of new tokens, and the cache with the new tokens. Each row of tokens
    belongs to one sequence of the cache. Arguments are those of `hidden_states`, except:

    Args:
      weights: weights of the backbone. "layers" may be the tuple of `single_layers`, for speed: a
        product with a few tokens takes as long as reading its weights, but with stacked weights XLA
        first copies the layer, which triples the memory traffic.
      adapters: by name of the kind, its arrays at points outside the layers.
      of_layers: for each layer, by name of the kind, its arrays in this layer.
      cache: keys and values of each layer; row b belongs to row b of the microbatch.
      place: position in its sequence of the single token in each row. None if the rows hold whole
        prompts from their first token on.
      microbatch: the new tokens and their positions. Targets are not read.
    """
    x, _ = embed(weights, adapters, None, microbatch, options, at_head)
    stream = stream_of(config, microbatch, slots, options)
    block = min(microbatch.tokens.size // len(microbatch.chunk_slot), microbatch.tokens.shape[1])
    layer_options = LayerOptions(
        AttentionOptions(options.attention, block, config.sliding_window),
        options.grouped_lora,
        options.sharding,
        options.adapter_ops,
        options.norm,
    )
    layers = weights["layers"]
    if isinstance(layers, dict):
        layers = single_layers(layers, config.num_layers)

    # All layers have the same shapes. Under one jit, they are traced and lowered once.
    @jax.jit
    def next_layer(weights, adapters, x, held):
        with_cache = stream._replace(cached=CachedTokens(held, place))
        (x,), _, (held,) = decoder_layer(
            config, layer_options, weights, adapters, [with_cache], [x], None, 0
        )
        return x, held

    written = []
    for of_layer, arrays, held in zip(layers, of_layers, cache, strict=True):
        x, held = next_layer(of_layer, arrays, x, held)
        written.append(held)
    finite = jnp.ones(microbatch.chunk_slot.shape, bool)
    hidden, _, _ = finish(config, weights, adapters, None, x, finite, microbatch, options)
    return hidden, tuple(written)
