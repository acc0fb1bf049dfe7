"""An engine grows and shrinks while its tasks train."""

import dataclasses
import itertools
import time

import jax
import numpy as np
import pytest

from jaxmux.engine.devices import programs as device_programs
from jaxmux.engine.engine_options import EngineSize
from jaxmux.engine.state import stored_state
from jaxmux.errors import OutOfDeviceMemory
from tests.engine.conftest import SMALL, random_samples

# Most of a changed adapter's change that may come from another order of sums.
TOLERANCE = 1e-4
MODULES = ("self_attn.q_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def tasks(make_task):
    return {
        name: make_task(name, rank=2 + i, dropout=0.1, batch_size=5 + 2 * i, steps=6)
        for i, name in enumerate("abc")
    }


@pytest.fixture(scope="module")
def calm(tasks, make_engine, train):
    engine = make_engine(*tasks.values(), shape=SMALL, round_tokens=150)
    updates = train(engine)
    return updates, {name: engine.adapter(name) for name in tasks}


@pytest.fixture
def assert_as_calm(calm, tasks):
    def check(engine, updates):
        for name, expected in calm[0].items():
            own = [u for u in updates if u.task == name]
            assert [u.task_step for u in own] == [u.task_step for u in expected]
            assert [u.loss for u in own] == pytest.approx([u.loss for u in expected], rel=1e-5)
            before = jax.tree.leaves(tasks[name].make_adapter())
            found, wanted = (jax.tree.leaves(x) for x in (engine.adapter(name), calm[1][name]))
            change = sum(np.square(x - y).sum() for x, y in zip(wanted, before, strict=True))
            error = sum(np.square(x - y).sum() for x, y in zip(found, wanted, strict=True))
            assert error**0.5 < TOLERANCE * change**0.5

    return check


def test_programs_for_another_size_are_compiled_beside_training(tasks, make_engine, compiles):
    # The first test of the file: later ones have engines of the sizes that it compiles.
    engine = make_engine(shape=SMALL, modules=MODULES)
    engine.warm_up()
    held_out = random_samples(99, 3, (20, 90))
    both = [dataclasses.replace(task, eval_samples=held_out) for task in tasks.values()][:2]
    engine.register_tasks(both)
    for size in (EngineSize(5, 2), EngineSize(4, 1)):
        programs = engine.compile_ahead(size)
        while not programs.ready:
            engine.train_round()
            # The compiler needs the processors more.
            time.sleep(0.2)
        compiles.clear()
        engine.resize(size, programs)
        assert engine.size == size
        engine.resume(engine.suspend("b"))
        engine.begin_evaluation(engine.names)
        engine.train_round()
        engine.drain()
        engine.result("a")()
        assert compiles == [] and engine.take_evaluations()
    with pytest.raises(ValueError, match="programs are for .*slots=4, rows=1.* gets .*slots=3"):
        engine.resize(EngineSize(3, 1), programs)


def test_tasks_go_on_in_any_size(tasks, make_engine, assert_as_calm):
    engine = make_engine(*tasks.values(), shape=SMALL, round_tokens=150)
    sizes = itertools.cycle([EngineSize(5, 2), EngineSize(4, 1)])
    updates = []
    while not engine.finished:
        updates += engine.train_round()
        engine.resize(next(sizes))
    updates += engine.drain()
    assert_as_calm(engine, updates)


def test_a_task_moves_when_its_slot_goes(tasks, make_task, make_engine, train, assert_same_bits):
    engine = make_engine(*tasks.values(), shape=SMALL)
    engine.resize(EngineSize(5, 2))
    engine.register_tasks([make_task("d", steps=6), make_task("e", steps=6)])
    engine.train_round()
    engine.drain()
    engine.release("a")
    assert sorted(number for number, _ in engine._slots) == [1, 2, 3, 4]
    before = {name: engine.task_arrays(name) for name in "bcde"}
    engine.resize(EngineSize(4, 1))
    assert engine.size == (4, 1) and sorted(number for number, _ in engine._slots) == [0, 1, 2, 3]
    for name, arrays in before.items():
        assert_same_bits(engine.task_arrays(name), arrays)
    with pytest.raises(ValueError, match="4 tasks have no room in 3 slots"):
        engine.resize(EngineSize(3, 1))
    assert [u.task_step for u in train(engine)["e"]] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "failing",
    [pytest.param(0, marks=pytest.mark.slow), 3],
    ids=["first array", "a later array"],
)
def test_a_size_for_which_there_is_no_memory_changes_nothing(
    failing, tasks, make_engine, monkeypatch, assert_same_bits, train
):
    engine = make_engine(*tasks.values(), shape=SMALL)
    updates = engine.train_round() + engine.drain()
    before = {name: engine.task_arrays(name) for name in tasks}
    moved, seen = stored_state.moved, itertools.count()

    def full(*arguments):
        if next(seen) == failing:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return moved(*arguments)

    monkeypatch.setattr(stored_state, "moved", full)
    with pytest.raises(OutOfDeviceMemory, match="5 slots and microbatches of 256 tokens"):
        engine.resize(EngineSize(5, 2))
    assert engine.size == (4, 1)
    for name, arrays in before.items():
        assert_same_bits(engine.task_arrays(name), arrays)
    assert len(updates) + sum(map(len, train(engine).values())) == 18


def test_a_size_for_whose_training_step_there_is_no_memory_changes_nothing(
    tasks, make_engine, monkeypatch, train
):
    engine = make_engine(*tasks.values(), shape=SMALL)
    updates = engine.train_round() + engine.drain()
    programs = engine.compile_ahead(EngineSize(5, 2))
    while not programs.ready:
        time.sleep(0.01)

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(device_programs.CompiledStep, "try_memory", full)
    with pytest.raises(OutOfDeviceMemory, match="5 slots and microbatches of 256 tokens"):
        engine.resize(EngineSize(5, 2), programs)
    assert engine.size == (4, 1)
    assert len(updates) + sum(map(len, train(engine).values())) == 18
