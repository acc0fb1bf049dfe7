"""Cuts one task's global batch into spans, from the task's lengths alone, and packs items into
bins.

The functions that pack items return the indices of the items of each bin, and `most_items` limits
the number of items of a bin. Three constructions nearly always meet a lower bound, so the answer is
known to be optimal without a solver.
"""

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError
from .shape_class import ShapeClass


def least_bins(sizes: Sequence[int], capacity: int, most_items: int | None = None) -> int:
    """A lower bound on the number of bins of any packing: the larger of L2 and the bound by the
    number of items (Martello and Toth, Lower bounds and reduction procedures for the bin packing
    problem, 1990)."""
    # For a threshold α, an item above `capacity` - α shares a bin with no item of at least α, and
    # two items above half the capacity never share one. The items from α to half the capacity fill
    # the room beside those; items that do not fit there need further bins. L2 is the best such
    # bound over all α.
    if not len(sizes):
        return 0
    ascending = np.sort(np.asarray(sizes, np.int64))
    sums = np.concatenate([[0], np.cumsum(ascending)])
    half = np.searchsorted(ascending, capacity // 2, side="right")
    thresholds = np.concatenate([[0], ascending[:half]])
    from_threshold = np.searchsorted(ascending, thresholds)
    alone = np.searchsorted(ascending, capacity - thresholds, side="right")
    small = sums[half] - sums[from_threshold]
    room = (alone - half) * capacity - (sums[alone] - sums[half])
    beyond = np.maximum(0, -((room - small) // capacity))
    bound = int((len(ascending) - half + beyond).max())
    return bound if most_items is None else max(bound, -(-len(ascending) // most_items))


def first_fit_decreasing(
    sizes: Sequence[int], capacity: int, most_items: int | None = None
) -> list[list[int]]:
    """Packs items, longest first, each into the first bin with room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for size, items in groupby(_longest_first(sizes), key=sizes.__getitem__):
        # A bin without room for one item has none for the next item of the same size.
        i = 0
        for item in items:
            while i < len(bins) and (size > rooms[i] or len(bins[i]) == most_items):
                i += 1
            if i == len(bins):
                bins.append([])
                rooms.append(capacity)
            bins[i].append(item)
            rooms[i] -= size
    return bins


def fullest_bins(
    sizes: Sequence[int], capacity: int, most_items: int | None = None
) -> list[list[int]]:
    """Packs items so that every bin is as full as the remaining items allow (minimum bin slack;
    Gupta and Ho, A new heuristic algorithm for the one-dimensional bin-packing problem, 1999)."""
    # A bin takes the longest remaining item and those further items that leave the least room. Of
    # several such choices it takes one with the fewest items, so that short items remain for gaps
    # in later bins.
    most_items = most_items or len(sizes)
    order = _longest_first(sizes)
    left = {size: deque(items) for size, items in groupby(order, key=sizes.__getitem__)}
    bins = []
    while left:
        first = next(iter(left))
        room = capacity - first
        others = [
            size
            for size, items in left.items()
            for _ in range(min(len(items) - (size == first), room // size))
        ]
        chosen = _fullest_of_descending(others, room, most_items - 1)
        content = [first, *(others[i] for i in chosen)]
        needed = Counter(content)
        # Items only become fewer, so the best content stays the best while its items last.
        while all(len(left[size]) >= count for size, count in needed.items()):
            bins.append([left[size].popleft() for size in content])
        left = {size: items for size, items in left.items() if items}
    return bins


def balanced_bins(
    sizes: Sequence[int], count: int, capacity: int, most_items: int | None = None
) -> list[list[int]] | None:
    """Packs items into `count` bins, longest first, each into the emptiest bin with room for one
    more item (Graham's longest processing time rule); None if an item does not fit."""
    # If the limit on the number of items is nearly reached, this finds packings that the other
    # constructions miss: these fill some bins with few long items, and short items are left over.
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, i) for i in range(count)]
    for item in _longest_first(sizes):
        if not emptiest or emptiest[0][0] + sizes[item] > capacity:
            return None
        load, i = emptiest[0]
        bins[i].append(item)
        if len(bins[i]) == most_items:
            heapq.heappop(emptiest)
        else:
            heapq.heapreplace(emptiest, (load + sizes[item], i))
    return bins


def fullest_subset(sizes: Sequence[int], capacity: int, most_items: int | None = None) -> list[int]:
    """Returns the indices, ascending, of the fewest items with the largest sum within `capacity`.
    Of several such choices it takes the one that leaves the shortest items over."""
    fitting = [i for i in _longest_first(sizes) if sizes[i] <= capacity]
    chosen = _fullest_of_descending([sizes[i] for i in fitting], capacity, most_items or len(sizes))
    return sorted(fitting[i] for i in chosen)


def _fullest_of_descending(sizes: Sequence[int], capacity: int, most_items: int) -> list[int]:
    """`fullest_subset` of descending sizes. The search ends as soon as the items so far reach the
    largest possible sum and no choice with a later item could reach it with fewer items."""
    most = _largest_sum(sizes, min(capacity, sum(sizes[:most_items])))
    never = most_items + 1
    # fewest[t] is the least number of the items so far that sum to t.
    fewest = np.full(most + 1, never, np.int32)
    fewest[0] = 0
    # longest[n] is the sum of the n longest items.
    longest = [0]
    takes = []
    for size in sizes:
        count = int(fewest[most])
        if count < never and longest[max(count - 2, 0)] + size < most:
            break
        longest.append(longest[-1] + size)
        with_item = fewest[: max(0, most + 1 - size)] + 1
        takes.append(with_item < fewest[size:])
        np.minimum(fewest[size:], with_item, out=fewest[size:])
    total = int(np.flatnonzero(fewest < never)[-1])
    chosen = []
    for i in reversed(range(len(takes))):
        if total >= sizes[i] and takes[i][total - sizes[i]]:
            chosen.append(i)
            total -= sizes[i]
    return chosen[::-1]


def _largest_sum(sizes: Sequence[int], most: int) -> int:
    """The largest sum of some of the sizes that is at most `most`."""
    # Bit t is set where some of the sizes sum to t.
    sums, within = 1, (2 << most) - 1
    for size in sizes:
        if sums >> most:
            break
        sums |= (sums << size) & within
    return sums.bit_length() - 1


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


# The samples of each row are cut into the shortest spans that together take no more chunks than the
# whole row, because a short span can fill a gap beside the spans of other tasks. But two spans of
# more than half a row never share a row. If one of them has several samples, the row is therefore
# cut more finely, if this takes few of the chunks that the row has empty. The task alone still
# needs no further row.
# A finer cut of a row takes at most this fraction of further chunks. With a larger fraction, rounds
# of many different lengths lose more chunks than other rounds gain.
_MOST_FURTHER_CHUNKS = 0.2


class Span(NamedTuple):
    """Consecutive chunks of one task. `samples` has for each sample its index in the task's global
    batch, its row and its first token, both counted from the start of the span; the row is 0 unless
    a chunk covers several rows. `sequences` is the number of samples in the row that holds most of
    them."""

    samples: tuple[tuple[int, int, int], ...]
    chunks: int
    sequences: int


def cut_spans(lengths: Sequence[int], shape: ShapeClass, name: str = "task") -> tuple[Span, ...]:
    """Cuts one task's global batch into spans, in the order in which they must be laid down. A task
    that trains alone needs no more rows than `row_bins` finds, because the spans of one row follow
    each other. PlanningError names a sample that is empty or longer than a row."""
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
    """Packs one task's samples into rows as if no other task existed. Of three constructions, it
    takes the one with fewest rows; of those, the one with fewest chunks."""
    row_len, max_sequences = shape.row_len, shape.max_sequences

    def chunks(row):
        return -(-sum(lengths[s] for s in row) // shape.chunk_len)

    packings = [
        pack(lengths, row_len, max_sequences) for pack in (first_fit_decreasing, fullest_bins)
    ]
    best = min(packings, key=lambda rows: (len(rows), sum(map(chunks, rows))))
    counts = range(least_bins(lengths, row_len, max_sequences), len(best))
    fewer = (balanced_bins(lengths, count, row_len, max_sequences) for count in counts)
    return next(filter(None, fewer), best)


def _stack(rows: list[list[int]], lengths: Sequence[int], height: int) -> tuple[Span, ...]:
    """Spans of one chunk each; a chunk covers `height` rows."""
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
    """Cuts the samples of a row into spans, longest first. The spans take the fewest further
    chunks, beyond those of the whole row, with which none of several samples is longer than half a
    row. If that takes too many, they take none."""
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
