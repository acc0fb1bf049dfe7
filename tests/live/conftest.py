"""Live training of tiny tasks on a tiny random Llama, those of the engine's tests."""

import dataclasses

import pytest

from jaxmux.planner.packing import ShapeClass
from jaxmux.server import LiveTraining
from tests.engine.conftest import (  # noqa: F401
    assert_same_bits,
    backbone,
    compiles,
    config,
    make_engine,
    make_task,
    train,
)

SHAPE = ShapeClass(rows=1, row_len=128, chunk_len=64, max_sequences=8)
MODULES = ("self_attn.q_proj", "mlp.down_proj")
SLOTS = 3


@pytest.fixture(scope="session")
def make_live_engine(make_engine):  # noqa: F811
    """Makes an engine whose pool holds a few tasks with adapters on two linears."""

    def make(**options):
        from jaxmux.engine import Engine, EngineOptions
        from jaxmux.planner.costs.pool_spec import PoolSpec

        model = make_engine().backbone
        reserved = PoolSpec(SLOTS, 8, MODULES, dropout=True)
        return Engine(model, EngineOptions(SHAPE, reserved, **options))

    return make


@pytest.fixture
def tasks(make_task):  # noqa: F811
    """By name, prepared tasks; each has a seed, a rank and a length of its own."""
    steps = {"a": 4, "b": 6, "c": 3, "d": 5, "e": 2}
    return {
        name: make_task(name, rank=2 + i, dropout=0.1, batch_size=2 + i, steps=own)
        for i, (name, own) in enumerate(steps.items())
    }


@pytest.fixture(scope="session")
def trained_alone():
    """By name, the adapters of tasks that have been trained alone."""
    return {}


@pytest.fixture
def make_live(make_live_engine, tasks):
    """Makes a live training in which tasks are prepared by their name. `prepare` replaces the
    preparation of some tasks: by name, a function of the task."""

    def make(prepare=None, engine_options=None, **options) -> LiveTraining:
        def prepared(task):
            if prepare and task.name in prepare:
                return prepare[task.name](task)
            return dataclasses.replace(tasks[task.name], task=task, steps=task.steps)

        engine = make_live_engine(**engine_options or {})
        return LiveTraining(engine, prepared, **options)

    return make
