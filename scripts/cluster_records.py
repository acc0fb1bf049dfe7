"""The table and the figure of the cluster replay, from its records in benchmarks/live.json.

A record is one figure of one day: its name ("cluster replay, DAY, FIGURE"), the value of jaxmux
with its unit, `bound` and `sense` ("at least" or "at most"), and in `baselines` the values of the
other policies by name, with more facts of the same run. The record of the jobs finished also has
"finished by hour": for each policy, the jobs that have ended at hours 0, 1, … of the day.
"""

from collections.abc import Sequence

from benchmark_records import NOT_MEASURED, Record, commands, markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

PREFIX = "cluster replay, "
# The policies, and the figures of a day.
ALONE, FIRST_FIT, FEWEST = "one task per GPU", "first fit", "fewest tasks"
OURS, OURS_BY_TIME = "jaxmux", "jaxmux by time"
FINISHED, COMPLETION, GPU_SECONDS = "jobs finished", "mean completion time", "GPU seconds"
POLICIES = (ALONE, FIRST_FIT, FEWEST, OURS, OURS_BY_TIME)
_COLORS = {
    ALONE: "#8a8a8a",
    FIRST_FIT: "#a04a3c",
    FEWEST: "#e08a1e",
    OURS: "#2a5db0",
    OURS_BY_TIME: "#9bb8e8",
}
_LABELS = {
    FINISHED: "jobs finished in the day",
    COMPLETION: "mean completion time, hours",
    GPU_SECONDS: "GPU seconds, million",
}


def replay_table(records: Sequence[Record]) -> str:
    """The figures of every day, one column for each policy."""
    own = replay_records(records)
    if not own:
        return NOT_MEASURED
    rows = []
    for r in own:
        day, figure = day_and_figure(r)
        values = policy_values(r)
        cells = [shown_value(figure, values[policy]) for policy in POLICIES]
        cells[POLICIES.index(OURS)] = f"**{cells[POLICIES.index(OURS)]}**"
        rows.append([day if figure == FINISHED else "", _LABELS[figure], *cells, bound_cell(r)])
    head = ["day", "", *POLICIES, "bound"]
    versions = ", ".join(f"{name} {version}" for name, version in own[0]["versions"].items())
    return f"{commands(own)}Device: {own[0]['device']}; {versions}.\n\n{markdown(head, rows)}"


def draw(records: Sequence[Record]) -> Figure:
    """Draws the jobs finished over the day for the days with bounds, and the figures of all days as
    bars."""
    own = replay_records(records)
    hourly = [r for r in own if "finished by hour" in r and r["bound"] is not None]
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(10, 11))
    for axes, r in zip(upper.subplots(1, len(hourly), sharey=True), hourly, strict=True):
        for policy in POLICIES:
            counts = r["finished by hour"][policy]
            axes.plot(range(len(counts)), counts, color=_COLORS[policy], label=policy)
        day, _ = day_and_figure(r)
        axes.set_title(f"{day}: {r['baselines']['jobs that arrive']:,} jobs arrive", fontsize=10)
        axes.set_xlabel("hours of the day")
        axes.set_xticks(range(0, len(counts), 6))
        axes.grid(True, alpha=0.25)
    first = upper.axes[0]
    first.set_ylabel("jobs finished")
    first.legend(loc="upper left", fontsize=8)
    for axes, name in zip(lower.subplots(1, len(_LABELS)), _LABELS, strict=True):
        bars_of_days(axes, name, [r for r in own if day_and_figure(r)[1] == name])
    figure.suptitle("A simulated day of 128 GPUs: policies that place fine-tuning jobs")
    figure.supxlabel(own[0]["device"], fontsize=7, color="0.45", x=0.99, ha="right")
    return figure


def bars_of_days(axes: Axes, name: str, records: Sequence[Record]) -> None:
    """Draws one figure of every day as a group of bars, one for each policy."""
    scale = 1e6 if name == GPU_SECONDS else 1
    for i, policy in enumerate(POLICIES):
        places = [place + 0.16 * (i - 2) for place in range(len(records))]
        heights = [policy_values(r)[policy] / scale for r in records]
        axes.bar(places, heights, width=0.15, color=_COLORS[policy])
    days = [day_and_figure(r)[0].replace(", batches", ",\nbatches") for r in records]
    axes.set_xticks(range(len(records)), days, fontsize=7, rotation=35, ha="right")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.set_ylabel(_LABELS[name])
    axes.grid(True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def replay_records(records: Sequence[Record]) -> list[Record]:
    """The records of the cluster replay, without those of other benchmarks."""
    return [r for r in records if r["name"].startswith(PREFIX)]


def day_and_figure(record: Record) -> tuple[str, str]:
    """The names of the day and of the figure."""
    day, _, figure = record["name"].removeprefix(PREFIX).rpartition(", ")
    return day, figure


def policy_values(record: Record) -> dict[str, float]:
    """The value of every policy by its name."""
    return {OURS: record["value"]} | {p: record["baselines"][p] for p in POLICIES if p != OURS}


def shown_value(figure: str, value: float) -> str:
    """The text of a value in the unit of `_LABELS`."""
    if figure == FINISHED:
        return f"{value:,}"
    return f"{value / 1e6:.1f}" if figure == GPU_SECONDS else f"{value:.1f}"


def bound_cell(record: Record) -> str:
    """The bound, and whether the value misses it; empty if the record has none."""
    value, bound, sense = record["value"], record["bound"], record["sense"]
    if bound is None:
        return ""
    missed = value < bound if sense == "at least" else value > bound
    return f"{sense} {shown_value(day_and_figure(record)[1], bound)}{', missed' if missed else ''}"
