"""What turns and sizes do to rounds on a large backbone, for benchmark_live.py."""

import argparse
import statistics
import time

import jax.numpy as jnp
import numpy as np
from benchmark_records import Record
from benchmark_step import llama_config
from live_changes import MOST_ENTERING, Changes, Rounds, at_most, comings, mixed_tasks
from sharding_runs import random_backbone

from jaxmux.engine import Engine, EngineOptions, EngineSize
from jaxmux.models import (
    Backbone,
)
from jaxmux.planner.costs import PoolSpec
from jaxmux.planner.devices import ONE_DEVICE, Deployment
from jaxmux.planner.packing import ShapeClass
from jaxmux.profiling import random_task

# A round of four microbatches may need a fifth one for the small task.
LEAST_MORE_STEPS, LEAST_KEPT = 2.0, 0.8


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


def mean_of(rounds: Rounds) -> float:
    return statistics.fmean(rounds.seconds)


def growth(args: argparse.Namespace) -> list[Record]:
    """Measures an engine whose pool and microbatches are doubled and halved while tasks of mixed
    rank and length train."""
    config = llama_config(args)
    one = Deployment((ONE_DEVICE,))
    backbone = random_backbone(config, Deployment.parse(args.mesh) if args.mesh else one)
    tasks = mixed_tasks(config, args, args.tasks // 2)
    row_len = 512 // args.scale
    rows, slots = 8192 // args.scale // row_len, args.tasks // 2 + 2
    shape = ShapeClass(rows // 2, row_len, max(64, 128 // args.scale), 4)
    pool = PoolSpec(slots, max(p.task.adapter.rank for p in tasks), tuple(sorted(tasks[0].targets)))
    engine = Engine(backbone, EngineOptions(shape, pool))
    engine.warm_up()
    engine.register_tasks(tasks)
    small, large = engine.size, EngineSize(2 * slots, rows)
    facts: dict[str, float] = {"tasks": len(tasks)}
    # In the first rounds after a compilation the host waits for the device before every update.
    # Then it goes ahead, and one call of `train_round` returns a round earlier than the others.
    Rounds(engine).train(args.rounds)
    before, lost = mean_of(Rounds(engine).train(args.rounds)), {}
    for name, size in (("growing", large), ("shrinking", small)):
        programs, beside = engine.compile_ahead(size), Rounds(engine)
        began = time.perf_counter()
        while not programs.ready:
            beside.train(1)
        compiling = time.perf_counter() - began
        changing = Rounds(engine).train(2)
        began = time.perf_counter()
        engine.resize(size, programs)
        moved = time.perf_counter() - began
        # The results of the last round of the old size arrive now. Programs are loaded when they
        # run for the first time, in the first rounds of the new size.
        rounds = changing.train(args.rounds).seconds[2:]
        after = mean_of(Rounds(engine).train(args.rounds))
        seconds = sum(rounds) - before - (len(rounds) - 1) * after
        lost[name] = seconds / before
        facts |= {
            f"seconds a round before {name}": before,
            f"seconds of compiling beside training before {name}": compiling,
            f"seconds a round beside it, before {name}": statistics.median(beside.seconds),
            f"seconds until the first round after {name}": moved,
            f"seconds lost by {name}, until the end of {len(rounds)} rounds": seconds,
            f"seconds a round after {name}": after,
        }
        before = after
    changes = Changes(engine)
    comings(engine, changes, tasks[0], min(args.comings, 20))
    facts["seconds of the slowest call of register_tasks"] = max(changes.arrivals)
    engine.close()
    records = [
        at_most(f"time lost by {name}, over a round", value, 1.0) for name, value in lost.items()
    ]
    entering = at_most(
        "a task that is prepared enters", statistics.median(changes.arrivals), MOST_ENTERING
    )
    return [record | {"baselines": facts} for record in (*records, entering | {"unit": "s"})]
