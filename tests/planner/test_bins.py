"""Bin packing beside brute force, and its lower bound."""

from functools import cache
from itertools import combinations

import numpy as np
import pytest

from jaxmux.planner.bins import (
    first_fit_decreasing,
    fullest_bins,
    fullest_subset,
    least_bins,
)


def fewest_bins(sizes: list[int], capacity: int, seats: int | None) -> int:
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
            and (seats is None or count < seats)
        )

    return needed(frozenset(range(len(sizes))))


@pytest.mark.parametrize("seed", range(40))
def test_bound_is_at_most_the_optimum_and_packings_at_least(seed):
    rng = np.random.default_rng(seed)
    capacity = 100
    sizes = rng.integers(1, rng.choice([30, 60, 101]), rng.integers(1, 9)).tolist()
    seats = int(rng.integers(1, 5)) if seed % 3 == 0 else None
    optimum = fewest_bins(sizes, capacity, seats)
    assert least_bins(sizes, capacity, seats) <= optimum
    for pack in (first_fit_decreasing, fullest_bins):
        bins = pack(sizes, capacity, seats)
        assert optimum <= len(bins)
        assert sorted(i for each in bins for i in each) == list(range(len(sizes)))
        assert all(sum(sizes[i] for i in each) <= capacity for each in bins)
        assert seats is None or all(len(each) <= seats for each in bins)


def test_bound_counts_what_cannot_share_a_bin():
    assert least_bins([51] * 7, 100) == 7
    assert least_bins([70, 70, 40, 40, 40], 100) == 4
    assert least_bins([10] * 10, 100, seats=3) == 4
    assert least_bins([], 100) == 0


def test_fullest_bins_close_where_first_fit_leaves_room():
    sizes = [44, 29, 26, 22, 18, 14, 13, 10]
    assert len(first_fit_decreasing(sizes, 60)) == 4
    assert len(fullest_bins(sizes, 60)) == 3 == least_bins(sizes, 60)


@pytest.mark.parametrize("seed", range(20))
def test_fullest_subset_has_the_largest_sum_and_then_the_fewest_items(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, 9).tolist()
    capacity, seats = 70, [None, 3][seed % 2]
    fitting = [
        (sum(sizes[i] for i in chosen), -count)
        for count in range((seats or len(sizes)) + 1)
        for chosen in combinations(range(len(sizes)), count)
        if sum(sizes[i] for i in chosen) <= capacity
    ]
    found = fullest_subset(sizes, capacity, seats)
    assert (sum(sizes[i] for i in found), -len(found)) == max(fitting)
