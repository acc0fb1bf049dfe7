"""The planner's figures, simulated or counted on the host.

  python scripts/benchmark_planner.py --lengths lengths.json

They are bubbles of the pipeline, exposed communication, MuxTune's ablation, LobRA's replicas, gaps
to optima, and solve times.

For the bubbles, four tasks train on real lengths in a pipeline of four stages without a flush: a
task for each of the sets nearest to XSum, CNN/DailyMail and WikiSum, and one for their mix. A
bubble ratio is 1 - busy / (stages × makespan), including warm-up and drain, of stages that run at
their own pace. Reported figures come from other lengths, models and machines. The floor holds for
every order of jaxmux's own microbatches, given the times of the stages and the updates that tasks
wait for.

GPU seconds of replicas are relative to LobRA's competitors, which have like replicas, fixed length
bins and uniform dispatch.

A record has the fields `name, value, unit, bound, baselines, command`. Smaller values are better.
`bound` is the most that the value may be, or None.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from benchmark_records import Record, RecordFile, shown
from planner_bubbles import (
    BASELINES,
    EQUAL_STAGES,
    HEAD_ON_LAST_STAGE,
    HEAD_SPLIT,
    REPORTED,
    WORDS,
    draw_rounds,
    jaxmux_plan,
    jaxmux_result,
    nearest_sets,
    shape_of,
)
from planner_costs import SOURCE
from planner_parts import (
    UnusualPacking,
    bound_on_bucket_gap,
    bucket_gaps,
    fusion_gap,
    fusion_seconds,
    largest_bucket_gap,
    packing,
    packing_of_mixes,
    packing_of_unusual_lengths,
    plan_seconds,
    timed,
)
from planner_replicas import cases, deployment_of, dispatching, most_gain, simulate, small_case
from research.ablation import REPORTED_LOSSES, ablate, setting
from research.interleaving import (
    OVERLAPS,
    decoder_subgraphs,
    interleave,
    interleaving_gap,
    priority_order,
    run_order,
)

CHECK = Path(__file__).parent.parent / "benchmarks" / "profile_check_h200.json"
RECORDED = ("bubbles", "ablation", "overlap", "parts", "replicas", "ahead", "predictions")
AHEAD_TASKS = ("xsum", "pubmedqa", "dialogsum", "gsm8k")
# For each case of the bubbles: its name, the times of its stages, the most that the ratio may be.
CASES = (
    ("equal stages", EQUAL_STAGES, 0.05),
    ("last stage 1.2x as long", HEAD_ON_LAST_STAGE, 0.15),
    ("head split over the stages", HEAD_SPLIT, 0.05),
)
# By number of GPUs. LobRA (5.2) reports 45.03% fewer GPU seconds on 16 GPUs with 7B and 60.67%
# fewer on 64 GPUs with 70B.
LOBRA_REPORTED = {16: 1 - 0.4503, 64: 1 - 0.6067}
LOBRA_BOUND = 1 - 0.45


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    lengths = json.loads(args.lengths.read_text())["lengths"]
    sets = tuple(args.sets or nearest_sets(lengths))
    print("costs:", *SOURCE.notes, f"{SOURCE.kind}: {SOURCE.text}", sep="\n  ")
    parts = {
        "bubbles": chain(
            *(bubble_records(lengths, sets, samples, args) for samples in args.samples)
        ),
        "ablation": ablation_records(args),
        "overlap": overlap_records(),
        "parts": part_records(lengths, sets, args),
        "replicas": replica_records(lengths, args),
        "ahead": ahead_records(lengths, args),
        "predictions": prediction_records(args),
    }
    records = []
    for record in chain(*(parts[name] for name in args.parts)):
        records.append(record)
        print(as_text(record), flush=True)
    if args.out:
        RecordFile(args.out).add(*records)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--lengths", type=Path, required=True, help="tokens of samples by data set")
    parser.add_argument("--out", type=Path, help="file of the records; none by default")
    parser.add_argument("--sets", nargs=3, help="instead of the nearest sets")
    parser.add_argument("--check", type=Path, default=CHECK, help="file of the profile check")
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[64, 32], help="of a task's global batch"
    )
    parser.add_argument("--parts", nargs="+", choices=RECORDED, default=RECORDED)
    parser.add_argument("--tokens", type=int, default=16384, help="of a microbatch")
    parser.add_argument("--microbatches", type=int, default=200, help="the least number")
    parser.add_argument("--ablation_tasks", type=int, default=8, help="tasks of the ablation")
    parser.add_argument("--plan_tasks", type=int, default=32, help="tasks of the timed plan")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def make_record(
    name: str,
    value: float,
    unit: str,
    bound: float | None = None,
    baselines: Mapping[str, Any] = MappingProxyType({}),
) -> Record:
    """Returns a record with the command of this process."""
    record = {"name": name, "value": float(value), "unit": unit, "bound": bound}
    command = shlex.join(["python", *sys.argv])
    return record | {"baselines": dict(baselines), "command": command}


def as_text(record: Record) -> str:
    """The record in one line, and one line for each baseline."""
    bound = "" if record["bound"] is None else f"(at most {record['bound']:g})"
    value = f"{record['name']:<60} {record['value']:>10.4g} {record['unit']} {bound}".rstrip()
    return "\n    ".join([value, *(f"{k}: {shown(v)}" for k, v in record["baselines"].items())])


def bubble_records(
    lengths: Mapping[str, Sequence[int]],
    sets: Sequence[str],
    samples: int,
    args: argparse.Namespace,
) -> Iterator[Record]:
    """Bubble ratios and seconds of the pipeline, for global batches of `samples` samples."""
    rounds = draw_rounds(lengths, sets, samples, args.microbatches * args.tokens, args.seed)
    shape = shape_of(rounds, args.tokens)
    millions = 1e-6 * sum(sum(map(sum, batches.values())) for batches in rounds)
    stand_ins = ", ".join(f"{name} for {own}" for name, own in zip(sets, WORDS, strict=True))
    print(f"4 tasks: {stand_ins}, and their mix; {len(rounds)} rounds of {samples} samples")
    for stages, scale, bound in CASES:
        name = stages if samples == args.samples[0] else f"{stages}, {samples} samples a task"
        plan, seconds = timed(partial(jaxmux_plan, rounds, shape, scale))
        ours = jaxmux_result(plan)
        others = {method: run(rounds, shape, scale) for method, run in BASELINES.items()}
        baselines = {
            "floor of the imbalance": 1 - sum(scale) / (len(scale) * max(scale)),
            "floor of any order": ours.floor,
            **{method: result.ratio for method, result in others.items()},
            **REPORTED,
            "jaxmux, without warm-up and drain": ours.steady,
            "jaxmux, microbatches": ours.microbatches,
            "jaxmux, groups": str(plan.grouping.groups),
            "jaxmux, residual buffers by stage": str(plan.simulation.peak_buffers.tolist()),
            "costs": SOURCE.kind,
        }
        yield make_record(f"bubble ratio, {name}", ours.ratio, "", bound, baselines)
        baselines = {method: result.seconds / millions for method, result in others.items()}
        baselines["jaxmux, planning"] = seconds / millions
        unit = "s per million tokens"
        yield make_record(f"pipeline, {name}", ours.seconds / millions, unit, None, baselines)


def ablation_records(args: argparse.Namespace) -> Iterator[Record]:
    """The throughput lost without a part is 1 - time with all on / time without the part."""
    for load, sequences in (("light", 4), ("heavy", 16)):
        for stages, tp in ((4, 1), (2, 2)):
            at = setting(args.ablation_tasks, sequences, stages, tp)
            seconds = ablate(at)
            everything = seconds.pop("all on")
            baselines = {f"lost {part}": 1 - everything / value for part, value in seconds.items()}
            if tp == 1:
                baselines |= REPORTED_LOSSES[load]
            name = f"MuxTune's parts all on, {load} load, pp={stages}, tp={tp}"
            value = 1e6 * everything / at.tokens
            yield make_record(name, value, "s per million tokens", None, baselines)


def overlap_records() -> Iterator[Record]:
    """The share of a bucket's all-reduces that its computation does not hide, over four layers."""
    for name, htasks in OVERLAPS.items():
        subgraphs = decoder_subgraphs(htasks, layers=4, tp=4)
        total = sum(subgraph.communication for subgraph in subgraphs)
        found, seconds = timed(partial(interleave, subgraphs))
        baselines = {
            "one hTask after another": found.sequential.exposed / total,
            "Alg. 1 alone": run_order(subgraphs, priority_order(subgraphs)).exposed / total,
            "time over one after another": found.overlap.seconds / found.sequential.seconds,
            "solve seconds": seconds,
        }
        value = found.overlap.exposed / total
        yield make_record(f"exposed all-reduces, {name}, tp=4", value, "", None, baselines)
    mean, largest = interleaving_gap(instances=60)
    yield make_record("interleaving over best of all orders", mean, "", None, {"most": largest})


def part_records(
    lengths: Mapping[str, Sequence[int]], sets: Sequence[str], args: argparse.Namespace
) -> Iterator[Record]:
    """Gaps of the planner's parts to optima, and the seconds that they take."""
    yield make_record("fusion over brute force, 9 tasks", fusion_gap(9, 20), "", 1e-9)
    yield make_record("fusion of 64 tasks", fusion_seconds(64), "s", 1.0)
    variance, largest = bucket_gaps(htasks=8, instances=4)
    yield make_record("buckets' squares over brute force, 8 hTasks", variance, "", 1e-9)
    yield make_record("largest bucket over brute force, 8 hTasks", largest, "", 0.01)
    gap = largest_bucket_gap(16)
    yield make_record("largest bucket over the optimum, 16 hTasks", gap, "", 0.01)
    gap = bound_on_bucket_gap(48)
    yield make_record("largest bucket over max(mean, hTask), 48 hTasks", gap, "")
    rounds = draw_rounds(lengths, sets, args.samples[0], 30 * args.tokens, args.seed)
    packed = packing(rounds, args.tokens)
    counts = {"microbatches": packed.microbatches, "greedy": packed.greedy}
    yield make_record("microbatches over the lower bound", packed.gap, "", 0.03, counts)
    mixed = packing_of_mixes(lengths, mixes=120, seed=args.seed)
    others = {"worst mix": mixed.worst, "tasks cut alone": mixed.given_spans}
    yield make_record("rows of random mixes over the lower bound", mixed.gap, "", 0.03, others)
    yield unusual_packing_record(packing_of_unusual_lengths(mixes=60, seed=args.seed))
    yield make_record("packing", packed.milliseconds, "ms per sample", 1.0)
    seconds = plan_seconds(lengths, args.plan_tasks, 4, args.seed)
    yield make_record(f"plan of {args.plan_tasks} tasks of 16 samples, pp=4", seconds, "s")


def unusual_packing_record(packed: UnusualPacking) -> Record:
    """Gaps of mixes of lengths that few data sets have."""
    others = {"worst mix": packed.worst, "tasks cut alone": packed.given_spans}
    for family, (mean, worst) in packed.families.items():
        others |= {family: mean, f"worst of {family}": worst}
    others["seconds of the process"] = packed.seconds
    return make_record("rows of unusual mixes over the lower bound", packed.gap, "", 0.03, others)


def replica_records(
    lengths: Mapping[str, Sequence[int]], args: argparse.Namespace
) -> Iterator[Record]:
    """GPU seconds of a round, and the seconds to plan for it (LobRA Fig. 7, 8 and 10)."""
    for case in cases():
        found = simulate(case, lengths, args.seed)
        deployment = found.deployment
        baselines = {
            "least of any replicas": found.floor / found.fused,
            "over sequential": found.ours / found.sequential,
            "over fused with our buckets and dispatch": found.ours / found.balanced_fused,
            "over sequential with our buckets and dispatch": found.ours / found.balanced_sequential,
            "GPU seconds a step": found.ours,
            "replicas": ", ".join(f"{n} of {c}" for c, n in deployment.replicas.items()),
            "gap to the best deployment": deployment.gap,
            "LobRA, reported": LOBRA_REPORTED[case.devices],
            "costs": case.costs,
        }
        name = f"GPU seconds over fused, {case.name}"
        yield make_record(name, found.ours / found.fused, "", LOBRA_BOUND, baselines)
    case = small_case()
    found = most_gain(case, lengths, args.seed)
    baselines = {
        "gain of the best of them": found.gain,
        "the best of them": str(found.unlike),
        "the best like replicas": str(found.like),
        "deployments": found.deployments,
        "costs": case.costs,
    }
    name = f"most gain of unlike replicas, {case.name}"
    yield make_record(name, found.most, "", None, baselines)
    for gpus, bound in ((16, None), (64, 120.0), (256, 300.0)):
        deployment, seconds = deployment_of(gpus)
        baselines = {"gap": deployment.gap, "kinds of replicas": len(deployment.replicas)}
        yield make_record(f"deployment on {gpus} GPUs", seconds, "s", bound, baselines)
    found = dispatching(rounds=40)
    name = "dispatch of 1,500 sequences, 16 buckets, 5 configurations"
    baselines = {"most": 1e3 * found.seconds.max()}
    yield make_record(name, 1e3 * np.median(found.seconds), "ms", 50.0, baselines)
    baselines = {"median": np.median(found.gaps), "greedy": float(found.greedy_gaps.mean())}
    yield make_record("dispatch over its bound", found.gaps.max(), "", 0.01, baselines)


def ahead_records(
    lengths: Mapping[str, Sequence[int]], args: argparse.Namespace
) -> Iterator[Record]:
    """The time that training waits for planning, which runs while the device is busy."""
    # Imported here because it loads JAX and the engine, which the other records do not need.
    from planner_ahead import measure_waits

    found = measure_waits(lengths, AHEAD_TASKS, samples=16, rounds=6, seed=args.seed)
    baselines = {
        "packing, in its thread": found.planning,
        "the first round": found.first,
        "a round in all, small model": found.round,
    }
    yield make_record("wait for the next round's plan", found.waited, "ms", None, baselines)


def prediction_records(args: argparse.Namespace) -> Iterator[Record]:
    """Mean absolute errors of the cost models, as the profile check measured them on a device."""
    check = json.loads(args.check.read_text())
    baselines = {"device": check["device"], "cases": ", ".join(c["case"] for c in check["cases"])}
    bounds = {"step time": 0.05, "peak memory": 0.02, "peak memory, online": 0.02}
    for name, error in check["errors"].items():
        yield make_record(f"prediction of {name}", error, "", bounds[name], baselines)


if __name__ == "__main__":
    main()
