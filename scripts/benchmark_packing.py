"""Compares the effective throughput of the engine's packing with that of padding and of plain
packing, on one GPU, for tasks with samples of mixed lengths.

All policies run in the same `Engine` with the same kernels, so only the layout differs.

  python scripts/benchmark_packing.py --out benchmarks/packing_h200.json --lengths lengths.json

Effective throughput is MuxTune's measure (5.3): tokens of the original samples, without padding,
per second of training. MuxTune also counts the padding of each sample to the longest of its task,
because users pay for it. All policies train the same samples, so their ratios do not depend on
this. A round has `--samples` samples of every task. The policies:

  zero-padding           MuxTune's baseline (ZeroPad, SL-PEFT; 3.5, Figure 12a): every sample is
                         padded to one global length, which holds the longest sample of all tasks.
                         MuxTune takes powers of two (64, 128, 256 for its data sets), and so do
                         rows here: each sample has a row of that length, with dense attention.
  zero-padding per task  every sample is padded to the longest of its own task (MuxTune's l_i). Rows
                         of the global length hold as many samples as fit, also of several tasks.
  first-fit packing      `research.first_fit` with the plain rule: the shortest
                         power of two that holds the longest sample as row length, the shortest
                         chunks, N tokens.
  jaxmux                 the packing of `fine_tune`: `pack_round` in the shape class of least cost.

Attention takes time for every sequence that a row has room for, so the two plain packings have room
only for the sequences that occur in the measured rounds.

The data sets are those of a JSON file {"lengths": {NAME: [tokens, …]}}. Without a file they are
lognormal samples with the same names, whose parameters are printed. A mix is a number k: of the
data sets with a mean of at most `--longest_mean` tokens, in the order of their means, k are taken
at even distances, beginning with the first. Samples are truncated to `--max_length` tokens, as in
`fine_tune`.

The times of a record are those of a round; its tokens per second are effective tokens; `ratio` is
its throughput divided by that of zero-padding. `--predict` prints the planner's predictions for the
same rounds and trains nothing. On a machine without a GPU it needs the chunk length:

  python scripts/benchmark_packing.py --predict --chunk_len 128 --lengths lengths.json

A dry run on a CPU:

  python scripts/benchmark_packing.py --out /tmp/dry.json --mixes 2 --samples 4 --max_length 64 \
      --tokens 512 --rounds 1 --layers 1 --hidden 256 --vocab 512
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_records import Record, RecordFile, make_record
from benchmark_step import WARM_UP_ROUNDS, llama_config
from research.first_fit import pack_first_fit

from jaxmux.data import GlobalBatches, Samples
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.rounds.rounds import Packing, pack_tightly
from jaxmux.installation import installed_versions
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.packing import (
    Placement,
    RoundLengths,
    ShapeClass,
    ShapeRequest,
    pack_round,
    smallest_shape_class,
)
from jaxmux.profiling import random_samples, random_task
from jaxmux.runs.run_shape import RunCosts, choose_run_shape, run_costs

ZERO_PADDING, PADDING_PER_TASK = "zero-padding", "zero-padding per task"
FIRST_FIT, ENGINE = "first-fit packing", "jaxmux"
# Steps of a task. Only the first few are timed, but the shape class is chosen by rounds from all.
STEPS = 500
# Lognormal lengths in tokens that resemble those of real data sets: median, sigma of the logarithm,
# maximum.
LOGNORMAL_LENGTHS = {
    "sst2": (16, 0.46, 64),
    "boolq": (37, 0.05, 49),
    "arc_easy": (84, 0.22, 222),
    "arc_challenge": (92, 0.24, 214),
    "gsm8k": (145, 0.35, 422),
    "alpaca_1k": (161, 0.56, 986),
    "dialogsum": (227, 0.42, 807),
    "pubmedqa": (365, 0.26, 889),
}
LOGNORMAL_SAMPLES, LOGNORMAL_SEED = 1000, 0


class Policy(NamedTuple):
    """A shape class and a packing of samples into its microbatches."""

    name: str
    shape: ShapeClass
    packing: Packing


class Prediction(NamedTuple):
    """Predicted means over the timed rounds.

    Attributes:
      microbatches: microbatches of a round.
      padding: part of their tokens that belongs to no sample.
      seconds: time of a round.
    """

    microbatches: float
    padding: float
    seconds: float


def main() -> None:
    args = parse_arguments()
    config = llama_config(args)
    lengths = read_lengths(args)
    tasks_of = {mix: tasks_of_mix(config, args, lengths, mix) for mix in args.mixes}
    backbone = None if args.predict else Backbone.random(config, dtype=jnp.bfloat16)
    records = None if args.predict else RecordFile(args.out, args.append)
    for mix, tasks in tasks_of.items():
        costs = run_costs(tasks, config, jnp.bfloat16, args.remat, memory(args))
        costs = costs._replace(least_chunk_len=args.chunk_len or costs.least_chunk_len)
        print(f"{mix} tasks, costs {costs.source}: {', '.join(t.task.name for t in tasks)}")
        baseline = None
        for policy in policies(tasks, costs, args):
            predicted = predict(policy, tasks, costs, args)
            print(predicted_line(policy, predicted), flush=True)
            if args.predict:
                continue
            record = measure(backbone, policy, tasks, args) | as_fields(predicted, costs)
            record = with_ratio(record, baseline or record)
            baseline = baseline or record
            records.add(record)
            print(measured_line(record), flush=True)


def policies(tasks: Sequence[PreparedTask], costs: RunCosts, args) -> list[Policy]:
    """All policies, zero-padding first."""
    every = [length for task in tasks for length in task.lengths]
    plain = smallest_shape_class(every, args.tokens, costs.least_chunk_len)
    padded = partial(pack_padded, longest=[task.longest for task in tasks])
    request = ShapeRequest(args.tokens, least_chunk_len=costs.least_chunk_len)
    chosen = choose_run_shape(tasks, costs, request).alignment.shape
    return [
        Policy(ZERO_PADDING, dataclasses.replace(plain, max_sequences=1), pack_tightly),
        _with_needed_sequences(Policy(PADDING_PER_TASK, plain, padded), tasks, args),
        _with_needed_sequences(Policy(FIRST_FIT, plain, pack_first_fit), tasks, args),
        Policy(ENGINE, chosen, pack_tightly),
    ]


def _with_needed_sequences(policy: Policy, tasks: Sequence[PreparedTask], args) -> Policy:
    """The policy with room for as many sequences per row as the measured rounds have, rounded up to
    a multiple of four."""
    most = max(
        count
        for step in range(WARM_UP_ROUNDS + args.rounds)
        for placed in policy.packing(lengths_of(tasks, step), policy.shape)
        for count in Counter(placement.row for placement in placed).values()
    )
    shape = dataclasses.replace(policy.shape, max_sequences=-(-most // 4) * 4)
    return policy._replace(shape=shape)


def lengths_of(tasks: Sequence[PreparedTask], step: int) -> RoundLengths:
    """By slot, the stream lengths of the samples of a round."""
    return {slot: task.batch_lengths[step] for slot, task in enumerate(tasks)}


def pack_padded(
    lengths: RoundLengths, shape: ShapeClass, longest: Sequence[int]
) -> Sequence[Sequence[Placement]]:
    """Packs samples that are padded to the tokens of their task's longest, `longest[slot]`."""
    padded = {slot: [longest[slot]] * len(sizes) for slot, sizes in lengths.items()}
    return pack_round(padded, shape).microbatches()


def predict(policy: Policy, tasks: Sequence[PreparedTask], costs: RunCosts, args) -> Prediction:
    """The cost model's prediction for the timed rounds."""
    counts, tokens, owned = [], [], []
    for step in range(WARM_UP_ROUNDS - 1, WARM_UP_ROUNDS - 1 + args.rounds):
        lengths = lengths_of(tasks, step)
        packed = policy.packing(lengths, policy.shape)
        counts.append(len(packed))
        tokens.append(sum(map(sum, lengths.values())))
        owned.append(sum(owned_tokens(placed, lengths, policy.shape) for placed in packed))
    count = statistics.mean(counts)
    one = costs.replica.microbatch(policy.shape, statistics.mean(owned) / count)
    seconds = count * one + costs.replica.update()
    return Prediction(count, 1 - statistics.mean(tokens) / (count * policy.shape.tokens), seconds)


def owned_tokens(placed: Sequence[Placement], lengths: RoundLengths, shape: ShapeClass) -> int:
    """Tokens of the chunks that hold samples."""
    chunks = set()
    for placement in placed:
        first = placement.row * shape.row_len + placement.offset
        last = first + lengths[placement.slot][placement.sample] - 1
        chunks.update(range(first // shape.chunk_len, last // shape.chunk_len + 1))
    return len(chunks) * shape.chunk_len


def measure(backbone: Backbone, policy: Policy, tasks: Sequence[PreparedTask], args) -> Record:
    """Trains `args.rounds` rounds after the warm-up."""
    if args.cache:
        jax.config.update("jax_compilation_cache_dir", str(args.cache.resolve()))
    options = EngineOptions(
        policy.shape,
        # With this many slots, all mixes run the same programs.
        PoolSpec(slots=max(args.mixes), rank=1, modules=()),
        remat=args.remat,
        memory=memory(args),
        grouped_lora=args.grouped_lora,
        packing=policy.packing,
    )
    engine = Engine(backbone, options)
    engine.register_tasks(tasks)
    ends, microbatches, tokens = [time.perf_counter()], [0], []
    for _ in range(WARM_UP_ROUNDS + args.rounds):
        # Returns the updates of the round before, once the device has finished it.
        updates = engine.train_round()
        ends.append(time.perf_counter())
        microbatches.append(engine.microbatches)
        tokens.append(sum(update.tokens for update in updates))
    engine.drain()
    engine.close()
    del engine
    gc.collect()
    first = WARM_UP_ROUNDS
    times = [end - start for start, end in pairwise(ends[first:])]
    # The round that ends in a call began one call earlier.
    count = microbatches[-2] - microbatches[first - 1]
    effective, computed = sum(tokens[first:]), count * policy.shape.tokens
    shape = policy.shape
    return make_record(
        name="packing",
        shape=f"{shape.rows} x {shape.row_len}, {shape.max_sequences} a row, "
        f"chunks of {shape.chunk_len}",
        dtype="bfloat16",
        tasks=len(tasks),
        ranks=[args.rank] * len(tasks),
        dropout=0.0,
        implementation=policy.name,
        ms_median=1e3 * statistics.median(times),
        ms_min=1e3 * min(times),
        ms_max=1e3 * max(times),
        tokens_per_second=effective / sum(times),
        device=jax.devices()[0].device_kind,
        versions=installed_versions("jax", "jaxlib", "flax", "optax"),
        data=[task.task.name for task in tasks],
        samples=args.samples,
        tokens=args.tokens,
        computed_tokens_per_second=computed / sum(times),
        padding=1 - effective / computed,
        microbatches=count / args.rounds,
        rounds=args.rounds,
        first_round_seconds=round(ends[1] - ends[0], 1),
    )


def with_ratio(record: Record, baseline: Record) -> Record:
    """The record, with its ratio to the record of zero-padding for the same tasks."""
    return record | {
        "baseline": baseline["implementation"],
        "baseline_ms_median": baseline["ms_median"],
        "ratio": record["tokens_per_second"] / baseline["tokens_per_second"],
    }


def as_fields(predicted: Prediction, costs: RunCosts) -> Record:
    return {
        "predicted_ms": 1e3 * predicted.seconds,
        "predicted_padding": predicted.padding,
        "costs": str(costs.source),
    }


def predicted_line(policy: Policy, predicted: Prediction) -> str:
    shape = policy.shape
    return (
        f"  {policy.name}: predicted {predicted.microbatches:.2f} microbatches of {shape.rows} x "
        f"{shape.row_len} ({shape.max_sequences} a row, chunks of {shape.chunk_len}), "
        f"{predicted.padding:.0%} padding, {1e3 * predicted.seconds:.0f} ms a round"
    )


def measured_line(record: Record) -> str:
    return (
        f"  {record['implementation']}: {record['ms_median']:.0f} ms a round, "
        f"{record['padding']:.0%} padding, {record['tokens_per_second']:,.0f} effective tokens/s, "
        f"{record['ratio']:.2f}x zero-padding; first round {record['first_round_seconds']} s"
    )


def tasks_of_mix(
    config: BackboneConfig, args, lengths: Mapping[str, Sequence[int]], mix: int
) -> list[PreparedTask]:
    """A task on random tokens for each data set of the mix; all begin with the same adapter."""
    short = [name for name in lengths if np.mean(lengths[name]) <= args.longest_mean]
    short.sort(key=lambda name: (np.mean(lengths[name]), name))
    if mix > len(short):
        raise SystemExit(f"--mixes {mix}: there are {len(short)} data sets: {', '.join(short)}")
    names = [short[i * len(short) // mix] for i in range(mix)]
    first = random_task(config, "task0", [1], args.samples, STEPS, args.rank)
    tasks = []
    for i, name in enumerate(names):
        # The stream length of a sample of n tokens is n - 1.
        sizes = [max(1, min(length, args.max_length) - 1) for length in lengths[name]]
        samples = random_samples(config, sizes, seed=i)
        task = dataclasses.replace(
            first,
            task=dataclasses.replace(first.task, name=name),
            samples=Samples(samples, len(samples), 0, 0),
            batches=GlobalBatches(samples, args.samples, seed=i),
        )
        tasks.append(task)
    return tasks


def read_lengths(args) -> dict[str, Sequence[int]]:
    if args.lengths:
        return json.loads(args.lengths.read_text())["lengths"]
    rng = np.random.default_rng(LOGNORMAL_SEED)
    drawn = {}
    for name, (median, spread, most) in LOGNORMAL_LENGTHS.items():
        print(f"{name}: lognormal, median {median}, sigma {spread}, at most {most} tokens")
        sizes = median * rng.lognormal(0, spread, LOGNORMAL_SAMPLES)
        drawn[name] = np.clip(sizes.round(), 2, most).astype(int).tolist()
    return drawn


def memory(args) -> int | None:
    return int(args.memory_gib * 2**30) if args.memory_gib else None


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the records; not needed with --predict")
    parser.add_argument("--append", action="store_true", help="keep the records that --out holds")
    parser.add_argument("--predict", action="store_true", help="print predictions only")
    parser.add_argument("--lengths", type=Path, help="token counts of real samples, JSON")
    parser.add_argument("--mixes", type=int, nargs="+", default=[4, 8], help="numbers of tasks")
    parser.add_argument("--samples", type=int, default=16, help="samples of each task in a round")
    parser.add_argument("--max_length", type=int, default=1024, help="most tokens of a sample")
    parser.add_argument(
        "--longest_mean", type=int, default=1024, help="highest mean of a data set, in tokens"
    )
    parser.add_argument("--cache", type=Path, help="folder of JAX's persistent compilation cache")
    parser.add_argument("--grouped_lora", help="force an implementation of the LoRA linears")
    parser.add_argument("--remat", default="dots")
    parser.add_argument("--memory_gib", type=float, help="memory that --remat auto may use")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a microbatch")
    parser.add_argument("--chunk_len", type=int, help="shortest chunk; default: this device's")
    parser.add_argument("--rounds", type=int, default=6, help="rounds to time")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    args = parser.parse_args(arguments)
    if not (args.predict or args.out):
        parser.error("--out is required: the file of the records")
    return args


if __name__ == "__main__":
    main()
