"""A backbone in another format trains what the backbone of its decoded weights trains."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxmux.engine import Engine, EngineOptions, PreparedTask
from jaxmux.models import Backbone
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.peft import initial_adapter
from jaxmux.planner.costs.pool_spec import PoolSpec
from tests.engine.conftest import SHAPE

# One backbone has all formats, so that one engine is compiled for them.
FORMAT_OF = {
    "q_proj": "int8",
    "k_proj": "nf4",
    "v_proj": "int8",
    "o_proj": "nf4",
    "gate_proj": "int8",
    "up_proj": "nf4",
    "down_proj": "nf4",
}


@pytest.fixture(scope="module")
def encoded(config) -> Backbone:
    sizes = dict(hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=4, head_dim=16)
    random = Backbone.random(dataclasses.replace(config, **sizes), seed=5)
    weights = jax.tree.map(lambda w: w if w.ndim == 1 else 5 * w, random.weights)

    # All linears have the same shape, so there is one program for each format.
    encode = jax.jit(FrozenWeight.encoded, static_argnums=1)
    return with_linears(
        dataclasses.replace(random, weights=weights),
        lambda name, weight: encode(weight.values, FORMAT_OF[name]),
    )


def with_linears(backbone: Backbone, change) -> Backbone:
    layers = {
        block: {
            name: own | {"kernel": change(name, own["kernel"])} if "kernel" in own else own
            for name, own in modules.items()
        }
        if block in ("self_attn", "mlp")
        else modules
        for block, modules in backbone.weights["layers"].items()
    }
    return dataclasses.replace(backbone, weights=backbone.weights | {"layers": layers})


# tests/runs/test_backbone_format.py compares runs, test_frozen_weight.py linears of each format.
@pytest.mark.slow
def test_training_has_the_bits_of_the_decoded_weights(encoded, make_task, train):
    decoded = with_linears(encoded, lambda _, weight: FrozenWeight.of(weight.decoded()))

    def make(name: str, **fields) -> PreparedTask:
        task = make_task(name, steps=3, **fields)
        given = task.task.adapter, task.targets, encoded.config, task.task.seed
        return dataclasses.replace(task, make_adapter=partial(initial_adapter, *given))

    results = []
    for backbone in (encoded, decoded):
        engine = Engine(backbone, EngineOptions(SHAPE, PoolSpec(2, 8, ())))
        engine.register_tasks([make("one"), make("other", rank=8, dropout=0.1)])
        updates = train(engine)
        results.append([(u.loss, u.grad_norm) for own in updates.values() for u in own])
    assert len(results[0]) == 6
    np.testing.assert_array_equal(*results)
