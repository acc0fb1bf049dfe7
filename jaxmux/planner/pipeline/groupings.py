"""Ways to group tasks for a pipeline: hTasks (MuxTune Eq. 6) in buckets (Eq. 7), and others."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PlanningError
from ..packing.microbatches import CutBatch
from ..packing.shape_class import ShapeClass
from .adapter_groups import pair_head_with_tail
from .buckets import Buckets, candidate_buckets
from .fusion import HTask, fusions, pipeline_latency

# For each group, the slots of its tasks, in the order of the groups' turns. The tasks of a group
# share microbatches.
Groups = tuple[tuple[int, ...], ...]
# By slot, the task's global batch of a round, cut into spans.
CutRound = Mapping[int, CutBatch]

# Up to this many tasks, every division into groups is a candidate: 52 divisions of 5 tasks.
_EVERY_DIVISION = 5
# Partitions into more hTasks than this are left out: grouped into buckets they come out like tasks
# that are each an hTask.
_MOST_HTASKS = 12


class Grouping(NamedTuple):
    """Tasks fused into hTasks, and hTasks grouped into buckets.

    The tasks of an hTask and the hTasks of a bucket share microbatches.

    Attributes:
      htasks: for each hTask, the slots of its tasks.
      buckets: for each bucket, the indices of its hTasks.
    """

    htasks: tuple[HTask, ...]
    buckets: Buckets

    @property
    def groups(self) -> Groups:
        """For each bucket, the slots of its tasks, ascending."""
        members = ([slot for i in bucket for slot in self.htasks[i]] for bucket in self.buckets)
        return tuple(tuple(sorted(slots)) for slots in members)


def candidate_groupings(
    rounds: Sequence[CutRound], shape: ShapeClass, stages: Sequence[float]
) -> list[Grouping]:
    """Returns groupings of which one may be the best, each division of the tasks once.

    Eq. 6 charges an hTask only its first microbatches and so tends to fuse all tasks into one.
    Therefore the best partition into every number of hTasks is grouped into buckets, and so are
    the tasks each as an hTask. Further candidates are head-tail pairs (LoRAFusion 5.2) and, for few
    tasks, all divisions. More than 2S buckets are left out, because 2S fill the pipeline already.

    Args:
      rounds: global batches of every task. Each task counts with its mean over the rounds in which
        it has samples.
      shape: shape class of the microbatches.
      stages: L⁽ˢ⁾, seconds of one pass of a microbatch on each of S stages: the mean of its forward
        and its backward pass.

    Raises:
      PlanningError: there are no samples.
    """
    most = 2 * len(stages)
    batches = _batches(rounds)
    lengths = {slot: [n for batch in own for n in batch.lengths] for slot, own in batches.items()}
    # By slot, how many microbatches a global batch fills, the mean over the task's rounds.
    microbatches = {
        slot: float(np.mean([chunks_of(batch) for batch in own])) / shape.chunks
        for slot, own in batches.items()
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
        own = [sum(microbatches[slot] for slot in htask) for htask in htasks]
        candidates += [Grouping(htasks, buckets) for buckets in candidate_buckets(own, most)]
    candidates += [Grouping(alone, buckets) for buckets in _every_division(len(alone), most)]
    found: dict[frozenset[tuple[int, ...]], Grouping] = {}
    for grouping in candidates:
        found.setdefault(frozenset(grouping.groups), grouping)
    return list(found.values())


def chunks_of(batch: CutBatch) -> int:
    """Number of chunks that a global batch takes."""
    return sum(span.chunks for span in batch.spans)


def _batches(rounds: Sequence[CutRound]) -> dict[int, list[CutBatch]]:
    """By slot, all its global batches that have samples; tasks without samples are left out."""
    found: dict[int, list[CutBatch]] = {}
    for batches in rounds:
        for slot, batch in batches.items():
            if len(batch.lengths):
                found.setdefault(slot, []).append(batch)
    if not found:
        raise PlanningError("no samples to plan a pipeline for")
    return found


def _head_tail(
    lengths: Mapping[int, Sequence[int]], alone: tuple[HTask, ...], most: int
) -> Iterator[Buckets]:
    """Buckets of head-tail pairs, for every number of buckets up to `most`."""
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
