"""Chooses the shape class of microbatches: padding against attention (MuxTune 3.5)."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from .microbatches import PackedBatch, pack_batches
from .rows import RowShape, least_rows_of_samples, runs_of_rows
from .shape_class import (
    MIN_CHUNK_LEN,
    PlanningError,
    ShapeClass,
    choose_shape_class,
    power_of_two,
)

# Longer rows than this many times the shortest possible are not tried: sequences do not get
# longer, and all that a longer row may save is the room at its end.
_LONGEST_ROW = 8
# Smaller microbatches are tried in steps of so many tokens, and in so many at most. Finer ones
# would fit the rounds at hand and no others: a round that is a little larger takes one more.
_STEP, _MOST_STEPS = 512, 32

# Seats of a row, where more than two, are a multiple of so many.
_SEATS = 4

# By slot, the stream lengths in tokens of the samples of the task's global batch.
Round = Mapping[int, Sequence[int]]
# Seconds that a microbatch of a shape class takes whose chunks that are not empty have so many
# tokens; linear in them, with what all others take besides.
Cost = Callable[[ShapeClass, float], float]


class ShapeRequest(NamedTuple):
    """What is asked of a shape class.

    Attributes:
      tokens: N, the most tokens of a microbatch; rounded up to whole rows and chunks.
      row_len, chunk_len: None for the best.
      least_chunk_len: shortest chunk that the kernels take, a power of two.
      fewer_tokens: whether microbatches may be smaller than N where that costs less.
    """

    tokens: int
    row_len: int | None = None
    chunk_len: int | None = None
    least_chunk_len: int = MIN_CHUNK_LEN
    fewer_tokens: bool = True


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
    request: ShapeRequest,
    seconds: Cost,
    lengths: Sequence[int] | None = None,
) -> Alignment:
    """The shape class in which some rounds take the least time.

    Longer rows and shorter chunks leave less padding and so fewer microbatches, each of which the
    cost model may find dearer: attention spans a row, kernels work chunk by chunk. Microbatches of
    fewer tokens leave less padding in a round's last one, and are less efficient. Every pair of
    powers of two that is not given is bounded from below, in every number of rows, with one
    sequence a row and with several; what might be the best is packed and priced. MuxTune's pair
    and the plain rule's are among them, so neither is ever better.

    Args:
      rounds: global batches as they will come; a sample of them is enough.
      request: where both lengths are given, microbatches have N tokens.
      seconds: time of a microbatch of a shape class, from the cost model.
      lengths: stream lengths of all samples that rows must hold; None for those of the rounds.

    Raises:
      PlanningError: there are no samples, or one is longer than `request.row_len`.
    """
    lengths = lengths or _all_lengths(rounds)
    plain = plain_alignment(rounds, request, seconds, lengths)
    if request.row_len and request.chunk_len:
        request = request._replace(fewer_tokens=False)
    improve = partial(_improved, rounds=rounds, request=request, seconds=seconds)
    best = min(improve(plain._replace(seconds=math.inf), plain.shape), plain, key=_seconds)
    bounds = {shape: _bound(rounds, shape, request, seconds) for shape in _shapes(request, lengths)}
    for shape in sorted(bounds, key=bounds.__getitem__):
        if bounds[shape] >= best.seconds:
            break
        best = improve(best, shape)
    best = _with_fewer_seats(best, request, improve)
    if math.isfinite(best.seconds):
        return best
    # The plain shape with the least seats: what it lacks is what a refusal should name.
    return align(rounds, dataclasses.replace(plain.shape, max_sequences=1), seconds)


def plain_alignment(
    rounds: Sequence[Round],
    request: ShapeRequest,
    seconds: Cost,
    lengths: Sequence[int] | None = None,
) -> Alignment:
    """The plain rule: the shortest row that holds the longest sample, the shortest chunk, N tokens.

    Arguments as of `choose_alignment`.
    """
    chunk_len = request.chunk_len or request.least_chunk_len
    lengths = lengths or _all_lengths(rounds)
    shape = choose_shape_class(lengths, request.tokens, chunk_len, request.row_len)
    return align(rounds, shape, seconds)


def power_of_two_alignment(
    rounds: Sequence[Round], request: ShapeRequest, seconds: Cost
) -> Alignment:
    """MuxTune's rule: its chunk, and the shortest row that holds the longest sample."""
    chunk_len = power_of_two_chunk_len(_all_lengths(rounds), request.least_chunk_len)
    return plain_alignment(rounds, request._replace(chunk_len=chunk_len), seconds)


def power_of_two_chunk_len(lengths: Sequence[int], least: int = MIN_CHUNK_LEN) -> int:
    """The greatest power of two that divides all lengths, at least `least` (MuxTune 3.5)."""
    divisor = math.gcd(*lengths)
    return max(least, divisor & -divisor)


def align(rounds: Sequence[Round], shape: ShapeClass, seconds: Cost) -> Alignment:
    """What the rounds cost in one shape class."""
    packed = _pack(rounds, shape)
    count = sum(batch.count for batch in packed)
    padding = 1 - sum(_all_lengths(rounds)) / (count * shape.tokens)
    return Alignment(shape, count * seconds(shape, _owned(packed) / count), count, padding)


def _shapes(request: ShapeRequest, lengths: Sequence[int]) -> Iterator[ShapeClass]:
    """Shape classes of N tokens: every row and chunk length, one sequence a row and several."""
    shortest = request.row_len or choose_shape_class(lengths, request.tokens).row_len
    longest = request.row_len or max(shortest, min(request.tokens, _LONGEST_ROW * shortest))
    for row_len in _powers_of_two(shortest, longest):
        least = request.chunk_len or request.least_chunk_len
        for chunk_len in _powers_of_two(least, request.chunk_len or max(least, row_len)):
            shape = choose_shape_class(lengths, request.tokens, chunk_len, row_len)
            yield shape
            if row_len == shortest and shape.max_sequences > 1:
                yield dataclasses.replace(shape, max_sequences=1)


def _bound(
    rounds: Sequence[Round], shape: ShapeClass, request: ShapeRequest, seconds: Cost
) -> float:
    """Seconds that the rounds take at least, however few seats and rows would do."""
    needed = [least_rows_of_samples(batches, shape) for batches in rounds]
    tokens = sum(_all_lengths(rounds))
    return _cheapest(needed, tokens, _with_seats(shape, 2), request, seconds)[0]


def _cheapest(
    needed: Sequence[int], owned: int, shape: ShapeClass, request: ShapeRequest, seconds: Cost
) -> tuple[float, int]:
    """Least seconds of rounds that need so many rows, and the rows of such a microbatch.

    Args:
      needed: rows of each round, in units of those that a chunk spans.
      owned: tokens of all chunks of all rounds that are not empty.
      shape: of N tokens.
    """
    block = RowShape.of(shape).block
    totals = []
    for rows in _heights(shape) if request.fewer_tokens else [shape.rows]:
        count = sum(-(-n * block // rows) for n in needed)
        one = seconds(dataclasses.replace(shape, rows=rows), owned / count)
        totals.append((count * one, rows))
    return min(totals)


def _heights(shape: ShapeClass) -> Iterator[int]:
    """Numbers of rows that are tried in place of the shape class's own, and that itself."""
    step = max(_STEP, power_of_two(-(-shape.tokens // _MOST_STEPS)))
    unit = max(step, shape.chunk_len, shape.row_len) // shape.row_len
    yield from range(unit, shape.rows, unit)
    yield shape.rows


def _improved(
    best: Alignment,
    shape: ShapeClass,
    rounds: Sequence[Round],
    request: ShapeRequest,
    seconds: Cost,
) -> Alignment:
    """The best so far, or the shape class if that is better: in its cheapest number of rows, with
    seats for no more sequences than there are, and a few. Where that does not fit into memory,
    with half the seats."""
    whole, packed = shape, _pack(rounds, shape)
    shape = _with_seats(shape, _room_for(max(map(_most_seats, packed))))
    needed = [len(batch.rows) for batch in packed]
    total, rows = _cheapest(needed, _owned(packed), shape, request, seconds)
    if math.isinf(total) and shape.max_sequences > 2:
        fewer = _with_seats(whole, _room_for(shape.max_sequences // 2))
        return _improved(best, fewer, rounds, request, seconds)
    if total >= best.seconds:
        return best
    return min(best, align(rounds, dataclasses.replace(shape, rows=rows), seconds), key=_seconds)


def _with_fewer_seats(
    best: Alignment,
    request: ShapeRequest,
    improve: Callable[[Alignment, ShapeClass], Alignment],
) -> Alignment:
    """The best with half the seats, and half of those, as long as that is better: where attention
    pays for each seat of a row, short sequences may be spread over more rows."""
    while best.shape.max_sequences > 2:
        row_len, chunk_len = best.shape.row_len, best.shape.chunk_len
        whole = choose_shape_class([1, row_len], request.tokens, chunk_len, row_len)
        better = improve(best, _with_seats(whole, _room_for(best.shape.max_sequences // 2)))
        if better is best:
            break
        best = better
    return best


def _with_seats(shape: ShapeClass, seats: int) -> ShapeClass:
    """With so many seats at most."""
    return dataclasses.replace(shape, max_sequences=min(shape.max_sequences, seats))


def _room_for(sequences: int) -> int:
    """Seats of a row that was seen to hold so many sequences: those of other rounds hold more."""
    return sequences if sequences <= 2 else -(-sequences // _SEATS) * _SEATS


def _most_seats(packed: PackedBatch) -> int:
    """Sequences in the fullest row."""
    rows = runs_of_rows(packed.runs, packed.rows)
    return max((sum(run.seats for _, run in row) for row in rows), default=1)


def _seconds(alignment: Alignment) -> float:
    return alignment.seconds


def _pack(rounds: Sequence[Round], shape: ShapeClass) -> list[PackedBatch]:
    return pack_batches(rounds, shape, solver_seconds=0)


def _owned(packed: Sequence[PackedBatch]) -> int:
    """Tokens of the chunks that are not empty."""
    return sum(
        run.chunks * batch.shape.chunk_len
        for batch in packed
        for runs in batch.runs.values()
        for run in runs
    )


def _powers_of_two(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _all_lengths(rounds: Sequence[Round]) -> list[int]:
    lengths = [size for batches in rounds for sizes in batches.values() for size in sizes]
    if not lengths:
        raise PlanningError("no samples to choose chunk and row length for")
    return lengths
