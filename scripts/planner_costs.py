"""What a Llama-3.1-8B shape takes on H200s, for simulations of the planner: by the profile that
ships, or by estimates where none does (`jaxmux.planner.cost_models.device_models` decides)."""

from collections.abc import Sequence

import numpy as np

from jaxmux.planner.costs.adapter_times import AdapterLoad
from jaxmux.planner.costs.attention_memory import PackedBytes
from jaxmux.planner.costs.cost_models import CostModels, device_models
from jaxmux.planner.costs.device_profile import BackboneSize
from jaxmux.planner.costs.estimates import with_estimated_collectives
from jaxmux.planner.devices import Replica

LAYERS = 32
WIDTH = 4096
BYTES_PER_TOKEN = 2 * WIDTH
RANK, CHUNK_LEN = 16, 128
# Devices along an axis of the simulated meshes, each within a host.
AXES = (2, 4, 8)


def llama(
    layers: int = LAYERS, width: int = WIDTH, kv: int = 1024, mlp: int = 14336
) -> BackboneSize:
    """Sizes in bfloat16 of a backbone of Llama's shape."""
    linears = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, kv),
        "self_attn.v_proj": (width, kv),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (width, mlp),
        "mlp.up_proj": (width, mlp),
        "mlp.down_proj": (mlp, width),
    }
    vocabulary, block = 128256, 2**30
    weights = 2 * sum(k * n for k, n in linears.values())
    outside = 2 * 2 * vocabulary * width
    packed = PackedBytes.of(width // 128, kv // 128, 128, itemsize=2)
    return BackboneSize(
        "LlamaForCausalLM",
        layers,
        width,
        vocabulary,
        linears,
        weights,
        outside,
        2,
        {},
        block,
        packed,
    )


def cost_models(size: BackboneSize, memory: int | None = None) -> CostModels:
    """Those of H200s, with so many bytes of memory or an H200's own, on any mesh of `AXES`."""
    models = device_models(size, memory, Replica())
    times, estimated = models.times, []
    for devices in AXES:
        times, names = with_estimated_collectives(times, devices, devices)
        estimated += names
    notes = (*models.source.notes, f"collectives estimated: {', '.join(estimated)} devices")
    return models._replace(times=times, source=models.source._replace(notes=notes))


_SIZE = llama()
_MODELS = cost_models(_SIZE)
SOURCE = _MODELS.source
_TIMES = _MODELS.times
# Weights of the linears of a layer, and of these the column-parallel ones and the row-parallel one,
# in attention and in the MLP.
LINEAR_WEIGHTS = sum(k * n for k, n in _SIZE.linears.values())
ATTENTION_IN, ATTENTION_OUT = WIDTH * (4096 + 2 * 1024), WIDTH * 4096
MLP_IN, MLP_OUT = 2 * WIDTH * 14336, WIDTH * 14336


def linear_seconds(tokens: float, weights: float = LINEAR_WEIGHTS, tp: int = 1) -> float:
    """The frozen linears of a layer in one direction, sharded over `tp` GPUs, and their part of all
    else but attention."""
    attention = tokens * _TIMES.attention(_TIMES.row_len, max_sequences=1)
    return (_TIMES.base(tokens) - attention) / 2 * weights / LINEAR_WEIGHTS / tp


def adapter_seconds(
    task_tokens: Sequence[float], weights: float = LINEAR_WEIGHTS, tp: int = 1
) -> float:
    """Fused adapters of several tasks, one direction."""
    load = AdapterLoad(task_tokens, len(task_tokens), RANK, CHUNK_LEN, dropout=False)
    return _TIMES.adapters.seconds(load) / 2 * weights / LINEAR_WEIGHTS / tp


def attention_seconds(lengths: Sequence[int], tp: int = 1) -> np.ndarray:
    """Causal attention of a layer over sequences of these lengths: forward and backward, [2]."""
    sizes, counts = np.unique(np.asarray(lengths, int), return_counts=True)
    tokens = sizes * counts
    forward, both = (
        sum(n * times(int(size), 1) for n, size in zip(tokens, sizes, strict=True))
        for times in (_TIMES.attention_forward, _TIMES.attention)
    )
    return np.array([forward, both - forward]) / tp


def all_reduce_seconds(tokens: float, tp: int) -> float:
    """The activations of so many tokens, summed around a ring of `tp` GPUs."""
    return _TIMES.collective("psum", tp, tokens * BYTES_PER_TOKEN)


def permute_seconds(tokens: float, stages: int = 4) -> float:
    """The activations of so many tokens, sent to a neighbour."""
    return _TIMES.collective("ppermute", stages, tokens * BYTES_PER_TOKEN)


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
