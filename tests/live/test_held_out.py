"""Held-out losses of tasks that come and go: what others see of them, early ends, best adapters."""

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxmux.engine import TaskProgress, train_on
from jaxmux.engine.state import slots as slot
from jaxmux.optimizers import SGD
from tests.engine.conftest import random_samples

from .test_live_training import settle, train_to_the_end

STEPS = 12


@pytest.fixture(scope="module")
def make_measured(make_task):
    """Makes a task with held-out samples whose loss goes up and down."""

    def make(name, **fields):
        fields = {"optimizer": SGD(0.8), "steps": STEPS, "eval_data": "random.jsonl"} | fields
        held_out = random_samples(99, 5, (20, 90))
        return dataclasses.replace(make_task(name, **fields), eval_samples=held_out)

    return make


@pytest.fixture
def live_of(make_live, tasks):
    """Makes a live training in which tasks are registered, some of them measured ones."""

    def make(*prepared):
        for own in prepared:
            tasks[own.task.name] = own
        live = make_live()
        for own in prepared:
            live.register(own.task)
        return live

    return make


@pytest.fixture(scope="module")
def curve(make_measured, make_live_engine):
    """The held-out loss and the adapter of the task "m" after every step, measured one by one on
    an engine of its own; by number of steps."""
    engine = make_live_engine()
    engine.register_tasks([make_measured("m")])
    found = {}
    for step in range(1, STEPS + 1):
        engine.train_round()
        engine.drain()
        found[step] = engine.evaluate(["m"])["m"], engine.adapter("m")
    return found


def test_losses_are_told_as_events_and_shown_as_status(live_of, make_measured, tasks, curve):
    live = live_of(make_measured("m", eval_every=5), tasks["a"])
    events, shown = live.events(), []
    while not shown or shown[-1].state in ("preparing", "queued", "running"):
        live.step()
        settle(live)
        shown.append(live.status("m"))
    live.close()
    live.wait()
    told = [event for event in events if event.kind == "evaluation"]
    assert {event.task for event in told} == {"m"}
    assert [event.fields["task_step"] for event in told] == [0, 5, 10, 12]
    for event in told[1:]:
        assert event.fields["loss"] == curve[event.fields["task_step"]][0]
    # While it trains, and not only at its end.
    losses = dict.fromkeys(own.held_out_loss for own in shown if own.state == "running")
    losses.pop(None, None)
    assert list(losses) == [event.fields["loss"] for event in told[:3]]
    assert (shown[-1].held_out_loss, shown[-1].step) == (curve[12][0], 12)
    assert shown[-1].best_step == min((5, 10, 12), key=lambda step: curve[step][0])


@pytest.mark.parametrize("paused", [False, True])
def test_a_task_that_stops_early_gives_its_best_adapter_and_its_place(
    paused, live_of, make_measured, tasks, curve, assert_same_bits
):
    """Four tasks share three places."""
    losses = {step: loss for step, (loss, _) in curve.items()}
    lowest = {step: min(range(1, step + 1), key=losses.get) for step in losses}
    stop = next(step for step, best in lowest.items() if step - best >= 2)
    assert lowest[stop] < stop < STEPS
    measured = make_measured("m", eval_every=1, patience=2, keep_best=True)
    live = live_of(measured, tasks["a"], tasks["b"], tasks["c"])
    if paused:
        # After the best step, when only the host has its adapter.
        while not live.statuses() or live.status("m").step <= lowest[stop]:
            live.step()
        live.pause("m")
        for _ in range(3):
            live.step()
        assert live.status("m").state == "paused"
        live.resume("m")
    train_to_the_end(live, "m", "a", "b", "c")
    status = live.status("m")
    assert (status.state, status.step, status.best_step) == ("stopped early", stop, lowest[stop])
    assert status.reason.startswith("2 measurements of the held-out loss without a lower one")
    assert status.held_out_loss == losses[lowest[stop]]
    assert_same_bits(live.adapter("m"), curve[lowest[stop]][1])
    last = jax.tree.leaves(curve[stop][1])
    assert any(
        (x != y).any() for x, y in zip(jax.tree.leaves(live.adapter("m")), last, strict=True)
    )


def test_a_task_that_is_measured_for_several_rounds_says_so(make_live, make_measured, tasks, curve):
    """Its neighbour trains on, and it ends when its last measurement is complete."""
    measured = make_measured("m")
    tasks["m"] = dataclasses.replace(measured, eval_samples=6 * measured.eval_samples)
    live, shown = make_live(engine_options={"round_tokens": 540}), []
    live.register(dataclasses.replace(tasks["a"].task, steps=200))
    while not live.statuses() or not live.status("a").step:
        live.step()
        settle(live)
    live.register(tasks["m"].task)
    while not shown or shown[-1][0].state != "succeeded":
        live.step()
        settle(live)
        shown.append((live.status("m"), live.status("a")))
    before = [(m, a) for m, a in shown if m.step == 0 and m.reason]
    assert {m.reason for m, _ in before} == {"its held-out loss is being measured"}
    assert len({a.step for _, a in before}) > 1
    after = [m for m, _ in shown if m.step == STEPS]
    assert [m.state for m in after] == ["running"] * (len(after) - 1) + ["succeeded"]
    assert len(after) > 2 and after[-1].reason is None
    assert after[-1].held_out_loss == pytest.approx(curve[STEPS][0], rel=1e-5)
    lengths = [own.stream_length for own in tasks["m"].eval_samples]
    assert after[-1].meter.held_out_tokens >= 2 * sum(lengths)


def test_a_task_ends_when_its_time_is_over_and_waiting_does_not_count(
    live_of, make_measured, monkeypatch
):
    """A round takes a second."""
    seconds = 0.0
    monkeypatch.setattr(slot, "time", SimpleNamespace(monotonic=lambda: seconds))
    live = live_of(make_measured("m", steps=1000, max_seconds=6))

    def step():
        nonlocal seconds
        seconds += 1
        live.step()
        settle(live)

    while not live.statuses() or live.status("m").step < 3:
        step()
    live.pause("m")
    for _ in range(20):
        step()
    assert (live.status("m").state, live.status("m").step) == ("paused", 4)
    live.resume("m")
    while live.status("m").state != "stopped early":
        step()
    status = live.status("m")
    # Time counts from the first result on, and the round that has begun is trained to its end.
    assert 6 <= status.step <= 10
    assert "trained for" in status.reason
    assert np.isfinite(status.held_out_loss)


def test_a_task_that_is_often_interrupted_ends_when_its_time_is_over(
    live_of, make_measured, monkeypatch
):
    """A round takes a second."""
    seconds = 0.0
    monkeypatch.setattr(slot, "time", SimpleNamespace(monotonic=lambda: seconds))
    live = live_of(make_measured("m", steps=1000, max_seconds=6))
    for i in range(100):
        if not live.statuses() or live.status("m").state != "stopped early":
            seconds += 1
            live.step()
            settle(live)
            if i > 4:
                (live.pause, live.resume)[i % 2]("m")
    assert live.status("m").state == "stopped early" and live.status("m").step <= 14


def test_more_steps_do_not_help_a_task_whose_time_is_over(make_measured):
    task = make_measured("m", steps=3, max_seconds=6).task
    progress = TaskProgress(status="succeeded", step=3, seconds=7.0)
    train_on(progress, task)
    assert (progress.status, progress.stopped_early) == ("succeeded", "trained for 7 s")
    progress = TaskProgress(status="succeeded", step=3, seconds=5.0)
    train_on(progress, task)
    assert progress.status == "running"
