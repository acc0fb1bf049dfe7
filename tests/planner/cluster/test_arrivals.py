"""Random jobs have the rates and the durations that MuxTune states."""

import numpy as np
import pytest

from jaxmux.planner.cluster import random_jobs

SECONDS_ALONE = (0.5, 2.0, 3.0)


def jobs(days: int, seed: int = 0, **given):
    return random_jobs(np.random.default_rng(seed), SECONDS_ALONE, days * 24 * 60, **given)


def test_the_moments_are_those_of_the_paper():
    found = jobs(days=60)
    minutes = np.array([job.rounds * SECONDS_ALONE[job.kind] for job in found]) / 60
    assert len(found) / (60 * 24 * 60) == pytest.approx(2.59, rel=0.01)
    assert minutes.mean() == pytest.approx(372.6, rel=0.02)
    assert minutes.std() == pytest.approx(612.9, rel=0.06)


def test_arrivals_are_in_order_and_without_memory():
    arrivals = np.array([job.arrival for job in jobs(days=60)])
    gaps = np.diff(arrivals)
    assert (gaps >= 0).all() and arrivals[-1] <= 60 * 24 * 3600
    # The gaps of a Poisson process are exponential: their deviation is their mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)


def test_kinds_are_equally_likely_and_independent_of_durations():
    found = jobs(days=60)
    kinds = np.array([job.kind for job in found])
    minutes = np.array([job.rounds * SECONDS_ALONE[job.kind] for job in found])
    np.testing.assert_allclose(np.bincount(kinds) / len(kinds), 1 / 3, atol=0.01)
    assert abs(np.corrcoef(kinds, minutes)[0, 1]) < 0.01


def test_the_rate_can_be_changed_and_equal_seeds_give_equal_jobs():
    assert len(jobs(10, arrivals_per_minute=1.0)) == pytest.approx(14_400, rel=0.03)
    assert jobs(1, seed=4) == jobs(1, seed=4) != jobs(1, seed=5)
