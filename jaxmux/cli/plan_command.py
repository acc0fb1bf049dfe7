"""Shows a plan: `python -m jaxmux.plan --gin_file=my_tasks.gin --mesh=pp4,tp2 --out=plan`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from rich.console import Console

from jaxmux.data import DataError, load_tokenizer
from jaxmux.engine.backbone_size import size_of
from jaxmux.engine.prepared_task import read_data
from jaxmux.models import BackboneConfig, BackboneError, planned_remat
from jaxmux.package_files import resolve_path
from jaxmux.peft import resolve_targets
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import (
    CostModels,
    PoolSpec,
    ReplicaCosts,
    device_models,
    measured_models,
)
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import ShapeRequest
from jaxmux.planner.pipeline import (
    Plan,
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    shared_pool,
    try_smaller_microbatches,
)
from jaxmux.runs import check_names
from jaxmux.runs.run_shape import BatchLengths
from jaxmux.tasks import Task, TaskError

from . import gin_bindings
from .gin_bindings import ConfigError, RunConfig
from .plan_picture import draw_schedule
from .plan_tables import bucket_labels, plan_tables
from .plan_trace import chrome_trace
from .train_command import DEMO_CONFIG

_USER_ERRORS = (BackboneError, ConfigError, DataError, PlanningError, TaskError, OSError)
# Rounds of a plan unless --rounds is given. Global batches of more samples than `_LARGE_BATCH` get
# fewer rounds, so that planning takes seconds.
_ROUNDS, _LARGE_BATCH = 8, 512
# Columns of the output where there is no terminal.
_PLAIN_WIDTH = 100
_MILLISECOND = 1e-3

_HELP = """\
Plans the training of a gin config's tasks, the same config that `python -m jaxmux.train` takes,
without training anything. It reads and tokenizes the data; of the backbone it reads config.json and
the tokenizer. It shows which tasks share microbatches, the shape of the microbatches, and how long
a round is predicted to take. The devices need not exist. Without a config it plans the bundled
demo. Exit code 2: the config, the data or an option was refused.
"""


class _Planned(NamedTuple):
    """A plan with the facts that are shown beside it.

    Attributes:
      plan: the plan.
      smaller: smaller microbatches with which it would be faster; None if there are none.
      dropped: by name of the task, the number of records of its data that gave no sample.
    """

    plan: Plan
    smaller: SmallerMicrobatches | None
    dropped: dict[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options, bindings = _parse_arguments(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        replica = Replica.parse(options.mesh)
        gin_bindings.parse([resolve_path(file) for file in options.gin_file], bindings)
        planned = _plan(gin_bindings.run_config(), replica, options.profile, options.rounds)
        for part in plan_tables(*planned):
            console.print(part, markup=False)
        if options.out:
            for path in write_plan(planned.plan, options.out):
                console.print(str(path), markup=False, soft_wrap=True)
    except _USER_ERRORS as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def write_plan(plan: Plan, folder: Path) -> list[Path]:
    """Writes plan.json, schedule.png and trace.json (for ui.perfetto.dev); returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    plan_json, picture, trace = (
        folder / name for name in ("plan.json", "schedule.png", "trace.json")
    )
    simulation = plan.simulate(unit=_MILLISECOND)
    plan_json.write_text(json.dumps(plan.to_json()) + "\n")
    title = f"{plan.rounds} rounds on {plan.replica}, {plan.costs.kind}"
    draw_schedule(plan.schedule, simulation, picture, title, bucket_labels(plan), "ms")
    trace.write_text(json.dumps(chrome_trace(plan.schedule, simulation)) + "\n")
    return [plan_json, picture, trace]


def _plan(run: RunConfig, replica: Replica, profile: Path | None, rounds: int | None) -> _Planned:
    check_names(run.tasks)
    folder = resolve_path(run.backbone)
    config = BackboneConfig.from_folder(folder)
    replica.require(
        config.num_layers,
        {
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "intermediate_size": config.intermediate_size,
        },
    )
    models = _cost_models(run, config, replica, profile)
    tokenizer = load_tokenizer(folder)
    tasks = [_read_task(task, config, tokenizer) for task in run.tasks]
    rounds = _choose_rounds(rounds, tasks)
    request = ShapeRequest(
        run.tokens_per_microbatch, run.row_len, run.chunk_len, models.least_chunk_len
    )
    remat = planned_remat(run.remat)
    costs = ReplicaCosts(models.times, models.memory, shared_pool(tasks), replica, remat)
    plan = make_plan(tasks, request, costs, models.source, rounds)
    smaller = try_smaller_microbatches(plan, tasks, request, costs)
    return _Planned(plan, smaller, {task.name: task.dropped for task in tasks})


def _choose_rounds(given: int | None, tasks: Sequence[TaskLoad]) -> int:
    """The given number of rounds; otherwise one that depends on the largest global batch, at least
    2, so that the plan shows how the second round waits for the updates of the first."""
    largest = max(len(task.batches[0]) for task in tasks)
    rounds = given or max(2, min(_ROUNDS, _ROUNDS * _LARGE_BATCH // largest))
    if largest > _LARGE_BATCH:
        line = f"packing {rounds} rounds of up to {largest:,} samples a task: this takes a while"
        print(line, file=sys.stderr)
    return rounds


def _cost_models(
    run: RunConfig, config: BackboneConfig, replica: Replica, profile: Path | None
) -> CostModels:
    dtype = "float32" if run.dtype == "float32" else "bfloat16"
    size = size_of(config, jnp.dtype(dtype))
    if profile:
        return measured_models(profile, size, run.memory, replica)
    return device_models(size, run.memory, replica, dtype=dtype)


def _read_task(task: Task, config: BackboneConfig, tokenizer: Any) -> TaskLoad:
    """Reads and tokenizes the task's data."""
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
        lengths=[sample.stream_length for sample in data.samples.samples],
        batches=BatchLengths(data.batches, data.steps),
        held_out=[sample.stream_length for sample in data.eval_samples],
        dropped=data.samples.dropped,
    )


def _parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the bindings of the config's parameters as NAME=VALUE."""
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
        help="costs from a profile of python -m jaxmux.profile; default: the profile that ships "
        "for this backbone on an H200, or an estimate for an H200",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"rounds to plan; default: {_ROUNDS}, or fewer for large global batches",
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
