"""What a Llama-3.1-8B shape takes on H200s, for simulations of the planner.

The parameters come from times measured with jax 0.11.2 in bfloat16 on H200s:

  linears    a GEMM of m × 4096 × 4096 runs at 735 TFLOP/s for m = 8192 and at 563 for m = 1024, as
             if each took some hundred tokens more; forward and backward (dX) alike
  LoRA       7% of the linears' time: the fused kernels at rank 16 in benchmarks/grouped_lora_h200,
             weighted over the linears of a layer
  attention  cuDNN, causal, 32 heads of 128 over 8 of keys and values, 8192 tokens in sequences of
             128, 512 and 2048: forward 0.09, 0.15, 0.33 ms, with backward 0.63, 0.77, 1.34 ms; a
             line in Σ length² goes through them
  all-reduce 64 MiB over four GPUs added 0.27 ms to a layer
"""

from collections.abc import Sequence

import numpy as np

LAYERS = 32
WIDTH = 4096
BYTES_PER_TOKEN = 2 * WIDTH
# Weights of the linears of a layer: q and o, k and v, gate, up and down.
LINEAR_WEIGHTS = WIDTH * (2 * 4096 + 2 * 1024 + 3 * 14336)
# Of these, the column-parallel ones and the row-parallel one, in attention and in the MLP.
ATTENTION_IN, ATTENTION_OUT = WIDTH * (4096 + 2 * 1024), WIDTH * 4096
MLP_IN, MLP_OUT = 2 * WIDTH * 14336, WIDTH * 14336

_GEMMS = ((8192, 735e12), (1024, 563e12))
_ATTENTION_TOKENS = 8192
_ATTENTION_LENGTHS = np.array([128, 512, 2048])
_ATTENTION_FORWARD = 1e-3 * np.array([0.09, 0.15, 0.33])
_ATTENTION_BOTH = 1e-3 * np.array([0.63, 0.77, 1.34])
_LORA_SHARE = 0.07
# A ring over four GPUs sends and receives 2 · 3/4 of what it sums.
LINK_BYTES_PER_SECOND = 2 * 3 / 4 * 2**26 / 0.27e-3


def _gemm_fit() -> tuple[float, float]:
    """FLOP/s at many tokens, and the tokens that a GEMM takes longer by."""
    (m, fast), (n, slow) = _GEMMS
    extra = (fast - slow) / (slow / n - fast / m)
    return fast * (m + extra) / m, extra


def _attention_fit(seconds: np.ndarray) -> np.ndarray:
    """Seconds for each token, and for each unit of Σ length²."""
    squares = _ATTENTION_TOKENS * _ATTENTION_LENGTHS
    tokens = np.full(len(squares), _ATTENTION_TOKENS)
    return np.linalg.lstsq(np.stack([tokens, squares], axis=1), seconds)[0]


FLOPS, EXTRA_TOKENS = _gemm_fit()
_FORWARD_ATTENTION = _attention_fit(_ATTENTION_FORWARD)
_BACKWARD_ATTENTION = _attention_fit(_ATTENTION_BOTH - _ATTENTION_FORWARD)


def linear_seconds(tokens: float, weights: float = LINEAR_WEIGHTS, tp: int = 1) -> float:
    """The frozen linears of a layer in one direction, sharded over `tp` GPUs."""
    return 2 * weights / FLOPS / tp * (tokens + EXTRA_TOKENS)


def adapter_seconds(
    task_tokens: Sequence[float], weights: float = LINEAR_WEIGHTS, tp: int = 1
) -> float:
    """Fused adapters of several tasks: max(Σ u·t, max t) (MuxTune Eq. 3).

    An adapter alone takes as many tokens more as a GEMM does, and its utilization u is the share of
    its own tokens.
    """
    token = _LORA_SHARE * 2 * weights / FLOPS / tp
    return token * max(sum(task_tokens), max(task_tokens) + EXTRA_TOKENS)


def attention_seconds(lengths: Sequence[int], tp: int = 1) -> np.ndarray:
    """Causal attention of a layer over sequences of these lengths: forward and backward, [2]."""
    sizes = np.asarray(lengths, float)
    features = np.array([sizes.sum(), np.square(sizes).sum()])
    return np.array([features @ _FORWARD_ATTENTION, features @ _BACKWARD_ATTENTION]) / tp


def all_reduce_seconds(tokens: float, tp: int) -> float:
    """The activations of so many tokens, summed around a ring of `tp` GPUs."""
    return 2 * (tp - 1) / tp * permute_seconds(tokens)


def permute_seconds(tokens: float) -> float:
    """The activations of so many tokens, sent to a neighbour."""
    return tokens * BYTES_PER_TOKEN / LINK_BYTES_PER_SECOND


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
