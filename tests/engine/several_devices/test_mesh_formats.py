"""Weights in formats with scales, divided among devices, train like those of one device."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.engine import PreparedTask
from jaxmux.engine.state.stored_state import _of_part, with_copies
from jaxmux.engine.state.train_state import pool_specs
from jaxmux.engine.tasks.prepared_task import mesh_sizes, size_of
from jaxmux.models import MODULES, Backbone, BackboneConfig, linear_sizes
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.number_formats import Scaled
from jaxmux.peft import initial_adapter, resolve_targets
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.cost_models import estimated_memory
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import Replica, Stage
from jaxmux.sharding import consecutive_parts, stage_meshes
from jaxmux.sharding.placed_backbone import _own_weights
from tests.engine.several_devices.test_meshes import (
    assert_gradients_are_close,
    gradients,
    norm_of_difference,
)
from tests.engine.test_backbone_formats import with_linears

# Half of a width still has whole blocks of nf4, or blocks go on from row to row.
SIZES = dict(hidden_size=128, intermediate_size=96, num_heads=4, num_kv_heads=2, head_dim=32)
# Each format is divided by the input and by the output.
FORMAT_OF = {
    "q_proj": "int8",
    "k_proj": "nf4",
    "v_proj": "scaled",
    "o_proj": "int8",
    "gate_proj": "scaled",
    "up_proj": "nf4",
    "down_proj": "nf4",
}
MESH = {"layers": (2,), "stage": Stage(fsdp=2, tp=2), "remat": "dots"}


def in_blocks(values: jax.Array) -> FrozenWeight:
    """int8 with a scale for blocks of 16 rows and 32 columns of W^T."""
    layers, k, n = values.shape
    blocks = values.swapaxes(1, 2).reshape(layers, n // 16, 16, k // 32, 32)
    scale = jnp.abs(blocks).max((2, 4)) / 127
    codes = jnp.rint(blocks / scale[:, :, None, :, None]).astype(jnp.int8)
    return FrozenWeight(codes.reshape(layers, n, k), Scaled(scale, None), "scaled")


@pytest.fixture(scope="module")
def plain(config) -> Backbone:
    config = dataclasses.replace(config, **SIZES, vocab_size=104, num_layers=2)
    random = Backbone.random(config, seed=5)
    weights = jax.tree.map(lambda w: w if w.ndim == 1 else 2 * w, random.weights)
    return dataclasses.replace(random, weights=weights)


@pytest.fixture(scope="module")
def tasks(make_task, plain):
    def make(name: str, **fields) -> PreparedTask:
        task = make_task(name, **fields)
        adapter, config, seed = task.task.adapter, plain.config, task.task.seed
        targets = resolve_targets(adapter.target_modules, config)
        first = partial(initial_adapter, adapter, targets, config, seed)
        return dataclasses.replace(task, targets=targets, make_adapter=first)

    return make("one"), make("dropped", rank=8, dropout=0.2)


def test_divided_formats_have_the_gradients_of_one_device(plain, tasks, make_engine):
    @partial(jax.jit, static_argnums=0)
    def encoded(name: str, weight: FrozenWeight) -> FrozenWeight:
        if FORMAT_OF[name] == "scaled":
            return in_blocks(weight.values)
        return FrozenWeight.encoded(weight.values, FORMAT_OF[name])

    model = with_linears(plain, encoded)
    expected = gradients(make_engine(*tasks, model=model, remat="dots"))
    assert_gradients_are_close(gradients(make_engine(*tasks, model=model, **MESH)), expected)


@pytest.mark.slow
def test_float8_on_tensor_parallel_devices_rounds_each_part_by_itself(plain, tasks, make_engine):
    """Activations of a device have scales of their own, which are finer, so that gradients are no
    farther from those of the plain backbone."""
    model = with_linears(plain, lambda _, w: FrozenWeight.encoded(w.values, "float8"))
    exact = gradients(make_engine(*tasks, model=plain, remat="dots"))
    expected = gradients(make_engine(*tasks, model=model, remat="dots"))
    alike = gradients(make_engine(*tasks, model=model, layers=(1, 1), remat="dots"))
    found = gradients(make_engine(*tasks, model=model, **MESH))
    for name, arrays in expected.items():
        jax.tree.map(np.testing.assert_array_equal, alike[name], arrays)
        error, own = (
            norm_of_difference(each[name], exact[name], "accumulators")
            for each in (found, expected)
        )
        assert 0 < error < 1.1 * own, (name, error, own)


def test_a_mesh_that_would_cut_blocks_is_refused(plain):
    config = dataclasses.replace(plain.config, backbone_format="nf4")
    sizes = mesh_sizes(config)
    Replica.uniform(tp=2, fsdp=2).require(config.num_layers, sizes)
    for axis in ("tp", "fsdp"):
        with pytest.raises(PlanningError, match=f"{axis}4 does not divide .*=2; .*{axis}2"):
            Replica.uniform(**{axis: 4}).require(config.num_layers, sizes)


def test_keys_that_every_device_has_are_not_cut(plain):
    """Two key heads of 48, with a scale for 32 of their columns."""
    config, kept = dataclasses.replace(plain.config, head_dim=48), {}
    for module, (k, n) in ((m, linear_sizes(config, m)) for m in MODULES):
        scale = jax.ShapeDtypeStruct((n // 32 if "k_proj" in module else n, 1), "float32")
        codes = jax.ShapeDtypeStruct((n, k), "int8")
        kept[module] = FrozenWeight(codes, Scaled(scale, None), "scaled")
    config = dataclasses.replace(config, kept=tuple(kept.items()))
    sizes = mesh_sizes(config)
    Replica.uniform(tp=4).require(config.num_layers, sizes)
    with pytest.raises(PlanningError, match="tp2 does not divide weight_blocks_of_keys_for_tp=3"):
        Replica.uniform(tp=2).require(config.num_layers, sizes)


WIDE = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=8,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
)


@pytest.mark.parametrize(
    "mesh", ["dp4", "fsdp4", "tp4", "pp4", "pp2,tp2", "fsdp2,tp2", "pp2,fsdp2"]
)
@pytest.mark.parametrize("backbone_format", [None, "float8", "int8", "nf4"])
def test_the_memory_model_counts_what_a_device_holds(backbone_format, mesh):
    """Weights and train state are those that a device gets, by their shardings."""
    config = dataclasses.replace(WIDE, backbone_format=backbone_format)
    size, replica = size_of(config, jnp.bfloat16), Replica.parse(mesh)
    parts = consecutive_parts(size.stage_layers(replica))
    homes = stage_meshes(replica, jax.devices()[: replica.devices], config)
    specs, pool = pool_specs(config, MODULES, 4, 16, "adamw"), PoolSpec(4, 16)
    held = []
    for part, home in zip(parts, homes, strict=True):
        own = _own_weights(config, part, jnp.bfloat16, home)
        weights = home.of_one_device(own, home.weight_specs(own))
        held.append(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(weights)))
        state = with_copies(_of_part(specs, part), home)
        shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), state)
        arrays = home.of_one_device(shapes, home.leaf_specs(state))
        held[-1] += sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
    # Two layers or the head are gathered; two weights are decoded, or in float8 transposed.
    gathered = max(2 * (size.divided_layer_bytes or 0), 2 * 32000 * 2048) * (replica.fsdp > 1)
    decoded = {None: 0, "float8": 1}.get(backbone_format, 2) * 2 * 2048 * 8192
    found = estimated_memory(size).resident(pool, replica) - (gathered + decoded) / replica.tp
    assert found == pytest.approx(max(held), rel=0.01)
