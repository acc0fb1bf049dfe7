"""Chooses the shape class of microbatches, row length included: padding against attention (MuxTune
3.5, chunk-based alignment)."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..errors import PlanningError
from ..numbers import power_of_two
from .microbatches import PackedRound, RoundLengths, pack_rounds
from .rows import RowShape, least_rows_of_samples, spans_of_rows
from .shape_class import MIN_CHUNK_LEN, ShapeClass, smallest_shape_class

# Rows longer than this many times the shortest possible row are not tried: sequences do not get
# longer, and a longer row saves only the room at its end.
_LONGEST_ROW = 8
# Smaller microbatches are tried in steps of `_STEP` tokens, at most `_MOST_STEPS` of them. Finer
# steps would fit the given rounds and no others: a slightly larger round would need one more
# microbatch.
_STEP, _MOST_STEPS = 512, 32
# More than two sequences per row are rounded up to a multiple of this.
_SEQUENCES = 4

# Seconds of a microbatch of a shape class, given the tokens of its chunks that are not empty. It is
# linear in these tokens.
Cost = Callable[[ShapeClass, float], float]


class ShapeRequest(NamedTuple):
    """Limits of a shape class that is to be chosen.

    Attributes:
      tokens: N, the most tokens of a microbatch; rounded up to whole rows and chunks.
      row_len: tokens of a row; None to choose them.
      chunk_len: tokens of a chunk; None to choose them.
      least_chunk_len: tokens of the shortest chunk that the kernels take, a power of two.
      fewer_tokens: whether microbatches may be smaller than N where that costs less.
    """

    tokens: int
    row_len: int | None = None
    chunk_len: int | None = None
    least_chunk_len: int = MIN_CHUNK_LEN
    fewer_tokens: bool = True


class PricedShape(NamedTuple):
    """A shape class with its cost over some rounds.

    Attributes:
      shape: the shape class.
      seconds: time of all microbatches of the rounds.
      microbatches: their number.
      padding: share of their tokens that belong to no sample.
    """

    shape: ShapeClass
    seconds: float
    microbatches: int
    padding: float


def choose_shape(
    rounds: Sequence[RoundLengths],
    request: ShapeRequest,
    seconds: Cost,
    lengths: Sequence[int] | None = None,
) -> PricedShape:
    """The shape class in which the rounds take the least time.

    Longer rows and shorter chunks leave less padding and so need fewer microbatches, each of which
    may cost more: attention covers a whole row, and kernels work chunk by chunk. Microbatches of
    fewer tokens leave less padding in the last one of a round and are less efficient. Every pair of
    row and chunk length, both powers of two, is bounded from below in every number of rows, with
    one sequence per row and with several. Those that might be the best are packed and priced.
    MuxTune's pair and the plain rule's are among them, so neither is ever better.

    Args:
      rounds: rounds as they will come; a sample of them is enough.
      request: limits. Where it gives both lengths, microbatches have N tokens.
      seconds: time of a microbatch of a shape class, from the cost model.
      lengths: stream lengths of all samples that rows must hold; None for those of the rounds.

    Raises:
      PlanningError: there are no samples, or one is longer than `request.row_len`.
    """
    lengths = lengths or _all_lengths(rounds)
    plain = plain_shape(rounds, request, seconds, lengths)
    if request.row_len and request.chunk_len:
        request = request._replace(fewer_tokens=False)
    improve = partial(_improved, rounds=rounds, request=request, seconds=seconds)
    best = min(improve(plain._replace(seconds=math.inf), plain.shape), plain, key=_seconds)
    bounds = {shape: _bound(rounds, shape, request, seconds) for shape in _shapes(request, lengths)}
    for shape in sorted(bounds, key=bounds.__getitem__):
        if bounds[shape] >= best.seconds:
            break
        best = improve(best, shape)
    best = _with_fewer_sequences(best, request, improve)
    if math.isfinite(best.seconds):
        return best
    # Nothing fits. A refusal should name the memory that the plain shape with one sequence per row
    # needs, which is the least.
    return price_shape(rounds, dataclasses.replace(plain.shape, max_sequences=1), seconds)


def plain_shape(
    rounds: Sequence[RoundLengths],
    request: ShapeRequest,
    seconds: Cost,
    lengths: Sequence[int] | None = None,
) -> PricedShape:
    """The plain rule, priced: the shortest row that holds the longest sample, the shortest chunk, N
    tokens.

    Arguments and errors as of `choose_shape`.
    """
    chunk_len = request.chunk_len or request.least_chunk_len
    lengths = lengths or _all_lengths(rounds)
    shape = smallest_shape_class(lengths, request.tokens, chunk_len, request.row_len)
    return price_shape(rounds, shape, seconds)


def muxtune_shape(
    rounds: Sequence[RoundLengths], request: ShapeRequest, seconds: Cost
) -> PricedShape:
    """MuxTune's rule, priced: its chunk, and the shortest row that holds the longest sample (3.5).

    Arguments and errors as of `choose_shape`.
    """
    chunk_len = muxtune_chunk_len(_all_lengths(rounds), request.least_chunk_len)
    return plain_shape(rounds, request._replace(chunk_len=chunk_len), seconds)


def muxtune_chunk_len(lengths: Sequence[int], least: int = MIN_CHUNK_LEN) -> int:
    """The greatest power of two that divides all lengths, at least `least` (MuxTune 3.5)."""
    divisor = math.gcd(*lengths)
    return max(least, divisor & -divisor)


def price_shape(rounds: Sequence[RoundLengths], shape: ShapeClass, seconds: Cost) -> PricedShape:
    """The cost of the rounds in one shape class."""
    packed = pack_rounds(rounds, shape)
    count = sum(batch.count for batch in packed)
    padding = 1 - sum(_all_lengths(rounds)) / (count * shape.tokens)
    return PricedShape(shape, count * seconds(shape, _owned(packed) / count), count, padding)


def _shapes(request: ShapeRequest, lengths: Sequence[int]) -> Iterator[ShapeClass]:
    """Shape classes of N tokens: every row and chunk length, one sequence per row and several."""
    shortest = request.row_len or smallest_shape_class(lengths, request.tokens).row_len
    longest = request.row_len or max(shortest, min(request.tokens, _LONGEST_ROW * shortest))
    for row_len in _powers_of_two(shortest, longest):
        least = request.chunk_len or request.least_chunk_len
        for chunk_len in _powers_of_two(least, request.chunk_len or max(least, row_len)):
            shape = smallest_shape_class(lengths, request.tokens, chunk_len, row_len)
            yield shape
            if row_len == shortest and shape.max_sequences > 1:
                yield dataclasses.replace(shape, max_sequences=1)


def _bound(
    rounds: Sequence[RoundLengths], shape: ShapeClass, request: ShapeRequest, seconds: Cost
) -> float:
    """A lower bound on the rounds' seconds, for any number of rows and of sequences per row."""
    needed = [least_rows_of_samples(batches, shape) for batches in rounds]
    tokens = sum(_all_lengths(rounds))
    return _cheapest(needed, tokens, _with_sequences(shape, 2), request, seconds)[0]


def _cheapest(
    needed: Sequence[int], owned: int, shape: ShapeClass, request: ShapeRequest, seconds: Cost
) -> tuple[float, int]:
    """The least seconds of the rounds over all numbers of rows, and that number.

    Args:
      needed: rows that each round needs, in units of the rows that a chunk covers.
      owned: tokens of all chunks of all rounds that are not empty.
      shape: a shape class of N tokens.
    """
    block = RowShape.of(shape).block
    totals = []
    for rows in _heights(shape) if request.fewer_tokens else [shape.rows]:
        count = sum(-(-n * block // rows) for n in needed)
        one = seconds(dataclasses.replace(shape, rows=rows), owned / count)
        totals.append((count * one, rows))
    return min(totals)


def _heights(shape: ShapeClass) -> Iterator[int]:
    """Numbers of rows to try: smaller ones in steps, and the shape class's own."""
    step = max(_STEP, power_of_two(-(-shape.tokens // _MOST_STEPS)))
    unit = max(step, shape.chunk_len, shape.row_len) // shape.row_len
    yield from range(unit, shape.rows, unit)
    yield shape.rows


def _improved(
    best: PricedShape,
    shape: ShapeClass,
    rounds: Sequence[RoundLengths],
    request: ShapeRequest,
    seconds: Cost,
) -> PricedShape:
    """Returns the cheaper of `best` and this shape class, taking the number of rows at which the
    class is cheapest.

    The class gets room for as many sequences per row as there are and a few more. Where that does
    not fit into memory, it gets half of the room.
    """
    whole, packed = shape, pack_rounds(rounds, shape)
    shape = _with_sequences(shape, _room_for(max(map(_most_sequences, packed))))
    needed = [len(batch.rows) for batch in packed]
    total, rows = _cheapest(needed, _owned(packed), shape, request, seconds)
    if math.isinf(total) and shape.max_sequences > 2:
        fewer = _with_sequences(whole, _room_for(shape.max_sequences // 2))
        return _improved(best, fewer, rounds, request, seconds)
    if total >= best.seconds:
        return best
    return min(
        best, price_shape(rounds, dataclasses.replace(shape, rows=rows), seconds), key=_seconds
    )


def _with_fewer_sequences(
    best: PricedShape,
    request: ShapeRequest,
    improve: Callable[[PricedShape, ShapeClass], PricedShape],
) -> PricedShape:
    """Halves the sequences per row of the best class as long as that makes it cheaper.

    Where attention takes time for every sequence that a row has room for, short sequences may be
    cheaper spread over more rows.
    """
    while best.shape.max_sequences > 2:
        row_len, chunk_len = best.shape.row_len, best.shape.chunk_len
        whole = smallest_shape_class([1, row_len], request.tokens, chunk_len, row_len)
        better = improve(best, _with_sequences(whole, _room_for(best.shape.max_sequences // 2)))
        if better is best:
            break
        best = better
    return best


def _with_sequences(shape: ShapeClass, sequences: int) -> ShapeClass:
    """The shape class with room for at most this many sequences per row."""
    return dataclasses.replace(shape, max_sequences=min(shape.max_sequences, sequences))


def _room_for(sequences: int) -> int:
    """Room per row where a row was seen to hold this many sequences; rows of other rounds hold
    more."""
    return sequences if sequences <= 2 else -(-sequences // _SEQUENCES) * _SEQUENCES


def _most_sequences(packed: PackedRound) -> int:
    """Sequences in the fullest row."""
    rows = spans_of_rows(packed.spans, packed.rows)
    return max((sum(span.sequences for _, span in row) for row in rows), default=1)


def _seconds(priced: PricedShape) -> float:
    return priced.seconds


def _owned(packed: Sequence[PackedRound]) -> int:
    """Tokens of the chunks that are not empty."""
    return sum(
        span.chunks * batch.shape.chunk_len
        for batch in packed
        for spans in batch.spans.values()
        for span in spans
    )


def _powers_of_two(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def _all_lengths(rounds: Sequence[RoundLengths]) -> list[int]:
    lengths = [size for batches in rounds for sizes in batches.values() for size in sizes]
    if not lengths:
        raise PlanningError("no samples to choose chunk and row length for")
    return lengths
