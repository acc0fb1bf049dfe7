"""Training throughput on one GPU of jaxmux's engine and of Hugging Face PEFT.

  python scripts/benchmark_step.py --out benchmarks/step_h200.json

The backbone has the shape of Llama-3.1-8B and random bf16 weights. The tasks have random tokens,
LoRA of rank 16 on all linears, and AdamW. jaxmux trains all tasks together in microbatches of 8,192
tokens with `Engine.train_round`, as `jaxmux train` does; `--cases 1x2048 2x2048 4x2048 …` varies
the number of tasks. PEFT trains one task with a typical batch, in a process of its own
(scripts/benchmark_peft.py).

Both train without pauses, and the host works ahead of the device. A time is the median, over steps,
of the time from the end of one step to the end of the next. For jaxmux it is divided by the
microbatches of a round, so it includes a part of the round's update.

The steps of PEFT have records too. The baseline of a jaxmux record is the fastest PEFT record of
the same length, and `ratio` is jaxmux's tokens per second divided by the baseline's. Several calls
on one machine can measure the cases one after another:

  python scripts/benchmark_step.py --out step.json --cases
  python scripts/benchmark_step.py --out step.json --append --peft_from step.json --cases 4x2048

For a dry run on CPU:

  python scripts/benchmark_step.py --out /tmp/dry.json --cases 1x64 4x64 --peft --tokens 128 \
      --chunk_len 64 --rounds 1 --layers 1 --hidden 256 --vocab 512
"""

import argparse
import dataclasses
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
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from benchmark_records import Record, RecordFile, make_record, read_records

from jaxmux.engine import Engine, EngineOptions
from jaxmux.installation import installed_versions
from jaxmux.models import BACKBONE_FORMATS, Backbone, BackboneConfig, device_peak
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling import in_other_names, random_task

PEFT = "Hugging Face PEFT"
# Linears that are stored in the compute dtype.
PLAIN = "bfloat16"
# Rounds that are not measured: the first two compile, and in the eight rounds after that the host
# waits for the device before each update, so it works ahead of the device only from then on.
WARM_UP_ROUNDS = 10
FEWEST_ROUNDS = 4
# Four float32 values: the master weight, the two moments of AdamW, and the accumulated gradient.
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
    if args.kv_heads:
        config = dataclasses.replace(config, num_kv_heads=args.kv_heads)
    for case in args.cases:
        tasks, length = (int(part) for part in case.split("x"))
        for remat, form in product(args.remat, args.formats):
            own = dataclasses.replace(config, backbone_format=None if form == PLAIN else form)
            call = partial(measure, own, args, tasks, length, remat)
            record = with_baseline(call() if args.one_process else in_own_process(call), baselines)
            records.add(record)
            print(one_line(record), flush=True)


def in_own_process[T](call: Callable[[], T]) -> T:
    """Calls a function in a new process, so that earlier cases do not affect its peak memory."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(call).result()


def with_baseline(record: Record, baselines: list[Record]) -> Record:
    """The record with the fastest baseline of the same length, if there is one."""
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
    """The size of a round whose microbatches are all full.

    Args:
      tasks: number of tasks; all have global batches of the same size.
      length: tokens of a sample.
      tokens: tokens of a microbatch.
      microbatches: the least number of microbatches in the round.

    Returns:
      The number of microbatches, and the samples of a task's global batch.
    """
    multiple = math.lcm(tokens, tasks * length) // tokens
    count = -(-microbatches // multiple) * multiple
    return count, count * tokens // (tasks * length)


class ReadyEngine(NamedTuple):
    """An engine with registered tasks, before the first round.

    Attributes:
      engine: the engine.
      microbatches: microbatches of a round; all are full.
      adapter_parameters: parameters of all adapters.
    """

    engine: Engine
    microbatches: int
    adapter_parameters: int


def make_engine(
    config: BackboneConfig, args, tasks: int, length: int, remat: str, rounds: int
) -> ReadyEngine:
    """An engine with a random backbone and random tasks that last `rounds` rounds."""
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
    parameters = sum(leaf.size for p in prepared for leaf in jax.tree.leaves(p.make_adapter()))
    return ReadyEngine(engine, microbatches, parameters)


def measure(config: BackboneConfig, args, tasks: int, length: int, remat: str) -> Record:
    """Measures about `args.rounds` · `args.microbatches` microbatches of one case."""
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache.resolve()))
    device = jax.devices()[0]
    peak_before = device_peak()
    microbatches, _ = round_size(tasks, length, args.tokens, args.microbatches)
    timed = max(FEWEST_ROUNDS, -(-args.rounds * args.microbatches // microbatches))
    rounds = WARM_UP_ROUNDS + timed
    engine, _, parameters = make_engine(config, args, tasks, length, remat, rounds)
    ends = [time.perf_counter()]
    for _ in range(rounds):
        # Returns when the device has finished the previous round.
        engine.train_round()
        ends.append(time.perf_counter())
    engine.drain()
    engine.close()
    if engine.microbatches != rounds * microbatches:
        raise RuntimeError(
            f"{tasks} tasks of length {length}: {engine.microbatches} microbatches in {rounds} "
            f"rounds; expected {microbatches} full microbatches per round"
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
        + (f" in {args.memory_gib:g} GiB" if args.memory_gib else "")
        + (f", {config.backbone_format}" if config.backbone_format else ""),
        ms_median=1e3 * median,
        ms_min=1e3 * min(times),
        ms_max=1e3 * max(times),
        tokens_per_second=args.tokens / median,
        # The peak is that of the whole process, so it is known only if this case raised it.
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
    """Measures Hugging Face PEFT in another process; yields a record for each mode and batch."""
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
    """A record of the result that scripts/benchmark_peft.py printed for one mode and batch."""
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
    parser.add_argument("--append", action="store_true", help="keep the records that --out has")
    parser.add_argument(
        "--cases", nargs="*", default=["4x2048", "8x128", "8x64"], help="tasks x length"
    )
    parser.add_argument(
        "--one_process",
        action="store_true",
        help="measure all cases in one process; a case's peak memory is then known only if it "
        "exceeds that of the earlier cases",
    )
    parser.add_argument("--cache", type=Path, help="folder of JAX's persistent compilation cache")
    parser.add_argument("--grouped_lora", help="force an implementation of the LoRA linears")
    parser.add_argument("--remat", nargs="+", default=["dots"])
    parser.add_argument(
        "--formats",
        nargs="+",
        default=[PLAIN],
        choices=(PLAIN, *BACKBONE_FORMATS),
        help="formats in which linears of the backbone are stored",
    )
    parser.add_argument("--memory_gib", type=float, help="memory limit of --remat auto in GiB")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=2, help="least microbatches of a round")
    parser.add_argument(
        "--rounds", type=int, default=8, help=f"rounds to measure, at least {FEWEST_ROUNDS}"
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--kv_heads", type=int, help="key heads; default: a quarter of the heads")
    baseline = parser.add_mutually_exclusive_group()
    baseline.add_argument(
        "--peft", nargs="*", default=["4x2048", "8x128", "8x64"], help="batch x length"
    )
    baseline.add_argument("--peft_from", type=Path, help="records of PEFT from an earlier call")
    parser.add_argument("--peft_modes", nargs="+", default=["eager", "compiled"])
    parser.add_argument(
        "--peft_python", default=sys.executable, help="Python interpreter that has peft"
    )
    parser.add_argument("--peft_device", default="cuda")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
