"""Training throughput of a pipeline of several GPUs beside one GPU.

  python scripts/benchmark_sharding.py --out benchmarks/sharding_h200.json --stages 2

The backbone has the shape of Llama-3.1-8B and random bf16 weights. The tasks have random tokens,
LoRA of rank 16 on all linears, and AdamW. A round has `--microbatches` full microbatches of 8,192
tokens, and the pipeline is empty between two rounds. One GPU and the pipeline train the same tasks,
one after the other, in processes of their own; a time is the median over rounds.

A record has a name, a value, a bound with its sense ("at least" or "at most"), a unit, and the
figures that it was made from.

For a dry run on CPU:

  XLA_FLAGS=--xla_force_host_platform_device_count=4 python scripts/benchmark_sharding.py \
      --out /tmp/dry.json --stages 2 --tokens 128 --chunk_len 64 --length 64 --layers 4 \
      --hidden 256 --vocab 512 --rounds 3
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmark_step import in_own_process, llama_config, round_size

from jaxmux.engine import Engine, EngineOptions
from jaxmux.installed_versions import installed_versions
from jaxmux.models import Backbone
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling import in_other_names, random_task
from jaxmux.sharding import consecutive_parts, place_backbone

# Rounds that are not measured: the first one compiles.
WARM_UP_ROUNDS = 2
# The share of perfect scaling that the time of a round should reach.
LEAST_SHARE = 3.3 / 4


class Measured(NamedTuple):
    """A training run.

    Attributes:
      seconds: median seconds of a round.
      tokens: tokens of a round.
      microbatches: microbatches of a round.
      first: seconds from the start of the process's work to the end of the first round.
      peaks: peak memory of each device in bytes; None where it is unknown.
      device: kind of the devices.
    """

    seconds: float
    tokens: int
    microbatches: int
    first: float
    peaks: list[int | None]
    device: str


def main() -> None:
    args = parse_arguments()
    one, several = (in_own_process(partial(measure, args, n)) for n in (1, args.stages))
    ideal = args.stages * one.microbatches / (one.microbatches + args.stages - 1)
    record = {
        "name": (
            f"8B shape, pp={args.stages}, {args.tasks} tasks, flush between rounds, over one GPU"
        ),
        "value": one.seconds / several.seconds,
        "bound": LEAST_SHARE * args.stages,
        "sense": "at least",
        "unit": "ratio of tokens per second",
        "command": shlex.join(["python", *sys.argv]),
        "device": several.device,
        "versions": installed_versions("jax", "jaxlib"),
        "baselines": {
            "one GPU, tokens/s": one.tokens / one.seconds,
            "pipeline, tokens/s": several.tokens / several.seconds,
            "1F1B without any overhead": ideal,
            "microbatches of a round": one.microbatches,
            "seconds to the end of the first round, one GPU": one.first,
            "seconds to the end of the first round, pipeline": several.first,
            "peak memory of each device, GiB": [p and p / 2**30 for p in several.peaks],
            "peak memory of one GPU, GiB": [p and p / 2**30 for p in one.peaks],
        },
    }
    args.out.write_text(json.dumps([record], indent=1) + "\n")
    print(json.dumps(record, indent=1))


def measure(args: argparse.Namespace, stages: int) -> Measured:
    """Trains on one device, or on a pipeline of several."""
    started = time.perf_counter()
    config = llama_config(args)
    backbone: Any = Backbone.random(config, dtype=jnp.bfloat16)
    if stages > 1:
        parts = consecutive_parts(Replica.uniform(pp=stages).stage_layers(config.num_layers))
        whole, backbone = backbone, place_backbone(backbone, parts, jax.devices()[:stages])
        jax.block_until_ready(backbone.weights)
        del whole
    shape = smallest_shape_class([args.length], args.tokens, chunk_len=args.chunk_len)
    microbatches, batch = round_size(args.tasks, args.length, args.tokens, args.microbatches)
    rounds = WARM_UP_ROUNDS + args.rounds
    task = random_task(config, "task0", [args.length] * 2 * batch, batch, rounds + 1, args.rank)
    options = EngineOptions(
        shape, remat=args.remat, schedule=args.schedule if stages > 1 else "1f1b"
    )
    with closing(Engine(backbone, options)) as engine:
        engine.register_tasks(in_other_names(task, args.tasks))
        engine.train_round()
        engine.drain()
        first, ends = time.perf_counter() - started, []
        for _ in range(rounds):
            # Returns when the devices have finished the previous round.
            engine.train_round()
            ends.append(time.perf_counter())
        engine.drain()
        times = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    devices = jax.devices()[:stages]
    return Measured(
        statistics.median(times[WARM_UP_ROUNDS - 1 :]),
        microbatches * shape.tokens,
        microbatches,
        first,
        [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices],
        devices[0].device_kind,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16, help="of a round, at least")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", default="auto")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
