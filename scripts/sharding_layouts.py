"""Layouts that the planner chooses for several GPUs, beside others: a backbone of 70B, and unlike
replicas of 8B (LobRA)."""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from benchmark_records import Record
from benchmark_step import in_own_process
from planner_replicas import (
    CONTEXT,
    SIX_TASKS,
    batch_sizes,
    deployments,
    most_gain,
    small_case,
)
from sharding_runs import (
    Measured,
    Work,
    figure_of,
    fits_of,
    limit_memory,
    measure,
    prediction_errors,
    replicas_seconds,
    run_options,
)

from jaxmux.models import BackboneConfig
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment
from jaxmux.planner.replicas import candidate_replicas
from jaxmux.runs.mesh_choice import choose_mesh, fit_replica, possible_meshes

LEAST_TOKENS_PER_SECOND, LEAST_OF_BEST = 6000.0, 0.95
LEAST_GAIN, GAIN_ERROR = 1.15, 0.05
# For each device, the sequences in a global batch of a task with short ones (planner_replicas).
SEQUENCES = 8
# Global batches of random samples that a task has, before it begins again.
EPOCH = 8


class Priced(NamedTuple):
    """A deployment with its predicted seconds of a round."""

    deployment: Deployment
    seconds: float


def large_records(args: argparse.Namespace, work: Work) -> Iterator[Record]:
    """Trains a large backbone in the layout that the planner chooses, and in the next best ones.

    Args:
      args: the options of the benchmark.
      work: the backbone and its tasks.
    """
    priced = in_own_process(partial(priced_meshes, args, work))
    size = "70B shape" + (f" in {args.large_format}" if args.large_format else "")
    (chosen, _), *others = priced[: 1 + args.others]

    def train(deployment: Deployment) -> Measured:
        return in_own_process(partial(measure, args, work, deployment))

    def errors(deployment: Deployment, run: Measured) -> Iterator[Record]:
        yield from prediction_errors(run, f"{size}, {deployment}, {args.tasks} tasks")

    run = train(chosen)
    yield from errors(chosen, run)
    speeds, failures = {f"{chosen}, tokens/s": run.tokens_per_second}, {}
    for deployment, _ in others:
        try:
            other = train(deployment)
        except (RuntimeError, PlanningError) as e:
            failures[f"{deployment}, failed"] = str(e).partition("\n")[0]
            continue
        speeds[f"{deployment}, tokens/s"] = other.tokens_per_second
        yield from errors(deployment, other)
    predicted = {f"{own}, predicted s a round": seconds for own, seconds in priced}
    name = f"{size}, {chosen}, {args.tasks} tasks"
    yield figure_of(
        run,
        f"{name}, training in the planner's layout",
        run.tokens_per_second,
        LEAST_TOKENS_PER_SECOND,
        "at least",
        "tokens/s",
        {"seconds to the end of the first round": run.first} | predicted,
    )
    yield figure_of(
        run,
        f"{name}, over the best measured layout",
        run.tokens_per_second / max(speeds.values()),
        LEAST_OF_BEST,
        "at least",
        "ratio of tokens per second",
        speeds | failures,
    )


def priced_meshes(args: argparse.Namespace, work: Work) -> list[Priced]:
    """The layouts of all devices in which the tasks fit, from the fastest."""
    limit_memory(args.memory_gib)
    tasks, options = work.tasks(args.rank), run_options(args, work.row_len)
    choice = choose_mesh(tasks, work.config, options, args.devices)
    return [Priced(mesh.deployment, mesh.seconds) for mesh in choice.meshes]


def replica_records(args: argparse.Namespace, config: BackboneConfig) -> Iterator[Record]:
    """Trains LobRA's mix of tasks on the best unlike replicas and on the best like ones, of GPUs
    with little memory.

    Args:
      args: the options of the benchmark.
      config: configuration of the backbone.
    """
    args = argparse.Namespace(**{**vars(args), "memory_gib": args.replica_gib, "remat": "auto"})
    lengths = json.loads(args.lengths.read_text())["lengths"]
    work = mix(args, config, lengths)
    priced = in_own_process(partial(priced_deployments, args, work))
    unlike, like = (
        min((own for own in priced if is_unlike(own) == wanted), key=lambda own: own.seconds)
        for wanted in (True, False)
    )
    runs = [in_own_process(partial(measure, args, work, own.deployment)) for own in (unlike, like)]
    # The rounds of both are the same, but one takes longer than another.
    seconds = [statistics.mean(run.times) for run in runs]
    gain, predicted = seconds[1] / seconds[0], like.seconds / unlike.seconds
    proven = most_gain(small_case(), lengths, seed=0)
    name = f"8B mix in {args.replica_gib:g} GiB, {unlike.deployment}, {len(SIX_TASKS)} tasks"
    of = {
        f"{like.deployment}, s a round": seconds[1],
        f"{unlike.deployment}, s a round": seconds[0],
        "most that any deployment gains, of the planner": proven.most,
    }
    bound = LEAST_GAIN if proven.most >= LEAST_GAIN else None
    unit = "ratio of times"
    yield figure_of(runs[0], f"{name}, over like replicas", gain, bound, "at least", unit, of)
    of = {"measured, over like replicas": gain, "predicted, over like replicas": predicted}
    quantity = f"{name}, gain beside its prediction"
    error = abs(gain / predicted - 1)
    yield figure_of(runs[0], quantity, error, GAIN_ERROR, "at most", "relative error", of)


def is_unlike(priced: Priced) -> bool:
    """Whether the replicas of a deployment differ."""
    return len(priced.deployment.counts) > 1


def mix(
    args: argparse.Namespace, config: BackboneConfig, lengths: dict[str, Sequence[int]]
) -> Work:
    """LobRA's mix of tasks, scaled to the number of devices. Samples longer than `args.context` are
    truncated; for a dry run, all lengths are scaled down with it."""
    rng = np.random.default_rng(0)
    own = {task: np.minimum(lengths[task], CONTEXT) for task in SIX_TASKS}
    sizes = batch_sizes(own, SEQUENCES * args.devices)
    drawn = [rng.choice(own[task], EPOCH * sizes[task]) for task in SIX_TASKS]
    scaled = [np.maximum(8, each * args.context // CONTEXT).tolist() for each in drawn]
    return Work(config, scaled, [sizes[task] for task in SIX_TASKS], args.rounds * args.devices)


def priced_deployments(args: argparse.Namespace, work: Work) -> list[Priced]:
    """All deployments of the devices in which the tasks fit, with their predicted times."""
    limit_memory(args.memory_gib)
    tasks, options = work.tasks(args.rank), run_options(args, work.row_len)
    longest = max(task.longest for task in tasks)
    found, fits = [], {}
    for deployment in deployments(args.devices, candidate_replicas(args.devices)):
        if len(deployment.replicas) == 1:
            continue
        try:
            own = {r: fits[r] for r in deployment.counts if r in fits}
            if len(own) < len(deployment.counts):
                own = fits_of(tasks, work.config, options, deployment)
                fits |= own
            if max(fit.shape.row_len for fit in own.values()) >= longest:
                found.append(Priced(deployment, replicas_seconds(tasks, deployment, own)))
        except PlanningError:
            continue
    # A single replica may also have data shards.
    for replica in possible_meshes(args.devices, work.config):
        try:
            fit = fit_replica(tasks, work.config, options, replica)
            fit.require(tasks)
            found.append(Priced(Deployment((replica,)), fit.round_seconds()))
        except PlanningError:
            continue
    return found
