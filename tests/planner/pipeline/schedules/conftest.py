"""Random workloads and single-task streams for the schedule tests."""

import numpy as np
import pytest

from jaxmux.planner.pipeline.schedules import ScheduledMicrobatch, Workload, uniform_workload


@pytest.fixture(scope="session")
def random_load():
    """(seed) -> a workload with unequal times, tasks that share jobs, several steps of each."""

    def make(seed: int) -> Workload:
        rng = np.random.default_rng(seed)
        stages, tasks = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        jobs = []
        for step in range(int(rng.integers(1, 4))):
            for task in range(tasks):
                for _ in range(int(rng.integers(1, 4))):
                    partner = int(rng.integers(tasks))
                    members = sorted({task, partner})
                    jobs.append(
                        ScheduledMicrobatch(
                            tuple(members), (step,) * len(members), task, int(rng.integers(1, 3))
                        )
                    )
        forward = 0.5 + rng.random((len(jobs), stages))
        backward = forward * rng.choice([1.0, 1.3, 2.0])
        return Workload(tuple(jobs), forward, backward)

    return make


@pytest.fixture(scope="session")
def one_batch():
    """(stages, jobs) -> one global batch of one task, all times 1."""

    def make(stages: int, jobs: int) -> Workload:
        return uniform_workload(
            [ScheduledMicrobatch((0,), (0,))] * jobs, [1.0] * stages, [1.0] * stages
        )

    return make


@pytest.fixture(scope="session")
def bucket_load():
    """(latencies, counts, stages) -> a workload: bucket i has `counts[i]` jobs whose latency is
    `latencies[i]` on every stage, forward and backward, unless factors say otherwise."""

    def make(latencies, counts, stages, backward=1.0, last_stage=1.0) -> Workload:
        buckets = np.repeat(np.arange(len(latencies)), counts)
        forward = np.tile(np.asarray(latencies, float)[buckets][:, None], (1, stages))
        forward[:, -1] *= last_stage
        jobs = tuple(ScheduledMicrobatch((int(b),), (0,), bucket=int(b)) for b in buckets)
        return Workload(jobs, forward, forward * backward)

    return make
