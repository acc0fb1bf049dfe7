"""The grouped LoRA linear, forward and backward, beside the frozen linear alone, on one GPU.

  python scripts/benchmark_grouped_lora.py --out benchmarks/grouped_lora_h200.json

Random data in bfloat16, a stream of 8,192 tokens in chunks of 128. What is timed is one program
that runs the op in 16 layers, each with weights, factors and accumulators of its own, as a model
does; a time is that of the program over its layers, so that neither the gaps between programs nor a
warm L2 cache count. The baseline is the same program of the frozen linears alone, XLA's (cuBLAS's)
`x W` and `dy W^T`, which a frozen model needs in any case.

The programs run in turns, each for half a turn before it is timed: at its power limit, a GPU has
the clock that the last tenths of a second allow. A time is the median over turns; `ratio` is the
median over turns of the op's time over the baseline's. Groups of records:

  tasks    1, 4 and 16 tasks of rank 16 at three shapes
  shared   q/k/v and gate/up, which share their input
  ranks    ranks 8, 16, 32 and 64 together, in turns with uniform 64 and uniform 16
  dropout  0.1 at the three shapes

The first implementation named is measured in all of them, any other with the tasks of the first
shape. For a dry run on CPU:

  python scripts/benchmark_grouped_lora.py --out /tmp/dry.json --implementations xla \
      --shrink 16 --tokens 256 --repeat 2 --turns 2 --seconds 0.01
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import jax
from benchmark_records import Record, RecordFile, installed_versions, make_record
from grouped_lora_chain import (
    Case,
    Frozen,
    Linear,
    adapted_program,
    frozen_program,
    make_adapters,
    make_frozen,
    shape_name,
)

from jaxmux.pallas_kernels.grouped_lora import IMPLEMENTATIONS

LINEARS = (Linear(4096, (4096,)), Linear(4096, (14336,)), Linear(14336, (4096,)))
SHARED = (Linear(4096, (4096, 1024, 1024)), Linear(4096, (14336, 14336)))
UNIFORM, RANK_64, MIXED = (16,) * 4, (64,) * 4, (8, 16, 32, 64)
GROUPS = ("tasks", "shared", "ranks", "dropout")


class Measurement(NamedTuple):
    """Cases of one linear that are timed in turns with each other and with the frozen linear."""

    group: str
    implementation: str
    cases: tuple[Case, ...]


def main() -> None:
    args = parse_arguments()
    records = RecordFile(args.out, args.append)
    wanted = [m for m in measurements(args.implementations, args.shrink) if m.group in args.groups]
    for linear, of_linear in groupby(wanted, key=lambda m: m.cases[0].linear):
        frozen = make_frozen(linear, args.tokens, args.repeat)
        baseline = frozen_program(frozen)
        for measurement in of_linear:
            try:
                found = measure(measurement, frozen, baseline, args)
            except ValueError as refused:
                print(f"{measurement.implementation} is not measured: {refused}", flush=True)
                continue
            records.add(*found)
            for record in found:
                print(one_line(record), flush=True)


def measurements(implementations: list[str], shrink: int = 1) -> Iterator[Measurement]:
    """All that is measured, linear by linear; `shrink` divides the widths."""
    first, *others = implementations
    for linear in LINEARS + SHARED:
        small = Linear(linear.k // shrink, tuple(n // shrink for n in linear.widths))
        if linear in SHARED:
            yield Measurement("shared", first, (Case(small, UNIFORM),))
            continue
        for tasks in (1, 4, 16):
            yield Measurement("tasks", first, (Case(small, (16,) * tasks),))
        if linear == LINEARS[0]:
            cases = tuple(Case(small, ranks) for ranks in (MIXED, RANK_64, UNIFORM))
            yield Measurement("ranks", first, cases)
        yield Measurement("dropout", first, (Case(small, UNIFORM, 0.1),))
        if linear == LINEARS[0]:
            for other in others:
                for tasks in (1, 4, 16):
                    yield Measurement("tasks", other, (Case(small, (16,) * tasks),))


def measure(
    measurement: Measurement, frozen: Frozen, baseline: Callable[[], list], args
) -> list[Record]:
    programs = [
        adapted_program(
            measurement.implementation, frozen, make_adapters(case, args.tokens, args.repeat)
        )
        for case in measurement.cases
    ]
    start = time.perf_counter()
    for program in (*programs, baseline):
        jax.block_until_ready(program())
    compile_seconds = time.perf_counter() - start
    *timed, of_baseline = [
        [milliseconds / args.repeat for milliseconds in times]
        for times in in_turns([*programs, baseline], args.turns, args.seconds)
    ]
    return [
        make_record(
            name="grouped_lora_linear",
            shape=shape_name(case.linear, args.tokens),
            dtype="bfloat16",
            tasks=len(case.ranks),
            ranks=list(case.ranks),
            dropout=case.dropout,
            implementation=measurement.implementation,
            ms_median=statistics.median(times),
            ms_min=min(times),
            ms_max=max(times),
            baseline="frozen linears, forward and dX, XLA",
            baseline_ms_median=statistics.median(of_baseline),
            ratio=statistics.median(a / b for a, b in zip(times, of_baseline, strict=True)),
            tokens_per_second=1e3 * args.tokens / statistics.median(times),
            device=jax.devices()[0].device_kind,
            versions=installed_versions("jax", "jaxlib", "jax-triton"),
            group=measurement.group,
            layers=args.repeat,
            compile_seconds=round(compile_seconds, 1),
        )
        for case, times in zip(measurement.cases, timed, strict=True)
    ]


def in_turns(functions: list[Callable], turns: int, seconds: float) -> list[list[float]]:
    """Milliseconds a call of each function, by turn of `seconds`; the first turn is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(turns + 1):
        for function, found in zip(functions, times, strict=True):
            calls = max(1, round(seconds / 2 / run(function, calls=1)))
            run(function, calls)
            timed = run(function, calls)
            if turn:
                found.append(1e3 * timed / calls)
    return times


def run(function: Callable, calls: int) -> float:
    """Seconds that so many calls take."""
    start = time.perf_counter()
    for _ in range(calls):
        result = function()
    jax.block_until_ready(result)
    return time.perf_counter() - start


def one_line(record: Record) -> str:
    return (
        f"{record['shape']}, {record['tasks']} tasks, ranks {sorted(set(record['ranks']))}, "
        f"dropout {record['dropout']}, {record['implementation']}: {record['ms_median']:.3f} ms, "
        f"frozen {record['baseline_ms_median']:.3f} ms, {record['ratio']:.3f}x "
        f"(compiled in {record['compile_seconds']:.0f} s)"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--append", action="store_true", help="keep the records that --out holds")
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=16, help="layers of the program")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="of a program in a turn")
    parser.add_argument("--shrink", type=int, default=1, help="divides all widths")
    return parser.parse_args()


if __name__ == "__main__":
    main()
