"""The forward pass of the whole backbone over one microbatch: embedding, layers and final norm."""

from functools import partial
from itertools import groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jaxmux.data.microbatch import Microbatch
from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import Routing
from jaxmux.pallas_kernels.residual_norm import residual_norm

from .adapted_linears import Adapters, Dispatch
from .architectures import BackboneConfig
from .attention import AttentionOptions, find_segments
from .layer import LayerOptions, Stream, decoder_layer
from .modules import Weights
from .remat_policies import per_layer, rematerialised
from .rope import rotary_angles


class SlotTable(NamedTuple):
    """Per-slot data of the compiled programs.

    Attributes:
      scale: float32, factor of the slot's low-rank products.
      dropout_rate: float32, probability in [0, 1) that an input feature of an adapter is dropped.
      dropout_key: uint32, the task's key at its current step.
    """

    scale: Float[Array, "T"]
    dropout_rate: Float[Array, "T"]
    dropout_key: UInt32[Array, "T"]


class ForwardOptions(NamedTuple):
    """Static choices of a forward pass; other values compile another program.

    Attributes:
      attention: "xla", "cudnn" or "short", see `attention.pick_implementation`.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      remat: remat policy, see `remat_policies.rematerialised`: one for all layers, or one for each.
      unroll: False runs the layers in a scan. True compiles the program of every layer, which takes
        longer but copies nothing into or out of a scan's stacked arrays.
      dropout: False if no live task uses dropout; the program then has no code for it.
      max_sequences: most sequences in a row. With 1, GPU attention uses its kernels for dense rows.
    """

    attention: str
    grouped_lora: str | None = None
    remat: str | tuple[str, ...] = "dots"
    unroll: bool = False
    dropout: bool = False
    max_sequences: int = 64


def hidden_states(
    config: BackboneConfig,
    weights: Weights,
    adapters: Adapters,
    accumulators: Adapters | None,
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
) -> tuple[Float[Array, "N d"], Adapters | None, Bool[Array, "chunks"]]:
    """Hidden states of a microbatch after the final norm, in the compute dtype.

    Args:
      config: configuration of the backbone.
      weights: weights of the backbone.
      adapters: factors of all layers and slots; may be empty.
      accumulators: gradient accumulators of the factors, float32. They are returned unchanged, but
        their cotangents are the next accumulators, see `grouped_lora_linear`. None where no
        gradients are wanted.
      microbatch: tokens, sequences and owners of chunks.
      slots: per-slot data.
      options: static choices.

    Returns:
      The hidden states; the accumulators; and for every chunk whether the inputs of all its
      attentions and its hidden states were finite.

    Raises:
      ValueError: an unknown remat policy, or not one for each layer.
    """
    chunks = len(microbatch.chunk_slot)
    stream = _stream(config, microbatch, slots, options)
    block = min(microbatch.tokens.size // chunks, microbatch.tokens.shape[1])
    attention = AttentionOptions(options.attention, block, config.sliding_window)
    layer_options = LayerOptions(attention, options.grouped_lora)

    def stepper(policy: str):
        function = rematerialised(
            partial(decoder_layer, config, layer_options), policy, in_scan=not options.unroll
        )
        if options.unroll:
            # Layers differ only in their index: under one jit they are traced and lowered once.
            function = jax.jit(function)

        def step(carry, layer):
            x, accumulators = carry
            x, accumulators, finite = function(
                weights["layers"], adapters, stream, x, accumulators, layer
            )
            return (x, accumulators), finite.reshape(chunks, -1).all(axis=1)

        return step

    x = weights["embed_tokens"]["weight"][microbatch.tokens.reshape(-1)]
    policies = per_layer(options.remat, config.num_layers)
    (x, accumulators), finite = _for_each_layer(
        stepper, (x, accumulators), policies, options.unroll
    )
    _, x = residual_norm(x, weights["norm"]["weight"], config.rms_norm_eps)
    finite &= jnp.isfinite(x).reshape(chunks, -1).all(axis=1)
    return x, accumulators, finite


def _for_each_layer(stepper, carry, policies: tuple[str, ...], unroll: bool):
    """Runs `stepper(policy)(carry, layer)` for all layers; returns the last carry, and the logical
    and of the second results."""
    everything, layer = True, 0
    for policy, group in groupby(policies):
        step, layers = stepper(policy), range(layer, layer + len(list(group)))
        layer = layers.stop
        if unroll:
            for i in layers:
                carry, finite = step(carry, jnp.int32(i))
                everything &= finite
        else:
            carry, finite = jax.lax.scan(step, carry, jnp.asarray(layers))
            everything &= finite.all(axis=0)
    return carry, everything


def head_kernel(weights: Weights) -> FrozenWeight:
    """The language-model head [d, vocab]; if it is tied to the embedding, the embedding's
    transpose."""
    if "lm_head" in weights:
        return weights["lm_head"]["kernel"]
    return FrozenWeight.of(weights["embed_tokens"]["weight"].T)


def _stream(config, microbatch: Microbatch, slots: SlotTable, options: ForwardOptions) -> Stream:
    dropout = None
    if options.dropout:
        ids, positions = microbatch.sample_id.reshape(-1), microbatch.positions.reshape(-1)
        dropout = Dropout(slots.dropout_rate, slots.dropout_key, ids, positions)
    return Stream(
        *rotary_angles(config, microbatch.positions),
        segments=find_segments(microbatch.segment_ids, options.max_sequences),
        dispatch=Dispatch(Routing(microbatch.chunk_slot, slots.scale), dropout),
    )
