"""Cuts one task's global batch into spans, from the task's own lengths alone.

A *span* is a series of whole samples of one task that lie side by side. It begins at a chunk
border. The batch is first packed into as few rows as the task needs alone. The samples of each row
are then cut into the shortest spans that together take no more chunks than the whole row. A short
span can fill a gap beside the spans of other tasks, in another row. A span that stays in its row
takes no additional chunk.

Spans of more than half a row never share one, so that rows of such spans alone stay half empty.
Where one of them has several samples, a row is therefore cut more finely, if this takes few of the
chunks that the row has empty. The task alone still needs no further row.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from ..errors import PlanningError
from .bins import balanced_bins, first_fit_decreasing, fullest_bins, fullest_subset, least_bins
from .shape_class import ShapeClass

# A finer cut of a row takes at most this fraction of further chunks. With more, mixes of many
# lengths lose more chunks than others gain.
_MOST_FURTHER_CHUNKS = 0.2


class Span(NamedTuple):
    """Consecutive chunks of one task, with the samples that lie in them.

    Attributes:
      samples: for each sample of the span, a triple (sample, row, offset): the index of the sample
        in the task's global batch, its row counted from the first row of the span, and its first
        token counted from the first token of the span in that row. The row is 0 unless a chunk
        covers several rows.
      chunks: number of chunks of the span. The end of the last chunk may be padding.
      sequences: number of samples in the row of the span that holds the most samples.
    """

    samples: tuple[tuple[int, int, int], ...]
    chunks: int
    sequences: int


def cut_spans(lengths: Sequence[int], shape: ShapeClass, name: str = "task") -> tuple[Span, ...]:
    """Cuts one task's global batch into spans.

    Args:
      lengths: stream length of each sample, in tokens.
      shape: shape class of the microbatches.
      name: name of the task in error messages.

    Returns:
      The spans in the order in which they must be laid down in the microbatches. The spans of one
      row follow each other, so a task that trains alone needs no more rows than `row_bins` finds.

    Raises:
      PlanningError: a sample is empty or longer than a row.
    """
    for sample, length in enumerate(lengths):
        if not 0 < length <= shape.row_len:
            raise PlanningError(
                f"{name}: sample {sample} has {length} tokens, expected 1 to row_len="
                f"{shape.row_len}"
            )
    rows = row_bins(lengths, shape)
    if shape.chunk_len > shape.row_len:
        return _stack(rows, lengths, shape.chunk_len // shape.row_len)
    parts = [_cut(row, lengths, shape) for row in rows]
    parts.sort(key=lambda part: -part[0].chunks)
    return tuple(span for part in parts for span in part)


def row_bins(lengths: Sequence[int], shape: ShapeClass) -> list[list[int]]:
    """Packs one task's samples into rows as if no other task existed.

    Of three constructions, it takes the one with fewest rows; of those, the one with fewest chunks.

    Args:
      lengths: stream length of each sample, in tokens.
      shape: shape class of the microbatches.

    Returns:
      For each row, the indices of its samples in `lengths`.
    """
    limits = shape.row_len, shape.max_sequences

    def chunks(row):
        return -(-sum(lengths[s] for s in row) // shape.chunk_len)

    packings = [pack(lengths, *limits) for pack in (first_fit_decreasing, fullest_bins)]
    best = min(packings, key=lambda rows: (len(rows), sum(map(chunks, rows))))
    counts = range(least_bins(lengths, *limits), len(best))
    fewer = (balanced_bins(lengths, count, *limits) for count in counts)
    return next(filter(None, fewer), best)


def _stack(rows: list[list[int]], lengths: Sequence[int], height: int) -> tuple[Span, ...]:
    """Returns spans of one chunk each; a chunk covers `height` rows."""
    rows = sorted(rows, key=lambda row: -sum(lengths[s] for s in row))
    spans = []
    for start in range(0, len(rows), height):
        block = rows[start : start + height]
        samples = tuple(
            place for i, row in enumerate(block) for place in _side_by_side(row, lengths, row=i)
        )
        spans.append(Span(samples, 1, max(map(len, block))))
    return tuple(spans)


def _cut(row: list[int], lengths: Sequence[int], shape: ShapeClass) -> list[Span]:
    """Cuts the samples of a row into spans, longest first.

    The spans take the fewest further chunks, beyond those of the whole row, with which none of
    several samples is longer than half a row. If that takes too many, they take none.
    """
    most = shape.row_len // shape.chunk_len
    chunks = -(-sum(lengths[s] for s in row) // shape.chunk_len)
    further = min(most - chunks, int(_MOST_FURTHER_CHUNKS * chunks))
    cuts = (_cut_within(row, lengths, shape.chunk_len, chunks + n) for n in range(further + 1))
    shortest = first = next(cuts)
    while any(span.sequences > 1 and 2 * span.chunks > most for span in shortest):
        shortest = next(cuts, None)
        if shortest is None:
            return first
    return shortest


def _cut_within(row: list[int], lengths: Sequence[int], chunk_len: int, chunks: int) -> list[Span]:
    """Cuts the samples of a row into spans, longest first, that together take at most `chunks`
    chunks."""
    left = list(row)
    padding = chunks * chunk_len - sum(lengths[s] for s in row)
    spans = []
    while left:
        part = _shortest_part(left, lengths, chunk_len, padding)
        taken = set(part)
        left = [s for s in left if s not in taken]
        size = sum(lengths[s] for s in part)
        held = -(-size // chunk_len)
        padding -= held * chunk_len - size
        spans.append(Span(_side_by_side(part, lengths), held, len(part)))
    return sorted(spans, key=lambda span: -span.chunks)


def _shortest_part(
    left: list[int], lengths: Sequence[int], chunk_len: int, padding: int
) -> list[int]:
    """The longest remaining sample, followed by the samples with which it reaches a chunk border
    soonest with at most `padding` tokens of padding."""
    first, *others = left
    room = -lengths[first] % chunk_len
    tokens = sum(lengths[s] for s in left)
    # Bit t is set where some of the others have t tokens together.
    sums = 1
    for sample in others:
        sums |= sums << lengths[sample]
    while lengths[first] + room < tokens:
        fullest = (sums & ((2 << room) - 1)).bit_length() - 1
        if room - fullest <= padding:
            chosen = fullest_subset([lengths[s] for s in others], room)
            return [first, *(others[i] for i in chosen)]
        room += chunk_len
    return left


def _side_by_side(
    samples: Sequence[int], lengths: Sequence[int], row: int = 0
) -> tuple[tuple[int, int, int], ...]:
    offsets = accumulate((lengths[s] for s in samples), initial=0)
    return tuple((s, row, offset) for s, offset in zip(samples, offsets, strict=False))
