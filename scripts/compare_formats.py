"""What formats of the backbone do to the quality of adapters: the demo's tasks in every format.

  make .venv/installed .venv-peft/installed
  .venv/bin/python scripts/compare_formats.py --out benchmarks/format_quality.json

Every task of the demo is trained with every format and several seeds, which draw the initial
adapters and the order of samples, on two really trained models: the demo's base, and stories260k
below `--shared`, if it is there. The figure of a task and a format is the mean logarithm of its
held-out loss less that of the plain backbone, in standard errors of that difference: above two, the
format is worse than the plain backbone, and below it cannot be told from the plain backbone. nf4 is
compared in the same way with PEFT on a base in the nf4 of bitsandbytes, which peft_on_nf4.py trains
on the same batches. The divergence of a format is the mean over positions of held-out texts of
KL(p | q), for the next-token distributions p of the plain backbone and q of the backbone in the
format, without adapters. The plot shows the training losses on the demo's base.

A run takes one to three minutes, all 40 of them more than an hour on two cores. Runs that are
complete in `--runs` are not repeated. `--models` chooses a model; records of the other are kept.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_records import Record, make_figure, replace_records
from matplotlib.figure import Figure

from jaxmux.data import load_tokenizer
from jaxmux.generation.programs import prompts_in_rows
from jaxmux.installation import installed_versions, resolve_path
from jaxmux.models import (
    BACKBONE_FORMATS,
    Backbone,
    BackboneError,
    ForwardOptions,
    SlotTable,
    hidden_states,
    load_backbone,
    logits_of,
)
from jaxmux.models.adapter_ops import LOW_RANK_KIND

ROOT = Path(__file__).resolve().parent.parent
# The plain backbone, and nf4 in PEFT, beside the formats of jaxmux.
PLAIN, PEFT = "plain", "PEFT-nf4"
BASE, TASKS = "jaxmux:demo/base", "jaxmux:demo/tasks"
# What --models can name.
MODELS = DEMO, STORIES = "demo", "stories260k"
# Tokens of a held-out text that are compared, and the number of texts of each file.
TEXT_TOKENS, TEXTS = 128, 16
MOST_ERRORS = 2.0
# The tokens of stories260k are shorter than those of the demo's base.
STORIES_LENGTHS = {"mood": 64, "pirate": 128, "record": 256, "telegram": 512}

# By format, the held-out losses of all seeds by task.
Losses = dict[str, list[dict[str, float]]]


class Model(NamedTuple):
    """A backbone on which the demo's tasks are trained.

    Attributes:
      name: name of the folder of its runs.
      suffix: end of the names of formats in records of this model.
      backbone: folder of the model.
      texts: files with held-out texts, JSON objects in lines.
      bindings: what the demo's config sets otherwise.
    """

    name: str
    suffix: str
    backbone: str
    texts: list[Path]
    bindings: tuple[str, ...] = ()


def main() -> None:
    args = parse_arguments()
    if "nf4" in args.formats and not args.peft_python.exists():
        raise SystemExit(f"{args.peft_python} does not exist; run make .venv-peft/installed")
    for model in models(args.shared):
        if model.name not in args.models:
            continue
        formats = list(storable(model, args))
        losses = {
            format: [held_out(args, model, format, seed) for seed in range(args.seeds)]
            for format in (PLAIN, *formats)
        }
        if model.name == DEMO:
            if "nf4" in formats:
                losses[PEFT] = [held_out(args, model, PEFT, seed) for seed in range(args.seeds)]
            plot(args, model, list(losses))
        records = [*quality(args, model, losses), *divergences(args, model, formats)]
        earlier = tuple(f"{format}{model.suffix}, " for format in args.formats)
        replace_records(args.out, earlier, records)


def models(shared: Path) -> Iterator[Model]:
    demo_texts = sorted(Path(resolve_path(TASKS)).glob("*.eval.jsonl"))
    yield Model(DEMO, "", BASE, demo_texts)
    stories = shared / "models" / STORIES
    if not stories.exists():
        print(f"{stories} does not exist; only the demo's base is compared")
        return
    bindings = [f"{task}/Task.max_length={length}" for task, length in STORIES_LENGTHS.items()]
    bindings.append(f"fine_tune.backbone={str(stories)!r}")
    texts = sorted((shared / "data").glob("*/test.jsonl"))
    yield Model(STORIES, f" on {STORIES}", str(stories), texts, tuple(bindings))


def storable(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """The formats that can store the model; says why another cannot."""
    for format in args.formats:
        try:
            load_backbone(resolve_path(model.backbone), args.dtype, format)
        except BackboneError as e:
            print(f"{format}{model.suffix} is left out: {e}")
        else:
            yield format


def held_out(args: argparse.Namespace, model: Model, format: str, seed: int) -> dict[str, float]:
    """By task, the held-out loss of a run after training."""
    run_dir = _run_dir(args, model, format, seed)
    if not (run_dir / "summary.json").exists():
        if format == PEFT:
            script = [args.peft_python, ROOT / "scripts" / "peft_on_nf4.py"]
            command = [*script, _run_dir(args, model, "nf4", seed), run_dir]
        else:
            options = {"Task.seed": seed, "fine_tune.dtype": repr(args.dtype)}
            if format != PLAIN:
                options["fine_tune.backbone_format"] = repr(format)
            bindings = [*model.bindings, *(f"{name}={value}" for name, value in options.items())]
            command = [sys.executable, "-m", "jaxmux.train", "--gin_file=jaxmux:configs/demo.gin"]
            command += [f"--run_dir={run_dir}", *(f"--gin.{binding}" for binding in bindings)]
        subprocess.run(command, check=True, env=os.environ | {"JAXMUX_PYTHON": sys.executable})
    tasks = _summary(run_dir)["tasks"]
    return {name: task["eval_loss"] for name, task in tasks.items()}


def quality(args: argparse.Namespace, model: Model, losses: Losses) -> Iterator[Record]:
    """A record for each format and task, and one for each task of nf4 beside PEFT."""
    versions = installed_versions("jax", "jaxlib")
    for format in (each for each in losses if each not in (PLAIN, PEFT)):
        bound = MOST_ERRORS if format != "nf4" else None
        yield from differences(losses, format, PLAIN, bound, model.suffix, versions)
    if PEFT in losses:
        versions |= _summary(_run_dir(args, model, PEFT, 0))["versions"]
        yield from differences(losses, "nf4", PEFT, MOST_ERRORS, model.suffix, versions)


def differences(
    losses: Losses,
    format: str,
    other: str,
    bound: float | None,
    suffix: str,
    versions: dict[str, str],
) -> Iterator[Record]:
    """By task, how much larger the mean logarithm of the held-out loss of `format` is than that of
    `other`, in standard errors."""
    for task in losses[format][0]:
        of_format, of_other = ([run[task] for run in losses[each]] for each in (format, other))
        logs = [list(map(math.log, each)) for each in (of_format, of_other)]
        difference = statistics.mean(logs[0]) - statistics.mean(logs[1])
        value = difference / math.sqrt(sum(statistics.variance(x) / len(x) for x in logs))
        facts = {
            "held-out losses": of_format,
            f"held-out losses, {other}": of_other,
            "difference of mean logarithms": difference,
        }
        whose = "" if other == PLAIN else " from PEFT's"
        name = f"{format}{suffix}, {task}, difference of the held-out loss{whose}"
        yield _record(name, value, bound, "standard errors", facts, versions)


def divergences(args: argparse.Namespace, model: Model, formats: Sequence[str]) -> Iterator[Record]:
    """A record for each format: the divergence of next-token distributions."""
    folder = resolve_path(model.backbone)
    tokens, lengths = held_out_tokens(folder, model.texts)
    labelled = np.arange(TEXT_TOKENS) < lengths[:, None]
    plain = log_probabilities(load_backbone(folder, args.dtype), tokens, lengths)
    for format in formats:
        other = log_probabilities(load_backbone(folder, args.dtype, format), tokens, lengths)
        divergence = (np.exp(plain) * (plain - other)).sum(axis=-1)[labelled].mean()
        facts = {"positions": int(labelled.sum())}
        name = f"{format}{model.suffix}, KL divergence from the plain backbone"
        versions = installed_versions("jax", "jaxlib")
        yield _record(name, float(divergence), None, "nats", facts, versions)


def held_out_tokens(backbone: str, files: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [texts, TEXT_TOKENS] of held-out texts, and how many of each row belong to one."""
    tokenizer, rows = load_tokenizer(backbone), []
    for path in files:
        for line in path.read_text().splitlines()[:TEXTS]:
            text = " ".join(value for value in json.loads(line).values() if isinstance(value, str))
            rows.append(tokenizer(text)["input_ids"][:TEXT_TOKENS])
    tokens = np.zeros((len(rows), TEXT_TOKENS), np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return tokens, np.array([len(ids) for ids in rows])


def log_probabilities(backbone: Backbone, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Logarithms of the next-token distributions at all positions, [texts, tokens, vocabulary]."""
    rows, length = tokens.shape
    microbatch = prompts_in_rows(tokens, lengths)
    slots = SlotTable(jnp.zeros(rows), jnp.zeros(rows), jnp.zeros(rows, jnp.uint32))
    options = ForwardOptions("xla", remat="none", max_sequences=1)

    @jax.jit
    def run(weights):
        given = weights, {LOW_RANK_KIND: {}}, None, microbatch, slots, options
        hidden, _, _ = hidden_states(backbone.config, *given)
        return jax.nn.log_softmax(logits_of(weights, hidden))

    return np.asarray(run(backbone.weights)).reshape(rows, length, -1)


def plot(args: argparse.Namespace, model: Model, formats: Sequence[str]) -> None:
    """Writes the training losses by step, a panel for each task: a line for the geometric mean of
    all seeds, and their range."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for format in formats:
        for seed in range(args.seeds):
            of_run: dict[str, list[float]] = {}
            metrics = _run_dir(args, model, format, seed) / "metrics.jsonl"
            for line in metrics.read_text().splitlines():
                record = json.loads(line)
                of_run.setdefault(record["task"], []).append(record["loss"])
            for task, losses in of_run.items():
                curves.setdefault(task, {}).setdefault(format, []).append(losses)
    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, math.ceil(len(curves) / 2), squeeze=False).flat
    for ax, (task, of_task) in zip(axes, curves.items(), strict=False):
        for i, (format, runs) in enumerate(of_task.items()):
            losses = np.array(runs)
            steps = np.arange(1, losses.shape[1] + 1)
            ax.fill_between(steps, *np.quantile(losses, [0, 1], axis=0), color=f"C{i}", alpha=0.12)
            mean = np.exp(np.log(losses).mean(axis=0))
            ax.plot(steps, mean, color=f"C{i}", linewidth=1.2, label=format)
        ax.set(title=task, xlabel="step", ylabel="training loss", yscale="log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=100)


def _run_dir(args: argparse.Namespace, model: Model, format: str, seed: int) -> Path:
    return args.runs / model.name / f"{format}-{seed}"


def _summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def _record(name, value, bound, unit, facts, versions) -> Record:
    device = jax.devices()[0].device_kind
    return make_figure(name, value, bound, unit, facts, device=device, versions=versions)


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/format_runs"))
    parser.add_argument("--plot", type=Path, default=Path("docs/figures/formats.png"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=list(BACKBONE_FORMATS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--shared",
        type=Path,
        default=Path(os.environ.get("JAXMUX_SHARED", "../shared")),
        help="folder with models/stories260k and texts in data/",
    )
    parser.add_argument(
        "--peft_python",
        type=Path,
        default=ROOT / ".venv-peft" / "bin" / "python",
        help="Python of the environment with PEFT, for nf4",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
