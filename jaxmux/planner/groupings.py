"""Which tasks could share microbatches: hTasks (Eq. 6) in buckets (Eq. 7), and head-tail pairs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .adapter_groups import pair_head_with_tail
from .buckets import Buckets, candidate_buckets
from .fusion import HTask, fuse_tasks
from .runs import cut_runs
from .shape_class import ShapeClass
from .time_model import pipeline_latency

# By group, the slots of the tasks that are packed together.
Groups = tuple[tuple[int, ...], ...]


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
    lengths: Mapping[int, Sequence[int]], shape: ShapeClass, stages: Sequence[float]
) -> list[Grouping]:
    """Groupings worth simulating, each division of the tasks once, those of few hTasks first.

    Eq. 6 charges an hTask's first microbatches alone and so tends to fuse all there is; hence the
    tasks by themselves are put into buckets as well. More than 2S buckets fill no pipeline better.

    Args:
      lengths: by slot 0 … M-1, stream lengths of the samples of a typical global batch.
      shape: shape class of the microbatches.
      stages: L⁽ˢ⁾, of one pass of a microbatch, in seconds: the mean of forward and backward.
    """
    chunks = {slot: sum(run.chunks for run in cut_runs(lengths[slot], shape)) for slot in lengths}

    def microbatches(htask: HTask) -> float:
        return sum(chunks[slot] for slot in htask) / shape.chunks

    def latency(htask: HTask) -> float:
        return pipeline_latency(stages, int(np.ceil(microbatches(htask))))

    alone = tuple((slot,) for slot in sorted(lengths, key=lambda slot: (chunks[slot], slot)))
    fused = fuse_tasks([chunks[slot] for slot in sorted(lengths)], latency, len(stages)).htasks
    found: dict[frozenset[tuple[int, ...]], Grouping] = {}
    for htasks in (fused, alone):
        loads = [2 * stages[0] * microbatches(htask) for htask in htasks]
        for buckets in candidate_buckets(loads):
            _add(found, Grouping(htasks, buckets), len(stages))
    for grouping in _head_tail(lengths, alone, len(stages)):
        _add(found, grouping, len(stages))
    return list(found.values())


def _head_tail(
    lengths: Mapping[int, Sequence[int]], alone: tuple[HTask, ...], stages: int
) -> Iterator[Grouping]:
    place = {slot: i for i, (slot,) in enumerate(alone)}
    for count in range(1, 1 + min(len(lengths), 2 * stages)):
        groups = pair_head_with_tail(lengths, count)
        yield Grouping(alone, tuple(tuple(place[slot] for slot in group) for group in groups))


def _add(found: dict, grouping: Grouping, stages: int) -> None:
    if len(grouping.buckets) <= 2 * stages:
        found.setdefault(frozenset(grouping.groups), grouping)
