"""The plain-XLA implementation of the grouped LoRA linear: it runs on every device and is the
reference for the others.

Every chunk belongs to one task, so the low-rank products are matrix products batched over chunks,
with each chunk's factors gathered from the slots. Values of two tasks never enter one sum.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from ..counter_dropout import Dropout, keep_mask, token_counters
from ..frozen_weight import shared_row_scales, unknown_format
from ..slot_sum import add_to_slots

# Checkpoint names by which a remat policy can keep the rank-r intermediates and the two halves of a
# gated MLP.
LOW_RANK = "low_rank"
GATE = "gate"
UP = "up"


def refusal(x, projections, routing, dropout) -> str | None:
    del x, routing, dropout
    return next(filter(None, (unknown_format(p.weight.format) for p in projections)), None)


def module_counters(
    modules: tuple[int, ...],
    routing,
    dropout: Dropout,
    layer: Int[Array, ""] | int,
    tokens: int,
) -> list[UInt32[Array, " {tokens}"]]:
    owner = _token_slots(routing, tokens)
    return [token_counters(dropout, owner, layer, module) for module in modules]


def with_residual(forward: Callable, backward: Callable) -> Callable:
    """Makes the function of an implementation, see `api.grouped_lora_linear`, with static
    `modules`. It adds the residual except on empty chunks.

    `forward` takes the other arguments. As `jax.custom_vjp` requires, it returns a pair: the
    outputs with the accumulators, and the residuals for `backward`.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def linear(modules, *arguments):
        return forward(modules, *arguments)[0]

    linear.defvjp(forward, backward)

    def grouped_lora_linear(
        modules: tuple[int, ...],
        x: Float[Array, "N k"],
        projections,
        accumulators,
        routing,
        dropout: Dropout | None,
        layer: Int[Array, ""] | int,
        residual: Float[Array, "N n"] | None,
    ):
        outputs, accumulators = linear(
            modules, x, projections, accumulators, routing, dropout, layer
        )
        if residual is not None:
            outputs = (clear_empty(residual, routing) + outputs[0],)
        return outputs, accumulators

    return grouped_lora_linear


def _forward(modules, x, projections, accumulators, routing, dropout, layer):
    scale = _gather(routing.scale, routing)[:, None, None]
    outputs, intermediates = [], []
    for module, p in zip(modules, projections, strict=True):
        dropped = _drop(x, routing, dropout, layer, module)
        a, b = _factors(p, routing, layer, x.dtype)
        s = scale * _matmul("clk,ckr->clr", _chunked(dropped, routing), a)
        s = checkpoint_name(s.astype(x.dtype), LOW_RANK)
        delta = jnp.einsum("clr,crn->cln", s, b).reshape(x.shape[0], -1)
        outputs.append(clear_empty(p.weight.matmul(x, layer=layer) + delta, routing))
        intermediates.append(s)
    residuals = (x, projections, routing, dropout, layer, tuple(intermediates))
    return (tuple(outputs), accumulators), residuals


def _backward(modules, residuals, cotangents):
    x, projections, routing, dropout, layer, intermediates = residuals
    scale = _gather(routing.scale, routing)[:, None, None]

    def add(accumulator, per_chunk):
        summed = add_to_slots(accumulator[layer], per_chunk, routing.chunk_slot)
        return accumulator.at[layer].set(summed)

    dx, next_accumulators = 0.0, []
    row_scales = shared_row_scales(cotangents[0], [p.weight for p in projections], layer)
    for module, p, s, dy, accumulators in zip(
        modules, projections, intermediates, *cotangents, strict=True
    ):
        a, b = _factors(p, routing, layer, x.dtype)
        dy_chunks = _chunked(dy, routing)
        ds = (scale * _matmul("cln,crn->clr", dy_chunks, b)).astype(x.dtype)
        dropped = _chunked(_drop(x, routing, dropout, layer, module), routing)
        da = _matmul("clk,clr->ckr", dropped, ds)
        db = _matmul("clr,cln->crn", s, dy_chunks)
        dx_lora = jnp.einsum("clr,ckr->clk", ds, a).reshape(x.shape)
        dx += p.weight.matmul_transposed(dy, layer, row_scales) + _drop(
            dx_lora, routing, dropout, layer, module
        )
        next_accumulators.append(
            accumulators._replace(a=add(accumulators.a, da), b=add(accumulators.b, db))
        )
    return clear_empty(dx, routing), None, tuple(next_accumulators), None, None, None


grouped_lora_linear_xla = with_residual(_forward, _backward)


def _gather(per_slot: Float[Array, " T *value"], routing) -> Float[Array, " chunks *value"]:
    """The value of each chunk's owner; zeros for empty chunks, so that values of a slot never reach
    padding."""
    if routing.order is not None:
        return per_slot
    owner = jnp.where(routing.chunk_slot < 0, per_slot.shape[0], routing.chunk_slot)
    return per_slot.at[owner].get(mode="fill", fill_value=0)


def _factors(
    projection, routing, layer, dtype
) -> tuple[Float[Array, "chunks k r"], Float[Array, "chunks r n"]]:
    a, b = (_gather(factor[layer].astype(dtype), routing) for factor in projection.factors)
    return a, b


def clear_empty(x: Float[Array, "N n"], routing) -> Float[Array, "N n"]:
    if routing.order is not None:
        return x
    owned = (routing.chunk_slot >= 0)[:, None, None]
    return jnp.where(owned, _chunked(x, routing), 0).reshape(x.shape)


def _chunked(x: Float[Array, "N k"], routing) -> Float[Array, "chunks C k"]:
    return x.reshape(len(routing.chunk_slot), -1, x.shape[-1])


def _token_slots(routing, tokens: int) -> Int[Array, " {tokens}"]:
    """The owner of every token; slot 0 for tokens of empty chunks."""
    return jnp.repeat(jnp.maximum(routing.chunk_slot, 0), tokens // len(routing.chunk_slot))


def _matmul(spec: str, left: Float[Array, "..."], right: Float[Array, "..."]):
    """A product whose sums and result are float32."""
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def _drop(
    x: Float[Array, "N k"], routing, dropout: Dropout | None, layer, module: int
) -> Float[Array, "N k"]:
    """`x` with dropped features set to zero; the other features are not scaled. The function is
    linear in `x` and equal to its transpose."""
    if dropout is None:
        return x
    rate = dropout.rate[_token_slots(routing, len(x))]
    (counters,) = module_counters((module,), routing, dropout, layer, len(x))
    keep = keep_mask(counters, rate, x.shape[1], dropout.first_column)
    return jnp.where(keep, x, 0)
