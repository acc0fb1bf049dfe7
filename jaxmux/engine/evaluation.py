"""Evaluates tasks on their held-out samples."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxmux.models import Backbone
from jaxmux.pallas_kernels.compilation import compiled

from .compile import forward_options
from .engine_options import EngineOptions
from .programs import evaluate
from .rounds import fill_microbatches, slot_table
from .slots import Slots


def held_out_losses(
    backbone: Backbone, options: EngineOptions, slots: Slots, names: Sequence[str]
) -> dict[str, float]:
    """The loss of tasks on their held-out samples, without dropout.

    Args:
      backbone: the frozen backbone.
      options: the options of the engine.
      slots: the slots, with the current adapters of the tasks.
      names: names of the tasks.

    Returns:
      By name, the mean cross entropy in nats per target token; NaN if the forward pass was not
      finite. Tasks without held-out samples are left out.
    """
    named = {slots.number(name): slots.named(name).prepared for name in names}
    tasks = {slot: t for slot, t in named.items() if t.eval_samples}
    forward = forward_options(backbone, options)
    capacity = slots.pool.slots
    table = jax.device_put(slot_table(tasks, None, capacity))
    losses = jnp.zeros(capacity)
    batches = {slot: t.eval_samples for slot, t in tasks.items()}
    for i, microbatch in enumerate(fill_microbatches(batches, options.shape)):
        arguments = (
            backbone.config,
            forward,
            backbone.weights,
            slots.state.adapters,
            losses,
            jax.device_put(microbatch.arrays),
            table,
        )
        if i == 0:
            compiled(evaluate.lower(*arguments))
        losses = evaluate(*arguments)
    found = jax.device_get(losses)
    return {t.task.name: float(found[slot]) for slot, t in tasks.items()}
