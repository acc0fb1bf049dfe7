"""The compiled programs of one device: add the gradients of one microbatch, evaluate held-out
samples."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    hidden_states,
    microbatch_losses,
)
from jaxmux.models.forward import dropout_of
from jaxmux.models.head_adapters import head_adapters
from jaxmux.pallas_kernels.slot_sum import add_to_slots

from .train_state import TrainState

# What XLA puts into CUDA graphs: its defaults, and loops. The host need not wait for each of their
# turns then.
_GRAPHS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION,WHILE"
_XLA_OPTIONS = {
    "xla_gpu_enable_command_buffer": _GRAPHS,
    # XLA compiles an 8B model's step in 18 s instead of 26 s if it leaves out its own Triton
    # products, and the step takes as long.
    "xla_gpu_enable_triton_gemm": False,
}


@partial(
    jax.jit,
    static_argnums=(0, 1),
    donate_argnums=(4, 5),
    compiler_options=_XLA_OPTIONS,
)
def accumulate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    loss: Float[Array, " T"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Any, Float[Array, " T"]]:
    """Runs the forward and backward pass of one microbatch and adds its gradients and losses.

    Args:
      config: configuration of the backbone.
      options: static options of the forward pass.
      weights: the frozen weights.
      adapters: adapters of all slots, as in `TrainState`.
      accumulators: gradients accumulated so far, as in `TrainState`; donated.
      loss: float32 [T], losses accumulated so far; donated.
      microbatch: the samples.
      slots: scale and dropout of every slot.

    Returns:
      The accumulators and the losses with those of the microbatch added.
    """

    def forward(accumulators):
        return _losses(config, options, weights, adapters, accumulators, microbatch, slots)

    (losses, _), backward = jax.vjp(forward, accumulators)
    # The cotangent of every chunk is 1, so a NaN in one task's loss does not reach the others. The
    # accumulators are passed in as their own cotangents, and the next accumulators come out: see
    # `grouped_lora_linear`.
    (new_accumulators,) = backward((jnp.ones_like(losses), accumulators))
    return new_accumulators, add_to_slots(loss, losses, microbatch.chunk_slot)


def accumulate_arguments(
    backbone: Backbone,
    options: ForwardOptions,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
) -> tuple[Any, ...]:
    """The arguments of `accumulate`, in order."""
    return (
        backbone.config,
        options,
        backbone.weights,
        state.adapters,
        state.accumulators,
        state.loss,
        microbatch,
        slots,
    )


@partial(jax.jit, static_argnums=(0, 1))
def evaluate(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Any,
    losses: Float[Array, " T"],
    microbatch: Microbatch,
    slots: SlotTable,
) -> Float[Array, " T"]:
    """Runs the forward pass of one microbatch and adds its losses, without gradients.

    Args:
      config: configuration of the backbone.
      options: static options of the forward pass.
      weights: the frozen weights.
      adapters: adapters of all slots, as in `TrainState`.
      losses: float32 [T], losses accumulated so far.
      microbatch: the samples.
      slots: scale and dropout of every slot.

    Returns:
      The losses, float32 [T], with the losses of the microbatch added.
    """
    chunk, _ = _losses(config, options, weights, adapters, None, microbatch, slots)
    return add_to_slots(losses, chunk, microbatch.chunk_slot)


def _losses(
    config, options, weights, adapters, accumulators, microbatch, slots
) -> tuple[Float[Array, " chunks"], Any]:
    """The loss of every chunk, NaN where its forward pass is not finite, and the accumulators."""
    given = adapters, accumulators, microbatch.chunk_slot, dropout_of(microbatch, slots, options)
    at_head, accumulators = head_adapters(options.adapter_ops, *given)
    hidden, accumulators, finite = hidden_states(
        config, weights, adapters, accumulators, microbatch, slots, options, at_head
    )
    losses = microbatch_losses(weights, hidden, finite, microbatch, at_head=at_head)
    return losses, accumulators
