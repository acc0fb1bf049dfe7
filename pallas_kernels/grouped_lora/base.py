"""The plain-XLA implementation: it runs everywhere and defines what is right.

Every chunk belongs to one task, so the low-rank products are matrix products batched over chunks,
with each chunk's factors gathered from the slots. Nothing of two tasks ever enters one sum.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..counter_dropout import Dropout, keep_mask, token_counters
from ..slot_sum import add_to_slots


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_lora_linear_xla(modules, x, projections, routing, dropout, layer):
    """See `api.grouped_lora_linear`; `modules` is static."""
    return _forward(modules, x, projections, routing, dropout, layer)[0]


def _forward(modules, x, projections, routing, dropout, layer):
    scale = _gather(routing.scale, routing.chunk_slot)[:, None, None]
    outputs, intermediates = [], []
    for module, p in zip(modules, projections, strict=True):
        dropped = _drop(x, routing, dropout, layer, module)
        a, b = _gather(p.a, routing.chunk_slot), _gather(p.b, routing.chunk_slot)
        s = scale * _matmul("clk,ckr->clr", _chunked(dropped, routing), a)
        s = s.astype(x.dtype)
        delta = jnp.einsum("clr,crn->cln", s, b)
        outputs.append(x @ p.kernel + delta.reshape(x.shape[0], -1))
        intermediates.append(s)
    return tuple(outputs), (x, projections, routing, dropout, layer, tuple(intermediates))


def _backward(modules, residuals, cotangents):
    x, projections, routing, dropout, layer, intermediates = residuals
    scale = _gather(routing.scale, routing.chunk_slot)[:, None, None]
    dx, gradients = 0.0, []
    for module, p, s, dy in zip(modules, projections, intermediates, cotangents, strict=True):
        a, b = _gather(p.a, routing.chunk_slot), _gather(p.b, routing.chunk_slot)
        dy_chunks = _chunked(dy, routing)
        ds = (scale * _matmul("cln,crn->clr", dy_chunks, b)).astype(x.dtype)
        dropped = _chunked(_drop(x, routing, dropout, layer, module), routing)
        da = _matmul("clk,clr->ckr", dropped, ds)
        db = _matmul("clr,cln->crn", s, dy_chunks)
        dx_lora = jnp.einsum("clr,ckr->clk", ds, a).reshape(x.shape)
        dx += jnp.einsum("Nn,kn->Nk", dy, p.kernel) + _drop(
            dx_lora, routing, dropout, layer, module
        )
        gradients.append(
            p._replace(
                kernel=None,
                a=None,
                b=None,
                grad_a=add_to_slots(p.grad_a, da, routing.chunk_slot),
                grad_b=add_to_slots(p.grad_b, db, routing.chunk_slot),
            )
        )
    return dx, tuple(gradients), None, None, None


grouped_lora_linear_xla.defvjp(_forward, _backward)


def _gather(per_slot: Float[Array, "T ..."], chunk_slot: Int[Array, "C"]) -> Float[Array, "C ..."]:
    """Each chunk's entry; zeros for empty chunks, so that no live slot's values reach padding."""
    owner = jnp.where(chunk_slot < 0, per_slot.shape[0], chunk_slot)
    return per_slot.at[owner].get(mode="fill", fill_value=0)


def _chunked(x: Float[Array, "N k"], routing) -> Float[Array, "C l k"]:
    return x.reshape(len(routing.chunk_slot), -1, x.shape[-1])


def _matmul(spec: str, left: Array, right: Array) -> Float[Array, "..."]:
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


def _drop(
    x: Float[Array, "N k"], routing, dropout: Dropout | None, layer, module: int
) -> Float[Array, "N k"]:
    """The task's inverted dropout of `x`. It is linear in `x` and its own transpose."""
    if dropout is None:
        return x
    owner = jnp.repeat(
        jnp.maximum(routing.chunk_slot, 0),
        x.shape[0] // len(routing.chunk_slot),
        total_repeat_length=x.shape[0],
    )
    rate = dropout.rate[owner]
    keep = keep_mask(token_counters(dropout, owner, layer, module), rate, x.shape[1])
    scaled = x.astype(jnp.float32) * (1 / (1 - rate))[:, None]
    return jnp.where(keep, scaled.astype(x.dtype), 0)
