"""The shape of a run's microbatches, for which the programs are compiled."""

import dataclasses
from collections.abc import Sequence

from ..errors import PlanningError
from ..numbers import power_of_two

MIN_CHUNK_LEN = 64
# Average tokens per sequence of a full row that the plain rule makes room for.
_SHORTEST_AVERAGE = 16


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """Shape of every microbatch of a run: N = rows · row_len tokens.

    Attributes:
      rows: rows of a microbatch.
      row_len: tokens of a row, a power of two. Attention sees one row.
      chunk_len: tokens of a chunk, a power of two: the unit that belongs to one task (MuxTune 3.5).
        Where it is longer than a row, a chunk covers several whole rows.
      max_sequences: most sequences in one row. Attention on a GPU takes time and memory for each
        of them, whether it is there or not; 1 lets it run on dense rows.

    Raises:
      PlanningError: a value is outside its range, or the rows do not hold whole chunks.
    """

    rows: int
    row_len: int
    chunk_len: int
    max_sequences: int

    def __post_init__(self):
        for name in ("chunk_len", "row_len"):
            value = getattr(self, name)
            if value < MIN_CHUNK_LEN or value & (value - 1):
                raise PlanningError(
                    f"{name}={value} is not a power of two of at least {MIN_CHUNK_LEN}"
                )
        if self.tokens % self.chunk_len:
            raise PlanningError(
                f"{self.rows} rows of row_len={self.row_len} are no multiple of "
                f"chunk_len={self.chunk_len}"
            )
        if self.max_sequences < 1:
            raise PlanningError(f"max_sequences={self.max_sequences}: a row holds at least one")
        if self.rows < 1:
            raise PlanningError(f"a microbatch needs at least one row of {self.row_len} tokens")

    @property
    def tokens(self) -> int:
        """N, tokens of a microbatch."""
        return self.rows * self.row_len

    @property
    def chunks(self) -> int:
        """C, chunks of a microbatch."""
        return self.tokens // self.chunk_len


def smallest_shape_class(
    lengths: Sequence[int],
    tokens: int,
    chunk_len: int | None = None,
    row_len: int | None = None,
) -> ShapeClass:
    """The shape class with the shortest rows and chunks for samples of these lengths.

    Args:
      lengths: stream lengths, in tokens, of all samples of all tasks.
      tokens: N, the tokens of a microbatch; rounded up to whole rows and chunks.
      chunk_len: tokens of a chunk; None for `MIN_CHUNK_LEN`.
      row_len: tokens of a row; None for the smallest power of two that holds the longest sample.

    Raises:
      PlanningError: there are no samples, a given length is not a power of two, or a sample is
        longer than `row_len`.
    """
    if not lengths:
        raise PlanningError("no samples to choose a shape class for")
    longest = max(lengths)
    chunk_len = chunk_len or MIN_CHUNK_LEN
    row_len = row_len or max(MIN_CHUNK_LEN, power_of_two(longest))
    if longest > row_len:
        raise PlanningError(
            f"row_len={row_len} is shorter than the longest sample ({longest} tokens)"
        )
    # Where no two samples fit into one row, rows hold one sequence: dense attention is faster.
    pair = 2 * min(lengths)
    max_sequences = 1 if pair > row_len else max(2, row_len // _SHORTEST_AVERAGE)
    unit = max(row_len, chunk_len)
    rows = -(-tokens // unit) * (unit // row_len)
    return ShapeClass(rows, row_len, chunk_len, max_sequences)
