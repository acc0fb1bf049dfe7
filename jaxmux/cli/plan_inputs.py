"""What plans and tables of what fits are computed from: cost models, and the pools of tasks."""

from pathlib import Path

import jax.numpy as jnp

from jaxmux.engine.backbone_size import size_of
from jaxmux.engine.prepared_task import pool_of_task
from jaxmux.models import BackboneConfig
from jaxmux.peft import kind_of, size_of_adapter
from jaxmux.planner.costs import CostModels, PoolSpec, device_models, measured_models
from jaxmux.planner.costs.device_profile import ProfileError, read_profile
from jaxmux.planner.devices import Replica
from jaxmux.tasks import Task, TaskError

from .gin_bindings import RunConfig


def dtype_of(run: RunConfig, profile: Path | None) -> str:
    """The dtype of a plan's backbone as text: that of the config, else that of the profile.

    Args:
      run: the config.
      profile: file of a profile; None for the one that ships, or estimates.

    Raises:
      ProfileError: the profile cannot be read, or has another dtype than the config says.
    """
    measured = read_profile(profile).dtype if profile else "bfloat16"
    dtype = measured if run.dtype == "auto" else run.dtype
    if profile and dtype != measured:
        raise ProfileError(
            f"{profile}: was measured in {measured}, and the plan is for {dtype}; set "
            f"fine_tune.dtype={measured!r}, or measure a profile with --dtype={dtype}"
        )
    return dtype


def cost_models(
    run: RunConfig, config: BackboneConfig, replica: Replica, profile: Path | None
) -> CostModels:
    """The cost models of a plan.

    Args:
      run: the config, of which dtype and memory are read.
      config: configuration of the backbone.
      replica: the devices.
      profile: as for `dtype_of`.

    Raises:
      BackboneError: a linear cannot be stored in `config.backbone_format`.
      ProfileError: as `dtype_of`, or the profile is that of another backbone.
    """
    dtype = dtype_of(run, profile)
    size = size_of(config, jnp.dtype(dtype))
    if not profile:
        return device_models(size, run.memory, replica, dtype=dtype)
    return measured_models(profile, size, run.memory, replica)


def pool_alone(task: Task, config: BackboneConfig) -> PoolSpec:
    """The sizes of a pool that holds only one task.

    Args:
      task: the task; its data are not read.
      config: configuration of the backbone.

    Raises:
      TaskError: the task's adapter does not suit the backbone.
    """
    try:
        targets = kind_of(task.adapter).targets(task.adapter, config)
        return pool_of_task(task, targets, size_of_adapter(task.adapter, config))
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
