"""Training throughput on one GPU: jaxmux's engine beside Hugging Face PEFT, in one run, on a
Llama-3.1-8B shape.

  python scripts/benchmark_step.py --out benchmarks/step_h200.json

Random bf16 weights, random tokens, LoRA r=16 on all linears, AdamW. jaxmux trains all tasks
together in microbatches of 8,192 tokens through the same `Engine.train_round` as `python -m
jaxmux.train`; `--cases 1x2048 2x2048 4x2048 …` sweeps the number of tasks. PEFT trains one tenant's
task with the batch a tenant would use (scripts/benchmark_peft.py, in a process of its own). Both
train without a pause, the host ahead of the device as in training, and report the median time from
one step's end to the next's; a time is that of one microbatch, the round's update included.

PEFT's steps are records of their own. The baseline of a jaxmux record is the fastest of those with
its length; `ratio` is that of the tokens per second. A run may be split over several calls on one
machine:

  python scripts/benchmark_step.py --out step.json --cases
  python scripts/benchmark_step.py --out step.json --append --peft_from step.json --cases 4x2048

For a dry run on CPU:

  python scripts/benchmark_step.py --out /tmp/dry.json --cases 1x64 4x64 --peft --tokens 128 \
      --chunk_len 64 --rounds 1 --layers 1 --hidden 256 --vocab 512
"""

import argparse
import gc
import json
import math
import multiprocessing
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from benchmark_records import Record, RecordFile, installed_versions, make_record, read_records

from jaxmux.engine import Engine, EngineOptions
from jaxmux.models import Backbone, BackboneConfig, device_peak
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling import in_other_names, random_task

PEFT = "Hugging Face PEFT"
# The first compiles, the second is the first to find a round before it and compiles for that; the
# third ends while the host still catches up.
WARM_UP_ROUNDS = 3
FEWEST_ROUNDS = 4
# Master, two moments of AdamW and accumulator, float32.
BYTES_PER_ADAPTER_PARAMETER = 16


def main() -> None:
    args = parse_arguments()
    records = RecordFile(args.out, args.append)
    baselines = []
    for baseline in earlier_peft(args.peft_from) if args.peft_from else measured_peft(args):
        records.add(baseline)
        baselines.append(baseline)
        print(one_line(baseline), flush=True)
    config = llama_config(args)
    for case in args.cases:
        tasks, length = (int(part) for part in case.split("x"))
        for remat in args.remat:
            call = partial(measure, config, args, tasks, length, remat)
            record = beside(call() if args.one_process else in_own_process(call), baselines)
            records.add(record)
            print(one_line(record), flush=True)


def in_own_process(call: Callable[[], Record]) -> Record:
    """Calls a function in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(call).result()


def beside(record: Record, baselines: list[Record]) -> Record:
    """The record with the fastest of the baselines that train its length, if there is any."""
    same = [peft for peft in baselines if peft["length"] == record["length"]]
    if not same:
        return record
    peft = max(same, key=lambda peft: peft["tokens_per_second"])
    return record | {
        "baseline": f"{peft['implementation']}, one task, {peft['shape']}",
        "baseline_ms_median": peft["ms_median"],
        "ratio": record["tokens_per_second"] / peft["tokens_per_second"],
    }


def round_size(tasks: int, length: int, tokens: int, microbatches: int) -> tuple[int, int]:
    """Microbatches of a round and samples of a task in it, so that every microbatch is full.

    Args:
      tasks: whose batches the round holds, in equal parts.
      length: of a sample, in tokens.
      tokens: of a microbatch.
      microbatches: the fewest that the round may have.
    """
    fewest_full = math.lcm(tokens, tasks * length) // tokens
    needed = -(-microbatches // fewest_full) * fewest_full
    return needed, needed * tokens // (tasks * length)


class Started(NamedTuple):
    """An engine with its tasks, before their first round of `microbatches` full microbatches."""

    engine: Engine
    microbatches: int
    adapter_parameters: int


def started(
    config: BackboneConfig, args, tasks: int, length: int, remat: str, rounds: int
) -> Started:
    """An engine that can train so many rounds of random tasks on a random backbone."""
    backbone = Backbone.random(config, dtype=jnp.bfloat16)
    shape = smallest_shape_class([length], args.tokens, chunk_len=args.chunk_len)
    memory = int(args.memory_gib * 2**30) if args.memory_gib else None
    engine = Engine(
        backbone,
        EngineOptions(shape, remat=remat, memory=memory, grouped_lora=args.grouped_lora),
    )
    microbatches, batch = round_size(tasks, length, args.tokens, args.microbatches)
    task = random_task(config, "task0", [length] * 2 * batch, batch, rounds, args.rank)
    prepared = in_other_names(task, tasks)
    engine.register_tasks(prepared)
    parameters = sum(leaf.size for p in prepared for leaf in jax.tree.leaves(p.adapter))
    return Started(engine, microbatches, parameters)


def measure(config: BackboneConfig, args, tasks: int, length: int, remat: str) -> Record:
    """Median time per microbatch over about `args.rounds` times `args.microbatches` of them."""
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache.resolve()))
    device = jax.devices()[0]
    peak_before = device_peak()
    microbatches, _ = round_size(tasks, length, args.tokens, args.microbatches)
    timed = max(FEWEST_ROUNDS, -(-args.rounds * args.microbatches // microbatches))
    rounds = WARM_UP_ROUNDS + timed
    engine, _, parameters = started(config, args, tasks, length, remat, rounds)
    ends = [time.perf_counter()]
    for _ in range(rounds):
        # Returns once the device has finished the round before.
        engine.train_round()
        ends.append(time.perf_counter())
    engine.drain()
    engine.close()
    if engine.microbatches != rounds * microbatches:
        raise RuntimeError(
            f"{tasks} tasks of length {length}: {engine.microbatches} microbatches in {rounds} "
            f"rounds; expected {microbatches} a round, all full"
        )
    peak = device_peak()
    del engine
    gc.collect()
    seconds = [(end - start) / microbatches for start, end in pairwise(ends)]
    times = seconds[WARM_UP_ROUNDS:]
    median = statistics.median(times)
    return make_record(
        name="train_step",
        shape=f"{args.tokens} tokens, length {length}, {config.num_layers} layers",
        dtype="bfloat16",
        tasks=tasks,
        ranks=[args.rank] * tasks,
        dropout=0.0,
        implementation=f"jaxmux, linears {args.grouped_lora or 'picked'}, remat={remat}"
        + (f" in {args.memory_gib:g} GiB" if args.memory_gib else ""),
        ms_median=1e3 * median,
        ms_min=1e3 * min(times),
        ms_max=1e3 * max(times),
        tokens_per_second=args.tokens / median,
        # In a process with earlier cases, a lower peak than theirs does not show.
        peak_bytes=peak if peak != peak_before else None,
        device=device.device_kind,
        versions=installed_versions("jax", "jaxlib", "flax", "optax"),
        length=length,
        adapter_bytes=BYTES_PER_ADAPTER_PARAMETER * parameters,
        microbatches_per_round=microbatches,
        rounds=timed,
        first_round_seconds=round(seconds[0] * microbatches, 1),
    )


def earlier_peft(path: Path) -> list[Record]:
    return [r for r in read_records(path) if r["implementation"].startswith(PEFT)]


def measured_peft(args) -> Iterator[Record]:
    """Hugging Face PEFT, in a process of its own: a record for each mode and batch."""
    if not args.peft:
        return
    command = [args.peft_python, str(Path(__file__).with_name("benchmark_peft.py"))]
    command += ["--modes", *args.peft_modes, "--batch", *args.peft]
    for size in ("rank", "layers", "hidden", "vocab"):
        command += [f"--{size}", str(getattr(args, size))]
    command += ["--device", args.peft_device]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield peft_record(json.loads(line), args.layers, args.rank)
    if process.returncode:
        raise SystemExit(f"{shlex.join(command)}: exit status {process.returncode}")


def peft_record(found: dict, layers: int, rank: int) -> Record:
    """A line of scripts/benchmark_peft.py as a record; its step is one microbatch."""
    tokens = found["batch"] * found["length"]
    return make_record(
        name="train_step",
        shape=f"{tokens} tokens, length {found['length']}, {layers} layers",
        dtype="bfloat16",
        tasks=1,
        ranks=[rank],
        dropout=0.0,
        implementation=f"{PEFT}, {found['mode']}",
        **{field: found[field] for field in found if field not in ("mode", "batch")},
    )


def llama_config(args) -> BackboneConfig:
    return BackboneConfig(
        architecture="LlamaForCausalLM",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=args.hidden * 7 // 2,
        num_layers=args.layers,
        num_heads=args.hidden // 128,
        num_kv_heads=max(1, args.hidden // 512),
        head_dim=128,
        rope_theta=500000.0,
    )


def one_line(record: Record) -> str:
    peak = record["peak_bytes"]
    return (
        f"{record['implementation']}, {record['tasks']} tasks, {record['shape']}: "
        f"{record['ms_median']:.1f} ms, {record['tokens_per_second']:,.0f} tokens/s, "
        f"peak {'unknown' if peak is None else f'{peak / 2**30:.1f} GiB'}"
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--append", action="store_true", help="keep the records that --out holds")
    parser.add_argument(
        "--cases", nargs="*", default=["4x2048", "8x128", "8x64"], help="tasks x length"
    )
    parser.add_argument(
        "--one_process",
        action="store_true",
        help="saves each case's start; a case's peak memory is known where it exceeds those before",
    )
    parser.add_argument("--cache", type=Path, help="folder of JAX's persistent compilation cache")
    parser.add_argument("--grouped_lora", help="force an implementation of the LoRA linears")
    parser.add_argument("--remat", nargs="+", default=["dots"])
    parser.add_argument("--memory_gib", type=float, help="what --remat auto may use")
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=2, help="of a round, at least")
    parser.add_argument("--rounds", type=int, default=8, help=f"timed, at least {FEWEST_ROUNDS}")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument(
        "--peft", nargs="*", default=["4x2048", "8x128", "8x64"], help="batch x length"
    )
    baseline.add_argument("--peft_from", type=Path, help="records of PEFT from an earlier call")
    parser.add_argument("--peft_modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--peft_python", default=sys.executable, help="interpreter with peft")
    parser.add_argument("--peft_device", default="cuda")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
