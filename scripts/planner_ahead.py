"""How long training waits for the next round to be planned, while the device runs the one before.

A small random model on whatever device there is trains tasks with lengths of real data sets. Their
rounds are packed, filled and put on the device by the engine's thread ahead.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmux.engine import Engine, EngineOptions
from jaxmux.engine.rounds import pack_tightly
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.planner.packing import smallest_shape_class
from jaxmux.profiling import random_task

_CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
_LONGEST, _TOKENS = 512, 4096


class Waits(NamedTuple):
    """Milliseconds of a round, the mean over all but the first.

    Attributes:
      waited: that training waited for the round to be there.
      planning: that packing took, in its thread.
      round: from one round to the next.
      first: that training waited for the first round.
    """

    waited: float
    planning: float
    round: float
    first: float


def measure_waits(
    lengths: Mapping[str, Sequence[int]], sets: Sequence[str], samples: int, rounds: int, seed: int
) -> Waits:
    planned: list[float] = []

    def timed_packing(batches, shape):
        start = time.perf_counter()
        placements = pack_tightly(batches, shape)
        planned.append(time.perf_counter() - start)
        return placements

    rng = np.random.default_rng(seed)
    tasks = []
    for name in sets:
        # A sample of n tokens takes n - 1 places.
        sizes = np.clip(rng.choice(lengths[name], samples * rounds), 2, _LONGEST) - 1
        tasks.append(random_task(_CONFIG, name, sizes.tolist(), samples, rounds, rank=8))
    shape = smallest_shape_class([n for task in tasks for n in task.lengths], _TOKENS)
    engine = Engine(Backbone.random(_CONFIG), EngineOptions(shape, packing=timed_packing))
    engine.register_tasks(tasks)
    engine.train_round()
    engine.drain()  # All is compiled.
    first, start = engine.seconds_waited, time.perf_counter()
    while not engine.finished:
        engine.train_round()
    engine.drain()
    seconds = np.array(
        [engine.seconds_waited - first, sum(planned[1:]), time.perf_counter() - start]
    )
    engine.close()
    return Waits(*(1e3 * seconds / (rounds - 1)), 1e3 * first)
