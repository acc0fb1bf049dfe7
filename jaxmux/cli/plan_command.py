"""The command `jaxmux plan`: plans the training of a config's tasks and shows the plan."""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from jaxmux.atomic_files import holds_object, refuse_foreign, require_output
from jaxmux.data import load_tokenizer
from jaxmux.data.stored_samples import stream_lengths
from jaxmux.engine import PreparedTask
from jaxmux.engine.tasks.prepared_task import Loaded, mesh_sizes, read_data
from jaxmux.installation import resolve_path
from jaxmux.models import BackboneConfig, resolve_backbone
from jaxmux.peft import kind_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import CostSource, ReplicaCosts
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.packing import PartOfBatches, ShapeClass, ShapeRequest
from jaxmux.planner.pipeline import (
    Plan,
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    try_smaller_microbatches,
)
from jaxmux.runs import check_names
from jaxmux.runs.console import RunConsole
from jaxmux.runs.run_layout import layout_with_places
from jaxmux.runs.run_options import AUTO_MESH
from jaxmux.runs.run_shape import PlannedDevice, costs_of_run, smaller_text
from jaxmux.runs.sweep_results import brackets_of
from jaxmux.sweeps import Sweep, expanded
from jaxmux.tasks import Task

from . import gin_bindings, plan_fits
from .arguments import DEFAULT_ROUNDS
from .gin_bindings import RunConfig
from .plan_inputs import adapter_sizes, on_device, planned_device
from .plan_picture import draw_schedule
from .plan_tables import TrainingFacts, bucket_labels, deployment_tables, plan_tables
from .plan_trace import chrome_trace
from .report_console import report_console, say_if_demo

if TYPE_CHECKING:
    from jaxmux.planner.replicas import DeployedPlans

# If a global batch is larger than this, a plan covers fewer than `DEFAULT_ROUNDS` rounds, so that
# planning takes seconds.
_LARGE_BATCH = 512
_MILLISECOND = 1e-3
_PLAN = "plan.json"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    if options.fits:
        return plan_fits.run(options)
    console = report_console()
    say_if_demo(options, console)
    if options.out:
        require_output(options.out / _PLAN, "plan", _is_plan)
    # Leave the device's memory to a training run that may be using the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    gin_bindings.parse([resolve_path(file) for file in options.gin_file], options.bindings)
    run = gin_bindings.run_config()
    run = dataclasses.replace(run, mesh=options.mesh or run.mesh)
    if (device := planned_device(options.profile)) is not None:
        run = on_device(run, device)
    if run.mesh == AUTO_MESH and device:
        raise PlanningError(
            "--mesh=auto takes the devices of this machine; with --profile name them, e.g. "
            "--mesh=pp4"
        )
    if options.out and run.mesh != AUTO_MESH:
        _refuse_foreign_pictures(options.out, run.deployment)
    inputs = _read_inputs(run, device, options.rounds)
    if len(inputs.deployment.replicas) > 1:
        # Imported here because a plan of one replica does not use the deployment solvers.
        from jaxmux.planner.replicas import make_deployment_plan

        several = make_deployment_plan(
            inputs.tasks,
            inputs.request,
            inputs.deployment,
            inputs.costs,
            inputs.source,
            inputs.rounds,
            inputs.shapes,
        )
        parts = deployment_tables(several, inputs.dropped, inputs.training)
        write = partial(write_deployment_plan, several)
    else:
        plan, smaller = _plan_replica(inputs)
        parts = plan_tables(plan, smaller, inputs.dropped, inputs.training)
        write = partial(write_plan, plan)
    if options.out:
        _refuse_foreign_pictures(options.out, inputs.deployment)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    if options.out:
        for path in write(options.out):
            console.print(str(path), soft_wrap=True)
    return 0


def _is_plan(path: Path) -> bool:
    return any(holds_object(path, ("format", key)) for key in ("replica", "deployment"))


def _pictures(folder: Path, replica: int | None = None) -> tuple[Path, Path]:
    end = "" if replica is None else f"_replica{replica}"
    return folder / f"schedule{end}.png", folder / f"trace{end}.json"


def _refuse_foreign_pictures(folder: Path, deployment: Deployment) -> None:
    """Raises InputError if a file that does not belong to a plan would be replaced."""
    count = len(deployment.replicas)
    for replica in range(count) if count > 1 else (None,):
        for path in _pictures(folder, replica):
            refuse_foreign(path, "picture or trace", lambda path: _is_plan(path.parent / _PLAN))


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Writes plan.json, schedule.png and trace.json (for ui.perfetto.dev); returns their paths."""
    plan_json = folder / _PLAN
    plan_json.write_text(json.dumps(plan.to_json()) + "\n")
    return [plan_json, *_write_schedule(plan, *_pictures(folder))]


def write_deployment_plan(several: "DeployedPlans", folder: Path) -> list[Path]:
    """Writes plan.json, and a picture and a trace for each replica; returns their paths."""
    paths = [folder / _PLAN]
    paths[0].write_text(json.dumps(several.to_json()) + "\n")
    for i, plan in enumerate(several.plans):
        if plan:
            paths += _write_schedule(plan, *_pictures(folder, i))
    return paths


def _write_schedule(plan: Plan, picture: Path, trace: Path) -> list[Path]:
    simulation = plan.simulate(unit=_MILLISECOND)
    title = f"{plan.rounds} rounds on {plan.replica}, {plan.costs.kind}"
    draw_schedule(plan.schedule, simulation, picture, title, bucket_labels(plan), "ms")
    trace.write_text(json.dumps(chrome_trace(plan.schedule, simulation)) + "\n")
    return [picture, trace]


class _Inputs(NamedTuple):
    """The inputs of a plan.

    Attributes:
      tasks: the tasks that train at the same time, with whole global batches.
      shapes: for each kind of replica, the shape class that training chooses.
      costs: for each kind of replica, its costs.
      source: origin of the costs.
      training: facts about training, for the report.
      rounds: number of rounds that the plan covers.
    """

    tasks: list[TaskLoad]
    request: ShapeRequest
    deployment: Deployment
    shapes: dict[Replica, ShapeClass]
    costs: dict[Replica, ReplicaCosts]
    source: CostSource
    training: TrainingFacts
    rounds: int

    @property
    def dropped(self) -> dict[str, int]:
        """By name of the task, the number of records without a sample."""
        return {task.name: task.dropped for task in self.tasks}


def _read_inputs(run: RunConfig, device: PlannedDevice | None, rounds: int | None) -> _Inputs:
    """Reads the data, and chooses devices, shape classes and slots as training does."""
    tasks = expanded(run.tasks)
    check_names(tasks)
    folder = resolve_backbone(run.backbone)
    config = BackboneConfig.from_folder(folder, run.backbone_format)
    if run.mesh != AUTO_MESH:
        for replica in run.deployment.counts:
            replica.require(config.num_layers, mesh_sizes(config))
    tokenizer = load_tokenizer(folder)
    loaded = Loaded()
    prepared = [_prepare(task, config, tokenizer, loaded) for task in tasks]
    if run.row_len is not None:
        for task in prepared:
            task.refuse_rows_of(run.row_len)
    choices = StringIO()
    layout = layout_with_places(
        prepared,
        config,
        run,
        recorded=None,
        console=RunConsole(Console(file=choices)),
        may_wait=any(isinstance(task, Sweep) for task in run.tasks),
        device=device,
    )
    deployment = layout.deployment
    shrinking = layout.shrinking(prepared, config, run, device) if len(tasks) > 1 else None
    if shrinking:
        sweeps = [task for task in run.tasks if isinstance(task, Sweep)]
        for smaller in shrinking.expected(brackets_of(sweeps, prepared)):
            shape, padding = smaller.shape.shape, smaller.shape.padding
            choices.write(
                f"after step {smaller.step}, "
                f"{smaller_text(smaller.tasks, len(tasks), shape)} ({padding:.0%} padding)\n"
            )
    costs = {
        replica: costs_of_run(
            prepared,
            config,
            run,
            replica,
            layout.places,
            replicas=round(deployment.devices / replica.devices),
            device=device,
        )
        for replica in deployment.counts
    }
    first, *_ = costs.values()
    # Kinds of replicas use different collectives, whose costs may be estimated.
    notes = tuple(dict.fromkeys(note for each in costs.values() for note in each.source.notes))
    if device and device.profile:
        notes += (
            "training reads only profiles that ship; for this shape, set fine_tune.row_len and "
            "fine_tune.chunk_len",
        )
    if layout.places:
        notes += (
            f"the plan is of the first {layout.places} of {len(tasks)} tasks; the others wait",
        )
    planned = [_load(task, layout.shape) for task in prepared[: layout.places]]
    return _Inputs(
        planned,
        run.shape_request(first.least_chunk_len),
        deployment,
        dict(zip(deployment.replicas, layout.shapes, strict=True)),
        {replica: each.replica for replica, each in costs.items()},
        first.source._replace(notes=notes),
        TrainingFacts(
            device.kind if device else jax.local_devices()[0].device_kind,
            memory_is_known=bool(layout.admissions),
            choices=tuple(choices.getvalue().splitlines()),
        ),
        _choose_rounds(rounds, planned, min(replica.shards for replica in deployment.counts)),
    )


def _plan_replica(inputs: _Inputs) -> tuple[Plan, SmallerMicrobatches | None]:
    """The plan of a single replica, and smaller microbatches that would be faster, if there are
    any. The plan is that of the first data shard, which has at least as many samples as any
    other."""
    (costs,), (shape,) = inputs.costs.values(), inputs.shapes.values()
    tasks = [
        task._replace(batches=PartOfBatches(task.batches, costs.replica.shards))
        for task in inputs.tasks
    ]
    plan = make_plan(tasks, inputs.request, costs, inputs.source, inputs.rounds, shape)
    return plan, try_smaller_microbatches(plan, tasks, inputs.request, costs)


def _choose_rounds(asked: int | None, tasks: Sequence[TaskLoad], shards: int) -> int:
    """Number of rounds to plan: `asked`, or a number that depends on the largest global batch of a
    data shard. It is at least 2, so that the plan shows how the second round waits for the updates
    of the first."""
    largest = max(-(-len(task.batches[0]) // shards) for task in tasks)
    rounds = asked or max(2, min(DEFAULT_ROUNDS, DEFAULT_ROUNDS * _LARGE_BATCH // largest))
    if largest > _LARGE_BATCH:
        line = f"packing {rounds} rounds of up to {largest:,} samples a task: this takes a while"
        print(line, file=sys.stderr)
    return rounds


def _prepare(task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded) -> PreparedTask:
    """Reads and tokenizes the task's data. The result has no initial adapter, because no weights
    are read."""
    targets, size = adapter_sizes(task, config)
    data = read_data(task, config, tokenizer, loaded)
    return PreparedTask(
        task=task,
        targets=targets,
        make_adapter=dict,
        samples=data.samples,
        batches=data.batches,
        steps=data.steps,
        eval_samples=data.eval_samples,
        size=size,
    )


def _load(prepared: PreparedTask, shape: ShapeClass) -> TaskLoad:
    """The load of a task in microbatches of this shape, or with rows of this length."""
    task, objective = prepared.task, prepared.task.objective
    samples = stream_lengths(prepared.samples.samples)
    trained = objective.trained(samples)
    is_scored = objective.needs_log_probs and not prepared.pairs_fit(shape)
    only_read = samples if objective.needs_mismatched else samples[:0]
    return TaskLoad(
        name=task.name,
        pool=prepared.pool,
        batch_size=task.batch_size,
        steps=prepared.steps,
        lengths=trained.tolist(),
        batches=prepared.packed_lengths(shape),
        only_read=[*only_read.tolist(), *stream_lengths(prepared.eval_samples).tolist()],
        dropped=prepared.samples.dropped,
        virtual_tokens=kind_of(task.adapter).virtual_tokens(task.adapter),
        scored=float(samples.sum() / trained.sum()) if is_scored else 0.0,
        members=len(objective.trained(range(objective.members))),
        unit=objective.unit,
        longest_pair=prepared.longest_pair if prepared.pairs_fit(shape) else 0,
    )
