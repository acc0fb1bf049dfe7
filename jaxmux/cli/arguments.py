"""The options of every command. This module does not import JAX, so that `--help` is fast."""

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from . import help_texts
from .generate_options import add_generate_options, check_generate_options
from .option_parsing import (
    add_config,
    command_parser,
    count,
    in_range,
    not_negative,
    not_negative_integer,
    parse_options,
    parse_with_bindings,
    path,
    port,
    seed,
)

# `BACKBONE_FORMATS` of jaxmux.models, repeated here because importing it would delay `--help`.
_FORMATS = ("float8", "int8", "nf4")

DEMO_CONFIG = "jaxmux:configs/demo.gin"
DEMO_SERVER_CONFIG = "jaxmux:configs/demo_server.gin"
# The default network interface of a run's page: only this machine.
_HOST = "127.0.0.1"
# Number of rounds of a plan if --rounds is not given and no global batch is large.
DEFAULT_ROUNDS = 8


def train_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """`bindings` of the result has the config's parameters as NAME=VALUE."""
    parser = command_parser(prog, help_texts.TRAIN, epilog=help_texts.CONFIG)
    add_config(parser)
    parser.add_argument(
        "--run_dir", type=path, metavar="DIR", help="default: runs/NAME of the last config"
    )
    parser.add_argument(
        "--restart", action="store_true", help="delete the files of earlier training first"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show where the time before the first step goes"
    )
    parser.add_argument(
        "--watch",
        metavar="DIR",
        help="train the tasks that tenants specify in this directory, until a signal comes",
    )
    parser.add_argument(
        "--ui",
        action="store_true",
        help="show the training on a local web page; needs pip install 'jaxmux[ui]'",
    )
    _add_address(parser)
    several = parser.add_argument_group(
        "several processes",
        "Every process runs the same command; fine_tune.mesh counts the devices of all.",
    )
    several.add_argument(
        "--distributed",
        action="store_true",
        help="join the other processes of this Slurm, Open MPI or Kubernetes job",
    )
    several.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="without such a job: address of process 0, with --processes and --process",
    )
    several.add_argument("--processes", type=count, metavar="N", help="number of processes")
    several.add_argument("--process", type=seed, metavar="I", help="number of this process, from 0")
    options = parse_with_bindings(parser, arguments)
    _check_processes(parser, options)
    if not options.ui and (options.port is not None or options.host != _HOST):
        parser.error("--host and --port are for the page of --ui")
    if options.watch == "":
        parser.error("--watch should name a directory")
    if options.watch and options.restart:
        parser.error("--restart is for training runs; a server continues, or gets a new --run_dir")
    if options.watch and is_one_of_several(options):
        parser.error("--watch serves in one process; leave the options of several processes out")
    return options


def is_one_of_several(options: argparse.Namespace) -> bool:
    """Whether the command, given its options, is one of several processes."""
    return bool(getattr(options, "distributed", False) or getattr(options, "coordinator", None))


def _check_processes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with a message if the options for several processes contradict each other."""
    values = [options.coordinator, options.processes, options.process]
    if None in values and any(value is not None for value in values):
        parser.error("--coordinator, --processes and --process belong together")
    if options.coordinator is None:
        return
    if options.distributed:
        parser.error("--distributed finds the coordinator by itself; leave one of the two out")
    port = options.coordinator.rpartition(":")[2]
    if not re.fullmatch(r".+:[0-9]{1,5}", options.coordinator) or int(port) >= 2**16:
        parser.error(f"--coordinator should be HOST:PORT, found {options.coordinator!r}")
    if options.process >= options.processes:
        parser.error(
            f"--process {options.process} of --processes {options.processes}: the last process is "
            f"number {options.processes - 1}"
        )


def plan_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """`bindings` of the result has the config's parameters as NAME=VALUE."""
    parser = command_parser(prog, help_texts.PLAN)
    add_config(parser)
    parser.add_argument(
        "--mesh",
        help="devices, e.g. pp4,tp2 or dp2,pp2, or several replicas, e.g. 'pp2 + 2*(tp1)'; "
        "default: fine_tune.mesh of the config, or one device",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="plan for another device: a profile of `jaxmux profile`, whose dtype is the plan's "
        "unless fine_tune.dtype says otherwise, or h200 or h100, whose profiles ship; default: "
        "the device of this machine, and with --fits an H200",
    )
    parser.add_argument(
        "--rounds",
        type=count,
        metavar="N",
        help=f"rounds to plan; default: {DEFAULT_ROUNDS}, or fewer for large global batches",
    )
    parser.add_argument(
        "--out",
        type=path,
        metavar="DIR",
        help="write plan.json, schedule.png and trace.json here, or with --fits fits.json",
    )
    fits = parser.add_argument_group("what fits")
    fits.add_argument(
        "--fits",
        type=_device_gib,
        metavar="GIB",
        help="show what fits on one device with this memory, as nvidia-smi tells it, e.g. 24",
    )
    fits.add_argument(
        "--backbone", metavar="DIR", help="folder with a config.json; default: the config's"
    )
    options = parse_with_bindings(parser, arguments)
    if options.fits and (options.mesh or options.rounds):
        parser.error("--fits is for one device and plans no rounds; leave --mesh and --rounds out")
    if options.backbone and not options.fits:
        parser.error("--backbone is for --fits; a plan takes the backbone of its config")
    options.is_demo = not options.gin_file and not options.backbone
    if options.is_demo:
        options.gin_file = [DEMO_CONFIG]
    return options


def data_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    """`bindings` of the result has the config's parameters as NAME=VALUE."""
    parser = command_parser(prog, help_texts.DATA)
    add_config(parser)
    parser.add_argument("--task", action="append", help="may be repeated; default: all tasks")
    parser.add_argument(
        "--samples",
        type=not_negative_integer,
        default=3,
        metavar="N",
        help="samples or pairs to show of each source; default: 3",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead")
    options = parse_with_bindings(parser, arguments)
    options.is_demo = not options.gin_file
    options.gin_file = options.gin_file or [DEMO_CONFIG]
    return options


def profile_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = command_parser(prog, help_texts.PROFILE)
    backbone = parser.add_mutually_exclusive_group(required=True)
    backbone.add_argument(
        "--backbone", metavar="DIR", help="checkpoint folder; only its config.json is read"
    )
    backbone.add_argument("--config", metavar="FILE", help="a config.json")
    parser.add_argument(
        "--out",
        type=path,
        metavar="FILE",
        help="the profile to write, or with --check the comparison; required without --check",
    )
    parser.add_argument(
        "--check", type=Path, metavar="PROFILE", help="compare predictions of this profile"
    )
    parser.add_argument(
        "--seconds",
        type=not_negative,
        default=0.5,
        help="duration of one measurement; default: 0.5",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="default: bfloat16 on an accelerator, float32 on a CPU",
    )
    parser.add_argument(
        "--backbone_format",
        choices=_FORMATS,
        help="format of the linears' weights, as fine_tune.backbone_format; plans use the profile "
        "for backbones in this format only; default: the dtype",
    )
    grid = parser.add_argument_group("values to measure", "The default depends on the device.")
    for name, meaning in (
        ("tokens", "tokens of a microbatch"),
        ("row_lens", "tokens of a row"),
        ("chunk_lens", "tokens of a chunk"),
        ("ranks", "ranks of the pool"),
        ("slots", "slots of the pool, all with a task"),
    ):
        grid.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=meaning)
    check = parser.add_argument_group("options of --check")
    check.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="CASE",
        help="TASKSxLENGTHxRANKxTOKENS[xROW_LENGTH], e.g. 3x2048x32x6144",
    )
    check.add_argument("--layers", type=count, metavar="N", help="default: all layers")
    options = parse_options(parser, arguments)
    if not options.check and not options.out:
        parser.error("--out is required: the file for the profile")
    return options


def generate_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = command_parser(prog, help_texts.GENERATE)
    add_generate_options(parser)
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "bfloat16", "float32"), help="default: auto"
    )
    parser.add_argument(
        "--backbone_format",
        choices=_FORMATS,
        help="format of the linears' weights, as fine_tune.backbone_format; default: as stored",
    )
    options = parse_options(parser, arguments)
    check_generate_options(parser, options)
    return options


def eval_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = command_parser(prog, help_texts.EVAL)
    _add_held_out(parser, "take the first N samples or pairs")
    parser.add_argument(
        "--max_new_tokens",
        type=seed,
        metavar="N",
        help="most tokens of a completion, 0 to measure losses only; default: as many as the "
        "longest reference has",
    )
    parser.add_argument("--out", type=path, metavar="FILE", help="write the results as JSON")
    options = parse_options(parser, arguments)
    _check_held_out(parser, options, needed=("backbone", "adapter", "data"))
    return options


def score_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = command_parser(prog, help_texts.SCORE, epilog=help_texts.SCORE_LINE)
    _add_held_out(parser, "take the first N records of each file only")
    parser.add_argument(
        "--tokens",
        action="store_true",
        help="add the tokens of each sample and their log-probabilities",
    )
    parser.add_argument(
        "--out",
        type=path,
        metavar="FILE",
        help="write the lines to this file, which appears when it is complete; default: standard "
        "output",
    )
    options = parse_options(parser, arguments)
    _check_held_out(parser, options, needed=("backbone", "data"))
    return options


def _add_held_out(parser: argparse.ArgumentParser, limit: str) -> None:
    """Adds the options that name the backbone, the adapters and their data. `limit` describes
    --limit."""
    parser.add_argument("--run_dir", metavar="DIR", help="run directory of `jaxmux train`")
    parser.add_argument(
        "--task", action="append", metavar="NAME", help="may be repeated; default: all tasks"
    )
    parser.add_argument(
        "--data",
        action="append",
        metavar="FILE",
        help="file of records; may be repeated; default: the held-out data of each task",
    )
    parser.add_argument("--limit", type=count, metavar="N", help=f"{limit}; default: all")
    group = parser.add_argument_group("without --run_dir")
    group.add_argument("--backbone", metavar="DIR", help="checkpoint folder")
    group.add_argument(
        "--adapter",
        action="append",
        metavar="[NAME=]DIR",
        help="adapter folder; may be repeated; default of NAME: the folder's name",
    )
    group.add_argument(
        "--max_length", type=count, metavar="N", help="most tokens of a sample; default: 1024"
    )
    group.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), help="default: auto")
    group.add_argument(
        "--backbone_format",
        choices=_FORMATS,
        help="format of the linears' weights, as fine_tune.backbone_format; default: as stored",
    )


def _check_held_out(
    parser: argparse.ArgumentParser, options: argparse.Namespace, needed: Sequence[str]
) -> None:
    """Exits with a message if options contradict each other, or if one of `needed` is missing
    without --run_dir. Sets the defaults of options that a run directory tells."""
    names = ("backbone", "adapter", "max_length", "dtype", "backbone_format")
    superfluous = [name for name in names if getattr(options, name)]
    if options.run_dir and superfluous:
        parser.error(f"--{superfluous[0]}: the run directory tells it; leave it or --run_dir out")
    if not options.run_dir and options.task:
        parser.error("--task is for --run_dir")
    if not options.run_dir and not all(getattr(options, name) for name in needed):
        *first, last = [f"--{name}" for name in needed]
        parser.error(f"give --run_dir, or {', '.join(first)} and {last}")
    options.max_length, options.dtype = options.max_length or 1024, options.dtype or "auto"


def export_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = command_parser(
        prog, "Writes Hugging Face PEFT adapters from the checkpoints of training."
    )
    parser.add_argument(
        "--run_dir",
        type=path,
        required=True,
        metavar="DIR",
        help="run directory of `jaxmux train`",
    )
    parser.add_argument(
        "--out",
        type=path,
        required=True,
        metavar="DIR",
        help="a folder for each task is written here",
    )
    parser.add_argument("--task", action="append", help="may be repeated; default: all tasks")
    parser.add_argument(
        "--round",
        type=count,
        metavar="N",
        help="the checkpoint taken after this round (a round is one global batch of every task "
        "that still trains); default: the newest checkpoint",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace adapters that --out holds already"
    )
    parser.add_argument(
        "--serving",
        action="store_true",
        help="fold the scale into B and set lora_alpha to the rank, for servers without rsLoRA",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="write whole checkpoints, with the adapter merged into the weights of the backbone "
        "(all kinds but Bottleneck and PromptTuning)",
    )
    options = parse_options(parser, arguments)
    if options.merge and options.serving:
        parser.error(
            "--serving is for adapters, and --merge writes whole checkpoints, which any server "
            "loads; leave one of them out"
        )
    return options


def ui_options(arguments: Sequence[str], prog: str) -> argparse.Namespace:
    parser = command_parser(prog, help_texts.UI)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="run directory of `jaxmux train`")
    _add_address(parser)
    # Only `jaxmux train --ui` gives this option.
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parse_options(parser, arguments)


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default=_HOST,
        help="network interface of the page, e.g. 0.0.0.0 for all: whoever reaches it can see the "
        f"run; default: {_HOST}, this machine alone",
    )
    parser.add_argument(
        "--port",
        type=port,
        metavar="N",
        help="port of the page, 0 for any; default: the first free one from 6006 on",
    )


# For each command, one line of help, and the function that parses its options. The function takes
# the arguments and the program name that the help shows.
COMMANDS: dict[str, tuple[str, Callable[[Sequence[str], str], argparse.Namespace]]] = {
    "train": ("train the tasks of a config together and export their adapters", train_options),
    "plan": ("show a plan for training a config on devices that need not exist", plan_options),
    "data": ("show what the tasks of a config train on, and check it", data_options),
    "profile": ("measure this machine's devices for the planner's cost models", profile_options),
    "generate": ("complete prompts, or chat, with a backbone and adapters", generate_options),
    "eval": ("compare adapters with the bare backbone on held-out data", eval_options),
    "score": ("write log-probabilities of data under a backbone and adapters", score_options),
    "ui": ("show a training run on a local web page", ui_options),
    "export": ("write adapters from the checkpoints of training", export_options),
}


# On a smaller device, the memory that JAX and the engine use besides training would take
# everything.
_device_gib = in_range(float, 2, 1e6, "a size in GiB of at least 2")
