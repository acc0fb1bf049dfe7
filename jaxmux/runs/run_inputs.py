"""Inputs of a training run: checks of its arguments, and its tasks with their data."""

import dataclasses
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.data import Rendering, load_tokenizer
from jaxmux.data.chat_templates import TemplateClock
from jaxmux.engine import PreparedTask, prepare_task
from jaxmux.engine.tasks.prepared_task import Loaded
from jaxmux.installation import installed_versions
from jaxmux.models import (
    BackboneConfig,
    backbone_dtype,
    backbone_fingerprint,
    check_backbone,
    checkpoint_tensors,
    resolve_backbone,
)
from jaxmux.specifications.reading import task_to_json
from jaxmux.sweeps import Sweep
from jaxmux.tasks import Task, TaskError

from .console import StartTimeline
from .run_directory import FORMAT, RunDirectory
from .run_layout import refuse_mesh
from .run_options import AUTO_MESH, RunOptions, check_names
from .sweep_results import halving_of, values_of


class RunInputs(NamedTuple):
    """The inputs that a training run reads before it begins. `fingerprints` has hashes of the
    backbone and of the data, by name ("backbone")."""

    config: BackboneConfig
    tokenizer: Any
    prepared: list[PreparedTask]
    fingerprints: dict[str, str]

    @property
    def samples(self) -> dict[str, dict[str, int]]:
        """By task, the number of "training" and of "held_out" samples or pairs."""
        return {
            p.task.name: {
                "training": p.task.objective.count(p.samples.samples),
                "held_out": p.task.objective.count(p.eval_samples),
            }
            for p in self.prepared
        }

    @property
    def rendering(self) -> dict[str, Rendering]:
        """By task, how the records of its training data became text."""
        return {p.task.name: p.samples.rendering for p in self.prepared}


def check_arguments(
    backbone: str | Path, tasks: Sequence[Task], run_dir: str | Path, restart: bool
) -> str:
    """Checks arguments of `fine_tune`, and returns the path of the backbone's folder.

    Args:
      backbone: a path, or a name with a prefix such as "jaxmux:".
      restart: whether the earlier training run in `run_dir` is deleted.

    Raises:
      TaskError: there is no task, two have the same name, or a task begins with an adapter that
        `restart` deletes.
      BackboneError: the folder cannot be found.
    """
    folder = str(Path(resolve_backbone(backbone)).absolute())
    if not tasks:
        raise TaskError("no tasks to train")
    check_names(tasks)
    _refuse_own_adapters(tasks, Path(run_dir), restart)
    return folder


def _refuse_own_adapters(tasks: Sequence[Task], run_dir: Path, restart: bool) -> None:
    """Raises TaskError if a task begins with an adapter that `restart` would delete."""
    for task in tasks:
        source = task.resume_from
        if restart and source and Path(source).resolve().is_relative_to(run_dir.resolve()):
            raise TaskError(
                f"task {task.name!r}: restart would delete {source}, with which the task begins; "
                "copy it to another place, or choose another run_dir"
            )


def described(
    tasks: Sequence[Task], sweeps: Sequence[Sweep], options: RunOptions, restart: bool
) -> dict[str, str]:
    """The settings that must be the same in all processes, as texts by name. Paths of data may
    differ, so they are left out."""
    parts: dict[str, Any] = {
        "options": _settings(options) | {"restart": restart},
        "versions": installed_versions("jaxmux", "jax", "jaxlib"),
        "sweeps": halving_of(sweeps),
    }
    for task in tasks:
        fields = _identity(task)
        del fields["data"], fields["eval_data"]
        parts[f"settings of task {task.name!r}"] = fields
    return {w: json.dumps(value, sort_keys=True, default=str) for w, value in parts.items()}


def configuration_of(backbone: str, tasks: Sequence[Task], options: RunOptions) -> dict[str, Any]:
    """The description of a training run for trackers, as a JSON object."""
    configuration = {
        "backbone": backbone,
        "options": _settings(options),
        "tasks": {task.name: _identity(task) for task in tasks},
        "versions": installed_versions("jaxmux", "jax", "jaxlib"),
    }
    return json.loads(json.dumps(configuration, default=str))


def identity_of(
    backbone: str, tasks: Sequence[Task], sweeps: Sequence[Sweep], options: RunOptions
) -> dict[str, Any]:
    """The identity of a training run, as a JSON object. The run directory records it; a call with
    another identity cannot continue the run."""
    return {
        "format": FORMAT,
        "backbone": backbone,
        "dtype": options.dtype,
        "backbone_format": options.backbone_format,
        "tokens_per_microbatch": options.tokens_per_microbatch,
        "row_len": options.row_len,
        "chunk_len": options.chunk_len,
        "max_sequences": options.max_sequences,
        "tasks": {task.name: _identity(task) for task in tasks},
        # None if there are no sweeps; None counts as a missing entry.
        "sweeps": {
            name: halving | {"values": values_of(sweeps)[name]}
            for name, halving in halving_of(sweeps).items()
        }
        or None,
    }


def _settings(options: RunOptions) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in dataclasses.fields(RunOptions)}


def _identity(task: Task) -> dict[str, Any]:
    fields = task_to_json(task)
    del fields["name"], fields["sample_prompt"]
    return fields


def read_inputs(
    backbone: str,
    tasks: Sequence[Task],
    options: RunOptions,
    directory: RunDirectory | None,
    begun: datetime,
    timeline: StartTimeline,
) -> RunInputs:
    """Reads and checks all inputs except the backbone's weights. If there is a `directory`, it
    checks that the backbone is unchanged before the data is read. Chat templates use `begun` as the
    date. Raises BackboneError, DataError, TaskError, PlanningError or RunDirectoryError if an input
    cannot be used; the message names it."""
    config = BackboneConfig.from_folder(backbone, options.backbone_format)
    with ThreadPoolExecutor(1) as thread:
        # Hashing releases Python's global lock, which the import of transformers holds.
        fingerprint = thread.submit(_fingerprint, backbone, timeline)
        with timeline.span("load the tokenizer"):
            tokenizer = load_tokenizer(backbone)
        fingerprints = {"backbone": fingerprint.result()}
    if directory:
        # A changed backbone is reported at once, before the data is read.
        directory.refuse_changes(fingerprints)
    check_backbone(backbone)
    options.reserved(config)
    if options.mesh != AUTO_MESH:
        refuse_mesh(options.deployment, config)
    base = checkpoint_tensors(backbone, backbone_dtype(options.dtype), options.backbone_format)
    # The configurations of a sweep share their data, which is read once.
    loaded = Loaded()
    with timeline.span("read the data"), TemplateClock(begun):
        prepared = [
            prepare_task(
                task,
                config,
                tokenizer,
                base_fingerprint=fingerprints["backbone"],
                base=base,
                loaded=loaded,
                base_model=str(backbone),
            )
            for task in tasks
        ]
    for task in prepared:
        fingerprints |= task.fingerprints
        if options.row_len is not None:
            task.refuse_rows_of(options.row_len)
    return RunInputs(config, tokenizer, prepared, fingerprints)


def _fingerprint(backbone: str, timeline: StartTimeline) -> str:
    with timeline.span("hash the backbone"):
        return backbone_fingerprint(backbone)
