"""LobRA's cost model of a replica (2.2), and the plans that LobRA is compared with (5.1).

The competitors have replicas that are all alike. *Task-Fused* trains all tasks on the same like
replicas; *Task-Sequential* trains one task after another, each on the like replicas that suit it
best. Their time is simulated round by round.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxmux.planner.costs.memory_model import MemoryModel
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import AUTO, ReplicaCosts
from jaxmux.planner.costs.time_model import TimeModel
from jaxmux.planner.devices import Replica
from jaxmux.planner.numbers import power_of_two
from jaxmux.planner.packing.rows import MIN_CHUNK_LEN, ShapeClass
from jaxmux.planner.replicas import LengthBins, SequenceCosts, simulate_rounds
from jaxmux.planner.replicas.cost_table import require_service, tabulate_costs

# Tokens of the longest row that is considered.
_LONGEST_ROW = 1 << 17


@dataclasses.dataclass(frozen=True)
class ModelledSequenceCosts:
    """The `SequenceCosts` (time and memory of a replica) that the planner's cost models predict.

    A replica packs the sequences (training samples) of a round into microbatches, each of sequences
    of one length, and pipelines them with 1F1B. A sequence takes its share of a microbatch's time
    on the slowest stage, in rows whose length is the next power of two. The constant time of a
    round is the fill and drain of the pipeline, the optimizer update and the fixed overhead of a
    round.

    No communication is hidden by computation, because a stage works on one microbatch at a time.
    Tensor parallelism adds two all-reduces to each pass of a layer. A pipeline adds one message to
    the next stage to each pass of a stage.

    Attributes:
      times: time model of the backbone on one device, for example `CostModels.times` from
        `costs.cost_models.device_models`.
      memory: memory model of this backbone and device, for example `CostModels.memory`.
      pool: sizes of the pool, the stack of all tasks' adapters, which every replica holds; for
        example from `planner.pipeline.shared_pool`.
      tokens: tokens of a microbatch. A microbatch has fewer tokens where this many do not fit into
        memory, and a longer sequence is a microbatch of its own.
      chunk_len: tokens of a chunk (a series of tokens of one task, the unit in which kernels choose
        an adapter), a power of two.
      remat: remat policy of all layers, which tells the values that they keep for the backward
        pass: "norms", "dots", "lean" or "full", in the order of increasing recomputation. With
        "auto" each layer recomputes as little as the memory allows, as in training; this fits
        longer sequences and takes longer for those that need recomputation.
    """

    times: TimeModel
    memory: MemoryModel
    pool: PoolSpec
    tokens: int = 8192
    chunk_len: int = 128
    remat: str = AUTO

    def longest(self, configuration: Replica) -> int:
        """Returns the tokens of the longest sequence, a power of two, that fits into memory.

        Every stage must have memory for as many microbatches of one such sequence as there are
        stages, which is what 1F1B keeps in flight. The result is 0 if not even the shortest row
        fits, and at most 131,072.

        Args:
          configuration: stages and tensor-parallel devices of the replica.
        """
        longest, row_len = 0, max(MIN_CHUNK_LEN, self.chunk_len)
        while row_len <= _LONGEST_ROW and self._fits(configuration, self._shape(row_len, 1)):
            longest, row_len = row_len, 2 * row_len
        return longest

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        """Returns the seconds, forward and backward, that one more sequence adds to a round.

        Args:
          configuration: stages and tensor-parallel devices of the replica.
          length: tokens that the sequence is padded to.
        """
        tokens = self.tokens
        while tokens > length and not self._fits(configuration, self._shape(length, tokens)):
            tokens //= 2
        shape = self._shape(length, tokens)
        return self._slowest_stage_seconds(configuration, shape) * length / shape.tokens

    def constant_seconds(self, configuration: Replica) -> float:
        """Returns the seconds of a round that do not depend on its sequences.

        They are the fill and drain of the pipeline, the optimizer update and the overhead of a
        round.

        Args:
          configuration: stages and tensor-parallel devices of the replica.
        """
        shortest = self._shape(self.chunk_len, self.tokens)
        fill = (configuration.pp - 1) * self._slowest_stage_seconds(configuration, shortest)
        return fill + self._costs(configuration).update()

    def _shape(self, length: int, tokens: int) -> ShapeClass:
        """The shape class of rows that hold `length` tokens, about `tokens` tokens together."""
        row_len = max(MIN_CHUNK_LEN, power_of_two(length))
        unit = max(row_len, self.chunk_len)
        rows = max(1, tokens // unit) * (unit // row_len)
        return ShapeClass(rows, row_len, self.chunk_len, max_sequences=1)

    def _fits(self, configuration: Replica, shape: ShapeClass) -> bool:
        return self._costs(configuration).depth(shape) >= configuration.pp

    @functools.cached_property
    def _costs(self) -> Callable[[Replica], ReplicaCosts]:
        # A ReplicaCosts remembers the policies of each shape class, so it is kept.
        return functools.cache(
            lambda configuration: ReplicaCosts(
                self.times, self.memory, self.pool, configuration, self.remat
            )
        )

    def _slowest_stage_seconds(self, configuration: Replica, shape: ShapeClass) -> float:
        """Seconds of both passes of a full microbatch on the slowest stage, with their permutes."""
        costs = self._costs(configuration)
        return float(sum(costs.stages(shape)).max()) + 2 * costs.permute(shape)


class LikeReplicas(NamedTuple):
    """Replicas of one configuration, and the time of simulated rounds with them.

    Attributes:
      replicas: the configuration, with the number of replicas.
      device_seconds: mean over the rounds of the number of devices, idle ones included, times the
        seconds of the slowest replica.
    """

    replicas: dict[Replica, int]
    device_seconds: float


def simulate_uniform_dispatch(
    configuration: Replica,
    devices: int,
    rounds: Sequence[LengthBins],
    model: SequenceCosts,
    rng: np.random.Generator,
) -> float:
    """Returns the mean device seconds of rounds of which every replica gets as many sequences.

    Args:
      configuration: configuration of all replicas, as many as `devices` allows.
      rng: shuffles the sequences.

    The other arguments are those of `simulate_rounds`.
    """
    replicas = devices // configuration.devices
    seconds = 0.0
    for bins in rounds:
        costs = tabulate_costs([configuration], bins.boundaries, model)
        sequences = np.repeat(costs.per_sequence[0], bins.counts)
        rng.shuffle(sequences)
        busiest = max(sequences[replica::replicas].sum() for replica in range(replicas))
        seconds += float(costs.constant[0] + busiest)
    return devices * seconds / len(rounds)


def plan_fused(
    devices: int,
    configurations: Sequence[Replica],
    rounds: Sequence[LengthBins],
    model: SequenceCosts,
    rng: np.random.Generator | None = None,
) -> LikeReplicas:
    """Returns the best Task-Fused plan: like replicas that all serve the longest sequence.

    Every configuration is simulated with the rounds themselves, so no other one would be faster.

    Args:
      devices: number of devices, divided into as many replicas as possible.
      configurations: configurations to choose from.
      rounds: for each round, the sequences of all tasks.
      model: times and memory of a replica.
      rng: shuffles the sequences for uniform dispatch, as in LobRA's comparison; None for the
        balanced dispatch of `dispatch_samples`.

    Raises:
      PlanningError: no configuration of at most `devices` devices serves the longest sequence.
    """
    longest = max(length for bins in rounds for length in bins.boundaries)
    require_service(tabulate_costs(configurations, [longest], model), devices)
    plans = []
    for configuration in configurations:
        if configuration.devices <= devices and longest <= model.longest(configuration):
            replicas = {configuration: devices // configuration.devices}
            if rng is None:
                seconds = simulate_rounds(replicas, devices, rounds, model)
            else:
                seconds = simulate_uniform_dispatch(configuration, devices, rounds, model, rng)
            plans.append(LikeReplicas(replicas, seconds))
    return min(plans, key=lambda plan: plan.device_seconds)


def plan_sequential(
    devices: int,
    configurations: Sequence[Replica],
    rounds: Mapping[str, Sequence[LengthBins]],
    model: SequenceCosts,
    rng: np.random.Generator | None = None,
) -> dict[str, LikeReplicas]:
    """Returns the best Task-Sequential plan: for each task, the like replicas that suit it best.

    A round of all tasks takes the sum of their device seconds.

    Args:
      rounds: by task, the sequences of its global batch in each round.

    The other arguments, and errors, are those of `plan_fused`.
    """
    return {
        task: plan_fused(devices, configurations, lengths, model, rng)
        for task, lengths in rounds.items()
    }
