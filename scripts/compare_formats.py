"""What formats of the backbone do to the quality of adapters: the demo's tasks in every format.

  python scripts/compare_formats.py --out benchmarks/format_quality.json

Every task of the demo is trained on its really trained base model, with every format and several
seeds, which draw the initial adapters and the order of samples. The figure of a task and a format
is the mean logarithm of its held-out loss less that of the plain backbone, in standard errors of
that difference: above two, the format is worse than the plain backbone, and below it cannot be told
from the plain backbone. The divergence of a format is the mean over positions of held-out texts of
KL(p | q), for the next-token distributions p of the plain backbone and q of the backbone in the
format, without adapters. The plot shows the training losses of all seeds.

A run takes about two minutes on two cores. Runs that are complete in `--runs` are not repeated.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_records import Record, make_figure, replace_records
from matplotlib.figure import Figure

from jaxmux.completion import prompts_in_rows
from jaxmux.data import load_tokenizer
from jaxmux.installed_versions import installed_versions
from jaxmux.models import BACKBONE_FORMATS, Backbone, ForwardOptions, SlotTable, load_backbone
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.models.forward import hidden_states, logits_of
from jaxmux.package_files import resolve_path

PLAIN = "plain"
BASE, TASKS = "jaxmux:demo/base", "jaxmux:demo/tasks"
# Tokens of a held-out text that are compared, and the number of texts of each task.
TEXT_TOKENS, TEXTS = 128, 16
MOST_ERRORS = 2.0


def main() -> None:
    args = parse_arguments()
    losses = {
        format: [held_out(args, format, seed) for seed in range(args.seeds)]
        for format in (PLAIN, *args.formats)
    }
    replace_records(args.out, "", [*quality(args, losses), *divergences(args)])
    plot(args)


def held_out(args: argparse.Namespace, format: str, seed: int) -> dict[str, float]:
    """By task, the held-out loss of a run after training."""
    run_dir = _run_dir(args, format, seed)
    summary = run_dir / "summary.json"
    if not summary.exists():
        options = {"Task.seed": seed, "fine_tune.dtype": repr(args.dtype)}
        if format != PLAIN:
            options["fine_tune.backbone_format"] = repr(format)
        bindings = [f"--gin.{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "jaxmux.train", "--gin_file=jaxmux:configs/demo.gin"]
        subprocess.run([*command, f"--run_dir={run_dir}", *bindings], check=True)
    tasks = json.loads(summary.read_text())["tasks"]
    return {name: task["eval_loss"] for name, task in tasks.items()}


def quality(args: argparse.Namespace, losses: dict[str, list[dict[str, float]]]) -> list[Record]:
    """A record for each format and task."""
    records = []
    for format in args.formats:
        for task in losses[PLAIN][0]:
            own, plain = ([math.log(run[task]) for run in losses[f]] for f in (format, PLAIN))
            difference = statistics.mean(own) - statistics.mean(plain)
            variances = (statistics.variance(each) / len(each) for each in (own, plain))
            value = difference / math.sqrt(sum(variances))
            facts = {
                "held-out losses": [run[task] for run in losses[format]],
                "held-out losses, plain": [run[task] for run in losses[PLAIN]],
                "difference of mean logarithms": difference,
            }
            bound = MOST_ERRORS if format != "nf4" else None
            name = f"{format}, {task}, difference of the held-out loss"
            records.append(_record(name, value, bound, "standard errors", facts))
    return records


def divergences(args: argparse.Namespace) -> list[Record]:
    """A record for each format: the divergence of next-token distributions."""
    tokens, lengths = held_out_tokens()
    labelled = np.arange(TEXT_TOKENS) < lengths[:, None]
    plain = log_probabilities(load_backbone(resolve_path(BASE), args.dtype), tokens, lengths)
    records = []
    for format in args.formats:
        backbone = load_backbone(resolve_path(BASE), args.dtype, format)
        other = log_probabilities(backbone, tokens, lengths)
        divergence = (np.exp(plain) * (plain - other)).sum(axis=-1)[labelled].mean()
        facts = {"positions": int(labelled.sum())}
        name = f"{format}, KL divergence from the plain backbone"
        records.append(_record(name, float(divergence), None, "nats", facts))
    return records


def held_out_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [texts, TEXT_TOKENS] of held-out texts, and how many of each row belong to one."""
    tokenizer, rows = load_tokenizer(resolve_path(BASE)), []
    for path in sorted(Path(resolve_path(TASKS)).glob("*.eval.jsonl")):
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


def plot(args: argparse.Namespace) -> None:
    """Writes the training losses of all runs, a panel for each task."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for format in (PLAIN, *args.formats):
        for seed in range(args.seeds):
            of_run: dict[str, list[float]] = {}
            for line in (_run_dir(args, format, seed) / "metrics.jsonl").read_text().splitlines():
                record = json.loads(line)
                of_run.setdefault(record["task"], []).append(record["loss"])
            for task, losses in of_run.items():
                curves.setdefault(task, {}).setdefault(format, []).append(losses)
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, math.ceil(len(curves) / 2), squeeze=False).flat
    for ax, (task, formats) in zip(axes, curves.items(), strict=False):
        for i, (format, runs) in enumerate(formats.items()):
            for j, losses in enumerate(runs):
                label = format if j == 0 else None
                ax.plot(range(1, len(losses) + 1), losses, color=f"C{i}", alpha=0.5, label=label)
        ax.set(title=task, xlabel="step", ylabel="training loss", yscale="log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=100)


def _run_dir(args: argparse.Namespace, format: str, seed: int) -> Path:
    return args.runs / f"{format}-{seed}"


def _record(name, value, bound, unit, facts) -> Record:
    return make_figure(
        name,
        value,
        bound,
        unit,
        facts,
        device=jax.devices()[0].device_kind,
        versions=installed_versions("jax", "jaxlib"),
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("/tmp/format_runs"))
    parser.add_argument("--plot", type=Path, default=Path("docs/figures/formats.png"))
    parser.add_argument("--formats", nargs="+", default=list(BACKBONE_FORMATS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
