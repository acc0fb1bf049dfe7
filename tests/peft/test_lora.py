"""LoRA specifications are checked, and initial factors depend on nothing but seed and place."""

import math

import numpy as np
import pytest

from jaxmux.peft import IA3, DoRA, LoRA, SparseDiff, initial_adapter, kind_of, resolve_targets


def initial(spec: LoRA, config, seed=0):
    return initial_adapter(spec, resolve_targets(spec.target_modules, config), config, seed)


@pytest.mark.parametrize(
    ("rslora", "scale"), [(False, 32 / 16), (True, 32 / 4)], ids=["LoRA", "rsLoRA"]
)
def test_scale_is_alpha_over_rank_or_its_root(rslora, scale):
    assert LoRA(rank=16, alpha=32.0, rslora=rslora).scale == scale


def test_a_list_of_targets_becomes_a_tuple():
    assert LoRA(target_modules=["q_proj", "v_proj"]).target_modules == ("q_proj", "v_proj")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"rank": 0}, "rank should be an integer of at least 1, found 0"),
        ({"rank": -4}, "rank .* found -4"),
        ({"rank": 2.5}, "rank .* found 2.5"),
        ({"rank": "8"}, "rank .* found '8'"),
        ({"dropout": 1.0}, r"dropout should be a number in \[0, 1\), found 1.0"),
        ({"dropout": -0.1}, "dropout .* found -0.1"),
        ({"dropout": math.nan}, "dropout .* found nan"),
        (
            {"initialisation": "zeros"},
            "initialisation should be one of 'kaiming', 'gaussian', 'orthogonal', 'eva', "
            "'pissa', 'olora' or 'pissa_niter_N' with N up to 99, found 'zeros'",
        ),
        *(
            ({"initialisation": name}, f"'{name}' is not supported; {written} is left out: it")
            for name, written in (("loftq", "LoftQ"), ("lora_ga", "LoRA-GA"), ("corda", "CorDA"))
        ),
        (
            {"initialisation": "orthogonal", "rank": 5},
            "rank should be even with orthogonal initialisation, found 5",
        ),
        ({"initialisation": "pissa_niter_100"}, "N up to 99, found 'pissa_niter_100'"),
        ({"initialisation": "pissa_niter_"}, "N up to 99, found 'pissa_niter_'"),
        (
            {"initialisation": "pissa_niter_0", "dropout": 0.1},
            "dropout should be 0 with initialisation 'pissa_niter_0', found 0.1: it would drop",
        ),
        (
            {"initialisation": "olora", "alpha_pattern": {"q_proj": 0}},
            "alpha should be above 0 with initialisation 'olora', found 0",
        ),
        ({"loraplus_ratio": 0}, "loraplus_ratio should be a number above 0, found 0"),
        ({"alpha": math.nan}, "alpha"),
        ({"alpha": "32"}, "alpha"),
    ],
    ids=str,
)
def test_values_out_of_range_are_named(values, problem):
    with pytest.raises(ValueError, match=problem):
        LoRA(**values)


@pytest.mark.parametrize("initialisation", ["pissa", "pissa_niter_16", "olora"])
def test_parts_of_weights_are_another_kind_of_lora(initialisation, config):
    spec = LoRA(8, initialisation=initialisation, rank_pattern={"q_proj": 9})
    kind = kind_of(spec)
    assert kind.name == "lora_from_weights" and kind.rank(spec) == 18
    with pytest.raises(ValueError, match="'pissa.*|'olora' are not drawn"):
        initial(spec, config)
    with pytest.raises(ValueError, match="weights of the backbone are needed"):
        kind.initial(spec, kind.targets(spec, config), config, 0, None)
    wide = LoRA(11, target_modules=("q_proj", "k_proj"), initialisation=initialisation)
    with pytest.raises(
        ValueError, match=r"rank is 11, but .*k_proj is at most its smaller width, 10"
    ):
        kind.targets(wide, config)
    with pytest.raises(ValueError, match=f"{initialisation}' is not supported by DoRA, whose"):
        DoRA(initialisation=initialisation)


def test_initial_adapters_that_go_through_the_backbone_begin_slowly():
    names = ("kaiming", "gaussian", "orthogonal", "eva", "pissa", "pissa_niter_4", "olora")
    specs = [
        *(LoRA(initialisation=name) for name in names),
        DoRA(),
        DoRA(initialisation="eva"),
        *(SparseDiff(mask=mask) for mask in ("random", "magnitude", "gradient")),
        IA3(),
    ]
    found = [kind_of(spec).begins_slowly(spec) for spec in specs]
    assert found == [False] * 3 + [True] * 4 + [False, True] + [False, True, True] + [False]


def test_b_begins_at_zero_and_shapes_are_true_rank(config):
    adapter = initial(LoRA(rank=3), config)
    assert adapter["self_attn.q_proj"].a.shape == (3, 16, 3)
    assert adapter["self_attn.q_proj"].b.shape == (3, 3, 20)
    assert adapter["mlp.down_proj"].a.shape == (3, 24, 3)
    for a, b in adapter.values():
        assert a.dtype == b.dtype == np.float32
        assert a.all() and not b.any()


def test_kaiming_is_uniform_within_one_over_root_k(config):
    a = initial(LoRA(rank=512), config)["mlp.down_proj"].a
    bound = 1 / math.sqrt(24)
    assert np.abs(a).max() <= bound
    assert a.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert abs(a.mean()) < 0.01 * bound


def test_gaussian_has_deviation_one_over_rank(config):
    a = initial(LoRA(rank=256, initialisation="gaussian"), config)["mlp.down_proj"].a
    assert a.std() == pytest.approx(1 / 256, rel=0.02)


@pytest.mark.long
def test_orthogonal_factors_are_not_zero_but_their_product_is(config):
    spec = LoRA(rank=256, target_modules=("q_proj", "down_proj"), initialisation="orthogonal")
    adapter = initial(spec, config)
    for a, b in adapter.values():
        assert a.dtype == b.dtype == np.float32
        # An entry is a sum over half of a column of an orthogonal matrix.
        assert a.std() == pytest.approx(0.1 / math.sqrt(2), rel=0.05)
        assert b.std() == pytest.approx(0.1 / math.sqrt(2), rel=0.05)
        np.testing.assert_allclose(a @ b, 0, atol=1e-6)


def test_layers_outside_the_targets_stay_zero(config):
    adapter = initial(LoRA(target_modules=r"model\.layers\.1\.mlp\.up_proj"), config)
    assert list(adapter) == ["mlp.up_proj"]
    assert [bool(a.any()) for a in adapter["mlp.up_proj"].a] == [False, True, False]


@pytest.mark.parametrize(
    "targets", [("v_proj",), ("v_proj", "q_proj"), r".*\.1\.self_attn\.v_proj"], ids=str
)
def test_a_modules_factors_do_not_depend_on_the_other_targets(targets, config):
    whole = initial(LoRA(rank=4), config, seed=3)["self_attn.v_proj"]
    some = initial(LoRA(rank=4, target_modules=targets), config, seed=3)["self_attn.v_proj"]
    np.testing.assert_array_equal(some.a[1], whole.a[1])


def test_every_seed_module_and_layer_has_its_own_factors(config):
    drawn = [
        a[layer, :16, :].tobytes()
        for seed in range(3)
        for a, _ in initial(LoRA(rank=4), config, seed).values()
        for layer in range(3)
    ]
    assert len(set(drawn)) == len(drawn) == 3 * 7 * 3


def test_the_same_seed_draws_the_same(config):
    one, other = (initial(LoRA(rank=4), config, seed=5) for _ in range(2))
    for module in one:
        np.testing.assert_array_equal(one[module].a, other[module].a)
