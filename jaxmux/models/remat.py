"""What is kept from a layer's forward pass to its backward pass, and what is computed again.

The backbone is frozen, so the backward pass needs few values: the inputs of adapted linears, the
rank-r intermediates, and what attention, norms and the gate depend on. A layer names those that
cost a matrix product; each policy lists the names that it keeps. All else is elementwise and
recomputed.
"""

from jax import checkpoint, checkpoint_policies
from jax.ad_checkpoint import checkpoint_name as keepable

from jaxmux.pallas_kernels.grouped_lora import GATE, LOW_RANK, UP

# Outputs of q/k/v, where the norms of heads need them; inputs of attention; its output; the stream
# between attention and MLP.
HEADS = "heads"
ATTENTION_INPUT = "attention_input"
ATTENTION_OUTPUT = "attention_output"
MIDDLE = "middle"

_PRODUCTS = (LOW_RANK, HEADS, ATTENTION_INPUT, ATTENTION_OUTPUT, MIDDLE, GATE, UP)

# By policy, the names of what is kept besides each layer's input; None keeps everything.
_KEPT = {
    "none": None,
    "dots": _PRODUCTS,
    "lean": tuple(name for name in _PRODUCTS if name not in (HEADS, ATTENTION_INPUT, GATE)),
    "full": (),
}
REMAT_POLICIES = tuple(_KEPT)


def rematerialised(layer, remat: str, *, in_scan: bool):
    """The layer function under a rematerialisation policy.

    Args:
      remat: "none" keeps every intermediate; "dots" recomputes no matrix product; "lean"
        recomputes the gate's and q/k/v's; "full" keeps each layer's input alone.
      in_scan: a scan already keeps the compiler from merging the recomputation with the forward
        pass.

    Raises:
      ValueError: no such policy.
    """
    if remat not in _KEPT:
        raise ValueError(f"unknown remat policy {remat!r}; known: {', '.join(_KEPT)}")
    names = _KEPT[remat]
    if names is None:
        return layer
    named = checkpoint_policies.save_only_these_names(*names)

    def policy(primitive, *args, **params) -> bool:
        # cuDNN's statistics carry no name of ours.
        fused_attention = primitive.name.startswith("dot_product_attention")
        return (fused_attention and ATTENTION_OUTPUT in names) or named(primitive, *args, **params)

    return checkpoint(layer, policy=policy, prevent_cse=not in_scan)


__all__ = [
    "ATTENTION_INPUT",
    "ATTENTION_OUTPUT",
    "GATE",
    "HEADS",
    "MIDDLE",
    "REMAT_POLICIES",
    "UP",
    "keepable",
    "rematerialised",
]
