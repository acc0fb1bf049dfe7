"""Programs for benchmarks of the grouped LoRA linear: the op forward and backward in several
layers, and the frozen linears alone in as many layers.

Every layer has its own weights and factors, so that the compiler merges no products and no operand
is still in the L2 cache when it is read. All results are outputs of the program, so that the
compiler drops none and both programs write their results to fresh memory.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import Factors, Projection, Routing, grouped_lora_linear

CHUNK_LEN = 128


class Linear(NamedTuple):
    """One linear, or several that share their input.

    Attributes:
      k: input width.
      widths: output width of each linear.
    """

    k: int
    widths: tuple[int, ...]


class Case(NamedTuple):
    """A linear and the tasks that adapt it.

    Attributes:
      linear: the linear.
      ranks: rank of each task.
      dropout: dropout rate of all tasks.
    """

    linear: Linear
    ranks: tuple[int, ...]
    dropout: float = 0.0


class Frozen(NamedTuple):
    """Inputs of the frozen linears.

    Attributes:
      x: the stream.
      weights: [L, k, n], the weights of all layers, for each projection.
      gradients: gradient of the output (dy), for each projection.
    """

    x: Float[Array, "N k"]
    weights: tuple[FrozenWeight, ...]
    gradients: tuple[Float[Array, "N n"], ...]

    @property
    def layers(self) -> int:
        """Number of layers L."""
        return self.weights[0].shape[0]


class Adapters(NamedTuple):
    """Inputs of the adapters.

    Attributes:
      factors: the factors of each projection.
      accumulators: their gradient accumulators.
      routing: owners of chunks and scales of slots.
      dropout: None for no dropout.
    """

    factors: tuple[Factors, ...]
    accumulators: tuple[Factors, ...]
    routing: Routing
    dropout: Dropout | None


def shape_name(linear: Linear, tokens: int) -> str:
    """Name of a shape for reports, for example "8192x4096x4096+1024+1024": tokens, k and widths."""
    return f"{tokens}x{linear.k}x{'+'.join(map(str, linear.widths))}"


def make_frozen(linear: Linear, tokens: int, layers: int) -> Frozen:
    """Random inputs of a linear in bfloat16."""
    keys = iter(jax.random.split(jax.random.key(0), 1 + 2 * len(linear.widths)))
    x = _normal(next(keys), (tokens, linear.k), jnp.bfloat16)
    weights = [_normal(next(keys), (layers, linear.k, n), jnp.bfloat16) for n in linear.widths]
    return Frozen(
        x,
        tuple(map(FrozenWeight.of, weights)),
        tuple(_normal(next(keys), (tokens, n), jnp.bfloat16) for n in linear.widths),
    )


def make_adapters(case: Case, tokens: int, layers: int) -> Adapters:
    """Random factors and accumulators that are zero; every task owns one span of chunks."""
    slots, rank = len(case.ranks), max(case.ranks)
    keys = iter(jax.random.split(jax.random.key(1), 2 * len(case.linear.widths)))
    # A task's rank is padded with zeros to the highest rank, as in a pool.
    live = jnp.arange(rank)[None, :] < jnp.asarray(case.ranks)[:, None]

    def factors(n: int) -> Factors:
        a = _normal(next(keys), (layers, slots, case.linear.k, rank), jnp.float32)
        b = _normal(next(keys), (layers, slots, rank, n), jnp.float32)
        return Factors(a * live[None, :, None, :], b * live[None, :, :, None])

    chunks = tokens // CHUNK_LEN
    owners = np.repeat(np.arange(slots), -(-chunks // slots))[:chunks]
    dropout = None
    if case.dropout:
        dropout = Dropout(
            jnp.full(slots, case.dropout),
            jnp.arange(slots, dtype=jnp.uint32),
            jnp.arange(tokens, dtype=jnp.uint32),
            jnp.arange(tokens, dtype=jnp.int32),
        )
    found = tuple(factors(n) for n in case.linear.widths)
    routing = Routing(jnp.asarray(owners, jnp.int32), jnp.full(slots, 2.0))
    return Adapters(found, jax.tree.map(jnp.zeros_like, found), routing, dropout)


def adapted_program(implementation: str, frozen: Frozen, adapters: Adapters) -> Callable[[], list]:
    """A function that runs the adapted linears of all layers and returns each layer's outputs and
    dx. It keeps the accumulators and passes them to its next call.

    Args:
      implementation: implementation of the op.
      frozen: streams and weights.
      adapters: factors, accumulators and owners.

    Raises:
      ValueError: the implementation cannot serve the case. The first call raises it.
    """
    accumulators = adapters.accumulators

    def call():
        nonlocal accumulators
        results, accumulators = _adapted_chain(
            implementation, frozen, adapters._replace(accumulators=()), accumulators
        )
        return results

    return call


def frozen_program(frozen: Frozen) -> Callable[[], list]:
    """A function like that of `adapted_program` for the frozen linears alone.

    Each layer's weights are a separate array here, because XLA would copy a slice of a stack.
    """
    weights = tuple(
        tuple(weight.at_layer(layer) for weight in frozen.weights) for layer in range(frozen.layers)
    )
    return lambda: _frozen_chain(frozen.x, weights, frozen.gradients)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _adapted_chain(implementation: str, frozen: Frozen, adapters: Adapters, accumulators):
    # Layers differ only in their index: under one jit they are traced and lowered once.
    layer_function = jax.jit(partial(_adapted_layer, implementation))
    results = []
    for layer in range(frozen.layers):
        outputs, dx, accumulators = layer_function(frozen, adapters, accumulators, jnp.int32(layer))
        results.append((outputs, dx))
    return results, accumulators


def _adapted_layer(implementation: str, frozen: Frozen, adapters: Adapters, accumulators, layer):
    projections = tuple(map(Projection, frozen.weights, adapters.factors))
    modules = tuple(range(len(projections)))

    def forward(x, accumulators):
        return grouped_lora_linear(
            x,
            projections,
            accumulators,
            adapters.routing,
            adapters.dropout,
            layer,
            modules,
            implementation,
        )

    (outputs, _), backward = jax.vjp(forward, frozen.x, accumulators)
    dx, accumulators = backward((frozen.gradients, accumulators))
    return outputs, dx, accumulators


@jax.jit
def _frozen_chain(x, weights, gradients):
    return [_frozen_layer(x, of_layer, gradients) for of_layer in weights]


def _frozen_layer(x, weights, gradients):
    outputs = tuple(weight.matmul(x) for weight in weights)
    products = (weight.matmul_transposed(dy) for dy, weight in zip(gradients, weights, strict=True))
    return outputs, sum(products)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape: tuple[int, ...], dtype) -> Array:
    return (0.1 * jax.random.normal(key, shape)).astype(dtype)
