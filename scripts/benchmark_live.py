"""Tasks that come and go: what arrivals and departures cost, and that they change no adapter.

On a CPU, tasks of the bundled demo backbone that arrive at random, beside the same tasks submitted
at once and beside each task alone:

  python scripts/benchmark_live.py demo --out benchmarks/live.json

On one GPU, the shape of Llama-3.1-8B with random bf16 weights, with tasks of mixed rank and length
of which one more arrives, one leaves, and many arrive and leave one after another:

  python scripts/benchmark_live.py large --out benchmarks/live.json

The same on two GPUs that are the stages of a pipeline, which should never be empty meanwhile:

  NCCL_NVLS_ENABLE=0 python scripts/benchmark_live.py pipeline --out benchmarks/live.json

On one GPU with the same shape, a task with a batch of 4 beside one with a batch of 512:

  python scripts/benchmark_live.py waiting --out benchmarks/live.json

On the same shape, an engine that grows and shrinks while it trains:

  python scripts/benchmark_live.py growth --out benchmarks/live.json

A record has a name, a value, a bound with its sense ("at least" or "at most"), a unit, and the
figures that it was made from. `--seconds`, `--tasks`, `--layers`, `--hidden`, `--vocab` and
`--scale` shorten a dry run; that of the pipeline needs two devices:

  XLA_FLAGS=--xla_force_host_platform_device_count=2 python scripts/benchmark_live.py pipeline \
      --out /tmp/dry.json --tasks 12 --rounds 6 --comings 4 --layers 2 --hidden 256 --vocab 512 \
      --scale 8
"""

import argparse
import dataclasses
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmark_records import Record, replace_records
from benchmark_sharding import random_backbone
from benchmark_step import llama_config

from jaxmux.engine import Engine, EngineOptions, EngineSize, PreparedTask
from jaxmux.installed_versions import installed_versions
from jaxmux.live import LiveTraining, TaskStatus
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    device_peak,
    load_backbone,
    planned_remat,
)
from jaxmux.package_files import resolve_path
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.devices import ONE_DEVICE, Deployment
from jaxmux.planner.packing import ShapeClass
from jaxmux.profiling import in_other_names, random_task
from jaxmux.runs.run_shape import run_costs

# Figures that should be reached.
MOST_LESS_THROUGHPUT, MOST_LONGER_ROUND, MOST_PEAK_ERROR, MOST_WEAR = 0.05, 0.10, 0.02, 0.02
# A round of four microbatches may need a fifth one for the small task.
LEAST_MORE_STEPS, LEAST_KEPT = 2.0, 0.8


def main() -> None:
    args = parse_arguments()
    prefix = f"live, {args.part}, "
    records = [
        {"name": prefix + record.pop("name")} | record | _circumstances()
        for record in PARTS[args.part](args)
    ]
    replace_records(args.out, prefix, records)
    for record in records:
        print(record["name"], record["value"], record["sense"], record["bound"], flush=True)


def _circumstances() -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "device": jax.devices()[0].device_kind,
        "versions": installed_versions("jaxmux", "jax", "jaxlib"),
    }


# Small tasks that come and go at random.


def demo(args: argparse.Namespace) -> list[Record]:
    """Measures tasks of the demo backbone."""
    backbone = load_backbone(resolve_path("jaxmux:demo/base"), "float32")
    tasks = small_tasks(backbone, args)
    slots = max(2, args.tasks // 4)
    modules = tuple(sorted(tasks["task0"].targets))
    options = EngineOptions(
        ShapeClass(rows=8, row_len=128, chunk_len=64, max_sequences=8),
        PoolSpec(slots, 16, modules),
        remat="none",
    )
    at_once = Run(backbone, options, tasks)
    at_once.train(dict.fromkeys(tasks, 0.0))
    rng = np.random.default_rng(1)
    # Tasks arrive somewhat faster than they can be trained, so that no place stays free for long.
    spread = dict.fromkeys(tasks, 0.0) | {
        name: float(rng.uniform(0, 0.6 * at_once.seconds)) for name in list(tasks)[slots:]
    }
    spread_out = Run(backbone, options, tasks)
    spread_out.train(spread)
    alone = adapters_alone(backbone, options, tasks)
    equal = sum(_same(spread_out.adapters[name], alone[name]) for name in tasks)
    ratio = spread_out.tokens_per_second / at_once.tokens_per_second
    facts = {
        "tasks": len(tasks),
        "places": slots,
        "seconds, at random": spread_out.seconds,
        "seconds, at once": at_once.seconds,
        "effective tokens/s, at random": spread_out.tokens_per_second,
        "effective tokens/s, at once": at_once.tokens_per_second,
    }
    return [
        {
            "name": "programs compiled for arrivals and departures",
            "value": spread_out.compilations,
            "bound": 0,
            "sense": "at most",
            "unit": "programs",
            "baselines": facts,
        },
        {
            "name": "effective tokens/s over all tasks submitted at once",
            "value": ratio,
            "bound": 1 - MOST_LESS_THROUGHPUT,
            "sense": "at least",
            "unit": "ratio",
            "baselines": facts,
        },
        {
            "name": "adapters with the bits that the task gets alone",
            "value": equal,
            "bound": len(tasks),
            "sense": "at least",
            "unit": "adapters",
            "baselines": facts,
        },
    ]


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

    def __init__(
        self,
        backbone: Backbone,
        options: EngineOptions,
        tasks: dict[str, PreparedTask],
    ):
        """Compiles the programs."""
        self._tasks = tasks
        self._engine = Engine(backbone, options)
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


def adapters_alone(
    backbone: Backbone, options: EngineOptions, tasks: dict[str, PreparedTask]
) -> dict[str, Any]:
    """By name, the adapters that tasks get alone, in the same pool."""
    engine = Engine(backbone, options)
    found = {}
    for name, task in tasks.items():
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


# A large backbone: what one arrival and one departure cost.


def large(args: argparse.Namespace) -> list[Record]:
    """Measures tasks of mixed rank and length on a large backbone."""
    backbone = random_backbone(llama_config(args), Deployment((ONE_DEVICE,)))
    tasks = mixed_tasks(backbone.config, args, args.tasks + 1)
    course = come_and_go(backbone, tasks, args)
    wear = course.worn / course.fresh - 1
    records = [
        _at_most(
            f"the round after {what}, over rounds of as many tasks",
            max(seconds) / course.as_many - 1,
            MOST_LONGER_ROUND,
        )
        for what, seconds in (("an arrival", course.arriving), ("a departure", course.leaving))
    ]
    name = "rounds after many arrivals and departures, over a fresh engine's"
    records.append(_at_most(name, wear, MOST_WEAR))
    peak = device_peak()
    facts = course.facts
    if peak:
        predicted = predicted_peak(course, backbone, tasks[:-1])
        facts |= {"peak GiB": peak / 2**30, "predicted peak GiB": predicted / 2**30}
        error = abs(peak / predicted - 1)
        records.append(_at_most("peak memory beside its prediction", error, MOST_PEAK_ERROR))
    return [record | {"baselines": facts} for record in records]


def pipeline(args: argparse.Namespace) -> list[Record]:
    """Measures the same tasks on a pipeline of two stages. Its rounds overlap, so microbatches
    should be in flight whenever a task comes or goes, and the next rounds together should take no
    longer than others. A single one may: `train_round` returns later while the round after a change
    is packed, and the devices are busy meanwhile."""
    config = llama_config(args)
    backbone = random_backbone(config, Deployment.parse("pp2"))
    course = come_and_go(backbone, mixed_tasks(config, args, args.tasks + 1), args)
    never_empty: Record = {
        "name": "arrivals and departures before and after which microbatches are in flight",
        "value": course.changes.in_flight,
        "bound": course.changes.count,
        "sense": "at least",
        "unit": "changes",
    }
    lost = [
        _at_most(
            f"time lost by {what}, over a round",
            sum(seconds) / course.as_many - len(seconds),
            MOST_LONGER_ROUND,
        )
        for what, seconds in (("an arrival", course.arriving), ("a departure", course.leaving))
    ]
    return [record | {"baselines": course.facts} for record in (*lost, never_empty)]


class Course(NamedTuple):
    """Rounds of an engine before, around and after arrivals and departures.

    Attributes:
      arriving: seconds of four rounds, from the one in which a task arrives.
      leaving: the same for a task that leaves.
      as_many: median seconds of a round of as many tasks.
      fresh: median seconds of a round before the first arrival.
      worn: median seconds of a round after the last departure, of as many tasks.
      changes: the arrivals and departures.
      options: the options of the engine.
      remat: the remat policies of the engine's layers.
      facts: the figures that these were made from.
    """

    arriving: list[float]
    leaving: list[float]
    as_many: float
    fresh: float
    worn: float
    changes: "Changes"
    options: EngineOptions
    remat: str | tuple[str, ...]
    facts: dict[str, Any]


def come_and_go(backbone: Any, tasks: Sequence[PreparedTask], args: argparse.Namespace) -> Course:
    """Trains all tasks but the last one, lets that one arrive and later leave, and then lets many
    others come and go.

    Args:
      backbone: from `random_backbone`.
      tasks: from `mixed_tasks`.
      args: the arguments of the command.
    """
    *first, last = tasks
    ranks, modules = (p.task.adapter.rank for p in tasks), tuple(sorted(last.targets))
    # A task that leaves a pipeline keeps its place until the round that has begun has ended.
    pool = PoolSpec(len(first) + 2, max(ranks), modules)
    row_len = 512 // args.scale
    shape = ShapeClass(8192 // args.scale // row_len, row_len, max(64, 128 // args.scale), 4)
    engine = Engine(backbone, EngineOptions(shape, pool))
    engine.warm_up()
    engine.register_tasks(first)
    before = Rounds(engine).train(args.rounds)
    changes = Changes(engine)
    arriving = Rounds(engine).train(3)
    changes.arrive(last)
    arriving.train(args.rounds)
    leaving = Rounds(engine).train(3)
    changes.leave(last.task.name)
    leaving.train(args.rounds)
    comings(engine, changes, tasks[0], args.comings)
    after = Rounds(engine).train(args.rounds)
    engine.drain()
    fresh, worn = statistics.median(before.seconds[2:]), statistics.median(after.seconds[2:])
    with_last = statistics.median(arriving.seconds[-args.rounds + 2 :])
    facts = {
        "tasks": len(first),
        "seconds a round": fresh,
        "seconds a round, one task more": with_last,
        "seconds of the rounds around the arrival": arriving.seconds[1:8],
        "seconds of the rounds around the departure": leaving.seconds[1:8],
        "seconds of the call of register_tasks": arriving.changed,
        "arrivals and departures": changes.count,
        "seconds a round, after them": worn,
    }
    # The results of the round in which the task enters arrive with the second call after it, those
    # of a pipeline with the third.
    around = arriving.seconds[3:7], leaving.seconds[3:7]
    others = changes, engine.options, engine.remat, facts
    engine.close()
    return Course(*around, with_last, fresh, worn, *others)


def _at_most(name: str, value: float, bound: float) -> Record:
    return {"name": name, "value": value, "bound": bound, "sense": "at most", "unit": "ratio"}


def mixed_tasks(config: BackboneConfig, args: argparse.Namespace, count: int) -> list[PreparedTask]:
    """Tasks of three lengths and three ranks, that never end."""
    kinds = [
        random_task(config, "kind", [length // args.scale] * 64, samples, 10**6, rank, seed=length)
        for length, samples, rank in ((64, 8, 8), (256, 2, 16), (512, 1, 32))
    ]
    # As a server does, adapters are made beside training.
    made = [kind.make_adapter() for kind in kinds]
    kinds = [
        dataclasses.replace(kind, make_adapter=lambda adapter=adapter: adapter)
        for kind, adapter in zip(kinds, made, strict=True)
    ]
    found = [in_other_names(kinds[i % 3], 1)[0] for i in range(count)]
    return [
        dataclasses.replace(p, task=dataclasses.replace(p.task, name=f"mixed{i}"))
        for i, p in enumerate(found)
    ]


# A small task beside a large one.


def waiting(args: argparse.Namespace) -> list[Record]:
    """Measures a small task beside a large one, in rounds of whole batches and in rounds of at most
    four microbatches of a task, as a server trains them."""
    backbone = Backbone.random(llama_config(args), dtype=jnp.bfloat16)
    row_len = 512 // args.scale
    shape = ShapeClass(8192 // args.scale // row_len, row_len, max(64, 128 // args.scale), 4)
    sizes, rng = {"small": 4, "large": 512}, np.random.default_rng(0)
    lengths = {
        name: (rng.integers(64, 448, batch) // args.scale).tolist() for name, batch in sizes.items()
    }
    tasks = [
        random_task(backbone.config, name, lengths[name], batch, 10**6, 16)
        for name, batch in sizes.items()
    ]
    found = {}
    for name, most_tokens in (("whole batches", None), ("turns", 4 * shape.tokens)):
        pool = PoolSpec(2, 16, tuple(sorted(tasks[0].targets)))
        engine = Engine(backbone, EngineOptions(shape, pool, round_tokens=most_tokens))
        engine.warm_up()
        engine.register_tasks(tasks)
        found[name] = steps_and_seconds(engine, args.rounds)
        engine.close()
        del engine
    facts = {
        f"{what}, {name}": value
        for name, (steps, seconds) in found.items()
        for what, value in [
            *((f"steps/s of a batch of {sizes[task]}", n / seconds) for task, n in steps.items()),
            ("tokens/s", sum(sum(lengths[t]) * n for t, n in steps.items()) / seconds),
        ]
    }

    def ratio(what: str) -> float:
        return facts[f"{what}, turns"] / facts[f"{what}, whole batches"]

    return [
        {
            "name": f"{what} beside a batch of 512, over rounds of whole batches",
            "value": ratio(what),
            "bound": bound,
            "sense": "at least",
            "unit": "ratio",
            "baselines": facts,
        }
        for what, bound in (
            ("steps/s of a batch of 4", LEAST_MORE_STEPS),
            ("tokens/s", LEAST_KEPT),
        )
    ]


def steps_and_seconds(engine: Engine, batches: int) -> tuple[dict[str, int], float]:
    """The steps of each task, and the seconds, of some global batches of the large task, after its
    first one."""

    def steps() -> dict[str, int]:
        return {name: engine.progress(name).step for name in engine.names}

    def train(large: int) -> float:
        while engine.progress("large").step < large:
            engine.train_round()
        return time.perf_counter()

    began, before = train(1), steps()
    seconds = train(1 + batches) - began
    return {name: n - before[name] for name, n in steps().items()}, seconds


# An engine that grows and shrinks.


def growth(args: argparse.Namespace) -> list[Record]:
    """Measures an engine whose pool and microbatches are doubled and halved while tasks of mixed
    rank and length train."""
    backbone = Backbone.random(llama_config(args), dtype=jnp.bfloat16)
    tasks = mixed_tasks(backbone.config, args, args.tasks // 2)
    row_len = 512 // args.scale
    rows, slots = 8192 // args.scale // row_len, args.tasks // 2 + 2
    shape = ShapeClass(rows // 2, row_len, max(64, 128 // args.scale), 4)
    pool = PoolSpec(slots, max(p.task.adapter.rank for p in tasks), tuple(sorted(tasks[0].targets)))
    engine = Engine(backbone, EngineOptions(shape, pool))
    engine.warm_up()
    engine.register_tasks(tasks)
    small, large = engine.size, EngineSize(2 * slots, rows)
    facts: dict[str, float | list[float]] = {"tasks": len(tasks)}
    switches = []
    for name, size in (("growing", large), ("shrinking", small)):
        before = statistics.median(Rounds(engine).train(args.rounds).seconds[2:])
        programs, beside = engine.compile_ahead(size), Rounds(engine)
        began = time.perf_counter()
        while not programs.ready:
            beside.train(1)
        compiling = time.perf_counter() - began
        engine.drain()
        began = time.perf_counter()
        engine.resize(size, programs)
        jax.block_until_ready(engine.state)
        switches.append((time.perf_counter() - began) / before)
        facts |= {
            f"seconds a round before {name}": before,
            f"seconds of compiling beside training before {name}": compiling,
            f"seconds a round beside it, before {name}": statistics.median(beside.seconds),
            f"seconds of {name}": switches[-1] * before,
        }
    after = statistics.median(Rounds(engine).train(args.rounds).seconds[2:])
    facts["seconds a round after shrinking"] = after
    engine.close()
    return [
        {
            "name": f"the time of {name}, over a round",
            "value": switch,
            "bound": 1.0,
            "sense": "at most",
            "unit": "ratio",
            "baselines": facts,
        }
        for name, switch in zip(("growing", "shrinking"), switches, strict=True)
    ]


class Rounds:
    """Rounds of an engine, with the seconds from the results of one to those of the next.

    Attributes:
      seconds: the seconds.
      changed: seconds between the last call of `train` and the one before.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.seconds: list[float] = []
        self.changed = 0.0
        self._last = time.perf_counter()

    def train(self, count: int) -> "Rounds":
        self.changed = time.perf_counter() - self._last
        for _ in range(count):
            self._engine.train_round()
            now = time.perf_counter()
            self.seconds.append(now - self._last)
            self._last = now
        return self


class Changes:
    """Arrivals and departures between two rounds of an engine.

    Attributes:
      count: number of arrivals and departures so far.
      in_flight: number of those before and after which a pipeline had microbatches in flight.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.count = self.in_flight = 0

    def arrive(self, task: PreparedTask) -> None:
        self._change(lambda: self._engine.register_tasks([task]))

    def leave(self, name: str) -> None:
        self._change(lambda: self._engine.release(name))

    def _change(self, change: Callable[[], None]) -> None:
        before = microbatches_in_flight(self._engine)
        change()
        self.count += 1
        self.in_flight += min(before, microbatches_in_flight(self._engine)) > 0


def microbatches_in_flight(engine: Engine) -> int:
    """Number of microbatches that have begun in a pipeline and whose last backward pass has not
    been dispatched; 0 on one device, which has no pipeline."""
    replicas = getattr(engine._executor, "_replicas", [])
    return sum(replica._order.begun - replica._order.ended for replica in replicas)


def comings(engine: Engine, changes: Changes, task: PreparedTask, count: int) -> None:
    """Lets tasks come and go one after another: in every round one leaves and one arrives."""
    before = None
    for i in range(count // 2):
        name = f"visitor{i}"
        renamed = dataclasses.replace(task, task=dataclasses.replace(task.task, name=name))
        if before:
            changes.leave(before)
        changes.arrive(renamed)
        engine.train_round()
        before = name
    if before:
        changes.leave(before)


def predicted_peak(course: Course, backbone: Backbone, tasks: Sequence[PreparedTask]) -> float:
    costs = run_costs(tasks, backbone.config, backbone.compute_dtype)
    options = course.options
    admission = Admission(costs.replica, options.shape, reserved=options.reserved)
    return admission.peak([p.pool for p in tasks], planned_remat(course.remat))


PARTS = {
    "demo": demo,
    "large": large,
    "pipeline": pipeline,
    "waiting": waiting,
    "growth": growth,
}
TASKS = {"demo": 64, "large": 32, "pipeline": 64, "growth": 32}


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, help="64, on one GPU with the large backbone 32")
    parser.add_argument("--seconds", type=float, default=300, help="of the demo's tasks together")
    parser.add_argument("--rounds", type=int, default=12, help="that are measured at a time")
    parser.add_argument("--comings", type=int, default=200, help="arrivals and departures")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--scale", type=int, default=1, help="divides the lengths of a dry run")
    args = parser.parse_args(arguments)
    args.tasks = args.tasks or TASKS.get(args.part)
    return args


if __name__ == "__main__":
    main()
