"""Ranges of every number have the least cost of all divisions."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxmux.planner.contiguous_ranges import cheapest_ranges


@pytest.mark.parametrize("items", range(1, 8))
@pytest.mark.parametrize("seed", range(4))
def test_cost_is_the_least_of_all_divisions_and_that_of_the_ranges(items, seed):
    rng = np.random.default_rng([items, seed])
    first, further = rng.random(items + 1), rng.random((items + 1, items + 1))
    first[rng.random(first.shape) < 0.2] = np.inf
    further[rng.random(further.shape) < 0.2] = np.inf
    first[0], further[np.tri(items + 1, dtype=bool)] = np.inf, np.inf

    def cost(ends) -> float:
        return first[ends[0]] + sum(further[pair] for pair in pairwise(ends))

    found = cheapest_ranges(first, further, most=items)
    assert len(found) == items
    for count, ranges in enumerate(found, start=1):
        divisions = [(*cuts, items) for cuts in combinations(range(1, items), count - 1)]
        assert ranges.cost == pytest.approx(min(map(cost, divisions)))
        if np.isfinite(ranges.cost):
            assert ranges.ends in divisions
            assert cost(ranges.ends) == pytest.approx(ranges.cost)
