"""Completes a profile by measuring the points that its file lacks."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import batched, groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.data import fill_microbatch
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.models import (
    MODULES,
    NAMED_POLICIES,
    Backbone,
    BackboneConfig,
    ForwardOptions,
    SlotTable,
    device_memory,
    kept_bytes,
)
from jaxmux.models.modules import Weights, abstract_weights
from jaxmux.peft import empty_pool
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

# Number of programs that are compiled in parallel before they are timed and saved.
_BATCH = 8
# The kept bytes are proportional to the tokens, so they are counted for one small microbatch.
_ROW_LEN, _CHUNK_LEN = 256, 128


def _empty_profile(config: BackboneConfig, dtype: jnp.dtype) -> Profile:
    """Returns a profile of this process's first device, without measurements and `kept` bytes."""
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
    say: Callable[[str], None] = lambda line: None,
) -> Profile:
    """Measures the points of a grid that a profile does not hold yet, and returns the profile.

    A profile is a JSON file with the measured time and memory of a backbone on this machine's
    devices; cost models are fitted to it. A point is one measured operator with its sizes. The file
    is created if it does not exist, and saved after every measurement. So an interrupted call loses
    no finished measurement: call the function again with the same arguments.

    Args:
      path: the profile's file.
      config: configuration of the backbone. Its weights are random, and `grid.layers` replaces its
        number of layers in the measured programs.
      dtype: dtype of the weights and hidden states.
      grid: the values of the points, for example `Grid()` or `CPU_GRID`.
      seconds: seconds to spend on one measurement, without compilation.
      report: function that is called after every measurement with three arguments: the measurement,
        the number of the grid's points that are measured so far, and the number of all its points.
        The default does nothing.
      say: function that prints one line; it is called before programs are compiled, which takes a
        while. The default does nothing.

    Returns:
      The profile with all points of the grid, and with any other points that the file held.

    Raises:
      ProfileError: the file cannot be read, or it is the profile of another backbone, device, dtype
        or version of JAX.
    """
    profile = _empty_profile(config, dtype)
    if path.exists():
        profile = _require_same(read_profile(path), profile, path)
    wanted = points(grid, profile.backbone, len(jax.devices()))
    measured = {measurement.point for measurement in profile.measurements}
    missing = [point for point in wanted if point not in measured]
    if missing:
        say(f"compiling {_BATCH} programs at a time; the first results can take a minute")
        if not profile.backbone.kept:
            kept = kept_by_policy(config, dtype)
            backbone = dataclasses.replace(profile.backbone, kept=kept)
            profile = dataclasses.replace(profile, backbone=backbone)
        part = dataclasses.replace(config, num_layers=grid.layers)
        new = _measure(Backbone.random(part, dtype=dtype), missing, seconds)
        for done, measurement in enumerate(new, start=len(wanted) - len(missing) + 1):
            profile = profile.with_measurements(measurement)
            write_profile(profile, path)
            report(measurement, done, len(wanted))
    return profile


def _measure(backbone: Backbone, missing: Iterable[Point], seconds: float) -> Iterator[Measurement]:
    for kind, group in groupby(missing, type):
        if kind is RoundPoint:
            yield from (measure_round(backbone, point, seconds) for point in group)
            continue
        make = collective_program if kind is CollectivePoint else partial(make_program, backbone)
        for batch in batched(group, _BATCH):
            yield from measure([(point, make(point)) for point in batch], seconds)


def kept_by_policy(config: BackboneConfig, dtype: jnp.dtype) -> dict[str, tuple[float, float]]:
    """The field `BackboneSize.kept`: for each remat policy, the bytes that a layer keeps for its
    backward pass: per token, and per token for each unit of rank. Nothing is computed on a device,
    but tracing the layers takes seconds. `dtype` is that of the weights and of the stream."""
    weights = abstract_weights(config, dtype)
    return {policy: _kept_per_token(config, weights, policy) for policy in NAMED_POLICIES}


def _kept_per_token(config: BackboneConfig, weights: Weights, policy: str) -> tuple[float, float]:
    one, two = (_kept_at_rank(config, weights, policy, rank) for rank in (1, 2))
    return (2 * one - two) / _ROW_LEN, (two - one) / _ROW_LEN


def _kept_at_rank(config: BackboneConfig, weights: Weights, policy: str, rank: int) -> int:
    """Returns the bytes that a layer keeps of one row, with adapters of one slot and this rank."""
    # Only the shapes and dtypes of the arrays matter.
    microbatch = fill_microbatch((), {}, rows=1, row_len=_ROW_LEN, chunk_len=_CHUNK_LEN)
    slots = SlotTable(*(np.zeros(1, dtype) for dtype in (np.float32, np.float32, np.uint32)))
    # Every implementation keeps the same values, and the plain one is traced fastest.
    options = ForwardOptions("xla", "xla", policy, max_sequences=1)
    adapters = {"lora": jax.eval_shape(lambda: empty_pool(config, MODULES, 1, rank))}
    return kept_bytes(config, options, weights, adapters, microbatch, slots)


def _require_same(stored: Profile, here: Profile, path: Path) -> Profile:
    """Returns `stored` if it was measured on the device and with the software of `here`."""
    known = dataclasses.replace(stored, backbone=dataclasses.replace(stored.backbone, kept={}))
    for field in ("device", "dtype", "software", "backbone"):
        there, now = getattr(known, field), getattr(here, field)
        if there != now:
            raise ProfileError(
                f"{path}: {field} is {there}, here {now}; name another file to begin anew"
            )
    return stored
