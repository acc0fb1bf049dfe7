"""Tasks come, go, pause and go on while rounds overlap on several devices."""

import dataclasses
import time
from collections import Counter

import jax
import numpy as np
import pytest

from jaxmux.engine import EngineSize
from jaxmux.engine.devices.compiled_stages import CompiledStages
from jaxmux.engine.state.stored_state import StoredState
from jaxmux.models import Backbone
from jaxmux.optimizers import SGD, AdamW, Lion
from jaxmux.planner.devices import Stage
from jaxmux.server import LiveTraining
from tests.engine.conftest import random_samples

# A pipeline, and a device beside it.
TWO_REPLICAS = {"layers": (3, 1), "others": (((4,), Stage()),)}


@pytest.fixture(scope="module")
def tasks(make_task):
    steps = {"a": 3, "b": 2, "c": 4, "d": 2, "e": 1}
    return {
        name: make_task(name, rank=2 + i, dropout=0.1, batch_size=3 + i, steps=own)
        for i, (name, own) in enumerate(steps.items())
    }


@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param({"layers": (3, 1)}, id="pipeline", marks=pytest.mark.slow),
        pytest.param(TWO_REPLICAS, id="replicas"),
        pytest.param(
            {"layers": (2, 2), "others": (((4,), Stage(tp=2)),)},
            id="unlike replicas",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_after_a_warm_up_nothing_is_compiled(replicas, make_task, make_engine, compiles):
    """The first tests of this file, because a later one would find programs compiled."""
    engine = make_engine(**replicas)
    engine.warm_up()
    before = len(compiles)
    kinds = {"adamw": AdamW(1e-2), "sgd": SGD(1e-2), "lion": Lion(1e-3)}
    tasks = [make_task(kind, optimizer=optimizer, steps=9) for kind, optimizer in kinds.items()]
    engine.register_tasks(tasks[:1])
    engine.train_round()
    engine.register_tasks(tasks[1:])
    engine.begin_evaluation(engine.names)
    engine.train_round()
    suspended = engine.suspend("sgd")
    engine.train_round()
    engine.resume(suspended)
    engine.release("lion")
    engine.train_round()
    engine.result("adamw")()
    assert compiles[before:] == []


@pytest.mark.parametrize(
    ("schedule", "round_tokens", "seed"),
    [
        pytest.param("1f1b", None, 0, marks=pytest.mark.slow),
        ("1f1b", 100, 1),
        pytest.param("1f1b", None, 1, marks=pytest.mark.slow),
        pytest.param("1f1b", 100, 0, marks=pytest.mark.slow),
        pytest.param("lorapp", None, 0, marks=pytest.mark.slow),
        pytest.param("lorapp", None, 1, marks=pytest.mark.slow),
    ],
)
def test_every_task_gets_the_bits_it_gets_alone_on_a_pipeline(
    schedule, round_tokens, seed, tasks, make_engine, train, drive_at_random, assert_same_bits
):
    alone = {}
    for name, task in tasks.items():
        engine = make_engine(task, round_tokens=round_tokens)
        alone[name] = train(engine)[name], engine.task_arrays(name)
    engine = make_engine(layers=(3, 1), schedule=schedule, round_tokens=round_tokens)
    updates, arrays = drive_at_random(engine, tasks, seed)
    for name, (expected, own) in alone.items():
        assert [u._replace(round=0) for u in updates[name]] == [
            u._replace(round=0) for u in expected
        ]
        assert_same_bits(arrays[name], {path: own[path] for path in arrays[name]})


@pytest.mark.parametrize(
    ("layers", "seed"),
    [
        ((3, 1), 0),
        pytest.param((3, 1), 1, marks=pytest.mark.slow),
        pytest.param((), 1, marks=pytest.mark.slow),
    ],
)
def test_every_token_that_is_dispatched_is_counted_once(
    layers, seed, tasks, make_engine, drive_at_random, monkeypatch
):
    """Also those of rounds that had begun with tasks that leave, or that are forgotten."""
    engine = make_engine(layers=layers, round_tokens=200)
    dispatched, counted = [], Counter()
    count, take = engine._count, engine._results.computed.take

    def noting(plan, indices, times=1):
        for i in indices:
            dispatched.append(times * sum(plan.microbatches[i].trained_tokens.values()))
        count(plan, indices, times)

    def taking():
        taken = take()
        for turn in taken.turns:
            counted[turn.task] += turn.tokens
        return taken

    monkeypatch.setattr(engine, "_count", noting)
    monkeypatch.setattr(engine._results.computed, "take", taking)
    updates, _ = drive_at_random(engine, tasks, seed)
    engine.drain()
    assert sum(counted.values()) == sum(dispatched)
    for name, own in updates.items():
        assert counted[name] >= sum(update.computed_tokens for update in own) > 0


def test_arrivals_and_departures_do_not_empty_the_pipeline(make_task, make_engine, compiles):
    """Microbatches of the following round are in flight at every end of a round."""
    tasks = {name: make_task(name, steps=20, batch_size=3, lengths=(60, 120)) for name in "abcde"}
    engine = make_engine(*(tasks[name] for name in "abc"), layers=(3, 1))
    engine.train_round()
    engine.resume(engine.suspend("b"))
    engine.release("b")
    engine.train_round()
    before = len(compiles)
    order = engine._executor._replicas[0]._order
    for change in (
        lambda: engine.register_tasks([tasks["d"]]),
        lambda: engine.release("a"),
        lambda: engine.register_tasks([tasks["e"]]),
    ):
        assert order.begun > order.ended
        change()
        assert order.begun > order.ended
        engine.train_round()
    assert compiles[before:] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas",
    [{"layers": (3, 1)}, {"layers": (2, 2), "others": (((4,), Stage(tp=2)),)}],
    ids=["pipeline", "unlike replicas"],
)
def test_tasks_go_on_in_an_engine_of_another_size(replicas, tasks, make_engine, train):
    """With what has been accumulated of their global batches."""
    both = [tasks["a"], tasks["c"]]
    expected = train(make_engine(*both, round_tokens=100, **replicas))
    engine = make_engine(*both, round_tokens=100, **replicas)
    updates = engine.train_round() + engine.train_round()
    engine.resize(EngineSize(6, 1))
    updates += engine.train_round() + engine.train_round()
    engine.resize(EngineSize(2, 2))
    rest = train(engine)
    for name, own in expected.items():
        found = [u for u in updates if u.task == name] + rest[name]
        assert [u.task_step for u in found] == [u.task_step for u in own]
        assert [u.loss for u in found] == pytest.approx([u.loss for u in own], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="1f1b"),
        pytest.param({"schedule": "gpipe"}, id="gpipe", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_task_that_left_reach_no_other(options, make_task, make_engine):
    """Those that another replica still had when the task left in the middle of a batch."""
    sizes = {"large": {"batch_size": 12, "lengths": (40, 90)}, "small": {"batch_size": 2}}
    tasks = [make_task(name, **own) for name, own in sizes.items()]
    engine = make_engine(*tasks, round_tokens=100, **TWO_REPLICAS, **options)
    for _ in range(2):
        engine.train_round(stream=False)
    assert engine.accumulated("large")
    number = engine._slots.number("large")
    engine.release("large")
    engine.drain()
    engine.register_tasks([make_task("next")])
    assert engine._slots.number("next") == number
    arrays = engine.task_arrays("next")
    assert all(not x.any() for path, x in arrays.items() if path.startswith("accumulators"))
    assert not arrays["sums"].any()


def test_pauses_of_neighbours_move_no_gradients_between_replicas(
    make_task, make_engine, assert_same_bits
):
    """Samples of a task that go to the same replicas give the same bits."""
    large = make_task("large", batch_size=12, lengths=(40, 90), steps=1)
    others = [make_task(name, batch_size=2, steps=99) for name in "abc"]

    def dealt(lengths):
        every = {slot: range(len(own)) for slot, own in lengths.items()}
        return [{slot: own[i::2] for slot, own in every.items()} for i in range(2)]

    def trained(company):
        engine = make_engine(large, round_tokens=100, **TWO_REPLICAS)
        engine._executor.dispatch = dealt
        updates, settled = [], []
        while engine.progress("large").status == "running":
            if company and engine.rounds == 1:
                engine.register_tasks(others)
            if company and engine.rounds in (3, 6):
                # The only free place is that of "a" itself, which a round that has begun uses.
                settled.append(engine._position.begun_ahead and engine.accumulated("large"))
                engine.resume(engine.suspend("a"))
            updates += engine.train_round()
        assert not company or len(settled) == 2 and all(settled) and engine.size.slots == 4
        own = [u._replace(round=0) for u in updates if u.task == "large"]
        return own, engine.snapshot("large")()

    (expected_updates, expected), (updates, found) = trained(False), trained(True)
    assert updates == expected_updates
    assert_same_bits(found, expected)


@pytest.mark.slow
def test_replicas_follow_a_pool_that_grows(make_task, make_engine):
    replicas = {"layers": (4,), "others": (((4,), Stage()),)}
    engine = make_engine(make_task("narrow", rank=2), **replicas)
    engine.train_round()
    engine.register_tasks([make_task("wide", rank=16)])
    engine.drain()
    assert [u.task for u in engine.train_round() + engine.drain()] == ["narrow", "wide"]


def test_a_place_that_was_just_left_is_taken_without_a_larger_pool(
    tasks, make_engine, train, assert_same_bits
):
    alone = make_engine(tasks["e"])
    train(alone)
    engine = make_engine(*(tasks[name] for name in "abcd"), layers=(3, 1))
    engine.train_round()
    engine.train_round()
    engine.release("a")
    engine.register_tasks([tasks["e"]])
    assert engine.size.slots == 4
    train(engine)
    expected, found = alone.task_arrays("e"), engine.task_arrays("e")
    assert_same_bits(found, {path: expected[path] for path in found})


@pytest.mark.parametrize(
    "round_tokens",
    [
        pytest.param(None, id="whole batches", marks=pytest.mark.slow),
        pytest.param(100, id="parts of batches", marks=pytest.mark.slow),
    ],
)
def test_every_task_gets_what_it_gets_alone_on_unlike_replicas(
    round_tokens, tasks, make_engine, train, drive_at_random
):
    pair = {"layers": (2, 2), "others": (((4,), Stage(tp=2)),), "round_tokens": round_tokens}
    engine = make_engine(*tasks.values(), slots=len(tasks), **pair)
    expected = train(engine)
    updates, _ = drive_at_random(make_engine(**pair), tasks, 0)
    for name, own in expected.items():
        assert [u.task_step for u in updates[name]] == [u.task_step for u in own]
        assert [u.loss for u in updates[name]] == pytest.approx([u.loss for u in own], rel=1e-3)


@pytest.mark.slow
def test_tasks_on_a_pipeline_stop_early_with_the_bits_of_one_device(
    make_task, make_engine, assert_same_bits
):
    """Microbatches of the next round have begun when the held-out loss of "a" is known. That of "b"
    is measured in several rounds."""

    def trained(**options):
        tasks = [
            dataclasses.replace(
                make_task(
                    name,
                    steps=12,
                    batch_size=8,
                    optimizer=SGD(0.8),
                    eval_data="random.jsonl",
                    eval_every=1,
                    patience=1,
                    keep_best=True,
                ),
                eval_samples=times * random_samples(99, 5, (20, 90)),
            )
            for name, times in {"a": 1, "b": 6}.items()
        ]
        engine, found = make_engine(*tasks, round_tokens=540, **options), []
        while not engine.finished:
            engine.train_round()
            found += engine.take_evaluations()
        engine.drain()
        found += engine.take_evaluations()
        losses = {(done.task, done.task_step): done.loss for done in found}
        return losses, {name: (engine.progress(name).step, engine.result(name)()) for name in "ab"}

    losses, ends = trained(layers=(3, 1))
    expected_losses, expected_ends = trained()
    assert losses == expected_losses
    assert_same_bits(ends, expected_ends)
    assert min(step for step, _ in ends.values()) < 12


def test_a_task_of_a_round_that_has_begun_keeps_its_adapter_while_it_is_measured(
    make_task, make_engine
):
    """And it is measured for several rounds."""
    task = make_task("a", steps=12, batch_size=8, optimizer=SGD(0.8), eval_data="random")
    task = dataclasses.replace(task, eval_samples=6 * random_samples(99, 5, (20, 90)))
    engine = make_engine(task, layers=(3, 1), round_tokens=540)
    for _ in range(3):
        engine.train_round()
    assert engine._position.begun_ahead
    expected = engine.evaluate(["a"])["a"]
    engine.begin_evaluation(["a"])
    while not (found := engine.take_evaluations()):
        assert engine.measures("a") or engine.progress("a").step == 3
        engine.train_round()
    assert (found[0].task_step, found[0].loss) == (3, pytest.approx(expected, rel=1e-5))
    engine.close()


def test_tasks_that_take_each_others_places_do_not_enlarge_the_pool(
    make_task, make_engine, compiles
):
    """The place of a task that has left is used by the round that has begun."""
    tasks = {n: make_task(n, steps=99, batch_size=2, lengths=(60, 120)) for n in "abcdef"}
    engine = make_engine(layers=(3, 1))
    live = LiveTraining(engine, lambda task: dataclasses.replace(tasks[task.name], task=task))
    before = len(compiles)
    for priority, name in enumerate(tasks):
        live.register(tasks[name].task, priority)
        for _ in range(4 if priority >= 4 else 1):
            live.step()
            while live._preparation.seconds_left is not None:
                time.sleep(0.001)
        assert engine.size.slots == 4
    states = [status.state for status in live.statuses()]
    assert states == ["queued"] * 2 + ["running"] * 4
    assert compiles[before:] == []
    live.close()
    live.wait()
    engine.close()


@pytest.fixture
def waits_for_the_state(monkeypatch):
    """A function that calls another one, and returns whether it waits for the passes that an
    engine has dispatched."""

    def waits(engine, call):
        waited, wait = [], StoredState.wait
        with monkeypatch.context() as patch:
            patch.setattr(StoredState, "wait", lambda own: waited.append(own) or wait(own))
            call()
        return engine._slots.stored in waited

    return waits


@pytest.mark.slow
@pytest.mark.parametrize(
    "replicas",
    [
        pytest.param({"layers": (3, 1)}, id="pipeline"),
        pytest.param({"layers": (2, 2), "stage": Stage(tp=2)}, id="pp2,tp2"),
        pytest.param(
            {"layers": (2, 2), "others": (((4,), Stage(tp=2)),)},
            id="unlike replicas",
        ),
    ],
)
def test_programs_for_another_size_are_compiled_beside_training(
    replicas, make_task, make_engine, compiles, monkeypatch, waits_for_the_state
):
    engine = make_engine(**replicas)
    engine.warm_up()
    before = len(compiles)
    held_out = random_samples(99, 5, (20, 90))
    tasks = [
        dataclasses.replace(make_task(name, steps=999, batch_size=1), eval_samples=held_out)
        for name in "ab"
    ]
    engine.register_tasks(tasks)
    engine.train_round()
    assert compiles[before:] == []
    size = EngineSize(8, 2)
    programs = engine.compile_ahead(size)
    while not programs.ready:
        engine.train_round()
        # The compiler needs the processors more.
        time.sleep(0.5)
    before = len(compiles)
    with monkeypatch.context() as patch:
        # The engine takes over what has been chosen, too.
        patch.setattr(CompiledStages, "choose_remat", lambda *_: pytest.fail("chosen again"))
        engine.resize(size, programs)
    assert engine.size == size
    # Nothing is loaded while stages exchange arrays.
    assert waits_for_the_state(engine, lambda: engine.resume(engine.suspend("b")))
    assert not waits_for_the_state(engine, lambda: engine.resume(engine.suspend("b")))
    stored, measured_before = engine._slots.stored, engine._slots.stored.measured
    engine.begin_evaluation(engine.names)
    assert stored.measured and stored.measured is not measured_before
    with monkeypatch.context() as patch:
        waited = []
        patch.setattr(jax, "block_until_ready", waited.append)
        stored.wait()
    assert any(array is stored.measured for array in waited[0])
    engine.train_round()
    engine.drain()
    engine.result("a")()
    assert compiles[before:] == [] and engine.take_evaluations()


GROWING = {
    "pipeline": {"layers": (3, 1)},
    "tp2": {"layers": (4,), "stage": Stage(tp=2)},
    "dp2": {"layers": (4,), "stage": Stage(dp=2)},
    "unlike replicas": {"layers": (2, 2), "others": (((4,), Stage(tp=2)),)},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "most"),
    [
        pytest.param(GROWING["pipeline"], EngineSize(8, 2), id="pipeline"),
        *(
            pytest.param(mesh, EngineSize(8, 4), id=f"rows-{name}")
            for name, mesh in GROWING.items()
        ),
    ],
)
def test_a_mesh_grows_and_shrinks_with_its_load(replicas, most, config, make_task, make_engine):
    """The results differ from those of an engine that keeps its size by the order of sums at
    most."""
    names = "abcdef"
    if "others" in replicas:
        # Samples go to other replicas, which round otherwise. Training on the large weights of the
        # other tests trebles such differences in every step.
        replicas = {"model": Backbone.random(config, seed=5)} | replicas
    tasks = {name: make_task(name, steps=12 if name == "a" else 3, batch_size=5) for name in names}

    def trained(**elastic):
        engine, sizes = make_engine(**replicas), []
        prepare = lambda task: dataclasses.replace(tasks[task.name], task=task)  # noqa: E731
        live = LiveTraining(engine, prepare, **elastic)
        for name in names:
            live.register(tasks[name].task)
        while any(own.state != "succeeded" for own in live.statuses()) or not live.statuses():
            live.step()
            sizes.append(engine.size)
            while live._size and live._size._ahead and not live._size._ahead.ready:
                time.sleep(0.01)
        live.close()
        live.wait()
        engine.close()
        return sizes, {name: jax.tree.leaves(live.adapter(name)) for name in names}

    sizes, found = trained(most=most, quiet_rounds=3)
    assert most in sizes and sizes[-1] == EngineSize(4, 2)
    _, expected = trained()
    for name in names:
        before = jax.tree.leaves(tasks[name].make_adapter())
        change = sum(np.square(x - y).sum() for x, y in zip(expected[name], before, strict=True))
        pairs = zip(found[name], expected[name], strict=True)
        assert sum(np.square(x - y).sum() for x, y in pairs) ** 0.5 < 1e-4 * change**0.5
