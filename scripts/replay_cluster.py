"""Replays a day of a cluster of 128 GPUs by simulation with the measured cost model (MuxTune 5.4).

  python scripts/replay_cluster.py --lengths lengths.json --out benchmarks/live.json

Jobs arrive for a day; the replay goes on until the last of them has ended. Every policy of
`research.cluster` gets the same jobs, and all train with jaxmux, so they differ only in where
a job goes. The baselines are one task per GPU, first fit by memory, and fewest tasks per GPU.
jaxmux puts a job where the predicted effective throughput of the cluster rises most.

What MuxTune 5.4 states: 128 GPUs, first come first served, durations with a mean of 372.6 minutes
and a standard deviation of 612.9, 2.59 arrivals per minute, random configurations. This is 7.5
times the work that 128 GPUs can do one task at a time. Half and double of the rate are replayed
too. For comparison there are two more days without bounds: one with an eighth of the rate, at which
GPUs are always free, and one with small batches alone.

What it does not state, and is chosen here:

  jobs       a Poisson process; lognormal durations; a duration is that of the job alone on a GPU
  backbone   the shape of Llama-3.1-8B on an NVIDIA H200, from the profile that ships with jaxmux
             (MuxTune: LLaMA7B on A40)
  data       SST2, OpenBookQA or RTE with their real lengths, cut at 64, 128 and 256 tokens as in
             MuxTune 5.1; jaxmux packs samples, so shorter ones are not padded
  batches    8, 16, 32, 64 or 128 samples, from MuxTune's microbatch to its largest global batch
  adapters   LoRA on all linears with AdamW, rank 8, 16, 32 or 64; a pool has the largest rank of
             its tasks. All these are equally likely and independent.
  restarts   the start of a job and a change of tasks take no time, and no job moves

The profile measures no microbatch with fewer than 512 tokens in chunks of tasks, so the times of
the smallest tasks alone on a GPU are extrapolated. It measures no overhead of the host either. If
small rounds take longer than predicted, sharing a GPU gains more.

"jaxmux by time" counts the work of a round as the seconds that it takes alone, in place of tokens:
tokens of small tasks take more time alone than those of large tasks.

A record has the fields of `cluster_records.py`. `bound` is the better one of two baselines, one
task per GPU and first fit. The records of other benchmarks in the file are kept.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmark_records import Record, replace_records
from cluster_records import (
    ALONE,
    COMPLETION,
    FEWEST,
    FINISHED,
    FIRST_FIT,
    GPU_SECONDS,
    OURS,
    OURS_BY_TIME,
    PREFIX,
    draw,
)
from research.cluster import (
    ARRIVALS_PER_MINUTE,
    Job,
    Policy,
    ReplayResult,
    RoundTimes,
    TaskKind,
    fewest_tasks,
    first_fit,
    most_throughput,
    one_task_per_gpu,
    random_jobs,
    replay,
)

from jaxmux.installation import installed_versions, resolve_path
from jaxmux.planner.costs import PROFILES, PoolSpec, ReplicaCosts, measured_models
from jaxmux.planner.costs.device_profile import read_profile
from jaxmux.planner.devices import ONE_DEVICE

ROOT = Path(__file__).resolve().parent.parent
PROFILE = Path(resolve_path(PROFILES)) / "h200_llama3_8b.json"
GPUS, DAY = 128, 24 * 3600
# Data sets with the most tokens of a sample, batch sizes in samples, ranks.
DATA_SETS = {"sst2": 64, "openbookqa": 128, "rte": 256}
BATCH_SIZES, RANKS = (8, 16, 32, 64, 128), (8, 16, 32, 64)
# Global batches from which the chunks of a kind of task are known.
BATCHES_OF_A_KIND = 8
# Days with other random jobs, to tell the spread of the figures.
OTHER_SEEDS = (1, 2)
# MuxTune 5.4: cluster throughput over each baseline, for tasks of one data set.
REPORTED = {"HF-PEFT": 1.61, "NeMo": 1.51, "SL-PEFT": 1.36}


class Day(NamedTuple):
    """A day to replay: its name, arrivals in multiples of MuxTune's, batch sizes of the tasks, and
    whether jaxmux has to do better than the baselines."""

    name: str
    rate: float
    batch_sizes: Sequence[int]
    required: bool


DAYS = (
    Day("half the rate", 0.5, BATCH_SIZES, True),
    Day("MuxTune's rate", 1.0, BATCH_SIZES, True),
    Day("double the rate", 2.0, BATCH_SIZES, True),
    Day("an eighth of the rate", 0.125, BATCH_SIZES, False),
    Day("MuxTune's rate, batches of 8 and 16", 1.0, (8, 16), False),
)


def main() -> None:
    args = parse_arguments()
    lengths = json.loads(args.lengths.read_text())["lengths"]
    times = {
        sizes: round_times(lengths, sizes, args.seed)
        for sizes in dict.fromkeys(day.batch_sizes for day in DAYS)
    }
    records = [
        record for day in DAYS for record in day_records(day, times[day.batch_sizes], args.seed)
    ]
    replace_records(args.out, PREFIX, records)
    args.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(records).savefig(args.figure, dpi=150)


def round_times(
    lengths: Mapping[str, Sequence[int]], batch_sizes: Sequence[int], seed: int
) -> RoundTimes:
    """Returns the time model of all kinds of tasks on an H200.

    Args:
      lengths: by data set, the tokens of its samples.
      batch_sizes: samples of a global batch of the tasks.
      seed: seed of the random global batches.
    """
    rng = np.random.default_rng(seed)
    models = measured_models(PROFILE, read_profile(PROFILE).backbone, None, ONE_DEVICE)
    kinds = []
    for name, longest in DATA_SETS.items():
        for size in batch_sizes:
            drawn = np.minimum(rng.choice(lengths[name], (BATCHES_OF_A_KIND, size)), longest)
            batches = tuple(map(tuple, drawn.tolist()))
            kinds += [
                TaskKind(f"{name}, {size} samples, rank {r}", PoolSpec(1, r), batches, longest)
                for r in RANKS
            ]
    costs = ReplicaCosts(models.times, models.memory, PoolSpec(1, max(RANKS)), ONE_DEVICE)
    return RoundTimes(kinds, costs, least_chunk_len=models.least_chunk_len)


def policies(times: RoundTimes) -> dict[str, Policy]:
    """Returns the policies by their names in the records."""
    return {
        ALONE: one_task_per_gpu(),
        FIRST_FIT: first_fit(times.seconds),
        FEWEST: fewest_tasks(times.seconds),
        OURS: most_throughput(times.seconds, [kind.tokens for kind in times.kinds]),
        OURS_BY_TIME: most_throughput(times.seconds, seconds_alone(times)),
    }


def seconds_alone(times: RoundTimes) -> list[float]:
    """Returns the seconds of a round of each kind of task, alone on a GPU."""
    return [times.seconds((kind,)) for kind in range(len(times.kinds))]


def jobs_of(day: Day, times: RoundTimes, seed: int) -> list[Job]:
    """Returns the jobs of a day."""
    rate = day.rate * ARRIVALS_PER_MINUTE
    rng = np.random.default_rng(seed)
    return random_jobs(rng, seconds_alone(times), DAY / 60, rate)


def figures(result: ReplayResult) -> dict[str, float]:
    """Returns the figures of a replay by their names in the records."""
    return {
        FINISHED: result.finished(DAY),
        COMPLETION: float(result.completion_seconds.mean()) / 3600,
        GPU_SECONDS: float(result.gpu_seconds.sum()),
    }


def day_records(day: Day, times: RoundTimes, seed: int) -> Iterator[Record]:
    """Yields the records of one day: jobs finished, mean completion time and GPU seconds."""
    jobs, alone = jobs_of(day, times, seed), seconds_alone(times)
    results = {}
    for name, policy in policies(times).items():
        results[name] = replay(jobs, policy, GPUS, times.seconds)
        print(day.name, name, figures(results[name]), flush=True)
    work = sum(job.rounds * alone[job.kind] for job in jobs)
    facts = {
        FINISHED: {
            "jobs that arrive": len(jobs),
            "work that arrives, over what the GPUs can do one task at a time": work / (GPUS * DAY),
            **{f"MuxTune reports, over {name}": ratio for name, ratio in REPORTED.items()},
            **{f"most tasks on a GPU, {name}": r.most_tasks for name, r in results.items()},
        },
        COMPLETION: {
            f"hours before the start, {name}": float((r.starts - r.arrivals).mean()) / 3600
            for name, r in results.items()
        },
        GPU_SECONDS: {"every job beside enough jobs of its kind": least_gpu_seconds(jobs, times)},
    }
    spread = over_alone(day, times) if day.name == "MuxTune's rate" else {}
    profile = read_profile(PROFILE)
    units = {FINISHED: "jobs", COMPLETION: "hours", GPU_SECONDS: "GPU seconds"}
    for figure, unit in units.items():
        values = {name: figures(result)[figure] for name, result in results.items()}
        required = [values[ALONE], values[FIRST_FIT]]
        best = max(required) if figure == FINISHED else min(required)
        others = {name: value for name, value in values.items() if name != OURS}
        seeds = {f"over {ALONE}, other seeds": spread[figure]} if spread else {}
        record = {
            "name": f"{PREFIX}{day.name}, {figure}",
            "value": values[OURS],
            "bound": best if day.required else None,
            "sense": "at least" if figure == FINISHED else "at most",
            "unit": unit,
            "command": shlex.join(["python", *sys.argv]),
            "device": f"simulated on a CPU, with the cost model of an {profile.device}",
            "versions": installed_versions("jaxmux") | dict(profile.software),
            "baselines": others | facts[figure] | seeds,
        }
        if figure == FINISHED:
            hours = range(DAY // 3600 + 1)
            record["finished by hour"] = {
                name: [r.finished(3600 * hour) for hour in hours] for name, r in results.items()
            }
        yield record


def least_gpu_seconds(jobs: Sequence[Job], times: RoundTimes) -> float:
    """Returns the GPU seconds of all jobs if each is always beside as many jobs of its own kind as
    take the least time per job."""
    counts = (1, 2, 4, 8, 16, 24)
    least = [
        min(times.seconds((kind,) * count) / count for count in counts)
        for kind in range(len(times.kinds))
    ]
    return sum(job.rounds * least[job.kind] for job in jobs)


def over_alone(day: Day, times: RoundTimes) -> dict[str, list[float]]:
    """Returns each figure of jaxmux over that of one task per GPU, for days with other jobs."""
    ratios = {FINISHED: [], COMPLETION: [], GPU_SECONDS: []}
    chosen = policies(times)
    for seed in OTHER_SEEDS:
        jobs = jobs_of(day, times, seed)
        ours, alone = (
            figures(replay(jobs, chosen[name], GPUS, times.seconds)) for name in (OURS, ALONE)
        )
        for figure, found in ratios.items():
            found.append(ours[figure] / alone[figure])
    return ratios


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=Path, required=True, help="token counts by data set")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "live.json")
    parser.add_argument(
        "--figure", type=Path, default=ROOT / "docs" / "figures" / "cluster_replay.png"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
