"""What is kept from a layer's forward pass to its backward pass, and what is computed again.

The backbone is frozen, so the backward pass needs few values: the inputs of adapted linears, the
rank-r intermediates, and what attention, norms and the gate depend on. A layer names those that
cost a matrix product; each policy lists the names that it keeps. All else is elementwise and
recomputed.
"""

from jax import checkpoint, checkpoint_policies
from jax.ad_checkpoint import checkpoint_name as keepable

from jaxmux.pallas_kernels.grouped_lora import GATE, LOW_RANK, UP
from jaxmux.pallas_kernels.short_attention import TOTALS

# Outputs of q/k/v, where the norms of heads need them; inputs of attention; its output; the stream
# between attention and MLP.
HEADS = "heads"
ATTENTION_INPUT = "attention_input"
ATTENTION_OUTPUT = "attention_output"
MIDDLE = "middle"

_PRODUCTS = (LOW_RANK, HEADS, ATTENTION_INPUT, ATTENTION_OUTPUT, TOTALS, MIDDLE, GATE, UP)

# By policy, the names of what is kept besides each layer's input; None keeps everything.
_KEPT = {
    "none": None,
    "dots": _PRODUCTS,
    "lean": tuple(name for name in _PRODUCTS if name not in (HEADS, ATTENTION_INPUT, GATE)),
    "full": (),
}
REMAT_POLICIES = tuple(_KEPT)


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


def rematerialised(layer, policy: str, *, in_scan: bool):
    """The layer function under a rematerialisation policy.

    Args:
      policy: "none" keeps every intermediate; "dots" recomputes no matrix product; "lean"
        recomputes the gate's and q/k/v's; "full" keeps each layer's input alone.
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
    "REMAT_POLICIES",
    "UP",
    "keepable",
    "per_layer",
    "rematerialised",
]
