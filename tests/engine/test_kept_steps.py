"""Training steps that are kept on disk for later processes. On a CPU no engine keeps them."""

import logging

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxmux.engine.devices import programs
from jaxmux.planner.packing import ShapeClass

SHAPE = ShapeClass(rows=3, row_len=128, chunk_len=64, max_sequences=8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which engines keep training steps during the test. JAX's own cache is off: XLA
    for CPUs cannot write a program again that it has read. So no other test of the process may
    train with the shapes of this file."""
    folder = tmp_path / "steps"
    monkeypatch.setattr(programs, "_step_folder", lambda: folder)
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield folder
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture
def make_engine(make_engine):
    """Makes an engine in which the given tasks are registered, with a shape of its own."""

    def make(*tasks, shape=SHAPE, **options):
        return make_engine(*tasks, shape=shape, **options)

    return make


@pytest.fixture
def refuse_tracing(monkeypatch):
    """Lets every engine fail that traces its training step."""

    def refuse():
        class Untraceable:
            def lower(self, *_):
                raise AssertionError("the training step is lowered")

        monkeypatch.setattr(programs, "accumulate", Untraceable())

    return refuse


@pytest.fixture
def tasks(make_task):
    return make_task("a"), make_task("b", dropout=0.1, steps=3)


def test_a_kept_step_trains_to_the_same_bits_and_is_not_traced(
    folder, refuse_tracing, tasks, make_engine, train, assert_same_bits
):
    first = make_engine(*tasks)
    updates = train(first)
    assert len(list(folder.iterdir())) == 1
    refuse_tracing()
    second = make_engine(*tasks)
    assert train(second) == updates
    for name in ("a", "b"):
        assert_same_bits(second.adapter(name), first.adapter(name))


@pytest.fixture
def step_name(folder, tasks, make_engine, monkeypatch):
    """Returns the name of the file that would keep the step of an engine, which is not compiled."""
    step_path = programs._step_path

    class Named(Exception):
        pass

    def name(**options) -> str:
        def stop(*arguments):
            raise Named(step_path(*arguments).name)

        with monkeypatch.context() as patch, pytest.raises(Named) as named:
            patch.setattr(programs, "_step_path", stop)
            make_engine(*tasks, **options).train_round()
        return str(named.value)

    return name


@pytest.mark.long
def test_another_program_is_another_step(step_name, monkeypatch):
    first = step_name()
    assert step_name() == first
    changes = {
        "rank": {"rank": 16},
        "shape": {"shape": ShapeClass(5, 128, 64, 8)},
        "remat": {"remat": "full"},
        "memory": {"memory": 2**32},
    }
    names = {change: step_name(**options) for change, options in changes.items()}
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_sources", lambda: "another version")
        names["source"] = step_name()
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
        names["flags"] = step_name()
    assert len({first, *names.values()}) == 7


def test_a_damaged_step_is_compiled_again_and_named(folder, tasks, make_engine, train, caplog):
    train(make_engine(*tasks), rounds=1)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        updates = train(make_engine(*tasks), rounds=1)
    assert np.isfinite([u.loss for of_task in updates.values() for u in of_task]).all()
    assert [r for r in caplog.records if str(path) in r.message and "compiled again" in r.message]
    assert len(path.read_bytes()) == len(whole)


def test_only_the_steps_used_last_are_kept(folder, tasks, make_engine, train, monkeypatch):
    monkeypatch.setattr(programs, "_MOST_STEPS", 1)
    train(make_engine(*tasks), rounds=1)
    (before,) = folder.iterdir()
    train(make_engine(*tasks, remat="full"), rounds=1)
    (after,) = folder.iterdir()
    assert after != before


def test_training_goes_on_without_a_step_that_cannot_be_kept(
    folder, tasks, make_engine, train, caplog
):
    folder.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, logger="jaxmux"):
        updates = train(make_engine(*tasks), rounds=1)
    assert np.isfinite([u.loss for of_task in updates.values() for u in of_task]).all()
    (said,) = [r for r in caplog.records if "is not kept" in r.message]
    assert str(folder) in said.message
