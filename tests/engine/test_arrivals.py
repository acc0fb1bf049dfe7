"""Tasks come, go, pause and go on while rounds are under way, without a wait of the devices."""

import numpy as np
import pytest

from tests.engine.conftest import SMALL

STEPS = {"a": 5, "b": 3, "c": 6, "d": 4, "e": 2}


@pytest.fixture(scope="module")
def tasks(make_task):
    return {
        name: make_task(name, rank=2 + i, dropout=0.1, batch_size=3 + i, steps=steps)
        for i, (name, steps) in enumerate(STEPS.items())
    }


@pytest.fixture(
    scope="module",
    params=[pytest.param(None, marks=pytest.mark.slow), 60],
    ids=["whole batches", "parts of batches"],
)
def options(request):
    return {"shape": SMALL, "round_tokens": request.param}


@pytest.fixture(scope="module")
def alone(tasks, options, make_engine, train):
    """Each task's updates and final arrays, trained alone."""
    found = {}
    for name, task in tasks.items():
        engine = make_engine(task, **options)
        updates = train(engine)[name]
        found[name] = updates, engine.task_arrays(name)
    return found


def test_whatever_comes_and_goes_every_task_gets_the_bits_it_gets_alone(
    tasks, options, alone, make_engine, drive_at_random, assert_same_bits
):
    updates, arrays = drive_at_random(make_engine(**options), tasks, seed=0)
    for name, (expected, own) in alone.items():
        assert [u._replace(round=0) for u in updates[name]] == [
            u._replace(round=0) for u in expected
        ]
        assert_same_bits(arrays[name], {k: own[k] for k in arrays[name]})


def test_tasks_that_fit_the_pool_compile_nothing(tasks, make_engine, compiles):
    engine = make_engine(tasks["a"], tasks["b"], shape=SMALL)
    engine.train_round()
    engine.resume(engine.suspend("b"))
    engine.release("b")
    engine.train_round()
    before = len(compiles)
    engine.register_tasks([tasks["c"]])
    engine.train_round()
    suspended = engine.suspend("a")
    engine.train_round()
    engine.register_tasks([tasks["b"], tasks["d"]])
    engine.train_round()
    engine.resume(suspended)
    engine.train_round()
    assert compiles[before:] == []


def test_results_of_a_task_that_has_left_are_still_returned(tasks, make_engine):
    engine = make_engine(tasks["a"], tasks["b"], shape=SMALL)
    engine.train_round()
    progress = engine.progress("a")
    engine.release("a")
    engine.register_tasks([tasks["c"]])
    assert [(u.task, u.task_step) for u in engine.train_round()] == [("a", 1), ("b", 1)]
    assert progress.step == 1
    assert {(u.task, u.task_step) for u in engine.drain()} == {("b", 2), ("c", 1)}


def test_a_snapshot_is_of_the_moment_at_which_it_was_taken(tasks, make_engine, assert_same_bits):
    engine = make_engine(tasks["a"], tasks["b"], shape=SMALL)
    engine.train_round()
    snapshot = engine.snapshot("a")
    engine.drain()
    now = engine.task_arrays("a")
    for _ in range(2):
        engine.train_round()
    arrays = snapshot()
    assert_same_bits(arrays, {path: now[path] for path in arrays})
    assert not any(path.startswith("accumulators") for path in arrays)
    later = engine.task_arrays("a")
    assert any((arrays[path] != later[path]).any() for path in arrays)


def test_a_task_that_outgrows_the_pool_ends_what_has_begun(tasks, alone, make_engine, train):
    engine = make_engine(tasks["a"], shape=SMALL, slots=1)
    updates = engine.train_round() + engine.train_round()
    engine.register_tasks([tasks["e"]])
    rest = train(engine)
    losses = [u.loss for u in (*updates, *rest["a"])]
    expected = [u.loss for u in alone["a"][0]]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
