"""What an arrival and a departure cost on a large backbone, for benchmark_live.py."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmark_records import Record
from benchmark_step import llama_config
from sharding_runs import random_backbone

from jaxmux.data import GlobalBatches
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    device_peak,
    planned_remat,
)
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.devices import ONE_DEVICE, Deployment
from jaxmux.planner.packing import ShapeClass
from jaxmux.profiling import random_task
from jaxmux.runs.run_shape import run_costs

MOST_LOST_TIME, MOST_LONGER_ROUNDS, MOST_PEAK_ERROR, MOST_WEAR = 0.10, 0.10, 0.02, 0.02
# Seconds in which a task enters once its data and its adapter are there.
MOST_ENTERING = 0.1
# Arrivals and departures of which each is measured by itself.
MEASURED = 3


def large(args: argparse.Namespace) -> list[Record]:
    """Measures tasks of mixed rank and length on a large backbone."""
    backbone = random_backbone(llama_config(args), Deployment((ONE_DEVICE,)))
    tasks = mixed_tasks(backbone.config, args, args.tasks + 1)
    course = come_and_go(backbone, tasks, args)
    wear = course.worn / course.fresh - 1
    records = [
        *_costs_of_changes(course),
        at_most(
            "rounds after many arrivals and departures, over a fresh engine's", wear, MOST_WEAR
        ),
    ]
    peak = device_peak()
    facts = course.facts
    if peak:
        predicted = predicted_peak(course, backbone, tasks[:-1])
        facts |= {"peak GiB": peak / 2**30, "predicted peak GiB": predicted / 2**30}
        error = abs(peak / predicted - 1)
        records.append(at_most("peak memory beside its prediction", error, MOST_PEAK_ERROR))
    return [record | {"baselines": facts} for record in records]


def pipeline(args: argparse.Namespace) -> list[Record]:
    """Measures the same tasks on a pipeline of two stages. Its rounds overlap, so microbatches
    should be in flight whenever a task comes or goes."""
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
    records = *_costs_of_changes(course), never_empty
    return [record | {"baselines": course.facts} for record in records]


def _costs_of_changes(course: "Course") -> list[Record]:
    """What an arrival and a departure cost. The rounds after one should together take no longer
    than others. A single round may: `train_round` returns later while the round after a change is
    packed, and earlier the next time, and the devices are busy meanwhile."""
    lost = [
        at_most(f"time lost by {what}, over a round", statistics.median(rounds), MOST_LOST_TIME)
        for what, rounds in (("an arrival", course.arrivals), ("a departure", course.departures))
    ]
    longer = course.changing / course.as_many - 1
    name = "rounds with an arrival and a departure before each, over others"
    changing = at_most(name, longer, MOST_LONGER_ROUNDS)
    entering = at_most("a task that is prepared enters", course.entering, MOST_ENTERING)
    return [*lost, changing, entering | {"unit": "s"}]


class Course(NamedTuple):
    """Rounds of an engine before, around and after arrivals and departures.

    Attributes:
      arrivals: by how much four rounds, from the one in which a task arrives, took longer than four
        others, over a round; for each of several arrivals.
      departures: the same for tasks that leave.
      as_many: median seconds of a round of as many tasks.
      fresh: median seconds of a round before the first arrival.
      worn: median seconds of a round after the last departure, of as many tasks.
      changing: mean seconds of a round with an arrival and a departure before each.
      entering: median seconds of the registration of a task.
      changes: the arrivals and departures.
      options: the options of the engine.
      remat: the remat policies of the engine's layers.
      facts: the figures that these were made from.
    """

    arrivals: list[float]
    departures: list[float]
    as_many: float
    fresh: float
    worn: float
    changing: float
    entering: float
    changes: "Changes"
    options: EngineOptions
    remat: str | tuple[str, ...]
    facts: dict[str, Any]


def come_and_go(backbone: Any, tasks: Sequence[PreparedTask], args: argparse.Namespace) -> Course:
    """Trains all tasks but the last one, lets that one arrive and leave several times, and then
    lets many others come and go.

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
    changes, arriving, leaving = Changes(engine), [], []
    for _ in range(MEASURED):
        arriving.append(rounds_around(engine, lambda: changes.arrive(last), args.rounds))
        leaving.append(rounds_around(engine, lambda: changes.leave(last.task.name), args.rounds))
    packing, began = engine.seconds_waited, time.perf_counter()
    comings(engine, changes, tasks[0], args.comings)
    changing, waited = time.perf_counter() - began, engine.seconds_waited - packing
    after = Rounds(engine).train(args.rounds)
    engine.drain()
    fresh, worn = statistics.median(before.seconds[2:]), statistics.median(after.seconds[2:])
    with_last = statistics.median(second for own in arriving for second in own[5:])
    facts = {
        "tasks": len(first),
        "seconds a round": fresh,
        "seconds a round, one task more": with_last,
        "seconds of the rounds around each arrival": [own[1:8] for own in arriving],
        "seconds of the rounds around each departure": [own[1:8] for own in leaving],
        "seconds of the slowest calls that let a task arrive": sorted(changes.arrivals)[-10:],
        "seconds of the slowest calls that let a task leave": sorted(changes.departures)[-10:],
        "arrivals and departures": changes.count,
        "seconds of rounds with an arrival and a departure before each": changing,
        "seconds of these in which the host waited for microbatches": waited,
        "seconds a round, after them": worn,
    }
    # The results of the round in which the task enters arrive with the second call after it, those
    # of a pipeline with the third; so half of four rounds have it.
    four = 4 * statistics.mean([fresh, with_last])
    lost = [[(sum(own[3:7]) - four) / with_last for own in found] for found in (arriving, leaving)]
    others = changes, engine.options, engine.remat, facts
    engine.close()
    entering = statistics.median(changes.arrivals)
    seconds = changing / (args.comings // 2)
    return Course(*lost, with_last, fresh, worn, seconds, entering, *others)


def rounds_around(engine: Engine, change: Callable[[], None], count: int) -> list[float]:
    """The seconds of three rounds before a change and of some after it."""
    rounds = Rounds(engine).train(3)
    change()
    return rounds.train(count).seconds


def at_most(name: str, value: float, bound: float) -> Record:
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
    return [named(kinds[i % 3], f"mixed{i}", seed=i) for i in range(count)]


def named(kind: PreparedTask, name: str, seed: int) -> PreparedTask:
    """A task with the samples of another one, in an order of its own."""
    return dataclasses.replace(
        kind,
        task=dataclasses.replace(kind.task, name=name),
        batches=GlobalBatches(kind.samples.samples, kind.task.batch_size, seed),
    )


class Rounds:
    """Rounds of an engine, with the seconds from the results of one to those of the next.

    Attributes:
      seconds: the seconds.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.seconds: list[float] = []
        self._last = time.perf_counter()

    def train(self, count: int) -> "Rounds":
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
      arrivals: seconds that each arrival took.
      departures: seconds that each departure took.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.count = self.in_flight = 0
        self.arrivals: list[float] = []
        self.departures: list[float] = []
        # What the last task that left has left behind.
        self._copies: tuple[Callable[[], Any], ...] = ()

    def arrive(self, task: PreparedTask) -> None:
        self._change(lambda: self._engine.register_tasks([task]), self.arrivals)

    def leave(self, name: str) -> None:
        """Lets a task leave as one that succeeds does: its adapter and its optimizer state are
        copied to the host, so that they can be written to disk."""

        def succeed() -> None:
            snapshot = self._engine.snapshot(name)
            self._copies = self._engine.result(name, snapshot), snapshot
            self._engine.release(name)

        self._change(succeed, self.departures)

    def _change(self, change: Callable[[], None], seconds: list[float]) -> None:
        before, began = microbatches_in_flight(self._engine), time.perf_counter()
        change()
        seconds.append(time.perf_counter() - began)
        self.count += 1
        self.in_flight += min(before, microbatches_in_flight(self._engine)) > 0


def microbatches_in_flight(engine: Engine) -> int:
    """Number of microbatches that have begun in a pipeline and whose last backward pass has not
    been dispatched; 0 on one device, which has no pipeline."""
    orders = (getattr(replica, "_order", None) for replica in engine._executor._replicas)
    return sum(order.begun - order.ended for order in orders if order)


def comings(engine: Engine, changes: Changes, task: PreparedTask, count: int) -> None:
    """Lets tasks come and go one after another: in every round one leaves and one arrives."""
    before = None
    for i in range(count // 2):
        name = f"visitor{i}"
        if before:
            changes.leave(before)
        changes.arrive(named(task, name, seed=i))
        engine.train_round()
        before = name
    if before:
        changes.leave(before)


def predicted_peak(course: Course, backbone: Backbone, tasks: Sequence[PreparedTask]) -> float:
    costs = run_costs(tasks, backbone.config, backbone.compute_dtype)
    options = course.options
    admission = Admission(costs.replica, options.shape, reserved=options.reserved)
    return admission.peak([p.pool for p in tasks], planned_remat(course.remat))
