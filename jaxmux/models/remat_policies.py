"""What is kept from a layer's forward pass to its backward pass, and what is computed again.

The backbone is frozen, so the backward pass needs few values: the inputs of adapted linears, the
rank-r intermediates, and what attention, norms and the gate depend on. A layer names those that
cost a matrix product or a pass over memory; each policy lists the names that it keeps. All else is
elementwise, part of a kernel's work anyway, and recomputed.
"""

from jax import checkpoint, checkpoint_policies
from jax.ad_checkpoint import checkpoint_name as checkpoint_name

from jaxmux.pallas_kernels.grouped_lora import GATE, LOW_RANK, UP
from jaxmux.pallas_kernels.short_attention import TOTALS

# Norms of the stream; outputs of q/k/v, where the norms of heads need them; inputs of attention;
# its output; the stream between attention and MLP.
NORMED = "normed"
HEADS = "heads"
ATTENTION_INPUT = "attention_input"
ATTENTION_OUTPUT = "attention_output"
MIDDLE = "middle"

_PRODUCTS = (LOW_RANK, HEADS, ATTENTION_INPUT, ATTENTION_OUTPUT, TOTALS, MIDDLE, GATE, UP)

# By policy, the names of what is kept besides each layer's input; None keeps everything.
_KEPT = {
    "none": None,
    "norms": (NORMED, *_PRODUCTS),
    "dots": _PRODUCTS,
    "lean": tuple(name for name in _PRODUCTS if name not in (GATE, UP)),
    "full": (),
}
REMAT_POLICIES = tuple(_KEPT)
# Those whose memory can be counted, from least to most recomputation.
NAMED_POLICIES = REMAT_POLICIES[1:]


def per_layer(remat: str | tuple[str, ...], layers: int) -> tuple[str, ...]:
    """The policy of every layer.

    Raises:
      ValueError: no such policy, or not one for each layer.
    """
    policies = (remat,) * layers if isinstance(remat, str) else remat
    if len(policies) != layers:
        raise ValueError(f"{len(policies)} remat policies for {layers} layers")
    for policy in policies:
        if policy not in _KEPT:
            raise ValueError(f"unknown remat policy {policy!r}; known: {', '.join(_KEPT)}")
    return policies


def planned_remat(remat: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """The policies by whose time and memory a run under `remat` is planned: what "none" keeps
    depends on the implementation, but hardly differs from "norms"."""
    return "norms" if remat == "none" else remat


def rematerialised(layer, policy: str, *, in_scan: bool):
    """The layer function under a rematerialisation policy.

    Args:
      policy: "none" keeps every intermediate; "norms" recomputes neither norms nor matrix products;
        "dots" no matrix product; "lean" those of gate and up, which save most bytes for their time;
        "full" keeps each layer's input alone.
      in_scan: a scan already keeps the compiler from merging the recomputation with the forward
        pass.
    """
    names = _KEPT[policy]
    if names is None:
        return layer
    named = checkpoint_policies.save_only_these_names(*names)

    def keeps(primitive, *args, **params) -> bool:
        # cuDNN's statistics carry no name of ours.
        fused_attention = primitive.name.startswith("dot_product_attention")
        return (fused_attention and ATTENTION_OUTPUT in names) or named(primitive, *args, **params)

    return checkpoint(layer, policy=keeps, prevent_cse=not in_scan)


__all__ = [
    "ATTENTION_INPUT",
    "ATTENTION_OUTPUT",
    "GATE",
    "HEADS",
    "MIDDLE",
    "NAMED_POLICIES",
    "NORMED",
    "REMAT_POLICIES",
    "UP",
    "checkpoint_name",
    "per_layer",
    "planned_remat",
    "rematerialised",
]
