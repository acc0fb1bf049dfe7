"""The whole backbone over one microbatch: embedding, a scan over the stacked layers, final norm."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from jaxmux.data.microbatch import Microbatch
from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import Routing

from .attention import AttentionOptions, find_segments
from .base_op import Dispatch, LoraFactors
from .config import BackboneConfig
from .layer import Stream, decoder_layer, rms_norm
from .modules import Weights
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
      attention: "xla" or "cudnn".
      remat: "none" keeps every intermediate; "dots" keeps the results of the backbone's matrix
        products and of attention and recomputes the rest; "full" keeps each layer's input alone.
      dropout: False leaves the dropout code out, when no live task uses it.
      max_sequences: most sequences in one row; 1 lets GPU attention run on dense rows.
    """

    attention: str
    remat: str = "dots"
    dropout: bool = False
    max_sequences: int = 64


REMAT_POLICIES = ("none", "dots", "full")


def hidden_states(
    config: BackboneConfig,
    weights: Weights,
    adapters: dict[str, LoraFactors],
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
) -> tuple[Float[Array, "N d"], Bool[Array, "C"]]:
    """Final hidden states of a microbatch (after the last norm), in the dtype of the weights.

    Args:
      adapters: by module path, leaves stacked [L, T, …] in the dtype of the weights; may be empty.

    Returns:
      The hidden states, and for every chunk whether all that entered its attention and left the
      model was finite.
    """
    chunks = len(microbatch.chunk_slot)
    stream = _stream(config, microbatch, slots, options)
    attention = AttentionOptions(
        options.attention, microbatch.tokens.size // chunks, config.sliding_window
    )
    body = _rematerialised(partial(decoder_layer, config, attention), options.remat)

    def step(x, layer_inputs):
        layer_weights, layer_adapters, layer = layer_inputs
        return body(layer_weights, layer_adapters, x, stream, layer)

    x = weights["embed_tokens"]["weight"][microbatch.tokens.reshape(-1)]
    layers = jnp.arange(config.num_layers)
    x, finite = jax.lax.scan(step, x, (weights["layers"], adapters, layers))
    x = rms_norm(x, weights["norm"]["weight"], config.rms_norm_eps)
    finite_chunk = finite.reshape(config.num_layers, chunks, -1).all(axis=(0, 2))
    return x, finite_chunk & jnp.isfinite(x).reshape(chunks, -1).all(axis=1)


def head_kernel(weights: Weights) -> Float[Array, "d vocab"]:
    """The language-model head; the transposed embedding where they are tied."""
    if "lm_head" in weights:
        return weights["lm_head"]["kernel"]
    return weights["embed_tokens"]["weight"].T


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


def _rematerialised(layer, remat: str):
    if remat not in REMAT_POLICIES:
        raise ValueError(f"unknown remat policy {remat!r}; known: {', '.join(REMAT_POLICIES)}")
    if remat == "none":
        return layer
    policy = (
        _save_backbone_products if remat == "dots" else jax.checkpoint_policies.nothing_saveable
    )
    # The scan already keeps the compiler from merging the recomputation with the forward pass.
    return jax.checkpoint(layer, policy=policy, prevent_cse=False)


def _save_backbone_products(primitive, *args, **params) -> bool:
    # Products without batch dimensions are the frozen linears; those with are LoRA's, cheap to
    # redo.
    if primitive.name.startswith("dot_product_attention"):
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
