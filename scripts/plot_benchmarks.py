"""Draws the figures of docs/figures/ from the records in benchmarks/.

  python scripts/plot_benchmarks.py

A figure without records is not drawn.
"""

import argparse
from collections.abc import Callable, Sequence
from math import isnan, nan
from pathlib import Path

from benchmark_records import Record
from benchmark_tables import (
    RECORDS,
    ROOT,
    hardware_and_versions,
    linear_name,
    ratio_limit,
    read_all,
    sizes,
)
from cluster_records import draw as cluster_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

OURS, FROZEN = "#2a5db0", "#8a8a8a"
COLORS = {"mosaic_gpu": OURS, "triton": "#e08a1e", "xla": "#b3b3b3"}
PEFT_COLORS = {"eager": "#c9a7a0", "compiled": "#a04a3c"}
LIMIT = "#c0392b"


def main() -> None:
    args = parse_arguments()
    records = read_all(args.records)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, (benchmark, draw) in FIGURES.items():
        if not records[benchmark]:
            print(f"{name}: no records of {benchmark} in {args.records}")
            continue
        figure = draw(records[benchmark])
        if benchmark != "live":  # Its records are of several devices; the figure names its own.
            note = hardware_and_versions(records[benchmark])
            figure.supxlabel(note, fontsize=7, color="0.45", x=0.99, ha="right")
        path = args.out / f"{name}.png"
        figure.savefig(path, dpi=150)
        print(path)


def throughput_figure(records: Sequence[Record]) -> Figure:
    figure, axes = new_figure("Training throughput by number of tasks")
    for i, (length, of_length) in enumerate(sweeps(records).items()):
        tasks = [r["tasks"] for r in of_length]
        throughput = [r["tokens_per_second"] for r in of_length]
        axes.plot(tasks, throughput, "o-", color=f"C{i}", label=f"jaxmux, length {length:,}")
        for mode, peft in peft_of(records, length).items():
            axes.axhline(
                peft["tokens_per_second"],
                color=f"C{i}",
                linestyle=":" if mode == "eager" else "--",
                linewidth=1,
                label=f"PEFT {mode}, one task, length {length:,}",
            )
    axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    tasks = sorted({r["tasks"] for of_length in sweeps(records).values() for r in of_length})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tasks, map(str, tasks))
    axes.set_xlabel("tasks trained together")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def memory_figure(records: Sequence[Record]) -> Figure:
    figure, axes = new_figure("Peak memory by number of tasks")
    for i, (length, of_length) in enumerate(sweeps(records).items()):
        known = [r for r in of_length if r["peak_bytes"] is not None]
        if not known:
            continue
        tasks = [r["tasks"] for r in known]
        axes.plot(
            tasks,
            [r["peak_bytes"] / 2**30 for r in known],
            "o-",
            color=f"C{i}",
            label=f"jaxmux, length {length:,}",
        )
        rest = known[0]["peak_bytes"] - known[0]["adapter_bytes"]
        axes.plot(
            tasks,
            [(rest + r["adapter_bytes"]) / 2**30 for r in known],
            "--",
            color=f"C{i}",
            alpha=0.6,
            label=f"the same at {tasks[0]} task + 16 bytes per adapter parameter",
        )
    axes.set_ylim(0, 1.15 * axes.dataLim.ymax)
    axes.set_ylabel("GiB")
    axes.set_xlabel("tasks trained together")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def op_figure(records: Sequence[Record]) -> Figure:
    """The overhead of the fused op with its limits, and all implementations at one shape."""
    figure = Figure(figsize=(9, 8.5), layout="constrained")
    fused, compared = figure.subplots(2, 1, height_ratios=(15, 8))
    plain = [r for r in records if r["group"] != "ranks" and r["implementation"] == "mosaic_gpu"]
    overhead_bars(fused, plain, [f"{linear_name(r)}, {tasks_name(r)}" for r in plain])
    fused.set_title("Fused (mosaic_gpu)", fontsize=10)
    fused.legend(loc="lower right", fontsize=8)
    figure.suptitle("Grouped LoRA linear, forward and backward: time over the frozen linear alone")
    first = [
        r
        for r in records
        if r["group"] == "tasks" and sizes(r) == sizes(records[0]) and not r["dropout"]
    ]
    first.sort(key=lambda r: list(COLORS).index(r["implementation"]))
    overhead_bars(compared, first, [f"{r['implementation']}, {tasks_name(r)}" for r in first])
    compared.set_title(f"Implementations at {linear_name(records[0])}", fontsize=10)
    return figure


def overhead_bars(axes: Axes, records: Sequence[Record], labels: Sequence[str]) -> None:
    """Bars of an op's time minus that of its baseline, and a mark at the permitted overhead."""
    places = range(len(records))
    overheads = [r["ratio"] - 1 for r in records]
    colors = [COLORS[r["implementation"]] for r in records]
    axes.barh(places, overheads, color=colors, height=0.65)
    limits = [limit - 1 if (limit := ratio_limit(r)) else nan for r in records]
    axes.scatter(limits, places, marker="|", s=170, linewidths=2, color=LIMIT, label="limit")
    for place, overhead, limit in zip(places, overheads, limits, strict=True):
        end = max(0.0, *(x for x in (overhead, limit) if not isnan(x)))
        axes.annotate(
            f"{overhead:+.1%}",
            (end, place),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
        )
    axes.set_yticks(places, labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(True, axis="x", alpha=0.25)
    axes.set_axisbelow(True)


def peft_figure(records: Sequence[Record]) -> Figure:
    """PEFT with each of its batches, and jaxmux with one task for each sample of the batch."""
    figure, axes = new_figure("Training step beside Hugging Face PEFT")
    groups = []
    for length in dict.fromkeys(r["length"] for r in records if not ours(r)):
        baselines = peft_of(records, length)
        samples = round(tokens_of_step(next(iter(baselines.values()))) / length)
        same = [r for r in records if ours(r) and (r["tasks"], r["length"]) == (samples, length)]
        if same:
            best = max(same, key=lambda r: r["tokens_per_second"])
            groups.append((f"{samples} × {length:,}", {"jaxmux": best, **baselines}))
    labels = {"eager": "PEFT eager, one task", "compiled": "PEFT torch.compile, one task"}
    labels["jaxmux"] = "jaxmux, that many tasks"
    for i, kind in enumerate(("eager", "compiled", "jaxmux")):
        found = [
            (place + 0.27 * (i - 1), group[kind]["tokens_per_second"])
            for place, (_, group) in enumerate(groups)
            if kind in group
        ]
        if found:
            bars = axes.bar(
                *zip(*found, strict=True),
                width=0.25,
                color=PEFT_COLORS.get(kind, OURS),
                label=labels[kind],
            )
            axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.set_xlabel("samples × length")
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}"))
    axes.margins(y=0.25)
    axes.legend(loc="upper center", ncols=3, fontsize=8)
    return figure


def dram_figure(records: Sequence[Record]) -> Figure:
    figure, axes = new_figure(
        f"DRAM traffic of a LoRA linear, forward and backward, {records[0]['shape']}"
    )
    first = records[0]
    names = ["frozen linear"] + [
        f"{r['implementation']}\ndropout {r['dropout']:g}" for r in records
    ]
    read = [first["baseline_bytes_read"], *(r["bytes_read"] for r in records)]
    written = [first["baseline_bytes_written"], *(r["bytes_written"] for r in records)]
    read, written = ([x / 1e6 for x in values] for values in (read, written))
    axes.bar(names, read, width=0.6, color=OURS, label="read")
    bars = axes.bar(names, written, width=0.6, bottom=read, color="#9bb8e8", label="written")
    axes.bar_label(bars, ["1.00x", *(f"{r['ratio']:.2f}x" for r in records)], fontsize=9)
    axes.set_ylabel("MB per layer")
    axes.margins(y=0.12)
    axes.legend(loc="upper left", fontsize=8)
    return figure


FIGURES: dict[str, tuple[str, Callable[[Sequence[Record]], Figure]]] = {
    "throughput": ("step", throughput_figure),
    "memory": ("step", memory_figure),
    "step_beside_peft": ("step", peft_figure),
    "grouped_lora": ("grouped_lora", op_figure),
    "dram": ("dram", dram_figure),
    "cluster_replay": ("live", cluster_figure),
}


def ours(record: Record) -> bool:
    return "adapter_bytes" in record


def sweeps(records: Sequence[Record]) -> dict[int, list[Record]]:
    """By length, jaxmux's records in ascending order of their number of tasks.

    Lengths with records of only one number of tasks are left out. All records of a length have the
    same implementation (remat policy), the one with the most records.
    """
    found: dict[int, dict[str, dict[int, Record]]] = {}
    for r in filter(ours, records):
        found.setdefault(r["length"], {}).setdefault(r["implementation"], {})[r["tasks"]] = r
    most = {length: max(policies.values(), key=len) for length, policies in found.items()}
    return {
        length: [by_tasks[tasks] for tasks in sorted(by_tasks)]
        for length, by_tasks in most.items()
        if len(by_tasks) > 1
    }


def peft_of(records: Sequence[Record], length: int) -> dict[str, Record]:
    """The records of PEFT for a length, by mode."""
    return {
        r["implementation"].rpartition(", ")[2]: r
        for r in records
        if not ours(r) and r["length"] == length
    }


def tokens_of_step(record: Record) -> float:
    return record["tokens_per_second"] * record["ms_median"] / 1e3


def tasks_name(record: Record) -> str:
    dropout = f", dropout {record['dropout']:g}" if record["dropout"] else ""
    return f"{record['tasks']} task{'s' if record['tasks'] > 1 else ''}{dropout}"


def new_figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=11)
    axes.grid(True, axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    return figure, axes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the JSON files")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    return parser.parse_args()


if __name__ == "__main__":
    main()
