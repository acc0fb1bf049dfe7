"""The shape of all microbatches of a training run, for which its programs are compiled."""

import dataclasses
from collections.abc import Sequence

from ..errors import PlanningError
from ..numbers import power_of_two

# The smallest legal chunk length and row length, in tokens.
MIN_CHUNK_LEN = 64
# `smallest_shape_class` makes room for one sequence per this number of tokens of a row.
_SHORTEST_AVERAGE = 16


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """Shape of every microbatch of a training run; programs are compiled for it. A chunk begins at
    a multiple of `chunk_len` in the microbatch. PlanningError tells which value is outside its
    range.

    Attributes:
      row_len: tokens of a row, a power of two of at least `MIN_CHUNK_LEN` (64).
      chunk_len: tokens of a chunk, a power of two of at least `MIN_CHUNK_LEN` (MuxTune 3.5). If it
        is larger than `row_len`, a chunk covers several whole rows.
      max_sequences: the most sequences that one row may hold. Attention on a GPU takes time and
        memory for all of them, present or absent. With 1, attention runs on dense rows, which is
        faster.
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
    def least_tokens(self) -> int:
        """Fewest tokens of a row that a sample takes up, because a row holds at most
        `max_sequences`."""
        return -(-self.row_len // self.max_sequences)

    @property
    def tokens(self) -> int:
        return self.rows * self.row_len

    @property
    def chunks(self) -> int:
        return self.tokens // self.chunk_len


def smallest_shape_class(
    lengths: Sequence[int],
    tokens: int,
    chunk_len: int | None = None,
    row_len: int | None = None,
) -> ShapeClass:
    """Returns the shape class with the shortest rows and chunks that hold samples of these stream
    lengths; `choose_shape` compares costs instead. `tokens` is rounded up to whole rows and whole
    chunks. PlanningError tells if there are no samples, one is longer than `row_len`, or a size is
    not legal."""
    if not lengths:
        raise PlanningError("no samples to choose a shape class for")
    longest = max(lengths)
    chunk_len = chunk_len or MIN_CHUNK_LEN
    row_len = row_len or max(MIN_CHUNK_LEN, power_of_two(longest))
    if longest > row_len:
        raise PlanningError(
            f"row_len={row_len} is shorter than the longest sample, which takes {longest} places"
        )
    # If no two samples fit into one row, rows hold one sequence: dense attention is faster.
    pair = 2 * min(lengths)
    max_sequences = 1 if pair > row_len else max(2, row_len // _SHORTEST_AVERAGE)
    unit = max(row_len, chunk_len)
    rows = -(-tokens // unit) * (unit // row_len)
    return ShapeClass(rows, row_len, chunk_len, max_sequences)
