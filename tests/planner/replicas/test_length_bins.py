"""Length bins pad as little as any choice of boundaries."""

import time
from itertools import combinations

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.replicas import choose_length_bins


def padding_of(lengths, boundaries) -> int:
    ends = np.asarray(boundaries)[np.searchsorted(boundaries, lengths)]
    return int((ends - lengths).sum())


@pytest.mark.parametrize("seed", range(40))
def test_padding_is_the_least_of_all_choices_of_boundaries(seed):
    rng = np.random.default_rng(seed)
    boundaries = np.sort(rng.choice(np.arange(10, 200), rng.integers(1, 9), replace=False))
    lengths = rng.integers(1, boundaries[-1] + 1, rng.integers(1, 40))
    most_bins = int(rng.integers(1, 6))
    needed = boundaries[np.searchsorted(boundaries, lengths.max())]
    choices = [
        sorted({*chosen, needed})
        for count in range(min(most_bins, len(boundaries)))
        for chosen in combinations(boundaries.tolist(), count)
    ]
    found = choose_length_bins(lengths, boundaries, most_bins)
    assert found.padding == min(padding_of(lengths, choice) for choice in choices)
    assert found.padding == padding_of(lengths, found.boundaries)
    assert len(found.boundaries) <= most_bins
    assert sum(found.counts) == len(lengths) and min(found.counts) > 0


def test_a_bin_for_each_interval_leaves_only_the_padding_within_intervals():
    found = choose_length_bins([3, 7, 8, 14], [4, 8, 12, 16], most_bins=9)
    assert found.boundaries == (4, 8, 16)
    assert found.counts == (1, 2, 1)
    assert found.padding == 1 + 1 + 0 + 2


def test_a_sequence_longer_than_every_bin_is_named():
    with pytest.raises(PlanningError, match="sequence 1 has 300 tokens"):
        choose_length_bins([3, 300], [128, 256], 2)


def test_boundaries_must_ascend():
    with pytest.raises(PlanningError, match="not ascending"):
        choose_length_bins([3], [256, 128], 2)


def test_no_sequences_need_no_bins():
    assert choose_length_bins([], [128], 4).boundaries == ()


def test_the_papers_initial_sample_is_divided_in_milliseconds():
    lengths = np.random.default_rng(0).integers(1, 16_384, 51_200)
    start = time.process_time()
    choose_length_bins(lengths, range(256, 16_385, 256), 16)
    assert time.process_time() - start < 0.2
