"""The cost models that a plan is made with: fitted to a profile, or estimated without one.

`device_models` alone decides which.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.package_files import resolve_path

from ..devices import Replica
from . import h200
from .device_profile import BackboneSize, LayerPoint, Profile, ProfileError, read_profile
from .estimates import estimated_memory, estimated_times, with_estimated_collectives
from .memory_model import MemoryModel, fit_memory_model
from .time_fit import fit_time_model
from .time_model import TimeModel

# The folder of the profiles that ship, each of one device and backbone.
PROFILES = "jaxmux:configs/profiles"
# The shortest chunk of the Hopper kernels, in tokens.
_HOPPER_CHUNK = 128


class CostSource(NamedTuple):
    """Where times and sizes come from.

    Attributes:
      kind: "estimated" (from FLOPs and bytes) or "measured" (fitted to a profile).
      text: the origin of the costs as shown in reports, for example "h200.json, bfloat16".
      device: kind of the device, as JAX names it.
      memory_bytes: memory of one device.
      notes: sentences about parts that come from elsewhere.
    """

    kind: str
    text: str
    device: str
    memory_bytes: int
    notes: tuple[str, ...] = ()


class CostModels(NamedTuple):
    """Cost models of a backbone on a device.

    Attributes:
      times: time model.
      memory: memory model.
      source: where both come from.
      least_chunk_len: tokens of the shortest chunk that the device's kernels take.
    """

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
    """The models fitted to the profile that ships for this device and backbone; without such a
    profile, the estimates for an H200, for any device.

    Args:
      size: sizes of the backbone.
      memory: bytes of a device; None for the device's own.
      replica: the devices whose collectives are needed.
      device: kind of the device, as JAX names it.
      dtype: dtype of the weights.
      profiles: folder of the profiles.

    Raises:
      ProfileError: the profile cannot be read, or lacks a measurement.
    """
    for path in sorted(Path(resolve_path(profiles)).glob("*.json")):
        profile = read_profile(path)
        if (profile.device, profile.dtype) == (device, dtype) and not _differs(profile, size):
            return measured_models(path, size, memory, replica)
    models = estimated_models(size, memory, replica)
    if dtype == "bfloat16":
        return models
    note = f"rates are those of bfloat16; {dtype} is slower"
    return models._replace(source=models.source._replace(notes=(note,)))


def estimated_models(size: BackboneSize, memory: int | None, replica: Replica) -> CostModels:
    """The models of an H200, from FLOPs and bytes; arguments as of `device_models`."""
    model = estimated_memory(size, memory)
    text = "the backbone's FLOPs and bytes at an H200's rates, without kernel launches"
    times, _ = with_estimated_collectives(estimated_times(size), replica.pp, replica.tp)
    source = CostSource("estimated", text, h200.NAME, model.memory)
    return CostModels(times, model, source, _HOPPER_CHUNK)


def measured_models(
    path: Path, size: BackboneSize, memory: int | None, replica: Replica
) -> CostModels:
    """The models fitted to a profile. Collectives that it lacks are estimated, and a note says so.

    Args:
      path: the profile's file.
      size, memory, replica: as of `device_models`; the number of layers may differ from the
        profiled backbone's.

    Raises:
      ProfileError: it cannot be read, lacks a measurement, or is another backbone's.
    """
    profile = read_profile(path)
    if difference := _differs(profile, size):
        name, measured, wanted = difference
        raise ProfileError(
            f"{path}: measured for another backbone, {name}={measured}, the config's has "
            f"{wanted}; measure it with python -m jaxmux.profile"
        )
    backbone = dataclasses.replace(profile.backbone, layers=size.layers)
    times = dataclasses.replace(fit_time_model(profile), backbone=backbone)
    times, estimated = with_estimated_collectives(times, replica.pp, replica.tp)
    note = f"not in the profile, so estimated for H200s: {', '.join(estimated)} devices"
    model = dataclasses.replace(fit_memory_model(profile, memory), backbone=backbone)
    source = CostSource(
        kind="measured",
        text=f"{path}, {profile.dtype}",
        device=profile.device,
        memory_bytes=model.memory,
        notes=(note,) if estimated else (),
    )
    least_chunk_len = min(point.chunk_len for point, _ in profile.of(LayerPoint))
    return CostModels(times, model, source, least_chunk_len)


def _differs(profile: Profile, size: BackboneSize) -> tuple[str, Any, Any] | None:
    """The name of a size in which the profiled backbone differs from the wanted one, with both
    values; None if there is none. Numbers of layers may differ."""

    def facts(backbone: BackboneSize) -> dict[str, Any]:
        sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size}
        return sizes | dict(backbone.linears) | {"packed": tuple(backbone.packed)}

    measured, wanted = facts(profile.backbone), facts(size)
    different = [n for n in measured | wanted if measured.get(n) != wanted.get(n)]
    return next(((n, measured.get(n), wanted.get(n)) for n in different), None)
