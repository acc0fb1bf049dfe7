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

# The colours of Okabe and Ito, which can be told apart with any colour vision, and four more.
_COLORS = (
    *("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#7F7F7F"),
    *("#8C6BB1", "#A6761D", "#66C2A5", "#E7298A"),
)
# Height of a lane; neighbouring lanes are 1 apart.
_LANE = 0.84
# Boxes are numbered if the narrowest box is at least this many inches wide.
_NUMBER_WIDTH = 0.17
# Colour of a lane without passes.
_IDLE = "#ECECEC"


def draw_schedule(
    schedule: PipelineSchedule,
    simulation: Simulation,
    path: Path,
    title: str,
    labels: Mapping[int, str],
    time_unit: str,
) -> None:
    """Draws the simulated schedule to a PNG file.

    A box is a pass of a microbatch: forward passes are solid, backward passes lighter and hatched.
    The colour shows the bucket, the number is the index of the microbatch. Grey is idle time. With
    several stages, the title ends with the bubble ratio. `labels` has the name of each bucket for
    the legend; `time_unit` is the unit of the simulation's times, for the axis.
    """
    passes = (
        (simulation.forward_start, simulation.forward_end),
        (simulation.backward_start, simulation.backward_end),
    )
    shortest, end = min((ends - starts).min() for starts, ends in passes), simulation.makespan
    width = float(np.clip(2.5 + 0.11 * end / shortest * 2, 9, 24))
    figure = Figure(figsize=(width, 1.9 + 0.55 * schedule.stages), layout="constrained")
    axes = figure.add_subplot()
    buckets = sorted({microbatch.bucket for microbatch in schedule.microbatches})
    colors = {bucket: _COLORS[i % len(_COLORS)] for i, bucket in enumerate(buckets)}
    numbered = shortest * (width - 1.2) / end >= _NUMBER_WIDTH
    for stage in range(schedule.stages):
        axes.broken_barh([(0, end)], (stage - _LANE / 2, _LANE), color=_IDLE)
    for backward, (starts, ends) in enumerate(passes):
        _draw_passes(axes, schedule, starts, ends, colors, bool(backward), numbered)
    axes.set_xlim(0, end)
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_yticks(range(schedule.stages), [f"stage {s}" for s in range(schedule.stages)])
    axes.set_xlabel(f"time ({time_unit})")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    if schedule.stages > 1:
        title = f"{title}: bubble ratio {simulation.bubble_ratio():.1%}"
    axes.set_title(title, loc="left", fontweight="bold")
    handles = [
        *(Patch(facecolor=color, label=labels[bucket]) for bucket, color in colors.items()),
        Patch(label="forward", **_box_style("#555555", backward=False)),
        Patch(label="backward", **_box_style("#555555", backward=True)),
        Patch(facecolor=_IDLE, label="idle"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=8, frameon=False)
    figure.savefig(path, dpi=130)


def _draw_passes(
    axes: Axes,
    schedule: PipelineSchedule,
    starts: np.ndarray,
    ends: np.ndarray,
    colors: Mapping[int, str],
    backward: bool,
    numbered: bool,
) -> None:
    by_color: dict[str, list[list[tuple[float, float]]]] = {}
    for v, m in np.ndindex(starts.shape):
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
        "facecolor": tuple(1 - 0.4 * (1 - part) for part in to_rgb(color)),
        "edgecolor": color,
        "linewidth": 0.5,
        "hatch": "////",
        "hatch_linewidth": 0.4,
    }


def _is_light(color: str) -> bool:
    return float(np.dot(to_rgb(color), (0.299, 0.587, 0.114))) > 0.6
