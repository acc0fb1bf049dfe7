"""The shape class of a training run's microbatches, and how samples fill its rows.

`cut_spans` cuts one task's global batch into spans, from the task's lengths alone. `fill_rows` lays
the spans of several tasks into rows. The spans of a task keep their order, because the task's
result depends on the contents and the order of its chunks, but not on their rows (see
`microbatches`). A row takes the next spans of some of the tasks, so that as many chunks as possible
fit.

The functions that pack items into bins return the indices of the items in each bin; `most_items`
limits the number of items in a bin. The best of three constructions nearly always meets a lower
bound, so it is known to be optimal without a solver.
"""

import dataclasses
import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, islice, product
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError
from ..numbers import power_of_two

# Weights of size and of count in the weighted sums of `_least_rows_of_both`.
_WEIGHTS = ((1, 0), (0, 1), (1, 1), (2, 1), (1, 2))
# The smallest legal chunk length and row length, in tokens.
MIN_CHUNK_LEN = 64
# `smallest_shape_class` allows one sequence for each this many tokens of a row.
_SHORTEST_AVERAGE = 16


@dataclasses.dataclass(frozen=True)
class ShapeClass:
    """Shape of every microbatch of a training run; programs are compiled for it. Chunks begin at
    multiples of `chunk_len` in the microbatch. The constructor raises PlanningError for a value
    outside its range.

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
        """Tokens that even a short sample takes up in a row: a row holds at most `max_sequences`
        samples."""
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
    lengths; to compare costs, use `choose_shape`. `tokens` is rounded up to whole rows and whole
    chunks. Raises PlanningError if there are no samples, a sample is longer than `row_len`, or a
    size is not legal."""
    if not lengths:
        raise PlanningError("no samples to choose a shape class for")
    longest = max(lengths)
    chunk_len = chunk_len or MIN_CHUNK_LEN
    row_len = row_len or max(MIN_CHUNK_LEN, power_of_two(longest))
    if longest > row_len:
        raise PlanningError(
            f"row_len={row_len} is shorter than the longest sample, which takes {longest} places"
        )
    # If no two samples fit into one row, rows hold one sequence, because dense attention is faster.
    pair = 2 * min(lengths)
    max_sequences = 1 if pair > row_len else max(2, row_len // _SHORTEST_AVERAGE)
    unit = max(row_len, chunk_len)
    rows = -(-tokens // unit) * (unit // row_len)
    return ShapeClass(rows, row_len, chunk_len, max_sequences)


def least_bins(sizes: Sequence[int], capacity: int, most_items: int | None = None) -> int:
    """A lower bound on the number of bins of any packing: the larger of the bound L2 and the bound
    from the number of items (Martello and Toth, Lower bounds and reduction procedures for the bin
    packing problem, 1990)."""
    # Take a threshold α. An item above `capacity` - α shares a bin with no item of at least α, and
    # two items above half the capacity never share a bin. Items from α to half the capacity fill
    # the room beside the items above half the capacity; further bins are needed for the rest. L2 is
    # the largest such bound over all α.
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
    """Packs the items in descending order, each into the first bin with room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for size, items in groupby(_longest_first(sizes), key=sizes.__getitem__):
        # A bin without room for one item has no room for the next item of the same size either.
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
    # A bin takes the longest remaining item and the other items that leave the least room. Among
    # equally good choices, the one with the fewest items keeps short items for gaps in later bins.
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
        # The remaining items only become fewer, so the best content stays the best while its items
        # last.
        while all(len(left[size]) >= count for size, count in needed.items()):
            bins.append([left[size].popleft() for size in content])
        left = {size: items for size, items in left.items() if items}
    return bins


def balanced_bins(
    sizes: Sequence[int], count: int, capacity: int, most_items: int | None = None
) -> list[list[int]] | None:
    """Packs the items into `count` bins in descending order, each into the emptiest bin that may
    take one more item (Graham's longest processing time rule); None if an item does not fit."""
    # If the limit on the number of items is nearly reached, this finds packings that the other
    # constructions miss, because those fill some bins with few long items and then have no room for
    # all short items.
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
    """Returns the indices, ascending, of the items with the largest sum within `capacity`. Among
    equal sums, it takes the fewest items; among these choices, the one that leaves the shortest
    items over."""
    fitting = [i for i in _longest_first(sizes) if sizes[i] <= capacity]
    chosen = _fullest_of_descending([sizes[i] for i in fitting], capacity, most_items or len(sizes))
    return sorted(fitting[i] for i in chosen)


def _fullest_of_descending(sizes: Sequence[int], capacity: int, most_items: int) -> list[int]:
    """`fullest_subset` for descending sizes. The search ends when the items so far reach the
    largest possible sum and a later item could not reduce their number."""
    most = _largest_sum(sizes, min(capacity, sum(sizes[:most_items])))
    never = most_items + 1
    # fewest[t] is the least number of items, among those seen so far, that sum to t.
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
    """The largest sum, at most `most`, of a subset of the sizes."""
    # Bit t is set if some of the sizes sum to t.
    sums, within = 1, (2 << most) - 1
    for size in sizes:
        if sums >> most:
            break
        sums |= (sums << size) & within
    return sums.bit_length() - 1


def _longest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda i: -sizes[i])


# The samples of a row are cut into the shortest spans that together take no more chunks than the
# row, because a short span can fill a gap beside the spans of other tasks. But two spans of more
# than half a row never share a row. A row that has such a span with several samples is therefore
# cut more finely, if this takes few of the row's empty chunks. A task that trains alone still needs
# no more rows. A finer cut takes at most this fraction of additional chunks: with a larger
# fraction, rounds of many different lengths lose more chunks than other rounds gain.
_MOST_FURTHER_CHUNKS = 0.2


class Span(NamedTuple):
    """Consecutive chunks of one task. `samples` has, for each sample, its index in the task's
    global batch, its row and its first token, counted from the start of the span. The row is 0
    unless a chunk covers several rows. `sequences` is the number of sequences in the row with the
    most of them."""

    samples: tuple[tuple[int, int, int], ...]
    chunks: int
    sequences: int


def cut_spans(
    lengths: Sequence[int], shape: ShapeClass, name: str = "task", members: int = 1
) -> tuple[Span, ...]:
    """Cuts one task's global batch into spans, in the order in which they must be laid down. A task
    that trains alone needs no more rows than `row_bins` finds, because the spans of one row follow
    each other. Each sample consists of `members` sequences, 2 for a pair of answers. Raises
    PlanningError if a sample is empty, longer than a row, or of more sequences than a row holds."""
    if members > shape.max_sequences:
        raise PlanningError(
            f"{name}: a sample has {members} sequences, and a row holds {shape.max_sequences}"
        )
    for sample, length in enumerate(lengths):
        if not 0 < length <= shape.row_len:
            raise PlanningError(
                f"{name}: sample {sample} has {length} tokens, expected 1 to row_len="
                f"{shape.row_len}"
            )
    most_samples = shape.max_sequences // members
    rows = row_bins(lengths, dataclasses.replace(shape, max_sequences=most_samples))
    if shape.chunk_len > shape.row_len:
        spans = _stack(rows, lengths, shape.chunk_len // shape.row_len)
    else:
        parts = [_cut(row, lengths, shape) for row in rows]
        parts.sort(key=lambda part: -part[0].chunks)
        spans = [span for part in parts for span in part]
    return tuple(span._replace(sequences=members * span.sequences) for span in spans)


def row_bins(lengths: Sequence[int], shape: ShapeClass) -> list[list[int]]:
    """Packs one task's samples into rows as if there were no other task. Takes the one of three
    constructions with the fewest rows, then with the fewest chunks."""
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
    """Spans of one chunk each, where a chunk covers `height` rows."""
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
    """Cuts the samples of a row into spans, longest first. Uses the fewest additional chunks with
    which no span of several samples is longer than half a row; if these are too many, uses none."""
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
    """The longest remaining sample, followed by the samples with which it fills whole chunks
    soonest, with at most `padding` tokens of padding."""
    first, *others = left
    room = -lengths[first] % chunk_len
    tokens = sum(lengths[s] for s in left)
    # Bit t is set if some of the other samples have t tokens together.
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


# For each slot, the task's spans in the order in which they must be laid down.
Queues = Mapping[int, Sequence[Span]]
# For each slot, the number of its next spans that a row takes.
Row = dict[int, int]


class RowShape(NamedTuple):
    """Limits of a row. If a chunk covers several rows of the shape class, a row in this module
    stands for these `block` rows."""

    chunks: int
    max_sequences: int
    block: int

    @classmethod
    def of(cls, shape: ShapeClass) -> "RowShape":
        return cls(
            max(1, shape.row_len // shape.chunk_len),
            shape.max_sequences,
            max(1, shape.chunk_len // shape.row_len),
        )


def fill_rows(queues: Queues, shape: RowShape, height: int) -> list[Row]:
    """Lays all spans into rows. Of several methods that fill one row after another, takes the one
    with the fewest rows, and then with the fewest chunks in the last microbatch of `height`
    rows."""
    best = fill_rows_greedily(queues, shape)
    least = least_rows(queues, shape)
    chunks = sum(row_chunks(queues, best))
    least_last = max(1, chunks - (least - 1) // height * height * shape.chunks)
    for even_out, insist in product((False, True), (True, False)):
        if last_chunks(queues, best, height) == least_last and len(best) == least:
            return best
        plan = _fill_rows_full(queues, shape, even_out, insist)
        best = min(best, plan, key=lambda r: (len(r), last_chunks(queues, r, height)))
    return best


def last_chunks(queues: Queues, rows: Sequence[Row], height: int) -> int:
    return sum(row_chunks(queues, rows)[(len(rows) - 1) // height * height :])


def fill_rows_greedily(queues: Queues, shape: RowShape) -> list[Row]:
    """Lays all spans into rows by first fit decreasing: a row takes the longest fitting one of the
    tasks' next spans, until none fits."""
    left = {slot: deque(queue) for slot, queue in queues.items() if queue}
    rows = []
    while left:
        row: Row = {}
        chunks, sequences = shape.chunks, shape.max_sequences
        while fitting := [
            slot
            for slot, spans in left.items()
            if spans[0].chunks <= chunks and spans[0].sequences <= sequences
        ]:
            slot = max(fitting, key=lambda slot: left[slot][0].chunks)
            span = left[slot].popleft()
            chunks -= span.chunks
            sequences -= span.sequences
            row[slot] = row.get(slot, 0) + 1
            if not left[slot]:
                del left[slot]
        rows.append(row)
    return rows


def _fill_rows_full(queues: Queues, shape: RowShape, even_out: bool, insist: bool) -> list[Row]:
    """Fills every row as full as the next spans of the tasks allow. Among equally full choices,
    takes the one with the fewest sequences, or with `even_out`, spans of the tasks with the most
    chunks left. With `insist`, a row always takes the longest of the next spans."""
    # Choices of few, long sequences leave short sequences for gaps in later rows. Taking spans of
    # the tasks with the most chunks left keeps many tasks to choose from in the last rows.
    position = dict.fromkeys(queues, 0)
    left = {slot: sum(span.chunks for span in queue) for slot, queue in queues.items()}
    rows = []
    chunks, max_sequences = shape.chunks, shape.max_sequences
    prefixes = {slot: _prefixes(queue, 0, chunks, max_sequences) for slot, queue in queues.items()}
    while any(left.values()):
        weight = left if even_out else None
        row = _fullest_of_prefixes(prefixes, chunks, max_sequences, weight=weight, insist=insist)
        for slot, count in row.items():
            position[slot] += count
            left[slot] -= prefixes[slot][count - 1][0]
            prefixes[slot] = _prefixes(queues[slot], position[slot], chunks, max_sequences)
        rows.append(row)
    return rows


def fullest_row(
    queues: Queues,
    position: Mapping[int, int],
    chunks: int,
    max_sequences: int,
    weight: Mapping[int, float] | None = None,
    insist: bool = False,
) -> Row:
    """Chooses the spans that fill one row best, by a knapsack over the next spans of each task.
    `weight`, the value of a chunk of each slot, decides between equally full choices; None means
    that the fewest sequences decide."""
    prefixes = {
        slot: _prefixes(queue, position[slot], chunks, max_sequences)
        for slot, queue in queues.items()
    }
    return _fullest_of_prefixes(prefixes, chunks, max_sequences, weight, insist)


def _fullest_of_prefixes(
    prefixes: Mapping[int, Sequence[tuple[int, int]]],
    chunks: int,
    max_sequences: int,
    weight: Mapping[int, float] | None,
    insist: bool,
) -> Row:
    waiting = sorted(filter(prefixes.get, prefixes), key=lambda slot: -prefixes[slot][0][0])
    # For each number of chunks, the cost and the number of sequences of the best choice that takes
    # as many.
    best: dict[int, tuple[float, int]] = {0: (0, 0)}
    choices: list[tuple[int, dict[int, int]]] = []
    for slot in waiting:
        longer = {} if insist and not choices else dict(best)
        count: dict[int, int] = {}
        for n, (size, sequences) in enumerate(prefixes[slot], start=1):
            price = sequences if weight is None else -weight[slot] * size
            for total, (cost, used) in best.items():
                taken_chunks = total + size
                if taken_chunks > chunks or used + sequences > max_sequences:
                    continue
                known = longer.get(taken_chunks)
                if known is None or cost + price < known[0]:
                    longer[taken_chunks] = cost + price, used + sequences
                    count[taken_chunks] = n
        best = longer
        choices.append((slot, count))
    total = max(best)
    row: Row = {}
    for slot, count in reversed(choices):
        if taken := count.get(total):
            row[slot] = taken
            total -= prefixes[slot][taken - 1][0]
    return row


def _prefixes(
    queue: Sequence[Span], start: int, chunks: int, max_sequences: int
) -> list[tuple[int, int]]:
    """Chunks and sequences of the next span, of the next two spans together, and so on while they
    fit."""
    sums, size, sequences = [], 0, 0
    for i in range(start, len(queue)):
        size += queue[i].chunks
        sequences += queue[i].sequences
        if size > chunks or sequences > max_sequences:
            break
        sums.append((size, sequences))
    return sums


def spans_of_rows(queues: Queues, rows: Sequence[Row]) -> list[list[tuple[int, Span]]]:
    """The spans of each row, as pairs (slot, span) in their order in the row."""
    left = {slot: iter(queue) for slot, queue in queues.items()}
    return [
        [(slot, span) for slot, count in row.items() for span in islice(left[slot], count)]
        for row in rows
    ]


def row_chunks(queues: Queues, rows: Sequence[Row]) -> list[int]:
    return [sum(span.chunks for _, span in spans) for spans in spans_of_rows(queues, rows)]


def least_rows(queues: Queues, shape: RowShape) -> int:
    """A lower bound on the number of rows that hold these spans in any order."""
    spans = [span for queue in queues.values() for span in queue]
    if shape.block > 1:
        return len(spans)
    chunks, sequences = [span.chunks for span in spans], [span.sequences for span in spans]
    return _least_rows_of_both(chunks, shape.chunks, sequences, shape.max_sequences)


def least_rows_of_samples(lengths: Mapping[int, Sequence[int]], shape: ShapeClass) -> int:
    """A lower bound on the number of rows over all layouts in which each chunk belongs to one
    task."""
    row = RowShape.of(shape)
    if row.block > 1:
        return sum(
            -(-least_bins(sizes, shape.row_len, shape.max_sequences) // row.block)
            for sizes in lengths.values()
        )
    together = [size for sizes in lengths.values() for size in sizes]
    if row.chunks == 1:
        # A row belongs to one task.
        return sum(_least_rows_of_one_task(sizes, shape) for sizes in lengths.values())
    chunks = sum(_least_chunks(sizes, shape) for sizes in lengths.values())
    return max(_least_rows_of_one_task(together, shape), -(-chunks // row.chunks))


def _least_rows_of_one_task(lengths: Sequence[int], shape: ShapeClass) -> int:
    """A lower bound on the number of rows that ignores the chunks."""
    return _least_rows_of_both(lengths, shape.row_len, [1] * len(lengths), shape.max_sequences)


def _least_chunks(lengths: Sequence[int], shape: ShapeClass) -> int:
    """A lower bound on the number of chunks that one task's samples take in any rows.

    It is the larger of two bounds, each for the best threshold of the lengths:

    - If c chunks hold at most m(c) samples of at least u tokens, each such sample takes at least
      min_c c / m(c) chunks.
    - Two samples above half a row never share a row. Each takes whole chunks, and shorter samples
      first fill the ends of these chunks.
    """
    if not lengths:
        return 0
    chunk_len, most = shape.chunk_len, shape.row_len // shape.chunk_len
    descending = np.sort(np.asarray(lengths, np.int64))[::-1]
    counts = np.arange(1, len(descending) + 1)
    chunks = np.arange(1, most + 1)
    held = chunks * chunk_len // descending[:, None]
    # Computed as m / c to avoid a division by 0; m > 0 because every sample fits into a row.
    densest = (held / chunks).max(axis=1)
    by_count = np.ceil(counts / densest - 1e-9).max()
    sums = np.concatenate([[0], np.cumsum(descending)])
    long = np.concatenate([[0], np.cumsum(-(-descending // chunk_len))])
    above_half = np.searchsorted(-descending, -(shape.row_len // 2)) + 1
    long, filled = long[:above_half], sums[:above_half]
    beyond = np.maximum(0, (sums[-1] - filled) - (long * chunk_len - filled))
    return max(int(by_count), int((long + -(-beyond // chunk_len)).max()))


def _least_rows_of_both(
    sizes: Sequence[int], room: int, counts: Sequence[int], max_count: int
) -> int:
    """A lower bound on the number of rows that have a limit on size and a limit on count. It is the
    best bound over several weighted sums of size and count, none of which a row can exceed. If the
    items are so long that no row reaches the limit on the count, only the size matters."""
    # A task has no samples here if all of them train on other replicas.
    if not len(sizes) or (
        min(s / c for s, c in zip(sizes, counts, strict=True)) * max_count >= room
    ):
        return least_bins(sizes, room)
    share = np.asarray(sizes, np.int64) * max_count
    count_share = np.asarray(counts, np.int64) * room
    return max(
        least_bins(
            of_room * share + of_count * count_share, (of_room + of_count) * room * max_count
        )
        for of_room, of_count in _WEIGHTS
    )
