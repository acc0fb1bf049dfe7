"""A task's arrays have its own rank and modules, and fit any pool again."""

import jax
import numpy as np
import optax
import pytest

from jaxmux.peft import Factors, LeafSpec, LoRA, adapter_of, crop, empty_pool, pad
from jaxmux.peft.leaves import named_leaves
from jaxmux.peft.lora import lora_leaves

MODULES = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
OWN = MODULES[:2]
RANK = 3


def slot_specs(config, modules, rank):
    """The description of one slot with an adapter, its moments and a count."""
    adapter = jax.tree.map(LeafSpec.of_slot, lora_leaves(config, modules, 2, rank))
    count = LeafSpec((), (), dtype="int32")
    return {"adapter": adapter, "optimizer": optax.ScaleByAdamState(count, adapter, adapter)}


@pytest.fixture
def padded(config):
    """A slot's tree at rank 8 whose own rank is 3: random there and zero beyond."""
    rng = np.random.default_rng(0)

    def fill(spec: LeafSpec) -> np.ndarray:
        if not spec.axes:
            return np.int32(17)
        values = rng.standard_normal(spec.shape).astype(np.float32)
        rank_axis = spec.axes.index("rank")
        values[(slice(None),) * rank_axis + (slice(RANK, None),)] = 0
        return values

    return jax.tree.map(fill, slot_specs(config, OWN, 8))


@pytest.fixture
def arrays(padded, config):
    return crop(padded, slot_specs(config, OWN, RANK))


def test_an_empty_pool_is_zero_and_stacked_layers_first(config):
    pool = empty_pool(config, MODULES, slots=5, rank=4)
    assert pool["self_attn.q_proj"].a.shape == (3, 5, 16, 4)
    assert pool["mlp.down_proj"].b.shape == (3, 5, 4, 16)
    assert all(x.dtype == np.float32 and not x.any() for x in jax.tree.leaves(pool))


def test_arrays_have_the_tasks_rank_and_keep_every_value(padded, arrays):
    shapes = {name: value.shape for name, value in arrays.items()}
    assert len(arrays) == 3 * 2 * 2 + 1
    assert shapes["adapter/self_attn.q_proj/a"] == (3, 16, RANK)
    assert shapes["optimizer/mu/mlp.up_proj/b"] == (3, RANK, 24)
    assert arrays["optimizer/count"] == 17
    np.testing.assert_array_equal(
        arrays["optimizer/nu/mlp.up_proj/a"],
        padded["optimizer"].nu["mlp.up_proj"].a[..., :RANK],
    )


@pytest.mark.parametrize("rank", [RANK, 4, 8, 16])
def test_arrays_fit_a_pool_of_any_rank_and_more_modules(rank, arrays, config):
    specs = slot_specs(config, MODULES, rank)
    tree = pad(arrays, specs)
    assert jax.tree.structure(tree) == jax.tree.structure(specs)
    for found, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(specs), strict=True):
        assert (found.shape, found.dtype) == (spec.shape, spec.dtype)
    back = crop(tree, slot_specs(config, OWN, RANK))
    assert back.keys() == arrays.keys()
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name])
    for a, b in (tree["adapter"][m] for m in MODULES):
        assert not a[..., RANK:].any() and not b[..., RANK:, :].any()
    assert not any(x.any() for x in jax.tree.leaves(tree["adapter"]["mlp.down_proj"]))


def test_the_adapter_is_found_among_the_arrays(padded, arrays, config):
    adapter = adapter_of(arrays, LoRA(RANK, target_modules=("q_proj", "up_proj")), config)
    assert set(adapter) == set(OWN)
    for module, (a, b) in adapter.items():
        np.testing.assert_array_equal(a, padded["adapter"][module].a[..., :RANK])
        np.testing.assert_array_equal(b, padded["adapter"][module].b[..., :RANK, :])


def test_modules_of_other_tasks_are_left_out(config):
    adapter = jax.tree.map(lambda x: x[:, 0], empty_pool(config, MODULES, 2, 4))
    own = jax.tree.map(LeafSpec.of_slot, lora_leaves(config, ("mlp.up_proj",), 1, 2))
    assert set(crop(adapter, own)) == {"mlp.up_proj/a", "mlp.up_proj/b"}


def test_an_array_without_a_place_is_named(arrays, config):
    with pytest.raises(ValueError, match="no place for adapter/self_attn.q_proj/a"):
        pad(arrays, slot_specs(config, ("mlp.up_proj",), 4))


def test_an_array_too_large_for_its_place_is_named(arrays, config):
    with pytest.raises(ValueError, match=r"adapter/.* has shape .*, its place"):
        pad(arrays, slot_specs(config, OWN, 2))


def test_a_missing_count_is_named(arrays, config):
    del arrays["optimizer/count"]
    with pytest.raises(ValueError, match="optimizer/count is missing"):
        pad(arrays, slot_specs(config, OWN, 4))


def test_absent_modules_take_their_padding():
    """Of any rank of leaf, also where as many layers as slots make the axes look alike."""
    spec = LeafSpec((2, 2, 5), ("layer", "slot", "output"), padding=1.0)
    specs = {"scale": {"q": spec.of_slot(), "v": spec.of_slot()}}
    own = np.arange(10, dtype=np.float32).reshape(2, 5)
    filled = pad({"scale/q": own}, specs)
    np.testing.assert_array_equal(filled["scale"]["q"], own)
    np.testing.assert_array_equal(filled["scale"]["v"], np.ones((2, 5)))
    np.testing.assert_array_equal(spec.empty(), np.ones((2, 2, 5)))


def test_factors_of_lora_name_all_their_axes(config):
    for name, spec in named_leaves(lora_leaves(config, MODULES, 4, 8)).items():
        assert set(spec.axes) == {"layer", "slot", "rank", "input" if name[-1] == "a" else "output"}
        assert spec.slot_axis == 1 and spec.trained
    assert isinstance(lora_leaves(config, MODULES, 4, 8)["mlp.up_proj"], Factors)


@pytest.mark.parametrize(
    ("shape", "axes", "padding"),
    [
        ((2, 3), ("layer",), 0.0),
        ((2, 3), ("layer", "layer"), 0.0),
        ((2, 3), ("layer", "width"), 0.0),
        ((2, 3), ("slot", "rank"), 1.0),
    ],
)
def test_a_leaf_that_makes_no_sense_is_refused(shape, axes, padding):
    with pytest.raises(ValueError, match="axes|padded"):
        LeafSpec(shape, axes, padding=padding)
