"""The public function of the grouped LoRA linear, and the choice of its implementation."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from ..counter_dropout import Dropout
from ..frozen_weight import FrozenWeight
from ..implementations import Implementations, choose
from . import base, mosaic_gpu, triton


class Routing(NamedTuple):
    """Which slot owns which chunk of the stream.

    Attributes:
      chunk_slot: int32 [C], owner slot of each chunk of N / C tokens, -1 for an empty chunk.
      scale: float32 [T], factor of each slot's low-rank product (alpha / r). Implementations get
        it over 1 - rate where there is dropout.
    """

    chunk_slot: Int[Array, "C"]
    scale: Float[Array, "T"]


class Factors(NamedTuple):
    """The two LoRA factors of one module: of all layers and slots in a pool, of all layers for a
    single task. Also what is shaped like them: gradient accumulators, moments.
    """

    a: Float[Array, "L *T k r"]
    b: Float[Array, "L *T r n"]


class Projection(NamedTuple):
    """One frozen linear and the LoRA factors of all slots.

    Attributes:
      weight: [L, k, n], of all layers; no gradient is ever computed for it.
      factors: of all slots; cast to the dtype of the stream where they are used. Unused rank
        columns of a and rows of b are zero.
    """

    weight: FrozenWeight
    factors: Factors


_IMPLEMENTATIONS: Implementations = {
    "mosaic_gpu": (mosaic_gpu.grouped_lora_linear_mosaic_gpu, mosaic_gpu.refusal),
    "triton": (triton.grouped_lora_linear_triton, triton.refusal),
    "xla": (base.grouped_lora_linear_xla, base.refusal),
}
IMPLEMENTATIONS = tuple(_IMPLEMENTATIONS)


def grouped_lora_linear(
    x: Float[Array, "N k"],
    projections: tuple[Projection, ...],
    accumulators: tuple[Factors, ...] | None,
    routing: Routing,
    dropout: Dropout | None,
    layer: Int[Array, ""] | int,
    modules: tuple[int, ...],
    implementation: str | None = None,
    residual: Float[Array, "N n"] | None = None,
) -> tuple[tuple[Float[Array, "N n"], ...], tuple[Factors, ...] | None]:
    """Applies several linears that share their input, each with the LoRA of the task that owns the
    chunk.

    **Gradients.** The function is differentiable in `x` and, in an unusual sense, in
    `accumulators`. They pass through unchanged, but their cotangents do not: to whatever cotangent
    arrives for them, the backward pass adds this stream's gradients of the factors. Thread them
    through all calls of a model and start its backward pass with the accumulators of the
    microbatches so far: what comes out are the next accumulators. The sum then happens in place,
    where the gradients are made, in float32, with no second gradient tree, and on CPU as one left
    fold (see `slot_sum.add_to_slots`). Weights and factors get zero cotangents.

    Args:
      x: the stream, in the compute dtype. N is a multiple of the number of chunks.
      projections: the linears that read `x` (q/k/v together, gate/up together).
      accumulators: float32, one for each projection; None where no gradient of the factors is
        wanted.
      routing: owner slot of every chunk and scale of every slot.
      dropout: None when no live task drops anything; the LoRA branch alone is dropped, never the
        frozen one.
      layer: index of the layer in the stacked arrays, and for the dropout hash.
      modules: static index of each projection's module, for the dropout hash.
      implementation: "mosaic_gpu" on Hopper GPUs, "triton" on these and the two generations before
        (with the extra `jaxmux[triton]`), "xla" anywhere. None picks the first of them that can
        serve the call, and logs which and why.
      residual: added to the result; only with a single projection. On empty chunks its gradient is
        not defined.

    Returns:
      One [N, n] array per projection, in the dtype of `x`, zero on empty chunks; and the
      accumulators as they were given.

    Raises:
      ValueError: no such implementation, or it cannot serve these arguments.
    """
    if residual is not None and len(projections) > 1:
        raise ValueError(f"grouped_lora_linear: one residual for {len(projections)} projections")
    sizes = ", ".join(str(p.weight.output_size) for p in projections)
    function = choose(
        "grouped_lora_linear",
        _IMPLEMENTATIONS,
        implementation,
        (x, projections, routing, dropout),
        f"grouped LoRA linear, {x.dtype} {x.shape[0]}x{x.shape[1]} to {sizes}",
    )
    if dropout is not None:
        # Inverted dropout scales what it keeps. Both of a task's products with a dropped activation
        # have its scale as a factor, so implementations only select.
        routing = routing._replace(scale=routing.scale / (1 - dropout.rate))
    return function(modules, x, projections, accumulators, routing, dropout, layer, residual)
