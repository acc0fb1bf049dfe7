"""Training on several GPUs beside one GPU, and beside what the planner predicts.

  NCCL_NVLS_ENABLE=0 python scripts/benchmark_sharding.py --out benchmarks/sharding_h200.json \
      --devices 4 --figures meshes turns overlap large_overlap large replicas start \
      --rounds 3 --lengths lengths.json

The records go into the file, in place of those with the same names, as soon as they are measured;
so the figures can also be measured by several calls. All runs are processes of their own. The
figures are:

- meshes: throughput of `--meshes`, by default "dp" and "pp" of all devices, over one GPU. The
  backbone has the shape of Llama-3.1-8B and random bf16 weights; the tasks have random tokens, LoRA
  of rank 16 on all linears, and AdamW. A round has `--microbatches` full microbatches of 8,192
  tokens; a time is the median over rounds. Rounds and peak memory are compared with the predictions
  by which `jaxmux train` chooses meshes. For a pipeline, a trace of two more rounds tells in which
  share of the time a stage runs no kernel. With `--processes 2`, every mesh is also trained by two
  processes, each with its part of the GPUs.
- turns: the same pipeline with eight microbatches of every task, over one task after another with
  1F1B, whose pipeline is empty at every update.
- schedules: seconds of a round of the same tasks in a pipeline of all devices, with each schedule
  of `jaxmux train`. GPipe needs a named remat policy; with `--remat auto` it recomputes everything.
- overlap, large_overlap: the share of tensor parallelism's sums that runs beside products, for
  layers of 8B and of 70B (sharding_overlap.py).
- large: a backbone of 70B in the layout that the planner chooses, beside the next best ones.
- replicas: LobRA's mix of tasks on unlike replicas over like ones, with 40 GiB of each GPU;
  `--lengths` names a file of lengths as for benchmark_planner.py, which proves how much any
  replicas can gain.
- start: seconds from the start of `jaxmux train` to the end of its first step.

For a dry run on CPU:

  XLA_FLAGS=--xla_force_host_platform_device_count=4 python scripts/benchmark_sharding.py \
      --out /tmp/dry.json --devices 4 --figures meshes turns schedules overlap large_overlap large \
      replicas start --tokens 128 --chunk_len 64 --length 64 --layers 4 --hidden 512 --vocab 512 \
      --rounds 1 --tasks 2 --microbatches 4 --large_layers 4 --large_hidden 1024 --memory_gib 8 \
      --context 128 --replica_gib 8 --lengths lengths.json --settings 0:0 --overlap_layers 2
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmark_command import make_backbone
from benchmark_records import Record, replace_records
from benchmark_step import in_own_process, llama_config
from sharding_layouts import large_records, replica_records
from sharding_overlap import Setting, overlap_records
from sharding_runs import Measured, Work, figure_of, measure, measure_in, prediction_errors
from start_records import start_records

from jaxmux.models import BackboneConfig
from jaxmux.planner.devices import ONE_DEVICE, SCHEDULES, Deployment

# The share of perfect scaling that each axis should reach. Tensor parallelism and fully sharded
# data parallelism are for backbones that do not fit otherwise; they should at least lose nothing.
# Replicas side by side should reach what data parallelism does.
LEAST_SHARE = {"pp": 3.3 / 4, "dp": 3.85 / 4, "fsdp": 0.5, "tp": 0.5}
LEAST_SHARE_OF_REPLICAS = LEAST_SHARE["dp"]
# The most of the time in which a stage may run no kernel: in total, and more than in the plan.
IDLE, MORE_IDLE = 0.09, 0.03
# Microbatches of a task's global batch where tasks take turns, and the least that this gains.
OF_A_TASK, LEAST_OVER_TURNS = 8, 1.25
# Vocabulary of the backbones whose layers are measured.
SMALL_VOCABULARY = 4096


def main() -> None:
    args = parse_arguments()
    for name in args.figures:
        for record in FIGURES[name](args):
            replace_records(args.out, record["name"], [record])
            print(json.dumps(record, indent=1), flush=True)


def mesh_records(args: argparse.Namespace) -> Iterator[Record]:
    """Every mesh beside one GPU."""

    def work(devices: int) -> Work:
        # Every run takes equally long, because a GPU slows down when it reaches its power limit.
        given = args.tasks, args.microbatches, args.rounds * devices
        return Work.uniform(llama_config(args), args, *given)

    one = in_own_process(partial(measure, args, work(1), Deployment((ONE_DEVICE,))))
    for mesh in args.meshes:
        deployment = Deployment.parse(mesh)
        for processes in sorted({1, args.processes}):
            run = measure_in(processes, args, work(deployment.devices), deployment)
            yield from records_of_mesh(args, one, mesh, processes, run)


def records_of_mesh(
    args: argparse.Namespace, one: Measured, mesh: str, processes: int, several: Measured
) -> Iterator[Record]:
    """The speed of a mesh beside one GPU, and how well it was predicted."""
    deployment, predicted = Deployment.parse(mesh), several.prediction
    sizes = [replica.sizes for replica in deployment.replicas]
    shares = [LEAST_SHARE[axis] for own in sizes for axis, size in own.items() if size > 1]
    beside = f" in {processes} processes" if processes > 1 else ""
    if len(sizes) > 1:
        shares.append(LEAST_SHARE_OF_REPLICAS)
    name = f"8B shape, {mesh}{beside}, {args.tasks} tasks"
    yield figure_of(
        several,
        f"{name}, over one GPU",
        one.seconds / several.seconds,
        min(shares) * deployment.devices,
        "at least",
        "ratio of tokens per second",
        {
            "one GPU, tokens/s": one.tokens_per_second,
            "mesh, tokens/s": several.tokens_per_second,
            "microbatches of a round": round(one.tokens / args.tokens),
            "seconds to the end of the first round, one GPU": one.first,
            "seconds to the end of the first round, mesh": several.first,
            "peak memory of each device, GiB": [p and p / 2**30 for p in several.peaks],
            "peak memory of one GPU, GiB": [p and p / 2**30 for p in one.peaks],
        },
    )
    yield from prediction_errors(several, name)
    if several.idle:
        yield figure_of(
            several,
            f"{name}, idle share of stage time",
            statistics.mean(several.idle),
            min(IDLE, predicted.idle + MORE_IDLE),
            "at most",
            "share of the time",
            {"of each stage": several.idle, "in the plan": predicted.idle},
        )


def turn_records(args: argparse.Namespace) -> Iterator[Record]:
    """All tasks in a pipeline without a gap, beside 1F1B for one task after another. With a single
    task, a round begins when the update of the round before has ended."""
    mesh, rounds = f"pp{args.devices}", args.rounds * args.devices

    def train(tasks: int) -> Measured:
        given = tasks, tasks * OF_A_TASK, rounds
        work = Work.uniform(llama_config(args), args, *given)
        return in_own_process(partial(measure, args, work, Deployment.parse(mesh)))

    together, alone = train(args.tasks), train(1)
    yield figure_of(
        together,
        f"8B shape, {mesh}, {args.tasks} tasks, over 1F1B task after task",
        args.tasks * alone.seconds / together.seconds,
        LEAST_OVER_TURNS,
        "at least",
        "ratio of tokens per second",
        {
            "all tasks, tokens/s": together.tokens_per_second,
            "one task, tokens/s": alone.tokens_per_second,
            "one task, microbatches of a round": round(alone.tokens / args.tokens),
            "all tasks, idle share of each stage": together.idle,
            "one task, idle share of each stage": alone.idle,
        },
    )


def schedule_records(args: argparse.Namespace) -> Iterator[Record]:
    """Every schedule in the same pipeline, beside "auto"."""
    mesh, runs = f"pp{args.devices}", {}
    work = Work.uniform(llama_config(args), args, args.tasks, args.microbatches, args.rounds)
    for schedule in SCHEDULES:
        is_auto_gpipe = schedule == "gpipe" and args.remat == "auto"
        remat = "full" if is_auto_gpipe else args.remat
        chosen = argparse.Namespace(**vars(args) | {"schedule": schedule, "remat": remat})
        deployment = Deployment.parse(mesh).following(schedule)
        runs[schedule] = run = in_own_process(partial(measure, chosen, work, deployment))
        yield figure_of(
            run,
            f"8B shape, {mesh}, {args.tasks} tasks, schedule {schedule}",
            run.seconds,
            None,
            "at most",
            "seconds of a round",
            {
                "over auto": run.seconds / runs["auto"].seconds,
                "predicted, s": run.prediction.seconds,
                "idle share of each stage": run.idle,
                "idle share in the plan": run.prediction.idle,
                "peak memory of each device, GiB": [p and p / 2**30 for p in run.peaks],
                "remat": remat,
            },
        )


def hidden_records(
    name: str, config_of: Callable[[argparse.Namespace], BackboneConfig], args: argparse.Namespace
) -> Iterator[Record]:
    """The hidden share of the sums, for a few layers of a backbone."""
    config = config_of(args)
    vocabulary = min(SMALL_VOCABULARY, config.vocab_size)
    few = dataclasses.replace(config, num_layers=args.overlap_layers, vocab_size=vocabulary)
    given = args.tasks, args.microbatches, args.rounds * args.devices
    yield from overlap_records(args, name, Work.uniform(few, args, *given))


def large_config(args: argparse.Namespace) -> BackboneConfig:
    """The shape of Llama-3.1-70B."""
    sizes = {"hidden": args.large_hidden, "layers": args.large_layers, "vocab": args.vocab}
    config = llama_config(argparse.Namespace(**sizes))
    heads = max(1, args.large_hidden // 1024)
    return dataclasses.replace(config, num_kv_heads=heads, backbone_format=args.large_format)


def records_of_large(args: argparse.Namespace) -> Iterator[Record]:
    given = args.tasks, args.microbatches, args.rounds
    yield from large_records(args, Work.uniform(large_config(args), args, *given))


def records_of_start(args: argparse.Namespace) -> Iterator[Record]:
    mesh = f"pp{args.devices}"
    settings = [f"fine_tune.mesh = '{mesh}'", f"fine_tune.tokens_per_microbatch = {args.tokens}"]
    with tempfile.TemporaryDirectory() as name:
        make_backbone(Path(name) / "backbone", args)
        shape = f"8B shape, {mesh}, {args.tasks} tasks"
        yield from start_records(Path(name), args, shape, settings, (None, 60.0))


def records_of_replicas(args: argparse.Namespace) -> Iterator[Record]:
    yield from replica_records(args, llama_config(args))


FIGURES: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "meshes": mesh_records,
    "turns": turn_records,
    "schedules": schedule_records,
    "overlap": partial(hidden_records, "8B", llama_config),
    "large_overlap": partial(hidden_records, "70B", large_config),
    "large": records_of_large,
    "replicas": records_of_replicas,
    "start": records_of_start,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", nargs="+", default=["meshes"], choices=FIGURES)
    parser.add_argument("--devices", type=int, default=2, help="of all figures but meshes")
    parser.add_argument("--meshes", nargs="+", help="default: dp and pp of all devices")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--schedule", default="auto", choices=SCHEDULES, help="of a pipeline")
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="of a microbatch")
    parser.add_argument("--chunk_len", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=16, help="of a round, at least")
    parser.add_argument("--rounds", type=int, default=8, help="times the devices where they scale")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--remat", default="auto")
    parser.add_argument("--memory_gib", type=float, help="memory of a GPU that JAX may use")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--large_layers", type=int, default=80)
    parser.add_argument("--large_hidden", type=int, default=8192)
    parser.add_argument("--large_format", help="backbone format of the 70B shape, e.g. float8")
    parser.add_argument("--others", type=int, default=2, help="layouts beside the chosen one")
    parser.add_argument("--overlap_layers", type=int, default=4)
    parser.add_argument(
        "--settings",
        nargs="+",
        type=Setting.parse,
        default=[Setting(0, 0), Setting(8, 8), Setting(16, 16)],
        help="of overlap: multiprocessors that kernels leave free : NCCL_MAX_CTAS (0: unset)",
    )
    parser.add_argument("--lengths", type=Path, help="tokens of samples by data set, for replicas")
    parser.add_argument("--context", type=int, default=16384, help="longest sample of replicas")
    parser.add_argument("--replica_gib", type=float, default=40)
    args = parser.parse_args()
    args.meshes = args.meshes or [f"dp{args.devices}", f"pp{args.devices}"]
    if "replicas" in args.figures and not args.lengths:
        parser.error("--figures replicas needs --lengths")
    return args


if __name__ == "__main__":
    main()
