"""The estimated costs with which plans are made, on Llama-3.1-8B."""

import dataclasses

import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.cost_models import estimated_memory, estimated_times
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.time_model import AdapterTimes
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.pipeline import shared_pool


def test_tensor_parallelism_and_stages_share_time_and_memory(costs_of, tasks):
    shape = ShapeClass(4, 2048, 128, 128)
    one, four = (costs_of(tasks, replica) for replica in (ONE_DEVICE, Replica.uniform(2, 2)))
    assert one.microbatch(shape) / 4 < four.microbatch(shape) < one.microbatch(shape)
    peaks = [costs.peak(shape, costs.policies(shape), 1) for costs in (one, four)]
    assert peaks[1] < peaks[0] / 2


def test_estimate_of_a_layer_is_near_the_times_it_is_made_of(llama_8b):
    """8192 tokens: the linears at 735 TFLOP/s both ways, and attention of 512 tokens, 0.77 ms."""
    times, shape = estimated_times(llama_8b), ShapeClass(16, 512, 128, 1)
    frozen = dataclasses.replace(times, adapters=AdapterTimes())
    frozen = frozen.layer(shape, (8192,), PoolSpec(1, 16)).total
    linears = 2 * 2 * 8192 * 218_103_808 / 735e12
    assert frozen == pytest.approx(linears + 0.77e-3, rel=0.1)


def test_estimated_memory_keeps_what_the_model_keeps(llama_8b):
    """A layer keeps its input, q, k, v, the output of attention, the stream, gate and up."""
    kept = estimated_memory(llama_8b).backbone.kept
    assert kept["dots"] == (2 * (4096 + 6144 + 4096 + 4096 + 2 * 14336), 2 * 7)
    assert kept["full"] == (2 * 4096, 0)


def test_estimated_memory_does_not_grow_with_the_length_of_rows(llama_8b):
    memory, pool = estimated_memory(llama_8b), PoolSpec(1, 16)
    shapes = [ShapeClass(2**15 // n, n, 128, 1) for n in (128, 2048, 32768)]
    peaks = [memory.peak(shape, pool, "dots") for shape in shapes]
    assert peaks == pytest.approx([peaks[0]] * 3, rel=0.01)
    layers = memory.resident(pool) + 32 * memory.kept(2**15, 16, "dots")
    assert peaks[0] == pytest.approx(layers + 1.25 * memory.kept(2**15, 0, "norms"), rel=0.01)


def test_the_pool_has_the_optimizer_with_the_most_moments(costs_of, tasks):
    lion = [task._replace(pool=task.pool._replace(optimizer="lion")) for task in tasks]
    assert shared_pool(lion).optimizer == "lion"
    assert shared_pool([*lion, tasks[0]]).optimizer == "adamw"
    unknown = dataclasses.replace(costs_of(tasks), pool=PoolSpec(1, 1, optimizer="adafactor"))
    with pytest.raises(PlanningError, match="adafactor"):
        unknown.update()
