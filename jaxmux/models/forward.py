"""The whole backbone over one microbatch: embedding, the stacked layers, final norm."""

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
    """What the compiled step knows of each slot, as data.

    Attributes:
      scale: float32 [T], factor of the low-rank product.
      dropout_rate: float32 [T].
      dropout_key: uint32 [T], the task's key at its current step.
    """

    scale: Float[Array, "T"]
    dropout_rate: Float[Array, "T"]
    dropout_key: UInt32[Array, "T"]


class ForwardOptions(NamedTuple):
    """Static choices of a forward pass; a change of any compiles another program.

    Attributes:
      attention: "xla", "cudnn" or "short", see `attention.pick_implementation`.
      grouped_lora: implementation of the grouped LoRA linear; None picks the fastest.
      remat: what is kept from forward to backward, see `remat.rematerialised`: one policy for all
        layers, or one for each.
      unroll: True compiles every layer on its own. It takes longer to compile, but nothing is
        copied into and out of a scan's stacked arrays.
      dropout: False leaves the dropout code out, when no live task uses it.
      max_sequences: most sequences in one row; 1 lets GPU attention run on dense rows.
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
    sums: Adapters | None,
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
) -> tuple[Float[Array, "N d"], Adapters | None, Bool[Array, "C"]]:
    """Final hidden states of a microbatch (after the last norm), in the dtype of the weights.

    Args:
      adapters: of all layers and slots; may be empty.
      sums: their gradient accumulators, float32: they come out as they went in, but the gradient by
        them is the next accumulators (see `grouped_lora_linear`). None where no gradients are
        wanted.

    Returns:
      The hidden states, the accumulators, and for every chunk whether all that entered its
      attention and left the model was finite.
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
            # Layers differ in their index alone: as one function they are traced and lowered once.
            function = jax.jit(function)

        def step(carry, layer):
            x, sums = carry
            x, sums, finite = function(weights["layers"], adapters, stream, x, sums, layer)
            return (x, sums), finite.reshape(chunks, -1).all(axis=1)

        return step

    x = weights["embed_tokens"]["weight"][microbatch.tokens.reshape(-1)]
    policies = per_layer(options.remat, config.num_layers)
    (x, sums), finite = _for_each_layer(stepper, (x, sums), policies, options.unroll)
    _, x = residual_norm(x, weights["norm"]["weight"], config.rms_norm_eps)
    finite &= jnp.isfinite(x).reshape(chunks, -1).all(axis=1)
    return x, sums, finite


def _for_each_layer(stepper, carry, policies: tuple[str, ...], unroll: bool):
    """Runs the layers; of the second results, whether all are true."""
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
    """The language-model head [d, vocab]; the transposed embedding where they are tied."""
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
