"""Adapter kinds on one GPU: what they cost in time and memory, and that LoRA alone costs no more.

  git worktree add --detach /tmp/before 0385ea3    # the last commit with LoRA only
  python scripts/benchmark_kinds.py --out benchmarks/kinds_h200.json --before /tmp/before

The tasks have random tokens, AdamW, and microbatches of 4 x 2,048 tokens; the backbone has the
shape of Llama-3.1-8B and random bf16 weights. The parts, each in a process of its own:

- lora: four LoRA tasks with the package of this checkout and with that of `--before`. Two processes
  hold a backbone and a compiled engine each and take turns, each pair in the other order than the
  one before it. The figure is the median of the ratios of the pairs; its 95% interval comes from
  10,000 bootstrap samples of the pairs. "No slower" means that the lower end is at most 1. A second
  record says that the upper end is near enough for this to mean something.
- programs: the compiled programs of the part lora, instruction by instruction, before XLA optimises
  them; on a CPU, where no kernel has its place in the source in them. The figure is the number of
  programs that are not the same with both packages.
- memory: the device memory in use with room for five tasks of a kind less that with room for four,
  beside what the memory model predicts for a task. Nothing is compiled for it.
- mixed: two tasks of a kind and two LoRA tasks beside four LoRA tasks, in turns of two engines. The
  backbone has a quarter of the layers and a quarter of the vocabulary (`--part_of_backbone`). Its
  layers are those of the whole backbone, and a round's layers, head and update keep their shares of
  the time, so ratios are those of the whole backbone, and an engine compiles in a quarter of the
  time. The layers are unrolled, as in training. "Room for IA3" has four LoRA tasks only, in a pool
  with room for IA3, so they lose the fused MLP.
- peak: the peak memory of a round of LoRA tasks and one task of every kind, beside its prediction.

With a card of 80 GB, `--layers 8 --vocab 32064` leaves room for two processes in the part lora.
Every record is written when it is made. Parts stop when `--seconds` are over, and leave out kinds
for which no time is left. A dry run on CPU, with this checkout beside itself:

  python scripts/benchmark_kinds.py --out /tmp/dry.json --before . --turns 3 --layers 2 \
      --hidden 256 --vocab 512 --tokens 256 --length 64 --chunk_len 64 --part_of_backbone 2 \
      --dtype float32
"""

import argparse
import dataclasses
import gc
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_step import in_own_process, llama_config, round_size
from kinds_lora import lora, programs
from kinds_timing import TASKS, WARM_UP_TURNS, figures, in_pairs, interval, say, write
from kinds_turns import turn

from jaxmux.data import GlobalBatches, stored
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.tasks.prepared_task import size_of, with_virtual_tokens
from jaxmux.models import Backbone, BackboneConfig, device_peak, linear_sizes, planned_remat
from jaxmux.peft import (
    IA3,
    Bottleneck,
    DiffPruning,
    DoRA,
    LNTuning,
    LoRA,
    PromptTuning,
    SparseDiff,
    TrainedTokens,
    VeRA,
    kind_of,
    size_of_adapter,
)
from jaxmux.planner.costs import PoolSpec, merge_pool_specs
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling import random_task
from jaxmux.runs.run_shape import run_costs

# A ratio of times, and a measured memory over its prediction, less 1.
MOST_MIXED, MOST_MEMORY_ERROR = 1.25, 0.03


class Mix(NamedTuple):
    """What is measured of a kind: a name and a specification."""

    name: str
    adapter: Any


MIXES = (
    Mix("LoRA with patterns", LoRA(16, rank_pattern={"q_proj": 8})),
    Mix("OLoRA", LoRA(16, initialisation="olora")),
    Mix("DoRA", DoRA()),
    Mix("IA3", IA3()),
    Mix("LN-tuning", LNTuning()),
    Mix("Pfeiffer", Bottleneck("pfeiffer")),
    Mix("Houlsby", Bottleneck("houlsby")),
    Mix("parallel bottleneck", Bottleneck("parallel")),
    Mix("Diff-Pruning of columns", DiffPruning()),
    Mix("VeRA", VeRA()),
    Mix("Diff-Pruning of entries", SparseDiff()),
    Mix("prompt tuning", PromptTuning()),
    Mix("trained tokens", TrainedTokens(tuple(range(20)))),
    Mix("LoRA with trained tokens", LoRA(16, trained_tokens=tuple(range(20)))),
    Mix("LoRA of the tables", LoRA(16, target_modules=("q_proj", "embed_tokens", "lm_head"))),
)
ROOM = "room for IA3"


def main() -> None:
    # Several processes share the device, one after another or in turns.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    args = parse_arguments()
    args.deadline = time.monotonic() + args.seconds
    failed = []
    for part in args.parts:
        call = partial(PARTS[part], args)
        try:
            _ = call() if args.one_process or part in OWN_PROCESSES else in_own_process(call)
        except Exception:
            # The other parts can be measured all the same.
            traceback.print_exc()
            failed.append(part)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def mixed(args: argparse.Namespace) -> None:
    """Measures each kind beside LoRA, in turns with LoRA alone."""
    config = llama_config(args)
    config = dataclasses.replace(
        config,
        num_layers=max(1, args.layers // args.part_of_backbone),
        vocab_size=args.vocab // args.part_of_backbone,
    )
    backbone = Backbone.random(config, dtype=args.dtype)
    four = [Mix("LoRA", LoRA(args.rank))] * TASKS
    room = PoolSpec(TASKS, 1, (), others=(size_of_adapter(IA3(), config),))
    cases = [(mix, [mix, mix, *four[:2]], None) for mix in MIXES]
    cases.insert(0, (Mix(ROOM, None), four, room))
    failed = []
    with closing(warm(args, backbone, four, None)) as alone:
        for mix, own, reserved in chosen(args, cases):
            try:
                with closing(warm(args, backbone, own, reserved)) as engine:
                    both = {"mixed": engine, "LoRA": alone}
                    turns = {
                        name: partial(turn, each, args.turn_rounds) for name, each in both.items()
                    }
                    seconds = in_pairs(args, turns)
            except Exception:
                # The other kinds can be measured all the same.
                traceback.print_exc()
                failed.append(mix.name)
                continue
            low, median, high = interval(seconds)
            facts = {"95% interval": [low, high], **figures(args, seconds)}
            facts |= {"layers": config.num_layers, "vocabulary": config.vocab_size}
            what = (
                "4 tasks of LoRA with room for IA3"
                if reserved
                else f"2 tasks of {mix.name} and 2 of LoRA"
            )
            write(args, f"mixed, {what}, over 4 of LoRA", median, MOST_MIXED, facts)
            gc.collect()
    if failed:
        raise RuntimeError(f"not measured: {', '.join(failed)}")


def chosen(args: argparse.Namespace, cases: Sequence[tuple]) -> Iterator[tuple]:
    """The cases of the kinds that the command names, as long as there is time."""
    for case in cases:
        name = case[0].name
        if args.kinds and name not in args.kinds:
            continue
        if time.monotonic() > args.deadline:
            say(f"{name}: left out, no time is left")
            continue
        yield case


def warm(
    args: argparse.Namespace, backbone: Backbone, mixes: Sequence[Mix], reserved: PoolSpec | None
) -> Engine:
    """An engine that has trained some rounds of tasks.

    Args:
      args: the arguments of the command.
      backbone: the backbone.
      mixes: one for each task.
      reserved: what the pool holds at least; None for what the tasks need.
    """
    began = time.perf_counter()
    tasks = [task_of(args, backbone.config, mix, i) for i, mix in enumerate(mixes)]
    pool = merge_pool_specs([task.pool for task in tasks], reserved)
    engine = Engine(backbone, EngineOptions(shape_of(args), pool, remat=args.remat))
    engine.warm_up()
    engine.register_tasks(tasks)
    for _ in range(WARM_UP_TURNS):
        turn(engine, args.turn_rounds)
    names = ", ".join(dict.fromkeys(mix.name for mix in mixes))
    say(f"{names}: compiled and warm after {time.perf_counter() - began:.0f} s")
    return engine


def task_of(
    args: argparse.Namespace, config: BackboneConfig, mix: Mix, number: int
) -> PreparedTask:
    """A task on random tokens with an adapter of a kind, which never ends."""
    _, batch = round_size(TASKS, args.length, args.tokens, args.microbatches)
    adapter, kind = mix.adapter, kind_of(mix.adapter)
    length = args.length - kind.virtual_tokens(adapter)
    task = random_task(config, "any", [length] * 2 * batch, batch, 10**6, args.rank)
    targets = dict(kind.targets(adapter, config))
    samples = with_virtual_tokens(stored(task.samples.samples), adapter)
    return dataclasses.replace(
        task,
        samples=task.samples._replace(samples=samples),
        batches=GlobalBatches(samples, batch, task.task.seed),
        task=dataclasses.replace(task.task, name=f"task{number}", adapter=adapter),
        targets=targets,
        make_adapter=partial(kind.initial, adapter, targets, config, 0, partial(weights, config)),
        size=size_of_adapter(adapter, config),
    )


def weights(config: BackboneConfig, name: str) -> np.ndarray:
    """Values in place of a tensor of the random backbone, of which there is no checkpoint."""
    module = name.removesuffix(".weight").split(".", 3)[-1]
    if name in ("lm_head.weight", "model.embed_tokens.weight"):
        shape = config.vocab_size, config.hidden_size
    elif module.endswith("_proj"):
        shape = linear_sizes(config, module)[::-1]
    else:
        shape = (config.hidden_size,)
    return np.broadcast_to(np.float32(0.02), shape)


def memory(args: argparse.Namespace) -> None:
    """Compares the memory of one more task of a kind with its prediction."""
    # JAX's own allocator gives an array whatever freed block is a little larger; this one counts
    # what was asked for.
    os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] = "cuda_async"
    config = llama_config(args)
    # Nothing is computed, so the weights may be those of a small backbone.
    small = dataclasses.replace(config, num_layers=1, vocab_size=128)
    backbone = dataclasses.replace(Backbone.random(small, dtype=args.dtype), config=config)
    sizes = size_of(config, args.dtype)
    for (mix,) in chosen(args, [(mix,) for mix in (Mix("LoRA", LoRA(args.rank)), *MIXES)]):
        measured, predicted = [], []
        for slots in (TASKS, TASKS + 1):
            pool = task_of(args, config, mix, 0).pool._replace(slots=slots)
            before = bytes_in_use()
            with closing(Engine(backbone, EngineOptions(shape_of(args), pool))) as engine:
                engine.register_tasks([])
                measured.append(bytes_in_use() - before)
            predicted.append(pool.state_bytes(sizes))
            del engine
        (few, more), (fewer, most) = measured, predicted
        facts = {"bytes, measured": more - few, "bytes, predicted": most - fewer}
        error = abs((more - few) / (most - fewer) - 1)
        write(
            args,
            f"memory, a task of {mix.name}, beside its prediction",
            error,
            MOST_MEMORY_ERROR,
            facts,
        )


def bytes_in_use() -> int:
    """Bytes of arrays on the device."""
    gc.collect()
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else sum(array.nbytes for array in jax.live_arrays())


def peak(args: argparse.Namespace) -> None:
    """Compares the peak memory of a round with all kinds with its prediction."""
    backbone = Backbone.random(llama_config(args), dtype=args.dtype)
    mixes = [Mix("LoRA", LoRA(args.rank)), *MIXES]
    tasks = [task_of(args, backbone.config, mix, i) for i, mix in enumerate(mixes)]
    with closing(warm(args, backbone, mixes, None)) as engine:
        costs = run_costs(tasks, backbone.config, backbone.compute_dtype)
        admission = Admission(costs.replica, shape_of(args))
        predicted = admission.peak([task.pool for task in tasks], planned_remat(engine.remat))
    measured = device_peak()
    say(
        f"peak: predicted {predicted / 2**30:.2f} GiB, measured {measured and measured / 2**30} GiB"
    )
    if measured:
        facts = {"peak GiB": measured / 2**30, "predicted peak GiB": predicted / 2**30}
        facts["costs"] = str(costs.source)
        name = f"peak, {len(mixes)} tasks of as many kinds, beside its prediction"
        write(args, name, abs(measured / predicted - 1), MOST_MEMORY_ERROR, facts)


def shape_of(args: argparse.Namespace) -> Any:
    return smallest_shape_class([args.length], args.tokens, chunk_len=args.chunk_len)


# These parts start processes of their own.
OWN_PROCESSES = ("lora", "programs")
PARTS = {"lora": lora, "programs": programs, "memory": memory, "mixed": mixed, "peak": peak}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--before", type=Path, help="checkout of the package for the part lora")
    parser.add_argument("--kinds", nargs="+", choices=["LoRA", ROOM, *(m.name for m in MIXES)])
    parser.add_argument("--seconds", type=float, default=420, help="of all parts together")
    parser.add_argument("--turns", type=int, default=12, help="of each engine")
    parser.add_argument("--turn_rounds", type=int, default=2, help="rounds of a turn")
    parser.add_argument("--one_process", action="store_true", help="for tests")
    parser.add_argument("--dtype", type=jnp.dtype, default="bfloat16", help="but for the part lora")
    parser.add_argument("--remat", default="dots")
    parser.add_argument(
        "--grouped_lora", help="implementation of the LoRA linears in the part lora"
    )
    parser.add_argument(
        "--memory_gib", type=float, help="memory limit of --remat auto in part lora"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=2, help="of a round")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument(
        "--part_of_backbone", type=int, default=4, help="divides layers and vocabulary"
    )
    args = parser.parse_args(arguments)
    for part in set(OWN_PROCESSES) & set(args.parts):
        if args.before is None:
            parser.error(f"the part {part} needs --before")
    return args


if __name__ == "__main__":
    main()
