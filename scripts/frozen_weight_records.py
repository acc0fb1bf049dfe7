"""Figures of backbones whose linears are stored in a format that is no dtype, and their table.

They are made from records of benchmark_step.py, which measures the steps:

  python scripts/benchmark_step.py --out /tmp/step.json --peft 4x2048 8x64 --cases 4x2048 8x64 \
      --rounds 10 --formats bfloat16 float8 nf4
  python scripts/benchmark_step.py --out /tmp/small.json --peft --cases 4x256 --tokens 1024 \
      --rounds 8 --formats nf4
  python scripts/benchmark_step.py --out /tmp/large.json --peft --cases 4x1024 --tokens 4096 \
      --rounds 2 --layers 80 --hidden 8192 --kv_heads 8 --formats nf4 --remat lean
  python scripts/frozen_weight_records.py /tmp/step.json /tmp/small.json /tmp/large.json \
      --out benchmarks/frozen_weights_h200.json
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmark_records import (
    NOT_MEASURED,
    Record,
    figures_table,
    limit,
    make_figure,
    read_records,
    replace_records,
)

from jaxmux.models import BACKBONE_FORMATS

# By shape of the steps, the least tokens/s of float8, and the largest time over bfloat16 and the
# largest peak memory in GiB of nf4.
LEAST_SPEED = {
    "8192 tokens, length 2048, 32 layers": 25_000,
    "8192 tokens, length 64, 32 layers": 27_000,
}
MOST_TIME = {"8192 tokens, length 2048, 32 layers": 1.10}
MOST_GIB = {"8192 tokens, length 2048, 32 layers": 33.0, "1024 tokens, length 256, 32 layers": 12.0}
_FORMAT = re.compile(rf", ({'|'.join(BACKBONE_FORMATS)})$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("steps", nargs="+", type=Path, help="records of benchmark_step.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = [figure for path in args.steps for figure in figures(read_records(path))]
    replace_records(args.out, tuple(figure["name"] for figure in found), found)


def figures(steps: Sequence[Record]) -> Iterator[Record]:
    """The figures of the steps of one run, whose steps in bfloat16 are the baselines.

    Args:
      steps: records of benchmark_step.py.
    """
    baselines = {(s["shape"], s["implementation"]): s for s in steps if not _format(s)}
    for step in steps:
        if not (name := _format(step)):
            continue
        is_nf4, shape = name == "nf4", step["shape"]
        plain = baselines.get((shape, _FORMAT.sub("", step["implementation"])))
        facts = {"tokens/s": step["tokens_per_second"], "ms": step["ms_median"]}
        if step["ratio"]:
            facts["PEFT compiled, tokens/s"] = step["tokens_per_second"] / step["ratio"]
        if plain:
            facts |= {
                "bfloat16, ms": plain["ms_median"],
                "bfloat16, GiB": plain["peak_bytes"] and plain["peak_bytes"] / 2**30,
            }
            ratio = step["ms_median"] / plain["ms_median"]
            bound = MOST_TIME.get(shape) if is_nf4 else None
            yield _figure(step, f"{name}, time over bfloat16", ratio, bound, "ratio", facts)
        speed = step["tokens_per_second"]
        bound = LEAST_SPEED.get(shape) if name == "float8" else None
        if bound or not plain:
            yield _figure(step, f"{name}, speed", speed, bound, "tokens/s", facts, "at least")
        if step["peak_bytes"]:
            peak, bound = step["peak_bytes"] / 2**30, MOST_GIB.get(shape) if is_nf4 else None
            yield _figure(step, f"{name}, peak memory", peak, bound, "GiB", facts)


def frozen_weights_table(records: Sequence[Record]) -> str:
    """The figures with their bounds and baselines."""
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        format, what, shape = record["name"].split(", ", 2)
        beside = ", ".join(
            f"{name} {_shown(value)}" for name, value in record["baselines"].items() if value
        )
        value = f"**{_shown(record['value'])}** {record['unit']}"
        rows.append([format, what, shape, value, limit(record), beside])
    head = ["format", "figure", "microbatch", "measured", "bound", "of the same run"]
    return figures_table(records, head, rows)


def quality_table(records: Sequence[Record]) -> str:
    """The figures of compare_formats.py."""
    if not records:
        return NOT_MEASURED
    rows = []
    for record in records:
        format, what = record["name"].split(", ", 1)
        beside = "; ".join(
            f"{name} {', '.join(f'{x:.3g}' for x in value)}"
            for name, value in record["baselines"].items()
            if isinstance(value, list)
        )
        value = f"**{record['value']:.2g}** {record['unit']}"
        rows.append([format, what, value, limit(record), beside])
    head = ["format", "figure", "measured", "bound", "made from"]
    return figures_table(records, head, rows)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _format(step: Record) -> str | None:
    found = _FORMAT.search(step["implementation"])
    return found and found[1]


def _figure(step, name, value, bound, unit, facts, sense="at most") -> Record:
    own = {key: step[key] for key in ("command", "device", "versions")}
    return make_figure(f"{name}, {step['shape']}", value, bound, unit, facts, sense=sense, **own)


if __name__ == "__main__":
    main()
