"""Measures the device: `python -m jaxmux.profile --backbone=/models/… --out=profile.json`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxmux.models import Backbone, BackboneConfig, BackboneError
from jaxmux.models.architectures import parse_config
from jaxmux.package_files import resolve_path
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import LayerPoint, Measurement, Profile, read_profile
from jaxmux.planner.costs.time_fit import fit_time_model, layer_passes
from jaxmux.profiling import (
    CPU_GRID,
    Case,
    Comparison,
    Grid,
    compare,
    complete_profile,
    default_cases,
    mean_absolute_error,
)

# Columns where there is no terminal.
_PLAIN_WIDTH = 120

_HELP = """\
Measures what layers, attention, head, update, rounds and collectives take on this machine's
devices, for one backbone with random weights, and writes the profile that the planner's cost models
are fitted to. The same command goes on where an interrupted one stopped. With --check, it trains
steps that the profile does not hold and prints them beside their predictions.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.check and not options.out:
        parser.error("--out is required: where the profile goes")
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    try:
        config = _config(options)
        if options.check:
            _check(options, config, console)
        else:
            _profile(options, config, console)
    except (BackboneError, PlanningError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


def _profile(options: argparse.Namespace, config: BackboneConfig, console: Console) -> None:
    def report(measurement: Measurement, done: int, total: int) -> None:
        console.print(f"{done}/{total} {_line(measurement)}", markup=False, soft_wrap=True)

    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    profile = complete_profile(
        options.out, config, jnp.dtype(dtype), _grid(options), options.seconds, report
    )
    console.print(_table(profile))
    console.print(f"{options.out}: {len(profile.measurements)} measurements", soft_wrap=True)


def _check(options: argparse.Namespace, config: BackboneConfig, console: Console) -> None:
    profile = read_profile(options.check)
    grid = _grid(options)
    cases = [Case.parse(text) for text in options.cases] or default_cases(grid)
    config = dataclasses.replace(config, num_layers=options.layers or config.num_layers)
    backbone = Backbone.random(config, dtype=jnp.dtype(profile.dtype))
    found: list[Comparison] = []
    for one in compare(backbone, profile, cases, grid.chunk_lens[0], options.seconds):
        found.append(one)
        measured, predicted = (f"{1e3 * seconds:.2f} ms" for seconds in one.seconds)
        peaks = ", ".join(map(_gib, (*one.peak, one.online_peak)))
        console.print(
            f"{one.case}: {measured}, predicted {predicted}; peak, predicted, online: {peaks}",
            markup=False,
            soft_wrap=True,
        )
    errors = {
        "step time": mean_absolute_error([one.seconds for one in found]),
        "peak memory": mean_absolute_error([one.peak for one in found]),
        "peak memory, online": mean_absolute_error([(o.peak[0], o.online_peak) for o in found]),
    }
    for name, error in errors.items():
        shown = "not measured" if error is None else f"{error:.2%}"
        console.print(f"mean absolute error of {name}: {shown}", markup=False)
    if options.out:
        records = [one._asdict() | {"case": str(one.case)} for one in found]
        report = {
            "device": profile.device,
            "dtype": profile.dtype,
            "software": profile.software,
            "errors": errors,
            "cases": records,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")


def _config(options: argparse.Namespace) -> BackboneConfig:
    if options.backbone:
        return BackboneConfig.from_folder(resolve_path(options.backbone))
    path = resolve_path(options.config)
    try:
        return parse_config(json.loads(Path(path).read_text()), path)
    except (OSError, json.JSONDecodeError) as e:
        raise BackboneError(f"{path}: cannot be read as a config.json: {e}") from None


def _grid(options: argparse.Namespace) -> Grid:
    grid = CPU_GRID if jax.default_backend() == "cpu" else Grid()
    names = ("tokens", "row_lens", "chunk_lens", "ranks", "slots")
    given = {name: tuple(sorted(values)) for name in names if (values := getattr(options, name))}
    return dataclasses.replace(grid, **given)


def _line(measurement: Measurement) -> str:
    """`layer tokens=512 row_len=512 …: 1.234 ms, peak 0.1 GiB`."""
    point, seconds, peak = measurement
    values = dataclasses.asdict(point).items()
    fields = " ".join(f"{name}={value}" for name, value in values)
    return f"{point.operator} {fields}: {1e3 * seconds:.3f} ms, peak {_gib(peak)}"


def _table(profile: Profile) -> Table:
    """The measured layers beside what the fitted model says of them."""
    times = fit_time_model(profile)
    table = Table(title=f"a layer of {profile.backbone.name} on {profile.device}, {profile.dtype}")
    shape = ("tokens", "row_len", "chunk_len", "padding")
    fields = (*shape, "slots", "rank", "tasks", "remat", "dropout")
    for name in (*fields, "ms", "model", "error"):
        table.add_column(name, justify="right")
    for point, seconds in profile.of(LayerPoint):
        passes = layer_passes(times, point)
        fitted = passes.total if point.backward else passes.forward
        values = (getattr(point, name) for name in fields)
        times_and_error = (
            f"{1e3 * seconds:.3f}",
            f"{1e3 * fitted:.3f}",
            f"{fitted / seconds - 1:+.1%}",
        )
        table.add_row(*map(str, values), *times_and_error)
    return table


def _gib(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxmux.profile",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--backbone", help="Hugging Face folder; its config.json alone is read")
    source.add_argument("--config", help="a config.json")
    parser.add_argument("--out", type=Path, help="the profile, or with --check the comparison")
    parser.add_argument("--check", type=Path, metavar="PROFILE", help="compare its predictions")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one measurement")
    parser.add_argument("--dtype", help="default: bfloat16 on an accelerator, float32 on a CPU")
    for name, meaning in (
        ("tokens", "of microbatches"),
        ("row_lens", "of rows"),
        ("chunk_lens", "of chunks"),
        ("ranks", "of the pool"),
        ("slots", "of the pool, and tasks"),
    ):
        parser.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=meaning)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=[],
        metavar="CASE",
        help="of --check: tasks x length x rank x tokens [x row length], e.g. 3x2048x32x6144",
    )
    parser.add_argument("--layers", type=int, help="of --check: another number than the backbone's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
