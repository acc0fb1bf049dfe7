"""LoRA with the package of this checkout and with that of another, for benchmark_kinds.py."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
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


def programs(args: argparse.Namespace) -> None:
    """Counts the compiled programs of four LoRA tasks that are not the same with both packages."""
    checkouts = {"now": Path(__file__).parents[1], "before": args.before}
    with tempfile.TemporaryDirectory() as folder:
        dumps = {name: Path(folder) / f"{name}-programs" for name in checkouts}
        environments = {
            name: {
                "XLA_FLAGS": f"--xla_dump_to={dump} --xla_dump_hlo_as_text",
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            }
            for name, dump in dumps.items()
        }
        with both(args, checkouts, Path(folder), environments) as turns:
            for own in turns.values():
                own.seconds()
            facts = {name: own.facts for name, own in turns.items()}
        found = {name: _instructions(dump) for name, dump in dumps.items()}
    now, before = found["now"], found["before"]
    different = [name for name in now | before if now.get(name) != before.get(name)]
    baselines = {
        "programs": len(now),
        "different": different,
        "commits": {name: commit(facts[name]["checkout"]) for name in checkouts},
    }
    here = {key: facts["now"][key] for key in ("device", "versions")}
    name = "programs, of 4 LoRA tasks, that are not those of before"
    write(args, name, len(different), 0, baselines, **here, unit="programs")


def _instructions(dump: Path) -> dict[str, list[str]]:
    """By the name of a program, its instructions before XLA optimises them, without the places in
    the source from which they come."""
    programs: dict[str, list[str]] = {}
    for file in sorted(dump.glob("*.before_optimizations.txt")):
        name = file.name.split(".")[1]
        lines = [line for line in file.read_text().splitlines() if line.startswith((" ", "%", "}"))]
        programs.setdefault(name, []).extend(re.sub(r", metadata=\{[^}]*\}", "", x) for x in lines)
    return programs


@contextmanager
def both(
    args: argparse.Namespace,
    checkouts: dict[str, Path],
    folder: Path,
    environments: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Iterator[dict[str, "Turns"]]:
    """Processes with the packages of the checkouts, which begin at the same time.

    Args:
      args: the arguments of the command.
      checkouts: by name, a checkout.
      folder: an empty folder.
      environments: by name, further environment variables.
    """
    found = {
        name: Turns(args, path, folder / name, environments.get(name, {}))
        for name, path in checkouts.items()
    }
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

    def __init__(
        self,
        args: argparse.Namespace,
        checkout: Path,
        folder: Path,
        environment: Mapping[str, str],
    ):
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
            env=os.environ | environment | {"PYTHONPATH": paths},
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
    """The commit of a checkout; empty if it is not the top folder of one that git knows."""
    found = subprocess.run(
        ["git", "-C", checkout, "rev-parse", "--show-toplevel", "--short", "HEAD"],
        capture_output=True,
        text=True,
    )
    folder, *commits = found.stdout.split("\n") if found.returncode == 0 else [""]
    return commits[0] if folder and Path(folder).samefile(checkout) else ""


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)
