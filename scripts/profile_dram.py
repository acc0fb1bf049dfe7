"""DRAM traffic of a LoRA linear, forward and backward, measured with NVIDIA Nsight Compute.

  python scripts/profile_dram.py --out benchmarks/dram_h200.json

The case is that of LoRAFusion (figure 19): 8,192 tokens, a linear of 4,096 x 4,096, and four tasks
of rank 16, with and without dropout. The programs are the fused kernels, plain XLA, and the frozen
linear alone. `ncu` runs this script again with `--body`, which compiles all programs and then
executes each once under the profiler. A program consists of a few layers (grouped_lora_chain.py),
and the results are per layer. Caches are not cleared between kernels: data that a kernel finds in
L2 because the previous kernel wrote it causes no DRAM traffic, as in training.

`ratio` is the traffic divided by that of the frozen linear. Copies that are not kernels are not
measured. The output of ncu is written to `--csv`; `--parse` reads such a file without a GPU.
"""

import argparse
import csv
import ctypes
import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmark_records import Record, RecordFile, make_record

from jaxmux.installation import installed_versions

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
FROZEN = "frozen"
DROPOUTS = (0.0, 0.1)
# Part of the name of the marker kernel, which runs before each program. No program has a kernel of
# such a name.
MARKER = "cosine"
# Beginning of the line in which `--body` describes the profiled programs.
ABOUT = "profiled: "


class Kernel(NamedTuple):
    """One launch of a kernel and the bytes that it moved between L2 and DRAM."""

    name: str
    bytes_read: float
    bytes_written: float


def main() -> None:
    args = parse_arguments()
    if args.body:
        run_body(args)
        return
    text = args.parse.read_text() if args.parse else profile(args)
    about = json.loads(
        next(line for line in text.splitlines() if line.startswith(ABOUT)).removeprefix(ABOUT)
    )
    programs = split_programs(parse_kernels(text), len(about["programs"]))
    records = make_records(about, programs)
    RecordFile(args.out).add(*records)
    print(table(records))


def profile(args) -> str:
    """Runs the body under ncu. Returns the output of ncu and writes it to `args.csv`.

    Raises:
      SystemExit: ncu is not installed, or it reports an error.
    """
    if shutil.which("ncu") is None:
        raise SystemExit("ncu is not on the PATH: install NVIDIA Nsight Compute")
    sizes = [f"--{name}={getattr(args, name)}" for name in ("tokens", "k", "n", "tasks", "layers")]
    body = [sys.executable, __file__, "--body", "--out", os.devnull, *sizes]
    result = subprocess.run(
        [*ncu_command(), *body, "--implementations", *args.implementations],
        env=os.environ
        # With command buffers, the kernels would be parts of CUDA graphs and not be profiled.
        | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="}
        | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    args.csv.write_text(result.stdout)
    errors = ncu_errors(result.stdout + result.stderr)
    if errors or result.returncode:
        raise SystemExit("\n".join([*errors, result.stderr[-2000:], "ncu failed"]))
    return result.stdout


def ncu_command() -> list[str]:
    """The command of ncu with only the counters of DRAM, so that it need not replay kernels."""
    return [
        *("ncu", "--csv", "--print-units", "base", "--metrics", f"{READ},{WRITTEN}"),
        *("--clock-control", "none", "--cache-control", "none"),
        *("--profile-from-start", "off", "--target-processes", "application-only"),
    ]


def ncu_errors(text: str) -> list[str]:
    """The errors in ncu's output, followed by advice if the counters need a permission."""
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    if any("ERR_NVGPUCTRPERM" in line for line in errors):
        errors.append(
            "The counters are reserved for administrators: run as root, or load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0."
        )
    return errors


def parse_kernels(text: str) -> list[Kernel]:
    """The launches in ncu's output, in their order; lines that are not CSV are ignored.

    Raises:
      ValueError: no kernel was profiled, or a value is not a number of bytes.
    """
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    names: dict[int, str] = {}
    counted: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        metric, value, unit = (row[f"Metric {field}"] for field in ("Name", "Value", "Unit"))
        if unit != "byte" or value == "n/a":
            raise ValueError(f"{metric} is {value} in unit {unit!r}; expected a number of bytes")
        launch = int(row["ID"])
        names[launch] = row["Kernel Name"]
        counted[launch][metric] = float(value.replace(",", ""))
    if not names:
        raise ValueError("ncu profiled no kernel: its output has no rows")
    return [Kernel(names[i], counted[i][READ], counted[i][WRITTEN]) for i in sorted(names)]


def split_programs(kernels: Sequence[Kernel], programs: int) -> list[list[Kernel]]:
    """The launches of each program, without its marker.

    Raises:
      ValueError: the number of markers differs from `programs`.
    """
    found: list[list[Kernel]] = []
    for kernel in kernels:
        if MARKER in kernel.name:
            found.append([])
        elif found:
            found[-1].append(kernel)
    if len(found) != programs:
        names = sorted({kernel.name for kernel in kernels})
        raise ValueError(f"{len(found)} markers for {programs} programs, among kernels {names}")
    return found


def make_records(about: dict, programs: Sequence[Sequence[Kernel]]) -> list[Record]:
    """One record for each program except the frozen linear, which is the baseline of all."""
    layers = about["layers"]
    traffic = [
        (
            sum(kernel.bytes_read for kernel in kernels) / layers,
            sum(kernel.bytes_written for kernel in kernels) / layers,
        )
        for kernels in programs
    ]
    named = list(zip(about["programs"], traffic, programs, strict=True))
    ((baseline_read, baseline_written),) = (
        moved for (implementation, _), moved, _ in named if implementation == FROZEN
    )
    return [
        make_record(
            name="dram_traffic",
            shape=about["shape"],
            dtype="bfloat16",
            tasks=about["tasks"],
            ranks=[16] * about["tasks"],
            dropout=dropout,
            implementation=implementation,
            baseline="frozen linear, forward and dX, XLA",
            ratio=(read + written) / (baseline_read + baseline_written),
            device=about["device"],
            versions=about["versions"],
            bytes_read=read,
            bytes_written=written,
            baseline_bytes_read=baseline_read,
            baseline_bytes_written=baseline_written,
            layers=layers,
            kernels={
                name: sum(k.bytes_read + k.bytes_written for k in kernels if k.name == name)
                / layers
                for name in sorted({k.name for k in kernels})
            },
        )
        for (implementation, dropout), (read, written), kernels in named
        if implementation != FROZEN
    ]


def table(records: Sequence[Record]) -> str:
    lines = [f"{'':24}{'read':>12}{'written':>12}{'ratio':>8}"]
    rows = [
        (f"{r['implementation']}, dropout {r['dropout']}", r["bytes_read"], r["bytes_written"])
        + (r["ratio"],)
        for r in records
    ]
    first = records[0]
    rows.insert(0, (FROZEN, first["baseline_bytes_read"], first["baseline_bytes_written"], 1.0))
    lines += [
        f"{name:24}{read / 1e6:>9.1f} MB{written / 1e6:>9.1f} MB{ratio:>7.2f}x"
        for name, read, written, ratio in rows
    ]
    return "\n".join(lines)


def run_body(args) -> None:
    """Compiles all programs, then runs each of them once while ncu profiles."""
    import jax
    import jax.numpy as jnp
    from grouped_lora_chain import (
        Case,
        Linear,
        adapted_program,
        frozen_program,
        make_adapters,
        make_frozen,
        shape_name,
    )

    linear = Linear(args.k, (args.n,))
    frozen = make_frozen(linear, args.tokens, args.layers)
    programs: list[tuple[tuple[str, float], Callable]] = [((FROZEN, 0.0), frozen_program(frozen))]
    for implementation in args.implementations:
        for dropout in DROPOUTS:
            case = Case(linear, (16,) * args.tasks, dropout)
            adapters = make_adapters(case, args.tokens, args.layers)
            program = adapted_program(implementation, frozen, adapters)
            programs.append(((implementation, dropout), program))
    marker, angles = jax.jit(jnp.cos), jnp.arange(1024, dtype=jnp.float32)
    for _, program in programs:
        jax.block_until_ready((marker(angles), program()))
    print(
        ABOUT,
        json.dumps(
            {
                "programs": [name for name, _ in programs],
                "shape": shape_name(linear, args.tokens),
                "tasks": args.tasks,
                "layers": args.layers,
                "device": jax.devices()[0].device_kind,
                "versions": installed_versions("jax", "jaxlib", "jax-triton"),
            }
        ),
        sep="",
        flush=True,
    )
    with profiler():
        for _, program in programs:
            jax.block_until_ready(marker(angles))
            jax.block_until_ready(program())


@contextmanager
def profiler():
    """Lets ncu profile the kernels that run inside the `with` block."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise RuntimeError(f"{name}: CUDA error {status}")

    # The profiler needs a current CUDA context, which JAX sets only in its own threads.
    device, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuProfilerStart")
    try:
        yield
    finally:
        call("cuProfilerStop")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--csv", type=Path, default=Path("/tmp/dram.csv"), help="ncu's output")
    parser.add_argument("--parse", type=Path, help="read this earlier --csv, and run nothing")
    parser.add_argument("--implementations", nargs="+", default=["mosaic_gpu", "xla"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--body", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
