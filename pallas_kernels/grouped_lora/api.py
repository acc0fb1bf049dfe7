"""The public function of the grouped LoRA linear, and the choice of its implementation."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from ..counter_dropout import Dropout
from . import base


class Routing(NamedTuple):
    """Which slot owns which chunk of the stream.

    Attributes:
      chunk_slot: int32 [C], owner slot of each chunk of N / C tokens, -1 for an empty chunk.
      scale: float32 [T], factor of each slot's low-rank product (alpha / r).
    """

    chunk_slot: Int[Array, "C"]
    scale: Float[Array, "T"]


class Projection(NamedTuple):
    """One frozen linear and the stacked LoRA factors of all slots, at one layer.

    Attributes:
      kernel: [k, n], frozen; no gradient is ever computed for it.
      a: [T, k, r], down-projections in the compute dtype. Unused rank columns are zero.
      b: [T, r, n], up-projections in the compute dtype.
      grad_a: float32 [T, k, r], gradient accumulator of `a`.
      grad_b: float32 [T, r, n], gradient accumulator of `b`.
    """

    kernel: Float[Array, "k n"]
    a: Float[Array, "T k r"]
    b: Float[Array, "T r n"]
    grad_a: Float[Array, "T k r"]
    grad_b: Float[Array, "T r n"]


_IMPLEMENTATIONS = {"xla": base.grouped_lora_linear_xla}


def grouped_lora_linear(
    x: Float[Array, "N k"],
    projections: tuple[Projection, ...],
    routing: Routing,
    dropout: Dropout | None,
    layer: Int[Array, ""] | int,
    modules: tuple[int, ...],
    implementation: str = "xla",
) -> tuple[Float[Array, "N n"], ...]:
    """Applies several linears that share their input, each with the LoRA of the task that owns the
    chunk.

    **Gradients.** The function is differentiable in `x` and, in an unusual sense, in `grad_a` and
    `grad_b`: the cotangent it returns for an accumulator is the accumulator *plus* this stream's
    gradient of the factor. So `jax.grad(loss, argnums=accumulators)` yields the next accumulators.
    The sum over microbatches then happens where the chunk gradients are made, in float32, with no
    second gradient tree, and as one left fold on CPU (see `slot_sum.add_to_slots`). `kernel`, `a`
    and `b` get zero cotangents.

    Args:
      x: the stream, in the compute dtype. N is a multiple of the number of chunks.
      projections: the linears that read `x` (q/k/v together, gate/up together).
      routing: owner slot of every chunk and scale of every slot.
      dropout: None when no live task drops anything; the LoRA branch alone is dropped, never the
        frozen one.
      layer: index of the layer, for the dropout hash.
      modules: static index of each projection's module, for the dropout hash.
      implementation: "xla".

    Returns:
      One [N, n] array per projection, in the dtype of `x`. An empty chunk gets the frozen product
      alone.

    Raises:
      ValueError: no such implementation.
    """
    if implementation not in _IMPLEMENTATIONS:
        known = ", ".join(_IMPLEMENTATIONS)
        raise ValueError(
            f"unknown implementation {implementation!r} of grouped_lora_linear; known: {known}"
        )
    return _IMPLEMENTATIONS[implementation](modules, x, projections, routing, dropout, layer)
