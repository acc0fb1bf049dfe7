"""Applies the frozen linears together with their adapters (MuxTune 3.2: Dispatch, then BaseOp and
Adapter, then Aggregate).

`adapted_linears` applies every linear of the backbone that can carry an adapter. Linears with the
same input are applied in one call, so that the input is read only once.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
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

from .adapter_ops import LayerAdapters
from .architectures import MODULES
from .modules import Weights
from .remat_policies import GATE, SCALED, UP, checkpoint_name
from .weight_sharding import TP, UNDIVIDED, WeightSharding, first_column, leave

# The checkpoint names of products that a layer may keep.
_KEPT = {"mlp.gate_proj": GATE, "mlp.up_proj": UP}

# For linears whose only adapters are low-rank ones.
NO_OTHERS = LayerAdapters((), {}, 1)

# Factors, or gradient accumulators, by module path. Modules that no live task adapts are absent.
Adapters = Mapping[str, Factors]


class Dispatch(NamedTuple):
    """Owners and dropout of a stream's tokens, the same for every layer. `dropout` is None if no
    live task uses dropout."""

    routing: Routing
    dropout: Dropout | None


def adapted_linears(
    x: Float[Array, "N k"],
    block: Weights,
    adapters: Adapters,
    accumulators: Adapters | None,
    dispatch: Dispatch,
    layer: Int[Array, ""] | int,
    modules: tuple[str, ...],
    implementation: str | None,
    residual: Float[Array, "N n"] | None = None,
    sharding: WeightSharding = UNDIVIDED,
    others: LayerAdapters = NO_OTHERS,
) -> tuple[tuple[Float[Array, "N _"], ...], Adapters | None]:
    """Applies linears that all read `x`, with the adapters that they carry.

    Args:
      block: weights, in all layers, of the sub-block (attention or MLP) that holds the modules, by
        the last component of the module path.
      adapters: factors of all layers and slots.
      accumulators: gradient accumulators of the factors, which are passed through and returned (see
        `grouped_lora_linear`); None if no gradients are wanted.
      modules: paths of the linears.
      residual: added to the output; allowed only with a single module.
      others: the adapters of the layer that are not low-rank.

    Returns:
      The output of each module, in the dtype of `x`, and the accumulators. For a row-parallel
      linear, the output is this device's summand, without residual, for `joined`; it includes the
      bias only if adapters change the linear.
    """
    if len(modules) > 1 and any(m in others.scales or others.change_input(m) for m in modules):
        # The linears do not read the same input, or have different scales.
        outputs = []
        for module in modules:
            (y,), accumulators = adapted_linears(
                x,
                block,
                adapters,
                accumulators,
                dispatch,
                layer,
                modules=(module,),
                implementation=implementation,
                residual=None,
                sharding=sharding,
                others=others,
            )
            outputs.append(y)
        return tuple(outputs), accumulators
    if len(modules) == 1:
        x = others.apply("linear_input", modules[0], x)
    touched = any(map(others.touch, modules))
    divided = sharding.divided_axis(modules[0]) == "input"
    begin = first_column(x.shape[1], sharding, modules[0])
    added = residual if touched and not divided else None
    if divided or touched:
        residual = None
    weights = {module: block[module.split(".")[-1]] for module in modules}
    adapted = tuple(module for module in modules if module in adapters)
    outputs = {
        module: w["kernel"].matmul(x, layer=layer)
        for module, w in weights.items()
        if module not in adapted
    }
    if residual is not None and not adapted:
        outputs = {module: residual + y for module, y in outputs.items()}
    if adapted:
        dropout = dispatch.dropout
        if dropout is not None and divided:
            dropout = dropout._replace(first_column=begin)
        routing, further_scale = dispatch.routing, others.scales.get(modules[0])
        if further_scale is not None:
            routing = routing._replace(scale=routing.scale + further_scale)
        projections = tuple(Projection(weights[m]["kernel"], adapters[m]) for m in adapted)
        with jax.named_scope("grouped_lora"):
            results, of_adapted = grouped_lora_linear(
                x,
                projections,
                None if accumulators is None else tuple(accumulators[m] for m in adapted),
                routing,
                dropout,
                layer,
                tuple(MODULES.index(m) for m in adapted),
                implementation,
                residual,
            )
        outputs |= dict(zip(adapted, results, strict=True))
        if accumulators is not None:
            accumulators = {**accumulators, **dict(zip(adapted, of_adapted, strict=True))}
    outputs = {
        # Adapters that scale the product need the unscaled product to compute their gradients.
        m: others.apply("product", m, checkpoint_name(y, _KEPT.get(m, SCALED)))
        if others.change_product(m)
        else y
        for m, y in outputs.items()
    }
    if divided:
        outputs = {
            m: y + _bias_of_one(weights[m]["bias"][layer])
            if "bias" in weights[m] and others.touch(m)
            else y
            for m, y in outputs.items()
        }
    else:
        outputs = {
            m: outputs[m] + w["bias"][layer] if "bias" in w else outputs[m]
            for m, w in weights.items()
        }
    results = tuple(
        others.apply("linear_output", m, x, outputs[m], first_column=begin) for m in modules
    )
    return (results if added is None else (added + results[0],)), accumulators


def _bias_of_one(bias: Float[Array, " n"]) -> Float[Array, " n"]:
    """The bias on one tensor-parallel device, and 0 on the others: the devices' outputs are summed
    after the adapters."""
    return jnp.where(jax.lax.axis_index(TP) == 0, bias, 0)


def joined(
    y: Float[Array, "N d"],
    residual: Float[Array, "N d"] | None,
    bias: Float[Array, "L d"] | None,
    layer: Int[Array, ""] | int,
    sharding: WeightSharding,
) -> Float[Array, "N d"]:
    """The residual stream after attention or the MLP, from `residual`, the residual stream before,
    and `y`, the output of `adapted_linears` or `adapted_mlp`. If `residual` is None, the
    sub-block's output.

    On one tensor-parallel device the result is `y`, which already includes residual and bias.
    Otherwise the devices' summands are added up, and residual and bias are added to the sum.
    `bias`, of all layers, is None if the last linear has no bias or `y` already includes it.
    """
    if sharding.tp == 1:
        return y
    x = leave(y, sharding) if residual is None else residual + leave(y, sharding)
    return x if bias is None else x + bias[layer]


def adapted_mlp(
    x: Float[Array, "N d"],
    block: Weights,
    adapters: Adapters,
    accumulators: Adapters | None,
    dispatch: Dispatch,
    layer: Int[Array, ""] | int,
    implementation: str | None,
    residual: Float[Array, "N d"] | None,
    sharding: WeightSharding = UNDIVIDED,
    others: LayerAdapters = NO_OTHERS,
) -> tuple[Float[Array, "N d"], Adapters | None]:
    """`residual + down(silu(gate(x)) * up(x))`; the arguments are those of `adapted_linears`. If
    there are several tensor-parallel devices, each returns its summand of the product, for
    `joined`.

    The fused op computes the result if it can serve the call; otherwise each linear is computed
    separately. The choice and its reason are logged once.
    """
    modules = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    divided = sharding.tp > 1

    def projections() -> tuple[Projection, ...]:
        weights = (block[module.split(".")[-1]]["kernel"] for module in modules)
        return tuple(map(Projection, weights, (adapters[module] for module in modules)))

    def refusal() -> str | None:
        if any("bias" in weights for weights in block.values()):
            return "a linear has a bias"
        if any(module not in adapters for module in modules):
            return "not all of its linears are adapted"
        if any(map(others.touch, modules)):
            return "a linear has adapters of several kinds"
        return gated_mlp.refusal(x, projections(), dispatch.routing, dispatch.dropout)

    def fused():
        with jax.named_scope("grouped_lora"):
            out, of_modules = gated_mlp.grouped_lora_gated_mlp(
                x,
                projections(),
                tuple(accumulators[module] for module in modules),
                dispatch.routing,
                layer,
                None if divided else residual,
            )
        return out, {**accumulators, **dict(zip(modules, of_modules, strict=True))}

    def linears():
        apply = partial(
            adapted_linears,
            block=block,
            adapters=adapters,
            dispatch=dispatch,
            layer=layer,
            implementation=implementation,
            sharding=sharding,
            others=others,
        )
        (gate, up), threaded = apply(x, accumulators=accumulators, modules=modules[:2])
        # Products that adapters scale got their checkpoint names before scaling.
        gate, up = (
            y if others.change_product(module) else checkpoint_name(y, _KEPT[module])
            for module, y in zip(modules[:2], (gate, up), strict=True)
        )
        h = jax.nn.silu(gate) * up
        (out,), threaded = apply(h, accumulators=threaded, modules=modules[2:], residual=residual)
        return out, threaded

    # The fused op consists of Mosaic GPU kernels, and always computes gradients of the factors.
    only_linears = accumulators is None or implementation not in (None, "mosaic_gpu")
    return choose(
        "adapted_mlp",
        {"one fused op": (fused, refusal), "single linears": (linears, lambda: None)},
        "single linears" if only_linears else None,
        (),
        f"gated MLP, {x.dtype} {x.shape[0]}x{x.shape[1]}",
    )()
