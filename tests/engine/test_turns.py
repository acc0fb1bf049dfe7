"""Large global batches are divided over several rounds."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

from jaxmux.engine.devices import programs
from jaxmux.engine.rounds.rounds import Turns, divide
from tests.engine.conftest import SMALL, random_samples

# The large task needs several rounds for a step, the small one never.
OPTIONS = {"shape": SMALL, "round_tokens": 150}


@pytest.fixture(scope="module")
def large(make_task):
    return make_task("large", batch_size=12, dropout=0.1, lengths=(30, 90), steps=2)


@pytest.fixture(scope="module")
def small(make_task):
    return make_task("small", batch_size=2, lengths=(30, 60), steps=20)


def turns_of(task):
    turns = Turns({0: task}, {0: 0}, OPTIONS["round_tokens"])
    return [own[0] for own in iter(turns.next, {})]


@pytest.mark.parametrize("most_tokens", [None, 1, 60, 99, 100, 300, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_turns_follow_each_other_and_are_as_large_as_they_may_be(seed, most_tokens):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 100, 1 + 9 * seed).tolist()
    turns = divide(lengths, most_tokens)
    assert [i for turn in turns for i in turn] == list(range(len(lengths)))
    assert all(turns)
    if most_tokens is None:
        assert len(turns) == 1
        return
    for turn in turns:
        tokens = sum(lengths[i] for i in turn)
        assert tokens <= most_tokens or len(turn) == 1
        if turn is not turns[-1]:
            assert tokens + lengths[turn.stop] > most_tokens


def test_turns_that_have_been_trained_are_over(large):
    def samples(accumulated):
        turns = Turns({3: large}, {3: 0}, 150, {3: accumulated})
        rest = list(iter(turns.next, {}))
        return [own[3].samples for own in rest if own[3].step == 0]

    every = samples([])
    assert len(every) > 3
    first = [*every[0], *every[1]]
    assert samples(first) == every[2:]
    # A turn that has begun goes on; the update is due after the last turn in any case.
    assert samples(first[:-1]) == every[1:]
    assert samples([i for turn in every for i in turn]) == every[-1:]


def test_a_small_task_does_not_wait_for_a_large_one(large, small, make_engine):
    engine = make_engine(large, small, **OPTIONS)
    updates = []
    while engine.progress("large").step < 1:
        updates += engine.train_round()
        # The device is at most two rounds ahead of the results.
        assert len(engine._results._dispatched) <= 2
    rounds = [u.round for u in updates if u.task == "small"]
    assert rounds == list(range(len(rounds))) and len(rounds) > 4
    assert [(u.round, u.task_step) for u in updates if u.task == "large"] == [(rounds[-1], 1)]


def test_the_sum_of_the_parts_is_the_whole(large, small, make_engine, train):
    """In a global batch, every sample counts once."""
    whole = make_engine(large, small, shape=SMALL)
    parts = make_engine(large, small, **OPTIONS)
    expected, found = train(whole), train(parts)
    assert parts.rounds == whole.rounds == 20
    for name in ("large", "small"):
        for own, other in zip(found[name], expected[name], strict=True):
            assert (own.tokens, own.target_tokens) == (other.tokens, other.target_tokens)
            assert own.loss == pytest.approx(other.loss, rel=1e-5)
            assert own.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)


def test_rounds_without_an_update_wait_for_the_device_too(large, make_engine, train):
    engine = make_engine(large, **OPTIONS)
    expected = turns_of(large)
    found, computed = [], []
    while not engine.finished:
        found += engine.train_round()
        assert len(engine._results._dispatched) <= 1
        computed.append(engine.take_computed().by_task)
    found += engine.drain()
    computed.append(engine.take_computed().by_task)
    assert len(expected) > 6 and engine.rounds == len(expected)
    # The tokens of every round arrive with the next one.
    assert computed[0] == {} and all(computed[1:])
    by_round = [own["large"] for own in computed[1:]]
    first = next(i for i, own in enumerate(expected) if own.last) + 1
    assert [u.computed_tokens for u in found] == [sum(by_round[:first]), sum(by_round[first:])]


def test_the_update_ends_a_round_in_which_other_batches_go_on(large, small, make_engine):
    """So that nothing of a round is lost after an update when memory runs out."""
    engine = make_engine(small, large, shape=SMALL, round_tokens=300)
    plan = engine._stream.next({0: 0, 1: 0}, {})
    assert plan.ends == {0} and len(plan.microbatches) > 1
    assert [due.after for due in plan.updates] == [len(plan.microbatches) - 1]


def test_tokens_are_counted_for_their_step(large, make_engine, train):
    """Also when a task is stopped, and restored in the middle of a batch."""
    expected = [u.computed_tokens for u in train(make_engine(large, **OPTIONS))["large"]]
    engine, updates = make_engine(large, **OPTIONS), []
    while not engine.finished:
        updates += engine.train_round(lambda: True)
    updates += engine.drain()
    assert [u.computed_tokens for u in updates] == expected


def test_a_checkpoint_between_two_parts_goes_on_with_the_same_bits(
    large, small, make_engine, train, assert_same_bits
):
    calm = make_engine(large, small, **OPTIONS)
    expected = train(calm)
    first = make_engine(large, small, **OPTIONS)
    updates = first.train_round() + first.train_round() + first.drain()
    second = make_engine(large, small, **OPTIONS)
    for name in first.names:
        accumulated = first.accumulated(name)
        assert bool(accumulated) == (name == "large")
        second.restore_task(name, first.task_arrays(name), first.progress(name), accumulated)
    rest = train(second)
    for name in first.names:
        own = [u.loss for u in updates if u.task == name] + [u.loss for u in rest[name]]
        assert own == [u.loss for u in expected[name]]
        assert_same_bits(second.task_arrays(name), calm.task_arrays(name))


def test_held_out_losses_belong_to_whole_steps(large, make_engine, train):
    task = dataclasses.replace(large.task, eval_data="random.jsonl", eval_every=1)
    measured = dataclasses.replace(large, task=task, eval_samples=random_samples(99, 5, (20, 90)))
    engine = make_engine(measured, **OPTIONS)
    train(engine)
    assert [done.task_step for done in engine.take_evaluations()] == [1, 2]


def test_a_batch_begins_again_when_its_parts_are_lost(large, make_engine, train, monkeypatch):
    expected = train(make_engine(large, remat="norms", **OPTIONS))["large"]
    accumulate, seen = programs.accumulate, itertools.count()

    def failing(*arguments):
        if next(seen) == 4:
            accumulate(*arguments)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return accumulate(*arguments)

    failing.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", failing)
    found = train(make_engine(large, remat="norms", **OPTIONS))["large"]
    assert len(found) == len(expected) == 2
    for own, other in zip(found, expected, strict=True):
        assert own.computed_tokens == other.computed_tokens
        np.testing.assert_allclose(own.loss, other.loss, rtol=1e-5)
