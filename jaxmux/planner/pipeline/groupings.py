"""Which tasks could share microbatches: hTasks (Eq. 6) in buckets (Eq. 7), and head-tail pairs."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError
from ..packing.microbatches import CutBatch
from ..packing.shape_class import ShapeClass
from .adapter_groups import pair_head_with_tail
from .bubble_lemma import lemma_distance
from .buckets import Buckets, candidate_buckets
from .fusion import HTask, fusions, pipeline_latency
from .schedules import TickRule
from .schedules.classic import one_f_one_b_depth

# By group, the slots of the tasks that are packed together, in the order of their turns.
Groups = tuple[tuple[int, ...], ...]
# By slot, the task's global batch of a round.
CutRound = Mapping[int, CutBatch]

# Of so few tasks, every division is a candidate: 52 of them.
_EVERY_DIVISION = 5
# Partitions into more hTasks than this are left out: by buckets they come to what the tasks by
# themselves do.
_MOST_HTASKS = 12
# Estimates are that good.
_NOTABLY_SLOWER = 0.03
_NEGLIGIBLE = 1e-9


class Grouping(NamedTuple):
    """hTasks, as slots, and the hTasks of each bucket, by index.

    The tasks of an hTask, and the hTasks of a bucket, are packed into the same microbatches.
    """

    htasks: tuple[HTask, ...]
    buckets: Buckets

    @property
    def groups(self) -> Groups:
        """The slots of each bucket."""
        members = ([slot for i in bucket for slot in self.htasks[i]] for bucket in self.buckets)
        return tuple(tuple(sorted(slots)) for slots in members)


def candidate_groupings(
    rounds: Sequence[CutRound], shape: ShapeClass, stages: Sequence[float]
) -> list[Grouping]:
    """Groupings that may be the best, each division of the tasks once.

    Eq. 6 charges an hTask's first microbatches alone and so tends to fuse all there is; hence the
    best partition into every number of hTasks is put into buckets, and the tasks by themselves.
    More than 2S buckets fill no pipeline better.

    Args:
      rounds: global batches of every task; of each, the mean over its rounds counts.
      shape: shape class of the microbatches.
      stages: L⁽ˢ⁾, of one pass of a microbatch, in seconds: the mean of forward and backward.

    Raises:
      PlanningError: there are no samples.
    """
    most = 2 * len(stages)
    lengths = _lengths(rounds)
    loads = _microbatches(rounds, shape)
    # Fusion counts tasks from 0 on.
    slots = sorted(lengths)

    def latency(htask: HTask) -> float:
        microbatches = sum(loads[slots[task]] for task in htask)
        return pipeline_latency(stages, int(np.ceil(microbatches)))

    alone = tuple((slot,) for slot in sorted(slots, key=lambda slot: (loads[slot], slot)))
    tokens = [loads[slot] for slot in slots]
    fused = [
        tuple(tuple(slots[task] for task in htask) for htask in fusion.htasks)
        for fusion in fusions(tokens, latency, len(stages))
        if len(fusion.htasks) <= _MOST_HTASKS
    ]
    found: dict[frozenset[tuple[int, ...]], Grouping] = {}
    balanced = candidate_buckets([loads[slot] for (slot,) in alone], most)
    for buckets in (*balanced, *_head_tail(lengths, alone, most)):
        _add(found, Grouping(alone, buckets))
    for htasks in fused:
        own = [sum(loads[slot] for slot in htask) for htask in htasks]
        for buckets in candidate_buckets(own, most):
            _add(found, Grouping(htasks, buckets))
    for buckets in _every_division(len(alone), most):
        _add(found, Grouping(alone, buckets))
    return list(found.values())


class Estimate(NamedTuple):
    """Seconds that a grouping is estimated to take for some rounds, with such ticks."""

    seconds: float
    grouping: Grouping
    rule: TickRule


def most_promising(
    groupings: Sequence[Grouping],
    rounds: Sequence[CutRound],
    shape: ShapeClass,
    forward: Sequence[float],
    backward: Sequence[float],
    permute: float = 0.0,
    depth: int | None = None,
) -> list[Estimate]:
    """For every kind of ticks, the 2S groupings of the least estimates.

    The estimate knows the bubble lemma, and nothing of how well spans fill microbatches: few
    groupings take less. Of those that it cannot tell apart, each number of groups has its turn.
    Kinds of ticks whose least estimate is notably above that of another are left out.

    Args:
      forward, backward: of a mean microbatch on each of S stages, in seconds.
      permute: of the messages at the end of a tick.
      depth: most microbatches in flight on the first stage; None for as many as ticks have use for.
    """
    stages = len(forward)
    chunks = [{slot: _chunks(batch) for slot, batch in batches.items()} for batches in rounds]
    # With single ops, every other stage goes forward while those between go backward.
    turns = [max((forward, backward)[(s + t) % 2][s] for s in range(stages)) for t in (0, 1)]
    job_seconds: dict[TickRule, float] = {
        "single": sum(turns) + 2 * permute,
        "paired": max(f + b for f, b in zip(forward, backward, strict=True)) + permute,
        "alternating": max(forward) + max(backward) + 2 * permute,
    }
    ranked = []
    for rule, full in job_seconds.items():
        # With fewer buffers than a full pipeline holds, that much of it is empty.
        wanted = one_f_one_b_depth(stages, rule)[0]
        each = full * max(1.0, wanted / (depth or wanted))
        alike: Counter[tuple[int, int]] = Counter()
        keys = []
        for i, grouping in enumerate(groupings):
            loads = [
                [sum(own.get(slot, 0) for slot in group) / shape.chunks for group in groups]
                for own in chunks
                for groups in [grouping.groups]
            ]
            kind = (_slots(loads, lemma_distance(stages, rule)), len(grouping.buckets))
            keys.append((kind[0], alike[kind], i))
            alike[kind] += 1
        best = sorted(keys)[: 2 * stages]
        ranked.append([Estimate((n + stages - 1) * each, groupings[i], rule) for n, _, i in best])
    least = min(of_rule[0].seconds for of_rule in ranked)
    notable = [own for own in ranked if own[0].seconds <= (1 + _NOTABLY_SLOWER) * least]
    return [estimate for of_rule in notable for estimate in of_rule]


def _slots(loads: Sequence[Sequence[float]], distance: int) -> int:
    """Places in the stream, no-ops among them, of turns of so many microbatches, by round and
    group; the turns of a group are `distance` apart."""
    end = 0.0
    last: dict[int, int] = {}
    for turns in loads:
        for group, load in enumerate(turns):
            if load:
                begin = max(end, last[group] + distance) if group in last else end
                end = begin + load
                last[group] = int(np.ceil(end - _NEGLIGIBLE)) - 1
    return int(np.ceil(end - _NEGLIGIBLE))


def _lengths(rounds: Sequence[CutRound]) -> dict[int, list[int]]:
    """By slot, of all samples; tasks without any are left out."""
    lengths: dict[int, list[int]] = {}
    for batches in rounds:
        for slot, batch in batches.items():
            if len(batch.lengths):
                lengths.setdefault(slot, []).extend(batch.lengths)
    if not lengths:
        raise PlanningError("no samples to plan a pipeline for")
    return lengths


def _microbatches(rounds: Sequence[CutRound], shape: ShapeClass) -> dict[int, float]:
    """By slot, how many a global batch fills, the mean over its rounds."""
    chunks: dict[int, list[int]] = {}
    for batches in rounds:
        for slot, batch in batches.items():
            if len(batch.lengths):
                chunks.setdefault(slot, []).append(_chunks(batch))
    return {slot: float(np.mean(own)) / shape.chunks for slot, own in chunks.items()}


def _chunks(batch: CutBatch) -> int:
    return sum(span.chunks for span in batch.spans)


def _head_tail(
    lengths: Mapping[int, Sequence[int]], alone: tuple[HTask, ...], most: int
) -> Iterator[Buckets]:
    place = {slot: i for i, (slot,) in enumerate(alone)}
    for count in range(1, 1 + min(len(lengths), most)):
        groups = pair_head_with_tail(lengths, count)
        yield tuple(tuple(place[slot] for slot in group) for group in groups)


def _every_division(tasks: int, most: int) -> Iterator[Buckets]:
    """Every way to put a few tasks into at most so many buckets."""
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


def _add(found: dict, grouping: Grouping) -> None:
    found.setdefault(frozenset(grouping.groups), grouping)
