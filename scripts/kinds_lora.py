"""LoRA with the package of this checkout and with that of another, for benchmark_kinds.py."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kinds_timing import TASKS, WARM_UP_TURNS, figures, in_pairs, interval, say, write

# Ratios of times.
NO_SLOWER, WIDEST = 1.0, 1.02


def lora(args: argparse.Namespace) -> None:
    """Measures four LoRA tasks with both packages in turns."""
    checkouts = {"now": Path(__file__).parents[1], "before": args.before}
    with tempfile.TemporaryDirectory() as folder, both(args, checkouts, Path(folder)) as turns:
        say("lora: the first turns, which compile")
        for name in (*checkouts,) * WARM_UP_TURNS:
            say(f"lora: warm-up, {name}: {turns[name].seconds():.2f} s")
        seconds = in_pairs(args, {name: turns[name].seconds for name in checkouts})
        facts = {name: turns[name].facts for name in checkouts}
    low, median, high = interval(seconds)
    baselines = {
        "median": median,
        "95% interval": [low, high],
        **figures(args, seconds),
        "commits": {name: commit(facts[name]["checkout"]) for name in checkouts},
    }
    here = {key: facts["now"][key] for key in ("device", "versions")}
    for end, value, bound in (("lower", low, NO_SLOWER), ("upper", high, WIDEST)):
        name = f"lora, 4 LoRA tasks, now over before, {end} end of the interval"
        write(args, name, value, bound, baselines, **here)


@contextmanager
def both(
    args: argparse.Namespace, checkouts: dict[str, Path], folder: Path
) -> Iterator[dict[str, "Turns"]]:
    """Processes with the packages of the checkouts, which begin at the same time."""
    found = {name: Turns(args, path, folder / name) for name, path in checkouts.items()}
    try:
        for name, own in found.items():
            own.facts = own.answer()
            if Path(own.facts["checkout"]) != checkouts[name].resolve():
                raise RuntimeError(f"{name}: the package of {own.facts['checkout']} was imported")
        yield found
    finally:
        for own in found.values():
            own.process.kill()
            own.process.wait()


class Turns:
    """A process of kinds_turns.py.

    Attributes:
      process: the process.
      facts: what it measures, once it has said so.
    """

    def __init__(self, args: argparse.Namespace, checkout: Path, folder: Path):
        link_package(checkout, folder)
        others = os.environ.get("PYTHONPATH")
        paths = os.pathsep.join([str(folder), *([others] if others else [])])
        self.facts: dict[str, Any] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("kinds_turns.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | {"PYTHONPATH": paths},
        )
        arguments = {name: value for name, value in vars(args).items() if _plain(value)}
        print(json.dumps(arguments | {"tasks": TASKS}), file=self.process.stdin)

    def seconds(self) -> float:
        """The seconds of a turn."""
        print(file=self.process.stdin)
        return self.answer()

    def answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise RuntimeError(f"a process has ended: exit status {self.process.wait()}")


def link_package(checkout: Path, folder: Path) -> None:
    """Puts a package into a folder that has the code of a checkout, as if it were installed there.

    Args:
      checkout: the checkout; its folders are one package when it is installed.
      folder: the folder, which becomes one for PYTHONPATH.
    """
    (package := folder / "jaxmux").mkdir(parents=True)
    others = (checkout / name for name in ("data", "pallas_kernels", "sharding"))
    for path in (*(checkout / "jaxmux").iterdir(), *others):
        (package / path.name).symlink_to(path.resolve())


def commit(checkout: str) -> str:
    """The commit of a checkout; empty if git does not know it."""
    found = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return found.stdout.strip()


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
