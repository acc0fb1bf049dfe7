"""Speed of generation on one GPU, with several adapters side by side, and of Hugging Face.

  python scripts/benchmark_generate.py --out benchmarks/generate_h200.json --hf

The backbone has the shape of Llama-3.1-8B and random bf16 weights. The adapters are LoRA of rank 16
on all linears, the prompts random tokens. A case such as 64x8 has 64 sequences and 8 adapters, each
of which completes as many sequences. The times are those of `Generator.stream`, tokens as Python
numbers included. Reading the prompts and writing tokens are measured apart: the first ends with the
first new token of every sequence. A figure is the median of several runs behind one that compiles.

The floor of a step is the time to read all weights and factors once, at the bandwidth with which
this device copies an array.

With --hf, processes of their own (scripts/benchmark_generate_hf.py) measure `generate` of Hugging
Face transformers with PEFT before: eager and then compiled, with the adapters in turns and mixed in
one batch. Each has --hf_seconds of time, and is stopped then; what it has measured until then
counts. Every figure is written as soon as it is known. For a dry run on CPU:

  python scripts/benchmark_generate.py --out /tmp/dry.json --cases 1x1 4x2 --layers 1 --hidden 256 \
      --vocab 512 --prompt_len 8 --new_tokens 20 --runs 2
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_records import Record, make_figure, replace_records
from benchmark_step import llama_config

from jaxmux.generation import Generator, Request
from jaxmux.installation import installed_versions
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.peft import LoRA, initial_adapter, resolve_targets

# By case, the least tokens per second with Llama-3.1-8B's shape.
LEAST_SPEED = {"1x1": 160, "64x8": 4_000}
HF = "Hugging Face"
# Bytes of the array that is copied to measure the bandwidth.
_COPIED = 2**31
# Copies in one measurement.
_COPIES = 8


class NumberTokenizer:
    """Decodes tokens to their numbers."""

    eos_token_id = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(f" {number}" for number in ids)


class Times(NamedTuple):
    """Seconds of one run: until the first new token of every sequence, and for the others."""

    reading: float
    writing: float


def main() -> None:
    args = parse_arguments()
    baselines = hugging_face(args) if args.hf else {}
    measure_jaxmux(args, baselines)


def measure_jaxmux(args: argparse.Namespace, baselines: dict[str, dict[str, Any]]) -> None:
    """Measures and writes the figures of all cases.

    Args:
      args: the options.
      baselines: by case, what `hugging_face` returns.
    """
    config = llama_config(args)
    backbone = Backbone.random(config, dtype=jnp.bfloat16)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(backbone.weights))
    # A step reads only its tokens' rows of the embedding.
    weights -= backbone.weights["embed_tokens"]["weight"].nbytes
    bandwidth = copy_bandwidth(min(_COPIED, weights))
    generator = Generator(backbone, NumberTokenizer(), keep_backbone=False)
    for case in args.cases:
        own = figures(args, config, generator, case, weights, bandwidth, baselines.get(case, {}))
        for record in own:
            keep(args, record)


def keep(args: argparse.Namespace, record: Record) -> None:
    """Writes a record into the file, and shows it."""
    replace_records(args.out, record["name"], [record])
    print(f"{record['name']}: {record['value']:,.1f} {record['unit']}", flush=True)


def figures(
    args: argparse.Namespace,
    config: BackboneConfig,
    generator: Generator,
    case: str,
    weights: int,
    bandwidth: float,
    baseline: dict[str, Any],
) -> Iterator[Record]:
    """The figures of a case.

    Args:
      args: the options.
      config: configuration of the backbone.
      generator: what is measured.
      case: SEQUENCESxADAPTERS.
      weights: bytes of the weights that a step reads.
      bandwidth: bytes per second.
      baseline: by name of a mode of Hugging Face, its tokens per second, or why there are none.
    """
    sequences, adapters = map(int, case.split("x"))
    requests, factors = make_requests(args, config, sequences, adapters)
    times = [timed(generator, requests, args.new_tokens) for _ in range(args.runs + 1)][1:]
    reading, writing = (statistics.median(each) for each in zip(*times, strict=True))
    steps = args.new_tokens - 1
    floor = (weights + factors) / bandwidth
    facts = {
        "ms of a step": 1e3 * writing / steps,
        "floor of a step, ms": 1e3 * floor,
        "GB/s of a copy": bandwidth / 1e9,
        "fastest": sequences * steps / min(each.writing for each in times),
        "slowest": sequences * steps / max(each.writing for each in times),
    }
    is_8b = (args.layers, args.hidden) == (32, 4096)
    bound = LEAST_SPEED.get(case) if is_8b else None
    versions, shape = installed_versions("jax", "jaxlib"), shape_of(args, case)
    given = {"device": jax.devices()[0].device_kind, "versions": versions}
    speed = sequences * steps / writing
    unit, at_least = "tokens/s", "at least"
    yield make_figure(
        f"writing, {shape}", speed, bound, unit, facts | baseline, sense=at_least, **given
    )
    read = sequences * args.prompt_len / reading
    facts = {"ms": 1e3 * reading}
    yield make_figure(f"reading, {shape}", read, None, unit, facts, sense=at_least, **given)


def make_requests(
    args: argparse.Namespace, config: BackboneConfig, sequences: int, adapters: int
) -> tuple[list[Request], int]:
    """Random prompts, divided among random adapters; and the bytes of all factors in bfloat16."""
    rng = np.random.default_rng(0)
    spec = LoRA(args.rank, 2.0 * args.rank)
    targets = resolve_targets(spec.target_modules, config)
    first = initial_adapter(spec, targets, config, 0)
    # Adapters are different if they are different objects; their values do not matter.
    own = [jax.tree.map(lambda x: x + np.float32(1e-3), first) for _ in range(adapters)]
    factors = adapters * 2 * sum(x.size for x in jax.tree.leaves(first))
    prompts = rng.integers(config.vocab_size, size=(sequences, args.prompt_len))
    requests = [
        Request(prompt, spec, own[i * adapters // sequences])
        for i, prompt in enumerate(prompts.tolist())
    ]
    return requests, factors


def timed(generator: Generator, requests: Sequence[Request], new_tokens: int) -> Times:
    """Completes the requests once."""
    start, first = time.perf_counter(), None
    counts = [0] * len(requests)
    for piece in generator.stream(requests, max_new_tokens=new_tokens):
        counts[piece.request] += len(piece.text.split())
        if first is None and all(counts):
            first = time.perf_counter()
    end = time.perf_counter()
    if first is None or set(counts) != {new_tokens}:
        raise RuntimeError(f"sequences of {sorted(set(counts))} tokens; expected {new_tokens}")
    return Times(first - start, end - first)


def copy_bandwidth(size: int) -> float:
    """Bytes per second that the device reads and writes while it copies an array."""
    array = jnp.zeros(size // 2, jnp.bfloat16)
    # The sign changes, so that the copy is not left out.
    copy = jax.jit(lambda x: -x)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(_COPIES):
            # Copies follow each other without a pause of the device.
            last = copy(array)
        jax.block_until_ready(last)
        seconds.append((time.perf_counter() - start) / _COPIES)
    return 2 * array.nbytes / statistics.median(seconds[1:])


def shape_of(args: argparse.Namespace, case: str) -> str:
    """The end of the names of a case's figures."""
    return f"{case}, prompts of {args.prompt_len}, {args.new_tokens} new, {args.layers} layers"


def hugging_face(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measures and writes what Hugging Face does; by case and name of the mode, the tokens per
    second, or a text that says why there are none."""
    found: dict[str, dict[str, Any]] = {case: {} for case in args.cases}
    for way in ("eager", "compiled"):
        for case in args.cases:
            several = case.partition("x")[2] != "1"
            for mode in (f"{way}-turns", f"{way}-mixed") if several else (way,):
                name = f"{HF} ({mode.replace('-', ', ')})"
                result, problem = in_process(args, case, mode)
                found[case][name] = result["tokens/s"] if result else problem
                if problem:
                    print(f"{name}, {case}: {problem}", flush=True)
                if result:
                    keep(args, hf_figure(args, case, mode, result))
    return found


def hf_figure(args: argparse.Namespace, case: str, mode: str, result: dict[str, Any]) -> Record:
    """The record of what scripts/benchmark_generate_hf.py has printed."""
    speed, device, versions = (result.pop(key) for key in ("tokens/s", "device", "versions"))
    name = f"writing by {HF} ({mode.replace('-', ' and ')}), {shape_of(args, case)}"
    given = {"device": device, "versions": installed_versions("jax", "jaxlib") | versions}
    return make_figure(name, speed, None, "tokens/s", result, sense="at least", **given)


def in_process(
    args: argparse.Namespace, case: str, mode: str
) -> tuple[dict[str, Any] | None, str | None]:
    """Runs scripts/benchmark_generate_hf.py; returns its last result, None without any, and what
    went wrong, None if nothing did."""
    script = Path(__file__).with_name("benchmark_generate_hf.py")
    command = [args.hf_python, str(script), "--case", case, "--mode", mode]
    command += ["--device", args.hf_device, "--runs", str(args.hf_runs)]
    for size in ("rank", "layers", "hidden", "vocab", "prompt_len", "new_tokens"):
        command += [f"--{size}", str(getattr(args, size))]
    result = None
    # The session has the processes that compile, too, which would keep the pipe open.
    given = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(command, **given) as process:
        late = threading.Event()

        def stop() -> None:
            late.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(args.hf_seconds, stop)
        timer.start()
        for line in process.stdout:
            print(f"{HF}, {case}, {mode}: {line.strip()}", flush=True)
            result = json.loads(line)
        process.wait()
        timer.cancel()
    if late.is_set():
        return result, f"stopped after {args.hf_seconds:g} s"
    if process.returncode:
        print(shlex.join(command), flush=True)
        return result, f"failed with exit status {process.returncode}"
    return result, None


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", default=["1x1", "64x8"], help="sequences x adapters")
    parser.add_argument("--prompt_len", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each case")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--hf", action="store_true", help="measure Hugging Face, too")
    parser.add_argument(
        "--hf_python", default=sys.executable, help="Python interpreter that has torch and peft"
    )
    parser.add_argument("--hf_device", default="cuda")
    parser.add_argument("--hf_runs", type=int, default=3)
    parser.add_argument(
        "--hf_seconds", type=float, default=300, help="time of each case and mode, with compilation"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
