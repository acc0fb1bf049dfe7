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
# The linears on which `make_task` puts adapters.
MODULES = ("self_attn.q_proj", "mlp.down_proj")


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
    `others` are the `layers` and `stage` of further replicas.

    Pools have two linears and dropout, so that most engines run the same programs. These keep
    everything for the backward pass, because they are compiled faster then."""

    def make(
        *tasks,
        layers: tuple[int, ...] = (),
        stages: int | None = None,
        stage: Stage = ONE_DEVICE.stages[0],
        model: Backbone = backbone,
        first_device: int = 0,
        others: tuple[tuple[tuple[int, ...], Stage], ...] = (),
        slots: int = 4,
        modules: tuple[str, ...] = MODULES,
        dropout: bool = True,
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
        options = {"remat": "none"} | options
        reserved = PoolSpec(slots, 8, modules, dropout=dropout)
        engine = Engine(model, EngineOptions(SHAPE, reserved, **options))
        engine.register_tasks(tasks)
        return engine

    return make


@pytest.fixture(scope="session")
def different_tasks(make_task):
    """Tasks of different lengths, ranks, optimizers, targets and dropout; clipping bites."""
    from jaxmux.optimizers import SGD, AdamW, Lion

    clipping = AdamW(1e-2, clip_norm=0.05)
    return (
        make_task("long", lengths=(60, 120), steps=3),
        make_task("dropped", rank=8, dropout=0.2, optimizer=clipping, batch_size=4, steps=3),
        make_task("short", rank=2, lengths=(3, 20), optimizer=Lion(1e-3), batch_size=9, steps=2),
        make_task("few", rank=3, targets=("down_proj",), optimizer=SGD(0.1), steps=3),
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
