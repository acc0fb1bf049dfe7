"""Plans rounds and packs them into the microbatches of every replica."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import batched, zip_longest
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmux.data import Sample, fill_microbatch
from jaxmux.data.batches import BatchTerms, Microbatch
from jaxmux.models import SlotTable
from jaxmux.objectives import Objective, Recorded
from jaxmux.objectives.token_losses import TokenRule
from jaxmux.peft import dropout_of, scale_of
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.packing import Members, Placement, ShapeClass, pack_round

from ..tasks.prepared_task import PreparedTask, unit_lengths

# The microbatches of all data shards, on the devices that read them: arrays on one device, or on
# the devices of each stage.
PlacedMicrobatch = Any


@dataclasses.dataclass(frozen=True)
class ReplicaInput:
    """The form in which a replica (a copy of the backbone on its devices) takes microbatches.

    Attributes:
      shape: shape class of its microbatches.
      replica: its devices. Each data shard of a stage trains a microbatch of its own.
      groups: which tasks share microbatches and an update: all of them ("together"), each task by
        itself ("alone"), or groups that the planner chooses so that its pipeline is busy during
        updates ("planned").
      place: copies the microbatches of all data shards to the devices of the replica.
    """

    shape: ShapeClass
    replica: Replica = ONE_DEVICE
    groups: Literal["together", "alone", "planned"] = "together"
    place: Callable[[Sequence[Microbatch]], PlacedMicrobatch] = list

    @functools.cached_property
    def shards(self) -> int:
        return self.replica.shards

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens of the microbatches of all data shards together, with padding."""
        return self.shards * self.shape.tokens


# A function that lays out samples in microbatches. Arguments: the stream lengths of the samples, by
# slot, and the shape class. Result: for each microbatch, the placements of its samples.
Packing = Callable[[Mapping[int, Sequence[int]], ShapeClass], Sequence[Sequence[Placement]]]

# By slot, indices of samples in the task's global batch.
SampleIndices = Mapping[int, Sequence[int]]

# A function that takes the stream lengths of a round's samples, by slot, and returns the samples of
# each replica.
Dispatch = Callable[[Mapping[int, Sequence[int]]], Sequence[SampleIndices]]


class Text(NamedTuple):
    """Where the targets of a sample lie in a microbatch: from `begin` to before `end` in a row of a
    data shard. The positions of virtual tokens come before them. `sample` is the index of the
    sample in the global batch of the task in this slot."""

    slot: int
    sample: int
    shard: int
    row: int
    begin: int
    end: int


class PackedMicrobatch(NamedTuple):
    """The microbatches that the data shards of the replica with this index train at the same time,
    one each. The forward pass reads `arrays`.

    Attributes:
      samples: by slot, indices of the samples in the task's global batch.
      tokens: by slot, the tokens of the task's chunks, padding and left-out samples included.
      trained_tokens: by slot, the tokens of those chunks in which at least one sample is trained.
      read_tokens: by slot, the tokens of `samples` that the model reads, without padding.
      texts: where the samples lie.
      is_placed: whether `arrays` are on the devices. The others wait on the host, because the
        terms of their losses are not known yet; see `with_log_probs`.
    """

    replica: int
    arrays: PlacedMicrobatch
    samples: SampleIndices
    tokens: Mapping[int, int]
    trained_tokens: Mapping[int, int] = MappingProxyType({})
    read_tokens: Mapping[int, int] = MappingProxyType({})
    texts: Sequence[Text] = ()
    is_placed: bool = True


class Due(NamedTuple):
    """An update of some slots in a round. `after` is the index of the microbatch with which their
    global batches are complete; -1 if they are complete before the round."""

    after: int
    slots: tuple[int, ...]


class RoundPlan(NamedTuple):
    """One round (a turn of every live task), ready for an executor.

    Attributes:
      steps: by slot, the index of the task's global batch in the round, from 0.
      ends: the slots whose global batches are complete with the round; the others continue in the
        following round.
      updates: the updates of the slots in `ends`, in the order in which they become due.
      slots: scale, dropout rate and dropout key of every slot.
      dropout: whether the pool has dropout.
      tokens, target_tokens: by slot, number of tokens in the task's global batch, without padding
        and virtual tokens, and number of those that count in the loss. Samples that are not trained
        do not count.
      computed_tokens: by slot, number of tokens of the chunks of the task's turn, with padding.
      samples: by slot, number of samples in the task's global batch.
      recorded: by slot, what the records of the task's global batch say.
      paired: the slots whose pairs are trained in one pass, by `Objective.rule_of_pairs`.
      waiting: the slots whose losses depend on log-probabilities, of the task's present adapter or
        of its reference, that the host must know.
    """

    steps: dict[int, int]
    ends: frozenset[int]
    microbatches: list[PackedMicrobatch]
    updates: tuple[Due, ...]
    slots: SlotTable
    dropout: bool
    optimizers: frozenset[str]
    tokens: dict[int, int]
    target_tokens: dict[int, int]
    computed_tokens: dict[int, int]
    samples: dict[int, int]
    recorded: Mapping[int, Recorded | None]
    paired: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()

    def trained_turns(self, microbatches: Iterable[int]) -> list[int]:
        """Of the slots whose global batches continue in the next round, those whose turns are
        complete with the microbatches of these indices."""
        rest = set(range(len(self.microbatches))) - {*microbatches}
        left = {slot for i in rest for slot in self.microbatches[i].samples}
        return [slot for slot in self.steps if slot not in self.ends and slot not in left]


# For each group, the slots of its tasks.
Groups = Sequence[tuple[int, ...]]

# Number of rounds after a change of the tasks for which no new groups are searched. It exceeds the
# number of rounds that are packed ahead, so that no search is wasted while tasks change often.
_ROUNDS_WITHOUT_SEARCH = 8


class TaskGroups:
    """Divides the tasks of a round into groups, whose microbatches follow each other.

    While one group is updated, the others keep a pipeline busy. Finding the best groups of many
    tasks takes longer than a round. This does not matter for tasks that end as planned, because
    rounds are packed ahead. After any other change of the tasks, the pipeline would run empty
    during the search, so the first rounds keep the previous groups, and each new task joins the
    group with the fewest tokens. Later rounds keep these groups unless the search finds better
    ones. Without such changes, the groups depend only on which tasks are live, so a training run
    that is continued has the same groups.

    Attributes:
      task_by_task: whether every task is a group, which shares no microbatch with others.
    """

    def __init__(self, replicas: Sequence[ReplicaInput]):
        """Chooses no groups yet. Groups will suit the replica with the longest pipeline and its
        samples."""
        self.task_by_task = any(replica.groups == "alone" for replica in replicas)
        planned = [replica for replica in replicas if replica.groups == "planned"]
        self._longest = max(planned, key=lambda one: one.replica.pp, default=None)
        self._devices = sum(replica.replica.devices for replica in replicas)
        # Keys are the slots and names of the live tasks.
        self._known: dict[frozenset[tuple[int, str]], Groups] = {}
        self._last: tuple[frozenset[tuple[int, str]], Groups] = frozenset(), ()
        # The groups kept since the last change of the tasks, and the number of rounds left before a
        # search.
        self._kept: Groups = ()
        self._rounds_left = 0

    def renumbered(
        self, replicas: Sequence[ReplicaInput], numbers: Mapping[int, int]
    ) -> "TaskGroups":
        """Returns groups for microbatches of another size and other slot numbers; `numbers` maps
        the old number of every occupied slot to its new one. After `begin_anew`, the first rounds
        keep the present groups."""
        other, (names, groups) = TaskGroups(replicas), self._last
        kept = [tuple(numbers[slot] for slot in group if slot in numbers) for group in groups]
        other._last = frozenset((numbers[n], name) for n, name in names if n in numbers), kept
        return other

    def begin_anew(self, tasks: Mapping[int, PreparedTask]) -> None:
        """Prepares for rounds of other tasks than those of the last call. Nothing is searched."""
        names, (before, groups) = _names(tasks), self._last
        self._known = {names: self._known[names]} if names in self._known else {}
        stay = {slot for slot, _ in names & before}
        kept = [rest for group in groups if (rest := [slot for slot in group if slot in stay])]
        self._kept, self._rounds_left = (), 0
        if self.task_by_task or names in self._known:
            return
        if len(kept) < 2 or 2 * len(stay) < len(tasks):
            return
        tokens = {slot: sum(task.batch_lengths[0]) for slot, task in tasks.items()}
        for slot in sorted(tasks.keys() - stay):
            min(kept, key=lambda group: sum(tokens[each] for each in group)).append(slot)
        self._kept = [tuple(sorted(group)) for group in kept]
        self._rounds_left = _ROUNDS_WITHOUT_SEARCH

    def __call__(self, tasks: Mapping[int, PreparedTask]) -> Groups:
        names = _names(tasks)
        in_groups = {slot for group in self._kept for slot in group}
        kept = self._kept if in_groups == tasks.keys() else ()
        if kept and self._rounds_left:
            self._rounds_left -= 1
            self._last = names, kept
            return kept
        if names not in self._known:
            by_slot = {slot: tasks[slot] for slot in sorted(tasks)}
            self._known[names] = self._choose(by_slot, kept)
        self._last = names, self._known[names]
        return self._known[names]

    def _choose(self, tasks: Mapping[int, PreparedTask], kept: Groups) -> Groups:
        if self.task_by_task:
            return [(slot,) for slot in tasks]
        if self._longest is None or self._longest.replica.pp == 1 or len(tasks) == 1:
            return [tuple(tasks)]
        from jaxmux.planner.pipeline import grouping_of_share

        replica, slots = self._longest.replica, list(tasks)
        lengths = [task.packed_lengths(self._longest.shape) for task in tasks.values()]
        present = [tuple(slots.index(slot) for slot in group) for group in kept]
        shape = self._longest.shape
        grouping = grouping_of_share(lengths, replica, shape, self._devices, present)
        return [tuple(slots[i] for i in group) for group in grouping.groups]


def _names(tasks: Mapping[int, PreparedTask]) -> frozenset[tuple[int, str]]:
    return frozenset((slot, task.task.name) for slot, task in tasks.items())


def pack_tightly(
    lengths: Mapping[int, Sequence[int]],
    shape: ShapeClass,
    groups: Groups = (),
    members: Members = MappingProxyType({}),
) -> Sequence[Sequence[Placement]]:
    """Packs a round into few microbatches, for which it returns the placements of their samples.
    The engine uses this packing unless its options name another. `lengths` are stream lengths in
    tokens, and `members` the numbers of sequences of the samples of slots, if it is not 1. Groups
    of tasks follow each other and share no more than the microbatch in which one group ends and the
    next begins; without groups, all tasks share microbatches."""
    if len(groups) < 2:
        return pack_round(lengths, shape, members).microbatches()
    from jaxmux.planner.pipeline import pack_in_groups

    return [packed.placements(shape) for packed in pack_in_groups(lengths, groups, shape, members)]


def paired_slots(
    tasks: Mapping[int, PreparedTask], replicas: Sequence[ReplicaInput], packing: Packing | None
) -> frozenset[int]:
    """The slots of tasks that train pairs in one pass: every pair fits into a row of a replica, and
    rows of all replicas may hold two sequences. Other packings than `pack_tightly` do not keep the
    answers of a pair together."""
    if packing:
        return frozenset()
    shapes = [replica.shape for replica in replicas]
    if min(shape.max_sequences for shape in shapes) < 2:
        return frozenset()
    longest = max(shapes, key=lambda shape: shape.row_len)
    return frozenset(slot for slot, task in tasks.items() if task.pairs_fit(longest))


def waiting_slots(tasks: Mapping[int, PreparedTask], paired: Collection[int]) -> frozenset[int]:
    """The slots whose global batches are trained only when the host knows log-probabilities. Those
    in `paired` are trained in one pass."""
    return frozenset(
        slot
        for slot, task in tasks.items()
        if task.task.objective.needs_reference
        or (task.task.objective.needs_log_probs and slot not in paired)
    )


def training_rounds(
    tasks: Mapping[int, PreparedTask],
    steps: Mapping[int, int],
    pool: PoolSpec,
    replicas: Sequence[ReplicaInput],
    packing: Packing | None = None,
    dispatch: Dispatch | None = None,
    accumulated: SampleIndices | None = None,
    most_tokens: int | None = None,
    groups_of: TaskGroups | None = None,
) -> Iterator[RoundPlan]:
    """Yields the remaining rounds, until every task has trained its last step.

    Args:
      steps: by slot, index of the task's next global batch, from 0.
      packing: lays out the samples of a group of tasks; None for `pack_tightly`, by which groups
        may share a microbatch.
      dispatch: divides the samples of a round among the replicas; None if there is only one.
      accumulated: by slot, indices of samples in the first global batches whose gradients are in
        the accumulators already. They are packed with the others of their round, so that the layout
        stays the same; then they are left out.
      most_tokens: most tokens of a task in a round, see `Turns`.
      groups_of: chooses the groups of these replicas; None lets a new `TaskGroups` do so.
    """
    least_tokens = replicas[0].shape.least_tokens
    pairs_fit = paired_slots(tasks, replicas, packing)
    turns_of = Turns(tasks, steps, most_tokens, accumulated, least_tokens, pairs_fit)
    groups_of = groups_of or TaskGroups(replicas)
    done = dict(accumulated or {})
    while turns := turns_of.next():
        live = {slot: tasks[slot] for slot in turns}
        steps = {slot: turn.step for slot, turn in turns.items()}
        ends = frozenset(slot for slot, turn in turns.items() if turn.last)
        batches = {slot: turn.batch for slot, turn in turns.items()}
        trained = {n: live[n].task.objective.trained(batch) for n, batch in batches.items()}
        samples_of = {slot: turn.samples for slot, turn in turns.items()}
        paired = frozenset(slot for slot, turn in turns.items() if turn.paired)
        waiting = waiting_slots(live, paired)
        shares = shares_of_replicas(batches, samples_of, dispatch, paired)
        recorded = {n: recorded_of(task.task.objective, batches[n]) for n, task in live.items()}
        terms = terms_of_batches(live, batches, recorded, paired)
        groups, microbatches, computed = groups_of(live), [], Counter()
        # Groups that share no microbatch are packed by themselves.
        apart = groups_of.task_by_task or packing
        for together in [[group] for group in groups] if apart else [groups]:
            samples = {slot: batches[slot] for group in together for slot in group}
            for packed in fill_microbatches(
                samples, replicas, shares, packing, done, together, terms, paired
            ):
                computed.update(packed.tokens)
                if packed.samples:
                    is_placed = waiting.isdisjoint(packed.samples)
                    place = replicas[packed.replica].place if is_placed else list
                    placed = packed._replace(arrays=place(packed.arrays), is_placed=is_placed)
                    microbatches.append(placed)
        yield RoundPlan(
            steps,
            ends,
            microbatches,
            _updates(groups, ends, microbatches),
            slot_table(live, steps, pool.slots, paired),
            pool.dropout,
            frozenset(task.task.optimizer.kind for task in live.values()),
            {slot: sum(s.read_tokens for s in batch) for slot, batch in trained.items()},
            {slot: sum(s.target_tokens for s in batch) for slot, batch in trained.items()},
            dict(computed),
            {slot: len(batch) for slot, batch in batches.items()},
            recorded,
            paired,
            waiting,
        )
        done = {slot: samples for slot, samples in done.items() if slot not in ends}


def terms_of_batches(
    tasks: Mapping[int, PreparedTask],
    batches: Mapping[int, Sequence[Sample]],
    recorded: Mapping[int, Recorded | None],
    paired: Collection[int] = (),
) -> dict[int, BatchTerms]:
    """By slot, the terms of the losses of global batches (`Objective.terms`), with a reference of
    zeros; only slots that have such terms. `recorded` has the results of `recorded_of`."""
    found = {}
    for slot, batch in batches.items():
        objective = tasks[slot].task.objective
        if slot in paired or not objective.needs_log_probs:
            targets = [sample.target_tokens for sample in batch]
            unknown = [np.zeros(n) for n in targets]
            found[slot] = objective.terms(targets, recorded[slot], unknown)
    return {slot: terms for slot, terms in found.items() if terms is not None}


def recorded_of(objective: Objective, samples: Sequence[Sample]) -> Recorded | None:
    """What the records of samples say, if the objective reads it."""
    if objective.records not in ("labels", "rollouts"):
        return None
    samples = list(samples)
    values = {
        name: [each.values[name][1:][each.target_mask[1:]].astype(np.float64) for each in samples]
        for name in samples[0].values
    }
    numbers = {
        name: np.array([each.numbers[name] for each in samples]) for name in samples[0].numbers
    }
    return Recorded(values, numbers)


# By slot and sample of the global batch, a number for each token that the model reads.
OfTokens = Mapping[int, Sequence[Float[np.ndarray, " read_tokens"]]]


def with_log_probs(
    packed: PackedMicrobatch, weights: OfTokens, references: OfTokens, replica: ReplicaInput
) -> PackedMicrobatch:
    """Puts a microbatch that waits on the host onto the devices of its replica, with the loss
    weights and the references of these slots; other slots keep theirs."""
    arrays = packed.arrays
    for text in packed.texts:
        of_shard = arrays[text.shard]
        for known, of_rows in ((weights, of_shard.loss_weight), (references, of_shard.reference)):
            if text.slot in known:
                of_rows[text.row, text.begin : text.end] = known[text.slot][text.sample]
    return packed._replace(arrays=replica.place(arrays), is_placed=True)


def shares_of_replicas(
    batches: Mapping[int, Sequence[Sample]],
    samples: SampleIndices,
    dispatch: Dispatch | None,
    paired: Collection[int] = (),
) -> Sequence[SampleIndices]:
    """The samples that each replica reads. `samples` has the indices of all samples that are read;
    without `dispatch`, one replica gets them all. The pairs of slots in `paired` stay together."""
    if dispatch is None:
        return [samples]
    units = {slot: _units(indices, slot in paired) for slot, indices in samples.items()}
    lengths = {
        slot: unit_lengths([batches[slot][i] for i in unit] for unit in of_slot)
        for slot, of_slot in units.items()
    }
    return [
        {
            slot: [i for unit in indices for i in units[slot][unit]]
            for slot, indices in share.items()
        }
        for share in dispatch(lengths)
    ]


def _units(samples: Sequence[int], paired: bool) -> list[tuple[int, ...]]:
    """Indices of the samples that are packed together: of two answers, or of one sample."""
    return list(batched(samples, 2 if paired else 1))


def all_samples(batches: Mapping[int, Sequence[Sample]]) -> SampleIndices:
    return {slot: range(len(batch)) for slot, batch in batches.items()}


def _updates(
    groups: Groups, ends: frozenset[int], microbatches: Sequence[PackedMicrobatch]
) -> tuple[Due, ...]:
    """The updates of a round. One program updates all complete slots of a group at the group's end,
    which is cheaper than updating each slot as soon as it is complete."""
    last = {slot: i for i, microbatch in enumerate(microbatches) for slot in microbatch.samples}
    due = []
    for group in groups:
        if complete := tuple(slot for slot in group if slot in ends):
            due.append(Due(max(last.get(slot, -1) for slot in group), complete))
    return tuple(sorted(due, key=lambda update: update.after))


def fill_microbatches(
    batches: Mapping[int, Sequence[Sample]],
    replicas: Sequence[ReplicaInput],
    shares: Sequence[SampleIndices],
    packing: Packing | None = None,
    left_out: SampleIndices | None = None,
    groups: Groups = (),
    terms: Mapping[int, BatchTerms] = MappingProxyType({}),
    paired: Collection[int] = (),
) -> Iterator[PackedMicrobatch]:
    """Packs global batches and yields their microbatches, replica after replica. `arrays` is a list
    with one `Microbatch` of NumPy arrays for each data shard. Every sample occurs once.

    A replica's samples, its share, go to its data shards in turn. With one replica, the sum of a
    task's gradients on a shard therefore does not depend on the other tasks. Samples in `left_out`
    are packed like the others but left out of the arrays. `packing` and `groups` are as for
    `training_rounds` and `pack_tightly`, `terms` and `paired` as for `fill_microbatch`.
    """
    absent = {(slot, sample) for slot, samples in (left_out or {}).items() for sample in samples}
    for i, (replica, share) in enumerate(zip(replicas, shares, strict=True)):
        shape = replica.shape
        packed = _pack_shards(batches, replica, share, packing, groups, paired)
        # A shard that has fewer microbatches than another one gets empty ones.
        for of_shards in zip_longest(*packed, fillvalue=()):
            kept = [
                [p for p in placements if (p.slot, p.sample) not in absent]
                for placements in of_shards
            ]
            samples: dict[int, list[int]] = {}
            read: Counter[int] = Counter()
            texts = []
            for shard, placements in enumerate(kept):
                for p in placements:
                    sample = batches[p.slot][p.sample]
                    samples.setdefault(p.slot, []).append(p.sample)
                    read[p.slot] += sample.read_tokens
                    begin, end = p.offset + sample.virtual_tokens, p.offset + sample.stream_length
                    texts.append(Text(p.slot, p.sample, shard, p.row, begin, end))
            arrays = [_filled(shape, placements, batches, terms, paired) for placements in kept]
            tokens = _tokens(of_shards, batches, shape)
            trained = _tokens(kept, batches, shape) if absent else tokens
            yield PackedMicrobatch(i, arrays, samples, tokens, trained, dict(read), texts)


def _tokens(
    of_shards: Iterable[Sequence[Placement]],
    batches: Mapping[int, Sequence[Sample]],
    shape: ShapeClass,
) -> dict[int, int]:
    chunks = {
        (shard, p.slot, chunk)
        for shard, placements in enumerate(of_shards)
        for p in placements
        for chunk in _chunks(p, batches[p.slot][p.sample].stream_length, shape)
    }
    counts = Counter(slot for _, slot, _ in chunks)
    return {slot: n * shape.chunk_len for slot, n in counts.items()}


def _chunks(placement: Placement, length: int, shape: ShapeClass) -> range:
    begin = placement.row * shape.row_len + placement.offset
    return range(begin // shape.chunk_len, -(-(begin + length) // shape.chunk_len))


def _pack_shards(
    batches: Mapping[int, Sequence[Sample]],
    replica: ReplicaInput,
    share: SampleIndices,
    packing: Packing | None,
    groups: Groups,
    paired: Collection[int],
) -> Iterator[list[list[Placement]]]:
    shards, members = replica.replica.shards, dict.fromkeys(paired, 2)
    packing = packing or partial(pack_tightly, groups=groups, members=members)
    for shard in range(shards):
        units = {
            slot: _units(share.get(slot, ()), slot in paired)[shard::shards] for slot in batches
        }
        lengths = {
            slot: unit_lengths([batches[slot][i] for i in unit] for unit in of_slot)
            for slot, of_slot in units.items()
            if of_slot
        }
        yield [
            [placed for p in placements for placed in _one_by_one(p, units, batches)]
            for placements in packing(lengths, replica.shape)
        ]


def _one_by_one(
    placement: Placement,
    units: Mapping[int, Sequence[Sequence[int]]],
    batches: Mapping[int, Sequence[Sample]],
) -> Iterator[Placement]:
    """The placements of the samples of a unit, which follow each other."""
    slot, offset = placement.slot, placement.offset
    for sample in units[slot][placement.sample]:
        yield placement._replace(sample=sample, offset=offset)
        offset += batches[slot][sample].stream_length


def _filled(
    shape: ShapeClass,
    placements: Sequence[Placement] = (),
    batches: Mapping[int, Sequence[Sample]] = MappingProxyType({}),
    terms: Mapping[int, BatchTerms] = MappingProxyType({}),
    paired: Collection[int] = (),
) -> Microbatch:
    return fill_microbatch(
        placements,
        batches,
        terms,
        rows=shape.rows,
        row_len=shape.row_len,
        chunk_len=shape.chunk_len,
        max_pairs=shape.max_sequences // 2,
        paired=paired,
    )


def empty_microbatch(shape: ShapeClass) -> Microbatch:
    return _filled(shape)


def slot_table(
    tasks: Mapping[int, PreparedTask],
    steps: Mapping[int, int] | None,
    slots: int,
    paired: Collection[int] = (),
) -> SlotTable:
    """Scales, dropout rates, dropout keys and token losses of all slots; zeros, and the cross
    entropy, in slots without a task. Slots in `paired` have the losses of pairs. A dropout key
    depends on the index of the global batch in `steps`; without `steps`, dropout is off."""
    scale, rate = np.zeros(slots, np.float32), np.zeros(slots, np.float32)
    key = np.zeros(slots, np.uint32)
    for slot, prepared in tasks.items():
        scale[slot] = scale_of(prepared.task.adapter)
        if steps is not None:
            rate[slot] = dropout_of(prepared.task.adapter)
            key[slot] = prepared.dropout_key(steps[slot])
    objectives = {slot: prepared.task.objective for slot, prepared in tasks.items()}
    rules = {
        slot: objective.rule_of_pairs if slot in paired else objective.rule
        for slot, objective in objectives.items()
    }
    return SlotTable(scale, rate, key, TokenRule.table(rules, slots))


class Turn(NamedTuple):
    """The samples of a global batch that are trained in a round.

    Attributes:
      step: index of the task's global batch, from 0.
      samples: indices of the samples of `batch` that are trained, ascending.
      last: whether the global batch is complete with them.
      paired: whether pairs are trained in one pass, so that both answers are in the same turn.
    """

    step: int
    batch: Sequence[Sample]
    samples: range
    last: bool
    paired: bool = False


class Turns:
    """Divides the global batches of tasks among rounds.

    A task whose global batch has more than a given number of tokens trains it in several turns, one
    in each round, and is updated after the last one. The other tasks need not wait for it, because
    they are updated in every round. The division of a batch depends only on its samples and that
    number.
    """

    def __init__(
        self,
        tasks: Mapping[int, PreparedTask],
        steps: Mapping[int, int],
        most_tokens: int | None = None,
        accumulated: Mapping[int, Sequence[int]] | None = None,
        least_tokens: int = 1,
        paired: Collection[int] = (),
    ):
        """Begins before the first round. `steps` has, by slot, the index of the task's next global
        batch.

        Args:
          most_tokens: most tokens of a turn, without padding; a longer sample is a turn of its own.
            None lets every turn be a global batch.
          accumulated: by slot, indices of samples of the next global batch that have been trained.
            Turns that consist of such samples are left out.
          least_tokens: number of tokens that a shorter sample counts, see
            `ShapeClass.least_tokens`.
          paired: slots of tasks that train pairs in one pass. A global batch of which a single
            answer has been trained, by an earlier version, is completed without pairs.
        """
        self._tasks = tasks
        self._steps = dict(steps)
        self._paired = paired
        self._broken = {
            slot: steps[slot]
            for slot, samples in (accumulated or {}).items()
            if slot in paired and any(i ^ 1 not in samples for i in samples)
        }
        self._most_tokens, self._least_tokens = most_tokens, least_tokens
        # By slot, the remaining turns of the current global batch.
        self._left = {
            slot: _not_over(self._divide(slot), accumulated.get(slot, ()) if accumulated else ())
            for slot in steps
            if self._is_live(slot)
        }

    def next(self) -> dict[int, Turn]:
        """By slot, the turns of the next round; empty if every task has trained its last step."""
        turns = {}
        for slot in self._tasks:
            if not self._is_live(slot):
                continue
            left = self._left.get(slot) or self._divide(slot)
            turns[slot], self._left[slot] = left[0], left[1:]
            self._steps[slot] += turns[slot].last
        return turns

    def _is_live(self, slot: int) -> bool:
        return self._steps[slot] < self._tasks[slot].steps

    def _divide(self, slot: int) -> list[Turn]:
        step = self._steps[slot]
        batch, objective = self._tasks[slot].batches[step], self._tasks[slot].task.objective
        trained = objective.trained(range(len(batch)))
        paired = slot in self._paired and self._broken.get(slot) != step
        units, members = _units(trained, paired), 2 if paired else 1
        least = members * self._least_tokens
        lengths = unit_lengths([batch[i] for i in unit] for unit in units)
        counted = [max(length, least) for length in lengths]
        return [
            Turn(
                step,
                batch,
                trained[members * part.start : members * part.stop],
                part.stop == len(units),
                paired,
            )
            for part in divide(counted, self._most_tokens)
        ]


def divide(lengths: Sequence[int], most_tokens: int | None) -> list[range]:
    """Divides a global batch into turns, each with the indices of its samples. `lengths` are the
    numbers of tokens that the samples count. A sample with more than `most_tokens` is a turn of its
    own; None gives one turn."""
    turns, begin = [], 0
    while begin < len(lengths):
        turns.append(turn_from(begin, lengths, most_tokens))
        begin = turns[-1].stop
    return turns


def turn_from(begin: int, lengths: Sequence[int], most_tokens: int | None) -> range:
    """The turn of `divide` that begins with the sample of index `begin`."""
    if most_tokens is None:
        return range(begin, len(lengths))
    tokens, end = int(lengths[begin]), begin + 1
    while end < len(lengths) and tokens + int(lengths[end]) <= most_tokens:
        tokens += int(lengths[end])
        end += 1
    return range(begin, end)


def _not_over(turns: list[Turn], accumulated: Sequence[int]) -> list[Turn]:
    """The turns of a global batch without leading turns that have been trained completely. The last
    turn stays, because the update follows it."""
    trained = set(accumulated)
    over = 0
    while over < len(turns) - 1 and trained.issuperset(turns[over].samples):
        over += 1
    return turns[over:]
