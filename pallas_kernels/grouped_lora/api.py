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
      chunk_slot: int32, owner slot of each chunk, -1 for an empty chunk. All chunks have
        C = N / chunks tokens.
      scale: float32, factor of each slot's low-rank product (alpha / r). With dropout,
        implementations are given it divided by 1 - rate.
    """

    chunk_slot: Int[Array, "chunks"]
    scale: Float[Array, "T"]


class Factors(NamedTuple):
    """The two LoRA factors of one module: for all layers and slots of the pool, or for all layers
    of a single task. Gradient accumulators and optimizer moments have the same form.
    """

    a: Float[Array, "L *T k r"]
    b: Float[Array, "L *T r n"]


class Projection(NamedTuple):
    """One frozen linear and the LoRA factors of all slots.

    Attributes:
      weight: [L, k, n], the weights of all layers; no gradient is ever computed for it.
      factors: the factors of all slots, cast to the dtype of the stream where they are used. Unused
        rank columns of `a` and rows of `b` are zero.
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
) -> tuple[tuple[Float[Array, "N _"], ...], tuple[Factors, ...] | None]:
    """Applies linears that share their input, each with the LoRA of the task that owns the chunk.

    **Gradients.** The function is differentiable with respect to `x` and `residual` and, in an
    unusual sense, with respect to `accumulators`. These pass through unchanged; to the cotangent
    that arrives for them, the backward pass adds the gradients of the factors. Thread the
    accumulators through all calls of a model and start the backward pass with the accumulators of
    the microbatches so far: their cotangents are then the next accumulators. The sum is thus made
    in place, where the gradients are computed, in float32 and without a second tree of gradients;
    on CPU it is one left fold (see `slot_sum.add_to_slots`). Weights and factors get zero
    cotangents.

    Args:
      x: the stream, in the compute dtype. N is a multiple of the number of chunks.
      projections: the linears that read `x` (q/k/v together, gate/up together).
      accumulators: float32, one for each projection; None where no gradient of the factors is
        wanted.
      routing: owner slot of every chunk and scale of every slot.
      dropout: None if no live task uses dropout. Only the input of the low-rank product is dropped,
        never that of the frozen linear.
      layer: index of the layer in the stacked arrays, and in the dropout hash.
      modules: static index of each projection's module in the dropout hash.
      implementation: "mosaic_gpu" for Hopper GPUs, "triton" for Ampere, Ada and Hopper GPUs (it
        needs the extra `jaxmux[triton]`), "xla" for every device. None takes the first of them that
        can serve the call, and logs which one and why.
      residual: added to the output; allowed only with a single projection. Its gradient is
        undefined on empty chunks.

    Returns:
      One [N, n] array for each projection, in the dtype of `x` and zero on empty chunks; and the
      accumulators as they were given.

    Raises:
      ValueError: there is no such implementation, it cannot serve these arguments, or there is a
        residual for several projections.
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
        # Inverted dropout multiplies the features that it keeps by 1 / (1 - rate). All products
        # with a dropped activation are also multiplied by the task's scale, so the factor is moved
        # there and implementations only select features.
        routing = routing._replace(scale=routing.scale / (1 - dropout.rate))
    return function(modules, x, projections, accumulators, routing, dropout, layer, residual)
