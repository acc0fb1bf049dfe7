"""The time from the start of `jaxmux train` on several GPUs to the end of its first step."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmark_command import device, make_backbone, train
from benchmark_records import Record, make_figure

from jaxmux.installed_versions import installed_versions

MOST_SECONDS = 60.0
STEPS = 4


def start_records(args: argparse.Namespace, mesh: str) -> Iterator[Record]:
    """Runs the command twice with a checkpoint folder of random weights. The first run fills the
    cache of compiled programs, the second one finds it.

    Args:
      args: the options of the benchmark.
      mesh: the devices.
    """
    settings = [f"fine_tune.mesh = '{mesh}'", f"fine_tune.tokens_per_microbatch = {args.tokens}"]
    given = argparse.Namespace(**{**vars(args), "steps": STEPS})
    seconds = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_backbone(folder / "backbone", given)
        environment = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        for run in ("cold", "warm"):
            begun, run_dir = time.time(), folder / run
            options = given, args.tasks, args.length, environment, settings
            result = train(folder, run_dir, *options)
            if result.returncode:
                raise SystemExit(f"jaxmux train: exit code {result.returncode}\n{result.stdout}")
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            seconds.append(min(json.loads(line)["time"] for line in lines) - begun)
    cold, warm = seconds
    yield make_figure(
        f"8B shape, {mesh}, {args.tasks} tasks, from the start to the end of the first step",
        warm,
        MOST_SECONDS,
        "s",
        {"with an empty cache of programs, s": cold},
        device=device().partition("\n")[0],
        versions=installed_versions("jax", "jaxlib"),
    )
