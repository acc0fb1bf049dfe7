"""Measures the points that a profile lacks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from itertools import batched, groupby
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxmux.engine.backbone_size import kept_by_policy, size_of
from jaxmux.models import Backbone, BackboneConfig, device_memory
from jaxmux.planner.costs.device_profile import (
    CollectivePoint,
    Measurement,
    Point,
    Profile,
    ProfileError,
    RoundPoint,
    read_profile,
    write_profile,
)

from .collectives import collective_program
from .grid import Grid, points
from .timed_programs import make_program
from .timed_rounds import measure_round
from .timing import measure

# Programs that are compiled side by side, then timed and saved.
_BATCH = 8


def _empty_profile(config: BackboneConfig, dtype: jnp.dtype) -> Profile:
    """Of this process's first device; what layers keep is not counted yet."""
    return Profile(
        device=jax.devices()[0].device_kind,
        memory_bytes=device_memory(),
        dtype=str(jnp.dtype(dtype)),
        software={"jax": jax.__version__},
        backbone=size_of(config, dtype),
    )


def complete_profile(
    path: Path,
    config: BackboneConfig,
    dtype: jnp.dtype,
    grid: Grid,
    seconds: float,
    report: Callable[[Measurement, int, int], None] = lambda measurement, done, total: None,
) -> Profile:
    """Measures what the file, if there is one, does not hold yet, and saves as it goes.

    Args:
      seconds: of one measurement.
      report: told of each, with how many of how many points are done.

    Raises:
      ProfileError: the file cannot be read, or is of another backbone, device or version.
    """
    profile = _empty_profile(config, dtype)
    if path.exists():
        profile = _same(read_profile(path), profile, path)
    else:
        kept = kept_by_policy(config, dtype)
        backbone = dataclasses.replace(profile.backbone, kept=kept)
        profile = dataclasses.replace(profile, backbone=backbone)
    wanted = points(grid, profile.backbone, len(jax.devices()))
    measured = {measurement.point for measurement in profile.measurements}
    missing = [point for point in wanted if point not in measured]
    done = len(wanted) - len(missing)
    if missing:
        part = dataclasses.replace(config, num_layers=grid.layers)
        for measurement in _measure(Backbone.random(part, dtype=dtype), missing, seconds):
            profile = profile.with_measurements(measurement)
            write_profile(profile, path)
            done += 1
            report(measurement, done, len(wanted))
    return profile


def _measure(backbone: Backbone, missing: Iterable[Point], seconds: float) -> Iterator[Measurement]:
    for kind, group in groupby(missing, type):
        if kind is RoundPoint:
            yield from (measure_round(backbone, point, seconds) for point in group)
            continue
        for batch in batched(group, _BATCH):
            make = collective_program if kind is CollectivePoint else _on(backbone)
            yield from measure([(point, make(point)) for point in batch], seconds)


def _on(backbone: Backbone):
    return lambda point: make_program(backbone, point)


def _same(found: Profile, here: Profile, path: Path) -> Profile:
    known = dataclasses.replace(found, backbone=dataclasses.replace(found.backbone, kept={}))
    for field in ("device", "dtype", "software", "backbone"):
        there, now = getattr(known, field), getattr(here, field)
        if there != now:
            raise ProfileError(
                f"{path}: {field} is {there}, here {now}; name another file to begin anew"
            )
    return found
