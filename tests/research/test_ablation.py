"""MuxTune's fusion takes the best partition, its buckets are the fastest in the simulator, and none
of its parts makes a step longer."""

import time

import numpy as np
import pytest
from research.ablation import Parts, ablate, choose_buckets, fuse_tasks, plan_step, setting

from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline.groupings import candidate_buckets, fusions, pipeline_latency


def latency_of(tokens, stages: int, microbatches: int = 4):
    """Eq. 3-4 for operators that saturate at 900 tokens, so that batching small tasks is nearly
    free."""
    speed = np.linspace(1.0, 1.3, stages)

    def latency(htask) -> float:
        total = sum(tokens[task] for task in htask)
        return pipeline_latency(speed * (max(total, 900) + 60 * len(htask)) * 1e-6, microbatches)

    return latency


def test_htasks_are_contiguous_in_tokens():
    tokens = [512, 64, 2048, 64, 128, 4096, 96]
    plan = fuse_tasks(tokens, latency_of(tokens, 4), stages=4)
    in_order = [tokens[task] for htask in plan.htasks for task in htask]
    assert in_order == sorted(tokens)
    assert 1 < len(plan.htasks) < len(tokens)


def test_the_best_partition_is_one_of_those_with_every_number_of_htasks():
    tokens = [512, 64, 2048, 64, 128, 4096, 96]
    latency = latency_of(tokens, 4)
    found = fusions(tokens, latency, stages=4)
    assert [len(fusion.htasks) for fusion in found] == list(range(1, 8))
    assert fuse_tasks(tokens, latency, stages=4) in found


def test_an_htask_beyond_memory_is_never_formed():
    tokens = [100] * 8
    plan = fuse_tasks(tokens, lambda htask: 1.0, stages=2, fits=lambda htask: len(htask) <= 3)
    assert max(map(len, plan.htasks)) <= 3
    assert len(plan.htasks) == 3


def test_a_task_that_fits_nowhere_is_named():
    with pytest.raises(PlanningError, match="task 1 with 900 tokens"):
        fuse_tasks([10, 900], lambda htask: 1.0, 2, fits=lambda htask: 1 not in htask)


def test_no_tasks_are_refused():
    with pytest.raises(PlanningError, match="no tasks"):
        fuse_tasks([], lambda htask: 1.0, 2)


def test_64_tasks_take_less_than_a_second():
    tokens = np.random.default_rng(0).integers(64, 4096, 64).tolist()
    start = time.process_time()
    plan = fuse_tasks(tokens, latency_of(tokens, 8), stages=8)
    assert time.process_time() - start < 1
    assert sorted(task for htask in plan.htasks for task in htask) == list(range(64))


def test_number_of_buckets_has_the_least_simulated_latency():
    latencies = np.random.default_rng([9, 2]).uniform(0.2, 1, 9).tolist()

    def simulate(buckets) -> float:
        # The bubble shrinks with the number of buckets, and each bucket has a cost.
        largest = max(sum(latencies[i] for i in bucket) for bucket in buckets)
        return largest * 3 + sum(latencies) + 0.2 * len(buckets)

    chosen = choose_buckets(latencies, simulate)
    assert chosen.latency == min(simulate(buckets) for buckets in candidate_buckets(latencies))
    assert 1 < len(chosen.buckets) < 9
    assert simulate(chosen.buckets) == chosen.latency


@pytest.mark.parametrize(("stages", "tp"), [(4, 1), (2, 2)])
def test_every_part_of_muxtune_helps_or_is_not_needed(stages, tp):
    seconds = ablate(setting(tasks=4, sequences=4, stages=stages, tp=tp))
    everything = seconds.pop("all on")
    assert all(value >= everything * (1 - 1e-12) for value in seconds.values())
    assert seconds["without any"] > 1.2 * everything


def test_without_fusion_every_task_is_an_htask():
    plan = plan_step(setting(tasks=4, sequences=4, stages=4, tp=1), Parts(fusion=False))
    assert plan.htasks == ((0,), (1,), (2,), (3,))
    assert sorted(i for bucket in plan.buckets for i in bucket) == [0, 1, 2, 3]
