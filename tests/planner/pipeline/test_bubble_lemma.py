"""Streams of many global batches keep their order and the bubble lemma."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from research.first_fit import pack_greedily

from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.packing.microbatches import pack_rounds
from jaxmux.planner.pipeline.groupings import pair_head_with_tail, take_turns
from jaxmux.planner.pipeline.pipeline_plan import (
    PlannedMicrobatch,
    insert_noops,
    merge_turns,
    schedule_turns,
)

SHAPE = ShapeClass(rows=4, row_len=256, chunk_len=64, max_sequences=16)


class LemmaViolation(NamedTuple):
    """A microbatch that begins a task's next global batch too early.

    Attributes:
      slot: slot of the task.
      turn: turn of the global batch that begins too early.
      microbatch: index of the microbatch.
      distance: microbatches since the last one with samples of the task's current global batch.
    """

    slot: int
    turn: int
    microbatch: int
    distance: int


def lemma_violations(schedule: Sequence[PlannedMicrobatch], stages: int) -> list[LemmaViolation]:
    """Returns every place where the lemma or the order of a task's global batches is broken."""
    ends: dict[int, tuple[int, int]] = {}
    violations = []
    for index, microbatch in enumerate(schedule):
        for row in microbatch.rows:
            for turn, slot, _ in row:
                current, last = ends.get(slot, (turn, index))
                backwards = turn < current
                if backwards or (turn > current and index - last < stages):
                    violations.append(LemmaViolation(slot, turn, index, index - last))
                ends[slot] = (turn, index)
    return violations


def random_turns(seed: int, groups: int) -> list[dict[int, list[int]]]:
    """The turns of five rounds of up to six tasks, of which some end before the others."""
    rng = np.random.default_rng(seed)
    tasks = int(rng.integers(max(2, groups), 7))
    ends = rng.integers(2, 6, tasks)
    longest = rng.choice([40, 120, 256], tasks)
    rounds = [
        {
            slot: rng.integers(1, longest[slot] + 1, 12).tolist()
            for slot in range(tasks)
            if number < ends[slot]
        }
        for number in range(5)
    ]
    return take_turns(rounds, pair_head_with_tail(rounds[0], groups))


@pytest.fixture(
    scope="module",
    params=[(s, g, seed) for s in (1, 2, 4, 8) for g in (1, 2) for seed in range(5)],
)
def scheduled(request):
    """Number of stages, lengths of the turns, packed turns, and their microbatches."""
    stages, groups, seed = request.param
    turns = random_turns(seed, groups)
    packed = pack_rounds(turns, SHAPE)
    return stages, turns, packed, schedule_turns(packed, stages)


def test_every_sample_of_every_turn_comes_once(scheduled):
    _, turns, _, microbatches = scheduled
    found = sorted(
        (microbatch.turns()[p.slot], p.slot, p.sample)
        for microbatch in microbatches
        for p in microbatch.placements(SHAPE)
    )
    assert found == sorted(
        (index, slot, sample)
        for index, lengths in enumerate(turns)
        for slot, sizes in lengths.items()
        for sample in range(len(sizes))
    )


def test_lemma_and_order_of_global_batches_hold(scheduled):
    """They are checked both here, directly, and by `lemma_violations`."""
    stages, _, _, microbatches = scheduled
    where = defaultdict(set)
    for index, microbatch in enumerate(microbatches):
        for row in microbatch.rows:
            for placed in row:
                where[placed.slot, placed.turn].add(index)
    for (slot, turn), indices in where.items():
        later = [min(other) for (s, t), other in where.items() if s == slot and t > turn]
        assert all(first - max(indices) >= stages for first in later)
    assert lemma_violations(microbatches, stages) == []


def test_rows_are_not_overfull_and_no_tokens_overlap(scheduled):
    _, turns, _, microbatches = scheduled
    for microbatch in microbatches:
        tokens = np.zeros((SHAPE.rows, SHAPE.row_len), int)
        owner = np.full(SHAPE.chunks, -1)
        for slot, sample, row, offset in microbatch.placements(SHAPE):
            length = turns[microbatch.turns()[slot]][slot][sample]
            assert offset + length <= SHAPE.row_len and row < SHAPE.rows
            tokens[row, offset : offset + length] += 1
            first = (row * SHAPE.row_len + offset) // SHAPE.chunk_len
            last = (row * SHAPE.row_len + offset + length - 1) // SHAPE.chunk_len
            assert set(owner[first : last + 1]) <= {-1, slot}
            owner[first : last + 1] = slot
        assert tokens.max(initial=0) <= 1


def test_spans_of_a_task_come_in_their_order(scheduled):
    _, _, packed, microbatches = scheduled
    spans = defaultdict(list)
    for microbatch in microbatches:
        for row in microbatch.rows:
            for turn, slot, span in row:
                spans[turn, slot].append(span)
    for index, turn in enumerate(packed):
        for slot, expected in turn.spans.items():
            assert tuple(spans[index, slot]) == expected


def test_never_longer_than_greedy_with_noops(scheduled):
    stages, turns, _, microbatches = scheduled
    greedy = schedule_turns([pack_greedily(lengths, SHAPE) for lengths in turns], stages)
    assert len(microbatches) <= len(greedy)


def test_merging_saves_microbatches_where_groups_take_turns():
    saved = 0
    for seed in range(10):
        packed = pack_rounds(random_turns(seed, 2), SHAPE)
        saved += sum(turn.count for turn in packed) - len(merge_turns(packed, stages=1))
    assert saved >= 10


def test_a_task_alone_needs_noops_and_tasks_that_take_turns_need_none():
    rounds = [{slot: [250] * 4 for slot in range(4)} for _ in range(6)]
    alone = schedule_turns(pack_rounds(take_turns(rounds, [(0,)]), SHAPE), stages=4)
    assert [microbatch.is_noop for microbatch in alone] == [False] + [True, True, True, False] * 5
    turns = take_turns(rounds, [(0,), (1,), (2,), (3,)])
    together = schedule_turns(pack_rounds(turns, SHAPE), stages=4)
    assert [microbatch.is_noop for microbatch in together] == [False] * 24


def test_a_broken_lemma_is_found_and_fixed():
    packed = pack_rounds([{7: [200] * 4}, {7: [200] * 4}], SHAPE)
    ((first,), (second,)) = (merge_turns([turn], 1) for turn in packed)
    second = PlannedMicrobatch(
        tuple(tuple(placed._replace(turn=1) for placed in row) for row in second.rows)
    )
    (violation,) = lemma_violations([first, second], stages=3)
    assert violation == (7, 1, 1, 1)
    fixed = insert_noops([first, second], stages=3)
    assert [microbatch.is_noop for microbatch in fixed] == [False, True, True, False]
    assert lemma_violations(fixed, stages=3) == []
    assert lemma_violations([second, first], stages=1) != []
