"""sweep.png: the held-out losses of a sweep's configurations, over their steps and by value."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmux.distributions import DISTRIBUTIONS, LogUniform
from jaxmux.printable import STOPPED_EARLY, spaced
from jaxmux.sweeps import Sweep, shown_value

from .sweep_results import loss_field, ranked, result_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .summary import Summary

# Values whose largest is so many times the smallest get a logarithmic axis.
_WIDE = 8
_LOSS_ROW, _VALUE_ROW, _WIDTH = 4.6, 3.3, 10.0
# Panels of swept values side by side.
_COLUMNS = 3
_STOPPED, _FAILED = "0.55", "tab:red"


def plot_sweeps(
    sweeps: Sequence[Sweep],
    summary: "Summary",
    held_out: Mapping[str, Mapping[int, float | None]],
    path: Path,
) -> None:
    """Draws each sweep: above, the held-out losses of all configurations over their steps; below,
    the losses that they have reached, against each swept value. The colour of a configuration is
    its rank, from the best (bright) to the worst (dark).

    Args:
      sweeps: the sweeps.
      summary: the results of the training run.
      held_out: by name of a task, its held-out losses by step.
      path: the PNG file to write.
    """
    from matplotlib.figure import Figure

    rows = [math.ceil(len(sweep.space) / _COLUMNS) for sweep in sweeps]
    heights = [_LOSS_ROW + _VALUE_ROW * n for n in rows]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    parts = np.ravel(figure.subfigures(len(sweeps), 1, height_ratios=heights))
    for sweep, own, below in zip(sweeps, parts, rows, strict=True):
        ratios = [_LOSS_ROW, *[_VALUE_ROW] * below]
        columns = min(_COLUMNS, len(sweep.space))
        grid = own.add_gridspec(1 + below, columns, height_ratios=ratios)
        colours = _colours(sweep, summary)
        _plot_steps(own.add_subplot(grid[0, :]), sweep, summary, held_out, colours)
        for i, swept in enumerate(sweep.space):
            axes = own.add_subplot(grid[1 + i // columns, i % columns])
            _plot_values(axes, sweep, summary, swept, colours)
            if i % columns:
                axes.set_ylabel("")
    figure.savefig(path, dpi=120)


def _colours(sweep: Sweep, summary: "Summary") -> dict[str, Any]:
    """The colour of each configuration, by its place in the ranking."""
    from matplotlib import colormaps

    names = ranked(sweep, summary)
    # The brightest end of the map can hardly be seen on white.
    places = np.linspace(0.88, 0.0, len(names))
    return dict(zip(names, colormaps["viridis"](places), strict=True))


def _plot_steps(
    axes: "Axes",
    sweep: Sweep,
    summary: "Summary",
    held_out: Mapping[str, Mapping[int, float | None]],
    colours: Mapping[str, Any],
) -> None:
    names, marks = ranked(sweep, summary), {}
    for place, name in reversed(list(enumerate(names, start=1))):
        losses = {s: x for s, x in sorted(held_out.get(name, {}).items()) if x is not None}
        if not losses:
            continue
        steps, values = list(losses), list(losses.values())
        best = place == 1
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
        for found, value in zip(marks[result], (steps[-1], values[-1], colours[name]), strict=True):
            found.append(value)
    for result, (steps, values, own) in sorted(marks.items()):
        marker = _marker(result)
        axes.scatter(steps, values, c=own, marker=marker, s=28, zorder=4)
        axes.scatter([], [], c=_STOPPED, marker=marker, s=28, label=f"{result}: {len(steps)}")
    longest = max((task["steps"] for task in map(summary.tasks.get, names)), default=0)
    for rung in sweep.rungs(longest):
        axes.axvline(rung, color="0.75", linewidth=1, linestyle="--", zorder=1)
    axes.set_title(f"{sweep.name}: {len(names)} configurations, bright: best, dark: worst")
    axes.set_xlabel("task step (global batches); dashed: rungs")
    axes.set_ylabel("held-out loss (nats per target token)")
    axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(fontsize="small")


def _plot_values(
    axes: "Axes", sweep: Sweep, summary: "Summary", path: str, colours: Mapping[str, Any]
) -> None:
    field = loss_field(sweep, summary)
    configurations = {own.task.name: own.values[path] for own in sweep.configurations()}
    names = [n for n in reversed(ranked(sweep, summary)) if summary.tasks[n][field] is not None]
    values = [configurations[name] for name in names]
    places = _places(axes, sweep, path, values)
    for result in sorted({result_of(summary.tasks[name]) for name in names}):
        own = [i for i, name in enumerate(names) if result_of(summary.tasks[name]) == result]
        axes.scatter(
            [places[i] for i in own],
            [summary.tasks[names[i]][field] for i in own],
            c=[colours[names[i]] for i in own],
            marker=_marker(result),
            s=34,
            alpha=0.85,
            zorder=2,
        )
    axes.set_xlabel(path)
    axes.set_ylabel("held-out loss at the end" if field == "eval_loss" else "last training loss")
    axes.set_yscale("log")
    axes.grid(True, which="both", alpha=0.2)


def _places(axes: "Axes", sweep: Sweep, path: str, values: Sequence[Any]) -> list[float]:
    """The places of values on the horizontal axis: numbers where they are, other values side by
    side."""
    numbers = all(isinstance(v, Real) and not isinstance(v, bool) for v in values)
    if numbers and len(set(values)) > 1:
        listed = not isinstance(sweep.space[path], DISTRIBUTIONS)
        wide = min(values) > 0 and max(values) >= _WIDE * min(values)
        if wide or isinstance(sweep.space[path], LogUniform):
            axes.set_xscale("log")
            axes.minorticks_off()
        if listed and len(set(values)) <= 8:
            ticks = sorted(set(values))
            axes.set_xticks(ticks, [shown_value(own) for own in ticks])
        return list(values)
    known = []
    for value in values if isinstance(sweep.space[path], DISTRIBUTIONS) else sweep.space[path]:
        if value not in known:
            known.append(value)
    axes.set_xticks(range(len(known)), [_wrapped(shown_value(own)) for own in known])
    axes.set_xlim(-0.6, len(known) - 0.4)
    return [float(known.index(own)) for own in values]


def _wrapped(text: str) -> str:
    """A label of several lines where it is long. Dollar signs are no formulas of matplotlib, and
    characters that no font has, such as halves of surrogate pairs, become spaces."""
    import textwrap

    plain = spaced(text)
    lines = textwrap.wrap(plain, 18) or [plain]
    return "\n".join(lines[:3] + ["…"] * (len(lines) > 3)).replace("$", r"\$")


def _marker(result: str) -> str:
    return {"trained": "o", "failed": "X", STOPPED_EARLY: "s"}.get(result, "v")
