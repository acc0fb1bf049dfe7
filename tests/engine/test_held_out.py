"""Held-out losses during training: when they are measured, early stopping, and the best adapter."""

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest

from jaxmux.engine import SuspendedTask, TaskProgress
from jaxmux.engine.rounds.rounds import divide
from jaxmux.optimizers import SGD
from jaxmux.tasks import Task, TaskError
from tests.engine.conftest import SMALL, measured_to_the_end, random_samples

STEPS = 6


@pytest.fixture(scope="module")
def make_measured(make_task):
    """Makes a task with held-out samples. With a learning rate this high its held-out loss goes up
    and down."""

    def make(name, **fields):
        fields = {"optimizer": SGD(0.8), "steps": STEPS, "eval_data": "random.jsonl"} | fields
        held_out = random_samples(99, 5, (20, 90))
        return dataclasses.replace(make_task(name, **fields), eval_samples=held_out)

    return make


@pytest.fixture(scope="module")
def curve(make_measured, make_engine):
    """The held-out loss and the adapter of the task "a" after every step, measured one by one."""
    engine = make_engine(make_measured("a"), shape=SMALL)
    losses, adapters = [], []
    for _ in range(STEPS):
        engine.train_round()
        engine.drain()
        losses.append(engine.evaluate(["a"])["a"])
        adapters.append(engine.adapter("a"))
    return losses, adapters


def tokens_of(parts):
    """By task, the tokens of turns or of measurements."""
    tokens = Counter()
    for part in parts:
        tokens[part.task] += part.tokens
    return tokens


def end(engine):
    """Trains to the end; returns what was measured of the task "a" after steps."""
    found = measured_to_the_end(engine)
    return [done for done in found if done.task == "a" and done.task_step]


def test_the_loss_is_measured_every_n_steps_and_at_the_end(make_measured, make_engine, curve):
    engine = make_engine(make_measured("a", eval_every=4), shape=SMALL)
    engine.begin_evaluation(["a"])
    found = end(engine)
    losses, _ = curve
    assert [(done.task_step, done.loss) for done in found] == [
        (step, losses[step - 1]) for step in (4, STEPS)
    ]
    progress = engine.progress("a")
    assert progress.eval_loss == losses[-1]
    assert progress.eval_loss_first == pytest.approx(np.log(101), rel=0.5)
    assert progress.eval_target_tokens == found[0].target_tokens > 0


def test_without_eval_every_it_is_measured_at_the_end(make_measured, make_engine, curve):
    found = end(make_engine(make_measured("a"), shape=SMALL))
    assert [(done.task_step, done.loss) for done in found] == [(STEPS, curve[0][-1])]


def stopping_step(losses, patience):
    """The step at which patience ends, and that of the lowest loss until then."""
    for step in range(1, STEPS + 1):
        best = int(np.argmin(losses[:step])) + 1
        if step - best >= patience:
            return step, best
    return STEPS, best


@pytest.mark.parametrize("patience", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_task_stops_when_its_patience_ends(
    patience, make_measured, make_task, make_engine, curve, assert_same_bits
):
    losses, adapters = curve
    step, best = stopping_step(losses, patience)
    assert best < step < STEPS
    measured = make_measured("a", eval_every=1, patience=patience, keep_best=True)
    for others in ([], [make_task("b", steps=20), make_task("c", steps=2)]):
        engine = make_engine(*others, measured, shape=SMALL)
        assert [done.task_step for done in end(engine)] == list(range(1, step + 1))
        progress = engine.progress("a")
        assert (progress.status, progress.step, progress.best_step) == ("succeeded", step, best)
        assert f"without a lower one than after step {best}" in progress.stopped_early
        assert progress.eval_loss == losses[best - 1]
        assert_same_bits(engine.result("a")(), adapters[best - 1])
        assert_same_bits(engine.adapter("a"), adapters[step - 1])


def test_without_keep_best_training_gives_the_last_adapter(
    make_measured, make_engine, curve, assert_same_bits
):
    losses, adapters = curve
    engine = make_engine(make_measured("a", eval_every=2), shape=SMALL)
    end(engine)
    assert engine.progress("a").best_step % 2 == 0
    assert_same_bits(engine.result("a")(), adapters[-1])


def test_the_best_adapter_survives_a_break(make_measured, make_engine, curve, assert_same_bits):
    losses, adapters = curve
    best = int(np.argmin(losses)) + 1
    for restore in (False, True):
        engine = make_engine(make_measured("a", eval_every=1, keep_best=True), shape=SMALL)
        for _ in range(best):
            engine.train_round()
        engine.drain()
        if restore:
            arrays = engine.task_arrays("a")
            progress = TaskProgress.from_json(engine.progress("a").to_json())
            engine = make_engine(make_measured("a", eval_every=1, keep_best=True), shape=SMALL)
            engine.restore_task("a", arrays, progress)
        else:
            suspended = engine.suspend("a")
            engine = make_engine(shape=SMALL, modules=tuple(adapters[0]))
            engine.resume(suspended)
        end(engine)
        assert engine.progress("a").best_step == best
        assert_same_bits(engine.result("a")(), adapters[best - 1])


@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_a_measurement_that_arrives_after_a_task_has_left_counts(
    rounds, make_measured, make_task, make_engine, curve, assert_same_bits
):
    """The task leaves behind the round whose loss is measured; the result arrives later."""
    losses, adapters = curve
    tasks = make_measured("a", eval_every=1, keep_best=True), make_task("z", steps=30)
    engine = make_engine(*tasks, shape=SMALL)
    for _ in range(rounds):
        engine.train_round()
    suspended = engine.suspend("a")
    engine.train_round()
    best = int(np.argmin(losses[:rounds])) + 1
    assert suspended.slot.progress.best_step == best
    kept = suspended.with_kept()()
    progress = TaskProgress.from_json(suspended.slot.progress.to_json())
    engine.resume(suspended)
    assert_same_bits(engine.result("a")(), adapters[best - 1])
    engine.release("a")
    engine.resume(SuspendedTask.of(tasks[0], progress, lambda: kept))
    assert_same_bits(engine.result("a")(), adapters[best - 1])


def test_a_task_stops_when_its_time_is_over(make_measured, make_engine, curve):
    engine = make_engine(make_measured("a", steps=10_000, max_seconds=0.3), shape=SMALL)
    (found,) = end(engine)
    progress = engine.progress("a")
    assert progress.status == "succeeded" and progress.stopped_early.startswith("trained for")
    assert 0.3 <= progress.seconds < 30 and progress.step < 10_000
    assert found.task_step == progress.step and progress.eval_loss == found.loss


def test_a_loss_that_is_not_finite_is_never_the_best(make_measured, make_engine):
    wild = make_measured("a", eval_every=1, keep_best=True, steps=12, optimizer=SGD(1e30))
    engine = make_engine(wild, shape=SMALL)
    end(engine)
    progress = engine.progress("a")
    assert progress.status == "failed"
    assert progress.best_loss is None or np.isfinite(progress.best_loss)


# A global batch is one turn of so many tokens. The held-out samples, six times each, are several.
TURNS = {"shape": SMALL, "round_tokens": 540}


@pytest.fixture(scope="module")
def make_long(make_measured):
    """Makes a task whose held-out loss takes turns, and is that of `make_measured` to rounding."""

    def make(**fields):
        measured = make_measured("a", **{"eval_every": 1, "keep_best": True} | fields)
        return dataclasses.replace(measured, eval_samples=6 * measured.eval_samples)

    return make


@pytest.fixture(scope="module")
def turns(make_long):
    """Number of turns of a measurement."""
    lengths = [own.stream_length for own in make_long().eval_samples]
    return len(divide(lengths, TURNS["round_tokens"]))


@pytest.fixture(scope="module")
def divided(make_long, make_engine):
    """An engine that has measured the task "a" in turns after every step, and what it has found."""
    engine = make_engine(make_long(), **TURNS)
    engine.begin_evaluation(["a"])
    return engine, end(engine)


def test_a_measurement_in_turns_is_that_of_all_samples_together(divided, curve, assert_same_bits):
    engine, found = divided
    losses, adapters = curve
    assert [done.task_step for done in found] == list(range(1, STEPS + 1))
    assert [done.loss for done in found] == pytest.approx(losses, rel=1e-5)
    assert_same_bits(engine.adapter("a"), adapters[-1])
    assert_same_bits(engine.result("a")(), adapters[engine.progress("a").best_step - 1])
    assert engine.progress("a").status == "succeeded"


def test_the_others_train_while_a_task_is_measured(
    divided, turns, make_long, make_task, make_engine, assert_same_bits
):
    """And what is measured does not depend on them."""
    expected, losses = divided
    engine = make_engine(make_long(), make_task("b", steps=60), **TURNS)
    engine.begin_evaluation(["a"])
    steps, found, held_out = [], [], []
    while not engine.finished:
        engine.train_round()
        steps.append((engine.progress("a").step, engine.progress("b").step))
        found += [done for done in engine.take_evaluations() if done.task_step]
        held_out.append(tokens_of(engine.take_computed().held_out)["a"])
    # The first of the turns is dispatched with the step, and the task trains in none of the rounds
    # of the others.
    by_step = Counter(step for step, _ in steps)
    assert turns > 2 and all(by_step[step] == turns for step in range(1, STEPS))
    assert [b for _, b in steps] == [*range(len(steps))]
    # At most a turn in a round, but for the first two before training.
    assert max(held_out[1:]) < 1.5 * TURNS["round_tokens"] < sum(held_out) / (STEPS + 1)
    assert [done.loss for done in found] == [done.loss for done in losses]
    assert_same_bits(engine.result("a")(), expected.result("a")())


@pytest.mark.parametrize("restore", [False, True])
def test_a_measurement_that_is_interrupted_is_completed(
    restore, divided, turns, make_long, make_engine, assert_same_bits
):
    """A task that has been suspended goes on with the next turn; one that was saved is measured
    once more."""
    expected, losses = divided
    engine = make_engine(make_long(), **TURNS)
    engine.begin_evaluation(["a"])
    found, held_out, measured = [], Counter(), Counter()

    def take():
        found.extend(engine.take_evaluations())
        computed = engine.take_computed()
        held_out.update(tokens_of(computed.held_out))
        measured.update(tokens_of(computed.measured))

    while not engine.finished:
        suspended = engine.suspend("a")
        if restore:
            saved = suspended.with_kept()()
            engine.drain()
            take()
            progress = TaskProgress.from_json(suspended.slot.progress.to_json())
            prepared = suspended.slot.prepared
            suspended = SuspendedTask.of(prepared, progress, lambda saved=saved: saved)
        engine.resume(suspended)
        for _ in range(turns + 1 if restore else 1):
            engine.train_round()
            take()
    engine.drain()
    take()
    assert [(d.task_step, d.loss) for d in found if d.task_step] == [
        (d.task_step, d.loss) for d in losses
    ]
    assert held_out["a"] > measured["a"] if restore else held_out == measured
    assert engine.progress("a").best_step == expected.progress("a").best_step
    assert_same_bits(engine.result("a")(), expected.result("a")())


def test_rounds_count_in_which_tasks_are_only_measured(turns, make_long, make_engine):
    engine = make_engine(make_long(steps=2), **TURNS)
    engine.begin_evaluation(["a"])
    records = []
    while not engine.finished:
        engine.train_round()
        records.append(engine.take_round())
    assert [record.index for record in records] == list(range(3 * turns - 1))
    trained = [record.index for record in records if record.microbatches]
    assert trained == [turns - 1, 2 * turns - 1]


def test_short_samples_count_as_what_they_take_up(make_measured, make_engine):
    """So that no turn takes many microbatches: a row has room for 8 samples, however short."""
    short = random_samples(1, 240, (3, 4))
    engine = make_engine(dataclasses.replace(make_measured("a"), eval_samples=short), **TURNS)
    engine.begin_evaluation(["a"])
    largest = 0
    while engine.measures("a"):
        engine.train_round()
        largest = max(largest, tokens_of(engine.take_computed().held_out)["a"])
    # Each counts as 16 tokens, and those of a row lie in one of its two chunks.
    rows = -(-(TURNS["round_tokens"] // 16) // 8)
    assert largest == rows * SMALL.chunk_len


def test_a_task_whose_time_is_over_stops_when_it_has_been_measured(make_long, make_engine):
    engine = make_engine(make_long(steps=10_000, max_seconds=60), **TURNS)
    while not engine.progress("a").step:
        engine.train_round()
    engine.progress("a").seconds = 61.0
    assert engine.measures("a")
    assert [done.task_step for done in end(engine)] == [1]
    assert re.fullmatch("trained for 6[1-9] s", engine.progress("a").stopped_early)


def test_a_task_can_be_extended_while_its_last_step_is_measured(make_long, make_engine):
    engine = make_engine(make_long(steps=2, eval_every=None, keep_best=False), **TURNS)
    while engine.progress("a").step < 2:
        engine.train_round()
    assert engine.progress("a").status == "running" and not engine.finished
    engine.extend("a", 4)
    assert [done.task_step for done in end(engine)] == [2, 4]
    assert engine.progress("a").status == "succeeded"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patience": 2}, "patience needs eval_every"),
        ({"keep_best": True}, "keep_best needs eval_every"),
        ({"eval_every": 3, "eval_data": None}, "eval_every needs eval_data"),
        ({"max_seconds": 0}, "max_seconds"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, message):
    with pytest.raises(TaskError, match=message):
        Task("a", "a.jsonl", steps=1, **{"eval_data": "b.jsonl"} | fields)
