"""Prepares the compiled programs: the options of their forward pass, and the remat policies."""

from collections.abc import Mapping
from typing import Any, NamedTuple

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
from jaxmux.models.remat_policies import leaner, per_layer
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import ops_of
from jaxmux.planner import PlanningError

from .engine_options import EngineOptions
from .out_of_memory import microbatch_too_large
from .programs import accumulate, accumulate_arguments
from .remat_choice import choose_remat, step_room
from .rounds import empty_microbatch, slot_table
from .train_state import TrainState


def forward_options(
    backbone: Backbone, options: EngineOptions, adapters: Mapping[str, Any], dropout: bool = False
) -> ForwardOptions:
    """The options of the forward pass, except the remat policy, which keeps its default.

    Args:
      backbone: the frozen backbone.
      options: the options of the engine.
      adapters: by adapter kind, the pool of its arrays, or their descriptions.
      dropout: whether any task has dropout.

    Raises:
      PlanningError: `options.attention` names an implementation that cannot serve this device,
        dtype or shape class.
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
        adapter_ops=ops_of(adapters),
    )


def refuse_implementations(
    backbone: Backbone, options: EngineOptions, dropout: bool, state: TrainState
) -> None:
    """Checks that the implementations that `options` names can serve the training step, by tracing
    it. If it names none, nothing is traced.

    Args:
      backbone: the frozen backbone.
      options: the options of the engine.
      dropout: whether any task has dropout.
      state: the train state; only shapes and dtypes are read.

    Raises:
      PlanningError: an implementation cannot serve this device, these dtypes or sizes.
    """
    if not (options.attention or options.grouped_lora):
        return
    forward = forward_options(backbone, options, state.adapters, dropout)
    microbatch = empty_microbatch(options.shape)
    slots = slot_table({}, None, len(state.loss))
    try:
        accumulate.trace(*accumulate_arguments(backbone, forward, state, microbatch, slots))
    except ValueError as e:
        raise PlanningError(str(e)) from None


class TrainingStep(NamedTuple):
    """A compiled `accumulate`.

    Attributes:
      forward: the options of its forward pass.
      program: the program.
    """

    forward: ForwardOptions
    program: jax.stages.Compiled

    @property
    def scratch_bytes(self) -> int:
        """Bytes of device memory that it needs while it runs, besides its arguments and results; 0
        if unknown."""
        stats = self.program.memory_analysis()
        return int(stats.temp_size_in_bytes) if stats else 0


def compile_accumulate(
    backbone: Backbone,
    options: EngineOptions,
    dropout: bool,
    state: TrainState,
    microbatch: Microbatch,
    slots: SlotTable,
    leaner_by: int = 0,
) -> TrainingStep:
    """Chooses the remat policy of every layer, and compiles `accumulate` for microbatches of this
    shape.

    Args:
      backbone: the frozen backbone.
      options: the options of the engine.
      dropout: whether any task has dropout.
      state: the train state; only shapes and dtypes are read.
      microbatch: a microbatch of the engine's shape class; only shapes and dtypes are read.
      slots: scale and dropout of every slot; only shapes and dtypes are read.
      leaner_by: how often the choice ran out of memory; each time, layers recompute more.

    Raises:
      OutOfDeviceMemory: all layers recompute everything, and it was not enough.
    """
    forward = forward_options(backbone, options, state.adapters, dropout)
    remat, memory = options.remat, options.memory or device_memory()
    if remat == "auto" and memory is None:
        remat = "dots"
    elif remat == "auto":
        room = step_room(backbone.weights, state.adapters, memory)
        remat = choose_remat(backbone, forward, state.adapters, microbatch, slots, room)
    for _ in range(leaner_by):
        remat = leaner(per_layer(remat, backbone.config.num_layers))
        if remat is None:
            raise microbatch_too_large(options.shape.tokens)
    forward = forward._replace(remat=remat)
    arguments = accumulate_arguments(backbone, forward, state, microbatch, slots)
    return TrainingStep(forward, compiled(accumulate.lower(*arguments)))
