"""A mesh whose devices run out of memory before a round recomputes more, and trains the same."""

import itertools
import logging
import math
import time

import jax
import numpy as np
import pytest

from jaxmux.engine import EngineSize
from jaxmux.engine.devices import compiled_stages, programs
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.optimizers import SGD
from jaxmux.planner.costs.memory_model import exchanged_bytes
from jaxmux.planner.devices import Stage
from jaxmux.sharding import StageMesh

MESH = {"layers": (3, 1), "remat": "dots"}
TWO_REPLICAS = {"layers": (4,), "others": (((4,), Stage()),)}


@pytest.fixture
def fail_if(monkeypatch):
    """Lets calls of `backward`, and of `accumulate` on a replica of one device, fail like those on
    a full device, after they have taken the donated arrays. `fails` gets the number of the call and
    the devices."""
    seen = itertools.count()

    def install(fails) -> None:
        def patch(module, name) -> None:
            program = getattr(module, name)

            def failing(*arguments):
                found = program(*arguments)
                if fails(next(seen), jax.tree.leaves(found)[0].devices()):
                    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
                return found

            failing.lower, failing.eval_shape = program.lower, program.eval_shape
            monkeypatch.setattr(module, name, failing)

        patch(compiled_stages, "backward")
        patch(programs, "accumulate")

    return install


def assert_close(found, found_updates, expected, expected_updates):
    for name, updates in expected_updates.items():
        for value in ("loss", "grad_norm"):
            np.testing.assert_allclose(
                [getattr(u, value) for u in found_updates[name]],
                [getattr(u, value) for u in updates],
                rtol=1e-4,
            )
        for module, factors in expected.adapter(name).items():
            for one, other in zip(found.adapter(name)[module], factors, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_lack_of_memory_for_residuals_shows_before_programs_are_compiled(
    make_engine, make_task, train, monkeypatch, compiles
):
    """The first test of this file, because a later one would find programs compiled."""
    allocate, calls = compiled_stages.CompiledStages._allocate, itertools.count()

    def failing(self, part):
        allocate(self, part)
        if next(calls) == 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(compiled_stages.CompiledStages, "_allocate", failing)
    engine = make_engine(make_task("a", steps=1), **MESH)
    train(engine)
    assert engine.remat == ("lean",) * 4
    passes = [name for name in compiles if "forward_into" in name or "backward" in name]
    assert len(passes) == 2 * len(MESH["layers"])


def test_layers_recompute_more_and_nothing_is_lost(fail_if, make_engine, make_task, train, caplog):
    tasks = [make_task(name, steps=2) for name in "ab"]
    expected = make_engine(*tasks, **MESH)
    expected_updates = train(expected)
    fail_if(lambda number, _: number == 1)
    found = make_engine(*tasks, **MESH)
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        found_updates = train(found)
    assert [r.message.split(";")[0] for r in caplog.records] == ["the device ran out of memory"]
    assert expected.remat == "dots" and found.remat == ("lean",) * 4
    assert (found.rounds, found.microbatches) == (expected.rounds, expected.microbatches)
    assert_close(found, found_updates, expected, expected_updates)


@pytest.mark.parametrize("replica", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_gradients_of_all_replicas_begin_again(replica, fail_if, make_engine, make_task, train):
    """The round began before a checkpoint; a replica runs out of memory after it."""

    def task():
        return make_task("a", steps=2, batch_size=12, lengths=(50, 90), optimizer=SGD(0.1))

    expected = make_engine(task(), **TWO_REPLICAS)
    expected_updates = train(expected)
    first = make_engine(task(), **TWO_REPLICAS)
    seen = itertools.count()
    first.train_round(stop=lambda: next(seen) >= 1)
    first.drain()
    done = first.accumulated("a")
    assert 0 < len(done) < 12
    found = make_engine(task(), **TWO_REPLICAS)
    found.restore_task("a", first.task_arrays("a"), first.progress("a"), done)
    full, failed = jax.devices()[replica], []

    def fails(_, devices) -> bool:
        if full not in devices or failed:
            return False
        failed.append(full)
        return True

    fail_if(fails)
    found_updates = train(found)
    assert failed
    assert_close(found, found_updates, expected, expected_updates)


def test_memory_that_a_pause_has_freed_may_be_gone(
    make_engine, make_task, train, monkeypatch, caplog
):
    expected = make_engine(make_task("a", steps=3), **MESH)
    expected_updates = train(expected)
    found = make_engine(make_task("a", steps=3), **MESH)
    found_updates = {"a": found.train_round()}
    compiled = found._executor._replicas[0].compiled
    assert any(compiled._spent) or compiled._released
    found_updates["a"] += found.drain()
    found._executor.release()
    assert not any(compiled._spent)

    def full():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setitem(compiled.programs.residuals, 1, full)
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        found_updates["a"] += train(found)["a"]
    assert len(caplog.records) == 1 and found.remat == ("lean",) * 4
    assert_close(found, found_updates, expected, expected_updates)


@pytest.mark.slow
def test_a_size_whose_programs_were_compiled_ahead_recomputes_more(
    fail_if, make_engine, make_task, train
):
    expected = make_engine(make_task("a"), **MESH)
    expected_updates = train(expected)
    engine = make_engine(make_task("a"), **MESH)
    updates = {"a": engine.train_round() + engine.drain()}
    size = EngineSize(3, engine.size.rows)
    programs = engine.compile_ahead(size)
    while not programs.ready:
        time.sleep(0.01)
    # The second stage runs out of memory in the first run, and has taken the accumulators then.
    fail_if(lambda number, _: number == 1)
    engine.resize(size, programs)
    assert engine.size == size
    updates["a"] += train(engine)["a"]
    assert engine.remat == ("lean",) * 4
    assert_close(engine, updates, expected, expected_updates)


@pytest.mark.slow
def test_only_the_leanest_policy_is_the_end(fail_if, make_engine, make_task, train):
    fail_if(lambda *_: True)
    engine = make_engine(make_task("a"), **MESH)
    with pytest.raises(OutOfDeviceMemory, match="256 tokens does not fit .* try .*=128"):
        train(engine)
    assert engine.remat is None


@pytest.mark.parametrize(
    "stage", [Stage(), pytest.param(Stage(tp=2), marks=pytest.mark.slow)], ids=str
)
def test_the_memory_model_counts_what_replicas_exchange(make_engine, make_task, monkeypatch, stage):
    """The compiled programs take arrays that arrive, results and temporaries beside the state."""
    run, needed, exchange = StageMesh.run, {}, ("_taken", "_added", "_cut", "_joined")

    def measured(home, program, *arguments):
        name = getattr(program, "__name__", "")
        if name in exchange:
            found = program.lower(*arguments).compile().memory_analysis()
            new = found.output_size_in_bytes - found.alias_size_in_bytes
            # Arguments that are not the state, which is donated.
            arrived = found.argument_size_in_bytes - found.alias_size_in_bytes
            arrived *= name in ("_added", "_joined")
            needed[name] = max(new + found.temp_size_in_bytes + arrived, needed.get(name, 0))
        return run(home, program, *arguments)

    monkeypatch.setattr(StageMesh, "run", measured)
    replica = {"layers": (4,), "stage": stage, "others": (((4,), stage),)}
    engine = make_engine(make_task("a", steps=1), **replica)
    engine.train_round()
    engine.drain()
    whole = engine._slots.layout.tree.accumulators
    whole = sum(4 * math.prod(spec.shape) for spec in jax.tree.leaves(whole))
    assert needed.keys() == {*exchange}
    counted = exchanged_bytes(whole, 2)
    assert counted / 2 < max(needed.values()) < counted
    assert exchanged_bytes(whole, 1) == 0
