"""Prepares the compiled steps: how their forward pass runs, and what its layers keep."""

import jax

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    Backbone,
    ForwardOptions,
    SlotTable,
    attention,
    device_memory,
    pick_implementation,
)
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.planner import PlanningError

from .engine_options import EngineOptions
from .programs import accumulate
from .remat_choice import choose_remat, step_room
from .train_state import TrainState


def forward_options(
    backbone: Backbone, options: EngineOptions, dropout: bool = False
) -> ForwardOptions:
    """How the forward pass runs; the remat policy is left open.

    Raises:
      PlanningError: the attention that `options` ask for cannot serve the shape class here.
    """
    unroll, shape = options.unroll, options.shape
    given = backbone.config, backbone.compute_dtype, shape.row_len
    if options.attention and (reason := attention.refusal(options.attention, *given)):
        raise PlanningError(f"attention={options.attention!r} {reason}")
    return ForwardOptions(
        attention=options.attention or pick_implementation(*given),
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
        lora = state.adapters["lora"]
        room = step_room(backbone, lora, memory)
        remat = choose_remat(backbone, forward, lora, microbatch, slots, room)
    forward = forward._replace(remat=remat)
    config, weights = backbone.config, backbone.weights
    compiled(
        accumulate.lower(
            config,
            forward,
            weights,
            state.adapters,
            state.accumulators,
            state.loss,
            microbatch,
            slots,
        )
    )
    return forward
