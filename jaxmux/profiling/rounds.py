"""Whole rounds of the engine on random tasks: what a user's step takes."""

import dataclasses
import math
import statistics
import time

import jax
import numpy as np

from jaxmux.data import GlobalBatches, Sample, Samples
from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import LoRA, initial_adapter, resolve_targets
from jaxmux.planner import ShapeClass
from jaxmux.planner.profile import Measurement, RoundPoint
from jaxmux.tasks import Task

from .grid import OPTIMIZER, shape_of

# The first compiles, the second is the first to find a round before it.
_WARM_UP_ROUNDS = 2
_FEWEST_ROUNDS = 5


def measure_round(backbone: Backbone, point: RoundPoint, seconds: float) -> Measurement:
    """Median time of a round of one microbatch of equally many tokens of each task.

    Args:
      backbone: with `point.layers` layers.
      seconds: to spend, compilation not counted.
    """
    shape = shape_of(point)
    taken, _ = run_rounds(backbone, shape, point.tasks, point.rank, "dots", seconds)
    return Measurement(point, taken)


def run_rounds(
    backbone: Backbone, shape: ShapeClass, tasks: int, rank: int, remat: str, seconds: float
) -> tuple[float, int]:
    """Trains random tasks whose samples fill every row of every microbatch.

    Args:
      tasks: that share each round's microbatches; a divisor of their rows, or the round has more
        than one microbatch.
      seconds: to spend, compilation not counted.

    Returns:
      Median seconds of a round, waited for, and its microbatches.
    """
    rows = math.lcm(shape.rows, tasks)
    microbatches = rows // shape.rows
    engine = Engine(backbone, EngineOptions(shape, remat=remat))
    try:
        engine.register_tasks(
            _random_tasks(backbone.config, tasks, shape.row_len, rows // tasks, rank)
        )
        samples: list[float] = []
        while len(samples) < _WARM_UP_ROUNDS + _FEWEST_ROUNDS or sum(samples[1:]) < seconds:
            start = time.perf_counter()
            engine.train_round()
            jax.block_until_ready(engine.state)
            samples.append(time.perf_counter() - start)
        engine.drain()
        if engine.microbatches != microbatches * len(samples):
            raise RuntimeError(
                f"{engine.microbatches} microbatches in {len(samples)} rounds of {shape}; "
                f"expected {microbatches} a round, all full"
            )
    finally:
        engine.close()
    return statistics.median(samples[_WARM_UP_ROUNDS:]), microbatches


def _random_tasks(
    config: BackboneConfig, tasks: int, length: int, batch: int, rank: int
) -> list[PreparedTask]:
    """Tasks that differ in name alone, whose samples take exactly `length` places."""
    rng = np.random.default_rng(0)
    optimizer = OPTIMIZERS[OPTIMIZER](1e-4)
    spec = Task("task0", "random", LoRA(rank), optimizer, batch_size=batch, steps=10**6)
    targets = resolve_targets(spec.adapter.target_modules, config)
    mask = np.arange(length + 1) > 0
    samples = [
        Sample(rng.integers(0, config.vocab_size, length + 1, np.int32), mask, i)
        for i in range(batch)
    ]
    first = PreparedTask(
        task=spec,
        targets=targets,
        adapter=initial_adapter(spec.adapter, targets, config, seed=0),
        samples=Samples(samples, len(samples), 0, 0),
        batches=GlobalBatches(samples, batch, seed=0),
        steps=spec.steps,
        eval_samples=[],
    )
    return [
        dataclasses.replace(first, task=dataclasses.replace(spec, name=f"task{i}"))
        for i in range(tasks)
    ]
