"""Writes the tables of docs/benchmarks.md from the records in benchmarks/.

  python scripts/benchmark_tables.py

Every block of the page between `<!-- NAME -->` and `<!-- /NAME -->` is replaced by the text of the
function with this name in `BLOCKS`. The rest of the page is kept. The tables of the planner are in
planner_tables.py, that of the cluster replay in cluster_records.py.
"""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmark_data import data_table
from benchmark_records import (
    NOT_MEASURED,
    Record,
    commands,
    figures_table,
    limit,
    markdown,
    read_records,
)
from cluster_records import replay_table
from frozen_weight_records import frozen_weights_table, quality_table
from generate_records import generate_table
from kinds_records import kinds_table
from live_records import live_table
from planner_tables import PLANNER_BLOCKS
from sharding_records import sharding_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RECORDS = ROOT / "benchmarks"
FILES = {
    "grouped_lora": "grouped_lora_h200.json",
    "step": "step_h200.json",
    "command": "step_h100.json",
    "sharding": "sharding_h200.json",
    "sharding on H100s": "sharding_h100.json",
    "remat": "step_remat_h200.json",
    "dram": "dram_h200.json",
    "profile": "profile_h200.json",
    "packing": "packing_h200.json",
    "planner": "planner.json",
    "live": "live.json",
    "kinds": "kinds_h200.json",
    "objectives": "objectives_h200.json",
    "frozen_weights": "frozen_weights_h200.json",
    "format_quality": "format_quality.json",
    "data": "data_memory.json",
    "generate": "generate_h200.json",
}
# The comparison of predictions and measurements, which is not a list of records.
CHECK = "profile_check_h200.json"
PEFT_MODES = ("eager", "compiled")
# Limits of the time of the fused op divided by that of the frozen linears alone: for one square or
# one other linear, and for two or three linears with the same input. Dropout adds to the limit.
SQUARE_LIMIT, WIDE_LIMIT, PAIR_LIMIT, TRIPLE_LIMIT = 1.10, 1.06, 1.05, 1.08
DROPOUT_LIMIT, TRITON_LIMIT = 0.06, 1.25


def main() -> None:
    PAGE.write_text(with_tables(PAGE.read_text(), read_all(RECORDS)))


def read_all(folder: Path) -> dict[str, list[Record]]:
    """The records by name of the benchmark; an empty list if the file does not exist."""
    found = {
        name: read_records(folder / file) if (folder / file).exists() else []
        for name, file in FILES.items()
    }
    return found | {"predictions": read_check(folder / CHECK)}


def read_check(path: Path) -> list[Record]:
    """The cases of a file of `jaxmux profile --check`; an empty list if it does not exist."""
    if not path.exists():
        return []
    check = read_records(path)
    shared = {"device": check["device"], "dtype": check["dtype"], "versions": check["software"]}
    return [case | shared for case in check["cases"]]


def with_tables(page: str, records: dict[str, list[Record]]) -> str:
    """The page with new blocks.

    Raises:
      ValueError: the page does not have one of the blocks.
    """
    for name, make in BLOCKS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"no block <!-- {name} --> … <!-- /{name} -->")
        found = records.get(name.partition(":")[0])
        body = make(found) if found else NOT_MEASURED
        page = pattern.sub(lambda match, body=body: f"{match[1]}{body}{match[2]}", page)
    return page


def op_table(records: Sequence[Record]) -> str:
    rows = [
        [
            linear_name(r),
            r["tasks"],
            f"{r['dropout']:g}",
            r["implementation"],
            f"{r['ms_median']:.3f}",
            f"{r['baseline_ms_median']:.3f}",
            f"**{r['ratio']:.3f}**",
            limit_cell(r["ratio"], ratio_limit(r)),
        ]
        for r in records
        if r["group"] != "ranks"
    ]
    head = ["linear", "tasks", "dropout", "implementation", "ms", "frozen, ms", "ratio", "limit"]
    return source(records) + markdown(head, rows)


def command_table(records: Sequence[Record]) -> str:
    """`jaxmux train` and PEFT on one device."""
    rows = [
        [
            f"**{r['implementation']}**" if "predicted_bytes" in r else r["implementation"],
            r["tasks"],
            f"{r['length']:,}",
            f"{r['tokens_per_second']:,.0f}",
            gibibytes(r["peak_bytes"]),
            gibibytes(r.get("predicted_bytes")),
            f"{r['ratio']:.3f}" if r["ratio"] else "",
        ]
        for r in records
    ]
    head = ["", "tasks", "length", "tokens/s", "peak memory", "predicted peak"]
    return source(records) + markdown([*head, "over PEFT compiled"], rows)


def rank_table(records: Sequence[Record]) -> str:
    """The time with mixed ranks and with uniform ranks, which were measured in alternation."""
    together = [r for r in records if r["group"] == "ranks"]
    if not together:
        return NOT_MEASURED
    (mixed,) = (r for r in together if len(set(r["ranks"])) > 1)
    rows = []
    for r in together:
        cells = [", ".join(map(str, r["ranks"])), f"{r['ms_median']:.3f}", f"{r['ratio']:.3f}"]
        if r is mixed:
            rows.append([*cells, "", ""])
            continue
        slower = mixed["ratio"] / r["ratio"]
        rows.append([*cells, f"**{slower:.3f}**", limit_cell(slower, rank_limit(r))])
    return markdown(["ranks", "ms", "ratio", "mixed over this", "limit"], rows)


def step_table(records: Sequence[Record]) -> str:
    """By length of the samples: PEFT, then jaxmux by number of tasks."""
    lengths = list(dict.fromkeys(r["length"] for r in records))
    ordered = sorted(
        records,
        key=lambda r: (lengths.index(r["length"]), "adapter_bytes" in r, r["tasks"]),
    )
    rows = []
    for r in ordered:
        ours = "adapter_bytes" in r
        tokens = r["tokens_per_second"] * r["ms_median"] / 1e3
        # jaxmux picks the implementation of its linears; the records of other choices name it.
        name = r["implementation"].replace(", linears picked", "")
        rows.append(
            [
                f"**{name}**" if ours else name,
                r["tasks"],
                f"{r['length']:,}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['ms_median']:,.0f} of {tokens:,.0f} tokens",
                gibibytes(r["peak_bytes"]),
                gibibytes(r.get("adapter_bytes")),
                *(over_peft(r, records, mode) if ours else "" for mode in PEFT_MODES),
            ]
        )
    head = ["", "tasks", "length", "tokens/s", "ms of a microbatch", "peak memory"]
    head += ["adapter state", *(f"over PEFT {mode}" for mode in PEFT_MODES)]
    return source(records) + markdown(head, rows)


def over_peft(record: Record, records: Sequence[Record], mode: str) -> str:
    """Tokens per second divided by those of PEFT in this mode at the same length, if measured."""
    name = f"Hugging Face PEFT, {mode}"
    for r in records:
        if r["implementation"] == name and r["length"] == record["length"]:
            return f"{record['tokens_per_second'] / r['tokens_per_second']:.3f}"
    return ""


def remat_table(records: Sequence[Record]) -> str:
    """The remat policies of one case, compared with "dots"."""
    (dots,) = (r for r in records if "remat=dots" in r["implementation"])
    same = [r for r in records if (r["tasks"], r["length"]) == (dots["tasks"], dots["length"])]
    rows = [
        [
            r["implementation"].partition("remat=")[2],
            f"{r['tokens_per_second']:,.0f}",
            f"{r['ms_median']:,.1f}",
            f"{r['ms_median'] / dots['ms_median'] - 1:+.1%}",
            gibibytes(r["peak_bytes"]),
            *(over_peft(r, records, mode) for mode in PEFT_MODES),
        ]
        for r in same
    ]
    head = ["remat", "tokens/s", "ms of a microbatch", 'time over "dots"', "peak memory"]
    head += [f"over PEFT {mode}" for mode in PEFT_MODES]
    return source(records) + markdown(head, rows)


def dram_table(records: Sequence[Record]) -> str:
    first = records[0]
    moved = [("frozen linear", "", first["baseline_bytes_read"], first["baseline_bytes_written"])]
    moved += [
        (r["implementation"], f"{r['dropout']:g}", r["bytes_read"], r["bytes_written"])
        for r in records
    ]
    frozen = moved[0][2] + moved[0][3]
    rows = [
        [name, dropout, f"{read / 1e6:,.0f}", f"{written / 1e6:,.0f}"]
        + [f"{(read + written) / frozen:.2f}"]
        for name, dropout, read, written in moved
    ]
    head = ["", "dropout", "read, MB", "written, MB", "ratio"]
    return source(records) + markdown(head, rows)


def profile_table(records: Sequence[Record]) -> str:
    """By format of the linears, the time of each purpose, and its kernel with the largest total
    time."""
    by_format = {r["dtype"]: {} for r in records}
    for r in records:
        by_format[r["dtype"]][r["implementation"]] = r
    formats = list(by_format.values())
    rows = []
    for purpose in dict.fromkeys(r["implementation"] for r in records):
        found = [each.get(purpose) for each in formats]
        kernels: dict[str, list[str]] = {}
        for name, microseconds in (next(iter(r["kernels"].items())) for r in found if r):
            kernels.setdefault(f"`{name}`", []).append(f"{microseconds:,.0f}")
        times = [f"{r['ms_median']:.1f}" if r else "" for r in found]
        shown = (f"{name} {' / '.join(us)}" for name, us in kernels.items())
        rows.append([purpose, *times, ", ".join(shown)])
    idle = [next(iter(each.values()))["idle_ms"] for each in formats]
    totals = [sum(r["ms_median"] for r in each.values()) for each in formats]
    rows.append(["between kernels", *(f"{ms:.1f}" for ms in idle), ""])
    whole = [f"**{sum(both):.1f}**" for both in zip(totals, idle, strict=True)]
    rows.append(["**one microbatch**", *whole, ""])
    head = ["purpose", *(f"{name}, ms" for name in by_format), "main kernel, µs per launch"]
    return source(records) + markdown(head, rows)


def packing_table(records: Sequence[Record]) -> str:
    """The ways to arrange samples in microbatches, compared for the same tasks."""
    plain = {r["tasks"]: r for r in records if r["implementation"] == "first-fit packing"}
    rows = []
    for r in records:
        name = r["implementation"]
        size, *limits = r["shape"].split(", ")
        rows.append(
            [
                r["tasks"],
                f"**{name}**" if name == "jaxmux" else name,
                size,
                f"{r['microbatches']:.1f}",
                f"{r['padding']:.0%}",
                f"{r['ms_median']:,.0f}",
                f"{r['tokens_per_second']:,.0f}",
                f"{r['ratio']:.2f}",
                f"{r['tokens_per_second'] / plain[r['tasks']]['tokens_per_second']:.2f}",
                limits[0].removesuffix(" a row") if limits else "",
            ]
        )
    head = ["tasks", "", "rows x tokens of a microbatch", "microbatches", "padding", "ms per round"]
    head += ["effective tokens/s", "over zero-padding", "over first-fit", "sequences in a row"]
    data = {r["tasks"]: ", ".join(r["data"]) for r in records}
    named = "\n".join(f"- {tasks} tasks: {names}" for tasks, names in data.items())
    return f"{source(records)}{named}\n\n{markdown(head, rows)}"


_OBJECTIVES = {
    "objectives_dpo": "DPO over SFT, tokens/s, the reference being kept",
    "objectives_dpo_first_epoch": "DPO over SFT, tokens/s, with the time of the reference",
    "objectives_dpo_two_passes": "DPO in two passes over SFT, tokens/s",
    "objectives_sft_in_rows": "SFT in the rows of pairs over SFT, tokens/s",
    "objectives_ppo": "PPO over SFT, tokens/s",
    "objectives_simpo": "SimPO over SFT, tokens/s",
    "objectives_memory": "DPO over SFT, peak memory",
    "objectives_score": "forward passes of training over log-probabilities, time",
    "objectives_dpo_over_trl": "DPO over TRL's DPOTrainer with PEFT, tokens/s",
}


def objectives_table(records: Sequence[Record]) -> str:
    """Objectives of two passes beside SFT, and beside TRL."""
    rows = [[_OBJECTIVES[r["name"]], f"**{r['value']:.3f}**", limit(r)] for r in records]
    table = figures_table(records, ["figure", "measured", "bound"], rows)
    shapes = dict.fromkeys(r["baselines"]["shape"] for r in records)
    return f"{table}\nMeasured with {'; with '.join(shapes)}.\n"


def prediction_table(records: Sequence[Record]) -> str:
    """Measured and predicted time and memory of the cases of a profile check."""
    rows = []
    for r in records:
        numbers = [part for part in r["case"].split("x") if part.isdigit()]
        remat = r["case"].split("x")[-1]
        tasks, length, rank, tokens, *row_len = map(int, numbers)
        (seconds, predicted), (peak, predicted_peak) = r["seconds"], r["peak"]
        rows.append(
            [
                *(tasks, f"{length:,}", rank, f"{tokens:,}", f"{(row_len or [length])[0]:,}"),
                "dots" if remat.isdigit() else remat,
                *(f"{1e3 * seconds:.1f}", f"{1e3 * predicted:.1f}"),
                *(f"{peak / 2**30:.2f}", f"{predicted_peak / 2**30:.2f}"),
            ]
        )
    head = ["tasks", "length", "rank", "tokens", "row", "remat", "round, ms", "predicted"]
    head += ["peak, GiB", "predicted"]
    return f"{hardware_and_versions(records)}.\n\n{markdown(head, rows)}"


BLOCKS = {
    "grouped_lora": op_table,
    "grouped_lora: ranks": rank_table,
    "step": step_table,
    "command": command_table,
    "sharding": sharding_table,
    "sharding on H100s": sharding_table,
    "remat": remat_table,
    "dram": dram_table,
    "profile": profile_table,
    "packing": packing_table,
    "predictions": prediction_table,
    **PLANNER_BLOCKS,
    "live: cluster replay": replay_table,
    "live: arrivals and departures": live_table,
    "kinds": kinds_table,
    "objectives": objectives_table,
    "frozen_weights": frozen_weights_table,
    "format_quality": quality_table,
    "data": data_table,
    "generate": generate_table,
}


def ratio_limit(record: Record) -> float | None:
    """The largest permitted `ratio` of a record of the op; None if there is no limit."""
    k, widths = sizes(record)
    square = widths == [k]
    if record["implementation"] == "triton" and square:
        return TRITON_LIMIT
    if record["implementation"] != "mosaic_gpu" or set(record["ranks"]) != {16}:
        return None
    limits = {1: SQUARE_LIMIT if square else WIDE_LIMIT, 2: PAIR_LIMIT, 3: TRIPLE_LIMIT}
    return limits[len(widths)] + (DROPOUT_LIMIT if record["dropout"] else 0.0)


def rank_limit(uniform: Record) -> float:
    """The largest permitted ratio of the time with mixed ranks to that with a uniform rank."""
    return 1.05 if uniform["ranks"][0] == 16 else 1.0


def limit_cell(value: float, limit: float | None) -> str:
    """The limit with two decimals, and whether the value exceeds it."""
    if limit is None:
        return ""
    return f"{limit:.2f}{', exceeded' if value > limit else ''}"


def sizes(record: Record) -> tuple[int, list[int]]:
    """The input width and the output widths in a record of the op."""
    _, k, widths = record["shape"].split("x")
    return int(k), [int(n) for n in widths.split("+")]


def linear_name(record: Record) -> str:
    k, widths = sizes(record)
    group = {1: "", 2: "gate/up: ", 3: "q/k/v: "}[len(widths)]
    return f"{group}{k:,} × {' + '.join(f'{n:,}' for n in widths)}"


def gibibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.1f} GiB"


def hardware_and_versions(records: Sequence[Record]) -> str:
    """The devices, dtypes and package versions of the records, each once."""
    devices = dict.fromkeys(r["device"] for r in records)
    dtypes = dict.fromkeys(r["dtype"] for r in records if r.get("dtype"))
    versions = dict.fromkeys(f"{p} {v}" for r in records for p, v in r["versions"].items())
    return ", ".join([*devices, *dtypes, *versions])


def source(records: Sequence[Record]) -> str:
    """The commands, devices, dtypes and versions of the records, as text above a table."""
    spreads = [(r["ms_max"] - r["ms_min"]) / r["ms_median"] for r in records if r["ms_max"]]
    spread = ""
    if spreads:
        spread = (
            f" Slowest minus fastest repetition: {statistics.median(spreads):.1%} (median of rows)."
        )
    return f"{commands(records)}{hardware_and_versions(records)}.{spread}\n\n"


if __name__ == "__main__":
    main()
