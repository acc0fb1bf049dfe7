"""Prepares the compiled steps: how their forward pass runs, and what its layers keep."""

import jax

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import Backbone, ForwardOptions, SlotTable, device_memory, pick_implementation
from jaxmux.pallas_kernels.compilation import compiled

from .engine_options import EngineOptions
from .programs import accumulate
from .remat_choice import choose_remat, step_room
from .train_state import TrainState


def forward_options(
    backbone: Backbone, options: EngineOptions, dropout: bool = False
) -> ForwardOptions:
    """How the forward pass runs; what layers keep for a backward pass is left open."""
    unroll, shape = options.unroll, options.shape
    return ForwardOptions(
        attention=options.attention
        or pick_implementation(backbone.config, backbone.dtype, shape.row_len),
        grouped_lora=options.grouped_lora,
        unroll=jax.default_backend() == "gpu" if unroll is None else unroll,
        dropout=dropout,
        max_sequences=shape.max_sequences,
    )


def compile_accumulate(
    backbone: Backbone,
    options: EngineOptions,
    dropout: bool,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
) -> ForwardOptions:
    """Chooses what layers keep, and compiles `accumulate` for such microbatches.

    Args:
      dropout: whether any task may drop.

    Returns:
      The options of the forward pass that it is compiled for.
    """
    forward = forward_options(backbone, options, dropout)
    remat, memory = options.remat, options.memory or device_memory()
    if remat == "auto" and memory is None:
        remat = "dots"
    elif remat == "auto":
        room = step_room(backbone, state.adapters, memory)
        remat = choose_remat(backbone, forward, state.adapters, microbatch, slots, room)
    forward = forward._replace(remat=remat)
    config, weights = backbone.config, backbone.weights
    compiled(
        accumulate.lower(
            config, forward, weights, state.adapters, state.grads, state.loss, microbatch, slots
        )
    )
    return forward
