"""Llama-3.1-8B, tasks with random lengths and plans for them, shared by the tests of plans."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from jaxmux.planner.costs.cost_models import estimated_models
from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.packing import ShapeRequest
from jaxmux.planner.pipeline import Plan, TaskLoad, make_plan, shared_pool

# Rounds of every plan.
ROUNDS = 4


@pytest.fixture(scope="session")
def llama_8b() -> BackboneSize:
    """Sizes of Llama-3.1-8B in bfloat16."""
    d, kv, f = 4096, 1024, 14336
    linears = {
        "self_attn.q_proj": (d, d),
        "self_attn.k_proj": (d, kv),
        "self_attn.v_proj": (d, kv),
        "self_attn.o_proj": (d, d),
        "mlp.gate_proj": (d, f),
        "mlp.up_proj": (d, f),
        "mlp.down_proj": (f, d),
    }
    weights = 2 * sum(k * n for k, n in linears.values())
    outside = 2 * 2 * 128256 * d
    packed = PackedBytes.of(32, 8, 128, itemsize=2)
    return BackboneSize("Llama", 32, d, 128256, linears, weights, outside, 2, {}, 2**29, packed)


@pytest.fixture(scope="session")
def request_4096() -> ShapeRequest:
    """Microbatches of 4096 tokens."""
    return ShapeRequest(tokens=4096, least_chunk_len=128)


@pytest.fixture(scope="session")
def draw_tasks() -> Callable[..., tuple[TaskLoad, ...]]:
    """(tasks, samples) -> tasks whose mean lengths differ like data sets, from 100 to 800 tokens.

    `samples` is the number of samples of a global batch.
    """

    @functools.cache
    def draw(tasks: int = 4, samples: int = 32) -> tuple[TaskLoad, ...]:
        rng = np.random.default_rng(0)
        loads = []
        for i, mean in enumerate(np.geomspace(100, 800, tasks)):
            sizes = np.clip(rng.lognormal(np.log(mean), 0.4, (ROUNDS, samples)), 16, 2000)
            batches = sizes.astype(int).tolist()
            lengths = [length for batch in batches for length in batch]
            loads.append(TaskLoad(f"task{i}", PoolSpec(1, 2**i), samples, 100, lengths, batches))
        return tuple(loads)

    return draw


@pytest.fixture(scope="session")
def tasks(draw_tasks) -> tuple[TaskLoad, ...]:
    """Four tasks of 32 samples per global batch."""
    return draw_tasks()


@pytest.fixture(scope="session")
def costs_of(llama_8b):
    """(tasks, replica, memory, remat) -> estimated costs on H200s of `memory` bytes."""

    def costs(
        tasks: Sequence[TaskLoad],
        replica: Replica = ONE_DEVICE,
        memory: int | None = None,
        remat: str = "auto",
    ) -> ReplicaCosts:
        models = estimated_models(llama_8b, memory, replica)
        return ReplicaCosts(models.times, models.memory, shared_pool(tasks), replica, remat)

    return costs


@pytest.fixture(scope="session")
def plan_of(llama_8b, costs_of, request_4096):
    """(tasks, replica, request, memory, remat) -> the plan for `ROUNDS` rounds."""

    def plan(
        tasks: Sequence[TaskLoad],
        replica: Replica = ONE_DEVICE,
        request: ShapeRequest = request_4096,
        memory: int | None = None,
        remat: str = "auto",
    ) -> Plan:
        source = estimated_models(llama_8b, memory, replica).source
        costs = costs_of(tasks, replica, memory, remat)
        return make_plan(tasks, request, costs, source, ROUNDS)

    return plan


@pytest.fixture(scope="session")
def plan(plan_of, tasks) -> Plan:
    """The plan of the four tasks on four stages of two devices."""
    return plan_of(tasks, Replica.uniform(4, 2))


@pytest.fixture(scope="session")
def plan_of_two_stages(plan_of, tasks) -> Plan:
    """The plan of the four tasks on two stages of one device."""
    return plan_of(tasks, Replica.uniform(2, 1))


@pytest.fixture(scope="session")
def plan_of_one_device(plan_of, tasks) -> Plan:
    """The plan of the four tasks on one device."""
    return plan_of(tasks)
