"""Pairs of ranks are updated as the two parameters that they stand for."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmux.engine.state.renewal import (
    directions_of_pairs,
    gradients_of_pairs,
    parameters_of_pairs,
    slots_with_pairs,
)
from jaxmux.engine.state.train_state import pool_specs
from jaxmux.engine.state.updates import no_updates, update, without_foreign
from jaxmux.optimizers import AdamW
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.peft import IA3, Layout, LoRA, kind_of, size_of_adapter

MODULE = "mlp.up_proj"
PAIRED = np.array([False, True, False])


@pytest.fixture(scope="module", params=[6, 7], ids=["even", "odd"])
def pool(request, config):
    """The description of a pool with an even or an odd rank, and random arrays."""
    spec = LoRA(2, target_modules=MODULE, initialisation="olora")
    specs = pool_specs(config, [MODULE], 3, request.param, "sgd", [size_of_adapter(spec, config)])
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), specs.accumulators
    )
    return specs, arrays


def a_and_b(tree):
    """The factors of the slot with pairs, with the ranks in front, and those of the others."""
    a, b = (np.asarray(x) for x in tree["lora"][MODULE])
    return np.moveaxis(a[:, 1], -1, 0), np.moveaxis(b[:, 1], 1, 0), (a[:, ::2], b[:, ::2])


@pytest.mark.parametrize(
    ("function", "a", "b"),
    [
        (gradients_of_pairs, lambda x, y: (x + y, 0 * y), lambda x, y: (x, 0 * y)),
        (parameters_of_pairs, lambda x, y: (x, 0 * y), lambda x, y: (x + y, 0 * y)),
        (directions_of_pairs, lambda x, y: (x, x), lambda x, y: (x, 0 * y)),
    ],
)
def test_both_ranks_of_a_pair_change_and_nothing_else(function, a, b, pool):
    specs, arrays = pool
    before, after = a_and_b(arrays), a_and_b(function(specs.accumulators, arrays, PAIRED))
    for i in range(3):
        for change, old, new in zip((a, b), before, after, strict=False):
            expected = change(old[2 * i], old[2 * i + 1])
            np.testing.assert_array_equal(new[2 * i : 2 * i + 2], expected)
    for old, new in zip(before[:2], after[:2], strict=True):
        # The last one of an odd number of ranks belongs to no pair.
        np.testing.assert_array_equal(new[6:], old[6:])
    for old, new in zip(before[2], after[2], strict=True):
        np.testing.assert_array_equal(new, old)


def test_slots_have_pairs_where_the_pool_has_room_for_them(pool, config):
    specs, arrays = pool
    kind = kind_of(LoRA(initialisation="pissa")).name
    found = slots_with_pairs(Layout(specs), {0: "lora", 1: kind})
    np.testing.assert_array_equal(found, PAIRED)
    plain = pool_specs(config, [MODULE], 3, 6, "sgd")
    assert slots_with_pairs(Layout(plain), {0: "lora"}) is None
    assert gradients_of_pairs(plain.accumulators, arrays, None) is arrays
    assert isinstance(arrays["lora"][MODULE], Factors)


@pytest.fixture(scope="module")
def updated(config):
    """The description of a pool with room for pairs, random arrays, and updates of all slots."""
    spec = LoRA(2, target_modules=MODULE, initialisation="olora")
    others = [size_of_adapter(own, config) for own in (spec, IA3())]
    layout = Layout(pool_specs(config, [MODULE, "self_attn.q_proj"], 3, 6, "adamw", others))
    rng = np.random.default_rng(0)

    def arrays(leaf):
        if leaf.dtype == "int32":
            return np.full(leaf.shape, 3, np.int32)
        return np.square(rng.standard_normal(leaf.shape)).astype(np.float32)

    slots = np.arange(3, dtype=np.int32)
    none = no_updates(layout, config.num_layers, ["adamw"])
    hyper = AdamW(weight_decay=0.1).hyperparameters()
    updates = none._replace(
        due=np.array([True, True, False]),
        rates=rng.random(none.rates.shape, np.float32),
        hyper={"adamw": {name: np.full(3, value, np.float32) for name, value in hyper.items()}},
        members={"adamw": slots},
        own=rng.random(none.rates.shape) < 0.8,
        renewed={},
    )
    return layout, jax.tree.map(arrays, layout.tree), updates


@pytest.mark.long
def test_factors_are_updated_layer_by_layer_as_all_layers_at_once(updated):
    """Where no slot has pairs, both programs do the same but for rounding."""
    layout, arrays, updates = updated
    found = [
        update(jax.device_put(arrays), layout, updates._replace(paired=paired))
        for paired in (np.zeros(3, bool), None)
    ]
    assert found[0][1].applied.tolist() == [True, True, False]
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_temporaries_for_pairs_are_those_of_a_layer(config):
    """Those for the gradients, on CPU; what else an update computes has others there."""
    config = dataclasses.replace(config, num_layers=16)
    spec = LoRA(2, target_modules=MODULE, initialisation="olora")
    specs = pool_specs(config, [MODULE], 3, 6, "sgd", [size_of_adapter(spec, config)])
    layout = Layout(specs)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), specs)
    updates = no_updates(layout, 16, ["sgd"])
    compiled = without_foreign.lower(layout, state, updates.due, updates.own, PAIRED).compile()
    of_layer = max(leaf.size for leaf in jax.tree.leaves(state.accumulators)) * 4 // 16
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * of_layer
