"""The implementation of the grouped LoRA linear for Hopper GPUs: Pallas Mosaic GPU kernels, split
at the rank-r intermediates (LoRAFusion 5.1).

Forward: one read of x gives the intermediates s of all its projections; then the matrix product of
each projection adds its low-rank product in the accumulator. Backward: one read of each dy gives
its ds; one matrix product over all projections gives dx; one launch that reads each dy and x gives
dB and dA.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ..frozen_weight import FLOAT8, FrozenWeight, plain_weights, unknown_format
from .base import LOW_RANK, module_counters
from .column_products_sm90 import ColumnOperands, column_products
from .dropout_sm90 import Masks
from .factors_sm90 import rank_major_factors
from .float8_rows import float8_rows
from .routed_matmul_sm90 import TILE_M, Scales, Term, Tiling, routed_matmul
from .row_products_sm90 import RowOperands, row_products
from .tilings import fitted, is_hopper, matmul_tiling, multiprocessors, row_tiling
from .transposed_codes_sm90 import Tiling as TranspositionTiling
from .transposed_codes_sm90 import transposed_codes


def refusal(x, projections, routing, dropout) -> str | None:
    if not is_hopper():
        return "it needs a Hopper GPU"
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16, found {x.dtype}"
    weights = [p.weight for p in projections]
    if any(each.is_plain and each.format != str(x.dtype) for each in weights):
        return f"x is {x.dtype}, weights are stored as {', '.join(w.format for w in weights)}"
    if reasons := [r for each in weights if (r := unknown_format(each.format))]:
        return reasons[0]
    rows, chunks = x.shape[0], routing.chunk_slot.shape[0]
    if rows % (chunks * TILE_M):
        return f"chunks of {rows // chunks} tokens; expected a multiple of {TILE_M}"
    ranks = [p.factors.a.shape[-1] for p in projections]
    if len(set(ranks)) > 1 or ranks[0] % 8:
        return f"pool ranks {ranks}; expected one multiple of 8"
    terms, rank = len(projections), _padded_rank(ranks[0])
    keeps_low = dropout is not None or any(each.format == FLOAT8 for each in weights)
    if fitted(Tiling(), terms=terms, rank=rank, keeps_low=keeps_low) is None:
        return f"with dropout, pool rank {rank} times {terms} projections exceeds shared memory"
    sizes = [size for p in projections for size in p.weight.shape[1:]]
    if any(size % 256 for size in sizes):
        return f"weights of {sizes} rows and columns; expected multiples of 256"
    return None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_lora_linear_mosaic_gpu(
    modules: tuple[int, ...],
    x: Float[Array, "N k"],
    projections,
    accumulators,
    routing,
    dropout,
    layer: Int[Array, ""] | int,
    residual: Float[Array, "N n"] | None,
):
    """See `api.grouped_lora_linear`; `modules` is static."""
    return _forward(modules, x, projections, accumulators, routing, dropout, layer, residual)[0]


def _forward(modules, x, projections, accumulators, routing, dropout, layer, residual):
    masks = _masks(modules, x, routing, dropout, layer)
    factors = prepared_factors(projections, layer, x.dtype)
    rows = RowOperands(x, tuple(a for a, _ in factors), masks)
    (lows,) = low_ranks((rows,), routing)
    lows = tuple(checkpoint_name(low, LOW_RANK) for low in lows)
    lhs, weights = plain_weights(x, [p.weight for p in projections], layer, FLOAT8)
    outputs = tuple(
        matmul((Term(lhs, weight, low, b),), routing, layer, transposed=False, residual=residual)
        for weight, low, (_, b) in zip(weights, lows, factors, strict=True)
    )
    added = None if residual is None else ()
    # With rematerialisation, the backward pass prepares the factors again, once for all its
    # products.
    residuals = (x, projections, factors, routing, dropout, layer, lows, added)
    return (outputs, accumulators), residuals


def _backward(modules, residuals, cotangents):
    x, projections, factors, routing, dropout, layer, lows, added = residuals
    gradients, accumulators = cotangents
    rank = projections[0].factors.a.shape[-1]
    chunk_place = chunk_places(routing, accumulators[0], layer)

    rows = tuple(RowOperands(dy, (b,)) for dy, (_, b) in zip(gradients, factors, strict=True))
    d_lows = tuple(d_low for (d_low,) in low_ranks(rows, routing))
    masks = _masks(modules, x, routing, dropout, layer)
    first, weights = plain_weights(gradients[0], [p.weight for p in projections], layer, FLOAT8)
    dx = matmul(
        tuple(
            Term(dy, weight, d_low, a)
            for dy, weight, d_low, (a, _) in zip(
                (first, *gradients[1:]), weights, d_lows, factors, strict=True
            )
        ),
        routing,
        layer,
        transposed=True,
        masks=masks,
    )
    # One launch has all products, because those of a single narrow array do not fill the GPU.
    for_b = tuple(
        ColumnOperands(dy, (low[:rank],), (each.b,), rank_major=True)
        for dy, low, each in zip(gradients, lows, accumulators, strict=True)
    )
    layers = len(accumulators[0].a)
    for_a = ColumnOperands(
        x,
        tuple(d_low[:rank] for d_low in d_lows),
        tuple(each.a for each in accumulators),
        rank_major=False,
        masks=masks and masks._replace(rate=jnp.tile(masks.rate, layers)),
    )
    *new_b, new_a = column_products((*for_b, for_a), chunk_place)
    new = tuple(
        each._replace(a=a, b=b) for each, a, (b,) in zip(accumulators, new_a, new_b, strict=True)
    )
    return dx, None, new, None, None, None, None if added is None else gradients[0]


grouped_lora_linear_mosaic_gpu.defvjp(_forward, _backward)


def _masks(modules, x, routing, dropout, layer) -> Masks | None:
    if dropout is None:
        return None
    counters = module_counters(modules, routing, dropout, layer, len(x))
    return Masks(tuple(counters), dropout.rate, dropout.first_column)


def matmul(
    terms: tuple[Term, ...],
    routing,
    layer: Int[Array, ""] | int,
    *,
    transposed: bool,
    residual: Float[Array, "N M"] | None = None,
    masks: Masks | None = None,
) -> Float[Array, "N M"]:
    """`routed_matmul` with the tiling for its shape and device. If weights are in float8, the left
    operands are encoded too."""
    weights, scales = [term.weight for term in terms], None
    is_float8 = weights[0].format == FLOAT8
    index = weights[0].stack_index(layer)
    tiling = matmul_tiling(
        weights[0].shape[1],
        tuple(weight.shape[2] for weight in weights),
        terms[0].low.shape[0],
        transposed=transposed,
        keeps_low=masks is not None or is_float8,
    )
    if is_float8:
        terms, scales = _float8_terms(terms, layer, transposed)
        index = 0 if transposed else index
    return routed_matmul(
        terms,
        routing.chunk_slot,
        jnp.asarray(index),
        transposed=transposed,
        tiling=tiling,
        blocks=multiprocessors(),
        residual=residual,
        masks=masks,
        scales=scales,
    )


def _float8_terms(
    terms: tuple[Term, ...], layer: Int[Array, ""] | int, transposed: bool
) -> tuple[tuple[Term, ...], Scales]:
    """The terms with left operands in float8, and the scales of their sum."""
    if not transposed:
        (term,) = terms
        (lhs,), rows = float8_rows((term.lhs,))
        return (term._replace(lhs=lhs),), Scales(rows, term.weight.scales)
    # In products in float8 the contraction must be the last axis, so the layer is transposed.
    operands = [(term.lhs, term.weight) for term in terms]
    lhs, stacks = zip(*jax.lax.optimization_barrier(operands), strict=True)
    lhs, rows = float8_rows(lhs, [stack.at_layer(layer).scales for stack in stacks])
    turned = (_transposed_layer(stack, layer) for stack in stacks)
    terms = (t._replace(lhs=x, weight=w) for t, x, w in zip(terms, lhs, turned, strict=True))
    return tuple(terms), Scales(rows, None)


def _transposed_layer(stack: FrozenWeight, layer: Int[Array, ""] | int) -> FrozenWeight:
    """W^T of a layer of a stack in float8, as a stack of one layer without scales."""
    # Two thread blocks share a multiprocessor, so that one stores while the other computes.
    tiling = TranspositionTiling(stages=4, blocks=2 * multiprocessors())
    index = jnp.asarray(stack.stack_index(layer))
    return FrozenWeight(transposed_codes(stack.values, index, tiling=tiling)[None], None, FLOAT8)


def _padded_rank(rank: int) -> int:
    """The lowest rank of at least `rank` that the kernels' tiles divide."""
    return -(-rank // 16) * 16 if rank <= 64 else -(-rank // 64) * 64


def chunk_places(routing, accumulators, layer: Int[Array, ""] | int) -> Int[Array, " chunks"]:
    """The index of each chunk's owner in accumulators [L, T, …] whose first two axes are merged; -1
    for an empty chunk."""
    slots = accumulators.a.shape[1]
    return jnp.where(routing.chunk_slot < 0, -1, layer * slots + routing.chunk_slot)


def prepared_factors(
    projections, layer: Int[Array, ""] | int, dtype
) -> tuple[tuple[Float[Array, "T R _"], Float[Array, "T R _"]], ...]:
    """`rank_major_factors` of all projections, padded to a rank R that the kernels support."""
    return rank_major_factors(
        tuple(p.factors for p in projections),
        layer,
        rank=_padded_rank(projections[0].factors.a.shape[-1]),
        dtype=dtype,
    )


def low_ranks(
    groups: tuple[RowOperands, ...], routing
) -> tuple[tuple[Float[Array, "_ N"], ...], ...]:
    return row_products(groups, routing.chunk_slot, routing.scale, tiling=row_tiling(*groups))
