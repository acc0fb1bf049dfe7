"""Small tasks of the bundled demo that come and go at random, for benchmark_live.py."""

import argparse
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from benchmark_records import Record

from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.installation import resolve_path
from jaxmux.models import (
    Backbone,
    load_backbone,
)
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.scheduling import Candidate, schedule, tokens_per_microbatch
from jaxmux.profiling import random_task
from jaxmux.server import LiveTraining, TaskStatus

MOST_LESS_THROUGHPUT = 0.05
# Seconds, less than a tenth of a round of so many tasks on a large backbone.
MOST_PLANNING = 0.05


def demo(args: argparse.Namespace) -> list[Record]:
    """Measures tasks of the demo backbone that arrive at random beside the same tasks submitted at
    once."""
    setting = Setting(args)
    at_once = Run(setting)
    at_once.train(dict.fromkeys(setting.tasks, 0.0))
    # Tasks arrive somewhat faster than they can be trained, so that no place stays free for long.
    at_random = Run(setting)
    at_random.train(setting.arrivals(0.6 * at_once.seconds))
    facts = {
        "tasks": len(setting.tasks),
        "places": setting.slots,
        "seconds, at random": at_random.seconds,
        "seconds, at once": at_once.seconds,
        "effective tokens/s, at random": at_random.tokens_per_second,
        "effective tokens/s, at once": at_once.tokens_per_second,
    }
    return [
        {
            "name": "programs compiled for arrivals and departures",
            "value": at_random.compilations,
            "bound": 0,
            "sense": "at most",
            "unit": "programs",
            "baselines": facts,
        },
        {
            "name": "effective tokens/s over all tasks submitted at once",
            "value": at_random.tokens_per_second / at_once.tokens_per_second,
            "bound": 1 - MOST_LESS_THROUGHPUT,
            "sense": "at least",
            "unit": "ratio",
            "baselines": facts,
        },
    ]


def bits(args: argparse.Namespace) -> list[Record]:
    """Compares the adapters of tasks that arrive at random with those that they get alone."""
    setting = Setting(args)
    at_random = Run(setting)
    at_random.train(setting.arrivals(0.4 * args.seconds))
    alone = adapters_alone(setting)
    equal = sum(_same(at_random.adapters[name], alone[name]) for name in alone)
    steps = sum(prepared.steps for prepared in setting.tasks.values())
    return [
        {
            "name": "adapters with the bits that the task gets alone",
            "value": equal,
            "bound": len(alone),
            "sense": "at least",
            "unit": "adapters",
            "baselines": {"tasks": len(alone), "places": setting.slots, "steps": steps},
        }
    ]


def planning(args: argparse.Namespace) -> list[Record]:
    """Measures how long it takes to choose among tasks that arrive together and of which half can
    train. The devices train the round before meanwhile."""
    rng = np.random.default_rng(0)
    shape = ShapeClass(rows=16, row_len=512, chunk_len=128, max_sequences=4)
    tokens = {f"task{i}": int(rng.integers(1, 33)) * 250 for i in range(args.tasks)}
    places = args.tasks // 2
    seconds = []
    for together in (True, False):
        candidates = [Candidate(name, 0, 0 if together else i) for i, name in enumerate(tokens)]
        for _ in range(args.rounds):
            began = time.perf_counter()
            found = schedule(
                candidates,
                lambda names: "all places are taken" if len(names) > places else None,
                lambda names: tokens_per_microbatch([tokens[name] for name in names], shape),
            )
            seconds.append(time.perf_counter() - began)
    return [
        {
            "name": f"choosing {len(found.runs)} of {args.tasks} tasks",
            "value": max(seconds),
            "bound": MOST_PLANNING,
            "sense": "at most",
            "unit": "s",
            "baselines": {
                "median s, tasks that arrive together": statistics.median(seconds[: args.rounds]),
                "median s, tasks one after another": statistics.median(seconds[args.rounds :]),
            },
        }
    ]


class Setting:
    """Small tasks of the demo backbone, four for every place.

    Attributes:
      backbone: the backbone.
      tasks: by name, the tasks.
      slots: number of places.
      options: the options of the engine.
    """

    def __init__(self, args: argparse.Namespace):
        self.backbone = load_backbone(resolve_path("jaxmux:demo/base"), "float32")
        self.tasks = small_tasks(self.backbone, args)
        self.slots = max(2, args.tasks // 4)
        modules = tuple(sorted(self.tasks["task0"].targets))
        shape = ShapeClass(rows=8, row_len=128, chunk_len=64, max_sequences=8)
        self.options = EngineOptions(shape, PoolSpec(self.slots, 16, modules), remat="none")

    def arrivals(self, seconds: float) -> dict[str, float]:
        """By name, when each task arrives: as many at once as there are places, and the others at
        random within these seconds."""
        rng, names = np.random.default_rng(1), list(self.tasks)
        later = {name: float(rng.uniform(0, seconds)) for name in names[self.slots :]}
        return dict.fromkeys(names, 0.0) | later


def small_tasks(backbone: Backbone, args: argparse.Namespace) -> dict[str, PreparedTask]:
    """By name, tasks of random lengths, ranks and batch sizes, which together train for about
    `args.seconds` seconds."""
    rng = np.random.default_rng(0)
    found = {}
    for i in range(args.tasks):
        longest = int(rng.choice([24, 48, 96]))
        lengths = rng.integers(longest // 2, longest, 64).tolist()
        batch, rank = int(rng.choice([4, 8, 16])), int(rng.choice([4, 8, 16]))
        steps = max(2, round(float(rng.uniform(0.5, 1.5)) * args.seconds * 0.6))
        found[f"task{i}"] = random_task(
            backbone.config, f"task{i}", lengths, batch, steps, rank, seed=i
        )
    return found


class Run:
    """Trains tasks that arrive at given times.

    Attributes:
      seconds: seconds from the first arrival to the last end.
      tokens_per_second: tokens of samples, without padding, per second.
      compilations: number of programs that were compiled.
      adapters: by name, the adapters.
    """

    def __init__(self, setting: Setting):
        """Compiles the programs."""
        self._tasks = setting.tasks
        self._engine = Engine(setting.backbone, setting.options)
        self._live = LiveTraining(self._engine, lambda task: self._tasks[task.name])

    def train(self, arrivals: dict[str, float]) -> None:
        """Trains all tasks; `arrivals` gives the second in which each is registered."""
        waiting = sorted(arrivals, key=lambda name: (arrivals[name], name))
        began = time.perf_counter()
        with counted_compilations() as compiled:
            while waiting or not all(self._ended(name) for name in arrivals):
                now = time.perf_counter() - began
                while waiting and arrivals[waiting[0]] <= now:
                    name = waiting.pop(0)
                    self._live.register(self._tasks[name].task)
                self._live.step()
        self.seconds = time.perf_counter() - began
        self.compilations = len(compiled)
        tokens = sum(self._status(name).meter.effective_tokens for name in arrivals)
        self.tokens_per_second = tokens / self.seconds
        self.adapters = {name: self._live.adapter(name) for name in arrivals}
        self._engine.close()

    def _status(self, name: str) -> TaskStatus:
        return self._live.status(name)

    def _ended(self, name: str) -> bool:
        # A command is carried out in the next step.
        known = {status.name: status.state for status in self._live.statuses()}
        return known.get(name) == "succeeded"


def adapters_alone(setting: Setting) -> dict[str, Any]:
    """By name, the adapters that tasks get alone, in the same pool."""
    engine = Engine(setting.backbone, setting.options)
    found = {}
    for number, (name, task) in enumerate(setting.tasks.items()):
        print(f"task {number + 1} of {len(setting.tasks)}, alone", flush=True)
        engine.register_tasks([task])
        while not engine.finished:
            engine.train_round()
        engine.drain()
        found[name] = engine.adapter(name)
        engine.release(name)
    engine.close()
    return found


def _same(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


@contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The names of the programs that are compiled within the context."""
    names: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("Compiling "):
                names.append(record.getMessage().split()[1])

    logger, handler = logging.getLogger("jax._src.interpreters.pxla"), Handler()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    before = jax.config.jax_log_compiles
    traced = logging.getLogger("jax._src.dispatch")
    level = traced.level
    traced.setLevel(logging.ERROR)
    jax.config.update("jax_log_compiles", True)
    try:
        yield names
    finally:
        jax.config.update("jax_log_compiles", before)
        logger.removeHandler(handler)
        logger.propagate = propagate
        traced.setLevel(level)
