"""Chooses which layers keep many values and which recompute them, by the free memory."""

from collections.abc import Mapping, Sequence
from itertools import islice

# Fraction of a device's memory that plans may use; allocators leave gaps.
USABLE = 0.97


def keeps_attention(remat: str) -> bool:
    """Whether a remat policy keeps the output of attention."""
    return remat != "full"


def working_bytes(
    sizes: Mapping[str, float], loss_bytes: float, attention_bytes: float = 0.0
) -> float:
    """Returns the bytes that a pass needs while it runs, besides the values that layers keep.

    During the backward pass of a layer, its inputs, its outputs and the gradients of all its values
    exist at the same time. Together they take a quarter more than the layer keeps under the policy
    that recomputes least.

    Args:
      sizes: for each remat policy, the bytes that a layer keeps, as in `fill_layers`.
      loss_bytes: bytes of one block of the loss.
      attention_bytes: bytes of attention in rows of several sequences (`PackedBytes.needed_by`).
    """
    return max(1.25 * next(iter(sizes.values())), loss_bytes, attention_bytes)


def exchanged_bytes(gradients: float, replicas: int) -> float:
    """Returns the bytes that a device needs while replicas exchange gradients and adapters, besides
    the train state.

    The pieces that travel are whole on every device of a stage. The first replica holds those of
    all others, and what it makes of them; another replica holds its own, and what it sums. The
    programs have temporaries of the same size.

    Args:
      gradients: bytes of the float32 gradients of all slots, for the layers of the stage, as if no
        device divided them.
      replicas: number of replicas of the training run.
    """
    return (replicas + 1) * gradients if replicas > 1 else 0.0


def fill_layers(sizes: Mapping[str, float], layers: int, room: float) -> tuple[str, ...]:
    """Chooses the remat policy of every layer, from two neighbouring policies.

    The last layers get the policy that recomputes less, as many as there is room for. The layers
    before them get the next policy. Their backward pass comes last, when the memory of the other
    layers is free again for their recomputation.

    Args:
      sizes: for each remat policy, the bytes that a layer keeps. Policies are in the order from
        least to most recomputation, so the bytes fall.
      layers: number of layers of the model.
      room: bytes for all layers. If even the last policy needs more, all layers get the last
        policy.
    """
    names = list(sizes)
    for more, less in zip(names, names[1:], strict=False):
        if sizes[less] * layers <= room:
            gain = sizes[more] - sizes[less]
            count = int((room - sizes[less] * layers) // gain) if gain else layers
            return (less,) * max(0, layers - count) + (more,) * min(count, layers)
    return (names[-1],) * layers


def fill_stages(sizes: Mapping[str, float], layers: Sequence[int], room: float) -> tuple[str, ...]:
    """Chooses the remat policy of every layer of a pipeline.

    All stages are filled like the stage with the most layers. A stage with fewer layers omits
    layers of the policy that recomputes most.

    Args:
      sizes: for each remat policy, the bytes that a layer keeps, as in `fill_layers`.
      layers: number of layers of each stage.
      room: bytes for the layers of one stage.
    """
    fullest = fill_layers(sizes, max(layers), room)
    return tuple(policy for own in layers for policy in fullest[len(fullest) - own :])


def split_stages(policies: Sequence[str], layers: Sequence[int]) -> list[tuple[str, ...]]:
    """Divides the policies of all layers among the stages.

    Args:
      policies: the policy of every layer.
      layers: number of layers of each stage.
    """
    rest = iter(policies)
    return [tuple(islice(rest, own)) for own in layers]
