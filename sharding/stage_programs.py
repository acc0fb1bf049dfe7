"""The compiled programs of a pipeline stage: forward, backward, and evaluation.

The forward and the backward pass of a part of the backbone are two programs. What the backward pass
needs from the forward pass goes from one to the other as a value, the function that `jax.vjp`
returns. It holds neither weights nor adapters nor accumulators: the backward program takes these
again.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import (
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    microbatch_losses,
)
from jaxmux.models.forward import embed, finish, run_layers
from jaxmux.pallas_kernels.slot_sum import add_to_slots

from .placed_backbone import Part


class StageOptions(NamedTuple):
    """Static choices of a stage's programs.

    Attributes:
      config: configuration of the whole backbone.
      forward: options of the forward pass; its `remat` is that of the part's layers.
      part: the layers of the stage.
    """

    config: BackboneConfig
    forward: ForwardOptions
    part: Part


class Passed(NamedTuple):
    """What a stage passes to the next one.

    Attributes:
      x: the residual stream, in the compute dtype.
      finite: False for chunks in which a value was not finite.
    """

    x: Float[Array, "N d"]
    finite: Bool[Array, " chunks"]


@partial(jax.jit, static_argnums=0)
def forward(
    options: StageOptions,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    loss: Float[Array, " T"],
    microbatch: Microbatch,
    slots: SlotTable,
    passed: Passed | None,
) -> tuple[Passed, Float[Array, " T"], Any]:
    """The forward pass of a microbatch through a part of the backbone.

    Args:
      options: static choices.
      weights: the part's weights.
      adapters: adapters of all slots for the part's layers, as in `TrainState`.
      accumulators: the part's accumulators; only shapes and dtypes are used.
      loss: float32 [T], losses accumulated so far; used by the last part.
      microbatch: the microbatch.
      slots: scale and dropout of every slot.
      passed: what the part before has passed; None for the first part.

    Returns:
      What is passed to the next part; from the last part, its `x` is the gradient with which the
      backward pass begins. The losses, with those of the microbatch added by the last part. The
      residuals for `backward`.
    """

    def run(weights, adapters, x, accumulators):
        y, accumulators, finite = _run_part(
            options, weights, adapters, accumulators, microbatch, slots, x, passed
        )
        return (y, accumulators), finite

    x = None if passed is None else passed.x
    (y, _), residuals, finite = jax.vjp(
        run,
        weights,
        adapters,
        x,
        accumulators,
        has_aux=True,
        saveable_args=(False, False, True, False),
    )
    if options.part.is_last:
        # The cotangent of every chunk is 1, so a NaN in one task's loss does not reach the others.
        start = Passed(jnp.ones_like(y), finite)
        return start, add_to_slots(loss, y, microbatch.chunk_slot), residuals
    return Passed(y, finite), loss, residuals


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def backward(
    options: StageOptions,
    residuals: Any,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    dy: Float[Array, "..."],
) -> tuple[Float[Array, "N d"] | None, Any]:
    """The backward pass of a microbatch through a part of the backbone.

    Args:
      options: static choices.
      residuals: from `forward`.
      weights: the part's weights.
      adapters: the same adapters as in the forward pass.
      accumulators: gradients accumulated so far; donated.
      dy: gradient of the residual stream behind the part; for the last part, of the chunks' losses.

    Returns:
      The gradient of the residual stream before the part, None from the first part; and the
      accumulators with the gradients of the microbatch added.
    """
    for i, argument in {0: weights, 1: adapters, 3: accumulators}.items():
        residuals.args_res[i] = argument
    _, _, dx, accumulators = residuals((dy, accumulators))
    return dx, accumulators


@partial(jax.jit, static_argnums=0)
def evaluate(
    options: StageOptions,
    weights: Weights,
    adapters: Any,
    losses: Float[Array, " T"],
    microbatch: Microbatch,
    slots: SlotTable,
    passed: Passed | None,
) -> tuple[Passed | None, Float[Array, " T"]]:
    """The forward pass without gradients; arguments and results are those of `forward`."""
    x = None if passed is None else passed.x
    y, _, finite = _run_part(options, weights, adapters, None, microbatch, slots, x, passed)
    if options.part.is_last:
        return None, add_to_slots(losses, y, microbatch.chunk_slot)
    return Passed(y, finite), losses


def _run_part(
    options: StageOptions, weights, adapters, accumulators, microbatch, slots, x, passed
) -> tuple[Array, Any, Bool[Array, " chunks"]]:
    """The residual stream behind the part, or the loss of every chunk from the last part; the
    accumulators; and the finite chunks."""
    part, config = options.part, options.config
    own = dataclasses.replace(config, num_layers=part.layers)
    if part.is_first:
        x = embed(weights, microbatch)
    y, lora, finite = run_layers(
        own,
        weights["layers"],
        adapters["lora"],
        None if accumulators is None else accumulators["lora"],
        x,
        microbatch,
        slots,
        options.forward,
        part.first_layer,
    )
    if passed is not None:
        finite &= passed.finite
    if accumulators is not None:
        accumulators = accumulators | {"lora": lora}
    if not part.is_last:
        return y, accumulators, finite
    hidden, finite = finish(config, weights, y, finite)
    return microbatch_losses(weights, hidden, finite, microbatch), accumulators, finite
