"""Counts what a reader of the source has to cross: files, lines of code, and moves between files.

  python scripts/house_figures.py

It prints a table of figures, one line each:

- files and lines of code of the package, the median lines of code of a file, files under 150 lines,
  and the part of all lines that docstrings take. A line of code is neither blank nor comment nor
  docstring, and all lines are those of code and docstrings.
- a steady round of two LoRA tasks: the files whose functions run in the thread that trains, the
  number of different functions, and how often one calls a function of another file.
- from `register` to the exported adapter, on a tuning server that has trained a task before: files
  and functions, in all threads.
- seconds to import what `jaxmux --help` needs.
"""

import ast
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax.numpy as jnp
from benchmark_records import markdown

import jaxmux
from jaxmux.engine import Engine, EngineOptions
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling.random_tasks import in_other_names, random_task

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(ROOT / name for name in ("jaxmux", "data", "pallas_kernels", "sharding"))
SHORT_FILE = 150
# Compiled, warm and with a round in flight.
WARM_UP_ROUNDS = 4


class Size(NamedTuple):
    """Lines of one file."""

    code: int
    docstrings: int
    total: int


def size_of(path: Path) -> Size:
    text = path.read_text()
    documented = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = enumerate(text.splitlines(), 1)
    written = {i for i, line in lines if line.strip() and not line.strip().startswith("#")}
    return Size(len(written - documented), len(written & documented), len(text.splitlines()))


class Crossed:
    """The functions of the package that run while this is installed as a profiler.

    Attributes:
      functions: (file, qualified name) of each function that ran.
      moves: calls of functions in another file than that of the caller.
    """

    def __init__(self):
        self.functions: set[tuple[str, str]] = set()
        self.moves = 0
        self._here = threading.local()

    @property
    def files(self) -> int:
        return len({file for file, _ in self.functions})

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or frame.f_code.co_name == "<module>":
            return
        if not _in_package(frame.f_code.co_filename):
            return
        here = getattr(self._here, "stack", None)
        if here is None:
            here = self._here.stack = []
        if event == "call":
            file = frame.f_code.co_filename
            self.functions.add((file, frame.f_code.co_qualname))
            self.moves += bool(here) and here[-1] != file
            here.append(file)
        elif here:
            here.pop()


def _in_package(file: str) -> bool:
    return any(str(package) + "/" in file for package in PACKAGES)


def traced(work: Callable[[], Any], threads: bool = False) -> Crossed:
    """What `work` crosses, in this thread or in all threads that it starts."""
    crossed = Crossed()
    install = threading.setprofile_all_threads if threads else sys.setprofile
    install(crossed)
    try:
        work()
    finally:
        install(None)
    return crossed


def steady_round() -> Crossed:
    config = BackboneConfig(
        architecture="LlamaForCausalLM",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=1e4,
    )
    options = EngineOptions(smallest_shape_class([64], 256, chunk_len=64))
    engine = Engine(Backbone.random(config, dtype=jnp.float32), options)
    task = random_task(config, "task0", [64] * 8, 4, 100, rank=4)
    engine.register_tasks(in_other_names(task, 2))
    for _ in range(WARM_UP_ROUNDS):
        engine.train_round()
    crossed = traced(engine.train_round)
    engine.close()
    return crossed


def registered_to_exported() -> Crossed:
    data = "jaxmux:demo/tasks/mood.train.jsonl"
    options = jaxmux.ServerOptions(reserved_slots=2, row_len=128, tokens_per_microbatch=512)
    with tempfile.TemporaryDirectory() as folder:
        with jaxmux.tuning_server("jaxmux:demo/base", folder, options) as server:
            threading.Thread(target=server.run).start()
            events = server.events()

            def train(name: str) -> None:
                server.register(jaxmux.Task(name, data, max_length=64, steps=3)).result()
                while next(events).fields.get("state") not in ("succeeded", "failed"):
                    pass

            train("first")
            return traced(lambda: train("mood"), threads=True)


def import_seconds() -> float:
    """The median of five starts of `jaxmux --help`, less those of Python alone."""

    def run(*arguments: str) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return run("-m", "jaxmux", "--help") - run("-c", "pass")


def main() -> None:
    sizes = [size_of(path) for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    code, docstrings = (sum(size[i] for size in sizes) for i in range(2))
    steady, whole = steady_round(), registered_to_exported()
    figures = {
        "files": len(sizes),
        "lines of code": f"{code:,}",
        "median lines of code of a file": statistics.median(size.code for size in sizes),
        f"files under {SHORT_FILE} lines": sum(size.total < SHORT_FILE for size in sizes),
        "docstrings, part of the lines": f"{docstrings / (code + docstrings):.0%}",
        "steady round: files": steady.files,
        "steady round: functions": len(steady.functions),
        "steady round: moves between files": steady.moves,
        "register to export: files": whole.files,
        "register to export: functions": len(whole.functions),
        "import of `jaxmux --help`, s": f"{import_seconds():.2f}",
    }
    print(markdown(("figure", "value"), list(figures.items())))


if __name__ == "__main__":
    main()
