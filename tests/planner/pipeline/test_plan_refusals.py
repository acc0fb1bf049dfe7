"""Tasks that cannot be planned are refused with the change that would help."""

import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.costs.cost_models import estimated_models
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import ONE_DEVICE, Replica
from jaxmux.planner.pipeline import make_plan

GIB = 2**30


@pytest.mark.long
def test_task_that_fits_nowhere_is_named_with_the_change_that_helps(plan_of, tasks):
    with pytest.raises(PlanningError, match=r"task 'task0' does not fit even alone on pp1") as e:
        plan_of(tasks, memory=17 * GIB)
    stages = int(str(e.value).split(" pipeline stages")[0].split()[-1])
    assert plan_of(tasks, Replica.uniform(stages, 1), memory=17 * GIB)
    with pytest.raises(PlanningError, match="does not fit"):
        plan_of(tasks, Replica.uniform(stages - 1, 1), memory=17 * GIB)


def test_tasks_that_do_not_fit_together_are_refused_with_the_number_that_do(plan_of, tasks):
    """The pool's rank is the highest of all."""
    wide = [task._replace(pool=PoolSpec(1, 256)) for task in tasks]
    with pytest.raises(
        PlanningError,
        match=r"task 'task2' does not fit beside 'task0', 'task1': .* 4 slots .* at most 2 slots",
    ):
        plan_of(wide, memory=40 * GIB)


def test_row_length_that_no_row_can_have_is_refused(plan_of, tasks, request_4096):
    with pytest.raises(PlanningError, match="row_len=300 is not a power of two"):
        plan_of(tasks, request=request_4096._replace(row_len=300))


@pytest.mark.long
def test_policy_that_needs_too_much_memory_is_refused(plan_of, tasks):
    with pytest.raises(PlanningError, match="remat='dots' needs .* fit with remat='auto'"):
        plan_of(tasks, memory=20 * GIB, remat="dots")
    assert plan_of(tasks, memory=20 * GIB)


def test_sample_beyond_the_row_is_named(plan_of, tasks, request_4096):
    longest = max(tasks[3].lengths)
    request = request_4096._replace(row_len=1024)
    with pytest.raises(PlanningError, match=f"'task3': its longest sample takes {longest} places"):
        plan_of([tasks[3]], request=request)


def test_no_tasks_are_refused(llama_8b, costs_of, tasks, request_4096):
    source = estimated_models(llama_8b, None, ONE_DEVICE).source
    with pytest.raises(PlanningError, match="there are no tasks"):
        make_plan([], request_4096, costs_of(tasks), source, 1)


@pytest.mark.parametrize("text", ["pp4,tp2", "tp2,pp4", "pp=4, tp=2"])
def test_replica_is_read_in_any_order(text):
    assert Replica.parse(text) == Replica.uniform(4, 2)


@pytest.mark.parametrize("text", ["pp1,tp1", "pp4,tp2", "pp1,dp4", "pp2,dp2,fsdp4,tp8"])
def test_replica_is_read_as_it_is_written(text):
    assert str(Replica.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ep2", "'ep2' is no axis"),
        ("", "'' is no axis"),
        ("pp4,pp2", "pp is given twice"),
        ("tp0", "tp should be at least 1"),
    ],
)
def test_malformed_replica_is_refused(text, message):
    with pytest.raises(PlanningError, match=message):
        Replica.parse(text)


def test_impossible_replica_is_refused_with_the_nearest_possible_one():
    sizes = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "hidden_size": 4096,
    }
    Replica.uniform(32, 16, 3, 64).require(32, sizes)
    with pytest.raises(PlanningError, match="33 stages for 32 layers.* fit with pp32"):
        Replica.uniform(33, 1).require(32, sizes)
    with pytest.raises(PlanningError, match="tp12 does not divide num_attention_heads=32.* is tp8"):
        Replica.uniform(1, 12).require(32, sizes)
    with pytest.raises(PlanningError, match="tp4 does not divide num_key_value_heads=6.* is tp2"):
        Replica.uniform(1, 4).require(32, sizes | {"num_key_value_heads": 6})
    with pytest.raises(PlanningError, match="fsdp3 does not divide hidden_size=4096.* is fsdp2"):
        Replica.uniform(fsdp=3).require(32, sizes)
