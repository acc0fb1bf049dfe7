"""Shows a plan: `python -m jaxmux.plan --gin_file=my_tasks.gin --mesh=pp4,tp2 --out=plan`."""

import argparse
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from jaxmux.data import DataError, load_tokenizer
from jaxmux.engine.backbone_size import size_of
from jaxmux.engine.prepared_task import read_data
from jaxmux.models import BackboneConfig, BackboneError, planned_remat
from jaxmux.package_files import resolve_path
from jaxmux.peft import resolve_targets
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.cost_models import CostModels, device_models, measured_models
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from jaxmux.planner.pipeline.make_plan import (
    ShapeRequest,
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    shared_pool,
    try_smaller_microbatches,
)
from jaxmux.planner.pipeline.plan_value import Plan
from jaxmux.runs import check_names, check_options, fine_tune
from jaxmux.runs.run_shape import BatchLengths
from jaxmux.tasks import Task, TaskError

from . import gin_bindings
from .gin_bindings import ConfigError
from .plan_picture import draw_schedule
from .plan_tables import bucket_labels, plan_tables
from .plan_trace import chrome_trace
from .train_command import DEMO_CONFIG

_USER_ERRORS = (BackboneError, ConfigError, DataError, PlanningError, TaskError, OSError)
# Steps that are planned where nothing is said, and samples of a global batch from which on they are
# fewer, so that a plan is there in seconds.
_STEPS, _LARGE_BATCH = 8, 512
# Columns where there is no terminal.
_PLAIN_WIDTH = 100
_MILLISECOND = 1e-3

_HELP = """\
Plans the tasks of a gin config, the same that `python -m jaxmux.train` takes, without training
anything: data is read and tokenized, of the backbone config.json and the tokenizer. Shows which
tasks go together, in which shape of microbatches, and what a step is predicted to take, also on
devices that are not there. Without a config it plans the bundled demo. Exit code 2: refused.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options, bindings = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        mesh = Replica.parse(options.mesh)
        gin_bindings.parse([resolve_path(file) for file in options.gin_file], bindings)
        plan, smaller, dropped = _plan(_settings(), mesh, options.profile, options.rounds)
        for part in plan_tables(plan, smaller, dropped):
            console.print(part, markup=False)
        if options.out:
            for path in write_plan(plan, options.out):
                console.print(str(path), markup=False, soft_wrap=True)
    except _USER_ERRORS as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Writes plan.json, schedule.png and trace.json (for ui.perfetto.dev); returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in ("plan.json", "schedule.png", "trace.json")]
    simulation = plan.simulate(unit=_MILLISECOND)
    paths[0].write_text(json.dumps(plan.to_json()) + "\n")
    title = f"{plan.rounds} steps on {plan.mesh}, {plan.costs.kind}"
    draw_schedule(plan.schedule, simulation, paths[1], title, bucket_labels(plan), "ms")
    paths[2].write_text(json.dumps(chrome_trace(plan.schedule, simulation)) + "\n")
    return paths


def _settings() -> dict[str, Any]:
    """All parameters of `fine_tune`, those that the config leaves out with their defaults."""
    parameters = inspect.signature(fine_tune).parameters
    defaults = {name: p.default for name, p in parameters.items()}
    settings = defaults | gin_bindings.fine_tune_arguments()
    check_options(settings)
    return settings


def _plan(
    settings: Mapping[str, Any], mesh: Replica, profile: Path | None, rounds: int | None
) -> tuple[Plan, SmallerMicrobatches | None, dict[str, int]]:
    """The plan, smaller microbatches with which it would be faster, and by task how many records
    gave no sample."""
    check_names(settings["tasks"])
    folder = resolve_path(settings["backbone"])
    config = BackboneConfig.from_folder(folder)
    mesh.require(
        config.num_layers,
        {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
        },
    )
    models = _cost_models(settings, config, mesh, profile)
    tokenizer = load_tokenizer(folder)
    tasks = [_read_task(task, config, tokenizer) for task in settings["tasks"]]
    rounds = _choose_rounds(rounds, tasks)
    remat = planned_remat(settings["remat"])
    request = ShapeRequest(
        settings["tokens_per_microbatch"],
        settings["row_len"],
        settings["chunk_len"],
        models.least_chunk_len,
    )
    costs = ReplicaCosts(models.times, models.memory, shared_pool(tasks), mesh, remat)
    plan = make_plan(tasks, request, costs, models.source, rounds)
    smaller = try_smaller_microbatches(plan, tasks, request, costs)
    return plan, smaller, {task.name: task.dropped for task in tasks}


def _choose_rounds(asked: int | None, tasks: Sequence[TaskLoad]) -> int:
    """As asked, else by the largest global batch; two at least, to show what waits for updates."""
    largest = max(len(task.batches[0]) for task in tasks)
    rounds = asked or max(2, min(_STEPS, _STEPS * _LARGE_BATCH // largest))
    if largest > _LARGE_BATCH:
        line = f"packing {rounds} steps of up to {largest:,} samples a task: this takes a while"
        print(line, file=sys.stderr)
    return rounds


def _cost_models(
    settings: Mapping[str, Any], config: BackboneConfig, mesh: Replica, profile: Path | None
) -> CostModels:
    dtype = "float32" if settings["dtype"] == "float32" else "bfloat16"
    size = size_of(config, jnp.dtype(dtype))
    memory_gib = settings["memory_gib"]
    memory = None if memory_gib is None else int(memory_gib * 2**30)
    if profile:
        return measured_models(profile, size, memory, mesh)
    return device_models(size, memory, mesh, dtype=dtype)


def _read_task(task: Task, config: BackboneConfig, tokenizer: Any) -> TaskLoad:
    """Reads and tokenizes the task's data; its adapter is not made."""
    try:
        modules = tuple(resolve_targets(task.adapter.target_modules, config))
        data = read_data(task, config, tokenizer)
    except ValueError as e:
        raise TaskError(f"task {task.name!r}: {e}") from e
    rank, dropout, optimizer = task.adapter.rank, task.adapter.dropout > 0, task.optimizer.kind
    return TaskLoad(
        name=task.name,
        pool=PoolSpec(1, rank, modules, dropout, optimizer),
        batch_size=task.batch_size,
        steps=data.steps,
        lengths=[s.stream_length for s in data.samples.samples],
        batches=BatchLengths(data.batches, data.steps),
        held_out=[s.stream_length for s in data.eval_samples],
        dropped=data.samples.dropped,
    )


def _parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmux.plan",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--gin_file", action="append", metavar="FILE", help="a config; may be repeated"
    )
    parser.add_argument(
        "--gin_param", action="append", default=[], metavar="NAME=VALUE", help="as --gin.NAME=VALUE"
    )
    parser.add_argument(
        "--gin.NAME", dest="_", metavar="VALUE", help="set one parameter of the config"
    )
    parser.add_argument(
        "--mesh",
        default="pp1",
        help="pipeline stages and tensor parallelism, e.g. pp4,tp2; default: one device",
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="of python -m jaxmux.profile; default: the one that ships for the backbone on H200s, "
        "else an estimate for H200s",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"steps of every task; default: {_STEPS}, fewer of large global batches",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write plan.json, schedule.png and trace.json here"
    )
    options, others = parser.parse_known_args(arguments)
    if unknown := [a for a in others if not a.startswith("--gin.") or "=" not in a]:
        parser.error(f"unknown argument {unknown[0]}; a parameter is set by --gin.NAME=VALUE")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds should be at least 1, found {options.rounds}")
    options.gin_file = options.gin_file or [DEMO_CONFIG]
    return options, options.gin_param + [other.removeprefix("--gin.") for other in others]


if __name__ == "__main__":
    sys.exit(main())
