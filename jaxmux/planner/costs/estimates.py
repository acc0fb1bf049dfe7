"""Cost models for the case without a profile: those of an H200, from a backbone's FLOPs and bytes.

They are a `TimeModel` and a `MemoryModel` like the fitted ones, so planning treats both alike.
Reports call them "estimated".
"""

import dataclasses
import math

import numpy as np

from jaxmux.optimizers import OPTIMIZERS

from ..devices import Replica
from . import h200
from .adapter_times import AdapterTimes
from .attention_times import AttentionTimes
from .curve import Curve
from .device_profile import BackboneSize
from .layer_policies import working_bytes
from .memory_model import MemoryModel, working_features
from .online_fit import OnlineFit
from .pool_spec import PoolSpec
from .time_model import TimeModel

# Row length in tokens at which the base operators are priced, and the ranges of tokens and bytes
# that curves span linearly.
_ROW_LEN = 128
_TOKENS = (1024, 65536)
_PAYLOADS = (2**20, 2**26)
# On a CPU, attention writes and reads the scores of whole rows. For every query, key and number of
# a query, this takes the time of so many FLOPs of a matrix product: 87 on two cores for heads of 32
# numbers, and fewer for larger heads.
_CPU_SCORE_FLOPS = 50
# Weight of an estimate in the online fit; an observed round has weight 1.
_WEIGHT = 1e-4


def estimated_times(backbone: BackboneSize, on_cpu: bool = False) -> TimeModel:
    """Returns the time model by the figures of `h200`.

    Elementwise operators move 10 d + 8 f values per token, forward and backward: norms read and
    write the stream of width d, and the gate reads and writes its activations of width f. Adapters
    of any rank take the time of rank 16, because reading the activations limits them. In rows that
    may hold several sequences, attention costs as much as in rows of one, plus the time to fill the
    memory of every sequence that a row may hold; on a CPU, plus the time to write and read scores.
    The update reads and writes masters, accumulators and moments.

    Args:
      backbone: sizes of the backbone.
      on_cpu: whether the device is a CPU.
    """
    weights = sum(k * n for k, n in backbone.linears.values())
    adapter_token = 2 * h200.LORA_SHARE * 2 * weights / h200.FLOPS
    gate, up = _width(backbone, "gate_proj"), _width(backbone, "up_proj")
    moved = backbone.stream_bytes * (10 * backbone.hidden_size + 8 * gate)

    def base(tokens: int) -> float:
        attention = tokens * sum(_attention_of_token(backbone, _ROW_LEN, on_cpu))
        elementwise = tokens * moved / h200.BYTES_PER_SECOND
        return 2 * h200.linear_seconds(tokens, weights) + attention + elementwise

    head_weights = backbone.hidden_size * backbone.vocab_size
    row_lens = (_ROW_LEN, 2 * _ROW_LEN)
    both = Curve.through((n, sum(_attention_of_token(backbone, n, on_cpu))) for n in row_lens)
    forward = Curve.through((n, _attention_of_token(backbone, n, on_cpu)[0]) for n in row_lens)
    norms = 4 * backbone.hidden_size * backbone.stream_bytes / h200.BYTES_PER_SECOND
    longest = _TOKENS[-1]
    # "lean" recomputes the products with the weights of gate and up.
    recompute = {
        "norms": -norms * longest / base(longest),
        "dots": 0.0,
        "lean": backbone.hidden_size * (gate + up) / weights / 2,
        "full": 1 / 2,
    }
    return TimeModel(
        backbone=backbone,
        base=Curve.through((n, base(n)) for n in _TOKENS),
        row_len=_ROW_LEN,
        attention=AttentionTimes(
            both, both, _sequence(backbone) if _has_cudnn(backbone, on_cpu) else None
        ),
        attention_forward=AttentionTimes(forward, forward, sequence=None),
        adapters=AdapterTimes(floor=h200.EXTRA_TOKENS * adapter_token, per_token=adapter_token),
        empty_share=h200.EMPTY_SHARE,
        forward_share=0.5,
        recompute=recompute,
        head=Curve.through((n, 2 * h200.linear_seconds(n, head_weights)) for n in _TOKENS),
        update={kind: _update_curve(backbone, kind) for kind in OPTIMIZERS},
        round_overhead=0.0,
        collectives={},
    )


def with_estimated_collectives(times: TimeModel, replica: Replica) -> tuple[TimeModel, list[str]]:
    """Adds an H200's collectives to a time model where the model lacks them.

    Args:
      times: the time model; it is not changed.
      replica: the devices. Stages exchange the residual stream, the devices of a stage sums (tp),
        weights (fsdp), and gradients at updates (all data shards).

    Returns:
      A new time model, and the names of the added collectives.
    """
    pp, tp, fsdp, shards = replica.pp, replica.tp, replica.fsdp, replica.shards
    estimates = {
        ("psum", "outer", shards): lambda payload: h200.all_reduce_seconds(payload, shards),
        ("all_gather", "outer", fsdp): lambda payload: h200.all_gather_seconds(payload, fsdp),
        ("psum", "inner", tp): lambda payload: h200.all_reduce_seconds(payload, tp),
        ("ppermute", "inner", pp): h200.permute_seconds,
    }
    missing = {
        key: Curve.through((payload, seconds(payload)) for payload in _PAYLOADS)
        for key, seconds in estimates.items()
        if key[-1] > 1 and key not in times.collectives
    }
    names = [f"{collective} over {devices}" for collective, _, devices in missing]
    return dataclasses.replace(times, collectives={**times.collectives, **missing}), names


def estimated_memory(
    backbone: BackboneSize, memory: int | None = None, on_cpu: bool = False
) -> MemoryModel:
    """Returns the memory model by counting, as the engine counts.

    Besides weights, train state and kept values, a round needs either the intermediates of one
    layer and their gradients, or the logits of the loss, whichever take more.

    Args:
      backbone: sizes of the backbone.
      memory: bytes of a device that may be used; None for an H200's.
      on_cpu: as for `estimated_times`.
    """
    backbone = dataclasses.replace(backbone, kept=_kept(backbone))
    of_token = {policy: size for policy, (size, _) in backbone.kept.items()}
    working = OnlineFit.of_features(3)
    for tokens in np.geomspace(*_TOKENS, num=7):
        sizes = {policy: size * tokens for policy, size in of_token.items()}
        needed = working_bytes(sizes, backbone.head_block_bytes)
        # Row length does not matter: attention never stores a matrix of scores.
        for row_len in (_ROW_LEN, tokens):
            working = working.observe(working_features(tokens, row_len), needed, _WEIGHT)
    packed_from = h200.SHORTEST_PACKED_ROWS if _has_cudnn(backbone, on_cpu) else math.inf
    return MemoryModel(backbone, memory or h200.MEMORY_BYTES, working, packed_from)


def _has_cudnn(backbone: BackboneSize, on_cpu: bool) -> bool:
    """Whether cuDNN's attention serves the device and takes values of this width. Plain XLA's
    attention takes nothing for sequences that are not there."""
    return backbone.stream_bytes == 2 and not on_cpu


def _sequence(backbone: BackboneSize) -> Curve:
    """Returns the backward seconds per token and per sequence that a row may hold, over row
    lengths."""
    packed = backbone.packed.working_sequence / h200.SEQUENCE_BYTES_PER_SECOND
    shortest = h200.SHORTEST_PACKED_ROWS
    return Curve.through(
        [(shortest // 4, 0.0), (shortest // 2, 0.0), (shortest, packed), (2 * shortest, packed)]
    )


def _kept(backbone: BackboneSize) -> dict[str, tuple[float, float]]:
    """Returns for each remat policy the kept bytes per token, and per token and rank.

    They are those of the values that `models.remat_policies` names, without the norms of heads.
    """
    d, size = backbone.hidden_size, backbone.stream_bytes
    q, kv, f = (_width(backbone, module) for module in ("q_proj", "k_proj", "gate_proj"))
    lean = 2 * d + q + (q + 2 * kv)
    intermediates = len(backbone.linears) * size
    return {
        "norms": ((lean + 2 * d + 2 * f) * size, intermediates),
        "dots": ((lean + 2 * f) * size, intermediates),
        "lean": (lean * size, intermediates),
        "full": (d * size, 0.0),
    }


def _attention_of_token(backbone: BackboneSize, row_len: int, on_cpu: bool) -> tuple[float, float]:
    """Forward and backward seconds of a token, in rows of one sequence."""
    width = _width(backbone, "q_proj")
    forward, backward = h200.attention_seconds(row_len, width) / row_len
    if not on_cpu:
        return float(forward), float(backward)
    scores = _CPU_SCORE_FLOPS * width * row_len / h200.FLOPS
    # The backward pass computes the scores again, and their gradients.
    return float(forward + scores / 3), float(backward + 2 * scores / 3)


def _width(backbone: BackboneSize, module: str) -> int:
    """Output width of a linear; `module` is the last part of its path."""
    (size,) = (s for path, s in backbone.linears.items() if path.rsplit(".", 1)[-1] == module)
    return size[1]


def _update_curve(backbone: BackboneSize, optimizer: str) -> Curve:
    """Seconds over the parameters of the pool: the whole train state is read and written."""
    pool = PoolSpec(1, 1, optimizer=optimizer)
    seconds = 2 * pool.state_bytes(backbone) / h200.BYTES_PER_SECOND
    return Curve.through([(pool.parameters(backbone), seconds)])
