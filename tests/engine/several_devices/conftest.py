"""Backbones on several devices, which `make test-devices` sets up on the CPU."""

import dataclasses
from itertools import islice

import jax
import pytest

from jaxmux.engine import Engine, EngineOptions
from jaxmux.models import Backbone, BackboneConfig
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import ONE_DEVICE, Replica, Stage
from jaxmux.planner.packing import ShapeClass
from jaxmux.sharding import PlacedBackbone, consecutive_parts, place_backbone, stage_meshes

SHAPE = ShapeClass(rows=2, row_len=128, chunk_len=64, max_sequences=8)


@pytest.fixture(scope="session", autouse=True)
def _eight_devices():
    if len(jax.devices()) < 8:
        pytest.fail("these tests need eight devices: run make test-devices")


@pytest.fixture(scope="session")
def config(config) -> BackboneConfig:
    """The shape of the other engine tests' backbone, with more layers."""
    return dataclasses.replace(config, num_layers=4)


@pytest.fixture(scope="session")
def make_engine(backbone):
    """Makes an engine in which the given tasks are registered. `layers` gives the layers of each
    part, on `stages` meshes in turn, each like `stage`; without it the engine has one device.
    `others` are the `layers` and `stage` of further replicas."""

    def make(
        *tasks,
        layers: tuple[int, ...] = (),
        stages: int | None = None,
        stage: Stage = ONE_DEVICE.stages[0],
        model: Backbone = backbone,
        first_device: int = 0,
        others: tuple[tuple[tuple[int, ...], Stage], ...] = (),
        slots: int = 4,
        modules: tuple[str, ...] = (),
        **options,
    ) -> Engine:
        devices = iter(jax.devices()[first_device:])

        def placed(layers: tuple[int, ...], stage: Stage, stages: int) -> PlacedBackbone:
            replica = Replica((stage,) * stages)
            homes = stage_meshes(replica, list(islice(devices, replica.devices)), model.config)
            homes = [homes[i % len(homes)] for i in range(len(layers))]
            return place_backbone(model, consecutive_parts(layers), homes)

        if layers:
            first = placed(layers, stage, stages or len(layers))
            model = [first, *(placed(layers, stage, len(layers)) for layers, stage in others)]
        options = {"remat": "dots"} | options
        engine = Engine(model, EngineOptions(SHAPE, PoolSpec(slots, 8, modules), **options))
        engine.register_tasks(tasks)
        return engine

    return make


@pytest.fixture(scope="session")
def different_tasks(make_task, make_wide_task):
    """Tasks of different lengths, ranks, optimizers, targets and dropout; clipping bites."""
    from jaxmux.optimizers import SGD, AdamW, Lion

    return (
        make_wide_task("long", lengths=(60, 120), steps=4),
        make_wide_task(
            "dropped", rank=8, dropout=0.2, optimizer=AdamW(1e-2, clip_norm=0.05), steps=4
        ),
        make_wide_task(
            "short", rank=2, lengths=(3, 20), optimizer=Lion(1e-3), batch_size=9, steps=3
        ),
        make_task("few", rank=3, optimizer=SGD(0.1), steps=4),
    )


@pytest.fixture
def assert_same_training(assert_same_bits):
    """Compares two engines that have trained the same tasks, and their updates, bit for bit."""

    def check(found, updates, expected, expected_updates):
        assert updates == expected_updates
        for name in expected.names:
            assert_same_bits(found.task_arrays(name), expected.task_arrays(name))
            assert found.progress(name) == expected.progress(name)

    return check
