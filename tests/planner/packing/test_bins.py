"""Bin packing and its lower bound, compared with brute force."""

import time
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from jaxmux.planner.packing.rows import (
    balanced_bins,
    first_fit_decreasing,
    fullest_bins,
    fullest_subset,
    least_bins,
)


def fewest_bins(sizes: list[int], capacity: int, most_items: int | None) -> int:
    @cache
    def needed(items: frozenset[int]) -> int:
        if not items:
            return 0
        first, *rest = sorted(items)
        return 1 + min(
            needed(items - {first, *others})
            for count in range(len(rest) + 1)
            for others in combinations(rest, count)
            if sizes[first] + sum(sizes[i] for i in others) <= capacity
            and (most_items is None or count < most_items)
        )

    return needed(frozenset(range(len(sizes))))


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_at_most_the_optimum_and_packings_at_least(seed):
    rng = np.random.default_rng(seed)
    capacity = 100
    sizes = rng.integers(1, rng.choice([30, 60, 101]), rng.integers(1, 9)).tolist()
    most_items = int(rng.integers(1, 5)) if seed % 3 == 0 else None
    optimum = fewest_bins(sizes, capacity, most_items)
    assert least_bins(sizes, capacity, most_items) <= optimum
    balanced = (balanced_bins(sizes, n, capacity, most_items) for n in range(len(sizes) + 1))
    packings = [pack(sizes, capacity, most_items) for pack in (first_fit_decreasing, fullest_bins)]
    for bins in [*packings, next(filter(None, balanced))]:
        assert optimum <= len(bins)
        assert sorted(i for each in bins for i in each) == list(range(len(sizes)))
        assert all(sum(sizes[i] for i in each) <= capacity for each in bins)
        assert most_items is None or all(len(each) <= most_items for each in bins)


def test_bound_counts_what_cannot_share_a_bin():
    assert least_bins([51] * 7, 100) == 7
    assert least_bins([70, 70, 40, 40, 40], 100) == 4
    assert least_bins([10] * 10, 100, most_items=3) == 4
    assert least_bins([], 100) == 0


def test_fullest_bins_leave_no_room_where_first_fit_does():
    sizes = [44, 29, 26, 22, 18, 14, 13, 10]
    assert len(first_fit_decreasing(sizes, 60)) == 4
    assert len(fullest_bins(sizes, 60)) == 3 == least_bins(sizes, 60)


def test_balanced_bins_keep_a_limit_on_items_that_leaves_short_ones_to_the_others():
    sizes = [30, 30, 30, 30, 30, 30, 10, 10, 10, 10, 10, 10]
    assert len(fullest_bins(sizes, 90, 4)) == len(first_fit_decreasing(sizes, 90, 4)) == 4
    balanced = balanced_bins(sizes, 3, 90, 4)
    assert [sorted(sizes[i] for i in each) for each in balanced] == [[10, 10, 30, 30]] * 3
    assert balanced_bins(sizes, 2, 200, 4) is None
    assert balanced_bins(sizes, 3, 79, 4) is None


def fullest_choice(sizes: list[int], capacity: int, most_items: int | None) -> list[int]:
    """The sizes, ascending, with the largest sum; of those with equal sums the fewest sizes; of
    those the ones whose shortest size is longest."""
    most = len(sizes) if most_items is None else min(most_items, len(sizes))
    choices = [sorted(chosen) for count in range(most + 1) for chosen in combinations(sizes, count)]
    fitting = [chosen for chosen in choices if sum(chosen) <= capacity]
    return max(fitting, key=lambda chosen: (sum(chosen), -len(chosen), chosen))


@pytest.mark.parametrize("seed", range(60))
def test_fullest_subset_has_the_largest_sum_and_then_the_fewest_items(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, 9).tolist()
    capacity, most_items = 70, [None, 3][seed % 2]
    found = fullest_subset(sizes, capacity, most_items)
    assert found == sorted(set(found))
    assert sorted(sizes[i] for i in found) == fullest_choice(sizes, capacity, most_items)


@pytest.mark.parametrize("seed", range(60))
def test_fullest_bins_hold_the_longest_item_left_and_the_best_choice_beside_it(seed):
    rng = np.random.default_rng(seed)
    # With few different sizes, bins of the same content follow each other.
    different = rng.integers(1, rng.choice([20, 40, 61]), rng.choice([2, 4, 10]))
    sizes = rng.choice(different, 10).tolist()
    capacity, most_items = 60, [None, 1, 3][seed % 3]
    left = sorted(sizes, reverse=True)
    for each in fullest_bins(sizes, capacity, most_items):
        first, *others = left
        best = fullest_choice(
            others, capacity - first, None if most_items is None else most_items - 1
        )
        assert [sizes[i] for i in each] == [first, *reversed(best)]
        for i in each:
            left.remove(sizes[i])
    assert not left


def test_items_of_one_size_are_taken_in_their_order():
    sizes = [30, 20, 30, 20, 30, 10, 20]
    assert fullest_bins(sizes, 50) == [[0, 1], [2, 3], [4, 6], [5]]


@pytest.mark.parametrize("pack", [first_fit_decreasing, fullest_bins])
@pytest.mark.parametrize("most_items", [4, 64])
def test_packing_a_large_batch_stays_far_below_1_ms_an_item(pack, most_items):
    count = 4000
    lengths = np.random.default_rng(0).lognormal(np.log(150), 0.5, count)
    sizes = np.clip(lengths, 1, 1024).astype(int).tolist()
    start = time.process_time()
    bins = pack(sizes, 1024, most_items)
    seconds = time.process_time() - start
    print(f"{len(bins)} bins, {1e3 * seconds / count:.3f} ms an item")
    assert len(bins) <= 1.05 * least_bins(sizes, 1024, most_items)
    assert seconds / count < 0.5e-3
