"""A round that runs out of memory is done again with more recomputation, and nothing is lost."""

import itertools
import logging

import jax
import numpy as np
import pytest

from jaxmux.engine.devices import programs
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.models.remat_policies import leaner
from tests.engine.conftest import SMALL


@pytest.fixture
def fail_at(monkeypatch):
    """Lets the calls of `accumulate` with these numbers fail like those on a full device, after
    they have taken the donated arrays."""

    def fail(numbers) -> None:
        accumulate, seen = programs.accumulate, itertools.count()

        def failing(*arguments):
            if next(seen) in numbers:
                accumulate(*arguments)
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
            return accumulate(*arguments)

        failing.lower = programs.accumulate.lower
        monkeypatch.setattr(programs, "accumulate", failing)

    return fail


@pytest.fixture(scope="module")
def expected(make_task, make_engine, train):
    """An engine that never runs out of memory, and its updates."""
    engine = make_engine(*tasks(make_task), shape=SMALL, remat="norms")
    return engine, train(engine)


def tasks(make_task):
    return make_task("a", batch_size=12), make_task("b", dropout=0.1, steps=3, batch_size=8)


def assert_same_training(found, found_updates, expected, expected_updates):
    assert (found.rounds, found.microbatches) == (expected.rounds, expected.microbatches)
    for name, updates in expected_updates.items():
        for one, other in zip(found_updates[name], updates, strict=True):
            assert (one.round, one.tokens) == (other.round, other.tokens)
            assert one.loss == pytest.approx(other.loss, rel=1e-5)
        for module, factors in expected.adapter(name).items():
            for one, other in zip(found.adapter(name)[module], factors, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "numbers",
    [*(pytest.param(own, marks=pytest.mark.slow) for own in ((0,), (4,), (1, 2))), (1,)],
    ids=str,
)
def test_the_round_is_done_again(
    numbers, expected, fail_at, make_task, make_engine, train, caplog, monkeypatch
):
    # As on a GPU, where the engine holds an array that keeps small ones apart.
    guard = jax.numpy.zeros(2)
    monkeypatch.setattr(programs, "keep_small_arrays_together", lambda: guard)
    expected, expected_updates = expected
    assert expected.microbatches > 2 * expected.rounds
    fail_at(numbers)
    found = make_engine(*tasks(make_task), shape=SMALL, remat="norms")
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        found_updates = train(found)
    said = [record for record in caplog.records if "ran out of memory" in record.message]
    assert len(said) == len(numbers)
    assert_same_training(found, found_updates, expected, expected_updates)


def test_only_the_step_is_compiled_again(make_task, make_engine, train, monkeypatch, compiles):
    # No other test compiles programs for this rank.
    engine = make_engine(make_task("a", rank=7), remat="norms")
    engine.train_round()
    engine.drain()
    accumulate, seen = programs.accumulate, itertools.count()

    def failing(*arguments):
        if next(seen) == 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return accumulate(*arguments)

    failing.lower, failing.trace = accumulate.lower, accumulate.trace
    failing.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", failing)
    compiles.clear()
    train(engine)
    assert compiles.count("jit(accumulate)") == 1
    assert not any("update" in name for name in compiles)


def test_a_failure_that_is_reported_later_is_noticed_before_the_update(
    expected, make_task, make_engine, train, monkeypatch
):
    """As on a GPU, which reports that it ran out of memory only when it is asked."""
    expected, expected_updates = expected
    wait, seen = jax.block_until_ready, itertools.count()

    def failing(arrays):
        if next(seen) == 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return wait(arrays)

    monkeypatch.setattr(jax, "block_until_ready", failing)
    found = make_engine(*tasks(make_task), shape=SMALL, remat="norms")
    found_updates = train(found)
    assert next(seen) > 5
    assert_same_training(found, found_updates, expected, expected_updates)


def test_a_restored_round_is_packed_anew(expected, fail_at, make_task, make_engine, train):
    """Its accumulated gradients are lost with the donated arrays."""
    expected, expected_updates = expected
    first = make_engine(*tasks(make_task), shape=SMALL, remat="norms")
    calls = itertools.count()
    updates = first.train_round(lambda: next(calls) == 1)
    assert not updates and first.microbatches == 2
    second = make_engine(*tasks(make_task), shape=SMALL, remat="norms")
    for name in first.names:
        state = first.task_arrays(name), first.progress(name), first.accumulated(name)
        second.restore_task(name, *state)
    fail_at((0,))
    found_updates = train(second)
    second.microbatches = expected.microbatches
    assert_same_training(second, found_updates, expected, expected_updates)


def test_only_the_leanest_policy_is_the_end(fail_at, make_task, make_engine, train):
    fail_at(range(100))
    engine = make_engine(*tasks(make_task), shape=SMALL, remat="lean")
    with pytest.raises(OutOfDeviceMemory, match="128 tokens does not fit .* try .*=64"):
        train(engine)


def test_another_error_is_passed_on(make_task, make_engine, train, monkeypatch):
    def failing(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    failing.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", failing)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        train(make_engine(*tasks(make_task), shape=SMALL))


def test_leaner_policies_end_at_full_recomputation():
    policies, seen = ("norms", "none", "dots"), []
    while policies := leaner(policies):
        seen.append(policies)
    assert seen[0] == ("norms", "norms", "dots")
    assert seen[1] == ("dots", "dots", "dots")
    assert seen[-1] == ("full", "full", "full")


def test_an_exception_between_microbatches_trains_none_twice(
    expected, make_task, make_engine, train
):
    expected, expected_updates = expected
    found = make_engine(*tasks(make_task), shape=SMALL, remat="norms")

    def stop():
        raise ConnectionError("the user's function")

    with pytest.raises(ConnectionError):
        found.train_round(stop)
    assert sum(len(found.accumulated(name)) for name in found.names) > 0
    with pytest.raises(RuntimeError, match="end of a round"):
        found.register_tasks([make_task("c")])
    assert_same_training(found, train(found), expected, expected_updates)


def test_the_last_task_may_fail_before_the_round_is_done_again(
    fail_at, make_task, make_engine, replace_adapter, train
):
    bad = replace_adapter(
        make_task("bad", batch_size=3, dropout=0.1), lambda x: np.full_like(x, np.nan)
    )
    fail_at((1,))
    engine = make_engine(bad, shape=SMALL, remat="norms", max_bad_steps=1)
    updates = train(engine)
    assert engine.progress("bad").status == "failed"
    assert [update.skipped for update in updates["bad"]] == [True]
