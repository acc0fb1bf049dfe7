"""The point where adapters meet the frozen backbone (MuxTune 3.2): Dispatch → BaseOp and Adapter →
Aggregate.

Every linear of the backbone that can carry an adapter runs through `adapted_linears`. Linears that
read the same input go together, so that one pass over it can serve them all.
"""

from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.grouped_lora import Projection, Routing, grouped_lora_linear

from .modules import Weights

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


class LoraFactors(NamedTuple):
    """The LoRA factors of one module, of all slots: `pallas_kernels.grouped_lora.Projection`
    without the kernel.

    At one layer a [T, k, r] and b [T, r, n]; stacked over layers [L, T, …].
    """

    a: Float[Array, "*L T k r"]
    b: Float[Array, "*L T r n"]
    grad_a: Float[Array, "*L T k r"]
    grad_b: Float[Array, "*L T r n"]


# What the adapters need to know of a stream, the same at every layer.
class Dispatch(NamedTuple):
    routing: Routing
    dropout: Dropout | None


def adapted_linears(
    x: Float[Array, "N k"],
    block: Weights,
    adapters: dict[str, LoraFactors],
    dispatch: Dispatch,
    layer: Int[Array, ""] | int,
    modules: tuple[str, ...],
) -> tuple[Float[Array, "N n"], ...]:
    """Applies the linears `modules`, which all read `x`, with whatever adapters they carry.

    Args:
      block: weights of the sub-block that holds the modules, by their last name.
      adapters: by module path; a module that no live task adapts is absent.
    """
    weights = {module: block[module.split(".")[-1]] for module in modules}
    adapted = tuple(module for module in modules if module in adapters)
    outputs = {m: x @ w["kernel"] for m, w in weights.items() if m not in adapted}
    if adapted:
        projections = tuple(Projection(weights[m]["kernel"], *adapters[m]) for m in adapted)
        ids = tuple(MODULES.index(m) for m in adapted)
        with jax.named_scope("grouped_lora"):
            results = grouped_lora_linear(
                x, projections, dispatch.routing, dispatch.dropout, layer, ids
            )
        outputs |= dict(zip(adapted, results, strict=True))
    return tuple(outputs[m] + w["bias"] if "bias" in w else outputs[m] for m, w in weights.items())
