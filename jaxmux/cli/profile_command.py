"""The command `jaxmux profile`: measures this machine's devices for the cost models."""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from jaxmux.atomic_files import holds_object, require_output, require_writable
from jaxmux.installation import resolve_path
from jaxmux.models import Backbone, BackboneConfig, BackboneError, resolve_backbone
from jaxmux.models.architectures import parse_config
from jaxmux.planner.costs.device_profile import LayerPoint, Measurement, Profile, read_profile
from jaxmux.planner.costs.fitting import fit_time_model, layer_passes
from jaxmux.profiling import (
    CPU_GRID,
    CheckedCase,
    Comparison,
    Grid,
    compare,
    complete_profile,
    default_cases,
    mean_absolute_error,
)

from .plan_tables import NumberTable
from .report_console import report_console


def run(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 0. Raises InputError for unusable input."""
    console = report_console()
    config = _config(options)
    if options.check and options.out:
        require_output(options.out, "comparison", partial(holds_object, keys=("errors", "cases")))
    elif options.out:
        require_writable(options.out)
    if options.check:
        _check(options, config, console)
    else:
        _profile(options, config, console)
    return 0


def _profile(options: argparse.Namespace, config: BackboneConfig, console: Console) -> None:
    def report(measurement: Measurement, done: int, total: int) -> None:
        console.print(f"{done}/{total} {_line(measurement)}", soft_wrap=True)

    dtype = options.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    profile = complete_profile(
        options.out,
        dataclasses.replace(config, backbone_format=options.backbone_format),
        jnp.dtype(dtype),
        _grid(options),
        options.seconds,
        report,
        console.print,
    )
    for part in _layer_times(profile):
        console.print(part)
    console.print(f"{options.out}: {len(profile.measurements)} measurements", soft_wrap=True)


def _check(options: argparse.Namespace, config: BackboneConfig, console: Console) -> None:
    profile = read_profile(options.check)
    grid = _grid(options)
    cases = [CheckedCase.parse(text) for text in options.cases] or default_cases(grid)
    config = dataclasses.replace(
        config,
        num_layers=options.layers or config.num_layers,
        backbone_format=profile.backbone.backbone_format,
    )
    backbone = Backbone.random(config, dtype=jnp.dtype(profile.dtype))
    comparisons: list[Comparison] = []
    for one in compare(backbone, profile, cases, grid.chunk_lens[0], options.seconds):
        comparisons.append(one)
        measured, predicted = (f"{1e3 * seconds:.2f} ms" for seconds in one.seconds)
        peaks = ", ".join(map(_gib, (*one.peak, one.online_peak)))
        console.print(
            f"{one.case}: {measured}, predicted {predicted}; peak, predicted, online: {peaks}",
            soft_wrap=True,
        )
    errors = {
        "step time": mean_absolute_error([one.seconds for one in comparisons]),
        "peak memory": mean_absolute_error([one.peak for one in comparisons]),
        "peak memory, online": mean_absolute_error(
            [(o.peak[0], o.online_peak) for o in comparisons]
        ),
    }
    for name, error in errors.items():
        shown = "not measured" if error is None else f"{error:.2%}"
        console.print(f"mean absolute error of {name}: {shown}")
    if options.out:
        records = [one._asdict() | {"case": str(one.case)} for one in comparisons]
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
        # Profiles are measured with random weights.
        return BackboneConfig.from_folder(resolve_backbone(options.backbone)).plain
    path = resolve_path(options.config)
    try:
        settings = json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise BackboneError(f"{path}: cannot be read as a config.json: {e}") from None
    return parse_config(settings, path)


def _grid(options: argparse.Namespace) -> Grid:
    grid = CPU_GRID if jax.default_backend() == "cpu" else Grid()
    names = ("tokens", "row_lens", "chunk_lens", "ranks", "slots")
    values = {name: tuple(sorted(numbers)) for name in names if (numbers := getattr(options, name))}
    return dataclasses.replace(grid, **values)


def _line(measurement: Measurement) -> str:
    """A line such as `layer tokens=512 row_len=512 …: 1.234 ms, peak 0.1 GiB`."""
    point, seconds, peak = measurement
    fields = _assignments(dataclasses.asdict(point))
    return f"{point.operator} {fields}: {1e3 * seconds:.3f} ms, peak {_gib(peak)}"


def _layer_times(profile: Profile) -> Iterator[Table | str]:
    """The measured times of layers and those of the fitted model, in 80 columns. A line above the
    table gives the usual values of all fields; each row names only the fields that differ."""
    times = fit_time_model(profile)
    measured = profile.of(LayerPoint)
    fields = [dataclasses.asdict(point) for point, _ in measured]
    usual = {name: statistics.mode(row[name] for row in fields) for name in fields[0]}
    stored = profile.backbone.backbone_format or profile.dtype
    yield (
        f"\na layer of {profile.backbone.name} on {profile.device}, {profile.dtype}, linears in "
        f"{stored}; each row of the table names what differs from {_assignments(usual)}"
    )
    table = NumberTable("differs in", "measured", "model", "error")
    for row, (point, seconds) in zip(fields, measured, strict=True):
        passes = layer_passes(times, point)
        fitted = passes.total if point.backward else passes.forward
        differences = _assignments({n: value for n, value in row.items() if value != usual[n]})
        shown = (f"{1e3 * s:,.3f} ms" for s in (seconds, fitted))
        table.add_row(differences or "nothing", *shown, f"{fitted / seconds - 1:+.1%}")
    yield table


def _assignments(fields: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _gib(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.2f} GiB"
