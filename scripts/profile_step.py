"""Traces one round of `scripts/benchmark_step.py` and sums the GPU's time by kernel.

  python scripts/profile_step.py --out benchmarks/profile_h200.json --trace step.trace.json.gz \
      --formats bfloat16 float8

The traces open in https://ui.perfetto.dev.
"""

import argparse
import dataclasses
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import benchmark_step
import jax
from benchmark_records import RecordFile, make_record
from gpu_trace import Launch, pauses, read_launches, trace_file

from jaxmux.installation import installed_versions

# Purposes of kernels, by the beginning of their names. The first expression that matches counts.
PURPOSES = (
    ("routed_matmul", "frozen products, LoRA inside"),
    ("nvjet|cutlass|cublas", "head"),
    ("sdpa|cudnn|short_attention", "attention"),
    ("gated_", "activation of the MLP, its low-rank products"),
    ("column_products", "gradients of the factors"),
    ("row_products", "rank-r intermediates"),
    ("float8_rows", "rows in float8"),
    ("transposed_codes", "transposed weights"),
    ("rank_major_factors", "factors in the compute dtype"),
    ("normalize|stream_gradient", "norms"),
    ("input_concatenate", "rotary embedding"),
    ("", "loss, optimizer and the rest"),
)


class Kernel(NamedTuple):
    """All launches of one kernel in a trace; `microseconds` is the sum of their durations."""

    name: str
    launches: int
    microseconds: float


def main() -> None:
    args, others = parse_arguments()
    tasks, length = (int(part) for part in args.case.split("x"))
    step_args = benchmark_step.parse_arguments(["--out", "", *others])
    records = RecordFile(args.out)
    for form in step_args.formats:
        launches, microbatches = trace_round(args, step_args, tasks, length, form)
        kernels, idle = summarise(launches)
        for purpose, members in by_purpose(kernels).items():
            records.add(
                make_record(
                    name="profile",
                    shape=f"{step_args.tokens} tokens, length {length}",
                    dtype=form,
                    tasks=tasks,
                    ranks=[step_args.rank] * tasks,
                    dropout=0.0,
                    implementation=purpose,
                    ms_median=sum(k.microseconds for k in members) / 1e3 / microbatches,
                    device=jax.devices()[0].device_kind,
                    versions=installed_versions("jax", "jaxlib"),
                    idle_ms=idle / 1e3 / microbatches,
                    launches=sum(k.launches for k in members) / microbatches,
                    kernels={k.name: round(k.microseconds / k.launches, 1) for k in members},
                )
            )


def trace_round(
    args: argparse.Namespace, step_args: argparse.Namespace, tasks: int, length: int, form: str
) -> tuple[list[Launch], int]:
    """The launches of a round with linears in the format `form`, and the round's microbatches."""
    config = dataclasses.replace(
        benchmark_step.llama_config(step_args),
        backbone_format=None if form == benchmark_step.PLAIN else form,
    )
    with tempfile.TemporaryDirectory() as folder:
        ready = benchmark_step.make_engine(config, step_args, tasks, length, args.remat, rounds=4)
        for _ in range(3):
            ready.engine.train_round()
        jax.block_until_ready(ready.engine.state)
        with jax.profiler.trace(folder):
            ready.engine.train_round()
            jax.block_until_ready(ready.engine.state)
        trace = trace_file(Path(folder))
        (launches,) = read_launches(trace).values()
        if args.trace:
            shutil.copy(trace, args.trace.with_name(f"{form}.{args.trace.name}"))
    return launches, ready.microbatches


def summarise(launches: Sequence[Launch]) -> tuple[list[Kernel], float]:
    """Sums the durations of a GPU's kernels.

    Args:
      launches: the launches in the order of their start.

    Returns:
      The kernels in descending order of their time, and the microseconds in which no kernel ran.
      The longest pause is not counted, because in it the host starts the round's first program,
      which it does during the previous round in training.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for launch in launches:
        found[short_name(launch.name)].append(launch.stop - launch.start)
    kernels = [Kernel(name, len(durations), sum(durations)) for name, durations in found.items()]
    between = pauses(launches)
    return sorted(kernels, key=lambda k: -k.microseconds), sum(between) - max(between)


def short_name(kernel: str) -> str:
    """A kernel's name without C++ signature, suffixes of its generator, and XLA's number."""
    name = re.sub(r"^void |[(<].*|_mosaic_gpu_kernel|_knob_.*", "", kernel)
    return re.sub(r"^cudnn_generated\w*?_(?=sdpa)|_\d+$", "", name)


def by_purpose(kernels: Sequence[Kernel]) -> dict[str, list[Kernel]]:
    """The kernels by purpose, in descending order of the purpose's time."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        purpose = next(text for start, text in PURPOSES if re.match(start, kernel.name))
        found[purpose].append(kernel)
    return dict(sorted(found.items(), key=lambda item: -sum(k.microseconds for k in item[1])))


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """This script's arguments, and those for benchmark_step.py."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--trace",
        type=Path,
        help="file to which traces are copied; their names begin with the format",
    )
    parser.add_argument("--case", default="4x2048", help="tasks x length")
    parser.add_argument("--remat", default="dots")
    return parser.parse_known_args()


if __name__ == "__main__":
    main()
