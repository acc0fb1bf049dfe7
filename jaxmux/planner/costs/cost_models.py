"""The cost models with which a plan is made: fitted to a profile, or estimated without one.

Only `device_models` decides which of the two.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.package_files import resolve_path

from ..devices import Replica
from . import h200
from .device_profile import BackboneSize, LayerPoint, Profile, ProfileError, read_profile
from .estimates import estimated_memory, estimated_times, with_estimated_collectives
from .memory_fit import fit_memory_model
from .memory_model import MemoryModel
from .time_fit import fit_time_model
from .time_model import TimeModel

# The folder of the profiles that ship with the package: one JSON file for each device and backbone.
PROFILES = "jaxmux:configs/profiles"
# The shortest chunk of the Hopper kernels, in tokens.
_HOPPER_CHUNK = 128


class CostSource(NamedTuple):
    """The origin of predicted costs, for reports.

    Attributes:
      kind: "estimated" (from FLOPs and bytes) or "measured" (fitted to a profile, a file of
        measurements).
      text: origin of the costs in words, for example "h200.json, bfloat16".
      device: kind of the device for which the costs hold, as JAX names it, for example "NVIDIA
        H200".
      memory_bytes: bytes of memory of one device that plans may use.
      notes: sentences about parts of the costs that are less certain, for example collectives that
        the profile lacks; empty if there are none.
    """

    kind: str
    text: str
    device: str
    memory_bytes: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """For messages, for example "measured for cpu"."""
        return f"{self.kind} for {self.device}"


class CostModels(NamedTuple):
    """The cost models of one backbone on one kind of device. `device_models` returns them.

    Attributes:
      times: predicts the seconds of layers, microbatches and rounds.
      memory: predicts the peak memory of a device in bytes.
      source: origin of both models, for reports.
      least_chunk_len: tokens of the shortest chunk (a series of tokens of one task, the unit in
        which kernels choose an adapter) for which the models hold. For estimates it is the shortest
        chunk that the Hopper kernels accept; for measured costs it is the shortest chunk in the
        profile. Pass it to `packing.ShapeRequest` as `least_chunk_len`.
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
    """Returns the cost models for a device and a backbone, measured if possible and estimated if
    not.

    A profile is a JSON file of measurements. The function looks in `profiles` for one of this
    device, dtype and backbone. If there is one, the models are fitted to it (`measured_models`). A
    profile that was measured with the linears in a format serves only backbones in this format. One
    that was measured without serves backbones in any format that has no profile of its own.
    Otherwise they are estimates for an H200, whatever the device is, except that attention on a CPU
    is the one in plain XLA. `source.kind` of the result tells which.

    Args:
      size: sizes of the backbone, from `jaxmux.engine.backbone_size.size_of`. Its number of layers
        may differ from the profile's.
      memory: bytes of one device that may be used; None for the memory in the profile, or for an
        H200's memory if the models are estimated.
      replica: the devices: pipeline stages and tensor-parallel devices of each stage. Collectives
        among them that the profile lacks are estimated for H200s.
      device: kind of the device, as JAX names it (`jax.devices()[0].device_kind`).
      dtype: dtype of the weights as text, for example "bfloat16" or "float32".
      profiles: folder of the profiles. A path that begins with "jaxmux:" is inside the package; the
        default holds the profiles that ship with it.

    Raises:
      ProfileError: a profile in the folder cannot be read, or the chosen one lacks a measurement,
        or the memory of the device while `memory` is None.
      PlanningError: the stages of the replica differ.
    """
    found = {p: read_profile(p) for p in sorted(Path(resolve_path(profiles)).glob("*.json"))}
    serving = {
        path: own.backbone.backbone_format == size.backbone_format
        for path, own in found.items()
        if (own.device, own.dtype) == (device, dtype) and not _differs(own, size)
    }
    if serving:
        # The first one in the backbone's own format; otherwise the first one.
        return measured_models(max(serving, key=serving.__getitem__), size, memory, replica)
    models = estimated_models(size, memory, replica, on_cpu=device == "cpu")
    if dtype == "bfloat16":
        return models
    note = f"rates are those of bfloat16; {dtype} is slower"
    return models._replace(source=models.source._replace(notes=(note,)))


def estimated_models(
    size: BackboneSize, memory: int | None, replica: Replica, on_cpu: bool = False
) -> CostModels:
    """Returns cost models without a profile: those of an H200, from the backbone's FLOPs and bytes.

    Arguments as in `device_models`, and `on_cpu` as for `estimated_times`.
    """
    model = estimated_memory(size, memory, on_cpu)
    text = "the backbone's FLOPs and bytes at an H200's rates, without kernel launches"
    times, _ = with_estimated_collectives(estimated_times(size, on_cpu), replica)
    source = CostSource("estimated", text, h200.NAME, model.memory)
    return CostModels(times, model, source, _HOPPER_CHUNK)


def measured_models(
    path: Path, size: BackboneSize, memory: int | None, replica: Replica
) -> CostModels:
    """Returns the cost models fitted to one given profile, a JSON file of measurements.

    `device_models` searches for a profile instead. Collectives that the profile lacks are estimated
    for H200s, and a note in `source.notes` of the result says so.

    Args:
      path: the profile's file, written by `jaxmux profile`.
      size: sizes of the backbone. The number of layers may differ from the profiled backbone's;
        width, vocabulary, linears and attention heads may not, nor the format of the linears if the
        profile was measured with one.
      memory: bytes of one device that may be used; None for the memory in the profile.
      replica: the devices whose collectives are needed: pipeline stages and tensor-parallel devices
        of each stage.

    Raises:
      ProfileError: the profile cannot be read, lacks a measurement, belongs to another backbone, or
        does not hold the device's memory although `memory` is None.
      PlanningError: the stages of the replica differ.
    """
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
    """The name of a size in which the profiled backbone differs from the wanted one, with both
    values; None if there is none. Numbers of layers may differ, and a profile of linears in the
    dtype of the stream serves those in any format."""

    def facts(backbone: BackboneSize) -> dict[str, Any]:
        sizes = {"hidden_size": backbone.hidden_size, "vocab_size": backbone.vocab_size}
        if profile.backbone.backbone_format:
            sizes |= {"backbone_format": backbone.backbone_format}
        return sizes | dict(backbone.linears) | {"packed": tuple(backbone.packed)}

    measured, wanted = facts(profile.backbone), facts(size)
    different = [n for n in measured | wanted if measured.get(n) != wanted.get(n)]
    return next(((n, measured.get(n), wanted.get(n)) for n in different), None)
