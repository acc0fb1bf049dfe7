"""Training throughput on one GPU: jaxmux's engine beside Hugging Face PEFT, in one run, on a
Llama-3.1-8B shape.

  python scripts/benchmark_step.py --out benchmarks/step_h200.json

Random bf16 weights, random tokens, LoRA r=16 on all linears, AdamW. jaxmux trains all tasks
together in microbatches of 8,192 tokens through the same `Engine.train_round` as `python -m
jaxmux.train`. PEFT trains one tenant's task with the batch a tenant would use
(scripts/benchmark_peft.py, in a process of its own). Both report the median of repeated,
synchronised steps. `--layers 2 --hidden 256 …` makes it small enough for a dry run on CPU.
"""

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux import AdamW, LoRA, Task
from jaxmux.data import GlobalBatches, Sample, Samples
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.peft import initial_adapter, resolve_targets
from jaxmux.planner import choose_shape_class


def main() -> None:
    args = parse_arguments()
    config = llama_config(args)
    baselines = peft_baseline(args) if args.peft else {}
    records = []
    for case in args.cases:
        tasks, length = (int(part) for part in case.split("x"))
        for remat in args.remat:
            record = in_own_process(measure, config, args, tasks, length, remat)
            records += beside(record, baselines.get(length, {})) or [record]
            print(one_line(record), flush=True)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(records, indent=2) + "\n")


def in_own_process(function, *arguments):
    """Calls a function in a fresh process, so that its peak memory is its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as executor:
        return executor.submit(function, *arguments).result()


def beside(record: dict, baselines: dict[str, dict]) -> list[dict]:
    """The record once for each baseline; the ratio is that of the tokens per second."""
    return [
        record
        | {
            "baseline": f"Hugging Face PEFT, {mode}, one task, batch {peft['batch']}",
            "baseline_ms_median": peft["ms_median"],
            "baseline_tokens_per_second": peft["tokens_per_second"],
            "baseline_peak_bytes": peft["peak_bytes"],
            "baseline_versions": peft["versions"],
            "ratio": record["tokens_per_second"] / peft["tokens_per_second"],
        }
        for mode, peft in baselines.items()
    ]


def measure(config: BackboneConfig, args, tasks: int, length: int, remat: str) -> dict:
    """Median time per microbatch over `args.rounds` rounds of `args.microbatches` microbatches
    each."""
    backbone = Backbone.random(config, dtype=jnp.bfloat16)
    shape = choose_shape_class([length], args.tokens, chunk_len=args.chunk_len)
    engine = Engine(backbone, EngineOptions(shape, remat=remat, grouped_lora=args.grouped_lora))
    batch = args.tokens * args.microbatches // (tasks * length)
    rounds = args.rounds + 3
    engine.register_tasks(
        [random_task(config, f"task{i}", length, batch, rounds, args.rank) for i in range(tasks)]
    )
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        engine.train_round()
        jax.block_until_ready(engine.state)
        seconds.append((time.perf_counter() - start) / args.microbatches)
    engine.drain()
    timed = sorted(seconds[3:])
    median = statistics.median(timed)
    device = jax.devices()[0]
    return {
        "name": "train_step",
        "shape": f"{args.tokens} tokens, length {length}, {config.num_layers} layers",
        "length": length,
        "dtype": "bfloat16",
        "tasks": tasks,
        "ranks": [args.rank] * tasks,
        "dropout": 0.0,
        "implementation": f"{args.grouped_lora or 'picked'}, remat={remat}",
        "ms_median": 1e3 * median,
        "ms_min": 1e3 * timed[0],
        "ms_max": 1e3 * timed[-1],
        "baseline": None,
        "baseline_ms_median": None,
        "ratio": None,
        "tokens_per_second": args.tokens / median,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "device": device.device_kind,
        "versions": {p: version(p) for p in ("jax", "jaxlib", "flax", "optax")},
        "command": " ".join(["python", *sys.argv]),
    }


def random_task(
    config: BackboneConfig, name: str, length: int, batch: int, steps: int, rank: int
) -> PreparedTask:
    """A task on random tokens; every sample occupies exactly `length` positions."""
    rng = np.random.default_rng(len(name) + int(name.removeprefix("task")))
    task = Task(name, "random", LoRA(rank), AdamW(1e-4), batch_size=batch, steps=steps)
    targets = resolve_targets(task.adapter.target_modules, config)
    mask = np.arange(length + 1) > 0
    samples = [
        Sample(rng.integers(0, config.vocab_size, length + 1, np.int32), mask, i)
        for i in range(2 * batch)
    ]
    return PreparedTask(
        task=task,
        targets=targets,
        adapter=initial_adapter(task.adapter, targets, config, seed=0),
        samples=Samples(samples, len(samples), 0, 0),
        batches=GlobalBatches(samples, batch, seed=0),
        steps=steps,
        eval_samples=[],
    )


def peft_baseline(args) -> dict[int, dict[str, dict]]:
    """Hugging Face PEFT, eager and compiled, one process each; by sequence length and mode."""
    found: dict[int, dict[str, dict]] = {}
    for mode in ("eager", "compiled"):
        command = [sys.executable, str(Path(__file__).with_name("benchmark_peft.py"))]
        command += [f"--{mode}", "--batch", *args.peft, "--layers", str(args.layers)]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for line in lines.splitlines():
            record = json.loads(line)
            print(f"PEFT {mode}: {record}", flush=True)
            found.setdefault(record["length"], {})[mode] = record
    return found


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


def one_line(record: dict) -> str:
    peak = record["peak_bytes"]
    return (
        f"jaxmux {record['tasks']} tasks x {record['length']}, {record['implementation']}: "
        f"{record['ms_median']:.1f} ms, {record['tokens_per_second']:,.0f} tokens/s, "
        f"peak {'unknown' if peak is None else f'{peak / 2**30:.1f} GiB'}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--cases", nargs="+", default=["4x2048", "8x128", "8x64"], help="tasks x length"
    )
    parser.add_argument("--grouped_lora", help="force an implementation of the LoRA linears")
    parser.add_argument("--remat", nargs="+", default=["dots"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=2, help="per round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument(
        "--peft", nargs="*", default=["4x2048", "8x128", "8x64"], help="batch x length"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
