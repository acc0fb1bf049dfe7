"""Makes the cost models for planning. They are fitted to a profile, or estimated for an H200 from
the backbone's FLOPs and bytes if there is no profile."""

import dataclasses
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmux.installation import resolve_path
from jaxmux.optimizers import OPTIMIZERS

from ..devices import Replica
from . import h200
from .device_profile import BackboneSize, LayerPoint, Profile, ProfileError, read_profile
from .fitting import fit_memory_model, fit_time_model
from .memory_model import MemoryModel, OnlineFit, working_bytes, working_features
from .pool_spec import PoolSpec
from .time_model import AdapterTimes, AttentionTimes, Curve, TimeModel

# Estimates of the base operators are for rows of this many tokens. Curves are linear within these
# ranges of tokens and of bytes.
_ROW_LEN = 128
_TOKENS = (1024, 65536)
_PAYLOADS = (2**20, 2**26)
# On a CPU, attention writes and reads the scores of whole rows. Each score takes as long, for each
# element of a query, as this number of FLOPs of a matrix product. Measured: 87 on two cores for
# heads of width 32, and fewer for wider heads.
_CPU_SCORE_FLOPS = 50
# Weight of an estimate in the online fit; an observed round has weight 1.
_WEIGHT = 1e-4


def estimated_times(backbone: BackboneSize, on_cpu: bool = False) -> TimeModel:
    """Returns the time model that follows from the figures in `h200`.

    Elementwise operators move 10 d + 8 f values per token in both passes together: norms read and
    write the stream of width d, and the gate reads and writes its activations of width f. Adapters
    of every rank are taken to cost what rank 16 costs, because reading the activations limits them.
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
    """Returns a copy of the time model in which missing collectives have an H200's times, and the
    names of these collectives."""
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
    """Returns a memory model that counts bytes as the engine does. A pass needs either the
    intermediates of one layer with their gradients, or the logits of the loss, whichever are
    larger."""
    backbone = dataclasses.replace(backbone, kept=_kept(backbone))
    of_token = {policy: size for policy, (size, _) in backbone.kept.items()}
    working = OnlineFit.of_features(3)
    for tokens in np.geomspace(*_TOKENS, num=7):
        sizes = {policy: size * tokens for policy, size in of_token.items()}
        needed = working_bytes(sizes, backbone.head_block_bytes)
        # Attention stores no matrix of scores, so the row length does not change the memory.
        for row_len in (_ROW_LEN, tokens):
            working = working.observe(working_features(tokens, row_len), needed, _WEIGHT)
    packed_from = h200.SHORTEST_PACKED_ROWS if _has_cudnn(backbone, on_cpu) else math.inf
    return MemoryModel(backbone, memory or h200.MEMORY_BYTES, working, packed_from)


def _has_cudnn(backbone: BackboneSize, on_cpu: bool) -> bool:
    """Whether attention runs in cuDNN. Attention in plain XLA takes no time or memory for absent
    sequences."""
    return backbone.stream_bytes == 2 and not on_cpu


def _sequence(backbone: BackboneSize) -> Curve:
    """Backward seconds per token and sequence, as a function of the row length. A row pays for
    every sequence that it may hold."""
    packed = backbone.packed.working_sequence / h200.SEQUENCE_BYTES_PER_SECOND
    shortest = h200.SHORTEST_PACKED_ROWS
    return Curve.through(
        [(shortest // 4, 0.0), (shortest // 2, 0.0), (shortest, packed), (2 * shortest, packed)]
    )


def _kept(backbone: BackboneSize) -> dict[str, tuple[float, float]]:
    """For each remat policy: the kept bytes per token, and the kept bytes per token and unit of
    rank. The kept values are those that `models.remat_policies` names, except the norms of
    heads."""
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
    """Forward and backward seconds of attention for one token, in rows of one sequence."""
    width = _width(backbone, "q_proj")
    forward, backward = h200.attention_seconds(row_len, width) / row_len
    if not on_cpu:
        return float(forward), float(backward)
    scores = _CPU_SCORE_FLOPS * width * row_len / h200.FLOPS
    # The backward pass recomputes the scores and computes their gradients.
    return float(forward + scores / 3), float(backward + 2 * scores / 3)


def _width(backbone: BackboneSize, module: str) -> int:
    """Output width of the linear whose path ends in `module`."""
    (size,) = (s for path, s in backbone.linears.items() if path.rsplit(".", 1)[-1] == module)
    return size[1]


def _update_curve(backbone: BackboneSize, optimizer: str) -> Curve:
    pool = PoolSpec(1, 1, optimizer=optimizer)
    seconds = 2 * pool.state_bytes(backbone) / h200.BYTES_PER_SECOND
    return Curve.through([(pool.parameters(backbone), seconds)])


# The folder of the profiles that ship with the package: one JSON file for each device and backbone.
PROFILES = "jaxmux:configs/profiles"
# The shortest chunk of the Hopper kernels, in tokens.
_HOPPER_CHUNK = 128


class CostSource(NamedTuple):
    """The origin of predicted costs, for reports. `kind` is "estimated" (from FLOPs and bytes) or
    "measured" (fitted to a profile). `text` names the source, for example "h200.json, bfloat16".
    Plans may use `memory_bytes` of each device. Each entry of `notes` is a sentence about a part of
    the prediction that is less certain."""

    kind: str
    text: str
    device: str
    memory_bytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} for {self.device}"


class CostModels(NamedTuple):
    """The cost models of one backbone on one kind of device. They hold for chunks of at least
    `least_chunk_len` tokens. For a profile, this is the shortest chunk that was measured; for
    estimates, the shortest that the Hopper kernels accept."""

    times: TimeModel
    memory: MemoryModel
    source: CostSource
    least_chunk_len: int


def device_models(
    size: BackboneSize,
    memory: int | None,
    replica: Replica,
    device: str = h200.NAME,
    dtype: str = "bfloat16",
    profiles: Path | str = PROFILES,
) -> CostModels:
    """Returns the cost models for a device and a backbone.

    The models are fitted to a profile of this device, dtype and backbone, if there is one. A
    profile that was measured in a storage format such as "nf4" serves only backbones in that
    format. A profile that was measured without one serves every format that has no profile of its
    own. Without a profile, the models are estimates for an H200. On a CPU, the estimate of
    attention is that of plain XLA.

    Args:
      size: sizes of the backbone. Its number of layers may differ from the profile's.
      memory: bytes of one device that may be used; None means the profile's memory, or an H200's.
      replica: the devices. Collectives among them that the profile lacks are estimated for H200s.
      device: kind of the device, as JAX names it (`jax.devices()[0].device_kind`).
      profiles: folder of the profiles; the prefix "jaxmux:" stands for the folder of the package.

    Raises:
      ProfileError: a profile cannot be read, or lacks a measurement or the device's memory.
    """
    known = {p: read_profile(p) for p in sorted(Path(resolve_path(profiles)).glob("*.json"))}
    serving = {
        path: profile.backbone.backbone_format == size.backbone_format
        for path, profile in known.items()
        if (profile.device, profile.dtype) == (device, dtype) and not _differs(profile, size)
    }
    if serving:
        # Prefer a profile in the backbone's format.
        return measured_models(max(serving, key=serving.__getitem__), size, memory, replica)
    models = estimated_models(size, memory, replica, on_cpu=device == "cpu")
    if dtype == "bfloat16":
        return models
    note = f"rates are those of bfloat16; {dtype} is slower"
    return models._replace(source=models.source._replace(notes=(note,)))


def estimated_models(
    size: BackboneSize, memory: int | None, replica: Replica, on_cpu: bool = False
) -> CostModels:
    """Returns the cost models of an H200, from the backbone's FLOPs and bytes."""
    model = estimated_memory(size, memory, on_cpu)
    text = "the backbone's FLOPs and bytes at an H200's rates, without kernel launches"
    times, _ = with_estimated_collectives(estimated_times(size, on_cpu), replica)
    source = CostSource("estimated", text, h200.NAME, model.memory)
    return CostModels(times, model, source, _HOPPER_CHUNK)


def measured_models(
    path: Path, size: BackboneSize, memory: int | None, replica: Replica
) -> CostModels:
    """Returns the cost models fitted to the profile in `path`, with arguments as in
    `device_models`. Raises ProfileError if the profile belongs to another backbone, cannot be read,
    or lacks a measurement or the device's memory."""
    profile = read_profile(path)
    if difference := _differs(profile, size):
        name, measured, wanted = difference
        raise ProfileError(
            f"{path}: measured for another backbone, {name}={measured}, the config's has "
            f"{wanted}; measure it with `jaxmux profile`"
        )
    backbone = dataclasses.replace(
        profile.backbone,
        layers=size.layers,
        layer_bytes=size.layer_bytes,
        divided_layer_bytes=size.divided_layer_bytes,
        outside_bytes=size.outside_bytes,
        backbone_format=size.backbone_format,
    )
    times = dataclasses.replace(fit_time_model(profile), backbone=backbone)
    times, estimated = with_estimated_collectives(times, replica)
    notes = []
    if estimated:
        names = ", ".join(estimated)
        notes.append(f"not in the profile, so estimated for H200s: {names} devices")
    if size.backbone_format != profile.backbone.backbone_format:
        notes.append(
            f"the profile has linears in {profile.dtype}; what another format changes is predicted "
            "at an H200's rates"
        )
    model = dataclasses.replace(fit_memory_model(profile, memory), backbone=backbone)
    source = CostSource(
        kind="measured",
        text=f"{path}, {profile.dtype}",
        device=profile.device,
        memory_bytes=model.memory,
        notes=tuple(notes),
    )
    least_chunk_len = min(point.chunk_len for point, _ in profile.of(LayerPoint))
    return CostModels(times, model, source, least_chunk_len)


def _differs(profile: Profile, size: BackboneSize) -> tuple[str, Any, Any] | None:
    """The first size in which the backbones differ: its name, the profile's value and the wanted
    value. None if the profile serves the backbone."""

    def facts(backbone: BackboneSize) -> dict[str, Any]:
        sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size}
        if profile.backbone.backbone_format:
            sizes |= {"backbone_format": backbone.backbone_format}
        return sizes | dict(backbone.linears) | {"packed": tuple(backbone.packed)}

    measured, wanted = facts(profile.backbone), facts(size)
    different = [n for n in measured | wanted if measured.get(n) != wanted.get(n)]
    return next(((n, measured.get(n), wanted.get(n)) for n in different), None)
