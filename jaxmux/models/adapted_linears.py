"""The point where adapters meet the frozen backbone (MuxTune 3.2): Dispatch → BaseOp and Adapter →
Aggregate.

Every linear of the backbone that can carry an adapter runs through `adapted_linears`. Linears that
read the same input go together, so that one pass over it can serve them all.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import (
    Factors,
    Projection,
    Routing,
    gated_mlp,
    grouped_lora_linear,
)
from jaxmux.pallas_kernels.implementations import choose

from .modules import Weights
from .remat_policies import GATE, UP, checkpoint_name

# The linears that can carry an adapter, by their Hugging Face path within a layer. A module's place
# in this tuple is its identity in the dropout hash: append, never reorder.
MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


# Factors, or what is shaped like them, by module path; a module that no live task adapts is absent.
Adapters = Mapping[str, Factors]


class Dispatch(NamedTuple):
    """What the adapters need to know of a stream, the same at every layer."""

    routing: Routing
    dropout: Dropout | None


def adapted_linears(
    x: Float[Array, "N k"],
    block: Weights,
    adapters: Adapters,
    sums: Adapters | None,
    dispatch: Dispatch,
    layer: Int[Array, ""] | int,
    modules: tuple[str, ...],
    implementation: str | None,
    residual: Float[Array, "N n"] | None = None,
) -> tuple[tuple[Float[Array, "N n"], ...], Adapters | None]:
    """Applies the linears `modules`, which all read `x`, with whatever adapters they carry.

    Args:
      block: weights of the sub-block that holds the modules, by their last name, of all layers.
      adapters: of all layers and slots.
      sums: their gradient accumulators, threaded through: see `grouped_lora_linear`. None where no
        gradients are wanted.
      implementation: of the grouped LoRA linear.
      residual: added to the result of a single module.
    """
    weights = {module: block[module.split(".")[-1]] for module in modules}
    adapted = tuple(module for module in modules if module in adapters)
    outputs = {
        module: w["kernel"].at_layer(layer).matmul(x)
        for module, w in weights.items()
        if module not in adapted
    }
    if residual is not None and not adapted:
        outputs = {m: residual + y for m, y in outputs.items()}
    if adapted:
        projections = tuple(Projection(weights[m]["kernel"], adapters[m]) for m in adapted)
        with jax.named_scope("grouped_lora"):
            results, new_sums = grouped_lora_linear(
                x,
                projections,
                None if sums is None else tuple(sums[m] for m in adapted),
                dispatch.routing,
                dispatch.dropout,
                layer,
                tuple(MODULES.index(m) for m in adapted),
                implementation,
                residual,
            )
        outputs |= dict(zip(adapted, results, strict=True))
        if sums is not None:
            sums = {**sums, **dict(zip(adapted, new_sums, strict=True))}
    biased = (
        outputs[m] + w["bias"][layer] if "bias" in w else outputs[m] for m, w in weights.items()
    )
    return tuple(biased), sums


def adapted_mlp(
    x: Float[Array, "N d"],
    block: Weights,
    adapters: Adapters,
    sums: Adapters | None,
    dispatch: Dispatch,
    layer: Int[Array, ""] | int,
    implementation: str | None,
    residual: Float[Array, "N d"],
) -> tuple[Float[Array, "N d"], Adapters | None]:
    """`residual + down(silu(gate(x)) * up(x))`; the arguments are those of `adapted_linears`.

    One fused op where it can serve, else linear by linear; which and why is logged once.
    """
    modules = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

    def projections() -> tuple[Projection, ...]:
        kernels = (block[module.split(".")[-1]]["kernel"] for module in modules)
        return tuple(map(Projection, kernels, (adapters[module] for module in modules)))

    def refusal() -> str | None:
        if any("bias" in weights for weights in block.values()):
            return "a linear has a bias"
        if any(module not in adapters for module in modules):
            return "not all of its linears are adapted"
        return gated_mlp.refusal(x, projections(), dispatch.routing, dispatch.dropout)

    def fused():
        with jax.named_scope("grouped_lora"):
            out, new_sums = gated_mlp.grouped_lora_gated_mlp(
                x,
                projections(),
                tuple(sums[module] for module in modules),
                dispatch.routing,
                layer,
                residual,
            )
        return out, {**sums, **dict(zip(modules, new_sums, strict=True))}

    def linears():
        apply = partial(
            adapted_linears,
            block=block,
            adapters=adapters,
            dispatch=dispatch,
            layer=layer,
            implementation=implementation,
        )
        (gate, up), new_sums = apply(x, sums=sums, modules=modules[:2])
        h = jax.nn.silu(checkpoint_name(gate, GATE)) * checkpoint_name(up, UP)
        (out,), new_sums = apply(h, sums=new_sums, modules=modules[2:], residual=residual)
        return out, new_sums

    # The fused op is Mosaic's, and made for training.
    forced = sums is None or implementation not in (None, "mosaic_gpu")
    return choose(
        "adapted_mlp",
        {"one fused op": (fused, refusal), "single linears": (linears, lambda: None)},
        "single linears" if forced else None,
        (),
        f"gated MLP, {x.dtype} {x.shape[0]}x{x.shape[1]}",
    )()
