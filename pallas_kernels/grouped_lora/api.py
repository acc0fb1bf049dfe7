"""The public function of the grouped LoRA linear, and the choice of its implementation."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from ..counter_dropout import Dropout
from ..frozen_weight import FrozenWeight
from ..implementations import Implementations, choose
from . import base, mosaic_gpu, triton

# An empty pytree, which `jit` treats as static structure.
IN_ORDER: tuple[()] = ()


class Routing(NamedTuple):
    """Which task's adapter applies to which tokens of a microbatch.

    The N tokens (the stream) are divided into *chunks* of equal length. The adapters of all tasks
    are stacked, and a task's index there is its *slot*.

    Attributes:
      chunk_slot: int32 [chunks], the slot that owns each chunk; -1 for an empty chunk.
      scale: float32 [T], factor of each slot's low-rank product (alpha / r; rsLoRA: alpha /
        sqrt(r)), without the factor 1 / (1 - rate) of dropout.
      order: `IN_ORDER` promises that chunk i belongs to slot i, for all slots. Nothing has to be
        gathered then, which saves time if chunks have few tokens.
    """

    chunk_slot: Int[Array, " chunks"]
    scale: Float[Array, " T"]
    order: tuple[()] | None = None


class Factors(NamedTuple):
    """The two LoRA factors of one linear, for all L layers and T slots (indices of tasks in the
    stacked adapters), or without the axis T for a single task.

    Gradient accumulators and optimizer moments have the same form. A description of arrays has a
    `LeafSpec` for each array.

    Attributes:
      a: [L, T, k, r] or [L, k, r], for input width k and rank r.
      b: [L, T, r, n] or [L, r, n], for output width n.
    """

    a: Float[Array, "L *T k r"]
    b: Float[Array, "L *T r n"]


class Projection(NamedTuple):
    """One frozen linear of all L layers, and its LoRA factors of all T slots (indices of tasks in
    the stacked adapters).

    Attributes:
      weight: [L, k, n], for input width k and output width n. It never gets a gradient.
      factors: a [L, T, k, r] and b [L, T, r, n]. They are cast to the dtype of the activations when
        they are used. In slots of a lower rank, the unused columns of `a` and rows of `b` are zero.
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
    """Applies linears that read the same input, and adds to each chunk of tokens the low-rank
    product of its task.

    For a token of slot t: `y = x W + scale[t] · dropout(x) A[t] B[t]`. The N tokens are divided
    into *chunks* of equal length that belong to one task each; a *slot* is a task's index in the
    stacked factors.

    **Gradients.** The function is differentiable with respect to `x` and `residual` and, in an
    unusual sense, with respect to `accumulators`, which are gradients of the factors summed over
    earlier microbatches. The forward pass returns the accumulators unchanged. The backward pass
    takes the cotangent of the accumulators, adds the gradients of the factors in this call, and
    returns the sum as their gradient. To use this, pass the accumulators through all calls of a
    model, and pass them to `jax.vjp`'s function as their own cotangents: the results are the next
    accumulators, in float32 and without a second tree of gradients. Weights and factors get zero
    cotangents.

    Args:
      x: [N, k], the activations. N is a multiple of the number of chunks.
      projections: the linears that read `x` (q/k/v together, gate/up together).
      accumulators: float32, for each projection an array for each of its factors, of the same
        shape; None if no gradient of the factors is wanted.
      dropout: rates and keys of the slots, and the sample and position of every token, from which
        the masks are computed. None if no task uses dropout. Only the input of the low-rank product
        is dropped, never that of the frozen linear.
      layer: index of the layer in the stacked arrays; dropout masks depend on it.
      modules: for each projection, a static number that identifies the linear within a layer;
        dropout masks depend on it.
      implementation: "mosaic_gpu" for Hopper GPUs, "triton" for Ampere, Ada and Hopper GPUs (it
        needs the package jax-triton), "xla" for every device. None takes the first of these
        three that can serve the call, and logs which one and why.
      residual: [N, n], added to the output; allowed only with a single projection; None adds
        nothing. It is not added on empty chunks, and its gradient there is undefined.

    Returns:
      A pair: one array [N, n] for each projection, in the dtype of `x` and zero on empty chunks;
      and the accumulators, unchanged.

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
        # with a dropped activation are also multiplied by the task's scale, so the scale includes
        # this factor and implementations only select features.
        routing = routing._replace(scale=routing.scale / (1 - dropout.rate))
    return function(modules, x, projections, accumulators, routing, dropout, layer, residual)
