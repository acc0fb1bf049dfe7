"""What tasks have used is counted exactly once, whatever becomes of them."""

import dataclasses
import itertools
import math

import jax
import pytest

from jaxmux.engine.devices import programs
from jaxmux.engine.rounds.rounds import Turns
from jaxmux.optimizers import SGD
from jaxmux.planner.packing import pack_round
from jaxmux.server import Meter
from jaxmux.server import training as live_training
from tests.engine.conftest import random_samples

from .conftest import SHAPE
from .test_live_training import settle, step_with_data, train_to_the_end

ROUND_TOKENS = 150


@pytest.fixture
def large(make_task):  # noqa: F811
    """A task whose global batches take several rounds."""
    return make_task("a", batch_size=12, lengths=(30, 90), steps=3)


@pytest.fixture
def watched(monkeypatch):
    """Lets a clock tick once whenever it is read, and notes what an engine computes in each round:
    the seconds and, by task, the tokens."""

    def watch(live):
        clock, rounds, taken = itertools.count(), [], []
        monkeypatch.setattr(live_training.time, "monotonic", lambda: float(next(clock)))
        take, take_results = live._engine.take_computed, live._tasks.take_results

        def noting(updates, computed, seconds):
            rounds.append((seconds, taken.pop().by_task))
            take_results(updates, computed, seconds)

        monkeypatch.setattr(live._engine, "take_computed", lambda: taken.append(take()) or taken[0])
        monkeypatch.setattr(live._tasks, "take_results", noting)
        return rounds

    return watch


def chunk_tokens(samples):
    """Tokens of the chunks that hold samples which are packed alone."""
    lengths = {0: [sample.stream_length for sample in samples]}
    chunks = {
        (i, p.row, token // SHAPE.chunk_len)
        for i, placements in enumerate(pack_round(lengths, SHAPE).microbatches())
        for p in placements
        for token in range(p.offset, p.offset + lengths[0][p.sample])
    }
    return len(chunks) * SHAPE.chunk_len


def turns_of(prepared):
    """By step, the tokens of the turns of its global batch."""
    turns = Turns({0: prepared}, {0: 0}, ROUND_TOKENS)
    steps = [[] for _ in range(prepared.steps)]
    for own in iter(turns.next, {}):
        turn = own[0]
        steps[turn.step].append(chunk_tokens([turn.batch[i] for i in turn.samples]))
    return steps


def sum_of(meters):
    total = Meter()
    for meter in meters:
        total.replace(Meter(), meter)
    return total


def read_data(live):
    """Lets the data of new tasks be read before the next round."""
    live._runner.carry_out()
    settle(live)


def integers(meter):
    return dataclasses.replace(meter, device_seconds=0.0)


def test_held_out_tokens_are_metered_and_paid_for(make_live, tasks, watched):
    # Every sample has a chunk to itself.
    held_out = random_samples(1, 5, (40, 60))
    task = dataclasses.replace(tasks["a"].task, eval_data="random.jsonl", eval_every=2)
    measured = dataclasses.replace(tasks["a"], task=task, eval_samples=held_out)
    live = make_live({"a": lambda _: measured})
    rounds = watched(live)
    live.register(task)
    live.register(tasks["b"].task)
    train_to_the_end(live, "a", "b")
    meters = {name: live.status(name).meter for name in "ab"}
    # Before training, and after steps 2 and 4.
    assert (meters["a"].held_out_tokens, meters["b"].held_out_tokens) == (3 * 5 * 64, 0)
    for name, meter in meters.items():
        assert meter.computed_tokens == sum(
            chunk_tokens(tasks[name].batches[k]) for k in range(tasks[name].steps)
        )
        shares = [s * own.get(name, 0) / max(1, sum(own.values())) for s, own in rounds]
        assert meter.device_seconds == pytest.approx(sum(shares))
    paid = sum(s for s, own in rounds if "a" in own)
    training = meters["a"].computed_tokens
    assert sum(own.get("a", 0) for _, own in rounds) == training + meters["a"].held_out_tokens
    assert 0 < meters["a"].device_seconds < paid


@pytest.mark.parametrize("ended", ["cancelled", "paused"])
def test_turns_of_a_batch_without_an_update_are_counted(ended, make_live, large):
    live = make_live({"a": lambda _: large}, {"round_tokens": ROUND_TOKENS})
    live.register(large.task)
    read_data(live)
    live.step()
    live.step()
    (live.cancel if ended == "cancelled" else live.pause)("a")
    live.step()
    live.step()
    status = live.status("a")
    assert (status.state, status.step) == (ended, 0)
    # Two rounds were dispatched before the command.
    first = turns_of(large)[0]
    assert len(first) > 3
    assert integers(status.meter) == Meter(computed_tokens=sum(first[:2]))
    assert live.totals() == status.meter
    if ended == "paused":
        live.resume("a")
        train_to_the_end(live, "a")
        assert live.status("a").meter.computed_tokens == sum(map(sum, turns_of(large)))


def test_what_a_task_that_has_failed_had_begun_is_counted(make_live, tasks):
    task = dataclasses.replace(tasks["a"].task, optimizer=SGD(1e30))
    diverges = dataclasses.replace(tasks["a"], task=task)
    live = make_live({"a": lambda _: diverges}, {"max_bad_steps": 2})
    live.register(task)
    train_to_the_end(live, "a")
    live.step()
    status, samples = live.status("a"), tasks["a"].batches
    assert (status.state, status.step) == ("failed", 3)
    # The round after the last update had been dispatched when its results arrived.
    assert status.meter.computed_tokens == sum(chunk_tokens(samples[k]) for k in range(4))
    assert status.meter.effective_tokens == sum(
        s.stream_length for k in range(3) for s in samples[k]
    )


def test_a_batch_that_begins_again_counts_once(make_live, large, monkeypatch):
    """Its gradients are lost, because the device runs out of memory."""
    options = {"round_tokens": ROUND_TOKENS, "remat": "norms"}
    live = make_live({"a": lambda _: large}, options)
    accumulate, seen = programs.accumulate, itertools.count()

    def failing(*arguments):
        if next(seen) == 4:
            accumulate(*arguments)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return accumulate(*arguments)

    failing.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", failing)
    live.register(large.task)
    train_to_the_end(live, "a")
    meter, turns = live.status("a").meter, turns_of(large)
    assert meter.computed_tokens == sum(map(sum, turns))
    lost = [sum(turns[0][:k]) for k in range(1, len(turns[0]))]
    assert meter.recomputed_tokens in lost
    assert live.totals() == meter


def test_the_totals_are_the_sum_also_over_forgotten_tasks(make_live, tasks, watched):
    """Names are used again, tasks are cancelled with a round on its way, and one has failed."""
    live = make_live(most_ended=1)
    rounds, seen = watched(live), {}

    def look():
        # Their own meters, which also count what comes in the round in which they are forgotten.
        seen.update({(own.name, own.history[0].time): own.meter for own in live._tasks})

    for name in "abcdabcde":
        registered = live.register(dataclasses.replace(tasks[name].task))
        live.step()
        settle(live)
        if registered.exception():
            continue
        for _ in range(3):
            live.step()
            look()
            if name == "b":
                live.cancel("b")
    ended = False
    while not ended or len(live.statuses()) > 1:
        ended = not live.step()
        settle(live)
        look()
    assert len(live.statuses()) == 1 and len(seen) > 6
    totals, expected = live.totals(), sum_of(seen.values())
    assert integers(totals) == integers(expected)
    assert math.isclose(totals.device_seconds, expected.device_seconds, rel_tol=1e-9)
    # Every token and second of every round is in the totals.
    assert totals.computed_tokens == sum(sum(own.values()) for _, own in rounds)
    assert totals.device_seconds == sum(seconds for seconds, _ in rounds)


def test_learning_rates_follow_the_longer_schedule_from_the_extension_on(make_live, make_task):
    from jaxmux.optimizers import AdamW, Schedule

    decaying = make_task("a", steps=6, optimizer=AdamW(1e-2, schedule=Schedule("cosine")))
    live = make_live({"a": lambda _: decaying})
    events = live.events()
    live.register(decaying.task)
    step_with_data(live)
    while live.status("a").step < 2:
        live.step()
    live.extend("a", 15)
    train_to_the_end(live, "a")
    live.close()
    live.run()
    rates = [event.fields["lr"] for event in events if event.kind == "update"]
    # Two updates have been seen, and a third one had been dispatched.
    lengths = [6] * 3 + [15] * 12
    assert rates == pytest.approx(
        [0.5e-2 * (1 + math.cos(math.pi * k / steps)) for k, steps in enumerate(lengths)]
    )
