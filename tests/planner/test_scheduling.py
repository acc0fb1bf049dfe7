"""The choice of the tasks that train."""

from itertools import combinations

import numpy as np

from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.scheduling import MOST_PASSES, Candidate, schedule, tokens_per_microbatch


def room(sizes: dict[str, int], capacity: int):
    """A refusal of tasks whose sizes exceed a capacity."""

    def refusal(names):
        total = sum(sizes[name] for name in names)
        return f"{total} of {capacity}" if total > capacity else None

    return refusal


def drawn(seed: int):
    """Random candidates, their sizes and a capacity."""
    rng = np.random.default_rng(seed)
    names = [f"t{i}" for i in range(int(rng.integers(1, 9)))]
    sizes = {name: int(rng.integers(1, 6)) for name in names}
    running, left = set(), int(rng.integers(6, 13))
    capacity = left
    for name in names:
        if rng.random() < 0.5 and sizes[name] <= left:
            running.add(name)
            left -= sizes[name]
    candidates = [
        Candidate(name, int(rng.integers(3)), int(rng.integers(4)), name in running)
        for name in names
    ]
    return candidates, sizes, capacity


CASES = [drawn(seed) for seed in range(300)]


def test_what_is_chosen_fits_and_who_waits_does_not_fit_beside_it():
    for candidates, sizes, capacity in CASES:
        refusal = room(sizes, capacity)
        found = schedule(candidates, refusal)
        assert refusal(found.runs) is None
        assert {*found.runs, *found.waits} == set(sizes) and not {*found.runs} & {*found.waits}
        for name in found.waits:
            assert refusal((*found.runs, name))


def test_only_a_higher_priority_takes_the_place_of_a_task_that_trains():
    for candidates, sizes, capacity in CASES:
        found = schedule(candidates, room(sizes, capacity))
        by_name = {own.name: own for own in candidates}
        for own in candidates:
            if own.runs and own.name in found.waits:
                begun = [by_name[name] for name in found.runs if not by_name[name].runs]
                assert any(other.priority > own.priority for other in begun)


def test_a_task_waits_only_for_tasks_of_its_priority_and_above():
    for candidates, sizes, capacity in CASES:
        found = schedule(candidates, room(sizes, capacity))
        priority = {own.name: own.priority for own in candidates}
        for name in found.waits:
            before = [other for other in found.runs if priority[other] >= priority[name]]
            assert sizes[name] + sum(sizes[other] for other in before) > capacity


def test_equals_come_in_the_order_of_their_arrival():
    waiting = [Candidate(name, 0, arrival) for name, arrival in (("c", 3), ("a", 1), ("b", 2))]
    assert schedule(waiting, room(dict.fromkeys("abc", 1), 2)).runs == ("a", "b")


def test_those_that_arrived_last_make_room():
    running = [Candidate(name, 0, arrival, runs=True) for arrival, name in enumerate("abc")]
    found = schedule(
        [*running, Candidate("new", 1, 9)], room(dict.fromkeys(("a", "b", "c", "new"), 1), 3)
    )
    assert found.runs == ("new", "a", "b") and list(found.waits) == ["c"]
    assert found.takers == {"c": ("new",)}


def test_takers_are_the_tasks_of_higher_priority_that_begin():
    for candidates, sizes, capacity in CASES:
        found = schedule(candidates, room(sizes, capacity))
        by_name = {own.name: own for own in candidates}
        lost = {own.name for own in candidates if own.runs} & found.waits.keys()
        # Whoever trains at first fits, so only those that begin can take a place.
        assert found.takers.keys() == lost
        for name, takers in found.takers.items():
            expected = {
                other.name
                for other in candidates
                if other.priority > by_name[name].priority
                and not other.runs
                and other.name in found.runs
            }
            assert set(takers) == expected


def test_among_tasks_that_arrive_together_the_best_subset_runs():
    value = {"a": 1.0, "b": 5.0, "c": 3.0, "d": 4.0}
    together = [Candidate(name, 0, 0) for name in value]

    def worth(names):
        return sum(value[name] for name in names)

    found = schedule(together, room(dict.fromkeys(value, 1), 2), worth)
    best = max(combinations(value, 2), key=worth)
    assert set(found.runs) == set(best)


def test_no_task_waits_for_ever_while_smaller_ones_come_and_go():
    """A task that needs all the room, and in every turn a small one that trains for two turns."""
    sizes, passes, running = {"large": 4, "small0": 1}, 0, {"small0": 2}
    for turn in range(1, 100):
        small = f"small{turn}"
        sizes[small] = 1
        running = {name: left - 1 for name, left in running.items() if left > 1}
        candidates = [Candidate("large", 0, 0, passes=passes)]
        candidates += [Candidate(n, 0, 1 + int(n[5:]), True) for n in running]
        candidates += [Candidate(small, 0, 1 + turn)]
        found = schedule(candidates, room(sizes, 4))
        if "large" in found.runs:
            break
        passes += found.passed.count("large")
        for name in found.runs:
            running.setdefault(name, 2)
    assert "large" in found.runs
    assert passes == MOST_PASSES


def test_waiting_tasks_are_told_for_whom_they_wait():
    candidates = [
        Candidate("trains", 0, 0, runs=True),
        Candidate("large", 0, 1, passes=MOST_PASSES),
        Candidate("small", 0, 2),
    ]
    found = schedule(candidates, room({"trains": 2, "large": 3, "small": 1}, 4))
    assert found.waits == {
        "large": "5 of 4",
        "small": "waits behind task 'large', which came before",
    }


def test_the_throughput_counts_full_microbatches():
    shape = ShapeClass(rows=2, row_len=128, chunk_len=64, max_sequences=8)
    assert tokens_per_microbatch([256], shape) == 256
    # The second task's chunk needs another microbatch, the third one's finds room beside it.
    assert tokens_per_microbatch([256, 10], shape) == 133
    assert tokens_per_microbatch([256, 10, 54], shape) == 160
    # A round trains no more of a large batch.
    assert tokens_per_microbatch([10_000, 10], shape, round_tokens=128) == 138
    assert tokens_per_microbatch([], shape) == 0
