"""Turns of two engines, and records of what was measured, for benchmark_kinds.py."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from benchmark_records import make_figure, replace_records
from benchmark_step import round_size

from jaxmux.installation import installed_versions

# An engine waits for the device in the eight rounds after its compilation.
WARM_UP_TURNS, FEWEST_TURNS = 4, 3
# Tasks of a round. All have global batches of the same size.
TASKS = 4


def in_pairs(
    args: argparse.Namespace, turns: dict[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """The seconds of turns of two engines, in pairs of alternating order.

    Args:
      args: the arguments of the command.
      turns: by name, a function that runs a turn and returns its seconds.
    """
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for i in range(args.turns):
        if i >= FEWEST_TURNS and time.monotonic() > args.deadline:
            break
        for name in list(turns)[:: -1 if i % 2 else 1]:
            seconds[name].append(turns[name]())
    return seconds


def interval(seconds: dict[str, list[float]]) -> tuple[float, float, float]:
    """The median of the ratios of pairs, the first over the second, between the ends of its 95%
    interval."""
    ratios = np.divide(*map(np.asarray, seconds.values()))
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(np.median(ratios)), float(high)


def figures(args: argparse.Namespace, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """The figures that ratios were made from."""
    microbatches, _ = round_size(TASKS, args.length, args.tokens, args.microbatches)
    count = args.turn_rounds * microbatches
    return {
        "turns": len(next(iter(seconds.values()))),
        "microbatches of a turn": count,
        **{
            f"ms of a microbatch, {name}": 1e3 * statistics.median(own) / count
            for name, own in seconds.items()
        },
    }


def write(
    args: argparse.Namespace,
    name: str,
    value: float,
    bound: float,
    baselines: dict[str, Any],
    device: str | None = None,
    versions: dict[str, str] | None = None,
    unit: str = "ratio",
) -> None:
    """Writes a record in place of the one of its name."""
    record = make_figure(
        name,
        value,
        bound,
        unit,
        baselines,
        device=device or jax.devices()[0].device_kind,
        versions=versions or installed_versions("jax", "jaxlib"),
    )
    replace_records(args.out, name, [record])
    say(f"{name}: {value:.4f}, {baselines}")


def say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)
