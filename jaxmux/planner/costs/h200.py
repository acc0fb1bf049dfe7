"""Seconds that an H200 takes for the parts of a layer, from measured times, FLOPs and bytes."""

import numpy as np

# The parameters come from times measured with jax 0.11.2 in bfloat16 on H200s, for the shape of
# Llama-3.1-8B. Times of other shapes are scaled by their FLOPs and bytes.
#
# - Linears: a GEMM of m × 4096 × 4096 runs at 735 TFLOP/s for m = 8192 and at 563 for m = 1024, as
#   if each had about a hundred tokens more. Reading the weights takes about that long. The backward
#   pass (dX) takes as long as the forward pass.
# - LoRA: the fused kernels at rank 16 take 7% of the linears' time on average over the linears of a
#   layer (benchmarks/grouped_lora_h200).
# - Attention: for 8192 tokens in sequences of 128, 512 and 2048, cuDNN's causal attention with 32
#   query heads of width 128 and 8 key heads takes 0.09, 0.15 and 0.33 ms forward, and 0.63, 0.77
#   and 1.34 ms forward and backward. A line in Σ length² goes through these times.
# - Padding: in the profile that ships with the package, a token of an empty chunk takes a ninth of
#   the time of a token of a task, because matrix products skip empty chunks.
# - Memory: a kernel reads an activation at 4.3 TB/s.
# - Decoding: a microbatch took 19.7 ms longer with the linears of 32 layers in nf4, and 3.4 ms
#   longer with those of 8 layers in int8, than in bfloat16. Each linear is decoded twice.
# - Float8: a microbatch took 135.3 ms less with the linears of 32 layers in float8 than in
#   bfloat16, which is 45% of the time that the linears take by the rates above.
# - Sequences: 8192 tokens in rows of 512 to 8192 tokens took 1.0 to 1.5 ms longer with room for 64
#   sequences per row than with room for 16: 32 KiB per token and sequence at 10 TB/s.
# - All-reduce: the sum of 64 MiB over four GPUs added 0.27 ms to a layer.

NAME = "NVIDIA H200"
# By default, JAX may use three quarters of the device's memory.
MEMORY_BYTES = 112_583_507_968
BYTES_PER_SECOND = 4.3e12
SEQUENCE_BYTES_PER_SECOND = 1e13
# For each storage format, the number of weights that are decoded per second.
DECODED_PER_SECOND = {"int8": 1.04e12, "scaled": 1.04e12, "nf4": 7.1e11}

_GEMMS = ((8192, 735e12), (1024, 563e12))
_ATTENTION_TOKENS, _ATTENTION_WIDTH = 8192, 32 * 128
_ATTENTION_LENGTHS = np.array([128, 512, 2048])
_ATTENTION_FORWARD = 1e-3 * np.array([0.09, 0.15, 0.33])
_ATTENTION_BOTH = 1e-3 * np.array([0.63, 0.77, 1.34])
LORA_SHARE = 0.07
EMPTY_SHARE = 1 / 9
# Attention over shorter rows runs in a kernel that takes no time or memory for absent sequences.
SHORTEST_PACKED_ROWS = 256
# In a ring over four GPUs, each GPU sends and receives 2 · 3/4 of the bytes that are summed.
LINK_BYTES_PER_SECOND = 2 * 3 / 4 * 2**26 / 0.27e-3


def _gemm_fit() -> tuple[float, float]:
    """FLOP/s of a GEMM with many tokens, and a number of tokens: a short GEMM takes as long as if
    it had this many tokens more."""
    (m, fast), (n, slow) = _GEMMS
    extra = (fast - slow) / (slow / n - fast / m)
    return fast * (m + extra) / m, extra


def _attention_fit(seconds: np.ndarray) -> np.ndarray:
    """Seconds per token, and seconds per unit of Σ length²."""
    squares = _ATTENTION_TOKENS * _ATTENTION_LENGTHS
    tokens = np.full(len(squares), _ATTENTION_TOKENS)
    return np.linalg.lstsq(np.stack([tokens, squares], axis=1), seconds)[0]


FLOPS, EXTRA_TOKENS = _gemm_fit()
_FORWARD_ATTENTION = _attention_fit(_ATTENTION_FORWARD)
_BACKWARD_ATTENTION = _attention_fit(_ATTENTION_BOTH - _ATTENTION_FORWARD)


def linear_seconds(tokens: float, weights: float) -> float:
    """Seconds of linears that have `weights` frozen weights together, for one pass (forward or
    backward)."""
    return 2 * weights / FLOPS * (tokens + EXTRA_TOKENS)


# Fraction of the linears' time that float8 saves.
FLOAT8_SAVING = 135.3e-3 / (2 * linear_seconds(8192, 32 * 218_103_808))


def attention_seconds(length: int, width: int) -> np.ndarray:
    """Forward and backward seconds of one layer's causal attention over one sequence, float64 [2].
    `width` is the summed width of all query heads."""
    features = np.array([length, length**2]) * width / _ATTENTION_WIDTH
    return np.array([features @ _FORWARD_ATTENTION, features @ _BACKWARD_ATTENTION])


def all_reduce_seconds(payload_bytes: float, devices: int) -> float:
    """Seconds of a ring all-reduce of `payload_bytes` on each of `devices` GPUs."""
    return 2 * (devices - 1) / devices * permute_seconds(payload_bytes)


def all_gather_seconds(payload_bytes: float, devices: int) -> float:
    """Seconds of a ring all-gather of `payload_bytes` from each of `devices` GPUs."""
    return (devices - 1) * permute_seconds(payload_bytes)


def permute_seconds(payload_bytes: float) -> float:
    """Seconds in which a GPU sends `payload_bytes` bytes to a neighbour."""
    return payload_bytes / LINK_BYTES_PER_SECOND
