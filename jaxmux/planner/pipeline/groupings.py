"""Groups tasks for the pipeline: candidates for hTasks, buckets and turns.

- MuxTune fuses tasks into hTasks, whose samples share microbatches (3.3, Eq. 4 and 6), and groups
  hTasks into buckets, which take turns in the pipeline (3.4, Eq. 7).
- LoRAFusion divides tasks into groups that are packed together and take turns (5.2).

A quick estimate of the length of the stream selects the groupings that are worth simulating.
Functions that divide N items into parts of nearly equal sums take the items' sizes, float64 [N],
and return the item indices of each part.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, pairwise
from typing import NamedTuple

import numpy as np

from ..contiguous_ranges import cheapest_ranges
from ..errors import PlanningError
from ..packing.microbatches import CutBatch
from ..packing.rows import ShapeClass

# Indices of the tasks of an hTask, in ascending order of their tokens.
HTask = tuple[int, ...]


class Fusion(NamedTuple):
    """A partition of the tasks into hTasks, in ascending order of tokens. `latency` is F in MuxTune
    Eq. 6: estimated seconds from end to end for C microbatches of every hTask."""

    htasks: tuple[HTask, ...]
    latency: float


def fusions(tokens: Sequence[int], latency: Callable[[HTask], float], stages: int) -> list[Fusion]:
    """Returns, for every number of hTasks, the partition of least latency F (Eq. 6).

    The tasks are sorted by tokens, and every hTask is a contiguous range of them:

        F(m, n) = min_i F(i, n-1) + L(H_{i+1→m}) / S,   F(m, 1) = L(H_{1→m}).

    The first hTask fills and drains the pipeline. Each further hTask adds its average latency per
    stage, which is less than its time in a full pipeline. The partition of least F is therefore not
    always the fastest; a caller that can simulate the pipeline should choose among the partitions.

    Args:
      tokens: n_i, tokens of a microbatch of each of the M tasks.
      latency: L, end-to-end latency in seconds of an hTask alone in the pipeline; infinite for an
        hTask that is not allowed. It is called once for each of the M(M+1)/2 contiguous hTasks.
    """
    ascending = sorted(range(len(tokens)), key=lambda task: (tokens[task], task))
    costs = np.full((len(ascending), len(ascending)), np.inf)
    for first, last in combinations_with_replacement(range(len(ascending)), 2):
        costs[first, last] = latency(tuple(ascending[first : last + 1]))
    return [
        Fusion(tuple(tuple(ascending[first : last + 1]) for first, last in ranges), total)
        for ranges, total in fuse_ranges(costs, stages)
    ]


def fuse_ranges(costs: np.ndarray, stages: int) -> list[tuple[list[tuple[int, int]], float]]:
    """Returns the best partitions of sorted tasks into contiguous ranges (Eq. 6). For every
    possible number of hTasks, it gives the first and the last task of each hTask, and the latency F
    in seconds. Entry [i, k] of `costs` is the latency of an hTask of the tasks i to k; infinite if
    the hTask does not fit."""
    tasks = len(costs)
    if not tasks:
        raise PlanningError("no tasks to fuse")
    further = np.full((tasks + 1, tasks + 1), np.inf)
    further[:-1, 1:] = np.where(np.tri(tasks, dtype=bool).T, costs / stages, np.inf)
    first = np.concatenate([[np.inf], costs[0]])
    partitions = [
        ([(begin, end - 1) for begin, end in pairwise((0, *ends))], total)
        for ends, total in cheapest_ranges(first, further, tasks)
        if np.isfinite(total)
    ]
    if not partitions:
        raise PlanningError(f"no partition of the {tasks} tasks into hTasks fits in memory")
    return partitions


def pipeline_latency(stages: Sequence[float], microbatches: int) -> float:
    """Returns the end-to-end latency of an hTask alone in the pipeline, in seconds (Eq. 4).

    L = 2 Σ_{s<S} L⁽ˢ⁾ + 2C max_s L⁽ˢ⁾: warm-up and drain, then the steady phase of C microbatches.
    L⁽ˢ⁾ is the mean of the seconds of a forward and a backward pass on each stage.
    """
    return 2 * sum(stages[:-1]) + 2 * microbatches * max(stages)


def pair_head_with_tail(
    lengths: Mapping[int, Sequence[int]], groups: int
) -> tuple[tuple[int, ...], ...]:
    """Divides tasks into groups of similar load, each with short samples beside long ones
    (LoRAFusion 5.2). With two groups, the bubble lemma (see `pipeline_plan`) needs no no-ops if
    each group's global batches take at least S - 1 microbatches."""
    for slot, sizes in lengths.items():
        if not len(sizes):
            raise PlanningError(f"slot {slot}: no samples, so their mean length is unknown")
    if not 1 <= groups <= len(lengths):
        raise PlanningError(f"{len(lengths)} tasks cannot be divided into {groups} groups")
    # Tasks are sorted by the mean length of their samples and paired: the shortest with the
    # longest, the second shortest with the second longest, and so on. The pairs are added to groups
    # in descending order of tokens, each to the group with the fewest pairs, and among these to the
    # group with the fewest tokens.
    tokens = {slot: int(np.sum(sizes)) for slot, sizes in lengths.items()}
    pairs = _pairs(sorted(lengths, key=lambda slot: (np.mean(lengths[slot]), slot)), groups)
    members: list[list[int]] = [[] for _ in range(groups)]
    # For each group, its number of pairs and its number of tokens.
    held = [(0, 0)] * groups
    for pair in sorted(pairs, key=lambda pair: -sum(tokens[slot] for slot in pair)):
        lightest = held.index(min(held))
        members[lightest] += pair
        pair_count, token_count = held[lightest]
        held[lightest] = (pair_count + 1, token_count + sum(tokens[slot] for slot in pair))
    return tuple(tuple(sorted(group)) for group in members)


def _pairs(ascending: list[int], groups: int) -> list[list[int]]:
    """Pairs from both ends. If there are fewer than two tasks per group, the longest tasks stay
    single."""
    singles = max(0, 2 * groups - len(ascending))
    paired, rest = ascending[: len(ascending) - singles], ascending[len(ascending) - singles :]
    half = len(paired) // 2
    pairs = [list(pair) for pair in zip(paired[:half], reversed(paired[-half:]), strict=True)]
    middle = [[paired[half]]] if len(paired) % 2 else []
    return pairs + middle + [[slot] for slot in rest]


def take_turns[Batch](
    rounds: Sequence[Mapping[int, Batch]], groups: Sequence[Sequence[int]]
) -> list[dict[int, Batch]]:
    """Returns the turns of all rounds. In each round, the groups take turns; a turn holds the
    global batches of one group. Empty turns are left out."""
    turns = [
        {slot: batches[slot] for slot in group if slot in batches}
        for batches in rounds
        for group in groups
    ]
    return [turn for turn in turns if turn]


# Two parts exchange at most this many items in one comparison of all 2^n divisions of these items.
_EXCHANGED_ITEMS = 12
# Two sums count as equal if they differ by less than this fraction of the mean sum.
_NEGLIGIBLE = 1e-3
# Relative error of a sum of float64 numbers.
_ROUNDING = 1e-12

Parts = Sequence[Sequence[int]]


def largest_sum(parts: Parts, sizes: np.ndarray) -> float:
    return max(sizes[list(part)].sum() for part in parts)


def deal_largest_first(sizes: np.ndarray, count: int) -> list[list[int]]:
    """Deals the items in descending order to `count` parts, each item to the part with the least
    sum."""
    parts: list[list[int]] = [[] for _ in range(count)]
    sums = np.zeros(count)
    for item in np.argsort(-sizes, kind="stable"):
        smallest = int(sums.argmin())
        parts[smallest].append(int(item))
        sums[smallest] += sizes[item]
    return parts


class _Layer(NamedTuple):
    """States of the dynamic program, one entry each. `members` has the items in the filled parts,
    as bits; `variance` the sum of squared distances of these parts' sums from the mean of all
    parts; `parent` the index of the previous state in the layer before; `part` the items in the
    last filled part, as bits."""

    members: np.ndarray
    variance: np.ndarray
    parent: np.ndarray
    part: np.ndarray


def least_variance(parts: Parts, sizes: np.ndarray, limit: float = np.inf) -> list[list[int]]:
    """Returns the division with the least variance of sums, by a dynamic program over sets for at
    most about 16 items. It has as many parts as `parts`, and no sum is above `limit`."""
    # The program fills one part after another. Each part holds the largest item that is left, so
    # every division comes up once. The variance of the given division bounds the search: if a part
    # is at distance d from the mean, all other parts together are at a total distance of at least
    # d. Few subsets for a part and few sets to continue from remain.
    descending = np.argsort(-sizes, kind="stable")
    sums = _subset_sums(sizes[descending])
    count, mean = len(parts), sums[-1] / len(parts)
    most = sum((sizes[list(part)].sum() - mean) ** 2 for part in parts) + _ROUNDING * mean**2
    distance = (sums - mean) ** 2
    near = distance * count <= most * (count - 1) + _ROUNDING * mean**2
    near = 1 + np.flatnonzero(near[1:] & (sums[1:] <= limit))
    empty = np.zeros(1, np.int64)
    layers = [_Layer(empty, np.zeros(1), empty, empty)]
    for left in reversed(range(count)):
        layer = _fill_part(layers[-1], near, distance, len(sizes))
        off = sums[-1] - sums[layer.members] - left * mean
        within = layer.variance + off**2 / max(left, 1) <= most
        if not left:
            # A division that leaves out a short item may be within `most`, so require all items.
            within = layer.members == 2 ** len(sizes) - 1
        layers.append(_Layer(*(field[within] for field in layer)))
    division, index = [], 0
    for layer in reversed(layers[1:]):
        part = int(layer.part[index])
        division.append([int(item) for n, item in enumerate(descending) if part >> n & 1])
        index = int(layer.parent[index])
    return division


def _fill_part(layer: _Layer, near: np.ndarray, distance: np.ndarray, items: int) -> _Layer:
    """The states after one more part is filled; for each set of items, the state of least variance.
    The part is one of the subsets `near`, int64, as bits. `distance`, float64 [2^items], is the
    squared distance of each subset's sum from the mean."""
    everything = 2**items - 1
    # The items descend in size, so the lowest bit of those that are left is the largest.
    next_item = ~layer.members & everything
    next_item &= -next_item
    grown = []
    for bit in np.unique(next_item[next_item > 0]):
        states = np.flatnonzero(next_item == bit)
        choices = near[near & -near == bit]
        row, column = np.nonzero(layer.members[states][:, None] & choices == 0)
        parent, part = states[row], choices[column]
        members = layer.members[parent] | part
        grown.append(_Layer(members, layer.variance[parent] + distance[part], parent, part))
    merged = _Layer(*(np.concatenate(fields) for fields in zip(*grown, strict=True)))
    order = np.lexsort((merged.variance, merged.members))
    members = merged.members[order]
    best = order[np.concatenate([[True], members[1:] != members[:-1]])]
    return _Layer(*(field[best] for field in merged))


def small_largest_sum(parts: Parts, sizes: np.ndarray, precision: float) -> list[list[int]]:
    """Returns, among the divisions with the smallest largest sum, the one of least variance. The
    largest sum may exceed the smallest possible one by the fraction `precision`."""
    count, best = len(parts), parts
    low, high = max(sizes.sum() / count, sizes.max()), largest_sum(parts, sizes)
    while high > low * (1 + precision):
        limit = (low + high) / 2
        packed = _fewest_bins(sizes, limit)
        if len(packed) > count:
            low = limit
        else:
            best, high = packed, largest_sum(packed, sizes)
    return least_variance(_spread(best, count), sizes, high * (1 + _ROUNDING))


def _fewest_bins(sizes: np.ndarray, limit: float) -> list[list[int]]:
    """Packs the items into the fewest bins of size `limit`, by a dynamic program over sets. For
    each set it keeps the packing with the fewest bins, and among these the one whose last bin is
    least full. Both are one number: (bins - 1) · limit + sum of the last bin."""
    members = np.arange(2 ** len(sizes))
    used = np.full(len(members), np.inf)
    used[0] = 0.0
    last = np.zeros(len(members), np.int64)
    item_count = np.bitwise_count(members)
    slack = _ROUNDING * limit
    for count in range(1, len(sizes) + 1):
        layer = members[item_count == count]
        for item, size in enumerate(sizes):
            sets = layer[layer >> item & 1 == 1]
            before = used[sets ^ (1 << item)]
            full = np.ceil((before - slack) / limit) * limit
            after = np.where(before + size <= full + slack, before, full) + size
            better = after < used[sets]
            used[sets[better]], last[sets[better]] = after[better], item
    bins: list[list[int]] = []
    rest, opened = len(members) - 1, np.inf
    while rest:
        item = int(last[rest])
        number = int(np.ceil((used[rest] - slack) / limit))
        if number != opened:
            bins.append([])
            opened = number
        bins[-1].append(item)
        rest ^= 1 << item
    return bins


def _spread(parts: Parts, count: int) -> list[list[int]]:
    """Splits parts that hold several items until there are `count` parts."""
    spread = [list(part) for part in parts]
    while len(spread) < count:
        spread.append([max(spread, key=len).pop()])
    return spread


def _subset_sums(sizes: np.ndarray) -> np.ndarray:
    """The sum of every subset of the items: float64 [2^N], indexed by the subset as bits."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.concatenate([sums, sums + size])
    return sums


def divide_pairs_again(parts: list[list[int]], sizes: np.ndarray) -> list[list[int]]:
    """Divides pairs of parts anew, beginning with the most different sums, until no pair
    improves."""
    sums = [sizes[part].sum() for part in parts]
    negligible = _NEGLIGIBLE * sizes.sum() / len(parts)
    changed = set(range(len(parts)))
    while changed:
        pairs = [
            (one, two)
            for one, two in combinations(range(len(parts)), 2)
            if (one in changed or two in changed) and abs(sums[one] - sums[two]) > negligible
        ]
        pairs.sort(key=lambda pair: -abs(sums[pair[0]] - sums[pair[1]]))
        changed = set()
        for one, two in pairs:
            divided = _halve(parts[one] + parts[two], sizes)
            halves = [sizes[half].sum() for half in divided]
            if abs(halves[0] - halves[1]) < abs(sums[one] - sums[two]) - negligible:
                (parts[one], parts[two]), (sums[one], sums[two]) = divided, halves
                changed |= {one, two}
    return parts


def _halve(items: list[int], sizes: np.ndarray) -> tuple[list[int], list[int]]:
    """Divides items into two parts of nearly equal sums. The 12 shortest items are divided in the
    best way; the others are dealt beforehand."""
    descending = sorted(items, key=lambda i: -sizes[i])
    dealt, free = descending[:-_EXCHANGED_ITEMS], descending[-_EXCHANGED_ITEMS:]
    one, two = ([dealt[i] for i in part] for part in deal_largest_first(sizes[dealt], 2))
    sums = _subset_sums(sizes[free])
    target = sizes[items].sum() / 2 - sizes[one].sum()
    chosen = int(np.abs(sums - target).argmin())
    one += [item for n, item in enumerate(free) if chosen >> n & 1]
    two += [item for n, item in enumerate(free) if not chosen >> n & 1]
    return one, two


# For each bucket, the indices of its hTasks. Buckets descend in latency, as rule 1 of MuxTune's
# pipeline template requires.
Buckets = tuple[tuple[int, ...], ...]

# The exact search visits all subsets of the hTasks, so it is used for at most this many.
_EXACT_HTASKS = 12
# Buckets of least variance are a candidate if their largest bucket exceeds the smallest possible
# largest bucket by at most this fraction.
_LARGEST_ABOVE_LEAST = 0.01


def candidate_buckets(latencies: Sequence[float], most: int | None = None) -> list[Buckets]:
    """Returns one or two balanced choices of buckets for each number of buckets up to `most`."""
    # A clock of the pipeline takes as long as its largest bucket, but the buckets of least variance
    # (Eq. 7) may have a larger largest bucket than necessary. If the exact search is possible,
    # there are therefore two candidates: the buckets of least variance, unless their largest bucket
    # is too large, and, among the buckets with the smallest largest bucket, those of least
    # variance.
    candidates = []
    sizes = np.asarray(latencies, float)
    for balanced in balanced_buckets(latencies, most):
        smallest = balanced
        if len(sizes) <= _EXACT_HTASKS and balance_gap(latencies, balanced) > _NEGLIGIBLE:
            smallest = _in_order(small_largest_sum(balanced, sizes, _NEGLIGIBLE), sizes)
        limit = (1 + _LARGEST_ABOVE_LEAST) * largest_sum(smallest, sizes)
        candidates += [smallest] if smallest != balanced else []
        candidates += [balanced] if largest_sum(balanced, sizes) <= limit else []
    return candidates


def balanced_buckets(latencies: Sequence[float], most: int | None = None) -> list[Buckets]:
    """Returns, for each P = 1 ... N, the P buckets of least variance (Eq. 7). The result is exact
    for up to 12 hTasks. More hTasks are dealt to the buckets in descending order; then pairs of
    buckets are divided anew, each as evenly as possible, until no pair improves."""
    if not len(latencies):
        raise PlanningError("no hTasks to group")
    for htask, latency in enumerate(latencies):
        if not 0 < latency < np.inf:
            raise PlanningError(f"hTask {htask} has a latency of {latency} s, expected more than 0")
    sizes = np.asarray(latencies, float)
    counts = range(1, 1 + min(len(sizes), most or len(sizes)))
    dealt = [deal_largest_first(sizes, count) for count in counts]
    improve = least_variance if len(sizes) <= _EXACT_HTASKS else divide_pairs_again
    return [_in_order(improve(buckets, sizes), sizes) for buckets in dealt]


def balance_gap(latencies: Sequence[float], buckets: Buckets) -> float:
    """Returns the largest bucket divided by max(mean bucket, largest hTask), minus 1. This maximum
    is a lower bound on the largest bucket, for the same number of buckets."""
    sizes = np.asarray(latencies, float)
    return largest_sum(buckets, sizes) / max(sizes.sum() / len(buckets), sizes.max()) - 1


def _in_order(buckets: Sequence[Sequence[int]], sizes: np.ndarray) -> Buckets:
    """The buckets in descending order of latency, each with its hTasks in ascending order."""
    tidy = (tuple(sorted(int(i) for i in bucket)) for bucket in buckets)
    return tuple(sorted(tidy, key=lambda bucket: (-sizes[list(bucket)].sum(), bucket)))


# For each group, in the order of turns, the slots of its tasks. The tasks of a group share
# microbatches.
Groups = tuple[tuple[int, ...], ...]
# For each slot, the task's global batch of a round, cut into spans.
CutRound = Mapping[int, CutBatch]

# For up to this many tasks, every division into groups is a candidate: 52 divisions of 5 tasks.
_EVERY_DIVISION = 5
# Partitions into more hTasks are left out: their buckets hardly differ from buckets of single
# tasks.
_MOST_HTASKS = 12


class Grouping(NamedTuple):
    """Tasks fused into hTasks, and hTasks grouped into buckets. `htasks` has the slots of each
    hTask, `buckets` the indices of each bucket's hTasks. The tasks of a bucket share
    microbatches."""

    htasks: tuple[HTask, ...]
    buckets: Buckets

    @property
    def groups(self) -> Groups:
        members = ([slot for i in bucket for slot in self.htasks[i]] for bucket in self.buckets)
        return tuple(tuple(sorted(slots)) for slots in members)


def candidate_groupings(
    rounds: Sequence[CutRound], shape: ShapeClass, stages: Sequence[float]
) -> list[Grouping]:
    """Returns candidates for the best grouping, without duplicates. Eq. 6 charges an hTask only for
    its first microbatches, and so tends to fuse all tasks into one. Therefore the best partition
    into every number of hTasks is grouped into buckets; so is the partition in which every task is
    its own hTask. Further candidates are head-tail pairs (LoRAFusion 5.2) and, for few tasks, all
    divisions. Groupings with more than 2S buckets are left out, because 2S buckets already fill the
    pipeline."""
    most = 2 * len(stages)
    batches = _batches(rounds)
    lengths = {slot: [n for batch in cuts for n in batch.lengths] for slot, cuts in batches.items()}
    # For each slot, the mean number of microbatches that its global batches fill.
    microbatches = {
        slot: float(np.mean([chunks_of(batch) for batch in cuts])) / shape.chunks
        for slot, cuts in batches.items()
    }
    # `fusions` numbers the tasks from 0.
    slots = sorted(lengths)

    def latency(htask: HTask) -> float:
        count = sum(microbatches[slots[task]] for task in htask)
        return pipeline_latency(stages, int(np.ceil(count)))

    alone = tuple((slot,) for slot in sorted(slots, key=lambda slot: (microbatches[slot], slot)))
    sizes = [microbatches[slot] for slot in slots]
    fused = [
        tuple(tuple(slots[task] for task in htask) for htask in fusion.htasks)
        for fusion in fusions(sizes, latency, len(stages))
        if len(fusion.htasks) <= _MOST_HTASKS
    ]
    buckets_of_tasks = (
        *candidate_buckets([microbatches[slot] for (slot,) in alone], most),
        *_head_tail(lengths, alone, most),
    )
    candidates = [Grouping(alone, buckets) for buckets in buckets_of_tasks]
    for htasks in fused:
        latencies = [sum(microbatches[slot] for slot in htask) for htask in htasks]
        candidates += [Grouping(htasks, buckets) for buckets in candidate_buckets(latencies, most)]
    candidates += [Grouping(alone, buckets) for buckets in _every_division(len(alone), most)]
    distinct: dict[frozenset[tuple[int, ...]], Grouping] = {}
    for grouping in candidates:
        distinct.setdefault(frozenset(grouping.groups), grouping)
    return list(distinct.values())


def chunks_of(batch: CutBatch) -> int:
    return sum(span.chunks for span in batch.spans)


def _batches(rounds: Sequence[CutRound]) -> dict[int, list[CutBatch]]:
    """For each slot, its global batches that have samples; slots without samples are left out."""
    by_slot: dict[int, list[CutBatch]] = {}
    for batches in rounds:
        for slot, batch in batches.items():
            if len(batch.lengths):
                by_slot.setdefault(slot, []).append(batch)
    if not by_slot:
        raise PlanningError("no samples to plan a pipeline for")
    return by_slot


def _head_tail(
    lengths: Mapping[int, Sequence[int]], alone: tuple[HTask, ...], most: int
) -> Iterator[Buckets]:
    """For every number of buckets up to `most`, buckets of head-tail pairs."""
    index = {slot: i for i, (slot,) in enumerate(alone)}
    for count in range(1, 1 + min(len(lengths), most)):
        groups = pair_head_with_tail(lengths, count)
        yield tuple(tuple(index[slot] for slot in group) for group in groups)


def _every_division(tasks: int, most: int) -> Iterator[Buckets]:
    """Every way to divide a few tasks into at most `most` buckets."""
    if tasks > _EVERY_DIVISION:
        return
    divisions: list[list[list[int]]] = [[]]
    for task in range(tasks):
        divisions = [
            [*buckets[:i], [*bucket, task], *buckets[i + 1 :]]
            for buckets in divisions
            for i, bucket in enumerate([*buckets, []])
        ]
    for buckets in divisions:
        if len(buckets) <= most:
            yield tuple(tuple(bucket) for bucket in buckets)


# Rounding error up to which a sum of fractions of microbatches counts as a whole number.
_CEIL_TOLERANCE = 1e-9


def most_promising(
    groupings: Sequence[Grouping], rounds: Sequence[CutRound], shape: ShapeClass, stages: int
) -> list[Grouping]:
    """Returns the 2S groupings whose streams are estimated to be the shortest. The estimate ignores
    how well spans fill microbatches, so a grouping rarely takes less time than estimated."""
    chunks = [{slot: chunks_of(batch) for slot, batch in batches.items()} for batches in rounds]
    alike: Counter[tuple[int, int]] = Counter()
    keys = []
    for i, grouping in enumerate(groupings):
        groups = grouping.groups
        turns = [
            [sum(of_slots.get(slot, 0) for slot in group) / shape.chunks for group in groups]
            for of_slots in chunks
        ]
        length = stream_length(turns, stages)
        # Among groupings with equal estimates, those with different numbers of groups come first.
        keys.append((length, alike[length, len(groups)], i))
        alike[length, len(groups)] += 1
    return [groupings[i] for _, _, i in sorted(keys)[: 2 * stages]]


def stream_length(rounds: Sequence[Sequence[float]], distance: int) -> int:
    """Returns the number of microbatches in a stream, including the no-ops that the bubble lemma
    needs.

    Args:
      rounds: for each round and each group, the number of microbatches that the group's turn fills.
      distance: number of stages. A turn of a group begins at least this many microbatches after the
        last microbatch of the group's previous turn.
    """
    end = 0.0
    last: dict[int, int] = {}
    for turns in rounds:
        for group, microbatches in enumerate(turns):
            if microbatches:
                begin = max(end, last[group] + distance) if group in last else end
                end = begin + microbatches
                last[group] = int(np.ceil(end - _CEIL_TOLERANCE)) - 1
    return int(np.ceil(end - _CEIL_TOLERANCE))
