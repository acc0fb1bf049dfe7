"""The grouped LoRA linear, forward and backward, in several layers of one program, and the frozen
linears alone in another: what the benchmarks of the op run.

Every layer has weights and factors of its own, so that nothing is merged and nothing waits in the
L2 cache. All results are outputs of the program, so that nothing is dropped and both programs write
their results to fresh memory.
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
    """One linear, or several that share their input: k to each of `widths`."""

    k: int
    widths: tuple[int, ...]


class Case(NamedTuple):
    """A linear and the tasks that adapt it: the rank of each, and their common dropout."""

    linear: Linear
    ranks: tuple[int, ...]
    dropout: float = 0.0


class Frozen(NamedTuple):
    """What a linear computes with before anything is adapted.

    Attributes:
      x: the stream.
      weights: of each projection, all layers.
      gradients: dy of each projection.
    """

    x: Float[Array, "N k"]
    weights: tuple[FrozenWeight, ...]
    gradients: tuple[Float[Array, "N n"], ...]


class Adapters(NamedTuple):
    """Factors of each projection, their accumulators, and who owns which chunk."""

    factors: tuple[Factors, ...]
    sums: tuple[Factors, ...]
    routing: Routing
    dropout: Dropout | None


def shape_name(linear: Linear, tokens: int) -> str:
    """N x k x n; the widths of several projections joined by plus signs."""
    return f"{tokens}x{linear.k}x{'+'.join(map(str, linear.widths))}"


def make_frozen(linear: Linear, tokens: int, layers: int) -> Frozen:
    keys = iter(jax.random.split(jax.random.key(0), 1 + 2 * len(linear.widths)))
    x = _normal(next(keys), (tokens, linear.k), jnp.bfloat16)
    weights = [
        _normal(next(keys), (layers, linear.k, n), jnp.bfloat16) for n in linear.widths
    ]
    return Frozen(
        x,
        tuple(map(FrozenWeight.of, weights)),
        tuple(_normal(next(keys), (tokens, n), jnp.bfloat16) for n in linear.widths),
    )


def make_adapters(case: Case, tokens: int, layers: int) -> Adapters:
    """Random factors and empty accumulators; every task owns a run of adjacent chunks."""
    slots, rank = len(case.ranks), max(case.ranks)
    keys = iter(jax.random.split(jax.random.key(1), 2 * len(case.linear.widths)))
    # True ranks below the pool's are padded with zeros, as in a pool.
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
    """A function that runs the adapted linears of all layers, giving each layer's outputs and dx.

    Raises:
      ValueError: the implementation cannot serve the case (from the first call).
    """
    sums = adapters.sums

    def call():
        nonlocal sums
        results, sums = _adapted_chain(implementation, frozen, adapters._replace(sums=()), sums)
        return results

    return call


def frozen_program(frozen: Frozen) -> Callable[[], list]:
    """The same of the linears alone.

    A layer's weights are an array of its own: XLA would copy a slice of stacked ones.
    """
    layers = range(frozen.weights[0].shape[0])
    weights = tuple(tuple(w.at_layer(layer) for w in frozen.weights) for layer in layers)
    return lambda: _frozen_chain(frozen.x, weights, frozen.gradients)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _adapted_chain(implementation: str, frozen: Frozen, adapters: Adapters, sums):
    # Layers differ in their index alone: as one function they are traced and lowered once.
    layer_function = jax.jit(partial(_adapted_layer, implementation))
    results = []
    for layer in range(frozen.weights[0].shape[0]):
        outputs, dx, sums = layer_function(frozen, adapters, sums, jnp.int32(layer))
        results.append((outputs, dx))
    return results, sums


def _adapted_layer(implementation: str, frozen: Frozen, adapters: Adapters, sums, layer):
    projections = tuple(map(Projection, frozen.weights, adapters.factors))
    modules = tuple(range(len(projections)))

    def forward(x, sums):
        return grouped_lora_linear(
            x,
            projections,
            sums,
            adapters.routing,
            adapters.dropout,
            layer,
            modules,
            implementation,
        )

    (outputs, _), backward = jax.vjp(forward, frozen.x, sums)
    dx, sums = backward((frozen.gradients, sums))
    return outputs, dx, sums


@jax.jit
def _frozen_chain(x, weights, gradients):
    return [_frozen_layer(x, of_layer, gradients) for of_layer in weights]


def _frozen_layer(x, weights, gradients):
    outputs = tuple(weight.matmul(x) for weight in weights)
    products = (
        weight.matmul_transposed(dy) for dy, weight in zip(gradients, weights, strict=True)
    )
    return outputs, sum(products)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape: tuple[int, ...], dtype) -> Array:
    return (0.1 * jax.random.normal(key, shape)).astype(dtype)
