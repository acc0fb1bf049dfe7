"""Groups of tasks are balanced and take turns."""

from statistics import mean

import numpy as np
import pytest

from jaxmux.planner.errors import PlanningError
from jaxmux.planner.pipeline.groupings import pair_head_with_tail, take_turns


def test_shortest_is_paired_with_longest():
    lengths = {slot: [100 * (slot + 1)] * 4 for slot in range(4)}
    assert pair_head_with_tail(lengths, 2) == ((0, 3), (1, 2))


@pytest.mark.parametrize("seed", range(20))
def test_every_task_is_in_one_group_and_groups_are_of_similar_size(seed):
    rng = np.random.default_rng(seed)
    tasks = int(rng.integers(1, 20))
    groups = int(rng.integers(1, tasks + 1))
    lengths = {slot: rng.integers(1, 900, 8).tolist() for slot in range(tasks)}
    found = pair_head_with_tail(lengths, groups)
    assert sorted(slot for group in found for slot in group) == list(range(tasks))
    assert len(found) == groups and all(found)
    assert max(map(len, found)) - min(map(len, found)) <= 2


def test_loads_are_closer_than_with_tasks_dealt_in_order_of_length():
    spread, spread_in_order = [], []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        lengths = {slot: rng.integers(1, rng.integers(50, 2000), 16).tolist() for slot in range(8)}
        load = {slot: sum(sizes) for slot, sizes in lengths.items()}
        in_order = sorted(lengths, key=lambda slot: mean(lengths[slot]))
        for groups, into in (
            (pair_head_with_tail(lengths, 2), spread),
            ([in_order[:4], in_order[4:]], spread_in_order),
        ):
            loads = [sum(load[slot] for slot in group) for group in groups]
            into.append(max(loads) / min(loads))
    assert mean(spread) < 1.25 < mean(spread_in_order)


def test_groups_take_turns_within_every_round():
    rounds = [{0: "a0", 1: "b0", 2: "c0"}, {1: "b1", 2: "c1"}, {2: "c2"}]
    assert take_turns(rounds, [(0, 2), (1,)]) == [
        {0: "a0", 2: "c0"},
        {1: "b0"},
        {2: "c1"},
        {1: "b1"},
        {2: "c2"},
    ]


def test_more_groups_than_tasks_are_refused():
    with pytest.raises(PlanningError, match="2 tasks cannot be divided into 3 groups"):
        pair_head_with_tail({0: [1], 1: [1]}, 3)


def test_a_task_without_samples_is_named():
    with pytest.raises(PlanningError, match="slot 7"):
        pair_head_with_tail({3: [1], 7: []}, 1)
