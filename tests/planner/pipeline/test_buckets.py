"""Buckets are as balanced as possible."""

import time

import numpy as np
import pytest
from planner_parts import least_largest_bucket, partitions

from jaxmux.planner.errors import PlanningError
from jaxmux.planner.pipeline.groupings import balance_gap, balanced_buckets, candidate_buckets


def random_latencies(htasks: int, seed: int) -> list[float]:
    rng = np.random.default_rng([htasks, seed])
    return (rng.lognormal(0, 0.7, htasks) if seed % 2 else rng.uniform(0.2, 1, htasks)).tolist()


def bucket_sums(latencies, buckets) -> list[float]:
    return [sum(latencies[i] for i in bucket) for bucket in buckets]


@pytest.mark.parametrize("htasks", [1, 2, 3, 5, 7, 8, 9])
@pytest.mark.parametrize("seed", range(2))
def test_variance_is_the_least_of_all_partitions(htasks, seed):
    latencies = random_latencies(htasks, seed)
    least = np.full(htasks + 1, np.inf)
    for partition in partitions(list(range(htasks))):
        variance = np.var(bucket_sums(latencies, partition))
        least[len(partition)] = min(least[len(partition)], variance)
    for count, buckets in enumerate(balanced_buckets(latencies), start=1):
        assert len(buckets) == count
        assert sorted(i for bucket in buckets for i in bucket) == list(range(htasks))
        found = np.var(bucket_sums(latencies, buckets))
        assert found == pytest.approx(least[count], abs=1e-9 / htasks)


@pytest.mark.parametrize("htasks", [1, 3, 6, 9])
@pytest.mark.parametrize("seed", range(2))
def test_candidates_are_within_1_percent_of_the_least_largest_bucket_of_all(htasks, seed):
    latencies = random_latencies(htasks, seed)
    least = np.full(htasks + 1, np.inf)
    for partition in partitions(list(range(htasks))):
        least[len(partition)] = min(least[len(partition)], max(bucket_sums(latencies, partition)))
    smallest = np.full(htasks + 1, np.inf)
    for buckets in candidate_buckets(latencies):
        assert sorted(i for bucket in buckets for i in bucket) == list(range(htasks))
        largest = max(bucket_sums(latencies, buckets))
        assert largest <= 1.01 * least[len(buckets)]
        smallest[len(buckets)] = min(smallest[len(buckets)], largest)
    assert (smallest[1:] <= 1.001 * least[1:]).all()


@pytest.mark.parametrize("htasks", [8, 10, 12])
def test_largest_bucket_is_within_1_percent_of_the_least_possible(htasks):
    latencies = random_latencies(htasks, seed=htasks + 1)
    choices = candidate_buckets(latencies)
    assert {len(buckets) for buckets in choices} == set(range(1, htasks + 1))
    for buckets in choices:
        if balance_gap(latencies, buckets) > 0.01:
            least = least_largest_bucket(latencies, len(buckets))
            assert max(bucket_sums(latencies, buckets)) <= 1.01 * least


@pytest.mark.parametrize("htasks, seeds", [(6, range(20)), (7, range(20, 40)), (8, (14, 47))])
def test_no_htask_is_lost_that_is_too_short_to_matter(htasks, seeds):
    """Leaving it out may come nearer to the mean than any choice that has it."""
    for seed in seeds:
        rng = np.random.default_rng([htasks, seed])
        latencies = rng.choice([1.0, 2.0, 3.0, 25.0, 28.0, 60.0], htasks).tolist()
        least = np.full(htasks + 1, np.inf)
        for partition in partitions(list(range(htasks))):
            variance = np.var(bucket_sums(latencies, partition))
            least[len(partition)] = min(least[len(partition)], variance)
        for buckets in balanced_buckets(latencies):
            assert sorted(i for bucket in buckets for i in bucket) == list(range(htasks))
            variance = np.var(bucket_sums(latencies, buckets))
            assert variance == pytest.approx(least[len(buckets)], abs=1e-9)


def test_16_htasks_of_similar_latencies_are_grouped():
    latencies = [12, 10, 7, 6, 3, 7, 15, 10, 3, 23, 9, 5, 25, 6, 1, 28]
    for buckets in candidate_buckets(latencies):
        assert sorted(i for bucket in buckets for i in bucket) == list(range(16))


def test_the_number_of_buckets_can_be_limited():
    latencies = random_latencies(9, seed=4)
    assert balanced_buckets(latencies, most=3) == balanced_buckets(latencies)[:3]
    assert {len(buckets) for buckets in candidate_buckets(latencies, most=3)} == {1, 2, 3}


def test_the_least_maximum_is_offered_where_it_is_not_the_least_variance():
    latencies = [5, 4, 10, 6, 4, 7]
    assert bucket_sums(latencies, balanced_buckets(latencies)[2]) == [14, 11, 11]
    of_three = [bucket_sums(latencies, b) for b in candidate_buckets(latencies) if len(b) == 3]
    assert of_three == [[13, 13, 10]]


def test_where_they_differ_both_are_offered_and_the_simulator_decides():
    latencies = [450, 131, 123, 368, 234, 329, 160, 444]
    for simulate in (max, np.var):
        sums = [bucket_sums(latencies, b) for b in candidate_buckets(latencies) if len(b) == 5]
        offered = [simulate(own) for own in sums]
        assert len(offered) == 2 and offered[0] != offered[1]


def test_gap_bounds_the_distance_to_the_best_largest_bucket():
    assert balance_gap([3, 3, 2, 2, 2], ((0, 1), (2, 3, 4))) == 0
    assert balance_gap([2, 2, 2], ((0, 1), (2,))) == pytest.approx(1 / 3)
    assert balance_gap([5, 1, 1], ((0,), (1, 2))) == 0


@pytest.mark.long
def test_many_htasks_are_grouped_close_to_the_mean():
    latencies = random_latencies(48, seed=1)
    start = time.process_time()
    choices = balanced_buckets(latencies)
    assert time.process_time() - start < 10
    assert all(balance_gap(latencies, buckets) < 0.02 for buckets in choices[:12])


def test_buckets_descend_in_latency():
    for buckets in balanced_buckets(random_latencies(9, seed=3)):
        latencies = bucket_sums(random_latencies(9, seed=3), buckets)
        assert latencies == sorted(latencies, reverse=True)


def test_an_htask_without_latency_is_named():
    with pytest.raises(PlanningError, match="hTask 1 has a latency of 0"):
        balanced_buckets([1.0, 0.0])
