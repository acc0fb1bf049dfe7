"""Remat policies: the values that a layer keeps from its forward pass to its backward pass, which
recomputes all other values.

The backbone is frozen, so the backward pass needs few values: the inputs of adapted linears, the
rank-r intermediates, and the values on which the gradients of attention, norms and the gate depend.
Some of these values take a matrix product or a pass over memory to recompute. A layer gives these
values checkpoint names, and each policy lists the names that it keeps. The remaining values are
elementwise, and kernels recompute them at little cost.
"""

from jax import checkpoint, checkpoint_policies
from jax.ad_checkpoint import checkpoint_name as checkpoint_name

from jaxmux.pallas_kernels.grouped_lora import GATE, LOW_RANK, UP
from jaxmux.pallas_kernels.short_attention import TOTALS

# Checkpoint names of: norms of the stream; outputs of q/k/v, if norms of heads read them; inputs of
# attention; output of attention; the stream between attention and MLP.
NORMED = "normed"
HEADS = "heads"
ATTENTION_INPUT = "attention_input"
ATTENTION_OUTPUT = "attention_output"
MIDDLE = "middle"
# Products of linears, other than gate and up, that an adapter scales.
SCALED = "scaled"
# Outputs of sub-blocks that an adapter reads.
BLOCK_OUTPUT = "block_output"

_PRODUCTS = (
    *(LOW_RANK, SCALED, HEADS, ATTENTION_INPUT, ATTENTION_OUTPUT, TOTALS),
    *(BLOCK_OUTPUT, MIDDLE, GATE, UP),
)

# For each policy, the checkpoint names that are kept besides each layer's input; None keeps all
# values.
_KEPT = {
    "none": None,
    "norms": (NORMED, *_PRODUCTS),
    "dots": _PRODUCTS,
    "lean": tuple(name for name in _PRODUCTS if name not in (GATE, UP)),
    "full": (),
}
REMAT_POLICIES = tuple(_KEPT)
# The policies whose memory can be counted, from least to most recomputation.
NAMED_POLICIES = REMAT_POLICIES[1:]


def leaner(policies: tuple[str, ...]) -> tuple[str, ...] | None:
    """The next policies that need less memory: layers with the policy that recomputes least get the
    next policy. None if all layers already recompute everything. `policies` has the remat policy of
    every layer."""
    least = min(policies, key=REMAT_POLICIES.index)
    if least == REMAT_POLICIES[-1]:
        return None
    after = REMAT_POLICIES[REMAT_POLICIES.index(least) + 1]
    return tuple(after if policy == least else policy for policy in policies)


def per_layer(remat: str | tuple[str, ...], layers: int) -> tuple[str, ...]:
    """The remat policy of every layer, from one policy for all layers or one for each. Raises
    ValueError if a policy is unknown, or if their number is not the number of layers."""
    policies = (remat,) * layers if isinstance(remat, str) else remat
    if len(policies) != layers:
        raise ValueError(f"{len(policies)} remat policies for {layers} layers")
    for policy in policies:
        if policy not in _KEPT:
            raise ValueError(f"unknown remat policy {policy!r}; known: {', '.join(_KEPT)}")
    return policies


def planned_remat(remat: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The remat policy for which the planner has costs, instead of the policy that is used. Costs
    are known for all policies except "none", whose time and memory are close to those of "norms";
    for "none", the result is "norms". Every other value is returned unchanged: "auto", which leaves
    the choice to the memory model, and a tuple with one policy for each layer, in which the engine
    does not use "none"."""
    return "norms" if remat == "none" else remat


def rematerialised(layer, policy: str, *, in_scan: bool):
    """The layer function under a remat policy, as in `ForwardOptions.remat`. Outside a scan, the
    compiler must be kept from merging the recomputation with the forward pass."""
    names = _KEPT[policy]
    if names is None:
        return layer
    named = checkpoint_policies.save_only_these_names(*names)

    def keeps(primitive, *args, **params) -> bool:
        # cuDNN's statistics cannot get a checkpoint name.
        fused_attention = primitive.name.startswith("dot_product_attention")
        return (fused_attention and ATTENTION_OUTPUT in names) or named(primitive, *args, **params)

    return checkpoint(layer, policy=keeps, prevent_cse=not in_scan)
