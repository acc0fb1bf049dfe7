"""The forward pass of the backbone over one microbatch: embedding, layers and final norm. A caller
can run all of it, run each of these parts, or count the bytes that a layer keeps for the backward
pass."""

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxmux.data.batches import Microbatch
from jaxmux.objectives.token_losses import TokenRule
from jaxmux.pallas_kernels.collectives import sums_run_beside_kernels
from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import IN_ORDER, Routing
from jaxmux.pallas_kernels.residual_norm import residual_norm

from .adapted_linears import Dispatch
from .adapter_ops import (
    EMBEDDING,
    FINAL_NORM,
    TIED,
    AdapterOps,
    AllAdapters,
    LayerAdapters,
    layer_adapters,
)
from .architectures import BackboneConfig
from .attention import AttentionOptions, find_segments
from .layer import LayerOptions, Stream, decoder_layer, rotary_angles
from .modules import Weights
from .remat_policies import per_layer, rematerialised
from .weight_sharding import UNDIVIDED, WeightSharding, embedded


class SlotTable(NamedTuple):
    """The numbers, besides its arrays, of each task's adapter that a forward pass takes as data; 0
    in slots (indices of tasks in the stacked adapters) without a task.

    Attributes:
      scale: float32 [T], factor of the low-rank product, alpha / rank (rsLoRA: alpha / sqrt(rank)).
      dropout_rate: float32 [T], probability in [0, 1) that an adapter's input feature is dropped.
      dropout_key: uint32 [T], seed of the dropout masks; it differs in every optimizer step.
      rules: float32 [T] each, the token losses of the tasks' objectives; None if nothing is
        trained.
    """

    scale: Float[Array, " T"]
    dropout_rate: Float[Array, " T"]
    dropout_key: UInt32[Array, " T"]
    rules: TokenRule | None = None


class ForwardOptions(NamedTuple):
    """Static choices of `hidden_states`; other values compile another program.

    Attributes:
      attention: implementation of attention: "xla" (any device), "cudnn" (GPU, half precision) or
        "short" (a kernel for Hopper GPUs, rows of 64 or 128 tokens). `pick_implementation` chooses.
      grouped_lora: implementation of the linears with adapters: "mosaic_gpu" (Hopper GPUs),
        "triton" (Ampere, Ada and Hopper GPUs) or "xla" (any device). None picks the fastest.
      remat: the policy for the values that a layer keeps from its forward to its backward pass, one
        for all layers or a tuple with one for each. From most to least memory: "none" keeps all,
        "norms" recomputes neither norms nor matrix products, "dots" recomputes norms but no matrix
        product, "lean" also the products of the MLP's gate and up, "full" all but a layer's input.
      unroll: whether the program of every layer is compiled, which takes longer but copies nothing
        into or out of stacked arrays. If False, the layers run in a scan.
      dropout: whether any task uses dropout; if False, the program has no code for it.
      max_sequences: most samples in a row. With 1, attention on GPU runs on faster dense rows.
      sharding: how the weights are divided among devices, inside `jax.shard_map`.
      adapter_ops: the operations of the adapter kinds in use, other than low-rank ones.
      norm: implementation of the norms of the residual stream (see `residual_norm`); None picks
        one.
      in_order: whether chunk i of every microbatch belongs to slot i (see `Routing.order`).
    """

    attention: str
    grouped_lora: str | None = None
    remat: str | tuple[str, ...] = "dots"
    unroll: bool = False
    dropout: bool = False
    max_sequences: int = 64
    sharding: WeightSharding = UNDIVIDED
    adapter_ops: AdapterOps = ()
    norm: str | None = None
    in_order: bool = False


def hidden_states(
    config: BackboneConfig,
    weights: Weights,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
    at_head: LayerAdapters | None = None,
) -> tuple[Float[Array, "N d"], AllAdapters | None, Bool[Array, " chunks"]]:
    """Runs the backbone with the adapters of all tasks over a microbatch, including the final norm
    but not the head, which `logits_of` and `microbatch_losses` apply. The N tokens are divided into
    *chunks*, each of which belongs to one of T *slots* in the stacked adapters.

    Args:
      weights: weights of the backbone (`Backbone.weights`).
      adapters: by name of the adapter kind, its arrays for L layers and T slots. "lora" is always
        there and may be empty: by path of a linear within a layer ("mlp.up_proj"), the factors a
        [L, T, k, R] and b [L, T, R, n], for input width k, output width n and the largest rank R.
      accumulators: float32 gradients summed over earlier microbatches, a tree like `adapters`. They
        are returned unchanged, but are differentiable in an unusual sense: if they are passed as
        their own cotangents, their gradient is their sum with the gradients of this microbatch (see
        `grouped_lora_linear`). None if no gradients are wanted.
      at_head: the adapters of the head, from `head_adapters`, if `microbatch_losses` also gets
        them. If head and embedding are one table, the gradients from both uses are then added.

    Returns:
      The hidden states [N, d] after the final norm, in the dtype of the embedding; the
      accumulators; and a bool array [chunks], False for a chunk whose hidden states must not be
      used, because its hidden states or its inputs of attention in some layer are not finite.

    Raises:
      ValueError: a remat policy is unknown, there is not one policy for each layer, or an
        implementation in `options` cannot serve the call.
    """
    x, accumulators = embed(weights, adapters, accumulators, microbatch, options, at_head)
    x, accumulators, finite = run_layers(
        config, weights["layers"], adapters, accumulators, x, microbatch, slots, options
    )
    return finish(config, weights, adapters, accumulators, x, finite, microbatch, options)


def embed(
    weights: Weights,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    microbatch: Microbatch,
    options: ForwardOptions,
    at_head: LayerAdapters | None = None,
) -> tuple[Float[Array, "N d"], AllAdapters | None]:
    """The residual stream before the first layer: the embeddings of a microbatch's tokens, changed
    by adapters. Also returns the accumulators. Arguments are as for `hidden_states`; of the
    weights, only the embedding is read."""
    tokens = microbatch.tokens.reshape(-1)
    x = jax.lax.stop_gradient(embedded(weights["embed_tokens"]["weight"], tokens, options.sharding))
    points = (EMBEDDING,) if at_head else (EMBEDDING, TIED)
    of_chunks = tokens.reshape(len(microbatch.chunk_slot), -1)
    in_stream, accumulators = layer_adapters(
        options.adapter_ops,
        adapters,
        accumulators,
        microbatch.chunk_slot,
        layer=0,
        outside=points,
        tokens=of_chunks,
    )
    x = in_stream.apply("embedding_output", EMBEDDING, x, tokens=of_chunks)
    at_tied = at_head or in_stream
    return at_tied.apply("embedding_output", TIED, x, tokens=of_chunks), accumulators


def run_layers(
    config: BackboneConfig,
    layers: Weights,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    x: Float[Array, "N d"],
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
    first_layer: Int[Array, ""] | int = 0,
) -> tuple[Float[Array, "N d"], AllAdapters | None, Bool[Array, " chunks"]]:
    """Runs consecutive layers of the backbone; `hidden_states` runs all of them. Returns the
    residual stream after them; the accumulators; and a bool array [chunks], False if an input of
    attention was not finite. The arguments are those of `hidden_states`, except:

    Args:
      config: configuration of the backbone, with `num_layers` for these layers.
      layers: the stacked weights of these layers. `adapters`, `accumulators` and `options.remat`
        have the same layers.
      x: the residual stream before the first of these layers, in the compute dtype.
      first_layer: index in the model of the first of these layers, on which dropout masks depend.
    """
    chunks = len(microbatch.chunk_slot)
    # The last rows are computed first. The backward pass computes the parts in the opposite order,
    # so it adds up gradients in the order of the rows, whichever rows belong to a task.
    parts = _parts(microbatch, options.sharding)
    streams = [stream_of(config, part, slots, options, first_layer) for part in reversed(parts)]
    block = min(microbatch.tokens.size // chunks, microbatch.tokens.shape[1])
    attention = AttentionOptions(options.attention, block, config.sliding_window)
    layer_options = LayerOptions(
        attention, options.grouped_lora, options.sharding, options.adapter_ops, options.norm
    )

    # XLA gathers weights early, so that communication runs beside kernels. It does not know how
    # long Pallas kernels take, and would hold the weights of many layers at the same time. The
    # weights of a layer are therefore gathered only when the layer before it begins.
    gathers_ahead = options.unroll and options.sharding.fsdp > 1

    def stepper(policy: str):
        function = rematerialised(
            partial(decoder_layer, config, layer_options), policy, in_scan=not options.unroll
        )
        if options.unroll:
            # Layers differ only in their index. Under one jit, they are traced and lowered once.
            function = jax.jit(function)

        def step(carry, layer):
            xs, accumulators, behind = carry
            before = _begin_of(xs) if gathers_ahead else None
            xs, accumulators, finite = function(
                layers, adapters, streams, xs, accumulators, layer, behind
            )
            of_chunks = jnp.concatenate(finite[::-1]).reshape(chunks, -1).all(axis=1)
            return (xs, accumulators, before), of_chunks

        return step

    policies = per_layer(options.remat, config.num_layers)
    cuts = list(accumulate(part.tokens.size for part in parts))[:-1]
    xs = tuple(reversed(jnp.split(x, cuts)))
    before = _begin_of(xs) if gathers_ahead else None
    (xs, accumulators, _), finite = _for_each_layer(
        stepper, (xs, accumulators, before), policies, options.unroll
    )
    return jnp.concatenate(xs[::-1]), accumulators, finite


def finish(
    config: BackboneConfig,
    weights: Weights,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    x: Float[Array, "N d"],
    finite: Bool[Array, " chunks"],
    microbatch: Microbatch,
    options: ForwardOptions,
) -> tuple[Float[Array, "N d"], AllAdapters | None, Bool[Array, " chunks"]]:
    """Applies the final norm to the residual stream `x` after the last layer. Returns the hidden
    states; the accumulators; and `finite`, with False also for chunks whose hidden states are not
    finite. `config.num_layers` is the number of layers of `adapters`."""
    x, h = residual_norm(x, weights["norm"]["weight"], config.rms_norm_eps, options.norm)
    at_norm, accumulators = layer_adapters(
        options.adapter_ops,
        adapters,
        accumulators,
        microbatch.chunk_slot,
        config.num_layers - 1,
        (FINAL_NORM,),
    )
    h = at_norm.apply("norm_output", FINAL_NORM, x, h, eps=config.rms_norm_eps)
    return h, accumulators, finite & jnp.isfinite(h).reshape(len(finite), -1).all(axis=1)


def _for_each_layer(stepper, carry, policies: tuple[str, ...], unroll: bool):
    """Runs `stepper(policy)(carry, layer)` for all layers. Returns the last carry, and the logical
    "and" of the second results."""
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


def _begin_of(xs: Sequence[Float[Array, "n d"]]) -> list[Float[Array, "1 1"]]:
    """One number of each stream, for use as a dependency: it is known when the whole stream is."""
    return [jax.lax.stop_gradient(x[:1, :1]) for x in xs]


def _parts(microbatch: Microbatch, sharding: WeightSharding) -> list[Microbatch]:
    """The parts of a microbatch that take turns in every layer: two parts of about equal size if
    sums over devices run beside kernels, otherwise one. Neither a row nor a chunk is divided."""
    whole = math.gcd(len(microbatch.tokens), len(microbatch.chunk_slot))
    if whole == 1 or not sums_run_beside_kernels(sharding.tp):
        return [microbatch]

    def cut(leaf: Array, half: int) -> Array:
        return jnp.split(leaf, [len(leaf) * (whole // 2) // whole])[half]

    return [jax.tree.map(partial(cut, half=half), microbatch) for half in (0, 1)]


def dropout_of(
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
    first_layer: Int[Array, ""] | int = 0,
) -> Dropout | None:
    """The dropout of a microbatch; None if no task uses dropout. Arguments are as for
    `run_layers`."""
    if not options.dropout:
        return None
    ids, positions = microbatch.sample_id.reshape(-1), microbatch.positions.reshape(-1)
    return Dropout(slots.dropout_rate, slots.dropout_key, ids, positions, first_layer)


def stream_of(
    config: BackboneConfig,
    microbatch: Microbatch,
    slots: SlotTable,
    options: ForwardOptions,
    first_layer: Int[Array, ""] | int = 0,
) -> Stream:
    """The properties of a microbatch's tokens. Arguments are as for `run_layers`."""
    dropout = dropout_of(microbatch, slots, options, first_layer)
    order = IN_ORDER if options.in_order else None
    return Stream(
        *rotary_angles(config, microbatch.positions),
        segments=find_segments(microbatch.segment_ids, options.max_sequences),
        dispatch=Dispatch(Routing(microbatch.chunk_slot, slots.scale, order), dropout),
    )


def kept_bytes(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: AllAdapters,
    microbatch: Microbatch,
    slots: SlotTable,
) -> int:
    """Bytes that one decoder layer keeps from its forward to its backward pass, under a remat
    policy.

    The function traces `hidden_states` and computes nothing. It reads only shapes and dtypes, so
    arrays may be `jax.ShapeDtypeStruct`s. The gradient is that of training, with respect to the
    adapters only. The result is the difference between a model of two layers and a model of one.

    `options.remat` is one policy for all layers. Only the shape of the microbatch counts.
    """

    def residual_bytes(layers: int) -> int:
        part = dataclasses.replace(config, num_layers=layers)

        def residuals(weights, adapters, accumulators, microbatch, slots):
            def forward(accumulators):
                return hidden_states(
                    part, weights, adapters, accumulators, microbatch, slots, options
                )

            return jax.tree.leaves(jax.vjp(forward, accumulators)[1])

        # Arrays of integers have no gradients.
        trained = jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, adapters
        )
        arguments = (weights, adapters, trained, microbatch, slots)
        closed = jax.make_jaxpr(residuals)(*jax.tree.map(jax.typeof, arguments))
        variables = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
        made = variables.difference(closed.jaxpr.invars, closed.jaxpr.constvars)
        return sum(v.aval.size * v.aval.dtype.itemsize for v in made)

    return residual_bytes(2) - residual_bytes(1)
