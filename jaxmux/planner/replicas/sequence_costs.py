"""LobRA's cost model of a replica (2.2), from the time and memory models."""

import dataclasses

from ..costs.memory_model import MemoryModel
from ..costs.pool_spec import PoolSpec
from ..costs.replica_costs import AUTO, ReplicaCosts
from ..costs.time_model import TimeModel
from ..devices import Replica
from ..numbers import power_of_two
from ..packing.shape_class import MIN_CHUNK_LEN, ShapeClass

# Longest row that is considered.
_LONGEST_ROW = 1 << 17


@dataclasses.dataclass(frozen=True)
class ModelledSequenceCosts:
    """The `replica_costs.SequenceCosts` of fitted or estimated costs.

    A replica cuts its sequences into microbatches, each of sequences of one length, and pipelines
    them, 1F1B. A sequence of s tokens is its part of a microbatch of ⌈s⌉ tokens a row, on the
    slowest stage; the constant is the pipeline's warm-up and drain, the update and the round's
    overhead. Nothing hides the communication of the one batch that a stage works on: tensor
    parallelism adds two all-reduces of the stream to each pass of a layer, a pipeline a permute to
    each pass of a stage.

    Attributes:
      times, memory: of one device.
      pool: that every replica holds.
      tokens: of a microbatch, or fewer where more do not fit; a longer sequence has one of its own.
      chunk_len: tokens of a chunk.
      remat: rematerialisation policy of all layers; "auto" for what the engine picks, which fits
        longer sequences and takes longer for those that need it.
    """

    times: TimeModel
    memory: MemoryModel
    pool: PoolSpec
    tokens: int = 8192
    chunk_len: int = 128
    remat: str = AUTO

    def longest(self, configuration: Replica) -> int:
        """Tokens of the longest sequence, a power of two, that a replica has the memory for."""
        longest, row_len = 0, max(MIN_CHUNK_LEN, self.chunk_len)
        while row_len <= _LONGEST_ROW and self._fits(configuration, self._shape(row_len, 1)):
            longest, row_len = row_len, 2 * row_len
        return longest

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        """Seconds of one more sequence of `length` tokens, forward and backward."""
        tokens = self.tokens
        while tokens > length and not self._fits(configuration, self._shape(length, tokens)):
            tokens //= 2
        shape = self._shape(length, tokens)
        return self._slowest_stage(configuration, shape) * length / shape.tokens

    def constant_seconds(self, configuration: Replica) -> float:
        """Seconds of a step whatever a replica serves."""
        shortest = self._shape(self.chunk_len, self.tokens)
        fill = (configuration.pp - 1) * self._slowest_stage(configuration, shortest)
        return fill + self._costs(configuration).update()

    def _shape(self, length: int, tokens: int) -> ShapeClass:
        """Rows that hold the length, as many as make so many tokens."""
        row_len = max(MIN_CHUNK_LEN, power_of_two(length))
        unit = max(row_len, self.chunk_len)
        rows = max(1, tokens // unit) * (unit // row_len)
        return ShapeClass(rows, row_len, self.chunk_len, max_sequences=1)

    def _fits(self, configuration: Replica, shape: ShapeClass) -> bool:
        return self._costs(configuration).depth(shape) >= configuration.pp

    def _costs(self, configuration: Replica) -> ReplicaCosts:
        return ReplicaCosts(self.times, self.memory, self.pool, configuration, self.remat)

    def _slowest_stage(self, configuration: Replica, shape: ShapeClass) -> float:
        """Seconds of a full microbatch, both passes."""
        costs = self._costs(configuration)
        return float(sum(costs.stages(shape)).max()) + 2 * costs.permute(shape)
