"""How much of tensor parallelism's sums over devices runs beside products (MuxTune 3.4.2).

A few layers are trained, forward and backward, in three ways: all rows of a microbatch together,
two halves of its rows in turn (the two hTasks of a bucket), and without the sums, which makes the
results wrong. The hidden share is (together - in turn) / (together - without sums). Each way counts
with the setting with which it is fastest.
"""

import argparse
import os
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from benchmark_records import Record
from benchmark_step import in_own_process
from sharding_runs import Measured, Work, figure_of, measure

from jaxmux.models import forward, weight_sharding
from jaxmux.pallas_kernels.grouped_lora import tilings
from jaxmux.planner.devices import Deployment
from jaxmux.sharding import stage_mesh

TOGETHER, IN_TURN, WITHOUT_SUMS = "together", "in turn", "without sums"
LEAST_HIDDEN = 0.45


class Setting(NamedTuple):
    """How multiprocessors are divided between kernels and sums.

    Attributes:
      free: multiprocessors that kernels leave free.
      blocks: most thread blocks of a sum (NCCL_MAX_CTAS); 0 lets NCCL choose.
    """

    free: int
    blocks: int

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """The setting that a text such as "16:16" names."""
        return cls(*map(int, text.split(":")))


def overlap_records(args: argparse.Namespace, name: str, work: Work) -> Iterator[Record]:
    """Measures the hidden share on all devices.

    Args:
      args: the options of the benchmark.
      name: what the layers are, for the record.
      work: a backbone of a few layers, and tasks. Its vocabulary should be small, because the times
        of embedding and head count as times of the layers.
    """
    deployment = Deployment.parse(f"tp{args.devices}")
    layers = work.tokens / args.tokens * work.config.num_layers
    found: dict[str, dict[str, float]] = {}
    for way in (TOGETHER, IN_TURN, WITHOUT_SUMS):
        found[way] = {}
        for setting in args.settings:
            run = in_own_process(partial(measure_way, args, work, deployment, way, setting))
            found[way][f"{setting.free}:{setting.blocks}"] = 1e3 * run.seconds / layers
    together, in_turn, without = (min(times.values()) for times in found.values())
    yield figure_of(
        run,
        f"{name} layers, tp{args.devices}, hidden share of the sums",
        (together - in_turn) / (together - without),
        LEAST_HIDDEN,
        "at least",
        "share of the time of the sums",
        {f"ms a layer by setting, {way}": times for way, times in found.items()},
    )


def measure_way(
    args: argparse.Namespace, work: Work, deployment: Deployment, way: str, setting: Setting
) -> Measured:
    """`measure`, in a process of which nothing else is wanted: parts of jaxmux are replaced."""
    if setting.blocks:
        os.environ["NCCL_MAX_CTAS"] = str(setting.blocks)
    _replace(stage_mesh, "blocks_of_sums", lambda devices: 0)
    _replace(tilings, "blocks_of_sums", lambda devices: setting.free)
    _replace(forward, "sums_run_beside_kernels", lambda devices: way == IN_TURN)
    if way == WITHOUT_SUMS:
        for name in ("_enter", "_leave"):
            _replace(weight_sharding, name, lambda x: x)
    return measure(args, work, deployment)


def _replace(module: Any, name: str, value: Any) -> None:
    if not hasattr(module, name):
        raise AttributeError(f"{module.__name__} has no {name} any more")
    setattr(module, name, value)
