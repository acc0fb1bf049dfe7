"""Training runs on one GPU or on meshes of several, measured beside what the planner predicts."""

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmark_records import Record, make_figure
from benchmark_step import in_own_process, round_size
from gpu_trace import idle_shares, read_launches, trace_file

from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.installation import installed_versions
from jaxmux.models import Backbone, BackboneConfig, device_memory
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.pipeline import grouping_of_tasks, plan_with
from jaxmux.planner.replicas import ShapeCosts, predicted_round_seconds
from jaxmux.profiling import random_task
from jaxmux.runs import RunOptions
from jaxmux.runs.mesh_choice import ReplicaFit, fit_longest, fit_replica
from jaxmux.sharding import (
    PlacedBackbone,
    consecutive_parts,
    random_placed_backbone,
    stage_meshes,
)

# Rounds that are not measured: the first one compiles.
WARM_UP_ROUNDS = 2
# Rounds of the pipeline whose idle share is predicted: so many that its beginning and its end do
# not count, because rounds stream.
STREAMED_ROUNDS = 50
TRACED_ROUNDS = 2
# The most by which rounds and peaks may differ from their predictions.
STEP_ERROR, PEAK_ERROR = 0.08, 0.05


class Work(NamedTuple):
    """What is trained. All tasks have random tokens, LoRA on all linears, and AdamW.

    Attributes:
      config: configuration of the backbone, whose bf16 weights are random.
      lengths: for each task, the tokens of its samples.
      batches: for each task, the samples of a global batch.
      rounds: number of rounds that are measured.
      row_len: tokens of a row; None lets the planner choose.
    """

    config: BackboneConfig
    lengths: Sequence[Sequence[int]]
    batches: Sequence[int]
    rounds: int
    row_len: int | None = None

    @classmethod
    def uniform(
        cls, config: BackboneConfig, args: argparse.Namespace, tasks: int, least: int, rounds: int
    ) -> "Work":
        """Equal tasks whose samples have `args.length` tokens, so that all microbatches are full.

        Args:
          config: configuration of the backbone.
          args: the options of the benchmark.
          tasks: number of tasks.
          least: the least number of microbatches in a round.
          rounds: number of rounds that are measured.
        """
        _, batch = round_size(tasks, args.length, args.tokens, least)
        lengths = [[args.length] * 2 * batch] * tasks
        return cls(config, lengths, [batch] * tasks, rounds, args.length)

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a round's samples."""
        pairs = zip(self.lengths, self.batches, strict=True)
        return sum(sum(own) * batch / len(own) for own, batch in pairs)

    def tasks(self, rank: int) -> list[PreparedTask]:
        """The tasks, with adapters of this rank, which outlast the rounds."""
        steps = WARM_UP_ROUNDS + self.rounds + 1 + TRACED_ROUNDS
        return [
            random_task(self.config, f"task{i}", lengths, batch, steps, rank, seed=i)
            for i, (lengths, batch) in enumerate(zip(self.lengths, self.batches, strict=True))
        ]


class Prediction(NamedTuple):
    """What the planner predicts of a training run.

    Attributes:
      shapes: for each replica, the shape class of its microbatches.
      seconds: seconds of a round.
      idle: share of the time in which stages have nothing to do, in an endless stream of rounds;
        None for several replicas.
    """

    shapes: tuple[ShapeClass, ...]
    seconds: float
    idle: float | None


class Measured(NamedTuple):
    """A training run.

    Attributes:
      times: seconds of each measured round.
      tokens: mean number of tokens of a round's samples.
      first: seconds from the start of the process's work to the end of the first round.
      peaks: peak memory in bytes of each device of this process; None where it is unknown.
      predicted_peaks: what the memory model says of these devices, with the remat policies of the
        run.
      device: kind of the devices.
      idle: for each stage of a pipeline, the share of the time in which it ran no kernel; empty
        where no GPU was traced.
      prediction: what the planner predicts.
    """

    times: list[float]
    tokens: float
    first: float
    peaks: list[int | None]
    predicted_peaks: list[float]
    device: str
    idle: list[float]
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.times)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def figure_of(
    run: Measured,
    name: str,
    value: float,
    bound: float | None,
    sense: str,
    unit: str,
    baselines: dict[str, Any],
) -> Record:
    """A record of a figure that a run gave."""
    versions = installed_versions("jax", "jaxlib")
    return make_figure(
        name, value, bound, unit, baselines, device=run.device, versions=versions, sense=sense
    )


def prediction_errors(run: Measured, name: str) -> Iterator[Record]:
    """The records of how well a run was predicted: its round, and the peak of each device."""
    of = {"measured, s": run.seconds, "predicted, s": run.prediction.seconds}
    error = abs(run.seconds / run.prediction.seconds - 1)
    quantity = f"{name}, round beside its prediction"
    yield figure_of(run, quantity, error, STEP_ERROR, "at most", "relative error", of)
    if all(run.peaks):
        pairs = list(zip(run.peaks, run.predicted_peaks, strict=True))
        error = max(abs(measured / predicted - 1) for measured, predicted in pairs)
        measured, predicted = ([own / 2**30 for own in peaks] for peaks in zip(*pairs, strict=True))
        of = {"measured, GiB": measured, "predicted, GiB": predicted}
        quantity = f"{name}, peak memory beside its prediction"
        yield figure_of(run, quantity, error, PEAK_ERROR, "at most", "relative error", of)


def measure_in(
    count: int, args: argparse.Namespace, work: Work, deployment: Deployment
) -> Measured:
    """`measure` in new processes, which divide the devices among them."""
    if count == 1:
        return in_own_process(partial(measure, args, work, deployment))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    calls = [
        partial(measure_as, i, count, coordinator, args, work, deployment) for i in range(count)
    ]
    with ThreadPoolExecutor() as threads:
        first, *_ = threads.map(in_own_process, calls)
    return first


def measure_as(
    index: int,
    count: int,
    coordinator: str,
    args: argparse.Namespace,
    work: Work,
    deployment: Deployment,
) -> Measured:
    """`measure` in process `index` of `count`."""
    each = deployment.devices // count
    if jax.config.jax_platforms != "cpu":
        own: list[int] | None = list(range(index * each, (index + 1) * each))
    else:
        own = None
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={each}"
    jax.distributed.initialize(coordinator, count, index, local_device_ids=own)
    return measure(args, work, deployment)


def measure(args: argparse.Namespace, work: Work, deployment: Deployment) -> Measured:
    """Trains on one device, or on several."""
    limit_memory(args.memory_gib)
    devices = jax.devices()[: deployment.devices]
    tasks, options = work.tasks(args.rank), run_options(args, work.row_len)
    fits = fits_of(tasks, work.config, options, deployment)
    prediction = predict(tasks, deployment, fits)
    started = time.perf_counter()
    backbone = random_backbone(work.config, deployment)
    with closing(Engine(backbone, engine_options(args, options, deployment, fits))) as engine:
        engine.register_tasks(tasks)
        engine.train_round()
        engine.drain()
        first, ends = time.perf_counter() - started, []
        for _ in range(WARM_UP_ROUNDS + work.rounds):
            # Returns when the devices have finished the previous round.
            engine.train_round()
            ends.append(time.perf_counter())
        is_pipeline = len(deployment.replicas) == 1 and deployment.replicas[0].pp > 1
        idle = trace_idle_shares(engine) if is_pipeline else []
        engine.drain()
        peaks = predicted_peaks(deployment, fits, engine)
    local = [i for i, device in enumerate(devices) if device in jax.local_devices()]
    return Measured(
        [after - before for before, after in pairwise(ends)][WARM_UP_ROUNDS - 1 :],
        work.tokens,
        first,
        [(devices[i].memory_stats() or {}).get("peak_bytes_in_use") for i in local],
        [peaks[i] for i in local],
        devices[0].device_kind,
        idle,
        prediction,
    )


def limit_memory(gib: float | None) -> None:
    """Lets JAX use only so much of each GPU's memory. Devices must not be in use yet."""
    if gib and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        total = min(map(int, found.split())) / 1024
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{gib / total:.4f}"


def run_options(args: argparse.Namespace, row_len: int | None = None) -> RunOptions:
    """The settings of a run like the one that is measured."""
    return RunOptions(
        dtype="bfloat16",
        tokens_per_microbatch=args.tokens,
        row_len=row_len,
        chunk_len=args.chunk_len,
        schedule=args.schedule,
        remat=args.remat,
        memory_gib=args.memory_gib,
    )


def fits_of(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    deployment: Deployment,
) -> dict[Replica, ReplicaFit]:
    """The shape class of each kind of replica, as `jaxmux train` chooses it.

    Raises:
      PlanningError: the tasks do not fit.
    """
    known, fits = bool(options.memory or device_memory()), {}
    for replica in deployment.counts:
        given = tasks, config, options, replica
        shares = round(deployment.devices / replica.devices)
        if len(deployment.replicas) > 1 and known:
            fits[replica] = fit_longest(*given, shares)
        else:
            fits[replica] = fit_replica(*given, shares=shares)
        if known:
            fits[replica].require(tasks)
    return fits


def predict(
    tasks: Sequence[PreparedTask], deployment: Deployment, fits: Mapping[Replica, ReplicaFit]
) -> Prediction:
    """What a training run would predict."""
    shapes = tuple(fits[replica].shape for replica in deployment.replicas)
    if len(deployment.replicas) > 1:
        return Prediction(shapes, replicas_seconds(tasks, deployment, fits), None)
    (fit,) = fits.values()
    pp = fit.costs.replica.pp
    grouping = grouping_of_tasks(fit.lengths, fit.shape, pp, schedule=fit.costs.schedule)
    rounds = [{i: own[0] for i, own in enumerate(fit.lengths)}] * STREAMED_ROUNDS
    stream = plan_with(grouping, rounds, fit.shape, fit.costs).simulation
    idle = 1 - float(stream.busy().sum()) / (pp * stream.makespan)
    return Prediction(shapes, fit.round_seconds(), idle)


def replicas_seconds(
    tasks: Sequence[PreparedTask], deployment: Deployment, fits: Mapping[Replica, ReplicaFit]
) -> float:
    """The predicted seconds of a round on several replicas."""
    batches = [task.batch_lengths for task in tasks]
    return predicted_round_seconds(batches, deployment, costs_of(fits))


def costs_of(fits: Mapping[Replica, ReplicaFit]) -> dict:
    """By replica, its costs and its shape class."""
    return {replica: (fit.costs, fit.shape) for replica, fit in fits.items()}


def predicted_peaks(
    deployment: Deployment, fits: Mapping[Replica, ReplicaFit], engine: Engine
) -> list[float]:
    """The peak memory of every device by the memory model, in bytes."""
    found = []
    for number, replica in enumerate(deployment.replicas):
        fit = fits[replica]
        # Replicas beside the first one have no policies that the engine tells.
        policies = engine.remat if number == 0 else fit.costs.policies(fit.shape)
        stages = fit.costs.stage_peaks(fit.shape, policies)
        found += [peak for peak in stages for _ in range(replica.stage.devices)]
    return found


def engine_options(
    args: argparse.Namespace,
    options: RunOptions,
    deployment: Deployment,
    fits: Mapping[Replica, ReplicaFit],
) -> EngineOptions:
    """The options of the engine."""
    shapes = tuple(fits[replica].shape for replica in deployment.replicas)
    several = len(shapes) > 1
    return EngineOptions(
        max(shapes, key=lambda shape: shape.row_len),
        remat=args.remat,
        memory=options.memory,
        schedule=args.schedule,
        replica_shapes=shapes if several else (),
        sequence_costs=ShapeCosts(costs_of(fits)) if several else None,
    )


def random_backbone(
    config: BackboneConfig, deployment: Deployment
) -> Backbone | list[PlacedBackbone]:
    """A backbone of random bf16 weights on one device, or on the first devices, one for each
    replica of the deployment. Pipeline stages get the layers that `jaxmux train` gives them."""
    if deployment.devices == 1:
        return Backbone.random(config, dtype=jnp.bfloat16)
    left, found = iter(jax.devices()), []
    for replica in deployment.replicas:
        homes = stage_meshes(replica, list(islice(left, replica.devices)), config)
        homes = list(homes) * replica.parts
        parts = consecutive_parts(size_of(config, jnp.bfloat16).part_layers(replica))
        found.append(random_placed_backbone(config, jnp.bfloat16, parts, homes))
    return found


def trace_idle_shares(engine: Engine) -> list[float]:
    """The share of the time in which each GPU runs no kernel, while rounds stream."""
    if jax.default_backend() != "gpu" or jax.process_count() > 1:
        return []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_ROUNDS):
                engine.train_round()
        return idle_shares(read_launches(trace_file(Path(folder))))
