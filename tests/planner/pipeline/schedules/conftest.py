"""Random workloads and streams of one task for the tests of schedules."""

import numpy as np
import pytest

from jaxmux.planner.pipeline.schedules import ScheduledMicrobatch, Workload, uniform_workload


@pytest.fixture(scope="session")
def random_workload():
    """(seed) -> a workload of several steps, of unequal times, whose tasks share microbatches."""

    def make(seed: int) -> Workload:
        rng = np.random.default_rng(seed)
        stages, tasks = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        microbatches = []
        for step in range(int(rng.integers(1, 4))):
            for task in range(tasks):
                for _ in range(int(rng.integers(1, 4))):
                    partner = int(rng.integers(tasks))
                    members = tuple(sorted({task, partner}))
                    steps, buffers = (step,) * len(members), int(rng.integers(1, 3))
                    microbatches.append(ScheduledMicrobatch(members, steps, task, buffers))
        forward = 0.5 + rng.random((len(microbatches), stages))
        backward = forward * rng.choice([1.0, 1.3, 2.0])
        return Workload(tuple(microbatches), forward, backward)

    return make


@pytest.fixture(scope="session")
def one_global_batch():
    """(stages, microbatches) -> one global batch of one task, all times 1."""

    def make(stages: int, microbatches: int) -> Workload:
        return uniform_workload(
            [ScheduledMicrobatch((0,), (0,))] * microbatches, [1.0] * stages, [1.0] * stages
        )

    return make


@pytest.fixture(scope="session")
def bucket_workload():
    """(latencies, counts, stages) -> a workload of buckets.

    Bucket i has `counts[i]` microbatches that take `latencies[i]` on every stage, forward and
    backward, times the factors `backward` and, on the last stage, `last_stage`.
    """

    def make(latencies, counts, stages, backward=1.0, last_stage=1.0) -> Workload:
        buckets = np.repeat(np.arange(len(latencies)), counts)
        forward = np.tile(np.asarray(latencies, float)[buckets][:, None], (1, stages))
        forward[:, -1] *= last_stage
        microbatches = tuple(ScheduledMicrobatch((int(b),), (0,), bucket=int(b)) for b in buckets)
        return Workload(microbatches, forward, forward * backward)

    return make
