"""LobRA's cost model of a replica (2.2), from the measured times and the memory model."""

import dataclasses

from .memory_model import MemoryModel, Placement
from .pool import Pool
from .replica_costs import Configuration
from .shape_class import MIN_CHUNK_LEN, PlanningError, ShapeClass
from .time_model import Pipeline, TimeModel

# Longest row that is considered.
_LONGEST_ROW = 1 << 17


@dataclasses.dataclass(frozen=True)
class MeasuredReplicas:
    """The `replica_costs.ReplicaModel` of a profile.

    A replica cuts its sequences into microbatches, each of sequences of one length, and pipelines
    them. A sequence of s tokens is its part of a microbatch of ⌈s⌉ tokens a row, on the slowest
    stage; the constant is the pipeline's warm-up and drain, the update and the round's overhead.
    Nothing hides the communication of the one batch that a stage works on: tensor parallelism adds
    two all-reduces of the stream to each pass of a layer, a pipeline a permute to each pass of a
    stage.

    Attributes:
      times, memory: of one device.
      pool: that every replica holds.
      tokens: of a microbatch; longer sequences have one of their own.
      chunk_len: tokens of a chunk.
    """

    times: TimeModel
    memory: MemoryModel
    pool: Pool
    tokens: int = 8192
    chunk_len: int = 128

    def longest(self, configuration: Configuration) -> int:
        """Tokens of the longest sequence, a power of two, that a replica has the memory for."""
        longest, row_len = 0, max(MIN_CHUNK_LEN, self.chunk_len)
        place = Placement(configuration.pp, configuration.tp, configuration.pp)
        while row_len <= _LONGEST_ROW:
            if not self.memory.fits(self._shape(row_len), self.pool, place):
                break
            longest, row_len = row_len, 2 * row_len
        return longest

    def sequence_seconds(self, configuration: Configuration, length: int) -> float:
        """Seconds of one more sequence of `length` tokens, forward and backward."""
        shape = self._shape(length)
        return self._slowest_stage(configuration, shape) * length / shape.tokens

    def constant_seconds(self, configuration: Configuration) -> float:
        """Seconds of a step whatever a replica serves."""
        update = self.times.update.get(self.pool.optimizer)
        if update is None:
            raise PlanningError(f"the profile measures no update of {self.pool.optimizer!r}")
        fill = (configuration.pp - 1) * self._slowest_stage(
            configuration, self._shape(self.chunk_len)
        )
        own = self.pool.parameters(self.times.backbone) / configuration.gpus
        return fill + update(own) + self.times.round_overhead

    def _shape(self, length: int) -> ShapeClass:
        row_len = max(MIN_CHUNK_LEN, 1 << (length - 1).bit_length())
        unit = max(row_len, self.chunk_len)
        rows = max(1, self.tokens // unit) * (unit // row_len)
        return ShapeClass(rows, row_len, self.chunk_len, max_sequences=1)

    def _slowest_stage(self, configuration: Configuration, shape: ShapeClass) -> float:
        """Seconds of a full microbatch, both passes."""
        tp, pp = configuration
        backbone = self.times.backbone
        pipeline = Pipeline(pp, tp)
        tokens = (shape.tokens,)
        compute = max(
            stage.total for stage in self.times.stages(shape, tokens, self.pool, pipeline)
        )
        stream = shape.tokens * backbone.hidden_size * backbone.stream_bytes
        reduces = (
            4 * max(pipeline.layers(backbone.layers)) * self.times.collective("psum", tp, stream)
        )
        permutes = 2 * self.times.collective("ppermute", pp, stream)
        return compute + reduces + permutes
