"""Times of a backbone of Llama-3.1-8B's shape on H200s, for simulations of the planner.

They come from the profile that ships for the backbone, or from estimates if there is none;
`jaxmux.planner.costs.cost_models.device_models` decides. All times are in seconds.
"""

from collections.abc import Sequence

import numpy as np

from jaxmux.planner.costs.cost_models import CostModels, device_models, with_estimated_collectives
from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes
from jaxmux.planner.costs.time_model import AdapterLoad
from jaxmux.planner.devices import Replica

LAYERS = 32
WIDTH = 4096
BYTES_PER_TOKEN = 2 * WIDTH
RANK, CHUNK_LEN = 16, 128
# Numbers of pipeline stages, and of tensor-parallel devices within a host, of the simulated
# replicas.
AXES = (2, 4, 8)


def llama(
    layers: int = LAYERS, width: int = WIDTH, kv: int = 1024, mlp: int = 14336
) -> BackboneSize:
    """Returns the sizes in bfloat16 of a backbone of Llama's shape.

    Args:
      layers: number of decoder layers.
      width: d, the model width.
      kv: width of the keys and of the values.
      mlp: width of the MLP.
    """
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
    """Returns the cost models of H200s, with the collectives of all replicas of `AXES`.

    Args:
      size: sizes of the backbone.
      memory: bytes of a device; None for an H200's own.
    """
    models = device_models(size, memory, Replica())
    times, estimated = models.times, []
    for devices in AXES:
        times, names = with_estimated_collectives(times, Replica.uniform(devices, devices))
        estimated += names
    notes = (*models.source.notes, f"collectives estimated: {', '.join(estimated)} devices")
    return models._replace(times=times, source=models.source._replace(notes=notes))


_SIZE = llama()
_MODELS = cost_models(_SIZE)
SOURCE = _MODELS.source
_TIMES = _MODELS.times
# Number of weights of all linears of a layer; of attention's column-parallel linears and of its
# row-parallel linear; and the same of the MLP.
LINEAR_WEIGHTS = sum(k * n for k, n in _SIZE.linears.values())
ATTENTION_IN, ATTENTION_OUT = WIDTH * (4096 + 2 * 1024), WIDTH * 4096
MLP_IN, MLP_OUT = 2 * WIDTH * 14336, WIDTH * 14336


def linear_seconds(tokens: float, weights: float = LINEAR_WEIGHTS, tp: int = 1) -> float:
    """Returns the time of a forward or backward pass of frozen linears of a layer.

    The time of everything else in the layer except attention is included in proportion to the
    weights.

    Args:
      tokens: tokens of the microbatch.
      weights: number of weights of the linears, over all devices.
      tp: tensor-parallel devices, which share the work.
    """
    attention = tokens * _TIMES.attention(_TIMES.row_len, max_sequences=1)
    return (_TIMES.base(tokens) - attention) / 2 * weights / LINEAR_WEIGHTS / tp


def adapter_seconds(
    task_tokens: Sequence[float], weights: float = LINEAR_WEIGHTS, tp: int = 1
) -> float:
    """Returns the time of a forward or backward pass of the fused adapters of some linears.

    Args:
      task_tokens: tokens of each task.
      weights, tp: as of `linear_seconds`.
    """
    load = AdapterLoad(task_tokens, len(task_tokens), RANK, CHUNK_LEN, dropout=False)
    return _TIMES.adapters.seconds(load) / 2 * weights / LINEAR_WEIGHTS / tp


def attention_seconds(lengths: Sequence[int], tp: int = 1) -> np.ndarray:
    """Returns the time of causal attention in a layer: float64 [2], forward and backward.

    Args:
      lengths: length in tokens of each sequence; each is in a row of its own length.
      tp: tensor-parallel devices, which share the work.
    """
    sizes, counts = np.unique(np.asarray(lengths, int), return_counts=True)
    tokens = sizes * counts
    forward, both = (
        sum(n * times(int(size), 1) for n, size in zip(tokens, sizes, strict=True))
        for times in (_TIMES.attention_forward, _TIMES.attention)
    )
    return np.array([forward, both - forward]) / tp


def all_reduce_seconds(tokens: float, tp: int) -> float:
    """Returns the time of an all-reduce of the activations of `tokens` tokens over `tp` devices."""
    return _TIMES.collective("psum", tp, tokens * BYTES_PER_TOKEN)


def permute_seconds(tokens: float, stages: int = 4) -> float:
    """Returns the time in which a stage sends the activations of `tokens` tokens to the next."""
    return _TIMES.collective("ppermute", stages, tokens * BYTES_PER_TOKEN)


def stage_seconds(
    lengths: Sequence[int], tokens: int, scale: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the forward and the backward time of a microbatch on each stage, float64 [S] each.

    Args:
      lengths: length in tokens of each sequence, on which attention depends.
      tokens: N, the tokens of the microbatch including padding, on which everything else depends.
      scale: for each of S stages, its time relative to an equal share of the 32 layers; more than
        1 where the stage holds a part of the head.
    """
    linears = linear_seconds(tokens) + adapter_seconds([tokens])
    forward, backward = LAYERS / len(scale) * (linears + attention_seconds(lengths))
    return forward * np.asarray(scale), backward * np.asarray(scale)
