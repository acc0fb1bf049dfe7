"""Rounds: one global batch of every live task, packed while the device trains earlier rounds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from jaxmux.data import Sample, fill_microbatch
from jaxmux.data.microbatch import Microbatch
from jaxmux.models import SlotTable
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing import Placement, ShapeClass, pack_round

from .prepared_task import PreparedTask

# A function from the stream lengths of a round's samples, by slot, and the shape class to the
# placements of the samples in each microbatch.
Packing = Callable[[Mapping[int, Sequence[int]], ShapeClass], Sequence[Sequence[Placement]]]


# By slot, indices of samples in the task's global batch.
SampleIndices = Mapping[int, Sequence[int]]


# The microbatches of all data shards where an executor reads them: arrays on one device, or on the
# devices of each stage.
PlacedMicrobatch = Any


class PackedMicrobatch(NamedTuple):
    """What the data shards of an executor train at the same time: one microbatch each.

    Attributes:
      arrays: the arrays that the forward pass reads.
      samples: by slot, indices of the samples in the task's global batch.
    """

    arrays: PlacedMicrobatch
    samples: SampleIndices


class Due(NamedTuple):
    """An update in a round.

    Attributes:
      after: index of the microbatch with which the global batches of the slots are complete; -1 if
        they are complete before the round.
      slots: the slots that are updated.
    """

    after: int
    slots: tuple[int, ...]


class RoundPlan(NamedTuple):
    """One round (a global batch of every live task), ready for an executor.

    Attributes:
      steps: by slot, the index of the task's global batch in the round, from 0.
      microbatches: the microbatches, where the executor reads them.
      updates: the updates of all slots, in the order in which they become due.
      slots: scale, dropout rate and dropout key of every slot.
      dropout: whether the pool has dropout.
      tokens: by slot, number of tokens in the task's global batch, without padding.
      target_tokens: by slot, number of tokens in the task's global batch that count in the loss.
    """

    steps: dict[int, int]
    microbatches: list[PackedMicrobatch]
    updates: tuple[Due, ...]
    slots: SlotTable
    dropout: bool
    tokens: dict[int, int]
    target_tokens: dict[int, int]


def pack_tightly(
    lengths: Mapping[int, Sequence[int]], shape: ShapeClass
) -> Sequence[Sequence[Placement]]:
    """Packs a round into few microbatches. The engine uses this packing unless its options name
    another.

    Args:
      lengths: by slot, the stream lengths in tokens of the samples in the task's global batch.
      shape: shape class of the microbatches.

    Returns:
      For each microbatch, the placements of its samples.
    """
    return pack_round(lengths, shape).microbatches()


def training_rounds(
    tasks: Mapping[int, PreparedTask],
    steps: Mapping[int, int],
    pool: PoolSpec,
    shape: ShapeClass,
    packing: Packing = pack_tightly,
    accumulated: SampleIndices | None = None,
    shards: int = 1,
    stages: int = 1,
    place: Callable[[Sequence[Microbatch]], PlacedMicrobatch] = list,
) -> Iterator[RoundPlan]:
    """Yields the remaining rounds, until every task has trained its last step.

    Args:
      tasks: by slot, the live tasks.
      steps: by slot, index of the task's next global batch, from 0.
      pool: sizes of the pool.
      shape: shape class of the microbatches.
      packing: lays out the samples of a round.
      accumulated: by slot, indices of samples in the first round whose gradients are in the
        accumulators already. The whole round is packed, so that the other samples keep their
        places; then these samples are left out.
      shards: number of data shards of the executor.
      stages: number of pipeline stages of the executor. With several, the tasks of a round form two
        groups with microbatches and updates of their own, if that costs less time than a pipeline
        that is empty while all tasks are updated.
      place: copies the microbatches of all data shards to where the executor reads them.
    """
    steps, done = dict(steps), accumulated or {}
    while live := {slot: t for slot, t in tasks.items() if steps[slot] < t.steps}:
        batches = {slot: t.batches[steps[slot]] for slot, t in live.items()}
        microbatches, updates = [], []
        for group in update_groups(batches, shape, packing, shards, stages):
            own = {slot: batches[slot] for slot in group}
            microbatches += [
                microbatch._replace(arrays=place(microbatch.arrays))
                for microbatch in fill_microbatches(own, shape, packing, done, shards)
            ]
            # One program updates all slots of the group, so it is cheapest at the group's end.
            updates.append(Due(len(microbatches) - 1, group))
        yield RoundPlan(
            {slot: steps[slot] for slot in live},
            microbatches,
            tuple(updates),
            slot_table(live, steps, pool.slots),
            pool.dropout,
            {slot: sum(s.stream_length for s in batch) for slot, batch in batches.items()},
            {slot: sum(s.target_tokens for s in batch) for slot, batch in batches.items()},
        )
        done = {}
        for slot in live:
            steps[slot] += 1


def update_groups(
    batches: Mapping[int, Sequence[Sample]],
    shape: ShapeClass,
    packing: Packing = pack_tightly,
    shards: int = 1,
    stages: int = 1,
) -> list[tuple[int, ...]]:
    """Divides the tasks of a round into groups that do not share microbatches.

    While the first group is updated, the second one keeps a pipeline busy. For that it needs at
    least S - 1 microbatches, with S stages (the bubble lemma, LoRAFusion 5.2). The groups are two,
    unless the microbatches that are partly empty for it take more time than they save.

    Args:
      batches: by slot, the samples of the task's global batch.
      shape: shape class of the microbatches.
      packing: lays out the samples.
      shards: number of data shards.
      stages: number of pipeline stages S.

    Returns:
      The slots of each group.
    """
    together = tuple(batches)
    if stages == 1 or len(together) == 1:
        return [together]

    def microbatches(slots: Sequence[int]) -> int:
        own = {slot: batches[slot] for slot in slots}
        return max(len(_pack_shard(own, shape, packing, i, shards)) for i in range(shards))

    tokens = [sum(s.stream_length for s in batches[slot]) for slot in together]
    cuts = range(1, len(together))
    cut = min(cuts, key=lambda cut: abs(2 * sum(tokens[:cut]) - sum(tokens)))
    groups = [together[:cut], together[cut:]]
    counts = [microbatches(group) for group in groups]
    # Microbatches of time in which the pipeline waits at the border of a round.
    waits = sum(max(0, stages - 1 - count) for count in counts)
    return groups if sum(counts) + waits < microbatches(together) + stages - 1 else [together]


def fill_microbatches(
    batches: Mapping[int, Sequence[Sample]],
    shape: ShapeClass,
    packing: Packing = pack_tightly,
    left_out: SampleIndices | None = None,
    shards: int = 1,
) -> Iterator[PackedMicrobatch]:
    """Packs global batches and yields their microbatches: in `arrays`, a list with one `Microbatch`
    of NumPy arrays for each data shard. Every sample occurs once.

    Sample i of a global batch belongs to data shard i mod `shards`, so that what a shard sums up
    for a task does not depend on the other tasks.

    Args:
      batches: by slot, the samples of the task's global batch.
      shape: shape class of the microbatches.
      packing: lays out the samples.
      left_out: by slot, indices of samples that are packed like the others but left out of the
        arrays. A microbatch that holds only such samples is skipped.
      shards: number of data shards.
    """
    absent = {(slot, sample) for slot, samples in (left_out or {}).items() for sample in samples}

    def of_shard(shard: int) -> Iterator[list[Placement]]:
        for placements in _pack_shard(batches, shape, packing, shard, shards):
            indexed = (p._replace(sample=p.sample * shards + shard) for p in placements)
            if kept := [p for p in indexed if (p.slot, p.sample) not in absent]:
                yield kept

    # A shard that has fewer microbatches than another one gets empty ones.
    for of_shards in zip_longest(*map(of_shard, range(shards)), fillvalue=()):
        samples: dict[int, list[int]] = {}
        for placement in chain.from_iterable(of_shards):
            samples.setdefault(placement.slot, []).append(placement.sample)
        sizes = {"rows": shape.rows, "row_len": shape.row_len, "chunk_len": shape.chunk_len}
        arrays = [fill_microbatch(placements, batches, **sizes) for placements in of_shards]
        yield PackedMicrobatch(arrays, samples)


def _pack_shard(
    batches: Mapping[int, Sequence[Sample]],
    shape: ShapeClass,
    packing: Packing,
    shard: int,
    shards: int,
) -> Sequence[Sequence[Placement]]:
    """The placements of a data shard's samples, which are numbered within the shard."""
    own = {slot: batch[shard::shards] for slot, batch in batches.items()}
    lengths = {slot: [s.stream_length for s in batch] for slot, batch in own.items() if batch}
    return packing(lengths, shape)


def empty_microbatch(shape: ShapeClass) -> Microbatch:
    """The arrays of a microbatch without samples, to compile programs for its shapes.

    Args:
      shape: shape class of the microbatch.
    """
    return fill_microbatch(
        (), {}, rows=shape.rows, row_len=shape.row_len, chunk_len=shape.chunk_len
    )


def slot_table(
    tasks: Mapping[int, PreparedTask], steps: Mapping[int, int] | None, slots: int
) -> SlotTable:
    """Scales, dropout rates and dropout keys of all slots; zeros in slots without a task.

    Args:
      tasks: by slot, the tasks.
      steps: by slot, index of the global batch that is trained, on which the dropout key depends;
        None turns dropout off.
      slots: number of slots T.
    """
    scale, rate = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
    key = np.zeros(slots, np.uint32)
    for slot, prepared in tasks.items():
        scale[slot] = prepared.task.adapter.scale
        if steps is not None:
            rate[slot] = prepared.task.adapter.dropout
            key[slot] = prepared.dropout_key(steps[slot])
    return SlotTable(scale, rate, key)
