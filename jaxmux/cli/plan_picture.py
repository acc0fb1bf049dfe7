"""schedule.png: a simulated schedule as a Gantt chart with one lane per stage."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxmux.planner.pipeline.schedules import PipelineSchedule, Simulation

# The colours of Okabe and Ito, which people with any colour vision can tell apart, and four more.
_COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F"),
    *("#8C6BB1", "#A6761D", "#66C2A5", "#E7298A"),
)
# Height of a lane, where neighbouring lanes are 1 apart.
_LANE = 0.84
# Boxes are numbered if the narrowest of them is at least this many inches wide.
_NUMBER_WIDTH = 0.17


def draw_schedule(
    schedule: PipelineSchedule,
    simulation: Simulation,
    path: Path,
    title: str = "",
    labels: Mapping[int, str] | None = None,
    time_unit: str = "units of forward time",
    window: tuple[float, float] | None = None,
) -> None:
    """Draws the simulated schedule to a PNG file.

    A box is a pass of a microbatch: forward passes are solid, backward passes lighter and hatched.
    Its colour is that of the bucket, its number the index of the microbatch. Idle time is the grey
    of the lane. With several stages, the title ends with the bubble ratio.

    Args:
      schedule: the schedule.
      simulation: the times at which its passes run.
      path: file to write.
      title: title of the picture.
      labels: by bucket, its name in the legend; without one, the bucket's tasks or its number.
      time_unit: unit of the simulation's times, for the axis.
      window: begin and end of the time to draw; None for the whole makespan.
    """
    begin, end = window or (0.0, simulation.makespan)
    width = float(np.clip(2.5 + 0.11 * (end - begin) / _shortest(simulation) * 2, 9, 24))
    figure = Figure(figsize=(width, 1.9 + 0.55 * schedule.stages), layout="constrained")
    axes = figure.add_subplot()
    buckets = sorted({microbatch.bucket for microbatch in schedule.microbatches})
    colors = {bucket: _COLORS[i % len(_COLORS)] for i, bucket in enumerate(buckets)}
    shortest_box = _shortest(simulation) * (width - 1.2) / (end - begin)
    for stage in range(schedule.stages):
        axes.broken_barh([(begin, end - begin)], (stage - _LANE / 2, _LANE), color="#ECECEC")
    for backward in (False, True):
        _draw_passes(
            axes,
            schedule,
            simulation,
            colors,
            backward,
            (begin, end),
            shortest_box >= _NUMBER_WIDTH,
        )
    _decorate(axes, schedule, time_unit, (begin, end))
    parts = [title] if title else []
    if schedule.stages > 1:
        parts.append(f"bubble ratio {simulation.bubble_ratio(window):.1%}")
    axes.set_title(": ".join(parts), loc="left", fontweight="bold")
    _draw_legend(figure, schedule, colors, labels or {})
    figure.savefig(path, dpi=130)


def _shortest(simulation: Simulation) -> float:
    forward = np.min(simulation.forward_end - simulation.forward_start)
    backward = np.min(simulation.backward_end - simulation.backward_start)
    return float(min(forward, backward))


def _draw_passes(
    axes: Axes,
    schedule: PipelineSchedule,
    simulation: Simulation,
    colors: Mapping[int, str],
    backward: bool,
    window: tuple[float, float],
    numbered: bool,
) -> None:
    starts = simulation.backward_start if backward else simulation.forward_start
    ends = simulation.backward_end if backward else simulation.forward_end
    by_color: dict[str, list[list[tuple[float, float]]]] = {}
    for v, m in np.argwhere((ends > window[0]) & (starts < window[1])):
        stage, begin, end = v % schedule.stages, starts[v, m], ends[v, m]
        color = colors[schedule.microbatches[m].bucket]
        low, high = stage - _LANE / 2, stage + _LANE / 2
        box = [(begin, low), (begin, high), (end, high), (end, low)]
        by_color.setdefault(color, []).append(box)
        if numbered:
            suffix = f".{v // schedule.stages}" if schedule.virtual_per_stage > 1 else ""
            axes.text(
                *((begin + end) / 2, stage, f"{m}{suffix}"),
                ha="center",
                va="center",
                fontsize=7,
                color="black" if backward or _is_light(color) else "white",
                clip_on=True,
            )
    for color, boxes in by_color.items():
        axes.add_collection(PolyCollection(boxes, **_box_style(color, backward)))


def _box_style(color: str, backward: bool) -> dict:
    if not backward:
        return {"facecolor": color, "edgecolor": "white", "linewidth": 0.5}
    return {
        "facecolor": _lighten(color),
        "edgecolor": color,
        "linewidth": 0.5,
        "hatch": "////",
        "hatch_linewidth": 0.4,
    }


def _lighten(color: str) -> tuple[float, ...]:
    return tuple(1 - 0.4 * (1 - part) for part in to_rgb(color))


def _is_light(color: str) -> bool:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114))) > 0.6


def _decorate(
    axes: Axes, schedule: PipelineSchedule, time_unit: str, window: tuple[float, float]
) -> None:
    axes.set_xlim(*window)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)])
    axes.set_xlabel(f"time ({time_unit})")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_legend(
    figure: Figure, schedule: PipelineSchedule, colors: Mapping[int, str], labels: Mapping[int, str]
) -> None:
    handles = [
        Patch(facecolor=color, label=labels.get(bucket) or _bucket_name(schedule, bucket))
        for bucket, color in colors.items()
    ]
    handles += [
        Patch(label="forward", **_box_style("#555555", backward=False)),
        Patch(label="backward", **_box_style("#555555", backward=True)),
        Patch(facecolor="#ECECEC", label="idle"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False)


def _bucket_name(schedule: PipelineSchedule, bucket: int) -> str:
    own = (m for m in schedule.microbatches if m.bucket == bucket)
    tasks = sorted({task for microbatch in own for task in microbatch.tasks})
    if 1 <= len(tasks) <= 4:
        return ("task " if len(tasks) == 1 else "tasks ") + ", ".join(map(str, tasks))
    return f"bucket {bucket}"
