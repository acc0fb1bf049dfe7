"""Inputs of plans and of `--fits`: devices, and the pools of tasks."""

import dataclasses
from pathlib import Path

from jaxmux.installation import resolve_path
from jaxmux.models import BackboneConfig
from jaxmux.peft import LayerMask, kind_of, size_of_adapter
from jaxmux.planner.costs import PROFILES, h200
from jaxmux.planner.costs.device_profile import ProfileError, read_profile
from jaxmux.planner.costs.pool_spec import KindSize
from jaxmux.runs.run_shape import PlannedDevice
from jaxmux.tasks import Task, TaskError

from .gin_bindings import RunConfig

# The device of tables of what fits, unless another device is named.
H200 = PlannedDevice(h200.NAME)


def planned_device(profile: str | None) -> PlannedDevice | None:
    """The kind of device that `--profile` asks for; None without the option. `profile` is a file,
    or the beginning of the name of a profile that ships with jaxmux, for example "h200". Raises
    ProfileError if there is no such file or profile, or it cannot be read."""
    if profile is None:
        return None
    ship = {path.name.partition("_")[0]: path for path in _shipped()}
    if profile in ship and not Path(profile).is_file():
        return PlannedDevice(read_profile(ship[profile]).device)
    if not Path(profile).suffix and not Path(profile).exists():
        names = " and ".join(sorted(ship))
        raise ProfileError(f"--profile={profile}: there is no such file; {names} ship with jaxmux")
    return PlannedDevice(read_profile(Path(profile)).device, Path(profile))


def on_device(run: RunConfig, device: PlannedDevice) -> RunConfig:
    """The settings of a training run for a device that need not be this machine's: the dtype "auto"
    becomes a definite dtype, and the memory is that of such a device, unless the config limits it.
    Raises ProfileError if the profile has another dtype than the config."""
    profile = device.profile and read_profile(device.profile)
    measured = profile.dtype if profile else "bfloat16"
    dtype = measured if run.dtype == "auto" else run.dtype
    if profile and dtype != measured:
        raise ProfileError(
            f"{device.profile}: was measured in {measured}, and the plan is for {dtype}; set "
            f"fine_tune.dtype={measured!r}, or measure a profile with --dtype={dtype}"
        )
    if profile:
        memory = profile.memory_bytes
    else:
        shipped = (read_profile(path) for path in _shipped())
        memory = next(each.memory_bytes for each in shipped if each.device == device.kind)
    memory_gib = run.memory_gib or (memory and memory / 2**30)
    return dataclasses.replace(run, dtype=dtype, memory_gib=memory_gib)


def _shipped() -> list[Path]:
    return sorted(Path(resolve_path(PROFILES)).glob("*.json"))


def adapter_sizes(
    task: Task, config: BackboneConfig
) -> tuple[dict[str, LayerMask], KindSize | None]:
    """The fields `targets` and `size` of the task's `PreparedTask`, without reading its data.
    Raises TaskError if the task's adapter does not suit the backbone."""
    try:
        targets = dict(kind_of(task.adapter).targets(task.adapter, config))
        return targets, size_of_adapter(task.adapter, config)
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
