"""Training throughput of objectives on one GPU beside supervised fine-tuning on the same rows.

  python scripts/benchmark_objectives.py --out benchmarks/objectives_h200.json

The backbone has the shape of Llama-3.1-8B and random bf16 weights. Four tasks have random tokens,
LoRA of rank 16 on all linears, and AdamW. A pair has two samples of 1,024 tokens, which share a row
of 2,048. SFT and PPO train on the same samples in rows of 1,024, and so does DPO in two passes. A
time is the median over rounds of the time from the end of one round to the end of the next; all
cases are measured in one process, one after another, and SFT at the beginning and at the end.

Figures:

  dpo             tokens per second of DPO over those of SFT, the reference being kept
  dpo_first_epoch the same with the time in which the reference is computed
  dpo_two_passes  tokens per second of DPO over those of SFT if pairs do not fit into rows
  sft_in_rows     tokens per second of SFT in the rows of pairs over those of SFT in rows of one
                  sample
  ppo             tokens per second of PPO, whose weights the devices compute while they train,
                  over those of SFT
  simpo           tokens per second of SimPO, which needs no reference, over those of SFT
  memory          peak memory of DPO over that of SFT
  score           the time of the forward passes of a training round over that of log-probabilities
                  of the same tokens; by XLA's counts a training step is 2.05 forward passes

For a dry run on CPU:

  python scripts/benchmark_objectives.py --out /tmp/dry.json --tokens 256 --length 64 --pairs 2 \
      --rounds 2 --warm_up 1 --layers 1 --hidden 256 --vocab 512 --chunk_len 64
"""

import argparse
import dataclasses
import gc
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_records import make_figure, replace_records

from jaxmux.data import GlobalBatches, Sample
from jaxmux.engine import Engine, EngineOptions
from jaxmux.installation import installed_versions
from jaxmux.models import Backbone, BackboneConfig, device_peak
from jaxmux.objectives import DPO, SFT, Objective, Policy, SimPO
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling import in_other_names, random_task

# Forward passes in a step of training with remat "norms", by XLA's counts of an 8B model.
FORWARD_PASSES = 2.05
# For each case, its objective, and whether both samples of a pair share a row.
CASES = {
    "sft": (SFT(), False),
    "dpo": (DPO(), True),
    "dpo, two passes": (DPO(), False),
    "simpo": (SimPO(), True),
    "sft in rows of pairs": (SFT(), True),
    "ppo": (Policy("ppo"), False),
    "sft again": (SFT(), False),
}


class Measured(NamedTuple):
    """Seconds of a round, of computing the reference of all its samples, and of their
    log-probabilities; and the peak memory of the process so far, in bytes."""

    round: float
    reference: float
    score: float
    peak: int


def main() -> None:
    args = parse_arguments()
    config = BackboneConfig(
        architecture="LlamaForCausalLM",
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=7 * args.hidden // 2,
        num_layers=args.layers,
        num_heads=args.hidden // 128,
        num_kv_heads=max(1, args.hidden // 512),
        head_dim=128,
        rope_theta=5e5,
    )
    backbone = Backbone.random(config, dtype=jnp.bfloat16)
    found = {}
    for name, (objective, in_pairs) in CASES.items():
        found[name] = measure(backbone, objective, in_pairs, args)
        print(name, found[name], flush=True)
    sft = statistics.mean([found["sft"].round, found["sft again"].round])
    dpo = found["dpo"]
    figures = {
        "dpo": (sft / dpo.round, 0.92, "at least"),
        "dpo_first_epoch": (sft / (dpo.round + dpo.reference), 0.62, "at least"),
        "dpo_two_passes": (sft / found["dpo, two passes"].round, 0.62, "at least"),
        "sft_in_rows": (sft / found["sft in rows of pairs"].round, None, "at least"),
        "ppo": (sft / found["ppo"].round, 0.99, "at least"),
        "simpo": (sft / found["simpo"].round, None, "at least"),
        "memory": (dpo.peak / max(1, found["sft"].peak), 1.05, "at most"),
        "score": (sft / FORWARD_PASSES / found["sft again"].score, 0.95, "at least"),
    }
    tokens = args.tasks * 2 * args.pairs * args.length
    baselines = {
        "sft_tokens_per_second": tokens / sft,
        "sft_seconds": [found["sft"].round, found["sft again"].round],
        "dpo_seconds": dpo.round,
        "dpo_two_passes_seconds": found["dpo, two passes"].round,
        "simpo_seconds": found["simpo"].round,
        "sft_in_rows_seconds": found["sft in rows of pairs"].round,
        "ppo_seconds": found["ppo"].round,
        "reference_seconds": dpo.reference,
        "score_seconds": found["sft again"].score,
        "shape": f"{args.tasks} tasks, {args.pairs} pairs of 2 x {args.length} tokens in a batch, "
        f"microbatches of {args.tokens} tokens, {args.layers} layers, bfloat16, rank {args.rank}",
    }
    records = [
        make_figure(
            f"objectives_{name}",
            value,
            bound,
            "ratio",
            baselines,
            device=jax.devices()[0].device_kind,
            versions=installed_versions("jax", "jaxlib", "optax"),
            sense=sense,
        )
        for name, (value, bound, sense) in figures.items()
    ]
    for record in records:
        print(f"{record['name']}: {record['value']:.3f} ({record['sense']} {record['bound']})")
    if args.out:
        replace_records(args.out, "objectives_", records)


def measure(
    backbone: Backbone, objective: Objective, in_pairs: bool, args: argparse.Namespace
) -> Measured:
    """Trains tasks with this objective, in rows of one sample or of both samples of a pair."""
    members, batch = objective.members, args.pairs * (2 // objective.members)
    task = random_task(
        backbone.config,
        "task0",
        [args.length] * 4 * args.pairs,
        batch,
        args.warm_up + args.rounds,
        args.rank,
    )
    trained = task.samples.samples
    if objective.records == "rollouts":
        trained = [with_values(sample) for sample in trained]
    task = dataclasses.replace(
        task,
        task=dataclasses.replace(task.task, objective=objective),
        samples=task.samples._replace(samples=trained),
        batches=GlobalBatches(trained, batch, seed=0, members=members),
    )
    samples_in_row = 1 + in_pairs
    shape = smallest_shape_class(
        [samples_in_row * args.length], args.tokens, chunk_len=args.chunk_len
    )
    shape = dataclasses.replace(shape, max_sequences=samples_in_row)
    if objective.rule_of_pairs:
        assert task.pairs_fit(shape) == in_pairs
    engine = Engine(backbone, EngineOptions(shape))
    engine.register_tasks(in_other_names(task, args.tasks))
    # The first call computes references, if there are any. It compiles, so a second one is timed.
    samples = list(task.samples.samples)[: 2 * args.pairs]
    ends = [time.perf_counter()]
    while len(ends) <= args.warm_up + args.rounds:
        if engine.train_round():
            ends.append(time.perf_counter())
    engine.drain()
    rounds = [end - begin for begin, end in pairwise(ends)][args.warm_up :]
    scores = []
    for _ in range(4):
        begin = time.perf_counter()
        engine.log_probs("task0", samples * args.tasks)
        scores.append(time.perf_counter() - begin)
    engine.close()
    peak = device_peak() or 0
    del engine
    gc.collect()
    score = statistics.median(scores[1:])
    return Measured(
        statistics.median(rounds), score if objective.needs_reference else 0.0, score, peak
    )


def with_values(sample: Sample) -> Sample:
    """A sample as a rollout, with random values of its tokens."""
    rng = np.random.default_rng(sample.sample_id)
    sampled, advantages = rng.normal((-12, 0), 1, (len(sample.input_ids), 2)).T.astype(np.float32)
    return sample._replace(values={"logprobs": sampled, "advantages": advantages})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file of the records")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of a task in a global batch")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a microbatch")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8, help="measured rounds")
    parser.add_argument("--warm_up", type=int, default=4, help="rounds before them")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
