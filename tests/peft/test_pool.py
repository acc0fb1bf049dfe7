"""One slot's tree flattens to true rank and fits any pool again."""

import jax
import numpy as np
import optax
import pytest

from jaxmux.peft import Factors, adapter_of, empty_pool, slot_arrays, slot_tree

MODULES = ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
OWN = MODULES[:2]
RANK = 3


def slot_of_pool(config, modules, rank):
    """One slot's adapter: the pool without its slot axis."""
    return jax.tree.map(lambda x: np.array(x[:, 0]), empty_pool(config, modules, 2, rank))


def optimizer_tree(adapter):
    """Moments that hold `Factors` nodes, and a count that does not."""
    return {"adapter": adapter, "optimizer": optax.scale_by_adam().init(adapter)}


@pytest.fixture
def padded(config):
    """A tree at rank 8 whose true rank is 3, random there and zero beyond."""
    rng = np.random.default_rng(0)

    def fill(factors: Factors) -> Factors:
        a, b = (rng.standard_normal(x.shape).astype(np.float32) for x in factors)
        a[..., RANK:], b[..., RANK:, :] = 0, 0
        return Factors(a, b)

    def is_factors(node):
        return isinstance(node, Factors)

    tree = optimizer_tree(slot_of_pool(config, OWN, 8))
    tree = jax.tree.map(lambda x: fill(x) if is_factors(x) else x, tree, is_leaf=is_factors)
    return tree | {"optimizer": tree["optimizer"]._replace(count=np.int32(17))}


def test_an_empty_pool_is_zero_and_stacked_layers_first(config):
    pool = empty_pool(config, MODULES, slots=5, rank=4)
    assert pool["self_attn.q_proj"].a.shape == (3, 5, 16, 4)
    assert pool["mlp.down_proj"].b.shape == (3, 5, 4, 16)
    assert all(x.dtype == np.float32 and not x.any() for x in jax.tree.leaves(pool))


def test_arrays_have_true_rank_and_keep_every_value(padded):
    arrays = slot_arrays(padded, OWN, RANK)
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
def test_arrays_fit_a_pool_of_any_rank_and_more_modules(rank, padded, config):
    arrays = slot_arrays(padded, OWN, RANK)
    template = optimizer_tree(slot_of_pool(config, MODULES, rank))
    tree = slot_tree(template, arrays)
    assert jax.tree.structure(tree) == jax.tree.structure(template)
    for found, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(template), strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    back = slot_arrays(tree, OWN, RANK)
    assert back.keys() == arrays.keys()
    for name in arrays:
        np.testing.assert_array_equal(back[name], arrays[name])
    for a, b in (tree["adapter"][m] for m in MODULES):
        assert not a[..., RANK:].any() and not b[..., RANK:, :].any()
    assert not any(x.any() for x in jax.tree.leaves(tree["adapter"]["mlp.down_proj"]))


def test_the_adapter_is_found_among_the_arrays(padded):
    adapter = adapter_of(slot_arrays(padded, OWN, RANK))
    assert set(adapter) == set(OWN)
    for module, (a, b) in adapter.items():
        np.testing.assert_array_equal(a, padded["adapter"][module].a[..., :RANK])
        np.testing.assert_array_equal(b, padded["adapter"][module].b[..., :RANK, :])


def test_modules_of_other_tasks_are_left_out(config):
    adapter = slot_of_pool(config, MODULES, 4)
    arrays = slot_arrays(adapter, ["mlp.up_proj"], 2)
    assert set(arrays) == {"mlp.up_proj/a", "mlp.up_proj/b"}


def test_an_array_without_a_place_is_named(padded, config):
    arrays = slot_arrays(padded, OWN, RANK)
    template = optimizer_tree(slot_of_pool(config, ("mlp.up_proj",), 4))
    with pytest.raises(ValueError, match="no place for adapter/self_attn.q_proj/a"):
        slot_tree(template, arrays)


def test_an_array_too_large_for_its_place_is_named(padded, config):
    arrays = slot_arrays(padded, OWN, RANK)
    template = optimizer_tree(slot_of_pool(config, OWN, 2))
    with pytest.raises(ValueError, match=r"adapter/.* has shape .*, its place"):
        slot_tree(template, arrays)
