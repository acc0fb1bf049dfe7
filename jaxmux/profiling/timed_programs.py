"""The measured programs: the engine's own functions over inputs of a point's shape."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.engine.state.train_state import empty_state, pool_specs
from jaxmux.engine.state.updates import DueUpdates, update
from jaxmux.models import (
    MODULES,
    Backbone,
    BackboneConfig,
    TokenLosses,
    chunk_losses,
    head_kernel,
    pick_implementation,
)
from jaxmux.models.adapted_linears import Dispatch
from jaxmux.models.attention import AttentionOptions, Segments, attend, find_segments
from jaxmux.models.layer import LayerOptions, Stream, decoder_layer, rotary_angles
from jaxmux.models.remat_policies import rematerialised
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import Routing
from jaxmux.pallas_kernels.residual_norm import residual_norm
from jaxmux.peft import Layout, empty_pool
from jaxmux.planner.costs.device_profile import (
    AttentionPoint,
    HeadPoint,
    LayerPoint,
    Point,
    UpdatePoint,
)
from jaxmux.planner.packing.rows import MIN_CHUNK_LEN

# Number of sequences in a row, in programs whose rows may hold several.
_SEQUENCES = 4
_RANDOM_VALUES = 2**16 + 1
_DROPOUT_RATE = 0.1


class Program(NamedTuple):
    """A function to time, called as `state, results = function(state, inputs, constants)`.

    Attributes:
      function: a jitted function that donates `state`, so that calls can be queued without copies.
      state: arrays that the program changes in place.
      inputs: arrays that a round of the engine computes itself; their memory counts as part of the
        peak.
      constants: weights, adapters and arrays of the microbatch.
      repeats: number of times that one call executes the point's operator.
      compiled_for: a point that identifies the compiled program. Programs with equal `compiled_for`
        differ only in the values of their arguments, so they share one compiled program.
    """

    function: Callable[..., Any]
    state: Any
    inputs: Any
    constants: Any
    repeats: int
    compiled_for: Point


def make_program(backbone: Backbone, point: Point) -> Program:
    """Returns the program of a point that is measured on one device.

    Args:
      backbone: the backbone. It has as many layers as the program of a `LayerPoint` or an
        `AttentionPoint` executes.
      point: any point except a `RoundPoint` or a `CollectivePoint`.
    """
    makers = {
        LayerPoint: _layers,
        AttentionPoint: _attention,
        HeadPoint: _head,
        UpdatePoint: _update,
    }
    return makers[type(point)](backbone, point)


def _layers(backbone: Backbone, point: LayerPoint) -> Program:
    """Unrolled decoder layers, with gradients with respect to the stream and the accumulators."""
    config, dtype = backbone.config, backbone.compute_dtype
    options = LayerOptions(_attention_options(config, dtype, point), None)
    layer = jax.jit(
        rematerialised(partial(decoder_layer, config, options), point.remat, in_scan=False)
    )
    modules = MODULES if point.rank else ()
    factors = jax.eval_shape(lambda: empty_pool(config, modules, point.slots, point.rank))
    pool = {"lora": factors}
    adapters = jax.tree.map(lambda leaf: _random(leaf.shape, leaf.dtype, 0.02), pool)
    accumulators = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), pool)

    def forward(x, accumulators, weights, adapters, stream):
        for i in range(point.layers):
            (x,), accumulators, _ = layer(
                weights, adapters, (stream,), (x,), accumulators, jnp.int32(i)
            )
        return x, accumulators

    def forward_alone(state, inputs, constants):
        return state, forward(inputs[0], None, *constants)[0]

    def both(accumulators, inputs, constants):
        x, dy = inputs
        (y, _), backward = jax.vjp(lambda *args: forward(*args, *constants), x, accumulators)
        dx, accumulators = backward((dy, accumulators))
        # If y were not returned, the compiler would remove the last matrix product of each layer.
        return accumulators, (dx, y)

    return Program(
        jax.jit(both if point.backward else forward_alone, donate_argnums=0),
        accumulators if point.backward else (),
        (_random((point.tokens, config.hidden_size), dtype),) * 2,
        (backbone.weights["layers"], adapters, _stream(config, point)),
        point.layers,
        dataclasses.replace(point, tasks=0, padding=0.0),
    )


def _attention(backbone: Backbone, point: AttentionPoint) -> Program:
    """Attention of several layers; the output of each is the queries of the next."""
    config, dtype = backbone.config, backbone.compute_dtype
    options = _attention_options(config, dtype, point)
    rows = point.tokens // point.row_len

    def forward(q, k, v, segments):
        for _ in range(config.num_layers):
            q, _ = attend(q, k, v, segments, options)
        return q

    def forward_alone(state, inputs, segments):
        return state, forward(*inputs, segments)

    def both(state, inputs, segments):
        out, backward = jax.vjp(lambda *heads: forward(*heads, segments), *inputs)
        return state, (out, backward(out))

    head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    return Program(
        jax.jit(both if point.backward else forward_alone, donate_argnums=0),
        (),
        tuple(_random((rows, point.row_len, h, config.head_dim), dtype) for h in head_counts),
        _segments(point),
        config.num_layers,
        point,
    )


def _head(backbone: Backbone, point: HeadPoint) -> Program:
    """Last norm, head and loss, with their gradient with respect to the stream."""
    weights = {name: w for name, w in backbone.weights.items() if name != "layers"}
    targets = np.arange(point.tokens, dtype=np.int32) % backbone.config.vocab_size
    losses_of = TokenLosses.cross_entropy(np.full(point.tokens, 1 / point.tokens, np.float32))
    # One entry per chunk; the shortest chunks make the loss work in blocks, as in training.
    chunks = np.zeros(max(1, point.tokens // MIN_CHUNK_LEN), np.int32)

    def run(state, x, constants):
        weights, *labels = constants

        def losses(x):
            _, h = residual_norm(x, weights["norm"]["weight"], backbone.config.rms_norm_eps)
            return chunk_losses(h, head_kernel(weights), *labels)

        loss, backward = jax.vjp(losses, x)
        return state, (loss, backward(jnp.ones_like(loss)))

    return Program(
        jax.jit(run, donate_argnums=0),
        (),
        _random((point.tokens, backbone.config.hidden_size), backbone.compute_dtype),
        (weights, *jax.tree.map(jnp.asarray, (targets, losses_of, chunks))),
        1,
        point,
    )


def _update(backbone: Backbone, point: UpdatePoint) -> Program:
    """The engine's update of all slots."""
    one = empty_pool(backbone.config, MODULES, point.slots, 1)
    rank = point.parameters // sum(leaf.size for leaf in jax.tree.leaves(one))
    slots, layers = point.slots, backbone.config.num_layers
    layout = Layout(pool_specs(backbone.config, MODULES, slots, rank, point.optimizer))
    members = {point.optimizer: np.arange(slots, dtype=np.int32)}
    optimizer = OPTIMIZERS[point.optimizer]()
    hyper = {name: np.full(slots, v, np.float32) for name, v in optimizer.hyperparameters().items()}
    leaves = len(jax.tree.leaves(layout.tree.accumulators))
    rates = np.full((leaves, layers, slots), optimizer.learning_rate, np.float32)

    def run(state, inputs, constants):
        due = np.ones(slots, bool)
        return update(state, layout, DueUpdates(due, rates, {point.optimizer: hyper}, members))

    return Program(jax.jit(run, donate_argnums=0), empty_state(layout), (), (), 1, point)


def _random(shape: tuple[int, ...], dtype: jnp.dtype, deviation: float = 1.0) -> jax.Array:
    """Returns normally distributed values, because a device's clock depends on the number of bits
    that change. The values repeat one block, because the host draws them slowly."""
    block = np.random.default_rng(0).normal(0, deviation, _RANDOM_VALUES).astype(dtype)
    return jnp.asarray(np.resize(block, shape))


def _attention_options(
    config: BackboneConfig, dtype: jnp.dtype, point: LayerPoint | AttentionPoint
) -> AttentionOptions:
    implementation = pick_implementation(config, dtype, point.row_len)
    block = min(point.chunk_len, point.row_len)
    return AttentionOptions(implementation, block, config.sliding_window)


def _segments(point: LayerPoint | AttentionPoint) -> Segments:
    """Returns the segments of rows without padding."""
    sequences = min(_SEQUENCES, point.max_sequences)
    row = np.arange(point.row_len, dtype=np.int32) * sequences // point.row_len
    ids = np.tile(row, (point.tokens // point.row_len, 1))
    return jax.jit(find_segments, static_argnums=1)(ids, point.max_sequences)


def _stream(config: BackboneConfig, point: LayerPoint) -> Stream:
    """Returns a stream of rows of one sequence. The tasks own equal parts of the chunks; the
    padding chunks at the end of each row belong to no task."""
    rows, chunks = point.tokens // point.row_len, point.tokens // point.chunk_len
    positions = np.tile(np.arange(point.row_len, dtype=np.int32), (rows, 1))
    first_tokens = np.arange(chunks) * point.chunk_len % point.row_len
    is_owned = first_tokens < (1 - point.padding) * point.row_len
    owners = np.where(is_owned, (np.cumsum(is_owned) - 1) * point.tasks // is_owned.sum(), -1)
    dropout = None
    if point.dropout:
        dropout = Dropout(
            rate=np.full(point.slots, _DROPOUT_RATE, np.float32),
            key=np.arange(point.slots, dtype=np.uint32),
            sample_id=np.repeat(np.arange(rows, dtype=np.uint32), point.row_len),
            position=positions.reshape(-1),
        )
    routing = Routing(owners.astype(np.int32), np.ones(point.slots, np.float32))
    angles = jax.jit(partial(rotary_angles, config))(positions)
    return Stream(*angles, _segments(point), jax.device_put(Dispatch(routing, dropout)))
