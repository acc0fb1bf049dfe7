"""The time of whole rounds of the engine, on random tasks."""

import math
import statistics
import time
from contextlib import closing

import jax

from jaxmux.engine import Engine, EngineOptions
from jaxmux.models import Backbone
from jaxmux.planner.costs.device_profile import Measurement, RoundPoint, shape_of
from jaxmux.planner.packing import ShapeClass

from .random_tasks import in_other_names, random_task

# The first round compiles. The second is the first that waits for an earlier round.
_WARM_UP_ROUNDS = 2
_FEWEST_ROUNDS = 5
# Steps of a task: more rounds than are ever timed.
_STEPS = 10**6


def measure_round(backbone: Backbone, point: RoundPoint, seconds: float) -> Measurement:
    """Measures the median time of a round with one microbatch, which all tasks share equally. The
    backbone must have `point.layers` layers. `seconds` is the time to spend, without compilation.
    """
    taken, _ = run_rounds(backbone, shape_of(point), point.tasks, point.rank, "dots", seconds)
    return Measurement(point, taken)


def run_rounds(
    backbone: Backbone, shape: ShapeClass, tasks: int, rank: int, remat: str, seconds: float
) -> tuple[float, int]:
    """Trains random tasks whose samples have one length and fill every row of every microbatch.

    Args:
      backbone: the backbone.
      shape: shape class of the microbatches; every row holds `shape.max_sequences` samples.
      tasks: number of tasks. A round has several microbatches if the rows of one microbatch cannot
        be divided equally among the tasks.
      rank: rank of the adapters.
      remat: remat policy of all layers.
      seconds: seconds to spend, without compilation.

    Returns:
      The median seconds of a round, from its start until the device is done, and the number of
      microbatches of a round.

    Raises:
      RuntimeError: the engine packed the samples into another number of microbatches.
    """
    rows = math.lcm(shape.rows, tasks)
    microbatches = rows // shape.rows
    with closing(Engine(backbone, EngineOptions(shape, remat=remat))) as engine:
        lengths = [shape.row_len // shape.max_sequences] * (rows // tasks * shape.max_sequences)
        task = random_task(backbone.config, "task0", lengths, len(lengths), _STEPS, rank)
        engine.register_tasks(in_other_names(task, tasks))
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
    return statistics.median(samples[_WARM_UP_ROUNDS:]), microbatches
