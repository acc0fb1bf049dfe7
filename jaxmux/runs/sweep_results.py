"""The results of sweeps: their table, and sweep.json."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from jaxmux.atomic_files import write_atomically
from jaxmux.engine import Bracket, PreparedTask, rung_of
from jaxmux.printable import STOPPED_EARLY, Name
from jaxmux.sweeps import Sweep, shown_value

from .metrics import read_held_out_losses
from .run_directory import RunDirectory
from .summary import Summary, last_loss
from .task_json import task_to_json


def values_of(sweeps: Sequence[Sweep]) -> dict[str, dict[str, dict[str, Any]]]:
    """By name of a sweep and of the task of each configuration, the swept values by path, as JSON.

    Args:
      sweeps: the sweeps.
    """
    return {
        sweep.name: {
            own.task.name: _json_values(task_to_json(own.task), own.values)
            for own in sweep.configurations()
        }
        for sweep in sweeps
    }


def halving_of(sweeps: Sequence[Sweep]) -> dict[str, dict[str, Any]]:
    """By name of a sweep, the settings of its successive halving.

    Args:
      sweeps: the sweeps.
    """
    return {
        sweep.name: {
            "first_rung": sweep.first_rung,
            "factor": None if sweep.first_rung is None else sweep.factor,
        }
        for sweep in sweeps
    }


def brackets_of(sweeps: Sequence[Sweep], prepared: Sequence[PreparedTask]) -> list[Bracket]:
    """The configurations that compete in successive halving.

    Args:
      sweeps: the sweeps.
      prepared: the tasks of the training run.

    Raises:
      TaskError: a sweep ends before its first rung.
    """
    steps, found = {p.task.name: p.steps for p in prepared}, []
    for sweep in sweeps:
        if sweep.first_rung is None:
            continue
        names = tuple(task.name for task in sweep.tasks())
        longest = max(steps[name] for name in names)
        sweep.require_rung(longest)
        found.append(Bracket(names, tuple(sweep.rungs(longest)), sweep.factor))
    return found


def ranked(sweep: Sweep, summary: Summary) -> list[str]:
    """Names of the tasks of a sweep, the best first: by the held-out loss of the adapter that each
    has given, or by the last training loss if none has held-out data. Failed tasks come last.

    Args:
      sweep: the sweep.
      summary: the results of the training run.
    """
    names = list(summary.sweeps[sweep.name])
    loss = loss_field(sweep, summary)

    def key(name: str) -> tuple[bool, bool, float]:
        task = summary.tasks[name]
        return task["status"] == "failed", task[loss] is None, task[loss] or 0.0

    return sorted(names, key=key)


def loss_field(sweep: Sweep, summary: Summary) -> str:
    """The field of a task's results by which a sweep is ranked.

    Args:
      sweep: the sweep.
      summary: the results of the training run.
    """
    tasks = [summary.tasks[name] for name in summary.sweeps[sweep.name]]
    measured = any(task["eval_target_tokens"] for task in tasks)
    return "eval_loss" if measured else "train_loss_last"


def best_of(sweep: Sweep, summary: Summary) -> str:
    """Name of the best task of a sweep, as in `ranked`."""
    return ranked(sweep, summary)[0]


def sweep_table(sweep: Sweep, summary: Summary) -> Table:
    """The configurations of a sweep, the best first, with their losses in nats per target token.

    Args:
      sweep: the sweep.
      summary: the results of the training run.
    """
    values = {own.task.name: own.values for own in sweep.configurations()}
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for path in sweep.space:
        table.add_column(path.rpartition(".")[2], justify="left")
    for column in ("steps", "train", "held-out"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for name in ranked(sweep, summary):
        task = summary.tasks[name]
        shown = [_shown(last_loss(task)), _shown(task["eval_loss"])]
        own = [Name(shown_value(value)) for value in values[name].values()]
        table.add_row(*own, str(task["steps"]), *shown, result_of(task))
    return table


def result_of(task: Mapping[str, Any]) -> str:
    """How the training of a task has ended, in one or two words.

    Args:
      task: the entry of the task in `Summary.tasks`.
    """
    if task["status"] == "failed":
        return "failed"
    if rung := rung_of(task.get("stopped_early")):
        return f"rung {rung}"
    return STOPPED_EARLY if task.get("stopped_early") else "trained"


def write_results(sweeps: Sequence[Sweep], summary: Summary, directory: RunDirectory) -> None:
    """Writes sweep.json and sweep.png.

    sweep.json has an object for each sweep: its settings, and its configurations, the best first,
    each with its swept values, its results as in summary.json, and "held_out", the held-out losses
    as pairs of step and loss.

    Args:
      sweeps: the sweeps.
      summary: the results of the training run.
      directory: the run directory.
    """
    from .sweep_plot import plot_sweeps

    held_out: dict[str, dict[int, float | None]] = {}
    for line in read_held_out_losses(directory.held_out):
        held_out.setdefault(line["task"], {})[line["task_step"]] = line["loss"]
    plot_sweeps(sweeps, summary, held_out, directory.sweep_plot)
    found = {}
    for sweep in sweeps:
        settings = {"samples": sweep.samples, "seed": sweep.seed} | halving_of([sweep])[sweep.name]
        tasks = {
            name: {"values": summary.sweeps[sweep.name][name]}
            | summary.tasks[name]
            | {"held_out": sorted(held_out.get(name, {}).items())}
            for name in ranked(sweep, summary)
        }
        found[sweep.name] = settings | {"tasks": tasks}
    write_atomically(directory.sweep_results, json.dumps(found, indent=2) + "\n")


def _json_values(task: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for path in paths:
        value: Any = task
        for name in path.split("."):
            value = value[name]
        found[path] = value
    return found


def _shown(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
