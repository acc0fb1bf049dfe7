"""Chooses the shape class of microbatches (MuxTune 3.5, chunk-based alignment) from a few rounds of
the training run: padding takes time, and so does attention over long rows."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ..devices import Deployment
from ..errors import PlanningError
from ..numbers import power_of_two
from .microbatches import PackedRound, RoundLengths, pack_rounds
from .rows import (
    MIN_CHUNK_LEN,
    RowShape,
    ShapeClass,
    least_rows_of_samples,
    smallest_shape_class,
    spans_of_rows,
)

# Limits on the number of rounds, on the samples of all rounds together and on the samples of one
# round. With these, choosing a shape class takes two or three seconds. A part of a large round is
# enough, because the room left in its last microbatch makes little difference.
_MOST_ROUNDS, _MOST_SAMPLES, _MOST_OF_A_ROUND = 16, 2048, 1024

# For each step of one task, the stream lengths in tokens of the samples of its global batch.
Batches = Sequence[Sequence[int]]


class PartOfBatches(Sequence[list[int]]):
    """The stream lengths of the samples that one of several devices trains, for each step of a
    task. Samples of more than `longest` tokens are left out. Each global batch is divided into
    `parts` parts, and the first part stands for all. A global batch is read only when its lengths
    are requested."""

    def __init__(self, batches: Batches, parts: int = 1, longest: int | None = None):
        self.batches, self.parts, self.longest = batches, parts, longest

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, step: int) -> list[int]:
        return at_most(self.longest, self.batches[step][:: self.parts])


def at_most(longest: int | None, lengths: Sequence[int]) -> list[int]:
    return [length for length in lengths if longest is None or length <= longest]


def sample_rounds(tasks: Sequence[Batches]) -> list[RoundLengths]:
    """Picks at most 16 rounds of a training run for `choose_shape`, evenly spaced. Together they
    hold at most about 2048 samples. If the first round has more than 1024 samples, every global
    batch is cut to the same fraction of its samples, so that a round keeps about 1024.

    Only step 0 and the steps of the picked rounds are read, so `tasks[slot]` may be a lazy
    sequence. A round lacks the tasks that have ended before it.
    """
    part, rounds = sampled_part(tasks), max(map(len, tasks))
    count = min(rounds, _MOST_ROUNDS, int(_MOST_SAMPLES / (part * _first_samples(tasks))))
    return [
        {
            slot: _part(batches[step], part)
            for slot, batches in enumerate(tasks)
            if step < len(batches)
        }
        for step in np.linspace(0, rounds - 1, count).astype(int).tolist()
    ]


def sampled_part(tasks: Sequence[Batches]) -> float:
    """Returns the fraction of every global batch that `sample_rounds` keeps. To predict the time of
    a whole round, divide the predicted time by this fraction."""
    return min(1.0, _MOST_OF_A_ROUND / _first_samples(tasks))


def _first_samples(tasks: Sequence[Batches]) -> int:
    # The first round may be empty, for example if only samples of some lengths count.
    return max(1, sum(len(batches[0]) for batches in tasks))


def _part(lengths: Sequence[int], part: float) -> list[int]:
    return list(lengths[: math.ceil(part * len(lengths))])


def longest_that_fits[T](
    lengths: Sequence[int],
    longest: int,
    choose: Callable[[int], T],
    require: Callable[[T], None],
    fixed: bool,
) -> T:
    """Returns the choice for the longest samples for which a replica has memory. `choose` gets the
    limit `longest` on the tokens of a sample; the limit is halved until `require` accepts the
    choice instead of raising PlanningError. If the row length is `fixed`, shorter samples do not
    help."""
    while True:
        choice = choose(longest)
        try:
            require(choice)
            return choice
        except PlanningError:
            shorter = max(MIN_CHUNK_LEN, longest // 2)
            if fixed or shorter == longest or shorter < min(lengths):
                raise
            longest = shorter


def require_longest_rows(deployment: Deployment, row_len: int, longest: Mapping[str, int]) -> None:
    """Raises PlanningError if a task's longest sample is longer than `row_len`, the length of the
    longest rows of all replicas."""
    for name, tokens in longest.items():
        if tokens > row_len:
            raise PlanningError(
                f"mesh {deployment}: the longest sample of task {name!r} takes {tokens} places in "
                f"a row, but the longest rows for which a replica has memory have {row_len}; a "
                "larger replica is needed"
            )


# Rows are tried up to this many times the shortest possible row. Longer rows would save only the
# room at their end.
_LONGEST_ROW = 8
# Smaller microbatches are tried in steps of `_STEP` tokens, at most `_MOST_STEPS` of them. Finer
# steps would fit only the given rounds: a slightly larger round would need one more microbatch.
_STEP, _MOST_STEPS = 512, 32
# If a row holds more than two sequences, `max_sequences` is rounded up to a multiple of this.
_SEQUENCES = 4

# Predicts the seconds of one microbatch from its shape class and its number of tokens in chunks
# that belong to a task. The seconds are linear in this number.
Cost = Callable[[ShapeClass, float], float]


class ShapeRequest(NamedTuple):
    """Limits for `choose_shape`; a size of None is chosen.

    Attributes:
      tokens: N, the most tokens of a microbatch, rounded up to whole rows and whole chunks.
      row_len: tokens of a row, a power of two.
      chunk_len: tokens of a chunk, a power of two.
      least_chunk_len: tokens of the shortest chunk that the device's kernels accept.
      fewer_tokens: whether microbatches may have fewer than N tokens if they cost less. Ignored if
        both `row_len` and `chunk_len` are given.
      max_sequences: the most sequences of a row. Used only if both `row_len` and `chunk_len` are
        given.
    """

    tokens: int
    row_len: int | None = None
    chunk_len: int | None = None
    least_chunk_len: int = MIN_CHUNK_LEN
    fewer_tokens: bool = True
    max_sequences: int | None = None


class PricedShape(NamedTuple):
    """A shape class with its predicted cost over all microbatches of some rounds. `seconds` is
    infinite if a microbatch does not fit into memory; `padding` is the fraction of tokens that is
    padding."""

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
    """Returns the shape class in which the given rounds are predicted to take the least time.

    Longer rows and shorter chunks leave less padding and so need fewer microbatches, but each
    microbatch may cost more: attention covers a whole row, and kernels work chunk by chunk. Smaller
    microbatches leave less padding in the last microbatch of a round, but are less efficient. If no
    shape class fits into memory, the result has infinite `seconds` and one sequence per row.

    Args:
      rounds: a few representative rounds; `sample_rounds` picks them.
      seconds: predicts the seconds of one microbatch, for example `costs.ReplicaCosts.microbatch`;
        infinite if it does not fit into memory.
      lengths: stream lengths of all samples that rows must be able to hold; None means the samples
        of `rounds`.

    Raises:
      PlanningError: there are no samples, a sample is empty or too long, or a size is not legal.
    """
    lengths = lengths or _all_lengths(rounds)
    plain = plain_shape(rounds, request, seconds, lengths)
    if request.row_len and request.chunk_len:
        if request.max_sequences:
            return plain
        request = request._replace(fewer_tokens=False)
    improve = partial(_improved, rounds=rounds, request=request, seconds=seconds)
    # Compute a lower bound on the time of every candidate, then pack and price only the candidates
    # that may be the best.
    best = min(improve(plain._replace(seconds=math.inf), plain.shape), plain, key=_seconds)
    bounds = {shape: _bound(rounds, shape, request, seconds) for shape in _shapes(request, lengths)}
    for shape in sorted(bounds, key=bounds.__getitem__):
        if bounds[shape] >= best.seconds:
            break
        best = improve(best, shape)
    best = _with_fewer_sequences(best, request, improve)
    if math.isfinite(best.seconds):
        return best
    # Nothing fits. Return the plain shape with one sequence per row, which needs the least memory,
    # so that the error message names this amount.
    return price_shape(rounds, dataclasses.replace(plain.shape, max_sequences=1), seconds)


def plain_shape(
    rounds: Sequence[RoundLengths],
    request: ShapeRequest,
    seconds: Cost,
    lengths: Sequence[int] | None = None,
) -> PricedShape:
    """Returns the shape class of a fixed rule: the shortest row that holds the longest sample, the
    shortest chunk that the kernels accept, and `request.tokens` tokens. Sizes in `request` take
    precedence. Arguments and errors are as for `choose_shape`."""
    chunk_len = request.chunk_len or request.least_chunk_len
    lengths = lengths or _all_lengths(rounds)
    shape = smallest_shape_class(lengths, request.tokens, chunk_len, request.row_len)
    if request.row_len and request.chunk_len and request.max_sequences:
        shape = dataclasses.replace(shape, max_sequences=request.max_sequences)
    return price_shape(rounds, shape, seconds)


def price_shape(rounds: Sequence[RoundLengths], shape: ShapeClass, seconds: Cost) -> PricedShape:
    packed = pack_rounds(rounds, shape)
    count = sum(batch.count for batch in packed)
    padding = 1 - sum(_all_lengths(rounds)) / (count * shape.tokens)
    return PricedShape(shape, count * seconds(shape, _owned(packed) / count), count, padding)


def with_fewer_rows(
    rounds: Sequence[RoundLengths], shape: ShapeClass, seconds: Cost, stages: int = 1
) -> PricedShape:
    """Returns the shape class in which the given rounds are predicted to take the least time, of
    those with at most as many rows as `shape`. In a pipeline, the fill and drain of a round take as
    long as `stages` - 1 microbatches."""
    step = power_of_two(-(-shape.tokens // _MOST_STEPS))
    unit = max(step, shape.chunk_len, shape.row_len) // shape.row_len
    packed, block = pack_rounds(rounds, shape), RowShape.of(shape).block
    needed, owned = [len(batch.rows) * block for batch in packed], _owned(packed)

    def total(rows: int) -> float:
        counts = [-(-n // rows) for n in needed]
        one = seconds(dataclasses.replace(shape, rows=rows), owned / sum(counts))
        return one * sum(count + stages - 1 for count in counts)

    best = min([*range(unit, shape.rows, unit), shape.rows], key=total)
    return price_shape(rounds, dataclasses.replace(shape, rows=best), seconds)


def _shapes(request: ShapeRequest, lengths: Sequence[int]) -> Iterator[ShapeClass]:
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
    """A lower bound on the seconds of the rounds, whatever the number of rows and of sequences per
    row."""
    needed = [least_rows_of_samples(batches, shape) for batches in rounds]
    tokens = sum(_all_lengths(rounds))
    return _cheapest(needed, tokens, _with_sequences(shape, 2), request, seconds)[0]


def _cheapest(
    needed: Sequence[int], owned: int, shape: ShapeClass, request: ShapeRequest, seconds: Cost
) -> tuple[float, int]:
    """The least predicted seconds of all rounds together, and the number of rows per microbatch
    that reaches them. Without `request.fewer_tokens`, only the rows of `shape` are tried. `needed`
    has the number of rows that each round needs; if a chunk covers several rows, these count as
    one. `owned` is the number of tokens in all chunks that belong to a task."""
    block = RowShape.of(shape).block
    totals = []
    for rows in _heights(shape) if request.fewer_tokens else [shape.rows]:
        count = sum(-(-n * block // rows) for n in needed)
        one = seconds(dataclasses.replace(shape, rows=rows), owned / count)
        totals.append((count * one, rows))
    return min(totals)


def _heights(shape: ShapeClass) -> Iterator[int]:
    """Yields the numbers of rows to try: smaller ones in even steps, then `shape.rows`."""
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
    class is cheapest. The class gets room for slightly more sequences per row than the rounds need,
    or for half as many if that does not fit into memory."""
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
    """Halves the sequences per row of the best class as long as this makes it cheaper. Attention
    may take time for absent sequences; then spreading short samples over more rows can be
    cheaper."""
    while best.shape.max_sequences > 2:
        row_len, chunk_len = best.shape.row_len, best.shape.chunk_len
        whole = smallest_shape_class([1, row_len], request.tokens, chunk_len, row_len)
        better = improve(best, _with_sequences(whole, _room_for(best.shape.max_sequences // 2)))
        if better is best:
            break
        best = better
    return best


def _with_sequences(shape: ShapeClass, sequences: int) -> ShapeClass:
    return dataclasses.replace(shape, max_sequences=min(shape.max_sequences, sequences))


def _room_for(sequences: int) -> int:
    """The `max_sequences` for rows of which the fullest holds `sequences` sequences. The number is
    rounded up, because rows of other rounds may hold more."""
    return sequences if sequences <= 2 else -(-sequences // _SEQUENCES) * _SEQUENCES


def _most_sequences(packed: PackedRound) -> int:
    rows = spans_of_rows(packed.spans, packed.rows)
    return max((sum(span.sequences for _, span in row) for row in rows), default=1)


def _seconds(priced: PricedShape) -> float:
    return priced.seconds


def _owned(packed: Sequence[PackedRound]) -> int:
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
