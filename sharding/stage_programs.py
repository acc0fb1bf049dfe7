"""The compiled programs of a pipeline stage: forward, backward, and log-probabilities.

The forward and the backward pass of a part of the backbone are two programs. The forward program
returns the residuals as a value, the function that `jax.vjp` returns, and the backward program
takes it. The residuals hold neither weights nor adapters nor accumulators; these are passed to the
backward program again.

The programs run on the mesh of the stage. Within `jax.shard_map`, each device computes with its own
data shard and its own parts of weights and adapters. In these functions D is the number of data
shards, and N the number of tokens of one shard.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxmux.data.batches import Microbatch
from jaxmux.models import (
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    Weights,
    microbatch_log_probs,
    microbatch_losses,
)
from jaxmux.models.forward import dropout_of, embed, finish, run_layers
from jaxmux.models.head_adapters import head_adapters
from jaxmux.models.weight_sharding import TP
from jaxmux.pallas_kernels.slot_sum import add_to_slots
from jaxmux.peft import Layout

from .placed_backbone import Part
from .stage_mesh import AXES, DATA, StageMesh


class StageOptions(NamedTuple):
    """Static choices of a stage's programs. `config` is that of the whole backbone, `forward.remat`
    the policy of the part's layers, and `state` the description of the part's `TrainState`."""

    config: BackboneConfig
    forward: ForwardOptions
    part: Part
    home: StageMesh
    state: Layout


class Passed(NamedTuple):
    """The arrays that a stage passes to the next one: the residual stream, in the compute dtype,
    and False for chunks in which a value was not finite."""

    x: Float[Array, "D N d"]
    finite: Bool[Array, "D chunks"]


@partial(jax.jit, static_argnums=0)
def forward(
    options: StageOptions,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    sums: Float[Array, "D T sums"],
    microbatch: Microbatch,
    slots: SlotTable,
    passed: Passed | None,
) -> tuple[Passed, Float[Array, "D T sums"], Any]:
    """The forward pass of a microbatch through a part of the backbone.

    Args:
      adapters: adapters of all slots for the part's layers, as in `TrainState`.
      accumulators: the part's accumulators; only shapes and dtypes are used.
      sums: float32, losses and metrics accumulated so far; used by the last part.
      microbatch: the microbatches of the data shards, stacked.
      passed: the result of the part before this one; None for the first part.

    Returns:
      The arrays for the next part. The last part returns in their `x` the cotangent of each chunk's
      sums, [D, chunks, sums], with which the backward pass begins.
      The sums, to which the last part adds those of the microbatch.
      The residuals for `backward`, a tree of arrays with a leading axis over the devices.
    """

    def on_device(weights, adapters, accumulators, sums, microbatch, slots, passed):
        of_head = partial(microbatch_losses, rules=slots.rules)

        def run(weights, adapters, x, accumulators):
            y, accumulators, finite = _run_part(
                options, weights, adapters, accumulators, microbatch, slots, x, passed, of_head
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
            # The cotangent of every chunk is 1, so a NaN in one task's loss does not reach the
            # others.
            sums = add_to_slots(sums, y, microbatch.chunk_slot)
            y = jnp.ones_like(y)
        return Passed(y, finite), sums, residuals

    specs = _Specs.of(options, weights)
    program = _per_device(
        on_device,
        options,
        (specs.weights, specs.adapters, specs.accumulators, _SHARD, _SHARD, P(), _SHARD),
        (_SHARD, _SHARD, _DEVICE),
        stacked=(2, 3, 4, 6),
    )
    return program(weights, adapters, accumulators, sums, microbatch, slots, passed)


@partial(jax.jit, static_argnums=0, donate_argnums=1, keep_unused=True)
def forward_into(
    options: StageOptions, spent: Sequence[Array], *arguments: Any
) -> tuple[Passed, Float[Array, "D T sums"], Any]:
    """`forward`, which writes the residuals into the memory of other arrays.

    Residuals are many arrays of different sizes. If those of every microbatch were allocated anew,
    the allocator would leave gaps between them, of several GiB for a model of 8B parameters.

    `spent` are the residuals of a microbatch whose backward pass has been dispatched, or other
    arrays of these shapes and dtypes; they are donated. `arguments` are those of `forward`.
    """
    return forward(options, *arguments)


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def backward(
    options: StageOptions,
    residuals: Any,
    weights: Weights,
    adapters: Any,
    accumulators: Any,
    dy: Float[Array, "D ..."],
) -> tuple[Float[Array, "D N d"] | None, Any]:
    """The backward pass of a microbatch through a part of the backbone.

    Args:
      residuals: from `forward`.
      accumulators: gradients accumulated so far; donated.
      dy: gradient of the part's output, the residual stream; for the last part, the cotangents of
        the chunks' losses.

    Returns:
      The gradient of the residual stream before the part, None from the first part; and the
      accumulators with the gradients of the microbatch added.
    """

    def on_device(residuals, weights, adapters, accumulators, dy):
        for i, argument in {0: weights, 1: adapters, 3: accumulators}.items():
            residuals.args_res[i] = argument
        _, _, dx, accumulators = residuals((dy, accumulators))
        return dx, accumulators

    specs = _Specs.of(options, weights)
    program = _per_device(
        on_device,
        options,
        (_DEVICE, specs.weights, specs.adapters, specs.accumulators, _SHARD),
        (_SHARD, specs.accumulators),
        stacked=(0, 3, 4),
    )
    return program(residuals, weights, adapters, accumulators, dy)


@partial(jax.jit, static_argnums=0)
def log_probs(
    options: StageOptions,
    weights: Weights,
    adapters: Any,
    microbatch: Microbatch,
    slots: SlotTable,
    passed: Passed | None,
) -> Passed | Float[Array, "D rows row_len 2"]:
    """The forward pass without gradients; arguments are those of `forward`. Returns the arrays for
    the next part; from the last part, the log-probabilities of `microbatch_log_probs`."""

    def on_device(weights, adapters, microbatch, slots, passed):
        x, of_head = None if passed is None else passed.x, microbatch_log_probs
        y, _, finite = _run_part(
            options, weights, adapters, None, microbatch, slots, x, passed, of_head
        )
        return y if options.part.is_last else Passed(y, finite)

    specs = _Specs.of(options, weights)
    program = _per_device(
        on_device,
        options,
        (specs.weights, specs.adapters, _SHARD, P(), _SHARD),
        _SHARD,
        stacked=(2, 4),
    )
    return program(weights, adapters, microbatch, slots, passed)


# Arrays with one entry for each data shard, and for each device.
_SHARD, _DEVICE = P(DATA), P(AXES)


class _Specs(NamedTuple):
    """How the arrays of a stage are divided among its devices: trees of `PartitionSpec`."""

    weights: Weights
    adapters: Any
    accumulators: Any

    @classmethod
    def of(cls, options: StageOptions, weights: Weights) -> "_Specs":
        home, state = options.home, options.state.tree
        leaves = home.leaf_specs((state.adapters, state.accumulators))
        return cls(home.weight_specs(weights), *leaves)


def _per_device(
    function: Callable[..., Any],
    options: StageOptions,
    in_specs: tuple[Any, ...],
    out_specs: tuple[Any, ...],
    stacked: tuple[int, ...],
) -> Callable[..., Any]:
    """A function of one device's arrays, as a function of the stage's arrays.

    The arguments with an index in `stacked` and all results have a leading axis over data shards or
    devices, which the arrays of `function` do not have.
    """

    def on_device(*arguments: Any) -> Any:
        per_device = [
            jax.tree.map(lambda x: jnp.squeeze(x, 0), argument) if i in stacked else argument
            for i, argument in enumerate(arguments)
        ]
        return jax.tree.map(lambda leaf: leaf[None], function(*per_device))

    return jax.shard_map(
        on_device,
        mesh=options.home.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _run_part(
    options: StageOptions,
    weights,
    adapters,
    accumulators,
    microbatch,
    slots,
    x,
    passed,
    of_head,
) -> tuple[Array, Any, Bool[Array, " chunks"]]:
    """The part's output (the residual stream, or from the last part what `of_head` returns), the
    accumulators, and which chunks are finite."""
    part, config, sharding = options.part, options.config, options.forward.sharding
    part_config, at_head = dataclasses.replace(config, num_layers=part.layers), None
    if part.is_last:
        at_head, accumulators = head_adapters(
            options.forward.adapter_ops,
            adapters,
            accumulators,
            microbatch.chunk_slot,
            dropout_of(microbatch, slots, options.forward),
        )
    if part.is_first:
        x, accumulators = embed(
            weights, adapters, accumulators, microbatch, options.forward, at_head
        )
    y, accumulators, finite = run_layers(
        part_config,
        weights["layers"],
        adapters,
        accumulators,
        x,
        microbatch,
        slots,
        options.forward,
        part.first_layer,
    )
    if sharding.tp > 1:
        # Each device has checked only its own heads.
        finite = jax.lax.pmin(finite.astype(jnp.int32), TP) > 0
    if passed is not None:
        finite &= passed.finite
    if not part.is_last:
        return y, accumulators, finite
    hidden, accumulators, finite = finish(
        part_config, weights, adapters, accumulators, y, finite, microbatch, options.forward
    )
    y = of_head(weights, hidden, finite, microbatch, sharding, at_head)
    return y, accumulators, finite
