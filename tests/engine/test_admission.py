"""A task that does not fit into the device's memory is refused; those in training go on."""

import dataclasses
import itertools

import pytest

from jaxmux.engine import Engine, EngineOptions, engine
from jaxmux.engine.tasks.prepared_task import size_of
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.admission import Admission
from jaxmux.planner.costs.cost_models import estimated_memory, estimated_times
from jaxmux.planner.costs.pool_spec import PoolSpec, merge_pool_specs
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from tests.engine.conftest import SMALL

RESERVED = PoolSpec(1, 8, ())


@pytest.fixture
def make_guarded(backbone):
    """An engine in whose memory just the given tasks fit."""

    def make(*tasks) -> Engine:
        size = size_of(backbone.config, backbone.compute_dtype)
        memory, pool = estimated_memory(size), merge_pool_specs([t.pool for t in tasks], RESERVED)
        needed = memory.peak(SMALL, pool, "full")
        memory = dataclasses.replace(memory, memory=int(needed / 0.97) + 1)
        costs = ReplicaCosts(estimated_times(size), memory, pool, Replica())
        guard = Admission(costs, SMALL, more_stages=False)
        return Engine(backbone, EngineOptions(SMALL, RESERVED), guard)

    return make


def test_a_task_beyond_memory_is_refused_and_the_others_train_on(
    make_guarded, make_engine, make_task, train, assert_same_bits
):
    one, two, three = (make_task(name) for name in ("one", "two", "three"))
    guarded, free = make_guarded(one, two), make_engine(one, two, shape=SMALL)
    guarded.register_tasks([one, two])
    for each in (guarded, free):
        each.train_round()
        each.drain()
    message = "task 'three' does not fit beside 'one', 'two': .* at most 2 slots"
    with pytest.raises(PlanningError, match=message):
        guarded.register_tasks([three])
    assert guarded.names == ["one", "two"]
    train(guarded), train(free)
    for name in ("one", "two"):
        assert_same_bits(guarded.adapter(name), free.adapter(name))
    guarded.release("one")
    guarded.register_tasks([three])
    assert guarded.names == ["two", "three"]


def test_what_rounds_were_seen_to_need_counts(make_guarded, make_task, train, monkeypatch):
    one, two = make_task("one", steps=2), make_task("two")
    guarded = make_guarded(one, two)
    before = guarded.admission.costs.memory
    peaks = iter([1, *[2 * before.memory] * 10])
    monkeypatch.setattr(engine, "device_peak", lambda: next(peaks))
    guarded.register_tasks([one])
    train(guarded)
    after = guarded.admission.costs.memory
    assert after.working.observations == before.working.observations + 1
    with pytest.raises(PlanningError, match="task 'two' does not fit"):
        guarded.register_tasks([two])


def test_a_restored_round_that_only_awaits_its_update_is_finished(
    make_guarded, make_task, train, monkeypatch
):
    """Nothing is left to compile for, and so no peak to learn from."""
    # A batch of one sample takes one microbatch.
    task = make_task("one", steps=1, batch_size=1)
    first, second = make_guarded(task), make_guarded(task)
    first.register_tasks([task])
    first.train_round(stop=lambda: True)
    accumulated = first.accumulated("one")
    assert accumulated == list(range(task.task.batch_size))

    monkeypatch.setattr(engine, "device_peak", itertools.count(1).__next__)
    second.register_tasks([task])
    second.restore_task("one", first.task_arrays("one"), first.progress("one"), accumulated)
    before = second.admission.costs.memory
    (update,) = train(second)["one"]
    assert update.task_step == 1 and second.progress("one").status == "succeeded"
    assert second.admission.costs.memory == before


def test_without_a_known_memory_every_task_is_admitted(make_engine, make_task):
    assert make_engine(make_task("one")).admission is None
