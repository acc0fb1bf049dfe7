"""Times the grouped LoRA linear, forward and backward, and the frozen linear alone, on one GPU.

  python scripts/benchmark_grouped_lora.py --out benchmarks/grouped_lora_h200.json

The data are random and in bfloat16; the stream has 8,192 tokens in chunks of 128. One timed program
runs the op in 16 layers, each with its own weights, factors and accumulators, as in a model. A
reported time is the program's time divided by its layers, so it includes neither gaps between
programs nor the benefit of a warm L2 cache. The baseline is the same program for the frozen linears
alone: XLA's products (cuBLAS) `x W` and `dy W^T`, which training needs in any case.

The programs run in turns. In each turn a program runs for half of the turn before it is timed,
because the clock of a GPU at its power limit depends on the last tenths of a second. A time is the
median over turns; `ratio` is the median over turns of the op's time divided by the baseline's time.
Groups of records:

  tasks    1, 4 and 16 tasks of rank 16, for three shapes
  shared   q/k/v and gate/up, which share their input
  ranks    ranks 8, 16, 32 and 64 together, in turns with four tasks of rank 64 and of rank 16
  dropout  dropout 0.1, for the three shapes

The first of the given implementations is measured in all groups, the others only in `tasks` and
only for the first shape. A short execution on CPU:

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
from benchmark_records import Record, RecordFile, make_record
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

from jaxmux.installation import installed_versions
from jaxmux.pallas_kernels.grouped_lora import IMPLEMENTATIONS

LINEARS = (Linear(4096, (4096,)), Linear(4096, (14336,)), Linear(14336, (4096,)))
SHARED = (Linear(4096, (4096, 1024, 1024)), Linear(4096, (14336, 14336)))
UNIFORM, RANK_64, MIXED = (16,) * 4, (64,) * 4, (8, 16, 32, 64)
GROUPS = ("tasks", "shared", "ranks", "dropout")


class Measurement(NamedTuple):
    """Cases of one linear that are timed in turns with each other and with the frozen linear.

    Attributes:
      group: group of the records.
      implementation: implementation of the op.
      cases: the cases.
    """

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
    """All measurements, linear by linear; all widths are divided by `shrink`."""
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
    """Times the cases of a measurement and the baseline in turns.

    Raises:
      ValueError: the implementation cannot serve a case.
    """
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
    """Milliseconds of a call of each function, one value for each turn but the first, which is not
    counted. A turn of a function takes `seconds`."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(turns + 1):
        for function, found in zip(functions, times, strict=True):
            calls = max(1, round(seconds / 2 / seconds_of(function, calls=1)))
            seconds_of(function, calls)
            timed = seconds_of(function, calls)
            if turn:
                found.append(1e3 * timed / calls)
    return times


def seconds_of(function: Callable, calls: int) -> float:
    """Seconds that `calls` calls take."""
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
    parser.add_argument("--append", action="store_true", help="keep the records already in --out")
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=16, help="layers of a program")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="length of a program's turn")
    parser.add_argument("--shrink", type=int, default=1, help="divides all widths")
    return parser.parse_args()


if __name__ == "__main__":
    main()
