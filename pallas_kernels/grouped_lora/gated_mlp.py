"""A gated MLP with the LoRA of every task, on Hopper GPUs: `down(silu(gate(x)) * up(x))`.

This uses the kernels of `mosaic_gpu` for each linear, except that one kernel computes the
activation, or its gradient, together with the low-rank products that read it. Each of the wide
arrays between the linears is thus read once in each direction.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from ..frozen_weight import FLOAT8, plain_weights
from . import mosaic_gpu
from .base import GATE, LOW_RANK, UP
from .column_products_sm90 import ColumnOperands, column_products
from .gated_backward_sm90 import gated_backward
from .gated_forward_sm90 import gated_forward
from .gated_tiles_sm90 import GATED_RANKS
from .mosaic_gpu import chunk_places, low_ranks, matmul, prepared_factors
from .routed_matmul_sm90 import Term
from .row_products_sm90 import RowOperands


def refusal(x, projections, routing, dropout) -> str | None:
    gate, _, down = projections
    if dropout is not None:
        return "it has no dropout"
    rank = gate.factors.a.shape[-1]
    if rank not in GATED_RANKS:
        return f"pool rank {rank}; expected one of {GATED_RANKS}"
    wide = jax.ShapeDtypeStruct((x.shape[0], down.weight.input_size), x.dtype)
    return mosaic_gpu.refusal(x, projections[:2], routing, dropout) or mosaic_gpu.refusal(
        wide, (down,), routing, dropout
    )


@jax.custom_vjp
def grouped_lora_gated_mlp(
    x: Float[Array, "N d"],
    projections,
    accumulators,
    routing,
    layer: Int[Array, ""] | int,
    residual: Float[Array, "N d"] | None,
):
    """`residual + down(silu(gate(x)) * up(x))`, each linear with the LoRA of the chunk's task.

    The function is differentiable like `api.grouped_lora_linear`.

    Args:
      x: the stream, half precision.
      projections: three `api.Projection`s: gate, up and down.
      accumulators: three `api.Factors`, the gradient accumulators of the projections.
      residual: added to the output; None adds nothing.

    Returns:
      The output [N, d], zero on empty chunks, and the accumulators, unchanged.
    """
    return _forward(x, projections, accumulators, routing, layer, residual)[0]


def _forward(x, projections, accumulators, routing, layer, residual):
    gate, up, down = projections
    factors = prepared_factors(projections, layer, x.dtype)
    (a_gate, b_gate), (a_up, b_up), (a_down, b_down) = factors
    kept = partial(checkpoint_name, name=LOW_RANK)

    (lows,) = low_ranks((RowOperands(x, (a_gate, a_up)),), routing)
    s_gate, s_up = map(kept, lows)
    product = partial(matmul, routing=routing, layer=layer, transposed=False)
    lhs, (w_gate,) = plain_weights(x, [gate.weight], layer, FLOAT8)
    g = checkpoint_name(product((Term(lhs, w_gate, s_gate, b_gate),)), GATE)
    lhs, (w_up,) = plain_weights(x, [up.weight], layer, FLOAT8)
    u = checkpoint_name(product((Term(lhs, w_up, s_up, b_up),)), UP)
    h, partial_sums = gated_forward(g, u, a_down, routing.chunk_slot)
    (s_down,) = map(kept, _low_ranks(partial_sums[None], routing, x.dtype))
    lhs, (w_down,) = plain_weights(h, [down.weight], layer, FLOAT8)
    out = product((Term(lhs, w_down, s_down, b_down),), residual=residual)
    added = None if residual is None else ()
    residuals = (x, projections, factors, routing, layer, g, u, (s_gate, s_up, s_down), added)
    return (out, accumulators), residuals


def _backward(residuals, cotangents):
    x, (gate, up, down), factors, routing, layer, g, u, lows, added = residuals
    s_gate, s_up, s_down = lows
    d_out, (of_gate, of_up, of_down) = cotangents
    (a_gate, b_gate), (a_up, b_up), (a_down, b_down) = factors
    chunk_place = chunk_places(routing, of_gate, layer)
    product = partial(matmul, routing=routing, layer=layer, transposed=True)

    ((ds_down,),) = low_ranks((RowOperands(d_out, (b_down,)),), routing)
    lhs, (w_down,) = plain_weights(d_out, [down.weight], layer, FLOAT8)
    dh = product((Term(lhs, w_down, ds_down, a_down),))

    (dg, du), partial_sums, (new_b_gate, new_b_up, new_a_down) = gated_backward(
        g,
        u,
        dh,
        (b_gate, b_up),
        (s_gate, s_up, ds_down),
        (of_gate.b, of_up.b, of_down.a),
        routing.chunk_slot,
        chunk_place,
    )
    ds_gate, ds_up = _low_ranks(partial_sums, routing, x.dtype)
    lhs, (w_gate, w_up) = plain_weights(dg, [gate.weight, up.weight], layer, FLOAT8)
    dx = product((Term(lhs, w_gate, ds_gate, a_gate), Term(du, w_up, ds_up, a_up)))
    groups = (
        ColumnOperands(d_out, (s_down,), (of_down.b,), rank_major=True),
        ColumnOperands(x, (ds_gate, ds_up), (of_gate.a, of_up.a), rank_major=False),
    )
    (new_b_down,), (new_a_gate, new_a_up) = column_products(groups, chunk_place)

    new_accumulators = (
        old._replace(a=a, b=b)
        for old, a, b in (
            (of_gate, new_a_gate, new_b_gate),
            (of_up, new_a_up, new_b_up),
            (of_down, new_a_down, new_b_down),
        )
    )
    return dx, None, tuple(new_accumulators), None, None, None if added is None else d_out


grouped_lora_gated_mlp.defvjp(_forward, _backward)


def _low_ranks(
    partial_sums: Float[Array, "m splits r N"], routing, dtype
) -> tuple[Float[Array, "r N"], ...]:
    """Rank-r intermediates from their partial sums, scaled by the owner's factor."""
    slot = routing.chunk_slot
    scale = jnp.where(slot < 0, 0, routing.scale[slot])
    per_token = jnp.broadcast_to(scale[:, None], (len(slot), partial_sums.shape[3] // len(slot)))
    # One reduction of the stacked arrays is one launch; XLA does not merge separate reductions.
    sums = partial_sums.sum(axis=1, dtype=jnp.float32)
    return tuple((s * per_token.reshape(-1)).astype(dtype) for s in sums)
