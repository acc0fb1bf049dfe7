"""An engine that grows and shrinks with its load."""

import dataclasses
import itertools
import logging
import time

import jax
import numpy as np
import pytest

from jaxmux.engine import EngineSize
from jaxmux.engine.devices import programs as device_programs
from jaxmux.planner import PlanningError
from jaxmux.server import size as elastic_size
from jaxmux.server.size import ElasticSize, fitting_size

from .test_live_training import live_with, settle, train_to_the_end

MOST = EngineSize(12, 4)
# The limits of sizes in the tests of `fitting_size`.
SMALLEST, LARGEST = 2, 12


def reachable_sizes():
    """Every size that can be reached."""
    found = {SMALLEST}
    while True:
        more = {fitting_size(n, s, SMALLEST, LARGEST) for n in range(30) for s in found} - found
        if not more:
            return sorted(found)
        found |= more


def test_the_size_suffices_and_is_not_wasted():
    assert len(reachable_sizes()) < 7
    for present, needed in itertools.product(reachable_sizes(), range(30)):
        size = fitting_size(needed, present, SMALLEST, LARGEST)
        assert SMALLEST <= size <= LARGEST
        assert size >= min(needed, LARGEST)
        assert size == SMALLEST or 4 * needed > size
        assert fitting_size(needed, size, SMALLEST, LARGEST) == size


def test_a_need_that_hardly_changes_changes_nothing():
    for present, needed in itertools.product(reachable_sizes(), range(1, 30)):
        size = fitting_size(needed, present, SMALLEST, LARGEST)
        for other in range(-(-needed // 2), min(needed + 1, size + 1)):
            assert fitting_size(other, size, SMALLEST, LARGEST) == size or 4 * other <= size


class FakeEngine:
    """An engine whose sizes cost nothing; programs are compiled when `compile` is called."""

    def __init__(self, make_live_engine):
        self.backbone = make_live_engine().backbone
        self.options = make_live_engine().options
        self.size, self.rounds, self.microbatches_at_once = EngineSize(3, 1), 0, 1
        self.begun = []
        # The most slots times rows for which there is memory, by prediction and in truth.
        self.predicted = self.memory = 1000

    def compile_ahead(self, size):
        self.begun.append(size)
        self.programs = type("Programs", (), {"sizes": (self.size, size), "ready": False})()
        return self.programs

    def compile(self):
        self.programs.ready = True

    def refusal_of(self, size):
        return "no memory" if size.slots * size.rows > self.predicted else None

    def resize(self, size, programs):
        assert programs.ready and programs.sizes == (self.size, size)
        if size.slots * size.rows > self.memory:
            raise elastic_size.OutOfDeviceMemory("too little memory")
        self.size = size


@pytest.fixture
def engine(make_live_engine):
    return FakeEngine(make_live_engine)


def test_it_grows_when_its_programs_are_compiled(engine):
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    assert not elastic.adjust(2, 100) and engine.begun == []
    # Three of three places are taken: the next size is compiled, and not taken yet.
    assert not elastic.adjust(3, 100) and engine.begun == [(6, 1)]
    engine.compile()
    assert not elastic.adjust(3, 100) and engine.size == (3, 1)
    assert elastic.adjust(4, 100) and engine.size == (6, 1)
    # A round of more than a microbatch, in which more tasks want to train than ever can.
    assert not elastic.adjust(50, 300) and engine.begun[-1] == (12, 4)
    engine.compile()
    assert elastic.adjust(50, 300) and engine.size == (12, 4)
    assert not elastic.adjust(50, 9000) and len(engine.begun) == 2


def test_it_shrinks_when_less_has_sufficed_for_some_time(engine):
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    engine.size = EngineSize(12, 4)
    for tasks, rounds in ((1, 3), (5, 4), (1, 3)):
        for _ in range(rounds):
            engine.rounds += 1
            assert not elastic.adjust(tasks, 400)
    # Five tasks were trained less than five rounds ago.
    assert engine.begun == []
    while not engine.begun:
        engine.rounds += 1
        elastic.adjust(1, 400)
    engine.compile()
    assert elastic.adjust(1, 400) and engine.size == (3, 4)


def test_a_load_that_has_passed_is_not_grown_for(engine):
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    elastic.adjust(9, 100)
    engine.compile()
    for _ in range(20):
        engine.rounds += 1
        assert not elastic.adjust(1, 100)
    assert engine.size == (3, 1)


def test_the_next_size_keeps_the_rows(engine):
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    engine.size = EngineSize(3, 4)
    elastic.adjust(3, 100)
    engine.compile()
    assert elastic.adjust(4, 100) and engine.begun == [(6, 4)]


def grow(elastic, engine, tasks, tokens, rounds=20):
    for _ in range(rounds):
        engine.rounds += 1
        elastic.adjust(tasks, tokens)
        if engine.begun:
            engine.compile()


def test_a_size_without_memory_is_not_tried_again(engine, caplog):
    engine.memory = 6
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        grow(elastic, engine, 9, 100)
    assert [r.message for r in caplog.records] == ["too little memory; the engine keeps 3 slots"]
    assert engine.begun == [(12, 1), (6, 1)] and engine.size == (6, 1)
    assert elastic.short_of_memory
    # A quarter of the places is wanted.
    grow(elastic, engine, 1, 100, rounds=1)
    assert not elastic.short_of_memory


def test_it_grows_as_far_as_memory_is_predicted_to_suffice(engine):
    """More places come before larger microbatches."""
    engine.predicted = 13
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    grow(elastic, engine, 9, 1000)
    assert engine.size == (12, 1) and elastic.short_of_memory
    # Rounds have shown that they need less.
    engine.predicted = 24
    grow(elastic, engine, 9, 1000)
    assert engine.size == (12, 2)


def test_a_size_that_ran_out_of_memory_in_a_round_is_not_taken_again(engine):
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    grow(elastic, engine, 9, 100)
    assert engine.size == (12, 1)
    engine.size = EngineSize(6, 1)
    elastic.note_full(EngineSize(12, 1))
    grow(elastic, engine, 9, 100)
    assert engine.size == (6, 1) and elastic.short_of_memory
    grow(elastic, engine, 9, 300)
    assert engine.size == (6, 4)


def test_an_engine_whose_replicas_have_different_shapes_keeps_its_size(engine):
    shapes = (engine.options.shape,)
    engine.options = dataclasses.replace(engine.options, replica_shapes=shapes)
    with pytest.raises(PlanningError, match="different shapes keeps its size"):
        ElasticSize(engine, MOST, quiet_rounds=5)


def test_a_microbatch_grows_when_a_round_has_more_than_keep_the_devices_busy(engine):
    engine.microbatches_at_once = 4
    elastic = ElasticSize(engine, MOST, quiet_rounds=5)
    row_len = engine.options.shape.row_len
    assert not elastic.adjust(2, 4 * row_len) and engine.begun == []
    assert not elastic.adjust(2, 5 * row_len) and engine.begun == [(3, 2)]


def test_a_smaller_size_than_the_engine_has_is_refused(engine):
    with pytest.raises(PlanningError, match="should be at least"):
        ElasticSize(engine, EngineSize(2, 1), quiet_rounds=5)


@pytest.mark.slow
def test_tasks_get_what_they_get_without_growth(make_live, tasks):
    """Up to the order of sums, which moves an adapter by far less than its training did. The server
    simulation, also in CI, has microbatches that grow too."""
    calm, live = make_live(), make_live(most=EngineSize(5, 1), quiet_rounds=2)
    sizes = set()
    for own in (calm, live):
        for name in "abcde":
            own.register(tasks[name].task)
        own.step()
        settle(own)
    for _ in range(10):
        live.step()
        sizes.add(live._engine.size)
        while live._size._ahead and not live._size._ahead.ready:
            time.sleep(0.001)
    assert max(size.slots for size in sizes) == 5
    for own in (calm, live):
        train_to_the_end(own, *"abcde")
    for name in "abcde":
        expected, found = (jax.tree.leaves(own.adapter(name)) for own in (calm, live))
        before = jax.tree.leaves(tasks[name].make_adapter())
        change = sum(np.square(x - y).sum() for x, y in zip(expected, before, strict=True))
        error = sum(np.square(x - y).sum() for x, y in zip(found, expected, strict=True))
        assert error**0.5 < 1e-4 * change**0.5


def test_tasks_that_wait_are_told_of_places_to_come(make_live, tasks, monkeypatch):
    live = make_live(most=EngineSize(6, 1))
    compiled = FakeSize((EngineSize(3, 1), EngineSize(6, 1)))
    monkeypatch.setattr(live._engine, "compile_ahead", lambda size: compiled)
    monkeypatch.setattr(live._engine, "resize", lambda size, programs: None)
    events = live.events()
    for name in "abcd":
        live.register(dataclasses.replace(tasks[name].task, steps=50))
    live.step()
    settle(live)
    for _ in range(3):
        live.step()
    (waits,) = (name for name in "abcd" if live.status(name).state == "queued")
    wanted = "all 3 places are taken; programs for 6 places are being compiled"
    assert live.status(waits).reason == wanted
    compiled.ready = True
    live.step()
    assert live.status(waits).reason == "all 3 places are taken"
    live.close()
    live.run()
    told = [event.fields.get("reason") for event in events if event.task == waits]
    assert told.count(wanted) == 1


class FakeSize:
    """Programs of another size, which are compiled when a test says so."""

    def __init__(self, sizes):
        self.sizes, self.ready = sizes, False


def test_training_goes_on_when_the_device_runs_out_of_memory(make_live, tasks, monkeypatch, caplog):
    """With as many places as there is memory for; the tasks that came last wait."""
    # No layer can recompute more.
    monkeypatch.setattr(device_programs, "leaner", lambda remat: None)
    live = live_with(make_live, tasks, *"abd")
    accumulate = device_programs.accumulate

    def full(*arguments):
        if len(arguments[5]) > 1:
            accumulate(*arguments)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return accumulate(*arguments)

    full.lower = device_programs.accumulate.lower
    monkeypatch.setattr(device_programs, "accumulate", full)
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        live.step()
    assert caplog.records[-1].message.endswith("training goes on with 1 of 3 slots")
    assert [live.status(name).state for name in "abd"] == ["running", "queued", "queued"]
    assert live.status("d").reason == "the device ran out of memory; the task waits for a place"
    live.step()
    # What happened is still told when the reason is another one.
    assert live.status("d").reason == "the device ran out of memory; the only place is taken"
    train_to_the_end(live, *"abd")
    for name in "abd":
        assert live.status(name).step == tasks[name].steps


def test_places_are_halved_until_there_is_memory(make_live, monkeypatch, caplog):
    live, tried = make_live(), []

    def resize(size):
        tried.append(size)
        if size.slots > 1:
            raise elastic_size.OutOfDeviceMemory("too little memory")

    monkeypatch.setattr(type(live._engine), "size", EngineSize(12, 1))
    monkeypatch.setattr(live._engine, "resize", resize)
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        live._leave_slots(elastic_size.OutOfDeviceMemory("full"))
    assert tried == [(6, 1), (3, 1), (1, 1)]
    assert caplog.records[-1].message == "full; training goes on with 1 of 12 slots"
