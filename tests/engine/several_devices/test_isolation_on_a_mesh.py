"""On a pipeline of data- and tensor-parallel stages, no task changes a bit of another one, and a
pause changes none of its own, also in the middle of a global batch."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmux.optimizers import AdamW, Lion
from jaxmux.planner.devices import Stage

# test_meshes.py and test_arrivals.py have shorter tests of the same.
pytestmark = pytest.mark.slow

# By what is different about the co-tenant: its fields, and the rounds before which it comes and
# goes.
COMPANY = {
    "other in everything, comes and goes": (
        {
            "samples": 31,
            "lengths": (40, 110),
            "optimizer": AdamW(0.7),
            "rank": 8,
            "dropout": 0.4,
        },
        1,
        4,
    ),
    "failure": ({}, 1, None),
}


OPTIONS = {"max_bad_steps": 2}
# So few tokens that the watched tasks need several rounds for a step.
ROUND_TOKENS = 250


@pytest.fixture(scope="module")
def engine(make_engine):
    """One engine for all tests, so that its programs are traced once."""
    mesh = {"layers": (2, 2), "stage": Stage(dp=2, tp=2)}
    return make_engine(**mesh, round_tokens=ROUND_TOKENS, **OPTIONS)


@pytest.fixture(scope="module")
def own(make_task):
    """The tasks that are watched."""
    return (
        make_task("first", dropout=0.1, batch_size=5, steps=4),
        make_task("last", rank=2, lengths=(60, 120), optimizer=Lion(1e-3), steps=4),
    )


def trained(engine, own, other=None, comes=0, goes=None, change=lambda number: None):
    """Trains watched tasks with another one beside them. `change` is called before every round.

    Returns:
      The updates and arrays (adapters and moments) of the watched tasks by name, and the status of
      the other one at its end.
    """
    updates, status = {task.task.name: [] for task in own}, None
    engine.register_tasks(own[:1])
    for number in range(100):
        if number == comes and other:
            engine.register_tasks([other])
        if number == 0:
            engine.register_tasks(own[1:])
        if number == goes:
            engine.release(other.task.name)
        change(number)
        for update in engine.train_round():
            if update.task in updates:
                updates[update.task].append(update._replace(round=0))
        if other and other.task.name in engine.names:
            status = engine.progress(other.task.name).status
        if all(engine.progress(name).status != "running" for name in updates):
            break
    engine.drain()
    arrays = {name: engine.task_arrays(name) for name in updates}
    for name in engine.names:
        engine.release(name)
    return updates, arrays, status


@pytest.fixture(scope="module")
def alone(engine, own):
    return trained(engine, own)


@pytest.mark.parametrize("difference", COMPANY)
def test_a_co_tenant_changes_no_bit_of_a_task(
    difference, alone, engine, own, make_task, replace_adapter, assert_same_bits
):
    fields, comes, goes = COMPANY[difference]
    other = make_task("other", **{"rank": 3, "batch_size": 7, "steps": 20} | fields)
    if difference == "failure":
        other = replace_adapter(other, lambda x: np.full_like(x, np.nan))
    updates, arrays, status = trained(engine, own, other, comes, goes)
    assert (status == "failed") == (difference == "failure")
    expected_updates, expected, _ = alone
    assert [len(of_task) for of_task in updates.values()] == [4, 4]
    assert updates == expected_updates
    for name in expected:
        assert any("/nu/" in path or "/mu/" in path for path in expected[name])
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected[name]))
        assert_same_bits(arrays[name], expected[name])


def test_a_pause_in_the_middle_of_a_batch_changes_no_bit(alone, engine, own, assert_same_bits):
    begun = []

    def change(number):
        if number in (1, 4, 5):
            name = own[number % 2].task.name
            begun.append(engine._position.goes_on(engine._slots.number(name)))
            engine.resume(engine.suspend(name))

    updates, arrays, _ = trained(engine, own, change=change)
    assert any(begun) and updates == alone[0]
    assert_same_bits(arrays, alone[1])


def test_lion_updates_like_one_device_from_the_same_accumulators(
    engine, make_engine, make_task, replace_adapter, train
):
    """Other accumulators differ in their last bits, and where they are near zero, in their signs,
    on which Lion's step depends."""
    task = make_task("lion", batch_size=2, optimizer=Lion(1e-2), steps=1)
    task = replace_adapter(task, lambda x: x + np.float32(0.05))
    one = make_engine(task, **OPTIONS)
    before = one.task_arrays("lion")
    assert not one.train_round(lambda: True)
    progress = dataclasses.replace(one.progress("lion"))
    state = one.task_arrays("lion"), progress, one.accumulated("lion")
    assert len(state[2]) == 2
    engine.register_tasks([task])
    engine.restore_task("lion", *state)
    results = []
    for own in (one, engine):
        (update,) = train(own)["lion"]
        results.append((update, own.task_arrays("lion")))
        own.release("lion")
    (expected_update, expected), (update, found) = results
    assert (update.loss, update.skipped) == (expected_update.loss, False)
    for path, value in expected.items():
        if path.startswith("adapter"):
            assert np.any(value != before[path])
            np.testing.assert_allclose(found[path], value, rtol=1e-6, atol=1e-9)
