"""Tasks that come and go: what arrivals and departures cost, and that they change no adapter.

On a CPU, tasks of the bundled demo backbone that arrive at random, beside the same tasks submitted
at once, and beside each task alone:

  python scripts/benchmark_live.py demo --out benchmarks/live.json
  python scripts/benchmark_live.py bits --out benchmarks/live.json --seconds 60

The choice of the tasks that train, among 64:

  python scripts/benchmark_live.py planning --out benchmarks/live.json

On one GPU, the shape of Llama-3.1-8B with random bf16 weights, with tasks of mixed rank and length
of which one more arrives, one leaves, and many arrive and leave one after another:

  python scripts/benchmark_live.py large --out benchmarks/live.json

The same on two GPUs that are the stages of a pipeline, which should never be empty meanwhile:

  NCCL_NVLS_ENABLE=0 python scripts/benchmark_live.py pipeline --out benchmarks/live.json

On one GPU with the same shape, a task with a batch of 4 beside one with a batch of 512:

  python scripts/benchmark_live.py waiting --out benchmarks/live.json

On the same shape, an engine that grows and shrinks while it trains, on one GPU or several:

  python scripts/benchmark_live.py growth --out benchmarks/live.json
  NCCL_NVLS_ENABLE=0 python scripts/benchmark_live.py growth --mesh pp2 --tasks 64 \
      --out benchmarks/live.json

A record has a name, a value, a bound with its sense ("at least" or "at most"), a unit, and the
figures that it was made from. `--seconds`, `--tasks`, `--layers`, `--hidden`, `--vocab` and
`--scale` shorten a dry run; that of the pipeline needs two devices:

  XLA_FLAGS=--xla_force_host_platform_device_count=2 python scripts/benchmark_live.py pipeline \
      --out /tmp/dry.json --tasks 12 --rounds 6 --comings 4 --layers 2 --hidden 256 --vocab 512 \
      --scale 8
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from benchmark_records import replace_records
from live_changes import large, pipeline
from live_rounds import growth, waiting
from live_small_tasks import bits, demo, planning

from jaxmux.installation import installed_versions


def main() -> None:
    args = parse_arguments()
    prefix = f"live, {args.part}{f' {args.mesh}' if args.mesh else ''}, "
    records = [
        {"name": prefix + record.pop("name")} | record | circumstances()
        for record in PARTS[args.part](args)
    ]
    replace_records(args.out, prefix, records)
    for record in records:
        print(record["name"], record["value"], record["sense"], record["bound"], flush=True)


def circumstances() -> dict[str, Any]:
    """The fields of a record that tell how its figure was measured."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "versions": installed_versions("jaxmux", "jax", "jaxlib"),
    }


PARTS = {
    "demo": demo,
    "bits": bits,
    "planning": planning,
    "large": large,
    "pipeline": pipeline,
    "waiting": waiting,
    "growth": growth,
}
TASKS = {"demo": 64, "bits": 64, "planning": 64, "large": 32, "pipeline": 64, "growth": 32}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, help="64, on one GPU with the large backbone 32")
    parser.add_argument("--seconds", type=float, default=300, help="of the demo's tasks together")
    parser.add_argument("--rounds", type=int, default=12, help="that are measured at a time")
    parser.add_argument("--comings", type=int, default=200, help="arrivals and departures")
    parser.add_argument("--mesh", help="the devices of growth, for example pp2; default: one")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--scale", type=int, default=1, help="divides the lengths of a dry run")
    args = parser.parse_args(arguments)
    args.tasks = args.tasks or TASKS.get(args.part)
    return args


if __name__ == "__main__":
    main()
