"""Chooses the chunk and row length of a shape class: padding against attention (MuxTune 3.5)."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .microbatches import pack_batch
from .shape_class import MIN_CHUNK_LEN, PlanningError, ShapeClass, choose_shape_class

# Longer rows than this many times the shortest possible are not tried: sequences do not get
# longer, and all that a longer row may save is the room at its end.
_LONGEST_ROW = 8
# By slot, the stream lengths in tokens of the samples of the task's global batch.
Round = Mapping[int, Sequence[int]]


class Alignment(NamedTuple):
    """A shape class and what it costs.

    Attributes:
      shape: the shape class.
      seconds: of all microbatches that the rounds take.
      microbatches: their number.
      padding: share of their tokens that belong to no sample.
    """

    shape: ShapeClass
    seconds: float
    microbatches: int
    padding: float


def choose_alignment(
    rounds: Sequence[Round],
    tokens: int,
    seconds: Callable[[ShapeClass], float],
    least_chunk_len: int = MIN_CHUNK_LEN,
) -> Alignment:
    """The shape class in which some rounds take the least time.

    Longer rows and shorter chunks leave less padding and so fewer microbatches, each of which the
    cost model may find dearer: attention spans a row, kernels work chunk by chunk. Every pair of
    powers of two is packed and priced, MuxTune's among them, so that it is never better.

    Args:
      rounds: global batches as they will come; a sample of them is enough.
      tokens: N, tokens of a microbatch; rounded up to whole rows and chunks.
      seconds: time of a microbatch of a shape class, from the cost model.
      least_chunk_len: shortest chunk that the kernels take, a power of two.

    Raises:
      PlanningError: there are no samples.
    """
    baseline = power_of_two_alignment(rounds, tokens, seconds, least_chunk_len)
    shortest_row = baseline.shape.row_len
    shapes = _shapes(rounds, tokens, shortest_row, least_chunk_len)
    return min(
        (baseline, *(align(rounds, shape, seconds) for shape in shapes)), key=lambda a: a.seconds
    )


def power_of_two_alignment(
    rounds: Sequence[Round],
    tokens: int,
    seconds: Callable[[ShapeClass], float],
    least_chunk_len: int = MIN_CHUNK_LEN,
) -> Alignment:
    """MuxTune's rule: its chunk, and the shortest row that holds the longest sample."""
    lengths = _all_lengths(rounds)
    chunk_len = power_of_two_chunk_len(lengths, least_chunk_len)
    return align(rounds, choose_shape_class(lengths, tokens, chunk_len), seconds)


def power_of_two_chunk_len(lengths: Sequence[int], least: int = MIN_CHUNK_LEN) -> int:
    """The greatest power of two that divides all lengths, at least `least` (MuxTune 3.5)."""
    divisor = math.gcd(*lengths)
    return max(least, divisor & -divisor)


def align(
    rounds: Sequence[Round], shape: ShapeClass, seconds: Callable[[ShapeClass], float]
) -> Alignment:
    """What the rounds cost in one shape class."""
    count = sum(pack_batch(lengths, shape, solver_seconds=0).count for lengths in rounds)
    padding = 1 - sum(_all_lengths(rounds)) / (count * shape.tokens)
    return Alignment(shape, count * seconds(shape), count, padding)


def _shapes(
    rounds: Sequence[Round], tokens: int, shortest_row: int, least_chunk_len: int
) -> Iterator[ShapeClass]:
    lengths = _all_lengths(rounds)
    longest_row = max(shortest_row, min(tokens, _LONGEST_ROW * shortest_row))
    for row_len in _powers_of_two(shortest_row, longest_row):
        for chunk_len in _powers_of_two(least_chunk_len, max(least_chunk_len, row_len)):
            yield choose_shape_class(lengths, tokens, chunk_len, row_len)


def _powers_of_two(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _all_lengths(rounds: Sequence[Round]) -> list[int]:
    lengths = [size for batches in rounds for sizes in batches.values() for size in sizes]
    if not lengths:
        raise PlanningError("no samples to choose chunk and row length for")
    return lengths
