"""What belongs to one task is changed by no other, and by nothing while the task is idle."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmux.engine.state.updates import DueUpdates, update
from jaxmux.optimizers import SGD, AdamW, Lion
from tests.engine.conftest import SMALL

DECAYING = {
    "adamw": AdamW(1e-2, weight_decay=0.5),
    "sgd": SGD(1e-2, weight_decay=0.5),
    "lion": Lion(1e-2, weight_decay=0.5),
}


def hyperparameters(optimizers):
    """The hyperparameters of slots of one optimizer kind, as `update` takes them."""
    rows = [o.hyperparameters() for o in optimizers]
    return {name: np.asarray([row[name] for row in rows], np.float32) for name in rows[0]}


def same_rates(layout):
    """The rate 0.1 for every leaf, layer and slot."""
    specs = jax.tree.leaves(layout.tree.accumulators)
    layers, slots = specs[0].shape[:2]
    return np.full((len(specs), layers, slots), 0.1, np.float32)


def of_slot(state, slot):
    """All leaves of one slot, in order."""
    return [x[slot] if x.ndim < 3 else x[:, slot] for x in map(np.asarray, jax.tree.leaves(state))]


@pytest.fixture(scope="module", params=["clean", "nan"])
def idle_case(request, make_task, make_engine, train):
    """An engine of three trained tasks of which only the first is due; the others hold finite
    values or NaN in their accumulators."""
    tasks = (make_task(k, optimizer=o, dropout=0.1) for k, o in DECAYING.items())
    engine = make_engine(*tasks, shape=SMALL)
    train(engine, rounds=2)
    fill = np.nan if request.param == "nan" else 0.25
    state = engine.state._replace(
        accumulators=jax.tree.map(
            lambda g: g.at[:, 1:].set(fill).at[:, 0].set(0.01), engine.state.accumulators
        ),
        sums=engine.state.sums.at[1:].set(fill).at[0].set(1.0),
    )
    before = jax.device_get(state)
    hyper = {kind: hyperparameters([o]) for kind, o in DECAYING.items()}
    members = {kind: np.asarray([i], np.int32) for i, kind in enumerate(DECAYING)}
    due, layout = np.asarray([True, False, False, False]), engine._slots.layout
    after, stats = update(state, layout, DueUpdates(due, same_rates(layout), hyper, members))
    return before, jax.device_get(after), jax.device_get(stats)


def test_an_idle_slot_is_unchanged_by_weight_decay(idle_case, assert_same_bits):
    before, after, _ = idle_case
    for slot in (1, 2, 3):
        assert_same_bits(tuple(of_slot(before, slot)), tuple(of_slot(after, slot)))


@pytest.fixture
def filled(make_task, make_engine):
    """Makes a state of four slots full of random finite values, which `update` donates; and the
    layout of the state."""
    engine = make_engine(*(make_task(k, optimizer=o) for k, o in DECAYING.items()))
    shapes = jax.tree.map(lambda x: x.shape, engine.state)

    def make():
        rng = np.random.default_rng(3)
        state = jax.tree.map(
            lambda shape: jax.numpy.asarray(rng.uniform(0.1, 1, shape), np.float32),
            shapes,
            is_leaf=lambda x: type(x) is tuple and all(type(n) is int for n in x),
        )
        return state._replace(count=np.full(4, 2, np.int32))

    return make, engine._slots.layout


@pytest.mark.parametrize("kind", DECAYING)
def test_an_update_does_not_depend_on_the_others(kind, filled, assert_same_bits):
    """Neither on how many are due, nor on how many share the optimizer, nor on other optimizers."""
    other = next(k for k in DECAYING if k != kind)
    optimizers = DECAYING[kind], dataclasses.replace(DECAYING[kind], weight_decay=0.0)
    make, layout = filled
    alone, _ = update(
        make(),
        layout,
        DueUpdates(
            np.asarray([False, True, False, False]),
            same_rates(layout),
            {kind: hyperparameters(optimizers[:1])},
            {kind: np.asarray([1], np.int32)},
        ),
    )
    beside, stats = update(
        make(),
        layout,
        DueUpdates(
            np.ones(4, bool),
            same_rates(layout),
            {
                other: hyperparameters([DECAYING[other]] * 2),
                kind: hyperparameters(optimizers[::-1]),
            },
            {other: np.asarray([0, 3], np.int32), kind: np.asarray([2, 1], np.int32)},
        ),
    )
    assert stats.applied.all()
    assert_same_bits(tuple(of_slot(alone, 1)), tuple(of_slot(beside, 1)))


@pytest.mark.parametrize("kind", DECAYING)
def test_parameters_that_would_overflow_stay_with_moments_and_count(kind, filled, assert_same_bits):
    """Loss and gradient are finite: only the new parameters tell."""
    make, layout = filled
    before = make()
    members = np.asarray([0, 1, 2], np.int32)
    hyper = hyperparameters([DECAYING[kind]] * 3)
    rates = same_rates(layout)
    rates[:, :, 1] = 3e38
    hyper["weight_decay"][1] = 3e38
    due = np.ones(4, bool)
    after, stats = update(make(), layout, DueUpdates(due, rates, {kind: hyper}, {kind: members}))
    np.testing.assert_array_equal(stats.applied, [True, False, True, False])
    assert np.isfinite(stats.grad_norm).all() and np.isfinite(stats.sums).all()
    cleared = before._replace(
        accumulators=jax.tree.map(lambda g: 0 * g, before.accumulators), sums=0 * before.sums
    )
    assert_same_bits(tuple(of_slot(cleared, 1)), tuple(of_slot(after, 1)))
    for slot in (0, 2):
        assert all(np.isfinite(x).all() for x in of_slot(after, slot))


def test_the_due_slot_is_updated_and_its_accumulators_are_cleared(idle_case):
    before, after, stats = idle_case
    np.testing.assert_array_equal(stats.applied, [True, False, False, False])
    for one, other in zip(
        jax.tree.leaves(before.adapters), jax.tree.leaves(after.adapters), strict=True
    ):
        assert (one[:, 0] != other[:, 0]).any()
    assert not any(g[:, 0].any() for g in jax.tree.leaves(after.accumulators))
    assert not after.sums[0].any()


def test_a_finished_task_keeps_its_bits_while_others_train(
    make_task, make_engine, train, assert_same_bits
):
    fields = {"optimizer": DECAYING["adamw"], "dropout": 0.1}
    short, long = (make_task(name, steps=n, **fields) for name, n in (("short", 2), ("long", 4)))
    engine = make_engine(short, long, shape=SMALL)
    updates = train(engine, rounds=2)
    assert len(updates["short"]) == 2 and engine.progress("short").status == "succeeded"
    before = engine.task_arrays("short")
    train(engine)
    assert engine.progress("long").step == 4
    assert_same_bits(before, engine.task_arrays("short"))


def test_frozen_weights_keep_their_bits(backbone, make_task, make_engine, train, assert_same_bits):
    before = jax.tree.map(lambda w: np.array(w, copy=True), backbone.weights)
    engine = make_engine(make_task("adamw", optimizer=DECAYING["adamw"], dropout=0.1), shape=SMALL)
    train(engine)
    assert_same_bits(before, jax.device_get(backbone.weights))


def test_slots_without_a_task_stay_zero(make_task, make_engine, train):
    engine = make_engine(make_task("only", dropout=0.1), shape=SMALL)
    train(engine)
    for leaf in jax.tree.leaves((engine.state.adapters, engine.state.accumulators)):
        assert not np.asarray(leaf)[:, 1:].any()


def identity(x):
    return x


BREAKS = {
    "learning rate 1e30": ({"optimizer": AdamW(1e30)}, identity),
    "learning rate 1e10": ({"optimizer": AdamW(1e10)}, identity),
    "learning rate 1e6": ({"optimizer": AdamW(1e6)}, identity),
    "sgd at 1e6": ({"optimizer": SGD(1e6)}, identity),
    "sgd at 1e30": ({"optimizer": SGD(1e30, clip_norm=None)}, identity),
    "NaN adapter": ({}, lambda x: np.full_like(x, np.nan)),
    "infinite adapter": ({}, lambda x: np.full_like(x, np.inf)),
    "huge adapter": ({}, lambda x: np.full_like(x, 1e18)),
}
# Each is like one of the others.
MORE_BREAKS = ("learning rate 1e10", "learning rate 1e6", "sgd at 1e6", "sgd at 1e30")
MORE_BREAKS += ("infinite adapter",)


@pytest.fixture(scope="module")
def healthy(make_task):
    return [
        make_task("first", dropout=0.1, steps=4),
        make_task("last", rank=8, batch_size=3, steps=4, optimizer=Lion(1e-3)),
    ]


@pytest.fixture(scope="module")
def undisturbed(healthy, make_task, make_engine, train):
    engine = make_engine(healthy[0], make_task("broken", steps=4), healthy[1], shape=SMALL)
    return train(engine), {t.task.name: engine.task_arrays(t.task.name) for t in healthy}


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        pytest.param(*own, id=name, marks=[pytest.mark.slow] if name in MORE_BREAKS else [])
        for name, own in BREAKS.items()
    ],
)
def test_a_broken_task_changes_no_bit_of_the_others(
    fields,
    change,
    healthy,
    undisturbed,
    replace_adapter,
    make_task,
    make_engine,
    train,
    assert_same_bits,
):
    broken = replace_adapter(make_task("broken", steps=4, **fields), change)
    engine = make_engine(healthy[0], broken, healthy[1], shape=SMALL, max_bad_steps=1000)
    updates = train(engine)
    for name, arrays in undisturbed[1].items():
        assert updates[name] == undisturbed[0][name]
        assert_same_bits(arrays, engine.task_arrays(name))
        assert engine.progress(name).skipped == 0


def test_a_broken_task_fails_with_a_reason_and_the_others_go_on(
    healthy, undisturbed, replace_adapter, make_task, make_engine, train, assert_same_bits
):
    broken = replace_adapter(make_task("broken", steps=4), lambda x: np.full_like(x, np.nan))
    engine = make_engine(healthy[0], broken, healthy[1], shape=SMALL, max_bad_steps=3)
    updates = train(engine)
    progress = engine.progress("broken")
    assert progress.status == "failed"
    assert "not finite in 3 consecutive updates" in progress.error
    assert "step 3" in progress.error
    assert [u.skipped for u in updates["broken"]] == [True] * 3
    for name, arrays in undisturbed[1].items():
        assert engine.progress(name).status == "succeeded"
        assert updates[name] == undisturbed[0][name]
        assert_same_bits(arrays, engine.task_arrays(name))


def test_a_learning_rate_far_too_high_ends_in_failure_not_in_success(make_task, make_engine, train):
    wild = make_task("wild", steps=12, optimizer=AdamW(1e30), dropout=0.1)
    engine = make_engine(wild, shape=SMALL, max_bad_steps=4)
    train(engine)
    assert engine.progress("wild").status == "failed"


def test_a_skipped_update_advances_the_step_but_not_the_optimizer(
    make_task, make_engine, train, assert_same_bits
):
    """One poisoned accumulator costs one batch: parameters, moments, count and schedule stay."""
    poisoned = make_task("poisoned", dropout=0.1)
    engine = make_engine(poisoned, make_task("neighbour", rank=8), shape=SMALL)
    train(engine, rounds=2)
    before = engine.task_arrays("poisoned")
    engine._slots.state = engine.state._replace(sums=engine.state.sums.at[0].set(np.nan))
    skipped = train(engine, rounds=1)
    after = engine.task_arrays("poisoned")

    assert [u.skipped for u in skipped["poisoned"]] == [True]
    assert [u.skipped for u in skipped["neighbour"]] == [False]
    assert_same_bits(before, after)
    progress = engine.progress("poisoned")
    assert (progress.step, progress.updates, progress.skipped, progress.bad_streak) == (3, 2, 1, 1)

    rest = train(engine)
    assert not any(u.skipped for u in rest["poisoned"])
    progress = engine.progress("poisoned")
    assert (progress.step, progress.updates, progress.skipped, progress.bad_streak) == (5, 4, 1, 0)
    assert progress.status == "succeeded"
    counts = [v for k, v in engine.task_arrays("poisoned").items() if k.endswith("/count")]
    assert counts == [4]


def test_the_state_of_a_task_holds_nothing_of_its_neighbours(make_task, make_engine):
    """The arrays of a task have its own rank and modules only."""
    engine = make_engine(
        make_task("narrow", rank=2, targets=("q_proj",)), make_task("wide", rank=8)
    )
    arrays = engine.task_arrays("narrow")
    factors = {k: v.shape for k, v in arrays.items() if v.ndim == 3}
    assert factors and all("q_proj" in k for k in factors)
    assert set(factors.values()) == {(2, 32, 2), (2, 2, 32)}
    parts = ("adapter", "accumulators", "optimizer/0/mu", "optimizer/0/nu")
    expected = {f"{part}/self_attn.q_proj/{factor}" for part in parts for factor in "ab"}
    assert set(arrays) == expected | {"sums", "optimizer/0/count"}
