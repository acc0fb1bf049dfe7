"""Costs on a replica: remat policies and the number of microbatches in flight are one choice."""

import dataclasses
import math

import numpy as np
import pytest

from jaxmux.planner.costs.cost_models import estimated_times, with_estimated_collectives
from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes
from jaxmux.planner.costs.memory_model import USABLE, MemoryModel, OnlineFit, split_stages
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing import ShapeClass

POLICIES = ("norms", "dots", "lean", "full")
SHAPE, POOL = ShapeClass(4, 1024, 128, 1), PoolSpec(2, 8)
FEATURES = np.array([1.0, SHAPE.tokens, SHAPE.tokens * SHAPE.row_len])


def random_costs(rng: np.random.Generator) -> ReplicaCosts:
    """Costs of a few layers on a few stages, with too little memory, plenty, or some between."""
    replica = Replica.uniform(int(rng.integers(1, 5)), int(rng.choice([1, 2])))
    kept = np.sort(rng.uniform(2e3, 2e5, 4))[::-1].tolist()
    linears = {
        "q_proj": (256, 256),
        "k_proj": (256, 128),
        "gate_proj": (256, 512),
        "up_proj": (256, 512),
    }
    size = BackboneSize(
        name="Llama",
        layers=replica.pp + int(rng.integers(0, 6)),
        hidden_size=256,
        vocab_size=1000,
        linears=linears,
        layer_bytes=int(rng.uniform(1e6, 1e9)),
        outside_bytes=int(rng.uniform(1e6, 1e9)),
        stream_bytes=2,
        kept={policy: (of_token, 10.0) for policy, of_token in zip(POLICIES, kept, strict=True)},
        head_block_bytes=0,
        packed=PackedBytes.of(4, 2, 64, itemsize=2),
    )
    recompute = dict(zip(POLICIES, np.sort(rng.uniform(-0.1, 0.5, 4)).tolist(), strict=True))
    times = dataclasses.replace(estimated_times(size), recompute=recompute)
    times, _ = with_estimated_collectives(times, replica)
    memory = MemoryModel(size, 2**40, OnlineFit.of_features(3), math.inf)
    working = 1.25 * memory.kept(SHAPE.tokens, POOL.rank, "norms", replica.tp)
    fit = memory.working.observe(FEATURES, working, weight=1e9)
    costs = ReplicaCosts(times, dataclasses.replace(memory, working=fit), POOL, replica)
    least = costs.peak(SHAPE, ("full",) * size.layers, 1)
    most = costs.peak(SHAPE, ("norms",) * size.layers, 2 * replica.pp)
    return with_memory(costs, (least + rng.uniform(-0.02, 1) * (most - least)) / USABLE)


def with_memory(costs: ReplicaCosts, memory: float) -> ReplicaCosts:
    memory_model = dataclasses.replace(costs.memory, memory=int(memory))
    return dataclasses.replace(costs, memory=memory_model)


def fits(costs: ReplicaCosts, policies: tuple[str, ...], in_flight: int) -> bool:
    return costs.peak(SHAPE, policies, in_flight) <= USABLE * costs.memory.memory


def stage_layers(costs: ReplicaCosts) -> list[int]:
    return costs.times.backbone.stage_layers(costs.replica)


def mixtures(costs: ReplicaCosts) -> list[tuple[str, ...]]:
    """Every choice of policies that gives some layers of a stage one policy and its other layers
    the next policy, the same in every stage."""
    stages = stage_layers(costs)
    found = []
    for more, less in zip(POLICIES, POLICIES[1:], strict=False):
        for count in range(stages[0] + 1):
            fullest = (less,) * (stages[0] - count) + (more,) * count
            found.append(tuple(p for own in stages for p in fullest[stages[0] - own :]))
    return found


def stage_seconds(costs: ReplicaCosts, policies: tuple[str, ...]) -> list[float]:
    """Seconds of both passes of each stage, added up layer by layer."""
    tp, size = costs.replica.tp, costs.times.backbone
    payload = SHAPE.tokens * size.hidden_size * size.stream_bytes
    reduced = 4 * costs.times.collective("psum", tp, payload)
    *before, last = [
        sum(
            costs.times.layer(SHAPE, (SHAPE.tokens,), POOL, policy, tp).total + reduced
            for policy in stage
        )
        for stage in split_stages(policies, stage_layers(costs))
    ]
    return [*before, last + costs.times.head(SHAPE.tokens) / tp]


@pytest.mark.parametrize("seed", range(60))
def test_microbatches_take_the_least_time_that_leaves_room_for_one_on_every_stage(seed):
    costs = random_costs(np.random.default_rng(seed))
    stages = costs.replica.pp
    found = [
        (in_flight, max(stage_seconds(costs, policies)))
        for policies in mixtures(costs)
        for in_flight in range(1, 1 + stages)
        if fits(costs, policies, in_flight)
    ]
    if not found:
        assert costs.depth(SHAPE) == 0 and costs.microbatch(SHAPE) == np.inf
        return
    deepest = max(in_flight for in_flight, _ in found)
    enough = [choice for choice in found if choice[0] == deepest]
    seconds = min(seconds for _, seconds in enough)
    assert costs.microbatch(SHAPE) == pytest.approx(seconds)
    assert costs.depth(SHAPE) == deepest


@pytest.mark.parametrize("seed", range(10))
def test_depth_policies_and_times_are_of_one_choice(seed):
    costs = random_costs(np.random.default_rng(seed))
    policies = costs.policies(SHAPE)
    assert policies is costs.policies(SHAPE)
    np.testing.assert_allclose(sum(costs.stages(SHAPE)), stage_seconds(costs, policies))
    if depth := costs.depth(SHAPE):
        assert fits(costs, policies, depth)
        costs.require(SHAPE)


def test_more_memory_never_takes_longer():
    costs = random_costs(np.random.default_rng(3))
    least = costs.peak(SHAPE, ("full",) * costs.times.backbone.layers, costs.replica.pp)
    memories = np.linspace(least, 4 * least, 100) / USABLE
    seconds = [with_memory(costs, memory).microbatch(SHAPE) for memory in memories]
    assert (np.diff(seconds) <= 1e-12).all() and seconds[-1] < seconds[1] < np.inf


def test_given_policy_has_as_many_microbatches_in_flight_as_fit():
    costs = dataclasses.replace(random_costs(np.random.default_rng(3)), remat="dots")
    policies = ("dots",) * costs.times.backbone.layers
    for wanted in range(1, 1 + costs.replica.pp):
        memory = costs.peak(SHAPE, policies, wanted) / USABLE + 2
        assert with_memory(costs, memory).depth(SHAPE) == wanted
        assert with_memory(costs, memory).policies(SHAPE) == policies
