"""Random jobs have the rates that MuxTune states, policies put a job on the GPU that they promise,
and replays agree with hand-made cases, closed forms and an independent simulation."""

import itertools
import math
import random

import numpy as np
import pytest
from research.cluster import (
    Job,
    fewest_tasks,
    first_fit,
    most_throughput,
    one_task_per_gpu,
    random_jobs,
    replay,
    with_task,
)
from step_by_step import replay_step_by_step

from jaxmux.planner import PlanningError

SIZES = (1, 2, 5)
MOST_TASKS = 4


def round_seconds(tasks):
    """Small tasks share a round's fixed cost, and a GPU has memory for four tasks."""
    return math.inf if len(tasks) > MOST_TASKS else 2 + sum(SIZES[kind] for kind in tasks)


POLICIES = {
    "one task per GPU": one_task_per_gpu(),
    "first fit": first_fit(round_seconds),
    "fewest tasks": fewest_tasks(round_seconds),
    "most throughput": most_throughput(round_seconds, SIZES),
}


def random_day(seed: int, count: int = 60) -> list[Job]:
    """Jobs at whole seconds, so that many events coincide."""
    rng = random.Random(seed)
    arrivals = sorted(rng.choices(range(60), k=count))
    return [Job(t, rng.randrange(len(SIZES)), rng.randrange(1, 12)) for t in arrivals]


def test_one_gpu_serves_jobs_one_after_another():
    jobs = [Job(0, 0, 2), Job(1, 1, 1), Job(50, 0, 1)]
    result = replay(jobs, one_task_per_gpu(), 1, round_seconds)
    assert result.starts.tolist() == [0, 6, 50]
    assert result.ends.tolist() == [6, 10, 53]
    assert result.completion_seconds.tolist() == [6, 9, 3]
    assert result.gpu_seconds.tolist() == [13]
    assert (result.finished(9.9), result.finished(10), result.most_tasks) == (1, 2, 1)


def test_a_job_is_slower_while_another_one_shares_its_gpu():
    # Alone, kind 0 takes 3 s a round; beside kind 1, both take 5 s. The second job begins after two
    # rounds of the first one, and ends two rounds later; the first job then has one round left.
    result = replay([Job(0, 0, 5), Job(6, 1, 2)], first_fit(round_seconds), 1, round_seconds)
    assert result.ends.tolist() == [6 + 2 * 5 + 3, 6 + 2 * 5]


@pytest.mark.parametrize("tasks", [1, 2, 4])
def test_like_jobs_share_a_gpu_evenly(tasks):
    result = replay([Job(3, 1, 7)] * tasks, first_fit(round_seconds), 2, round_seconds)
    assert result.ends.tolist() == [3 + 7 * (2 + 2 * tasks)] * tasks
    assert result.gpu_seconds.tolist() == [7 * (2 + 2 * tasks), 0]


def test_processor_sharing_of_like_jobs_of_several_lengths():
    # Where n like jobs take n times as long as one, jobs of r1 <= r2 <= ... rounds that begin
    # together end at Σ_k (r_k - r_{k-1}) (n - k + 1) seconds.
    rounds = np.sort(np.random.default_rng(0).uniform(1, 9, 6))
    left = np.arange(len(rounds), 0, -1)
    expected = np.cumsum(np.diff(rounds, prepend=0) * left)
    result = replay([Job(0, 0, r) for r in rounds], first_fit(len), 1, len)
    np.testing.assert_allclose(result.ends, expected, rtol=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", POLICIES)
def test_a_step_by_step_simulation_gives_the_same(name, seed):
    jobs, gpus = random_day(seed), 1 + seed % 4
    result = replay(jobs, POLICIES[name], gpus, round_seconds)
    starts, ends, places, busy = replay_step_by_step(jobs, POLICIES[name], gpus, round_seconds)
    np.testing.assert_allclose(result.starts, np.array(starts, float), rtol=1e-9)
    np.testing.assert_allclose(result.ends, np.array(ends, float), rtol=1e-9)
    assert result.gpus.tolist() == places
    assert result.gpu_seconds.sum() == pytest.approx(float(busy))


@pytest.mark.parametrize("name", POLICIES)
def test_every_job_gets_its_rounds_and_no_gpu_exceeds_its_memory(name):
    rng = np.random.default_rng(1)
    arrivals = np.sort(rng.uniform(0, 200, 150))
    jobs = [Job(t, int(rng.integers(3)), rng.exponential(5)) for t in arrivals]
    result = replay(jobs, POLICIES[name], 3, round_seconds)
    trained, busy = np.zeros(len(jobs)), 0.0
    times = np.unique([result.starts, result.ends])
    for start, end in zip(times, times[1:], strict=False):
        live = (result.starts <= start) & (result.ends >= end)
        for gpu in range(3):
            tasks = np.flatnonzero(live & (result.gpus == gpu))
            if len(tasks):
                seconds = round_seconds(tuple(sorted(jobs[i].kind for i in tasks)))
                assert seconds < math.inf
                trained[tasks] += (end - start) / seconds
                busy += end - start
    np.testing.assert_allclose(trained, [job.rounds for job in jobs], rtol=1e-6)
    assert result.gpu_seconds.sum() == pytest.approx(busy)
    assert (result.starts >= arrivals).all()
    assert (np.diff(result.starts) >= 0).all(), "a later job started before an earlier one"


@pytest.mark.parametrize("name", POLICIES)
def test_like_jobs_that_arrive_together_may_come_in_any_order(name):
    jobs = [Job(t, 1, rounds) for t in (0, 8) for rounds in (4, 4, 4, 9, 9)]
    shuffled = [jobs[i] for i in (1, 0, 2, 4, 3, 7, 5, 6, 9, 8)]
    ends = [sorted(replay(j, POLICIES[name], 2, round_seconds).ends) for j in (jobs, shuffled)]
    np.testing.assert_allclose(*ends)


@pytest.mark.parametrize("name", ["one task per GPU", "fewest tasks", "most throughput"])
def test_the_numbering_of_gpus_does_not_matter(name):
    def last_first(gpus, kind):
        place = POLICIES[name](gpus[::-1], kind)
        return None if place is None else len(gpus) - 1 - place

    jobs = random_day(7)
    one, other = (replay(jobs, policy, 3, round_seconds) for policy in (POLICIES[name], last_first))
    np.testing.assert_allclose(one.ends, other.ends)
    np.testing.assert_allclose(one.gpu_seconds, other.gpu_seconds[::-1])


def test_half_as_fast_gpus_take_twice_as_long():
    jobs = random_day(3)
    slower = [job._replace(arrival=2 * job.arrival) for job in jobs]
    one = replay(jobs, POLICIES["first fit"], 2, round_seconds)
    other = replay(slower, POLICIES["first fit"], 2, lambda tasks: 2 * round_seconds(tasks))
    np.testing.assert_allclose(2 * one.ends, other.ends)


def test_a_day_without_jobs_takes_no_gpu():
    result = replay([], one_task_per_gpu(), 2, round_seconds)
    assert result.ends.tolist() == [] and result.gpu_seconds.tolist() == [0, 0]


def test_wrong_jobs_and_policies_are_refused():
    with pytest.raises(PlanningError, match="order of their arrivals"):
        replay([Job(1, 0, 1), Job(0, 0, 1)], one_task_per_gpu(), 1, round_seconds)
    with pytest.raises(PlanningError, match="job 4: its kind 0 does not fit on GPU 0"):
        replay([Job(0, 0, 1)] * 5, lambda gpus, kind: 0, 1, round_seconds)
    with pytest.raises(PlanningError, match="job 0: its kind 2 is placed on no empty GPU"):
        replay([Job(0, 2, 1)], lambda gpus, kind: None, 1, round_seconds)


def test_tasks_stay_in_ascending_order():
    assert with_task((), 1) == (1,)
    assert with_task((0, 1, 3), 1) == (0, 1, 1, 3)
    assert with_task((0, 1), 2) == (0, 1, 2)


SECONDS_ALONE = (0.5, 2.0, 3.0)


def jobs_of(days: int, seed: int = 0, **options):
    return random_jobs(np.random.default_rng(seed), SECONDS_ALONE, days * 24 * 60, **options)


def test_the_moments_are_those_of_the_paper():
    found = jobs_of(days=60)
    minutes = np.array([job.rounds * SECONDS_ALONE[job.kind] for job in found]) / 60
    assert len(found) / (60 * 24 * 60) == pytest.approx(2.59, rel=0.01)
    assert minutes.mean() == pytest.approx(372.6, rel=0.02)
    assert minutes.std() == pytest.approx(612.9, rel=0.06)


def test_arrivals_are_in_order_and_without_memory():
    arrivals = np.array([job.arrival for job in jobs_of(days=60)])
    gaps = np.diff(arrivals)
    assert (gaps >= 0).all() and arrivals[-1] <= 60 * 24 * 3600
    # The gaps of a Poisson process are exponential: their deviation is their mean.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.02)


def test_kinds_are_equally_likely_and_independent_of_durations():
    found = jobs_of(days=60)
    kinds = np.array([job.kind for job in found])
    minutes = np.array([job.rounds * SECONDS_ALONE[job.kind] for job in found])
    np.testing.assert_allclose(np.bincount(kinds) / len(kinds), 1 / 3, atol=0.01)
    assert abs(np.corrcoef(kinds, minutes)[0, 1]) < 0.01


def test_the_rate_can_be_changed_and_equal_seeds_give_equal_jobs():
    assert len(jobs_of(10, arrivals_per_minute=1.0)) == pytest.approx(14_400, rel=0.03)
    assert jobs_of(1, seed=4) == jobs_of(1, seed=4) != jobs_of(1, seed=5)


WORK = (1.0, 4.0)


def worked_seconds(tasks):
    """Rounds take 2 s at least, and a second per unit of work; memory holds three tasks."""
    return math.inf if len(tasks) > 3 else max(2.0, sum(WORK[kind] for kind in tasks))


def test_one_task_per_gpu_takes_the_first_empty_gpu_or_waits():
    place = one_task_per_gpu()
    assert place([(0,), (), ()], 1) == 1
    assert place([(0,), (1,)], 1) is None


def test_first_fit_regards_memory_only():
    place = first_fit(worked_seconds)
    assert place([(0, 0, 0), (1, 1), ()], 0) == 1
    assert place([(0, 0, 0), (1, 1, 1)], 0) is None


def test_the_gpu_with_the_fewest_tasks_gets_the_job():
    place = fewest_tasks(worked_seconds)
    assert place([(0, 0), (1,), (0,)], 0) == 1
    assert place([(0, 0, 0)], 0) is None


def test_a_job_joins_tasks_that_leave_the_gpu_idle_rather_than_a_full_gpu():
    place = most_throughput(worked_seconds, WORK)
    # Beside the small task a second small one costs nothing; beside the large one it gains nothing.
    assert place([(1,), (0,)], 0) == 1
    assert place([(1,), (1, 1)], 0) is None
    # An empty GPU adds as much as the small task's, and comes first; memory has the last word.
    assert place([(1,), (), (0,)], 0) == 1
    assert place([(0, 0, 0)], 0) is None


@pytest.mark.parametrize("kind", [0, 1])
def test_the_throughput_of_the_cluster_is_the_largest_possible(kind):
    rng = np.random.default_rng(kind)
    seconds = {
        tuple(tasks): rng.uniform(1, 5)
        for count in range(4)
        for tasks in itertools.combinations_with_replacement((0, 1), count)
    }

    def time(tasks):
        return seconds.get(tasks, math.inf)

    def cluster(gpus):
        return sum(sum(WORK[k] for k in tasks) / time(tasks) for tasks in gpus if tasks)

    place = most_throughput(time, WORK)
    for gpus in itertools.product(list(seconds), repeat=2):
        after = [
            cluster([with_task(t, kind) if i == place_ else t for i, t in enumerate(gpus)])
            if len(gpus[place_]) < 3
            else -math.inf
            for place_ in range(2)
        ]
        found = place(gpus, kind)
        if found is None:
            assert max(after) <= cluster(gpus) + 1e-12
        else:
            assert after[found] == pytest.approx(max(after))
