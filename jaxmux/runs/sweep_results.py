"""The results of sweeps: their table, sweep.json and sweep.png."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmux.distributions import DISTRIBUTIONS, LogUniform
from jaxmux.objectives import LOSS, SFT, Comparison
from jaxmux.printable import STOPPED_EARLY, spaced
from jaxmux.sweeps import Sweep, shown_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .summary import Summary
import json

from rich import box
from rich.table import Table

from jaxmux.atomic_files import write_atomically
from jaxmux.engine import Bracket, PreparedTask, rung_of
from jaxmux.printable import Name
from jaxmux.specifications.reading import task_to_json

from .metrics import read_held_out_losses
from .run_directory import RunDirectory
from .summary import Summary, last_loss

# Values are drawn on a logarithmic axis if the largest is at least this multiple of the smallest.
_WIDE = 8
_LOSS_ROW, _VALUE_ROW, _WIDTH = 4.6, 3.3, 10.0
# Number of panels with swept values side by side.
_COLUMNS = 3
_STOPPED, _FAILED = "0.55", "tab:red"


def plot_sweeps(
    sweeps: Sequence[Sweep],
    summary: "Summary",
    held_out: Mapping[str, Mapping[int, float | None]],
    path: Path,
) -> None:
    """Draws each sweep to a PNG file. Above are the values of `Task.best_metric` of all
    configurations over their steps; below are their final values against each swept value. The
    colour of a configuration shows its rank, from the best (bright) to the worst (dark). `held_out`
    has, by task name, the values of `Task.best_metric` by step."""
    from matplotlib.figure import Figure

    rows = [math.ceil(len(sweep.space) / _COLUMNS) for sweep in sweeps]
    heights = [_LOSS_ROW + _VALUE_ROW * n for n in rows]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    parts = np.ravel(figure.subfigures(len(sweeps), 1, height_ratios=heights))
    for sweep, part, below in zip(sweeps, parts, rows, strict=True):
        ratios = [_LOSS_ROW, *[_VALUE_ROW] * below]
        columns = min(_COLUMNS, len(sweep.space))
        grid = part.add_gridspec(1 + below, columns, height_ratios=ratios)
        colours = _colours(sweep, summary)
        _plot_steps(part.add_subplot(grid[0, :]), sweep, summary, held_out, colours)
        for i, swept in enumerate(sweep.space):
            axes = part.add_subplot(grid[1 + i // columns, i % columns])
            _plot_values(axes, sweep, summary, swept, colours)
            if i % columns:
                axes.set_ylabel("")
    figure.savefig(path, dpi=120)


def _colours(sweep: Sweep, summary: "Summary") -> dict[str, Any]:
    from matplotlib import colormaps

    names = ranked(sweep, summary)
    # The brightest end of the map is hardly visible on white.
    shades = np.linspace(0.88, 0.0, len(names))
    return dict(zip(names, colormaps["viridis"](shades), strict=True))


def _plot_steps(
    axes: "Axes",
    sweep: Sweep,
    summary: "Summary",
    held_out: Mapping[str, Mapping[int, float | None]],
    colours: Mapping[str, Any],
) -> None:
    names, marks = ranked(sweep, summary), {}
    for rank, name in reversed(list(enumerate(names, start=1))):
        found = {s: x for s, x in sorted(held_out.get(name, {}).items()) if x is not None}
        if not found:
            continue
        steps, values = list(found), list(found.values())
        best = rank == 1
        axes.plot(
            steps,
            values,
            color=colours[name],
            linewidth=2.5 if best else 1.2,
            label=f"best: {name}" if best else None,
            zorder=3 if best else 2,
        )
        result = result_of(summary.tasks[name])
        marks.setdefault(result, ([], [], []))
        for column, value in zip(
            marks[result], (steps[-1], values[-1], colours[name]), strict=True
        ):
            column.append(value)
    for result, (steps, values, shades) in sorted(marks.items()):
        marker = _marker(result)
        axes.scatter(steps, values, c=shades, marker=marker, s=28, zorder=4)
        axes.scatter([], [], c=_STOPPED, marker=marker, s=28, label=f"{result}: {len(steps)}")
    longest = max((task["steps"] for task in map(summary.tasks.get, names)), default=0)
    for rung in sweep.rungs(longest):
        axes.axvline(rung, color="0.75", linewidth=1, linestyle="--", zorder=1)
    axes.set_title(f"{sweep.name}: {len(names)} configurations, bright: best, dark: worst")
    axes.set_xlabel("task step (global batches); dashed: rungs")
    compared = Comparison(sweep.task.best_metric)
    unit = " (nats per target token)" * (sweep.task.objective.kind == SFT.kind)
    axes.set_ylabel(f"{compared.label}{unit}")
    axes.set_yscale(_scale(compared))
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")


def _plot_values(
    axes: "Axes", sweep: Sweep, summary: "Summary", path: str, colours: Mapping[str, Any]
) -> None:
    compared = _comparison(sweep, summary)
    results = {name: _result_value(compared, task) for name, task in summary.tasks.items()}
    configurations = {each.task.name: each.values[path] for each in sweep.configurations()}
    names = [n for n in reversed(ranked(sweep, summary)) if results[n] is not None]
    values = [configurations[name] for name in names]
    positions = _positions(axes, sweep, path, values)
    for result in sorted({result_of(summary.tasks[name]) for name in names}):
        indices = [i for i, name in enumerate(names) if result_of(summary.tasks[name]) == result]
        axes.scatter(
            [positions[i] for i in indices],
            [results[names[i]] for i in indices],
            c=[colours[names[i]] for i in indices],
            marker=_marker(result),
            s=34,
            alpha=0.85,
            zorder=2,
        )
    axes.set_xlabel(path)
    axes.set_ylabel(f"{compared.label} at the end" if compared else "last training loss")
    axes.set_yscale(_scale(compared or Comparison()))
    axes.grid(True, which="both", alpha=0.2)


def _scale(compared: Comparison) -> str:
    """The scale of an axis: of metrics other than the loss, values may be 0 or negative."""
    return "log" if compared.metric == LOSS else "linear"


def _positions(axes: "Axes", sweep: Sweep, path: str, values: Sequence[Any]) -> list[float]:
    """Horizontal positions of swept values: numbers lie at their value, other values are spread
    evenly."""
    numbers = all(isinstance(v, Real) and not isinstance(v, bool) for v in values)
    if numbers and len(set(values)) > 1:
        listed = not isinstance(sweep.space[path], DISTRIBUTIONS)
        wide = min(values) > 0 and max(values) >= _WIDE * min(values)
        if wide or isinstance(sweep.space[path], LogUniform):
            axes.set_xscale("log")
            axes.minorticks_off()
        if listed and len(set(values)) <= 8:
            ticks = sorted(set(values))
            axes.set_xticks(ticks, [shown_value(value) for value in ticks])
        return list(values)
    known = []
    for value in values if isinstance(sweep.space[path], DISTRIBUTIONS) else sweep.space[path]:
        if value not in known:
            known.append(value)
    axes.set_xticks(range(len(known)), [_wrapped(shown_value(value)) for value in known])
    axes.set_xlim(-0.6, len(known) - 0.4)
    return [float(known.index(value)) for value in values]


def _wrapped(text: str) -> str:
    """Wraps a long label into several lines. Dollar signs are escaped, because matplotlib would
    read them as formulas. Characters that no font has, such as lone surrogates, become spaces."""
    import textwrap

    plain = spaced(text)
    lines = textwrap.wrap(plain, 18) or [plain]
    return "\n".join(lines[:3] + ["…"] * (len(lines) > 3)).replace("$", r"\$")


def _marker(result: str) -> str:
    return {"trained": "o", "failed": "X", STOPPED_EARLY: "s"}.get(result, "v")


def values_of(sweeps: Sequence[Sweep]) -> dict[str, dict[str, dict[str, Any]]]:
    """The swept values as JSON, by name of the sweep, name of the configuration's task and path."""
    return {
        sweep.name: {
            each.task.name: _json_values(task_to_json(each.task), each.values)
            for each in sweep.configurations()
        }
        for sweep in sweeps
    }


def halving_of(sweeps: Sequence[Sweep]) -> dict[str, dict[str, Any]]:
    """By name of a sweep, the settings of its successive halving."""
    return {
        sweep.name: {
            "first_rung": sweep.first_rung,
            "factor": None if sweep.first_rung is None else sweep.factor,
        }
        for sweep in sweeps
    }


def brackets_of(sweeps: Sequence[Sweep], prepared: Sequence[PreparedTask]) -> list[Bracket]:
    """The configurations that compete in successive halving. Raises TaskError if a sweep ends
    before its first rung."""
    steps, brackets = {p.task.name: p.steps for p in prepared}, []
    for sweep in sweeps:
        if sweep.first_rung is None:
            continue
        names = tuple(task.name for task in sweep.tasks())
        longest = max(steps[name] for name in names)
        sweep.require_rung(longest)
        rungs, metric = tuple(sweep.rungs(longest)), sweep.task.best_metric
        brackets.append(Bracket(names, rungs, sweep.factor, metric))
    return brackets


def ranked(sweep: Sweep, summary: Summary) -> list[str]:
    """Names of the tasks of a sweep, best first: by the `Task.best_metric` of their adapters, or by
    the last training loss if no task has held-out data. Failed tasks come last."""
    compared = _comparison(sweep, summary)

    def key(name: str) -> tuple[bool, float]:
        task = summary.tasks[name]
        cost = (compared or Comparison()).cost(_result_value(compared, task))
        return task["status"] == "failed", cost

    return sorted(summary.sweeps[sweep.name], key=key)


def _comparison(sweep: Sweep, summary: Summary) -> Comparison | None:
    """How the configurations of a sweep are compared; None if no held-out data are measured."""
    tasks = [summary.tasks[name] for name in summary.sweeps[sweep.name]]
    measured = any(task["eval_target_tokens"] for task in tasks)
    return Comparison(sweep.task.best_metric) if measured else None


def _result_value(compared: Comparison | None, task: Mapping[str, Any]) -> float | None:
    """The number by which a task is ranked, from its entry in `Summary.tasks`."""
    if compared is None:
        return task["train_loss_last"]
    return compared.value(task["eval_loss"], task.get("eval_metrics", {}))


def best_of(sweep: Sweep, summary: Summary) -> str:
    return ranked(sweep, summary)[0]


def sweep_table(sweep: Sweep, summary: Summary) -> Table:
    """The configurations of a sweep, best first, with their losses and the metric by which they
    are ranked."""
    values = {each.task.name: each.values for each in sweep.configurations()}
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for path in sweep.space:
        table.add_column(path.rpartition(".")[2], justify="left")
    metric = sweep.task.best_metric
    for column in ("steps", "train", "held-out", *[metric] * (metric != LOSS)):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("result", no_wrap=True)
    for name in ranked(sweep, summary):
        task = summary.tasks[name]
        shown = [_shown(last_loss(task)), _shown(task["eval_loss"])]
        if metric != LOSS:
            shown.append(_shown(_result_value(Comparison(metric), task)))
        swept = [Name(shown_value(value)) for value in values[name].values()]
        table.add_row(*swept, str(task["steps"]), *shown, result_of(task))
    return table


def result_of(task: Mapping[str, Any]) -> str:
    """The result of a task's training in one or two words, from its entry in `Summary.tasks`."""
    if task["status"] == "failed":
        return "failed"
    if rung := rung_of(task.get("stopped_early")):
        return f"rung {rung}"
    return STOPPED_EARLY if task.get("stopped_early") else "trained"


def write_results(sweeps: Sequence[Sweep], summary: Summary, directory: RunDirectory) -> None:
    """Writes sweep.json and sweep.png.

    sweep.json has an object for each sweep: its settings and its configurations, best first. A
    configuration has its swept values, its results as in summary.json, and "held_out", the held-out
    losses as pairs of step and loss.
    """
    held_out: dict[str, dict[int, float | None]] = {}
    compared: dict[str, dict[int, float | None]] = {}
    metric_of = {name: s.task.best_metric for s in sweeps for name in summary.sweeps[s.name]}
    for line in read_held_out_losses(directory.held_out):
        name, step, loss = line["task"], line["task_step"], line["loss"]
        held_out.setdefault(name, {})[step] = loss
        value = Comparison(metric_of.get(name, LOSS)).value(loss, line.get("metrics", {}))
        compared.setdefault(name, {})[step] = value
    plot_sweeps(sweeps, summary, compared, directory.sweep_plot)
    results = {}
    for sweep in sweeps:
        settings = {"samples": sweep.samples, "seed": sweep.seed} | halving_of([sweep])[sweep.name]
        settings["best_metric"] = sweep.task.best_metric
        tasks = {
            name: {"values": summary.sweeps[sweep.name][name]}
            | summary.tasks[name]
            | {"held_out": sorted(held_out.get(name, {}).items())}
            for name in ranked(sweep, summary)
        }
        results[sweep.name] = settings | {"tasks": tasks}
    write_atomically(directory.sweep_results, json.dumps(results, indent=2) + "\n")


def _json_values(task: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for path in paths:
        value: Any = task
        for name in path.split("."):
            value = value[name]
        values[path] = value
    return values


def _shown(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"
