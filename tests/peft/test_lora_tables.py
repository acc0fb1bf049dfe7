"""LoRA of the embedding and of the head."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmux.errors import InputError
from jaxmux.models import BackboneConfig
from jaxmux.pallas_kernels.counter_dropout import keep_mask
from jaxmux.pallas_kernels.slot_values import rows_of_tokens
from jaxmux.peft import KINDS, DoRA, LoRA, kind_of, own_leaves

CONFIG = BackboneConfig(
    architecture="LlamaForCausalLM",
    vocab_size=20,
    hidden_size=8,
    intermediate_size=16,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
KIND = KINDS["lora_tables"]


def test_only_names_choose_tables():
    for names in ("lm_head", "model.embed_tokens", ("q_proj", "embed_tokens")):
        assert kind_of(LoRA(target_modules=names)) is KIND
    for names in ("all-linear", ".*", ("q_proj",), "q_proj"):
        assert kind_of(LoRA(target_modules=names)).name == "lora"
    targets = KIND.targets(LoRA(2, target_modules=("lm_head", "embed_tokens")), CONFIG)
    masks = {"embed_tokens": [True, False, False], "lm_head": [False, False, True]}
    assert {point: mask.tolist() for point, mask in targets.items()} == masks


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (LoRA(9, target_modules="lm_head"), "the tables are no wider than 8"),
        (LoRA(2, target_modules=("lm_head", "proj")), "'proj' matches no linear"),
        (LoRA(2, trained_tokens=(3, 20)), "trained_tokens: 20 is no token of the 20 tokens"),
    ],
    ids=str,
)
def test_what_is_refused(spec, problem):
    with pytest.raises(ValueError, match=problem):
        kind_of(spec).targets(spec, CONFIG)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (
            {"target_modules": ("q_proj", "lm_head"), "trained_tokens": (1,)},
            "trained_tokens cannot be combined with 'lm_head' among the target_modules; train",
        ),
        (
            {"target_modules": ("lm_head", "model.embed_tokens"), "initialisation": "pissa"},
            "initialisation 'pissa' cannot be combined with 'embed_tokens' and 'lm_head' among the "
            "target_modules; leave .* 'kaiming', 'gaussian', 'orthogonal'$",
        ),
        ({"target_modules": "lm_head", "initialisation": "eva"}, "'eva' cannot be combined with"),
        (
            {"trained_tokens": (1,), "initialisation": "pissa_niter_4"},
            "initialisation 'pissa_niter_4' cannot be combined with trained_tokens; .*, 'eva'$",
        ),
    ],
    ids=str,
)
def test_fields_that_exclude_each_other_are_named(values, problem):
    with pytest.raises(ValueError, match=problem):
        LoRA(2, **values)


def test_dora_trains_linears_only():
    with pytest.raises(ValueError, match="target_modules: DoRA trains linears only, found 'lm_h"):
        DoRA(2, target_modules=("q_proj", "lm_head"))
    with pytest.raises(ValueError, match="trained_tokens: DoRA trains linears only"):
        DoRA(2, trained_tokens=(1,))


def test_trained_tokens_of_a_lora_differ():
    for bad in ((-1,), (3, 3), ("3",)):
        with pytest.raises(ValueError, match="trained_tokens"):
            LoRA(trained_tokens=bad)
    with pytest.raises(ValueError, match="DoRA trains linears only"):
        DoRA(trained_tokens=(3,))


def test_trained_tokens_have_ranks_of_their_own():
    """Many tokens do not enlarge the factors, nor a high rank the rows."""
    for spec in (LoRA(2, trained_tokens=range(9)), LoRA(8, trained_tokens=(1,))):
        kind = kind_of(spec)
        specs = own_leaves(spec, list(kind.targets(spec, CONFIG)), CONFIG)
        assert specs["mlp.up_proj"]["a"].shape == (3, 1, 8, spec.rank)
        assert specs["embed_tokens"]["rows"].shape == (1, 1, len(spec.trained_tokens), 8)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([5, 3], None),
        ({"embed_tokens": [5, 3]}, None),
        ({"model.embed_tokens": [5, 3]}, None),
        ({"embed_tokens": [5, 3], "lm_head": [5, 3]}, "a list of tokens of 'embed_tokens'"),
        (5, "a list of tokens of 'embed_tokens' only"),
        ([5, 5], "a token occurs twice"),
    ],
    ids=str,
)
def test_trained_tokens_in_settings_of_peft(found, problem):
    spec, kind = LoRA(2, target_modules=("q_proj",), trained_tokens=(5, 3)), KINDS["lora_tokens"]
    settings = kind.settings(spec, CONFIG, False) | {"trainable_token_indices": found}
    assert [each for each in KINDS.values() if each.recognise(settings)] == [kind]
    if problem is None:
        assert kind.from_settings(settings, CONFIG) == spec
        return
    with pytest.raises(ValueError, match=problem):
        kind.from_settings(settings, CONFIG)


def test_tables_begin_as_in_peft():
    """A of an embedding and B of a head are zero."""
    spec = LoRA(2, target_modules=("lm_head", "embed_tokens"), rank_pattern={"lm_head": 1})
    targets = KIND.targets(spec, CONFIG)
    adapter = KIND.initial(spec, targets, CONFIG, 3, None)
    described = own_leaves(spec, list(targets), CONFIG)
    shapes = jax.tree.map(lambda leaf, x: (leaf.of_slot().shape, x.shape), described, adapter)
    pairs = [own[name] for own in shapes.values() for name in own]
    assert len(pairs) == 6 and all(expected == found for expected, found in pairs)
    embedding, head = adapter["embed_tokens"], adapter["lm_head"]
    assert not embedding["a"].any() and np.all(embedding["b"] != 0)
    assert np.all(head["a"][..., 0]) and np.abs(head["a"]).max() <= 8**-0.5
    assert not head["a"][..., 1:].any() and not head["b"].any()
    other = KIND.initial(spec, targets, CONFIG, 4, None)
    assert not np.array_equal(other["embed_tokens"]["b"], embedding["b"])


def test_an_adapter_of_a_head_that_is_the_embedding_cannot_be_merged():
    spec = LoRA(2, target_modules="embed_tokens")
    adapter = KIND.initial(spec, KIND.targets(spec, CONFIG), CONFIG, 0, None)
    assert KIND.merged(spec, adapter, CONFIG).keys() == {"model.embed_tokens.weight"}
    with pytest.raises(InputError, match="cannot be merged"):
        KIND.merged(spec, adapter, dataclasses.replace(CONFIG, tie_word_embeddings=True))


def test_dropout_of_the_head_leaves_out_features_that_its_adapter_reads():
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((2, 16, 8)).astype(np.float32)
    logits = rng.standard_normal((2, 16, 20)).astype(np.float32)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 8, 2), (2, 2, 20)))
    counters = rng.integers(2**32, size=(2, 16), dtype=np.uint32)
    rate, scale = np.float32([0.5, 0]), np.float32([3, 2])
    own = {"a": a, "b": b, "scale": scale, "counters": counters, "rate": rate}
    found = KIND.op.logits(jax.tree.map(jax.numpy.asarray, own), hidden, logits, 0)
    kept = np.asarray(keep_mask(counters[0], np.full(16, 0.5, np.float32), 8))
    assert 0.3 < kept.mean() < 0.7
    masks = np.stack([kept / 0.5, np.ones_like(kept)])
    wanted = logits + scale[:, None, None] * ((masks * hidden) @ a @ b)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_of_rows_are_summed_for_every_token():
    rng = np.random.default_rng(0)
    table = rng.standard_normal((1, 3, 20, 2)).astype(np.float32)
    given = rng.standard_normal(table.shape).astype(np.float32)
    slots = np.int32([2, -1, 0, 2])
    tokens = rng.integers(-1, 6, size=(4, 16)).astype(np.int32)
    weights = rng.standard_normal((4, 16, 2)).astype(np.float32)

    @jax.jit
    def run(table, sums, slots, tokens):
        def look_up(sums):
            return rows_of_tokens({"a": table}, {"a": sums}, slots, tokens)

        (rows, _), backward = jax.vjp(look_up, sums)
        return rows["a"], backward(({"a": weights}, {"a": sums}))[0]

    rows, found = run(table, given, slots, tokens)
    wanted, expected = np.zeros((4, 16, 2), np.float32), given.astype(np.float64)
    for chunk, slot in enumerate(slots):
        for place, token in enumerate(tokens[chunk]):
            if slot >= 0 and token >= 0:
                wanted[chunk, place] = table[0, slot, token]
                expected[0, slot, token] += weights[chunk, place]
    np.testing.assert_array_equal(rows, wanted)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
