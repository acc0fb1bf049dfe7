"""The command `jaxmux plan`: plans the training of a config's tasks and shows the plan."""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.text import Text

from jaxmux.atomic_files import holds_object, refuse_foreign, require_output
from jaxmux.backbone_folder import resolve_backbone
from jaxmux.data import load_tokenizer
from jaxmux.data.stored_samples import stream_lengths
from jaxmux.engine.backbone_size import mesh_sizes
from jaxmux.engine.batch_lengths import BatchLengths
from jaxmux.engine.task_data import Loaded, read_data
from jaxmux.models import BackboneConfig, planned_remat
from jaxmux.package_files import resolve_path
from jaxmux.peft import kind_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import CostSource, ReplicaCosts
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.packing import PartOfBatches, ShapeRequest
from jaxmux.planner.pipeline import (
    Plan,
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    shared_pool,
    try_smaller_microbatches,
)
from jaxmux.runs import check_names
from jaxmux.runs.run_options import AUTO_MESH
from jaxmux.sweeps import expanded
from jaxmux.tasks import Task

from . import gin_bindings, plan_fits
from .arguments import DEFAULT_ROUNDS
from .gin_bindings import RunConfig
from .plan_inputs import cost_models, pool_alone
from .plan_picture import draw_schedule
from .plan_tables import bucket_labels, deployment_tables, plan_tables
from .plan_trace import chrome_trace
from .report_console import report_console, say_if_demo

if TYPE_CHECKING:
    from jaxmux.planner.replicas import DeployedPlans

# Global batches of more samples get fewer rounds than `DEFAULT_ROUNDS`, so that planning takes
# seconds.
_LARGE_BATCH = 512
_MILLISECOND = 1e-3
_PLAN = "plan.json"


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises `InputError` for unusable input."""
    if options.fits:
        return plan_fits.run(options)
    console = report_console()
    say_if_demo(options, console)
    if options.out:
        require_output(options.out / _PLAN, "plan", _is_plan)
    if options.mesh == AUTO_MESH:
        raise PlanningError(
            "--mesh=auto: a plan does not know your devices; name them, e.g. --mesh=pp4"
        )
    deployment = Deployment.parse(options.mesh)
    if options.out:
        _refuse_foreign_pictures(options.out, deployment)
    gin_bindings.parse([resolve_path(file) for file in options.gin_file], options.bindings)
    inputs = _read_inputs(gin_bindings.run_config(), deployment, options.profile, options.rounds)
    if len(deployment.replicas) > 1:
        # A plan of one replica does without the solvers of deployments.
        from jaxmux.planner.replicas import make_deployment_plan

        several = make_deployment_plan(
            inputs.tasks, inputs.request, deployment, inputs.costs, inputs.source, inputs.rounds
        )
        parts = deployment_tables(several, inputs.dropped)
        write = partial(write_deployment_plan, several)
    else:
        plan, smaller = _plan_replica(inputs)
        parts = plan_tables(plan, smaller, inputs.dropped)
        write = partial(write_plan, plan)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))
    if options.out:
        for path in write(options.out):
            console.print(str(path), soft_wrap=True)
    return 0


def _is_plan(path: Path) -> bool:
    return any(holds_object(path, ("format", key)) for key in ("replica", "deployment"))


def _pictures(folder: Path, replica: int | None = None) -> tuple[Path, Path]:
    """The files of the picture and of the trace of a plan, or of a replica's plan."""
    end = "" if replica is None else f"_replica{replica}"
    return folder / f"schedule{end}.png", folder / f"trace{end}.json"


def _refuse_foreign_pictures(folder: Path, deployment: Deployment) -> None:
    """Raises InputError if a file beside plan.json would be replaced that belongs to no plan."""
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
    """What a plan is made from.

    Attributes:
      tasks: the tasks, with whole global batches.
      request: limits of the shape class.
      costs: the costs of each kind of replica.
      source: where the costs come from.
      rounds: number of rounds that the plan covers.
    """

    tasks: list[TaskLoad]
    request: ShapeRequest
    costs: dict[Replica, ReplicaCosts]
    source: CostSource
    rounds: int

    @property
    def dropped(self) -> dict[str, int]:
        """By name of the task, the number of records that gave no sample."""
        return {task.name: task.dropped for task in self.tasks}


def _read_inputs(
    run: RunConfig, deployment: Deployment, profile: Path | None, rounds: int | None
) -> _Inputs:
    own_tasks = expanded(run.tasks)
    check_names(own_tasks)
    folder = resolve_backbone(run.backbone)
    config = BackboneConfig.from_folder(folder, run.backbone_format)
    for replica in deployment.counts:
        replica.require(config.num_layers, mesh_sizes(config))
    models = {replica: cost_models(run, config, replica, profile) for replica in deployment.counts}
    tokenizer = load_tokenizer(folder)
    loaded = Loaded()
    tasks = [_read_task(task, config, tokenizer, loaded) for task in own_tasks]
    pool, remat = shared_pool(tasks), planned_remat(run.remat)
    waiting = ()
    if (places := run.tasks_at_once or len(tasks)) < len(tasks):
        waiting = (f"the plan is of the first {places} of {len(tasks)} tasks; the others wait",)
        # Each place has room for each task.
        tasks, pool = tasks[:places], pool._replace(slots=places)
    costs = {
        replica: ReplicaCosts(own.times, own.memory, pool, replica, remat)
        for replica, own in models.items()
    }
    first, *_ = models.values()
    # Each kind of replica has other collectives, which may be estimated.
    notes = tuple(dict.fromkeys(note for own in models.values() for note in own.source.notes))
    return _Inputs(
        tasks,
        run.shape_request(first.least_chunk_len),
        costs,
        first.source._replace(notes=(*notes, *waiting)),
        _choose_rounds(rounds, tasks, min(replica.shards for replica in deployment.counts)),
    )


def _plan_replica(inputs: _Inputs) -> tuple[Plan, SmallerMicrobatches | None]:
    """The plan of a single replica, and smaller microbatches with which it would be faster. Its
    batches are those of the first data shard, which has at least as many samples as any other."""
    (costs,) = inputs.costs.values()
    tasks = [
        task._replace(batches=PartOfBatches(task.batches, costs.replica.shards))
        for task in inputs.tasks
    ]
    plan = make_plan(tasks, inputs.request, costs, inputs.source, inputs.rounds)
    return plan, try_smaller_microbatches(plan, tasks, inputs.request, costs)


def _choose_rounds(given: int | None, tasks: Sequence[TaskLoad], shards: int) -> int:
    """The given number of rounds; otherwise one that depends on the largest global batch of a data
    shard, at least 2, so that the plan shows how the second round waits for the updates of the
    first."""
    largest = max(-(-len(task.batches[0]) // shards) for task in tasks)
    rounds = given or max(2, min(DEFAULT_ROUNDS, DEFAULT_ROUNDS * _LARGE_BATCH // largest))
    if largest > _LARGE_BATCH:
        line = f"packing {rounds} rounds of up to {largest:,} samples a task: this takes a while"
        print(line, file=sys.stderr)
    return rounds


def _read_task(task: Task, config: BackboneConfig, tokenizer: Any, loaded: Loaded) -> TaskLoad:
    """Reads and tokenizes the task's data."""
    pool = pool_alone(task, config)
    data = read_data(task, config, tokenizer, loaded)
    return TaskLoad(
        name=task.name,
        pool=pool,
        batch_size=task.batch_size,
        steps=data.steps,
        lengths=stream_lengths(data.samples.samples).tolist(),
        batches=BatchLengths(data.batches, data.steps),
        held_out=stream_lengths(data.eval_samples).tolist(),
        dropped=data.samples.dropped,
        virtual_tokens=kind_of(task.adapter).virtual_tokens(task.adapter),
    )
