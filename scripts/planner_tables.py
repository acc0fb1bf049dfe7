"""The planner's tables of docs/benchmarks.md, each of which answers one question.

`PLANNER_BLOCKS` has the functions that make them from the records in benchmarks/planner.json. A
record is a result's name, value, unit and limit (`bound`), and the baselines beside it by name.
"""

from collections.abc import Callable, Iterator, Sequence

from benchmark_records import Record, commands, markdown, shown

Table = Callable[[Sequence[Record]], str]

OTHERS = ("LoRAFusion's order", "mLoRA's LoRAPP", "1F1B per task")
REPORTED = (
    "LoRAFusion, reported",
    "mLoRA, reported by LoRAFusion",
    "1F1B per task, reported by LoRAFusion",
)
LOST = (
    "lost without task fusion",
    "lost without orchestration",
    "lost without alignment",
    "lost without alignment, planned anew",
    "lost without any",
)
# Prefixes of the names of records that have a table of their own.
BUBBLES, STREAM, PARTS = "bubble ratio, ", "pipeline, ", "MuxTune's parts all on, "
OVERLAP, REPLICAS = "exposed all-reduces, ", "GPU seconds over fused, "
GAIN, PREDICTION = "most gain of unlike replicas, ", "prediction of "
OWN_TABLES = (BUBBLES, STREAM, PARTS, OVERLAP, REPLICAS, GAIN, PREDICTION)
# Words in which the page shows the names of other records.
WORDS = {
    "fusion over brute force, 9 tasks": (
        "latency of fused tasks (MuxTune Eq. 6), 9 tasks, over brute force"
    ),
    "buckets' squares over brute force, 8 hTasks": (
        "sum of squares of buckets (MuxTune Eq. 7), 8 hTasks, over brute force"
    ),
    "largest bucket over brute force, 8 hTasks": "largest bucket, 8 hTasks, over brute force",
    "largest bucket over the optimum, 16 hTasks": "largest bucket, 16 hTasks, over the optimum",
    "largest bucket over max(mean, hTask), 48 hTasks": (
        "largest bucket, 48 hTasks, over max(mean bucket, largest hTask)"
    ),
    "microbatches over the lower bound": "microbatches of packed rounds, over their lower bound",
    "rows of random mixes over the lower bound": (
        "rows of packed rounds, 120 random mixes of data sets, over their lower bound"
    ),
    "rows of unusual mixes over the lower bound": (
        "rows of packed rounds, mean of 60 mixes of unusual lengths, over their lower bound"
    ),
    "interleaving over best of all orders": (
        "time of interleaved hTasks, mean of 60 graphs, over the best of all orders"
    ),
    "dispatch over its bound": (
        "time of a dispatched round (LobRA Eq. 3), largest of 40, over its lower bound"
    ),
    "fusion of 64 tasks": "fusing 64 tasks (MuxTune Eq. 6)",
    "packing": "packing samples",
    "plan of 32 tasks of 16 samples, pp=4": "a whole plan, 32 tasks, 4 stages",
    "dispatch of 1,500 sequences, 16 buckets, 5 configurations": (
        "dispatching 1,500 sequences to replicas of 5 configurations"
    ),
    "wait for the next round's plan": "waiting for the next round, which a thread packs",
    "deployment on 16 GPUs": "choosing replicas for 16 GPUs (LobRA Eq. 2)",
    "deployment on 64 GPUs": "choosing replicas for 64 GPUs",
    "deployment on 256 GPUs": "choosing replicas for 256 GPUs",
}


def bubble_table(records: Sequence[Record]) -> str:
    """Bubble ratios, and those that LoRAFusion reports."""
    found = dict(named(records, BUBBLES))
    rows = []
    for name, r in found.items():
        others = (r["baselines"][key] for key in ("floor of any order", *OTHERS))
        limit = f"{r['bound']:.0%}"
        rows.append([name, f"**{r['value']:.1%}**", limit, *(f"{ratio:.1%}" for ratio in others)])
    for r in list(found.values())[:1]:
        reported = (f"{r['baselines'][name]:.1%}" for name in REPORTED)
        rows.append(["reported by LoRAFusion (Fig. 20)", "", "", "", *reported])
    return markdown(["stages", "jaxmux", "limit", "lower bound", *OTHERS], rows)


def stream_table(records: Sequence[Record]) -> str:
    """Seconds per million tokens of a pipeline, and of planning for it."""
    rows = [
        [
            name,
            f"**{r['value']:.2f}**",
            *(f"{r['baselines'][other]:.2f}" for other in OTHERS),
            f"{r['baselines']['jaxmux, planning']:.2f}",
        ]
        for name, r in named(records, STREAM)
    ]
    return markdown(["stages", "jaxmux", *OTHERS, "planning"], rows)


def parts_table(records: Sequence[Record]) -> str:
    """The throughput that is lost without a part of MuxTune, and the loss that MuxTune reports."""
    rows = []
    for name, r in named(records, PARTS):
        lost = r["baselines"]
        rows.append([name, f"{r['value']:.2f}", *(f"{lost[part]:.0%}" for part in LOST)])
        reported = [lost.get(f"{part} (MuxTune)") for part in LOST]
        if any(reported):
            cells = ("" if loss is None else f"{loss:.0%}" for loss in reported)
            rows.append(["reported by MuxTune (Fig. 16)", "", *cells])
    head = ["", "all parts, s per million tokens"]
    return markdown([*head, *(part.removeprefix("lost ") for part in LOST)], rows)


def overlap_table(records: Sequence[Record]) -> str:
    """The share of all-reduces that computation does not hide."""
    rows = [
        [
            name,
            f"**{r['value']:.0%}**",
            f"{r['baselines']['Alg. 1 alone']:.0%}",
            f"{r['baselines']['one hTask after another']:.0%}",
            f"{r['baselines']['time over one after another']:.2f}",
        ]
        for name, r in named(records, OVERLAP)
    ]
    head = ["hTasks", "jaxmux", "Alg. 1 alone", "one after another"]
    return markdown([*head, "time over one after another"], rows)


def replica_table(records: Sequence[Record]) -> str:
    """GPU seconds of replicas of different sizes, divided by those of Task-Fused."""
    rows = [
        [
            name,
            f"**{r['value']:.2f}**",
            f"{r['baselines']['least of any replicas']:.2f}",
            f"{r['baselines']['LobRA, reported']:.2f}",
            r["baselines"]["costs"],
        ]
        for name, r in named(records, REPLICAS)
    ]
    return markdown(["backbone and GPUs", "jaxmux", "lower bound", "LobRA reports", "costs"], rows)


def like_replica_table(records: Sequence[Record]) -> str:
    """GPU seconds of replicas of different sizes, divided by those of methods with like replicas.

    The methods are LobRA's, and the same with jaxmux's length bins and dispatch.
    """
    methods = (
        "over sequential",
        "over fused with our buckets and dispatch",
        "over sequential with our buckets and dispatch",
    )
    rows = [
        [name, f"{r['value']:.2f}", *(f"{r['baselines'][method]:.2f}" for method in methods)]
        for name, r in named(records, REPLICAS)
    ]
    head = ["backbone and GPUs", "Task-Fused", "Task-Sequential"]
    head += ["Task-Fused with jaxmux's dispatch", "Task-Sequential with jaxmux's dispatch"]
    return markdown(head, rows)


def gain_table(records: Sequence[Record]) -> str:
    """How many times as fast unlike replicas are as the best like ones, on few GPUs."""
    rows = [
        [
            name,
            f"**{r['value']:.3f}**",
            f"{r['baselines']['gain of the best of them']:.3f}",
            r["baselines"]["the best of them"],
            r["baselines"]["the best like replicas"],
        ]
        for name, r in named(records, GAIN)
    ]
    head = ["backbone and GPUs", "no unlike replicas gain more than", "the best gain"]
    return markdown([*head, "the best", "the best like replicas"], rows)


def gap_table(records: Sequence[Record]) -> str:
    """Distances to an optimum or to a bound: all records without a unit and without another
    table."""
    rows = [
        [
            WORDS.get(r["name"], r["name"]),
            f"**{r['value']:.3g}**",
            limit_of(r),
            ", ".join(
                f"{name} {shown(r['baselines'][name])}"
                for name in ("greedy", "worst mix", "tasks cut alone")
                if isinstance(r["baselines"].get(name), float)
            ),
        ]
        for r in remaining(records)
        if not r["unit"]
    ]
    return markdown(["result", "gap", "limit", "baseline"], rows)


def seconds_table(records: Sequence[Record]) -> str:
    """The time that planning takes."""
    rows = [
        [WORDS.get(r["name"], r["name"]), f"**{r['value']:.3g}**", limit_of(r), r["unit"]]
        for r in remaining(records)
        if r["unit"]
    ]
    return markdown(["part", "time", "limit", "unit"], rows)


def error_table(records: Sequence[Record]) -> str:
    """Mean absolute errors of predictions."""
    rows = [
        [name, f"**{r['value']:.2%}**", f"{r['bound']:.0%}"]
        for name, r in named(records, PREDICTION)
    ]
    return markdown(["prediction of", "mean absolute error", "limit"], rows)


PLANNER_BLOCKS: dict[str, Table] = {
    "planner: command": commands,
    "planner: errors": error_table,
    "planner: bubbles": bubble_table,
    "planner: stream": stream_table,
    "planner: parts": parts_table,
    "planner: overlap": overlap_table,
    "planner: replicas": replica_table,
    "planner: like replicas": like_replica_table,
    "planner: gain": gain_table,
    "planner": gap_table,
    "planner: seconds": seconds_table,
}


def named(records: Sequence[Record], prefix: str) -> Iterator[tuple[str, Record]]:
    """The records whose names begin with `prefix`, each with the rest of its name."""
    for r in records:
        if r["name"].startswith(prefix):
            yield r["name"].removeprefix(prefix), r


def remaining(records: Sequence[Record]) -> list[Record]:
    """The records that have no table of their own."""
    return [r for r in records if not r["name"].startswith(OWN_TABLES)]


def limit_of(record: Record) -> str:
    return "" if record["bound"] is None else f"{record['bound']:g}"
