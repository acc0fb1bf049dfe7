"""A task gets the same adapter alone and beside others."""

import numpy as np
import pytest

from jaxmux.optimizers import SGD, AdamW, Lion, Schedule
from jaxmux.planner.packing import ShapeClass
from tests.engine.conftest import SMALL

UPDATES = 5
OTHER_SHAPE = ShapeClass(rows=1, row_len=512, chunk_len=128, max_sequences=16)


@pytest.fixture(scope="module")
def tasks(make_wide_task):
    """Different in everything; all drop out and adapt all linears."""
    warm = Schedule("cosine", warmup_ratio=0.1)
    return {
        "adam": make_wide_task(
            "adam",
            dropout=0.1,
            steps=UPDATES,
            optimizer=AdamW(5e-3, schedule=warm, weight_decay=0.1, clip_norm=0.02),
        ),
        "sgd": make_wide_task(
            "sgd",
            rank=8,
            dropout=0.1,
            steps=UPDATES,
            batch_size=3,
            optimizer=SGD(3e-3, schedule=Schedule("linear"), clip_norm=None),
            loraplus_ratio=2.0,
        ),
        "lion": make_wide_task(
            "lion", rank=3, dropout=0.3, steps=4, batch_size=9, optimizer=Lion(1e-3)
        ),
    }


@pytest.fixture(scope="module")
def together(tasks, make_engine, train):
    engine = make_engine(*tasks.values())
    return engine, train(engine)


@pytest.mark.parametrize("name", ["adam", "sgd", "lion"])
def test_same_shape_class_gives_the_same_bits(
    name, tasks, together, make_engine, train, assert_same_bits
):
    engine, updates = together
    alone = make_engine(tasks[name])
    updates_alone = train(alone)[name]
    assert len(updates_alone) == tasks[name].steps
    assert updates_alone == updates[name]
    assert_same_bits(alone.task_arrays(name), engine.task_arrays(name))
    assert alone.progress(name) == engine.progress(name)


@pytest.fixture(scope="module")
def plain(make_task, make_engine, train):
    """A task that adapts two modules and drops nothing, alone."""
    task = make_task("plain")
    engine = make_engine(task, shape=SMALL)
    return task, engine, train(engine)["plain"]


@pytest.fixture(scope="module")
def with_wet(plain, make_task, make_engine, train):
    """The same task beside one that drops out, which is returned."""
    wet = make_task("wet", dropout=0.5)
    engine = make_engine(plain[0], wet, shape=SMALL)
    return wet, engine, train(engine)


def test_a_neighbour_that_drops_out_changes_no_bit(plain, with_wet, assert_same_bits):
    (_, alone, updates), (_, beside, updates_beside) = plain, with_wet
    assert updates_beside["plain"] == updates
    assert_same_bits(alone.adapter("plain"), beside.adapter("plain"))


def test_a_neighbour_with_other_target_modules_leaves_the_losses(
    plain, make_wide_task, make_engine, train
):
    """It widens the pool to all linears, which is another program: equal up to rounding."""
    task, _, updates = plain
    beside = train(make_engine(task, make_wide_task("wide", dropout=0.1)))["plain"]
    np.testing.assert_allclose([u.loss for u in beside], [u.loss for u in updates], rtol=1e-5)


def test_nan_in_every_linear_of_a_task_changes_no_bit_of_the_others(
    tasks, together, replace_adapter, make_engine, train, assert_same_bits
):
    broken = replace_adapter(tasks["sgd"], lambda x: np.full_like(x, np.nan))
    engine = make_engine(tasks["adam"], broken, tasks["lion"], max_bad_steps=1000)
    updates = train(engine)
    assert all(u.skipped for u in updates["sgd"])
    for name in ("adam", "lion"):
        assert updates[name] == together[1][name]
        assert_same_bits(engine.task_arrays(name), together[0].task_arrays(name))


def test_the_order_of_registration_changes_no_bit(
    tasks, together, make_engine, train, assert_same_bits
):
    reordered = make_engine(*reversed(tasks.values()))
    train(reordered)
    for name in tasks:
        assert_same_bits(reordered.task_arrays(name), together[0].task_arrays(name))


# tests/engine/test_resize.py, too, compares microbatches of other shapes.
@pytest.mark.slow
def test_another_shape_class_gives_the_same_losses(with_wet, make_engine, train):
    wet, _, updates = with_wet
    alone = train(make_engine(wet, shape=OTHER_SHAPE))["wet"]
    losses = [u.loss for u in updates["wet"]]
    np.testing.assert_allclose([u.loss for u in alone], losses, rtol=1e-5)
    assert np.ptp(losses) > 0.05


def test_the_task_really_learns_and_really_drops_out(
    tasks, together, make_wide_task, make_engine, train
):
    adapter = together[0].adapter("adam")
    initial = tasks["adam"].make_adapter()
    moved = [np.abs(f.a - initial[m].a).max() for m, f in adapter.items()]
    assert min(moved) > 1e-3
    adam = tasks["adam"].task
    dry = make_wide_task("adam", dropout=0.0, steps=3, optimizer=adam.optimizer)
    wet = together[1]["adam"]
    # Beside another task that drops out, no other program is compiled.
    assert train(make_engine(dry, tasks["sgd"]))["adam"][2].loss != pytest.approx(
        wet[2].loss, rel=1e-4
    )
