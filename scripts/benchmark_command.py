"""Training throughput and peak memory of the command `jaxmux train` with its own defaults, on one
GPU, and of Hugging Face PEFT.

  python scripts/benchmark_command.py --out benchmarks/step_h100.json

The script makes a checkpoint folder of Llama-3.1-8B's shape with random bf16 weights, a tokenizer,
and data of samples that have exactly `--length` tokens. Then it runs, each in a process of its own:

- Hugging Face PEFT with `torch.compile`, one task (scripts/benchmark_peft.py);
- `jaxmux train` with `--tasks` tasks and no option about memory, shapes or kernels;
- `jaxmux train` with one task of `--small_length` tokens, if only `--small_gib` GiB of the device's
  memory may be used;
- `jaxmux train` from its start to the end of the first step, in bfloat16 and float8, with an empty
  and with a filled cache of compiled programs (`--no-start` leaves it out);
- the same with `--refused_gib` GiB, which must be refused with exit code 2 before the backbone is
  loaded.

The time of a step comes from the time stamps in metrics.jsonl: the median of the time from one
round to the next, divided by the microbatches of a round. For a dry run on CPU:

  python scripts/benchmark_command.py --out /tmp/dry.json --hidden 256 --layers 1 --vocab 512 \
      --tasks 2 --length 64 --small_length 64 --steps 14 --no-peft --no-limits
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from benchmark_records import Record, RecordFile, make_record
from benchmark_step import PEFT, WARM_UP_ROUNDS, llama_config, measured_peft, with_baseline

from jaxmux.installation import installed_versions

# By format of the linears, most seconds to the end of the first step with an empty and a filled
# cache of programs.
STARTS = {None: (50.0, 25.0), "float8": (None, None)}
# Samples of a task's global batch, so that a round has two microbatches of 8,192 tokens.
BATCH = 2

_MAKE_BACKBONE = """
import sys, json
import jax.numpy as jnp
from jaxmux import Backbone, BackboneConfig, save_backbone
fields = json.loads(sys.argv[1])
save_backbone(Backbone.random(BackboneConfig(**fields), dtype=jnp.bfloat16), sys.argv[2])
"""


def main() -> None:
    args = parse_arguments()
    records = RecordFile(args.out)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        baselines = list(measured_peft(args))
        records.add(*baselines)
        for baseline in baselines:
            print(f"{PEFT}: {baseline['tokens_per_second']:,.0f} tokens/s", flush=True)
        make_backbone(folder / "backbone", args)
        if args.full:
            record = measure(folder, args, args.tasks, args.length, {})
            records.add(with_baseline(record, baselines))
            print(one_line(record), flush=True)
        if args.start:
            # Imported here, because it imports this module.
            from start_records import start_records

            for form, bounds in STARTS.items():
                shape = f"8B shape, {form or 'bfloat16'}, {args.tasks} tasks"
                settings = [f"fine_tune.backbone_format = {form!r}"]
                for record in start_records(folder, args, shape, settings, bounds):
                    records.add(record)
                    print(f"{record['name']}: {record['value']:.1f} s", flush=True)
        if args.limits:
            limit = limited(args.small_gib, args)
            record = measure(folder, args, 1, args.small_length, limit, args.small_gib)
            records.add(record)
            print(one_line(record), flush=True)
            check_refusal(folder, args)


def make_backbone(folder: Path, args) -> None:
    """A checkpoint folder with random weights and a tokenizer of one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    config = vars(llama_config(args))
    command = [sys.executable, "-c", _MAKE_BACKBONE, json.dumps(config), str(folder)]
    subprocess.run(command, check=True)
    alphabet = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>").save_pretrained(folder)


def measure(
    folder: Path, args, tasks: int, length: int, environment: dict, limit: float | None = None
) -> Record:
    """Runs `jaxmux train` and reads its metrics."""
    run_dir = folder / f"run{tasks}x{length}"
    result = train(folder, run_dir, args, tasks, length, environment)
    if result.returncode:
        raise SystemExit(f"jaxmux train: exit code {result.returncode}\n{result.stdout[-4000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rounds = sorted({line["step"]: line["time"] for line in lines}.items())
    summary = json.loads((run_dir / "summary.json").read_text())
    tokens = sum(line["tokens"] for line in lines) / len(rounds)
    seconds = [after[1] - before[1] for before, after in pairwise(rounds)][WARM_UP_ROUNDS:]
    median = statistics.median(seconds)
    peak, predicted = summary["peak_memory_bytes"], summary["predicted_memory_bytes"]
    shape = json.loads((run_dir / "run.json").read_text())["shape"]
    return make_record(
        name="train_command",
        shape=f"{shape['rows']}x{shape['row_len']} tokens, length {length}, {args.layers} layers",
        dtype="bfloat16",
        tasks=tasks,
        ranks=[args.rank] * tasks,
        dropout=0.0,
        implementation="jaxmux train" + (f" in {limit:g} GiB" if limit else ", defaults"),
        ms_median=1e3 * median,
        ms_min=1e3 * min(seconds),
        ms_max=1e3 * max(seconds),
        tokens_per_second=tokens / median,
        peak_bytes=peak,
        predicted_bytes=predicted,
        device=device(),
        versions=installed_versions("jaxmux", "jax", "jaxlib", "torch", "transformers", "peft"),
        length=length,
        rounds=len(seconds),
        output=[line for line in result.stdout.splitlines() if "memory" in line or "kept" in line],
    )


def train(
    folder: Path,
    run_dir: Path,
    args,
    tasks: int,
    length: int,
    environment: dict,
    settings: Sequence[str] = (),
) -> subprocess.CompletedProcess:
    """Runs `jaxmux train`, with further lines of its config, to the end."""
    rng = np.random.default_rng(0)
    config = [*settings, f"fine_tune.backbone = '{folder / 'backbone'}'"]
    config += [f"fine_tune.tasks = [{', '.join(f'@t{i}/Task()' for i in range(tasks))}]"]
    for i in range(tasks):
        path = folder / f"data{i}x{length}.jsonl"
        letters = rng.integers(97, 123, (2 * BATCH, length)).astype(np.uint8)
        # A sample has one token for each byte, and the EOS token.
        path.write_text(
            "".join(json.dumps({"text": row.tobytes().decode()}) + "\n" for row in letters)
        )
        config += [
            f"t{i}/Task.name = 't{i}'",
            f"t{i}/Task.data = '{path}'",
            f"t{i}/Task.max_length = {length + 1}",
            f"t{i}/Task.batch_size = {BATCH}",
            f"t{i}/Task.steps = {args.steps}",
            f"t{i}/Task.adapter = @LoRA()",
        ]
    config += [f"LoRA.rank = {args.rank}"]
    file = folder / f"config{tasks}x{length}.gin"
    file.write_text("\n".join(config) + "\n")
    command = [sys.executable, "-m", "jaxmux.train", f"--gin_file={file}", f"--run_dir={run_dir}"]
    started = time.monotonic()
    result = subprocess.run(
        command,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(result.stdout[-1500:], f"{time.monotonic() - started:.0f} s", flush=True)
    return result


def limited(gib: float, args) -> dict:
    """The environment in which JAX may use this much of the device's memory."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{gib / args.device_gib:.4f}"}


def check_refusal(folder: Path, args) -> None:
    limit = limited(args.refused_gib, args)
    result = train(folder, folder / "refused", args, 1, args.small_length, limit)
    if result.returncode != 2 or "does not fit" not in result.stdout:
        raise SystemExit(f"{args.refused_gib:g} GiB: exit code {result.returncode}, not refused")


def device() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except OSError:
        return "cpu"


def one_line(record: Record) -> str:
    peak, predicted = record["peak_bytes"], record["predicted_bytes"]
    memory = ""
    if peak and predicted:
        memory = f", peak {peak / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} GiB"
    return (
        f"{record['implementation']}, {record['tasks']} tasks, {record['shape']}: "
        f"{record['ms_median']:.1f} ms a round, {record['tokens_per_second']:,.0f} tokens/s{memory}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--small_length", type=int, default=1024)
    parser.add_argument("--small_gib", type=float, default=24)
    parser.add_argument("--refused_gib", type=float, default=16)
    parser.add_argument("--device_gib", type=float, default=79.2, help="memory of the device")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--peft", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--start", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--full", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limits", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    # The other options of `measured_peft`.
    args.peft = [f"4x{args.length}"] if args.peft else []
    args.peft_modes, args.peft_python, args.peft_device = ["compiled"], sys.executable, "cuda"
    return args


if __name__ == "__main__":
    main()
