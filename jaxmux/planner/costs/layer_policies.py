"""Chooses the layers that keep much and those that recompute, by the free memory."""

from collections.abc import Mapping, Sequence
from itertools import islice

# Part of the memory that plans may use: allocators leave gaps.
USABLE = 0.97


def keeps_attention(remat: str) -> bool:
    """Whether a remat policy keeps the output of attention."""
    return remat != "full"


def working_bytes(
    sizes: Mapping[str, float], loss_bytes: float, attention_bytes: float = 0.0
) -> float:
    """Bytes that a pass needs while it runs, besides the values that layers keep.

    While one layer goes backward, its inputs, its outputs and the gradients of all that it computed
    exist at the same time. Together they take a quarter more than the layer keeps under the policy
    that recomputes least.

    Args:
      sizes: see `fill_layers`.
      loss_bytes: bytes of one block of the loss.
      attention_bytes: bytes of attention in rows of several sequences (`PackedBytes.needed_by`).
    """
    return max(1.25 * next(iter(sizes.values())), loss_bytes, attention_bytes)


def fill_layers(sizes: Mapping[str, float], layers: int, room: float) -> tuple[str, ...]:
    """The remat policy of every layer: as many layers as there is room for get the first policy.

    The layers before them get the next policy. These go backward last, when the memory of the other
    layers is free again for their recomputation.

    Args:
      sizes: bytes that a layer keeps under each policy, from least to most recomputation, falling.
      layers: number of layers of the model.
      room: bytes for all layers. If even the last policy needs more, all layers get it.
    """
    names = list(sizes)
    for more, less in zip(names, names[1:], strict=False):
        if sizes[less] * layers <= room:
            gain = sizes[more] - sizes[less]
            count = int((room - sizes[less] * layers) // gain) if gain else layers
            return (less,) * max(0, layers - count) + (more,) * min(count, layers)
    return (names[-1],) * layers


def fill_stages(sizes: Mapping[str, float], layers: Sequence[int], room: float) -> tuple[str, ...]:
    """The remat policy of every layer of a pipeline.

    All stages are filled like the one with the most layers; a stage with fewer lacks layers of the
    policy that recomputes most.

    Args:
      sizes: see `fill_layers`.
      layers: number of layers of each stage.
      room: bytes for the layers of one stage.
    """
    fullest = fill_layers(sizes, max(layers), room)
    return tuple(policy for own in layers for policy in fullest[len(fullest) - own :])


def split_stages(policies: Sequence[str], layers: Sequence[int]) -> list[tuple[str, ...]]:
    """The policies of each stage's layers.

    Args:
      policies: the policy of every layer.
      layers: number of layers of each stage.
    """
    rest = iter(policies)
    return [tuple(islice(rest, own)) for own in layers]
