"""Tasks are admitted while memory lasts, and refused with the changes that would make them fit."""

import dataclasses
import re

import pytest
from backbone_sizes import llama_8b

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.costs.cost_models import estimated_memory, estimated_times
from jaxmux.planner.costs.pool_spec import KindSize, PointSize, PoolSpec, merge_pool_specs
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.packing import ShapeClass

GIB = 2**30
SHAPE = ShapeClass(rows=8, row_len=1024, chunk_len=128, max_sequences=1)


def admission(memory: int, replica: Replica = ONE_DEVICE, **given) -> Admission:
    size = llama_8b()
    times, memory_model = estimated_times(size), estimated_memory(size, memory)
    costs = ReplicaCosts(times, memory_model, PoolSpec(1, 1), replica)
    return Admission(costs, SHAPE, **given)


def named(ranks) -> dict[str, PoolSpec]:
    return {f"task{i}": PoolSpec(1, rank) for i, rank in enumerate(ranks)}


def fits(memory: int, ranks, shape: ShapeClass = SHAPE) -> bool:
    """Whether weights, 16 bytes per parameter, the inputs of the layers and the model's working
    memory take at most 97% of the memory."""
    costs = admission(memory).costs
    size = costs.memory.backbone
    parameters = 32 * len(ranks) * max(ranks) * sum(k + n for k, n in size.linears.values())
    kept = 32 * shape.tokens * 2 * 4096
    working = float(costs.memory.working.coefficients() @ [1.0, shape.tokens, 0.0])
    weights = 32 * size.layer_bytes + size.outside_bytes
    needed = weights + 16 * parameters + kept + working
    return needed <= 0.97 * memory


def refusal(guard: Admission, tasks: dict[str, PoolSpec]) -> str:
    with pytest.raises(PlanningError) as e:
        guard.require(tasks)
    return str(e.value)


@pytest.mark.parametrize("memory", [28 * GIB, 32 * GIB, 48 * GIB])
def test_tasks_are_admitted_until_the_first_that_does_not_fit(memory):
    guard = admission(memory)
    ranks = [16, 64, 32, 128, 64, 256, 64, 64, 256, 64, 64, 64]
    for count in range(1, len(ranks) + 1):
        tasks = named(ranks[:count])
        if fits(memory, ranks[:count]):
            guard.require(tasks)
            continue
        first = next(k for k in range(1, count + 1) if not fits(memory, ranks[:k]))
        message = refusal(guard, tasks)
        assert message.startswith(f"task 'task{first - 1}' does not fit beside 'task0'")
        break
    assert 2 < count < len(ranks)


def test_the_proposed_changes_are_the_smallest():
    ranks = [64] * 8
    memory = 38 * GIB
    message = refusal(admission(memory, more_stages=False), named(ranks))
    slots, rank, tokens = (
        int(re.search(pattern, message)[1])
        for pattern in (r"at most (\d+) slots", r"of at most (\d+)", r"at most (\d+) tokens")
    )
    assert fits(memory, [64] * slots) and not fits(memory, [64] * (slots + 1))
    assert fits(memory, [rank] * 8) and not fits(memory, [rank + 1] * 8)
    rows = tokens // SHAPE.row_len
    fewer, more = (dataclasses.replace(SHAPE, rows=r) for r in (rows, rows + 1))
    assert fits(memory, ranks, fewer) and not fits(memory, ranks, more)
    assert "stages" not in message


def test_more_stages_are_proposed_where_messages_may():
    message = refusal(admission(16 * GIB), named([16]))
    assert message.startswith("task 'task0' does not fit even alone on pp1,tp1")
    stages = int(re.search(r"(\d+) pipeline stages", message)[1])
    admission(16 * GIB, Replica.uniform(stages, 1)).require(named([16]))
    refusal(admission(16 * GIB, Replica.uniform(stages - 1, 1)), named([16]))


def test_shorter_samples_are_proposed_where_a_row_is_too_long():
    shape = ShapeClass(rows=1, row_len=32768, chunk_len=128, max_sequences=1)
    guard = dataclasses.replace(admission(26 * GIB), shape=shape, tokens=4096)
    longest = int(re.search(r"max_length=(\d+)", refusal(guard, named([16])))[1])
    assert fits(26 * GIB, [16], dataclasses.replace(shape, row_len=longest))
    assert not fits(26 * GIB, [16], dataclasses.replace(shape, row_len=2 * longest))


def test_a_later_task_that_does_not_fit_alone_is_named():
    message = refusal(admission(28 * GIB), named([16, 16, 4096]))
    assert message.startswith("task 'task2' does not fit even alone")


def test_tasks_that_train_already_are_not_refused():
    live = named([16, 16, 16])
    message = refusal(admission(2**34), {"late": PoolSpec(1, 16)})
    assert message.startswith("task 'late' does not fit even alone")
    guard = admission(28 * GIB)
    with pytest.raises(PlanningError, match="'late' does not fit beside 'task0', 'task1', 'task2'"):
        guard.require({"late": PoolSpec(1, 128)}, live)
    guard.require({"late": PoolSpec(1, 16)}, live)


def test_reserved_slots_and_ranks_count():
    tasks = named([16])
    admission(28 * GIB).require(tasks)
    refusal(admission(28 * GIB, reserved=PoolSpec(64, 64)), tasks)


@pytest.mark.long
@pytest.mark.parametrize("memory", [28 * GIB, 48 * GIB])
def test_a_size_is_refused_if_its_rounds_do_not_fit(memory):
    guard = admission(memory, reserved=PoolSpec(1, 64), more_stages=False)
    found = []
    for slots in (1, 2, 4, 8, 16, 32, 64):
        for rows in (1, 4, 16):
            shape = dataclasses.replace(SHAPE, rows=rows)
            reason = guard.refusal(slots, rows)
            assert (reason is None) == fits(memory, [64] * slots, shape)
            assert reason is None or "usable are" in reason
            found.append(reason is None)
    assert any(found) and not all(found)


def test_a_size_is_refused_if_it_does_not_fill_the_pipeline():
    guard = admission(14 * GIB, Replica.uniform(2, 1), reserved=PoolSpec(1, 16))
    rows = next(rows for rows in range(1, 64) if guard.refusal(1, rows))
    assert "microbatches" in guard.refusal(1, rows) and "in flight" in guard.refusal(1, rows)


def test_observed_peaks_decide():
    guard, tasks = admission(26 * GIB), named([16, 16])
    guard.require(tasks)
    pools = list(tasks.values())
    pool = merge_pool_specs(pools)
    expected = guard.costs.memory.peak(SHAPE, pool, "full")
    for _ in range(20):
        guard = guard.observe(pools, "full", int(expected + 8 * GIB))
    assert guard.costs.memory.peak(SHAPE, pool, "full") > expected + 5 * GIB
    refusal(guard, tasks)


def test_pools_are_merged_to_the_highest_rank_and_the_optimizer_with_most_moments():
    one = PoolSpec(1, 8, ("a",), False, "lion")
    two = PoolSpec(1, 64, ("b", "a"), True, "sgd")
    assert merge_pool_specs([one]) == one
    assert merge_pool_specs([one, two]) == PoolSpec(2, 64, ("a", "b"), True, "sgd")
    assert merge_pool_specs([one, PoolSpec(1, 1, None)]) == PoolSpec(2, 8, None, False, "adamw")
    assert merge_pool_specs([one], PoolSpec(4, 16, ())).slots == 4


def test_what_changes_both_ends_of_the_backbone_needs_one_stage():
    point = PointSize("both", 0, 8, at_head=True, at_both_ends=True)
    tasks = {"a": PoolSpec(1, 1), "b": PoolSpec(1, 1, others=(KindSize("rows", 1, (point,)),))}
    admission(80 * GIB, Replica.uniform(tp=2)).require(tasks)
    message = refusal(admission(80 * GIB, Replica.uniform(pp=2)), tasks)
    assert message.startswith("task 'b': the adapter changes the backbone's embedding and its head")
