"""Training throughput of meshes of several GPUs beside one GPU.

  NCCL_NVLS_ENABLE=0 python scripts/benchmark_sharding.py --out benchmarks/sharding_h200.json \
      --meshes pp2 dp2 fsdp2 tp2 "2*(tp1)"

The backbone has the shape of Llama-3.1-8B and random bf16 weights. The tasks have random tokens,
LoRA of rank 16 on all linears, and AdamW. A round has `--microbatches` full microbatches of 8,192
tokens. One GPU and the meshes train the same tasks, one after the other, in processes of their own;
a time is the median over rounds.

With `--processes 2`, every mesh is also trained by two processes, each with its part of the GPUs.

The rounds of a mesh and its peak memory are compared with the predictions by which `jaxmux train`
chooses meshes. For a pipeline, a trace of two more rounds tells in which share of the time a stage
runs no kernel.

A record has a name, a value, a bound with its sense ("at least" or "at most"), a unit, and the
figures that it was made from.

For a dry run on CPU:

  XLA_FLAGS=--xla_force_host_platform_device_count=4 python scripts/benchmark_sharding.py \
      --out /tmp/dry.json --meshes pp2 tp2 --tokens 128 --chunk_len 64 --length 64 --layers 4 \
      --hidden 256 --vocab 512 --rounds 3
"""

import argparse
import json
import os
import shlex
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from benchmark_step import in_own_process, llama_config, round_size
from gpu_trace import idle_shares, read_launches, trace_file

from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.engine.backbone_size import size_of
from jaxmux.installed_versions import installed_versions
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.planner.devices import ONE_DEVICE, Deployment
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.pipeline import grouping_of_tasks, plan_with
from jaxmux.profiling import in_other_names, random_task
from jaxmux.runs import RunOptions
from jaxmux.runs.replica_fit import fit_replica
from jaxmux.sharding import (
    PlacedBackbone,
    consecutive_parts,
    random_placed_backbone,
    stage_meshes,
)

# Rounds that are not measured: the first one compiles.
WARM_UP_ROUNDS = 2
# The share of perfect scaling that each axis should reach. Tensor parallelism and fully sharded
# data parallelism are for backbones that do not fit otherwise; they should at least lose nothing.
# Replicas side by side should reach what data parallelism does.
LEAST_SHARE = {"pp": 3.3 / 4, "dp": 3.85 / 4, "fsdp": 0.5, "tp": 0.5}
LEAST_SHARE_OF_REPLICAS = LEAST_SHARE["dp"]
# The most by which rounds and peaks may differ from their predictions, and the most of the time in
# which a stage may run no kernel: in total, and more than in the plan.
STEP_ERROR, PEAK_ERROR, IDLE, MORE_IDLE = 0.08, 0.05, 0.09, 0.03
# Rounds of the pipeline whose idle share is predicted: so many that its beginning and its end do
# not count, because rounds stream.
STREAMED_ROUNDS = 50
TRACED_ROUNDS = 2


class Prediction(NamedTuple):
    """What the planner predicts of a training run.

    Attributes:
      shape: shape class of the microbatches.
      seconds: seconds of a round.
      peak: bytes of a device of the stage that needs most.
      idle: share of the time in which stages have nothing to do, in an endless stream of rounds.
    """

    shape: ShapeClass
    seconds: float
    peak: float
    idle: float


class Measured(NamedTuple):
    """A training run.

    Attributes:
      seconds: median seconds of a round.
      tokens: tokens of a round.
      microbatches: microbatches of a round.
      first: seconds from the start of the process's work to the end of the first round.
      peaks: peak memory of each device of this process in bytes; None where it is unknown.
      device: kind of the devices.
      idle: for each stage of a pipeline, the share of the time in which it ran no kernel; empty
        where no GPU was traced.
      prediction: what the planner predicts.
    """

    seconds: float
    tokens: int
    microbatches: int
    first: float
    peaks: list[int | None]
    device: str
    idle: list[float]
    prediction: Prediction


def main() -> None:
    args = parse_arguments()
    one = in_own_process(partial(measure, args, Deployment((ONE_DEVICE,))))
    records = []
    for mesh in args.meshes:
        deployment = Deployment.parse(mesh)
        for processes in sorted({1, args.processes}):
            several = measure_in(processes, args, deployment)
            made = make_records(args, one, mesh, processes, several)
            records += made
            args.out.write_text(json.dumps(records, indent=1) + "\n")
            print(json.dumps(made, indent=1), flush=True)


def measure_in(count: int, args: argparse.Namespace, deployment: Deployment) -> Measured:
    """`measure` in new processes, which divide the devices among them."""
    if count == 1:
        return in_own_process(partial(measure, args, deployment))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    calls = [partial(measure_as, i, count, coordinator, args, deployment) for i in range(count)]
    with ThreadPoolExecutor() as threads:
        first, *_ = threads.map(in_own_process, calls)
    return first


def measure_as(
    index: int, count: int, coordinator: str, args: argparse.Namespace, deployment: Deployment
) -> Measured:
    """`measure` in process `index` of `count`."""
    each = deployment.devices // count
    if jax.config.jax_platforms != "cpu":
        own: list[int] | None = list(range(index * each, (index + 1) * each))
    else:
        own = None
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={each}"
    jax.distributed.initialize(coordinator, count, index, local_device_ids=own)
    return measure(args, deployment)


def make_records(
    args: argparse.Namespace, one: Measured, mesh: str, processes: int, several: Measured
) -> list[dict[str, Any]]:
    """The records of a mesh: its speed beside one GPU, and how well it was predicted."""
    deployment, predicted = Deployment.parse(mesh), several.prediction
    sizes = [replica.sizes for replica in deployment.replicas]
    shares = [LEAST_SHARE[axis] for own in sizes for axis, size in own.items() if size > 1]
    beside = f" in {processes} processes" if processes > 1 else ""
    if len(sizes) > 1:
        shares.append(LEAST_SHARE_OF_REPLICAS)
    name = f"8B shape, {mesh}{beside}, {args.tasks} tasks"
    common = {
        "command": shlex.join(["python", *sys.argv]),
        "device": several.device,
        "versions": installed_versions("jax", "jaxlib"),
    }
    speed = {
        "name": f"{name}, over one GPU",
        "value": one.seconds / several.seconds,
        "bound": min(shares) * deployment.devices,
        "sense": "at least",
        "unit": "ratio of tokens per second",
        **common,
        "baselines": {
            "one GPU, tokens/s": one.tokens / one.seconds,
            "mesh, tokens/s": several.tokens / several.seconds,
            "microbatches of a round": one.microbatches,
            "seconds to the end of the first round, one GPU": one.first,
            "seconds to the end of the first round, mesh": several.first,
            "peak memory of each device, GiB": [p and p / 2**30 for p in several.peaks],
            "peak memory of one GPU, GiB": [p and p / 2**30 for p in one.peaks],
        },
    }
    if len(sizes) > 1:
        return [speed]

    def error(quantity: str, unit: str, measured: float, of: float, bound: float) -> dict[str, Any]:
        return {
            "name": f"{name}, {quantity} beside its prediction",
            "value": abs(measured / of - 1),
            "bound": bound,
            "sense": "at most",
            "unit": "relative error",
            **common,
            "baselines": {f"measured, {unit}": measured, f"predicted, {unit}": of},
        }

    records = [speed, error("round", "s", several.seconds, predicted.seconds, STEP_ERROR)]
    if all(several.peaks):
        peak = max(several.peaks) / 2**30
        records.append(error("peak memory", "GiB", peak, predicted.peak / 2**30, PEAK_ERROR))
    if several.idle:
        idle = statistics.mean(several.idle)
        records.append(
            {
                "name": f"{name}, idle share of stage time",
                "value": idle,
                "bound": min(IDLE, predicted.idle + MORE_IDLE),
                "sense": "at most",
                "unit": "share of the time",
                **common,
                "baselines": {"of each stage": several.idle, "in the plan": predicted.idle},
            }
        )
    return records


def measure(args: argparse.Namespace, deployment: Deployment) -> Measured:
    """Trains on one device, or on a mesh of several."""
    config, devices = llama_config(args), jax.devices()[: deployment.devices]
    microbatches, batch = round_size(args.tasks, args.length, args.tokens, args.microbatches)
    # Every run takes equally long, because a GPU slows down when it reaches its power limit.
    rounds = WARM_UP_ROUNDS + args.rounds * deployment.devices
    steps = rounds + 1 + TRACED_ROUNDS
    task = random_task(config, "task0", [args.length] * 2 * batch, batch, steps, args.rank)
    tasks = in_other_names(task, args.tasks)
    prediction = predict(args, tasks, config, deployment)
    started = time.perf_counter()
    backbone = random_backbone(config, deployment)
    options = EngineOptions(prediction.shape, remat=args.remat, schedule=args.schedule)
    with closing(Engine(backbone, options)) as engine:
        engine.register_tasks(tasks)
        engine.train_round()
        engine.drain()
        first, ends = time.perf_counter() - started, []
        for _ in range(rounds):
            # Returns when the devices have finished the previous round.
            engine.train_round()
            ends.append(time.perf_counter())
        idle = trace_idle_shares(engine) if deployment.replicas[0].pp > 1 else []
        engine.drain()
        times = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return Measured(
        statistics.median(times[WARM_UP_ROUNDS - 1 :]),
        microbatches * prediction.shape.tokens,
        microbatches,
        first,
        [
            (device.memory_stats() or {}).get("peak_bytes_in_use")
            for device in devices
            if device in jax.local_devices()
        ],
        devices[0].device_kind,
        idle,
        prediction,
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
        parts = consecutive_parts(size_of(config, jnp.bfloat16).stage_layers(replica))
        found.append(random_placed_backbone(config, jnp.bfloat16, parts, homes))
    return found


def predict(
    args: argparse.Namespace,
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    deployment: Deployment,
) -> Prediction:
    """What a training run would predict for the first replica."""
    options = RunOptions(
        dtype="bfloat16",
        tokens_per_microbatch=args.tokens,
        row_len=args.length,
        chunk_len=args.chunk_len,
        remat=args.remat,
    )
    replica = deployment.replicas[0]
    fit = fit_replica(tasks, config, options, replica, shares=len(deployment.replicas))
    shape, costs = fit.shape, fit.costs
    peak = costs.peak(shape, costs.policies(shape), replica.pp)
    grouping = grouping_of_tasks(fit.lengths, shape, replica.pp)
    rounds = [{i: own[0] for i, own in enumerate(fit.lengths)}] * STREAMED_ROUNDS
    stream = plan_with(grouping, rounds, shape, costs).simulation
    idle = 1 - float(stream.busy().sum()) / (replica.pp * stream.makespan)
    return Prediction(shape, fit.round_seconds(), peak, idle)


def trace_idle_shares(engine: Engine) -> list[float]:
    """The share of the time in which each GPU runs no kernel, while rounds stream."""
    if jax.default_backend() != "gpu" or jax.process_count() > 1:
        return []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(TRACED_ROUNDS):
                engine.train_round()
        return idle_shares(read_launches(trace_file(Path(folder))))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meshes", nargs="+", default=["pp2"])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16, help="of a round, at least")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", default="auto")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    return parser.parse_args()


if __name__ == "__main__":
    main()
