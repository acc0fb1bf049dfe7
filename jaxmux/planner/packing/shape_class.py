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
    """Shape of every microbatch of a training run: `rows` rows of `row_len` tokens each.

    Programs are compiled for one shape class. A row holds one or more sequences (samples) side by
    side; attention never crosses a row or a sequence. A chunk is a series of `chunk_len` tokens
    that all belong to one task. Chunks begin at multiples of `chunk_len` in the microbatch.

    Attributes:
      rows: number of rows of a microbatch, at least 1.
      row_len: tokens of a row, a power of two of at least `MIN_CHUNK_LEN` (64). No sample may be
        longer than a row.
      chunk_len: tokens of a chunk, a power of two of at least `MIN_CHUNK_LEN` (MuxTune 3.5). If it
        is larger than `row_len`, a chunk covers several whole rows.
      max_sequences: the most sequences that one row may hold, at least 1. Attention on a GPU takes
        time and memory for this number of sequences in each row, even if the row holds fewer. With
        1, attention runs on dense rows (one sequence in each), which is faster.

    Raises:
      PlanningError: a value is outside its range, or the microbatch does not consist of whole
        chunks.
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
        """Tokens of a row that a sample takes up at least, because a row holds at most
        `max_sequences`."""
        return -(-self.row_len // self.max_sequences)

    @property
    def tokens(self) -> int:
        """N, tokens of a microbatch: rows · row_len."""
        return self.rows * self.row_len

    @property
    def chunks(self) -> int:
        """C, chunks of a microbatch: N / chunk_len."""
        return self.tokens // self.chunk_len


def smallest_shape_class(
    lengths: Sequence[int],
    tokens: int,
    chunk_len: int | None = None,
    row_len: int | None = None,
) -> ShapeClass:
    """Returns the shape class with the shortest rows and chunks that hold samples of these lengths.

    A shape class is the shape of all microbatches: rows, tokens of a row, tokens of a chunk (a
    series of tokens of one task) and `max_sequences`, the most sequences per row. This rule
    compares no costs; `choose_shape` does. `max_sequences` of the result is 1 if a row cannot hold
    twice the shortest sample; otherwise it is 1/16 of `row_len`, but at least 2.

    Args:
      lengths: stream lengths, in tokens, of all samples of all tasks. The stream length of a sample
        is its number of tokens without the last one, which is only predicted.
      tokens: N, the tokens of a microbatch. N is rounded up so that a microbatch consists of whole
        rows and whole chunks.
      chunk_len: tokens of a chunk, a power of two; None for `MIN_CHUNK_LEN` (64).
      row_len: tokens of a row, a power of two; None for the smallest power of two, at least
        `MIN_CHUNK_LEN`, that holds the longest sample.

    Raises:
      PlanningError: there are no samples, `chunk_len` or `row_len` is not a power of two of at
        least `MIN_CHUNK_LEN`, `tokens` is not positive, or a sample is longer than `row_len`.
    """
    if not lengths:
        raise PlanningError("no samples to choose a shape class for")
    longest = max(lengths)
    chunk_len = chunk_len or MIN_CHUNK_LEN
    row_len = row_len or max(MIN_CHUNK_LEN, power_of_two(longest))
    if longest > row_len:
        raise PlanningError(
            f"row_len={row_len} is shorter than the longest sample, which takes {longest} places"
        )
    # Where no two samples fit into one row, rows hold one sequence: dense attention is faster.
    pair = 2 * min(lengths)
    max_sequences = 1 if pair > row_len else max(2, row_len // _SHORTEST_AVERAGE)
    unit = max(row_len, chunk_len)
    rows = -(-tokens // unit) * (unit // row_len)
    return ShapeClass(rows, row_len, chunk_len, max_sequences)
