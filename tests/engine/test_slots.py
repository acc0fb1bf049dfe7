"""Tasks come, go, stop and resume: none of it changes a bit of what any task learns."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmux.engine import TaskProgress
from jaxmux.tasks import TaskError
from tests.engine.conftest import SMALL


@pytest.fixture(scope="module")
def tasks(make_task):
    return {
        "early": make_task("early", dropout=0.1, steps=6),
        "late": make_task("late", rank=8, batch_size=4, steps=4),
    }


@pytest.fixture(scope="module")
def uninterrupted(tasks, make_engine, train):
    """Each task's updates and final arrays, trained from beginning to end."""
    engine = make_engine(*tasks.values(), shape=SMALL)
    updates = train(engine)
    return {name: (updates[name], engine.task_arrays(name)) for name in tasks}


@pytest.fixture
def assert_unchanged(uninterrupted, assert_same_bits):
    """Compares a task's updates and final arrays with the uninterrupted run's, round numbers
    apart."""

    def check(name, engine, updates):
        expected, arrays = uninterrupted[name]
        assert [u._replace(round=0) for u in updates] == [u._replace(round=0) for u in expected]
        assert_same_bits(engine.task_arrays(name), arrays)
        assert engine.progress(name).status == "succeeded"

    return check


def test_a_task_registered_on_the_fly_disturbs_nobody(tasks, make_engine, train, assert_unchanged):
    engine = make_engine(tasks["early"], shape=SMALL)
    updates = train(engine, rounds=3)["early"]
    engine.register_tasks([tasks["late"]])
    rest = train(engine)
    assert_unchanged("early", engine, updates + rest["early"])
    assert_unchanged("late", engine, rest["late"])


def test_a_released_task_leaves_the_others_undisturbed(
    tasks, make_task, make_engine, train, assert_unchanged
):
    engine = make_engine(make_task("leaver", steps=50), *tasks.values(), shape=SMALL)
    first = train(engine, rounds=2)
    engine.release("leaver")
    assert engine.names == ["early", "late"]
    rest = train(engine)
    for name in tasks:
        assert_unchanged(name, engine, first[name] + rest[name])


def test_a_slot_is_clean_for_the_task_that_takes_it_over(
    tasks, make_task, make_engine, train, assert_unchanged
):
    engine = make_engine(make_task("predecessor", rank=8, steps=50), shape=SMALL)
    train(engine, rounds=2)
    engine.release("predecessor")
    engine.register_tasks([tasks["early"]])
    assert_unchanged("early", engine, train(engine)["early"])


def test_a_task_that_outgrows_the_pool_enlarges_it(tasks, make_task, make_engine, train):
    engine = make_engine(tasks["early"], slots=1, shape=SMALL)
    train(engine, rounds=1)
    before = engine.task_arrays("early")
    engine.register_tasks([make_task("wide", rank=16)])
    after = engine.task_arrays("early")
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    assert engine.adapter("wide")["self_attn.q_proj"].a.shape == (2, 32, 16)


def test_slot_numbers_stay_and_a_free_one_is_taken_again(tasks, make_task, make_engine, train):
    engine = make_engine(make_task("first"), *tasks.values(), shape=SMALL)
    train(engine, rounds=1)
    numbers = {name: engine._slots.number(name) for name in engine.names}
    assert list(numbers.values()) == [0, 1, 2]
    engine.release("early")
    assert {name: engine._slots.number(name) for name in engine.names} == {"first": 0, "late": 2}
    engine.register_tasks([make_task("new"), make_task("newer")])
    assert {name: engine._slots.number(name) for name in ("new", "newer")} == {"new": 1, "newer": 3}


def test_a_change_of_tasks_touches_no_other_slot_and_moves_no_array(tasks, make_task, make_engine):
    """The state's arrays are written in place: they keep their memory."""
    engine = make_engine(*tasks.values(), shape=SMALL)
    engine._slots.state = jax.tree.map(lambda x: x + x.dtype.type(3), engine.state)
    # Copied: on a CPU, `device_get` returns views, and an array that is viewed is not donated.
    before = jax.tree.map(lambda x: np.array(x, copy=True), engine.state)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.state)]
    engine.release("early")
    assert places == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.state)]
    engine.register_tasks([make_task("new")])
    assert places == [x.unsafe_buffer_pointer() for x in jax.tree.leaves(engine.state)]
    after = jax.device_get(engine.state)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        axis = 0 if old.ndim < 3 else 1
        others = [1, 2, 3]
        np.testing.assert_array_equal(np.take(old, others, axis), np.take(new, others, axis))
        assert (np.take(old, 0, axis) != np.take(new, 0, axis)).any()


def test_nothing_compiles_while_tasks_fit_the_pool(tasks, make_task, make_engine, train, compiles):
    engine = make_engine(*tasks.values(), shape=SMALL)
    train(engine, rounds=2)
    engine.release("late")
    engine.register_tasks([make_task("late", rank=8, batch_size=4, steps=9)])
    train(engine, rounds=1)
    engine.restore_task("late", engine.task_arrays("late"), engine.progress("late"))
    before = len(compiles)
    engine.release("early")
    engine.register_tasks([make_task("next", rank=4, dropout=0.1, batch_size=3)])
    train(engine, rounds=3)
    engine.restore_task("next", engine.task_arrays("next"), engine.progress("next"))
    train(engine, rounds=1)
    # Cropping to another rank is the only thing that may compile: a slice for each shape.
    assert not [name for name in compiles[before:] if "slice" not in name]
    assert engine.remat is not None


def test_restored_tasks_continue_with_the_same_bits(tasks, make_engine, train, assert_unchanged):
    first = make_engine(*tasks.values(), shape=SMALL)
    updates = train(first, rounds=2)
    # Another order of slots, as any engine that restores may choose.
    second = make_engine(*reversed(tasks.values()), shape=SMALL)
    for name in tasks:
        progress = TaskProgress.from_json(first.progress(name).to_json())
        second.restore_task(name, first.task_arrays(name), progress)
    rest = train(second)
    for name in tasks:
        assert_unchanged(name, second, updates[name] + rest[name])


@pytest.mark.parametrize("stop_after", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_round_stopped_in_its_middle_resumes_in_another_engine(
    stop_after, tasks, make_engine, train, assert_unchanged
):
    first = make_engine(*tasks.values(), shape=SMALL)
    updates = train(first, rounds=1)
    counted = iter(range(1, 100))
    stopped = first.train_round(stop=lambda: next(counted) == stop_after)
    assert stopped == []
    accumulated = {name: first.accumulated(name) for name in tasks}
    samples = sum(len(tasks[name].batches[1]) for name in tasks)
    assert 0 < sum(map(len, accumulated.values())) < samples
    assert all(first.progress(name).step == 1 for name in tasks)

    second = make_engine(*tasks.values(), shape=SMALL)
    for name in tasks:
        progress = dataclasses.replace(first.progress(name))
        second.restore_task(name, first.task_arrays(name), progress, accumulated[name])
    rest = train(second)
    for name in tasks:
        assert_unchanged(name, second, updates[name] + rest[name])


def test_a_task_is_restored_with_all_its_bits(tasks, make_engine, assert_same_bits):
    """Zeros are not written, but negative zeros and NaN are; arrays may lie anyhow in memory."""
    engine = make_engine(tasks["early"], shape=SMALL)
    arrays = {name: np.array(array) for name, array in engine.task_arrays("early").items()}
    leaves = [name for name in arrays if name.startswith("adapter/")]
    arrays[leaves[0]][:] = -0.0
    arrays[leaves[1]][:] = np.nan
    arrays[leaves[2]][:] = 0.0
    arrays[leaves[3]] = np.repeat(arrays[leaves[3]], 2, axis=-1)[..., ::2]
    engine.restore_task("early", arrays, engine.progress("early"))
    found = engine.task_arrays("early")
    assert_same_bits(found, arrays)
    for name in leaves:
        np.testing.assert_array_equal(np.signbit(found[name]), np.signbit(arrays[name]))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda arrays, leaf: arrays | {"adapter/nothing": arrays[leaf]}, "no place for adapter/n"),
        (lambda arrays, leaf: arrays | {leaf: np.repeat(arrays[leaf], 99, axis=-1)}, "has shape"),
        (lambda arrays, leaf: {n: x for n, x in arrays.items() if n != leaf}, "is missing"),
        (
            lambda arrays, leaf: {n: x for n, x in arrays.items() if n != "optimizer/0/count"},
            "count is missing",
        ),
    ],
    ids=["unknown", "too large", "missing", "no scalar"],
)
def test_arrays_that_do_not_suit_a_task_change_nothing(
    change, problem, tasks, make_engine, assert_same_bits
):
    engine = make_engine(tasks["early"], shape=SMALL)
    before = engine.task_arrays("early")
    leaf = next(name for name in before if name.startswith("adapter/"))
    with pytest.raises(ValueError, match=problem):
        engine.restore_task("early", change(before, leaf), engine.progress("early"))
    assert_same_bits(engine.task_arrays("early"), before)


def test_a_slot_that_was_restored_within_a_round_is_clean_for_the_next_task(
    tasks, make_engine, train, assert_unchanged
):
    """The samples that the leaver had accumulated are not missing from its successor's batch."""
    engine = make_engine(tasks["early"], shape=SMALL)
    arrays, progress = engine.task_arrays("early"), engine.progress("early")
    engine.restore_task("early", arrays, progress, accumulated=[0, 1])
    assert engine.accumulated("early") == [0, 1]
    engine.release("early")
    engine.register_tasks([tasks["late"]])
    assert engine.accumulated("late") == []
    assert_unchanged("late", engine, train(engine)["late"])


def test_tasks_of_which_one_cannot_make_its_adapter_take_no_slots(tasks, make_task, make_engine):
    engine = make_engine(tasks["early"], shape=SMALL)

    def fail():
        raise OSError("the folder is gone")

    gone = dataclasses.replace(make_task("gone"), make_adapter=fail)
    with pytest.raises(OSError, match="the folder is gone"):
        engine.register_tasks([tasks["late"], gone])
    assert engine.names == ["early"]
    engine.register_tasks([tasks["late"]])
    assert {name: engine._slots.number(name) for name in engine.names} == {"early": 0, "late": 1}


def test_a_stopped_round_goes_on_in_the_same_engine(tasks, make_engine, train, assert_unchanged):
    engine = make_engine(*tasks.values(), shape=SMALL)
    updates = {name: [] for name in tasks}
    while not engine.finished:
        for update in engine.train_round(stop=lambda: True):
            updates[update.task].append(update)
    for update in engine.drain():
        updates[update.task].append(update)
    for name in tasks:
        assert_unchanged(name, engine, updates[name])


def test_tasks_cannot_change_in_the_middle_of_a_round(tasks, make_engine, make_task):
    engine = make_engine(*tasks.values(), shape=SMALL)
    engine.train_round(stop=lambda: True)
    arrays, progress = engine.task_arrays("early"), engine.progress("early")
    for change in (
        lambda: engine.register_tasks([make_task("other")]),
        lambda: engine.release("early"),
        lambda: engine.restore_task("early", arrays, progress),
    ):
        with pytest.raises(RuntimeError, match="end of a round"):
            change()


def test_results_arrive_one_round_late_and_drain_fetches_the_last(tasks, make_engine):
    engine = make_engine(*tasks.values(), shape=SMALL)
    assert engine.train_round() == []
    assert [(u.task, u.task_step) for u in engine.train_round()] == [("early", 1), ("late", 1)]
    assert [(u.task, u.task_step) for u in engine.drain()] == [("early", 2), ("late", 2)]
    assert engine.drain() == []


def test_a_task_ends_at_its_own_last_step(uninterrupted, tasks):
    for name, (updates, _) in uninterrupted.items():
        assert [u.task_step for u in updates] == list(range(1, tasks[name].steps + 1))


def test_tokens_and_target_tokens_are_counted(uninterrupted, tasks):
    for name, (updates, _) in uninterrupted.items():
        for k, update in enumerate(updates):
            batch = tasks[name].batches[k]
            assert update.tokens == sum(len(s.input_ids) - 1 for s in batch)
            assert update.target_tokens == sum(int(s.target_mask.sum()) for s in batch)


def test_a_name_taken_twice_is_refused(tasks, make_engine):
    engine = make_engine(tasks["early"])
    with pytest.raises(TaskError, match="task 'early': .*registered already"):
        engine.register_tasks([tasks["early"]])
    assert engine.names == ["early"]


def test_a_name_twice_in_one_registration_is_refused(tasks, make_engine):
    with pytest.raises(TaskError, match="task 'early'"):
        make_engine(tasks["early"], tasks["early"])


def test_a_sample_longer_than_a_row_is_refused_and_nothing_is_lost(
    tasks, make_task, make_engine, train
):
    engine = make_engine(tasks["early"], shape=SMALL)
    train(engine, rounds=1)
    long = make_task("long", lengths=(200, 201))
    with pytest.raises(TaskError, match="task 'long': its longest sample takes 199 places.* 128"):
        engine.register_tasks([long])
    assert engine.names == ["early"] and engine.progress("early").step == 1
