"""The time from the start of `jaxmux train` to the end of its first step."""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmark_command import device, train
from benchmark_records import Record, make_figure

from jaxmux.installation import installed_versions

STEPS = 4


def start_records(
    folder: Path,
    args: argparse.Namespace,
    name: str,
    settings: Sequence[str],
    bounds: tuple[float | None, float | None],
) -> Iterator[Record]:
    """Runs the command twice. The first run fills the cache of compiled programs, the second one
    finds it. Neither has read the backbone before.

    Args:
      folder: has the checkpoint folder, from `make_backbone`.
      args: the options of the benchmark.
      name: what is trained, for the names of the figures.
      settings: further lines of the config.
      bounds: most seconds with an empty and with a filled cache; None for no bound.
    """
    options = argparse.Namespace(**{**vars(args), "steps": STEPS})
    caches = folder / f"caches of {name}"
    environment = {"JAX_COMPILATION_CACHE_DIR": str(caches / "jax"), "XDG_CACHE_HOME": str(caches)}
    for cache, bound in zip(("empty", "filled"), bounds, strict=True):
        begun, run_dir = time.time(), folder / f"{name}, {cache} cache"
        arguments = options, args.tasks, args.length, environment, settings
        result = train(folder, run_dir, *arguments)
        if result.returncode:
            raise SystemExit(f"jaxmux train: exit code {result.returncode}\n{result.stdout}")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        seconds = min(json.loads(line)["time"] for line in lines) - begun
        summary = json.loads((run_dir / "summary.json").read_text())
        spans = json.loads((run_dir / "start.json").read_text())
        longest = sorted(spans, key=lambda span: -span["seconds"])[:8]
        yield make_figure(
            f"{name}, {cache} cache of programs, from the start to the end of the first step",
            seconds,
            bound,
            "s",
            {span["what"] + ", s": round(span["seconds"], 1) for span in longest}
            | {key: summary[key] for key in ("peak_memory_bytes", "predicted_memory_bytes")},
            device=device().partition("\n")[0],
            versions=installed_versions("jax", "jaxlib"),
        )
