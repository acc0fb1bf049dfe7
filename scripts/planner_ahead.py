"""The time that training waits for the next round to be packed while the device runs the current
one.

A small random model trains tasks with lengths of real data sets, on the device that is there. The
engine's background thread packs their rounds, fills the microbatches and moves them to the device.
"""

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmux.engine import Engine, EngineOptions
from jaxmux.engine.rounds.rounds import pack_tightly
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
# Tokens of the longest sample, and of a microbatch.
_LONGEST, _TOKENS = 512, 4096


class Waits(NamedTuple):
    """Milliseconds per round, the mean over all rounds but the first.

    Attributes:
      waited: time that training waited for the next round.
      planning: time that packing took in its own thread.
      round: time from one round to the next.
      first: time that training waited for the first round.
    """

    waited: float
    planning: float
    round: float
    first: float


def measure_waits(
    lengths: Mapping[str, Sequence[int]], sets: Sequence[str], samples: int, rounds: int, seed: int
) -> Waits:
    """Trains one task for each data set and measures the waits.

    Args:
      lengths: by data set, the tokens of its samples.
      sets: names of the data sets.
      samples: samples of a global batch.
      rounds: number of rounds, at least 2.
      seed: seed of the random samples.
    """
    planned: list[float] = []

    def timed_packing(batches, shape):
        start = time.perf_counter()
        placements = pack_tightly(batches, shape)
        planned.append(time.perf_counter() - start)
        return placements

    rng = np.random.default_rng(seed)
    tasks = []
    for name in sets:
        # A sample of n tokens is n - 1 pairs of a token and its target.
        sizes = np.clip(rng.choice(lengths[name], samples * rounds), 2, _LONGEST) - 1
        tasks.append(random_task(_CONFIG, name, sizes.tolist(), samples, rounds, rank=8))
    shape = smallest_shape_class([n for task in tasks for n in task.lengths], _TOKENS)
    engine = Engine(Backbone.random(_CONFIG), EngineOptions(shape, packing=timed_packing))
    engine.register_tasks(tasks)
    # The first round compiles the programs.
    engine.train_round()
    engine.drain()
    first, start = engine.seconds_waited, time.perf_counter()
    while not engine.finished:
        engine.train_round()
    engine.drain()
    seconds = np.array(
        [engine.seconds_waited - first, sum(planned[1:]), time.perf_counter() - start]
    )
    engine.close()
    return Waits(*(1e3 * seconds / (rounds - 1)), 1e3 * first)
