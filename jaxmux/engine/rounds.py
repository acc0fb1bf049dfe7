"""Rounds: one global batch of every live task, packed while the device trains earlier rounds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np

from jaxmux.data import Sample, fill_microbatch
from jaxmux.data.microbatch import Microbatch
from jaxmux.models import SlotTable
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.packing import Placement, ShapeClass, pack_round

from .prepared_task import PreparedTask

# A function from the stream lengths of a round's samples, by slot, and the shape class to the
# placements of the samples in each microbatch.
Packing = Callable[[Mapping[int, Sequence[int]], ShapeClass], Sequence[Sequence[Placement]]]

# By slot, indices of samples in the task's global batch.
SampleIndices = Mapping[int, Sequence[int]]

# A function from the stream lengths of a round's samples, by slot, to the samples of each replica.
Dispatch = Callable[[Mapping[int, Sequence[int]]], Sequence[SampleIndices]]

# The microbatches of all data shards where an executor reads them: arrays on one device, or on the
# devices of each stage.
PlacedMicrobatch = Any


class ReplicaInput(NamedTuple):
    """What a replica (a copy of the backbone on its devices) trains at a time.

    Attributes:
      shape: shape class of its microbatches.
      replica: its devices. Each data shard of a stage trains a microbatch of its own.
      streams: whether rounds follow each other in its pipeline without a gap.
      task_by_task: whether every task has microbatches and an update of its own.
      place: copies the microbatches of all data shards to where the replica reads them.
    """

    shape: ShapeClass
    replica: Replica = ONE_DEVICE
    streams: bool = False
    task_by_task: bool = False
    place: Callable[[Sequence[Microbatch]], PlacedMicrobatch] = list

    @property
    def tokens(self) -> int:
        """Tokens of the microbatches of all data shards together, with padding."""
        return self.replica.shards * self.shape.tokens


class PackedMicrobatch(NamedTuple):
    """What the data shards of a replica train at the same time: one microbatch each.

    Attributes:
      replica: index of the replica.
      arrays: the arrays that the forward pass reads.
      samples: by slot, indices of the samples in the task's global batch.
    """

    replica: int
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
    replicas: Sequence[ReplicaInput],
    packing: Packing = pack_tightly,
    dispatch: Dispatch | None = None,
    accumulated: SampleIndices | None = None,
) -> Iterator[RoundPlan]:
    """Yields the remaining rounds, until every task has trained its last step.

    Args:
      tasks: by slot, the live tasks.
      steps: by slot, index of the task's next global batch, from 0.
      pool: sizes of the pool.
      replicas: the replicas. If one of them is a pipeline in which rounds follow each other, the
        tasks of a round may form two groups with microbatches and updates of their own, see
        `update_groups`.
      packing: lays out the samples of a round.
      dispatch: divides the samples of a round among the replicas; None if there is only one.
      accumulated: by slot, indices of samples in the first round whose gradients are in the
        accumulators already. The whole round is packed, so that the other samples keep their
        places; then these samples are left out.
    """
    steps, done = dict(steps), accumulated or {}
    while live := {slot: t for slot, t in tasks.items() if steps[slot] < t.steps}:
        batches = {slot: t.batches[steps[slot]] for slot, t in live.items()}
        shares = shares_of_replicas(batches, dispatch)
        microbatches, updates = [], []
        for group in update_groups(batches, replicas, shares, packing):
            own = _of(group, batches)
            microbatches += [
                microbatch._replace(arrays=replicas[microbatch.replica].place(microbatch.arrays))
                for microbatch in fill_microbatches(own, replicas, shares, packing, done)
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


def shares_of_replicas(
    batches: Mapping[int, Sequence[Sample]], dispatch: Dispatch | None
) -> Sequence[SampleIndices]:
    """The samples that each replica trains.

    Args:
      batches: by slot, the samples of the task's global batch.
      dispatch: divides the samples; None gives all of them to one replica.
    """
    if dispatch is None:
        return [{slot: range(len(batch)) for slot, batch in batches.items()}]
    return dispatch({slot: [s.stream_length for s in batch] for slot, batch in batches.items()})


def update_groups(
    batches: Mapping[int, Sequence[Sample]],
    replicas: Sequence[ReplicaInput],
    shares: Sequence[SampleIndices],
    packing: Packing = pack_tightly,
) -> list[tuple[int, ...]]:
    """Divides the tasks of a round into groups that do not share microbatches.

    While the first group is updated, the second one keeps a pipeline busy. For that it needs at
    least S - 1 microbatches, with S stages (the bubble lemma, LoRAFusion 5.2). The groups are two,
    unless the microbatches that are partly empty for it take more time than they save. A replica
    that trains task by task makes every task a group.

    Args:
      batches: by slot, the samples of the task's global batch.
      replicas: the replicas; those whose rounds do not follow each other gain nothing.
      shares: the samples of each replica.
      packing: lays out the samples.

    Returns:
      The slots of each group.
    """
    together = tuple(batches)
    if any(replica.task_by_task for replica in replicas):
        return [(slot,) for slot in together]
    if not any(replica.streams for replica in replicas) or len(together) == 1:
        return [together]
    tokens = [sum(s.stream_length for s in batches[slot]) for slot in together]
    cuts = range(1, len(together))
    cut = min(cuts, key=lambda cut: abs(2 * sum(tokens[:cut]) - sum(tokens)))
    groups = [together[:cut], together[cut:]]
    # The time of each replica with two groups and with one, as tokens of a device.
    apart, joint = [], []
    for replica, share in zip(replicas, shares, strict=True):
        ramp = replica.replica.pp - 1 if replica.streams else 0
        time = replica.tokens * replica.replica.pp / replica.replica.devices
        counts = [
            max(len(own) for own in _pack_shards(_of(group, batches), replica, share, packing))
            for group in (*groups, together)
        ]
        # With two groups the pipeline waits at the border of a round only for a short group.
        waits = sum(max(0, ramp - count) for count in counts[:2])
        apart.append(time * (sum(counts[:2]) + waits))
        joint.append(time * (counts[2] + ramp))
    return groups if max(apart) < max(joint) else [together]


def fill_microbatches(
    batches: Mapping[int, Sequence[Sample]],
    replicas: Sequence[ReplicaInput],
    shares: Sequence[SampleIndices],
    packing: Packing = pack_tightly,
    left_out: SampleIndices | None = None,
) -> Iterator[PackedMicrobatch]:
    """Packs global batches and yields their microbatches, those of one replica after those of
    another: in `arrays`, a list with one `Microbatch` of NumPy arrays for each data shard. Every
    sample occurs once.

    A replica's samples go to its data shards in turn. With one replica, what a shard sums up for a
    task therefore does not depend on the other tasks.

    Args:
      batches: by slot, the samples of the task's global batch.
      replicas: the replicas.
      shares: the samples of each replica.
      packing: lays out the samples.
      left_out: by slot, indices of samples that are packed like the others but left out of the
        arrays. A microbatch that holds only such samples is skipped.
    """
    absent = {(slot, sample) for slot, samples in (left_out or {}).items() for sample in samples}
    for i, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
        shape = replica.shape
        sizes = {"rows": shape.rows, "row_len": shape.row_len, "chunk_len": shape.chunk_len}
        packed = [
            [
                kept
                for own in shard
                if (kept := [p for p in own if (p.slot, p.sample) not in absent])
            ]
            for shard in _pack_shards(batches, replica, share, packing)
        ]
        # A shard that has fewer microbatches than another one gets empty ones.
        for of_shards in zip_longest(*packed, fillvalue=()):
            samples: dict[int, list[int]] = {}
            for placement in chain.from_iterable(of_shards):
                samples.setdefault(placement.slot, []).append(placement.sample)
            arrays = [fill_microbatch(placements, batches, **sizes) for placements in of_shards]
            yield PackedMicrobatch(i, arrays, samples)


def _pack_shards(
    batches: Mapping[int, Sequence[Sample]],
    replica: ReplicaInput,
    share: SampleIndices,
    packing: Packing,
) -> Iterator[list[list[Placement]]]:
    """For each data shard of a replica, the placements of its samples in each microbatch."""
    shards = replica.replica.shards
    for shard in range(shards):
        own = {slot: share.get(slot, ())[shard::shards] for slot in batches}
        lengths = {
            slot: [batches[slot][i].stream_length for i in samples]
            for slot, samples in own.items()
            if samples
        }
        yield [
            [p._replace(sample=own[p.slot][p.sample]) for p in placements]
            for placements in packing(lengths, replica.shape)
        ]


def _of(slots: Sequence[int], batches: Mapping[int, Sequence[Sample]]) -> dict[int, Any]:
    return {slot: batches[slot] for slot in slots}


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
