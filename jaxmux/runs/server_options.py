"""The settings of a tuning server."""

import dataclasses
from functools import partial

from jaxmux.field_checks import flag, integer, names, number
from jaxmux.planner.packing import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class

from .line_log import LOG_BYTES
from .run_options import RunOptions

_count = partial(integer, least=1)
# Microbatches of one task that a round trains unless `round_tokens` says otherwise.
_MICROBATCHES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions(RunOptions):
    """Settings of a tuning server. Those of `RunOptions` mean the same, with other defaults: a
    server does not know its tasks when it starts, so it gets the sizes that tasks may have.

    Attributes:
      row_len: tokens of a row, a power of two of at least 64; the longest sample that a task may
        have.
      chunk_len: tokens of a chunk, a power of two of at least 64 (128 for the Hopper kernels). None
        takes the shortest one that the device's kernels support.
      max_sequences: most samples of a row; None makes room for one for every 16 tokens.
      round_tokens: most tokens of one task that a round trains, see `EngineOptions`; None for four
        microbatches of the mesh. The bits of a task whose global batches are larger depend on it.
      reserved_slots: number of tasks that train at the same time.
      reserved_rank: the highest rank that a task may have. Low-rank adapters in
        `reserved_adapters` add to the rank, linears and dropout that all tasks may have.
      reserved_targets: the linears that tasks may adapt, chosen like `LoRA.target_modules`.
      reserved_dropout: whether tasks may have dropout.
      elastic: whether pool and microbatches begin with a quarter of their sizes, and follow the
        load up to them. A task's results then depend on its neighbours, but only in the order of
        sums. False keeps all sizes, and a task's bits depend on itself alone, but for several
        replicas of the backbone.
      prepared_at_once: number of tasks whose data are read at the same time, beside training, and
        of initial adapters that are computed at the same time if they take long.
      slow_preparation_seconds: a task whose data take longer to read, in seconds, no longer counts
        among those, so that the data of others are read meanwhile: of at most 32 tasks in all.
      most_ended: number of tasks whose status is known after their end.
      most_preparation_seconds: a task fails if reading its data takes longer, in seconds, or
        computing its initial adapter.
      trackers: programs that show the metrics, as for `RunOptions`. A server is one run there.
      events_bytes: size in bytes at which events.jsonl is set aside as events.<n>.jsonl, and
        rounds.jsonl as rounds.<n>.jsonl. The last three of these files are kept.
    """

    row_len: int | None = _count(1024)
    round_tokens: int | None = _count(None, optional=True)
    reserved_slots: int = _count(8)
    reserved_rank: int = _count(16)
    reserved_targets: str | tuple[str, ...] | None = names("all-linear", optional=True)
    reserved_dropout: bool = flag(True)
    elastic: bool = flag(False)
    prepared_at_once: int = _count(2)
    slow_preparation_seconds: float = number(30.0, above=0)
    most_ended: int = _count(10_000)
    most_preparation_seconds: float = number(600.0, above=0)
    events_bytes: int = _count(LOG_BYTES)
    trackers: str | tuple[str, ...] = names(())

    def most_tokens(self, shape: ShapeClass) -> int:
        """Most tokens of one task that a round trains.

        Args:
          shape: shape class of the microbatches.
        """
        shards = sum(replica.shards for replica in self.deployment.replicas)
        return self.round_tokens or _MICROBATCHES * shards * shape.tokens

    def shape(self, least_chunk_len: int = MIN_CHUNK_LEN) -> ShapeClass:
        """The shape class of the microbatches.

        Args:
          least_chunk_len: tokens of the shortest chunk that the device's kernels support.

        Raises:
          PlanningError: a length is not a power of two of at least 64.
        """
        chunk_len = self.chunk_len or least_chunk_len
        found = smallest_shape_class([1], self.tokens_per_microbatch, chunk_len, self.row_len)
        if self.max_sequences is None:
            return found
        return dataclasses.replace(found, max_sequences=self.max_sequences)
