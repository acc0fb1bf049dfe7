"""The option `--fits` of `jaxmux plan`: predicts what fits on one device."""

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmux.atomic_files import holds_object, require_output
from jaxmux.engine.tasks.prepared_task import pool_of_task
from jaxmux.installation import resolve_path
from jaxmux.models import BACKBONE_FORMATS, BackboneConfig, BackboneError, resolve_backbone
from jaxmux.models.device_memory import memory_for_training
from jaxmux.optimizers import AdamW
from jaxmux.peft import LoRA
from jaxmux.planner.costs import (
    CostSource,
    FitCell,
    PoolSpec,
    fit_cells,
    merge_pool_specs,
)
from jaxmux.planner.costs.device_profile import read_profile
from jaxmux.planner.numbers import power_of_two
from jaxmux.planner.packing import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class
from jaxmux.runs.run_shape import PlannedDevice, RunCosts, pool_costs
from jaxmux.sweeps import expanded
from jaxmux.tasks import Task

from . import gin_bindings
from .fit_tables import fit_tables
from .gin_bindings import RunConfig
from .main import MEMORY_SHARE
from .plan_inputs import H200, adapter_sizes, on_device, planned_device
from .report_console import report_console, say_if_demo

# Rows and columns of the table, in addition to the values of the config.
_TOKENS = (1024, 2048, 4096, 8192, 16384)
_TASKS = (1, 4, 16, 64)
# The task that is used if a config has no tasks. Its data is not read.
_TASK = Task("task", "none.jsonl", LoRA(rank=16), AdamW(), steps=1)
_FITS = "fits.json"


class Fits(NamedTuple):
    """Predictions of what fits on one device.

    Attributes:
      backbone: name of the architecture.
      layers: number of layers of the backbone.
      device_gib: memory of the device in GiB.
      memory_bytes: bytes of this memory that training may use.
      sources: for each format, the origin of the predictions; all are for the same device.
      pool: sizes of the pool, with the contents of a slot.
      row_len: tokens of a row, which holds at most `max_sequences` samples.
      max_sequences: most samples of a row.
      weights: for each format, the bytes of the backbone's weights.
      cells: for each format, the cells of the table.
      refused: for each format without predictions, the reason: the backbone cannot be stored in it,
        or there are no costs.
    """

    backbone: str
    layers: int
    device_gib: float
    memory_bytes: int
    sources: Mapping[str, CostSource]
    pool: PoolSpec
    row_len: int
    max_sequences: int
    weights: Mapping[str, int]
    cells: Mapping[str, Sequence[FitCell]]
    refused: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        cells = {name: [cell._asdict() for cell in row] for name, row in self.cells.items()}
        others = [kind.kind for kind in self.pool.others]
        pool = self.pool._asdict() | {"others": others}
        sources = {name: source._asdict() for name, source in self.sources.items()}
        return self._asdict() | {"cells": cells, "pool": pool, "sources": sources}


def run(options: argparse.Namespace) -> int:
    """Runs the command with `--fits`; returns its exit code, 0. Raises InputError for unusable
    input."""
    console = report_console()
    say_if_demo(options, console)
    if options.out:
        is_ours = partial(holds_object, keys=("device_gib", "cells", "pool"))
        require_output(options.out / _FITS, "table", is_ours)
    files = [resolve_path(file) for file in options.gin_file or ()]
    gin_bindings.parse(files, options.bindings)
    config = gin_bindings.run_config(options.backbone, [_TASK])
    fits = find_fits(config, options.fits, planned_device(options.profile) or H200)
    for part in fit_tables(fits):
        console.print(part)
    if options.out:
        path = options.out / _FITS
        path.write_text(json.dumps(fits.to_json()) + "\n")
        console.print(str(path), soft_wrap=True)
    return 0


def find_fits(run: RunConfig, device_gib: float, device: PlannedDevice) -> Fits:
    """Predicts what fits on one device, without reading weights or data.

    Args:
      run: the config. Each slot has room for the largest of its tasks.
      device_gib: memory of the device in GiB. JAX and the engine leave a part of it unused, as they
        do in training; `run.memory_gib` is a further limit.
      device: the kind of device.

    Raises:
      InputError: the backbone's config.json, a task or the profile cannot be used.
    """
    usable = memory_for_training(int(device_gib * MEMORY_SHARE * 2**30)) / 2**30
    run = on_device(
        dataclasses.replace(run, memory_gib=min(usable, run.memory_gib or usable)), device
    )
    config = BackboneConfig.from_folder(resolve_backbone(run.backbone))
    reserved = run.reserved(config)
    config_tasks = expanded(run.tasks)
    alone = [pool_of_task(task, *adapter_sizes(task, config)) for task in config_tasks]
    pool = merge_pool_specs(alone, reserved)._replace(slots=reserved.slots)
    tasks = sorted({*_TASKS, len(config_tasks)})
    costs, refused = _costs(run, pool, device)
    first, *_ = costs.values()
    shapes = _shapes(run, first.least_chunk_len)
    cells = {name: fit_cells(cost.replica, shapes, tasks) for name, cost in costs.items()}
    sizes = {name: cost.replica.memory.backbone for name, cost in costs.items()}
    return Fits(
        backbone=config.architecture,
        layers=config.num_layers,
        device_gib=device_gib,
        memory_bytes=first.replica.memory.memory,
        sources={name: cost.source for name, cost in costs.items()},
        pool=pool,
        row_len=shapes[0].row_len,
        max_sequences=shapes[0].max_sequences,
        weights={
            name: size.layers * size.layer_bytes + size.outside_bytes
            for name, size in sizes.items()
        },
        cells=cells,
        refused=refused,
    )


def _costs(
    run: RunConfig, pool: PoolSpec, device: PlannedDevice
) -> tuple[dict[str, RunCosts], dict[str, str]]:
    """For each format, the costs, or the reason why there are none. The checkpoint's format comes
    first."""
    folder = resolve_backbone(run.backbone)
    measured = device.profile and read_profile(device.profile).backbone.backbone_format
    costs: dict[str, RunCosts] = {}
    refused: dict[str, str] = {}
    for form in (None, *BACKBONE_FORMATS):
        config = BackboneConfig.from_folder(folder, form)
        name = config.linear_format or run.dtype
        if name in costs:
            continue
        if measured and form != measured:
            refused[name] = f"{device.profile} was measured with linears in {measured}"
            continue
        try:
            costs[name] = pool_costs(
                pool, config, jnp.dtype(run.dtype), run.remat, run.memory, device=device
            )
        except BackboneError as e:
            if measured:
                raise
            refused[name] = str(e)
    return costs, refused


def _shapes(run: RunConfig, least_chunk_len: int) -> list[ShapeClass]:
    """The table's microbatches, in rows for the longest sample that a task may have."""
    longest = max(task.max_length for task in expanded(run.tasks)) - 1
    row_len = run.row_len or power_of_two(max(longest, MIN_CHUNK_LEN))
    chunk_len = run.chunk_len or least_chunk_len
    shapes = [
        smallest_shape_class([row_len], tokens, chunk_len, row_len)
        for tokens in sorted({*_TOKENS, run.tokens_per_microbatch})
    ]
    sequences = run.max_sequences or 1
    # Microbatches shorter than a row are rounded up to the same shape.
    return list(dict.fromkeys(dataclasses.replace(s, max_sequences=sequences) for s in shapes))
