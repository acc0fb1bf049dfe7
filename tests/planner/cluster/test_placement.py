"""Policies put a job on the GPU that they promise."""

import itertools
import math

import numpy as np
import pytest

from jaxmux.planner.cluster import (
    fewest_tasks,
    first_fit,
    most_throughput,
    one_task_per_gpu,
    with_task,
)

WORK = (1.0, 4.0)


def round_seconds(tasks):
    """Rounds take 2 s at least, and a second per unit of work; memory holds three tasks."""
    return math.inf if len(tasks) > 3 else max(2.0, sum(WORK[kind] for kind in tasks))


def test_one_task_per_gpu_takes_the_first_empty_gpu_or_waits():
    place = one_task_per_gpu()
    assert place([(0,), (), ()], 1) == 1
    assert place([(0,), (1,)], 1) is None


def test_first_fit_regards_memory_only():
    place = first_fit(round_seconds)
    assert place([(0, 0, 0), (1, 1), ()], 0) == 1
    assert place([(0, 0, 0), (1, 1, 1)], 0) is None


def test_the_gpu_with_the_fewest_tasks_gets_the_job():
    place = fewest_tasks(round_seconds)
    assert place([(0, 0), (1,), (0,)], 0) == 1
    assert place([(0, 0, 0)], 0) is None


def test_a_job_joins_tasks_that_leave_the_gpu_idle_rather_than_a_full_gpu():
    place = most_throughput(round_seconds, WORK)
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
