"""What a Llama-3.1-8B shape takes on H200s, for simulations of the planner.

What the device takes for FLOPs and bytes is `jaxmux.planner.h200`'s; here are the shape's.
"""

from collections.abc import Sequence

import numpy as np

from jaxmux.planner import h200
from jaxmux.planner.h200 import attention_seconds

LAYERS = 32
WIDTH = 4096
BYTES_PER_TOKEN = 2 * WIDTH
# Weights of the linears of a layer: q and o, k and v, gate, up and down.
LINEAR_WEIGHTS = WIDTH * (2 * 4096 + 2 * 1024 + 3 * 14336)
# Of these, the column-parallel ones and the row-parallel one, in attention and in the MLP.
ATTENTION_IN, ATTENTION_OUT = WIDTH * (4096 + 2 * 1024), WIDTH * 4096
MLP_IN, MLP_OUT = 2 * WIDTH * 14336, WIDTH * 14336


def linear_seconds(tokens: float, weights: float = LINEAR_WEIGHTS, tp: int = 1) -> float:
    """The frozen linears of a layer in one direction, sharded over `tp` GPUs."""
    return h200.linear_seconds(tokens, weights, tp)


def adapter_seconds(
    task_tokens: Sequence[float], weights: float = LINEAR_WEIGHTS, tp: int = 1
) -> float:
    """Fused adapters of several tasks, one direction."""
    return h200.adapter_seconds(task_tokens, weights, tp)


def all_reduce_seconds(tokens: float, tp: int) -> float:
    """The activations of so many tokens, summed around a ring of `tp` GPUs."""
    return h200.all_reduce_seconds(tokens * BYTES_PER_TOKEN, tp)


def permute_seconds(tokens: float) -> float:
    """The activations of so many tokens, sent to a neighbour."""
    return h200.permute_seconds(tokens * BYTES_PER_TOKEN)


def stage_seconds(
    lengths: Sequence[int], tokens: int, scale: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of a microbatch on each of S stages, float64 [S] each.

    Args:
      lengths: tokens of its sequences, for attention.
      tokens: N, of the microbatch, padding included, for all else.
      scale: by stage, how much longer it takes than its share of the 32 layers, for the head.
    """
    linears = linear_seconds(tokens) + adapter_seconds([tokens])
    forward, backward = LAYERS / len(scale) * (linears + attention_seconds(lengths))
    return forward * np.asarray(scale), backward * np.asarray(scale)
