"""Which layers keep much and which recompute, in the memory that there is."""

from collections.abc import Mapping, Sequence
from itertools import islice

# Part of the memory that plans may use: allocators leave gaps.
USABLE = 0.97


def keeps_attention(remat: str) -> bool:
    """Whether a policy keeps what attention made."""
    return remat != "full"


def working_bytes(
    sizes: Mapping[str, float], loss_bytes: float, attention_bytes: float = 0.0
) -> float:
    """What a pass needs while it runs, besides what layers keep.

    While one layer goes backward, the gradients of what it computed are there too, as is what goes
    in and out of it: a quarter more than the layer keeps if it recomputes least.

    Args:
      sizes: see `fill_layers`.
      loss_bytes: of one block of the loss.
      attention_bytes: of attention in rows of several sequences, see `PackedBytes.needed_by`.
    """
    return max(1.25 * next(iter(sizes.values())), loss_bytes, attention_bytes)


def fill_layers(sizes: Mapping[str, float], layers: int, room: float) -> tuple[str, ...]:
    """As many layers under the first policy as there is room for, those before them under the next:
    when these go backward and have for a while what they recompute, the others' is gone.

    Args:
      sizes: bytes that a layer keeps under each policy, from least to most recomputation, falling.
      layers: of the model.
      room: bytes for all layers. Where even the last policy needs more, all layers get it.
    """
    names = list(sizes)
    for more, less in zip(names, names[1:], strict=False):
        if sizes[less] * layers <= room:
            gain = sizes[more] - sizes[less]
            count = int((room - sizes[less] * layers) // gain) if gain else layers
            return (less,) * max(0, layers - count) + (more,) * min(count, layers)
    return (names[-1],) * layers


def fill_stages(sizes: Mapping[str, float], layers: Sequence[int], room: float) -> tuple[str, ...]:
    """The policy of every layer of a pipeline, whose stages are all filled like the fullest: one
    with fewer layers lacks those that recompute most.

    Args:
      sizes: see `fill_layers`.
      layers: of each stage.
      room: bytes for the layers of one stage.
    """
    fullest = fill_layers(sizes, max(layers), room)
    return tuple(policy for own in layers for policy in fullest[len(fullest) - own :])


def split_stages(policies: Sequence[str], layers: Sequence[int]) -> list[tuple[str, ...]]:
    """The policies of each stage's layers.

    Args:
      policies: of every layer.
      layers: of each stage.
    """
    rest = iter(policies)
    return [tuple(islice(rest, own)) for own in layers]
