"""Training throughput of DPO on one GPU beside TRL's DPOTrainer with PEFT.

  python scripts/benchmark_trl.py --out benchmarks/objectives_h200.json

The backbone has the shape of Llama-3.1-8B and random bf16 weights. Both sides train one task on the
same pairs of random tokens, with LoRA of rank 16 on all linears and AdamW. The sequences of all
pairs are equally long, so neither side pads; half of a sequence is the prompt. Both sides keep the
log-probabilities under the reference (`precompute_ref_log_probs` in TRL), which they compute before
the measured updates. A time is the median over updates of the time from the end of one update to
the end of the next.

TRL is measured in several modes, of which the fastest counts. The mode 4-compiled-checkpoint has

- micro-batches of 4 pairs, and accumulates their gradients up to a global batch;
- "compiled" or "eager" layers. Every decoder layer is compiled by itself (`torch.compile`): layers
  then share their code, and the causal mask is made outside, where SDPA can do without it;
- with "checkpoint", which is TRL's default, gradient checkpointing of every layer.

As is usual with PEFT, the LoRA adapters are float32 under bf16 autocast, and attention is SDPA.

jaxmux and every mode run in processes of their own, one after another. The figure is written after
each mode:

  objectives_dpo_over_trl  tokens per second of jaxmux over those of TRL's fastest mode

Run benchmark_objectives.py before: it removes this figure from the file. TRL needs torch,
transformers, peft, trl and datasets; --trl_python names another interpreter that has them. For a
dry run on CPU:

  python scripts/benchmark_trl.py --out /tmp/dry.json --trl_python .venv-peft/bin/python \
      --modes 2-eager 1-eager-checkpoint --tokens 256 --length 64 --pairs 2 --updates 2 \
      --warm_up 1 --layers 2 --hidden 256 --vocab 512 --chunk_len 64 --device cpu
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from benchmark_records import Record, make_figure, replace_records

FIGURE = "objectives_dpo_over_trl"
MODES = ("8-compiled", "4-compiled", "8-eager-checkpoint", "4-eager", "8-compiled-checkpoint")
# Global batches of an epoch.
BATCHES = 2


def main() -> None:
    args = parse_arguments()
    if args.side:
        found = measure_jaxmux(args) if args.side == "jaxmux" else measure_trl(args)
        args.out.write_text(json.dumps(found))
        return
    begin = time.monotonic()
    jaxmux = in_process(args.jaxmux_python, "jaxmux")
    trl = {}
    for mode in args.modes:
        if time.monotonic() - begin > args.seconds:
            print(f"{mode}: not measured, because --seconds have passed", flush=True)
            continue
        trl[mode] = in_process(args.trl_python, "trl", "--mode", mode)
        if "seconds" in trl[mode]:
            record = figure(args, jaxmux, trl)
            replace_records(args.out, FIGURE, [record])
            print(f"{FIGURE}: {record['value']:.3f}", flush=True)


def in_process(python: str, side: str, *options: str) -> dict[str, Any]:
    """What a side measures: `statistics_of` its updates, its peak memory, device and versions; or
    `error`, why there are none."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        # The last --out counts.
        command = [python, __file__, *sys.argv[1:], "--side", side, *options, "--out", str(out)]
        code = subprocess.run(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode
        found = json.loads(out.read_text()) if out.exists() else {"error": f"exit code {code}"}
    print(side, *options, found, f"in {time.monotonic() - begin:.0f} s", flush=True)
    return found


def figure(args: argparse.Namespace, jaxmux: dict[str, Any], trl: dict[str, Any]) -> Record:
    """The record of the figure.

    Args:
      args: the options.
      jaxmux: what `in_process` returns for jaxmux.
      trl: the same by mode of TRL; at least one has times.

    Raises:
      ValueError: jaxmux has no times, or the sides ran on different devices.
    """
    if "error" in jaxmux:
        raise ValueError(f"jaxmux was not measured: {jaxmux['error']}")
    timed = {mode: found for mode, found in trl.items() if "seconds" in found}
    best = min(timed, key=lambda mode: timed[mode]["seconds"])
    if jaxmux["device"] != timed[best]["device"]:
        raise ValueError(f"jaxmux ran on {jaxmux['device']}, TRL on {timed[best]['device']}")
    tokens = 2 * args.pairs * args.length
    shown = "seconds", "each", "peak_bytes", "error"
    baselines = {
        "trl_mode": best,
        "trl_tokens_per_second": tokens / timed[best]["seconds"],
        "tokens_per_second": tokens / jaxmux["seconds"],
        "jaxmux": {name: jaxmux[name] for name in shown if name in jaxmux},
        "trl": {
            mode: {name: found[name] for name in shown if name in found}
            for mode, found in trl.items()
        },
        "shape": f"1 task, {args.pairs} pairs of 2 x {args.length} tokens in a batch, "
        f"microbatches of {args.tokens} tokens, {args.layers} layers, bfloat16, rank {args.rank}",
    }
    return make_figure(
        FIGURE,
        timed[best]["seconds"] / jaxmux["seconds"],
        1.5,
        "ratio",
        baselines,
        device=jaxmux["device"],
        versions=jaxmux["versions"] | timed[best]["versions"],
        sense="at least",
    )


def random_pairs(args: argparse.Namespace) -> np.ndarray:
    """Token ids [pairs, 3, length / 2] of prompts, chosen and rejected answers. The last token of
    the vocabulary ends answers, and is nowhere else."""
    shape = BATCHES * args.pairs, 3, args.length // 2
    ids = np.random.default_rng(0).integers(0, args.vocab - 1, shape, np.int32)
    ids[:, 1:, -1] = args.vocab - 1
    return ids


def statistics_of(ends: Sequence[float], warm_up: int) -> dict[str, Any]:
    """The seconds of each update but the first ones, and their median.

    Args:
      ends: when the first update began, and when each ended.
      warm_up: number of updates that do not count.
    """
    each = [end - begin for begin, end in pairwise(ends)][warm_up:]
    return {"seconds": statistics.median(each), "each": each}


def measure_jaxmux(args: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from benchmark_step import llama_config

    from jaxmux.data import GlobalBatches, Sample, Samples
    from jaxmux.engine import Engine, EngineOptions
    from jaxmux.installation import installed_versions
    from jaxmux.models import Backbone, device_peak
    from jaxmux.objectives import DPO
    from jaxmux.planner.packing import smallest_shape_class
    from jaxmux.profiling import random_task

    targets = np.arange(args.length) >= args.length // 2
    samples = [
        Sample(np.concatenate([prompt, answer]), targets, 2 * i + j)
        for i, (prompt, *answers) in enumerate(random_pairs(args))
        for j, answer in enumerate(answers)
    ]
    updates = args.warm_up + args.updates
    backbone = Backbone.random(llama_config(args), dtype=jnp.bfloat16)
    lengths = [sample.stream_length for sample in samples]
    task = random_task(backbone.config, "dpo", lengths, args.pairs, updates, args.rank)
    task = dataclasses.replace(
        task,
        task=dataclasses.replace(task.task, objective=DPO()),
        samples=Samples(samples, len(samples), 0, 0),
        batches=GlobalBatches(samples, args.pairs, seed=0, members=2),
    )
    # A row holds a pair, which trains in one pass then.
    shape = smallest_shape_class([2 * max(lengths)], args.tokens, chunk_len=args.chunk_len)
    shape = dataclasses.replace(shape, max_sequences=2)
    assert task.pairs_fit(shape)
    engine = Engine(backbone, EngineOptions(shape))
    engine.register_tasks([task])
    ends = [time.perf_counter()]
    while len(ends) <= updates:
        if engine.train_round():
            ends.append(time.perf_counter())
    engine.drain()
    engine.close()
    return statistics_of(ends, args.warm_up) | {
        "peak_bytes": device_peak(),
        "device": jax.devices()[0].device_kind,
        "versions": installed_versions("jax", "jaxlib", "optax"),
    }


def measure_trl(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    try:
        ends = trl_updates(args)
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    on_gpu = args.device == "cuda"
    packages = "torch", "transformers", "peft", "trl", "accelerate", "datasets"
    return statistics_of(ends, args.warm_up) | {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {name: version(name) for name in packages},
    }


def trl_updates(args: argparse.Namespace) -> list[float]:
    """Trains in the mode `args.mode`. Returns when the first update began and when each ended, in
    seconds."""
    import peft
    import torch
    import trl
    from benchmark_peft import make_backbone
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl.trainer import dpo_trainer

    class Clock(TrainerCallback):
        """Notes when updates end on the device, without waiting for it."""

        def __init__(self):
            self.moments = []

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.on_step_end()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if args.device == "cpu":
                self.moments.append(time.perf_counter())
            else:
                self.moments.append(torch.cuda.Event(enable_timing=True))
                self.moments[-1].record()

        def seconds(self) -> list[float]:
            if args.device == "cpu":
                return self.moments
            torch.cuda.synchronize()
            return [1e-3 * self.moments[0].elapsed_time(moment) for moment in self.moments]

    # TRL hashes all weights to name the file with the reference. It takes long, before the updates.
    dpo_trainer.hash_module = lambda module: "random weights"
    pairs, layers, *checkpoint = args.mode.split("-")
    model = make_backbone(args, bos_token_id=None, eos_token_id=args.vocab - 1)
    ids, clock = random_pairs(args), Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.DPOTrainer(
            model,
            args=trl.DPOConfig(
                folder,
                precompute_ref_log_probs=True,
                max_length=None,
                per_device_train_batch_size=int(pairs),
                gradient_accumulation_steps=args.pairs // int(pairs),
                gradient_checkpointing=bool(checkpoint),
                max_steps=args.warm_up + args.updates,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                # jaxmux does not clip either.
                max_grad_norm=0.0,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=args.device == "cpu",
            ),
            train_dataset=Dataset.from_list([as_texts(pair) for pair in ids]),
            processing_class=word_tokenizer(args.vocab),
            peft_config=peft.LoraConfig(
                r=args.rank,
                lora_alpha=2 * args.rank,
                target_modules="all-linear",
                task_type="CAUSAL_LM",
            ),
            callbacks=[clock],
        )
        names = "prompt_ids", "chosen_ids", "rejected_ids"
        trained = np.stack([trainer.train_dataset[name] for name in names], axis=1)
        if not np.array_equal(trained, ids):
            raise ValueError("TRL trains on other tokens than jaxmux")
        if layers == "compiled":
            # After the trainer has computed the reference, which would be compiled too.
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        loss = trainer.train().training_loss
    if not np.isfinite(loss):
        raise ValueError(f"TRL's loss is {loss}")
    return clock.seconds()


def as_texts(pair: np.ndarray) -> dict[str, str]:
    """The record of TRL for token ids [3, length / 2], for `word_tokenizer`."""
    names = "prompt", "chosen", "rejected"
    return {
        name: "".join(f" {token}" for token in ids) for name, ids in zip(names, pair, strict=True)
    }


def word_tokenizer(vocab: int):
    """A tokenizer whose tokens are the numbers below `vocab`, separated by spaces. The largest ends
    a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(i): i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # A special token is found within words too, and only the largest number is in no other one.
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=str(vocab - 1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="file of the record")
    parser.add_argument("--modes", nargs="+", default=MODES, help="modes of TRL")
    parser.add_argument("--seconds", type=float, default=420, help="no mode begins after them")
    parser.add_argument("--jaxmux_python", default=sys.executable)
    parser.add_argument("--trl_python", default=sys.executable)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a global batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of jaxmux's microbatches")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--updates", type=int, default=8, help="measured updates")
    parser.add_argument("--warm_up", type=int, default=4, help="updates before them")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--device", default="cuda", help="device of TRL")
    parser.add_argument("--side", choices=("jaxmux", "trl"), help="measure only this side")
    parser.add_argument("--mode", help="with --side trl, its mode")
    return parser.parse_args()


if __name__ == "__main__":
    main()
