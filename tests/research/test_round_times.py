"""Predicted rounds of tasks that share a GPU agree with the packing of training and the memory
model."""

import bisect
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from research.cluster import RoundTimes, TaskKind

from jaxmux.installation import resolve_path
from jaxmux.planner import PlanningError
from jaxmux.planner.costs import PROFILES, PoolSpec, ReplicaCosts, measured_models
from jaxmux.planner.costs.device_profile import read_profile
from jaxmux.planner.devices import ONE_DEVICE
from jaxmux.planner.packing import ShapeRequest, choose_shape

BATCHES = 6
# Mean and most tokens of a sample, samples of a global batch, rank.
KINDS = ((18, 64, 8, 8), (18, 64, 64, 16), (70, 128, 16, 16), (90, 256, 8, 64), (90, 256, 48, 16))


@pytest.fixture(scope="module")
def costs() -> ReplicaCosts:
    path = Path(resolve_path(PROFILES)) / "h200_llama3_8b.json"
    models = measured_models(path, read_profile(path).backbone, None, ONE_DEVICE)
    return ReplicaCosts(models.times, models.memory, PoolSpec(1, 1), ONE_DEVICE)


@pytest.fixture(scope="module")
def times(costs) -> RoundTimes:
    rng = np.random.default_rng(0)
    kinds = []
    for mean, longest, samples, rank in KINDS:
        drawn = rng.gamma(3, mean / 3, (BATCHES, samples)).clip(4, longest).astype(int)
        batches = tuple(map(tuple, drawn.tolist()))
        kinds.append(TaskKind(f"{mean}", PoolSpec(1, rank), batches, longest))
    return RoundTimes(kinds, costs)


@pytest.mark.long
@pytest.mark.parametrize(
    "tasks",
    [
        *((0,), (0, 1), (1, 2, 2, 3, 4)),
        *(
            pytest.param(tasks, marks=pytest.mark.slow)
            for tasks in ((1,), (2,), (4,), (0, 0), (2, 3), (0, 2, 4), (0, 0, 1, 3))
        ),
    ],
)
def test_a_round_takes_as_long_as_with_the_planner_s_own_packing(times, costs, tasks):
    rounds = [
        {slot: times.kinds[kind].batches[(i + slot) % BATCHES] for slot, kind in enumerate(tasks)}
        for i in range(BATCHES)
    ]
    longest = [times.kinds[kind].longest for kind in tasks]
    model = dataclasses.replace(costs, pool=times.pool(tasks))
    request = ShapeRequest(8192, least_chunk_len=128)
    priced = choose_shape(rounds, request, model.microbatch, [8, *longest])
    expected = priced.seconds / BATCHES + model.update()
    assert times.seconds(tasks) == pytest.approx(expected, rel=0.04)


def test_small_tasks_share_a_microbatch_and_full_ones_do_not_gain(times):
    small, large = (0,), (4,)
    assert times.seconds(small * 4) < 0.6 * 4 * times.seconds(small)
    assert times.seconds(large * 4) > 0.9 * 4 * times.seconds(large)


def fits(times: RoundTimes, kind: int, count: int) -> bool:
    return count == 0 or math.isfinite(times.seconds((kind,) * count))


@pytest.mark.long
@pytest.mark.parametrize("kind", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_tasks_fit_while_the_memory_model_admits_their_pool(times, costs, kind):
    # The first number of tasks that does not fit, by bisection.
    more = bisect.bisect_left(range(300), True, key=lambda n: not fits(times, kind, n))
    most = more - 1
    shape = times.shape((kind,) * most)
    rank, usable = times.kinds[kind].pool.rank, 0.97 * costs.memory.memory
    assert costs.memory.peak(shape, PoolSpec(most, rank), "full") <= usable
    # Not even the smallest microbatch leaves room for one more.
    smallest = dataclasses.replace(shape, rows=512 // shape.row_len)
    assert costs.memory.peak(smallest, PoolSpec(more, rank), "full") > usable


def test_rows_hold_the_longest_sample_of_any_task(times):
    assert times.shape((0, 3)).row_len >= 256


def test_the_pool_has_the_largest_rank(times):
    assert times.pool((0, 3)) == PoolSpec(2, 64)
    assert times.seconds((0, 0, 0, 3)) > times.seconds((0, 0, 3))


def test_samples_longer_than_the_longest_rows_are_refused(costs):
    kind = TaskKind("long", PoolSpec(1, 8), ((600,),), 600)
    with pytest.raises(PlanningError, match="long: samples of up to 600 tokens"):
        RoundTimes([kind], costs)
