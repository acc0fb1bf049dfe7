"""Task fusion finds the best of all contiguous partitions by the recurrence's own measure."""

import time
from itertools import combinations

import numpy as np
import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.cost_models import estimated_times
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.pipeline.groupings import fuse_ranges, fusions, pipeline_latency


def best_partitions(costs: np.ndarray, stages: int) -> dict[int, float]:
    """By number of hTasks, F of the best contiguous partition."""
    tasks = len(costs)
    best = dict.fromkeys(range(1, tasks + 1), np.inf)
    for parts in range(tasks):
        for cuts in combinations(range(1, tasks), parts):
            edges = [0, *cuts, tasks]
            first, *rest = [costs[i, k - 1] for i, k in zip(edges, edges[1:], strict=False)]
            best[parts + 1] = min(best[parts + 1], first + sum(rest) / stages)
    return best


def test_pipeline_latency_is_that_of_equation_4():
    assert pipeline_latency([1.0, 3.0, 2.0], microbatches=4) == 2 * (1 + 3) + 2 * 4 * 3
    assert pipeline_latency([5.0], microbatches=2) == 20


@pytest.mark.parametrize("tasks", range(1, 10))
@pytest.mark.parametrize("seed", range(6))
def test_fusion_equals_the_best_of_all_contiguous_partitions(tasks, seed):
    rng = np.random.default_rng([tasks, seed])
    stages = int(rng.integers(1, 9))
    costs = rng.uniform(0.1, 1, (tasks, tasks)).cumsum(axis=1)
    if seed % 2:
        costs[rng.random(costs.shape) < 0.4] = np.inf
        np.fill_diagonal(costs, rng.uniform(0.1, 1, tasks))
    found = fuse_ranges(costs, stages)
    possible = {n: f for n, f in best_partitions(costs, stages).items() if np.isfinite(f)}
    assert {len(ranges): total for ranges, total in found} == pytest.approx(possible)
    for ranges, total in found:
        assert [task for i, k in ranges for task in range(i, k + 1)] == list(range(tasks))
        first, *rest = [costs[i, k] for i, k in ranges]
        assert total == pytest.approx(first + sum(rest) / stages)


def test_every_number_of_htasks_has_a_partition_contiguous_in_tokens():
    tokens = [512, 64, 2048, 64, 128, 4096, 96]
    found = fusions(tokens, lambda htask: sum(tokens[task] for task in htask) ** 0.5, stages=4)
    assert [len(fusion.htasks) for fusion in found] == list(range(1, 8))
    for fusion in found:
        assert [tokens[task] for htask in fusion.htasks for task in htask] == sorted(tokens)


def test_partitions_with_an_htask_of_infinite_latency_are_left_out():
    found = fusions([100] * 8, lambda htask: 1.0 if len(htask) <= 3 else np.inf, stages=2)
    assert [len(fusion.htasks) for fusion in found] == list(range(3, 9))
    assert all(len(htask) <= 3 for fusion in found for htask in fusion.htasks)
    with pytest.raises(PlanningError, match="no partition of the 2 tasks"):
        fusions([10, 900], lambda htask: np.inf if 1 in htask else 1.0, stages=2)


def test_no_tasks_are_refused():
    with pytest.raises(PlanningError, match="no tasks"):
        fusions([], lambda htask: 1.0, 2)


def test_one_stage_of_one_microbatch_takes_what_a_microbatch_takes(llama_8b):
    model, shape, pool = estimated_times(llama_8b), ShapeClass(16, 512, 128, 1), PoolSpec(2, 16)
    tokens = (4096, 4096)
    layer = model.layer(shape, tokens, pool).total
    stage = (model.backbone.layers * layer + model.head(shape.tokens)) / 2
    assert pipeline_latency([stage], 1) == pytest.approx(model.microbatch(shape, tokens, pool))


def test_fusion_of_64_tasks_with_the_time_model_takes_under_a_second(llama_8b):
    tokens = np.random.default_rng(0).integers(1, 64, 64) * 128
    model, shape, pool = estimated_times(llama_8b), ShapeClass(1, 512, 128, 1), PoolSpec(64, 16)

    def latency(htask) -> float:
        layer = model.layer(shape, tuple(tokens[list(htask)].tolist()), pool).total
        head = model.head(int(tokens[list(htask)].sum()))
        return pipeline_latency([(model.backbone.layers * layer + head) / 4 / 2] * 4, 4)

    start = time.process_time()
    found = fusions(tokens.tolist(), latency, stages=4)
    assert time.process_time() - start < 1
    for plan in found:
        assert sorted(task for htask in plan.htasks for task in htask) == list(range(64))
