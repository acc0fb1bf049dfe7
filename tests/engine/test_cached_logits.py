"""The logits of tokens behind a cache are those of a forward pass over the whole text, whatever
adapters are in the batch."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.generation.batches import Batch
from jaxmux.generation.programs import Served, next_logits, prompts_in_rows, single_tokens
from jaxmux.generation.requests import Prompt, Request, distinct_adapters
from jaxmux.generation.served_adapters import served_adapters, stacked_pools
from jaxmux.models import (
    Backbone,
    ForwardOptions,
    SlotTable,
    empty_cache,
    hidden_states,
    logits_of,
)
from jaxmux.models.cached_forward import single_layers
from jaxmux.models.head_adapters import head_adapters
from jaxmux.peft import Bottleneck, LoRA, kind_of, ops_of, scale_of

from .test_kinds import MORE_SPECS, SPECS

# Tokens that are computed one by one behind each prompt.
STEPS = 3
ROW = 32


@pytest.fixture(scope="module")
def adapters(make_task_with):
    """By name, a specification and the random arrays of an adapter of each kind."""
    prepared = {
        name: make_task_with(name, spec, i, steps=1, samples=2)
        for i, (name, spec) in enumerate(SPECS.items())
        if name not in MORE_SPECS
    }
    return {name: (p.task.adapter, p.make_adapter()) for name, p in prepared.items()}


def both_logits(backbone: Backbone, own: list[tuple], lengths: list[int], separate=True):
    """Logits [requests, STEPS + 1, vocab] of the tokens behind prompts of these lengths, with the
    cache and by a forward pass over each whole text."""
    config, dtype = backbone.config, backbone.compute_dtype
    rng = np.random.default_rng(0)
    requests = [Request("", *each) for each in own]
    texts = []
    for (spec, *_), length in zip(own, lengths, strict=True):
        virtual = kind_of(spec).virtual_tokens(spec) if spec else 0
        ids = rng.integers(config.vocab_size, size=length + STEPS)
        texts.append(np.int32([*(-1 - np.arange(virtual)), *ids]))
    prompts = [Prompt(list(text[:-STEPS]), len(text)) for text in texts]
    firsts, slots = distinct_adapters(requests)
    batch = Batch(prompts, slots, len(own))
    batch.fill()
    adapters, _ = served_adapters(firsts, config, dtype)
    rows = len(batch.requests)
    chunk_slot = jnp.asarray(batch.slots, jnp.int32)
    served = Served(*adapters, chunk_slot)
    options = ForwardOptions(
        "xla", "xla", remat="none", max_sequences=1, adapter_ops=ops_of(adapters.outside)
    )
    # All requests of an adapter have one chunk.
    assert batch.slots == list(range(len(firsts)))
    weights = backbone.weights
    if separate:
        weights = weights | {"layers": single_layers(weights["layers"], config.num_layers)}
    given = np.zeros((rows, ROW), np.int32)
    starts = np.zeros(rows, np.int32)
    order = [(row, i) for row, i in enumerate(batch.requests) if i is not None]
    for row, i in order:
        given[row, : len(texts[i])] = texts[i]
        starts[row] = len(texts[i]) - STEPS
    run = jax.jit(partial(next_logits, config, options._replace(in_order=separate)))
    cache = empty_cache(config, rows, ROW, dtype)
    read = prompts_in_rows(jnp.asarray(given), starts, chunk_slot)
    logits, cache = run(weights, served, cache, None, read, np.maximum(starts - 1, 0))
    found = [logits]
    for step in range(STEPS):
        place = jnp.asarray(starts + step)
        token = jnp.asarray(given[np.arange(rows), starts + step])
        new = single_tokens(token, place, chunk_slot)
        logits, cache = run(weights, served, cache, place, new, jnp.zeros_like(place))
        found.append(logits)
    found = np.stack(found, axis=1)

    pools = {
        name: {point: jax.tree.map(jnp.asarray, arrays) for point, _, arrays in pool}
        for name, pool in stacked_pools(firsts, config)
    }
    scale = jnp.float32([scale_of(r.spec) if r.spec else 0.0 for r in firsts])
    zeros = jnp.zeros_like(scale)

    @jax.jit
    def whole(weights, pools):
        microbatch = prompts_in_rows(jnp.asarray(given), starts + STEPS, chunk_slot)
        at_head, _ = head_adapters(options.adapter_ops, pools, None, chunk_slot)
        table = SlotTable(scale, zeros, zeros.astype(jnp.uint32))
        states, _, _ = hidden_states(
            config, weights, pools, None, microbatch, table, options, at_head
        )
        return logits_of(weights, states, at_head).reshape(rows, ROW, -1)

    wanted = np.asarray(whole(backbone.weights, pools))
    places = [[row, starts[row] - 1 + np.arange(STEPS + 1)] for row, _ in order]
    return (
        np.stack([found[row] for row, _ in order]),
        np.stack([wanted[row, place] for row, place in places]),
    )


def assert_equal_logits(found, wanted, tolerance=2e-5):
    assert np.ptp(wanted) > 0.1
    np.testing.assert_allclose(found, wanted, atol=tolerance * np.abs(wanted).max())
    assert (found.argmax(axis=-1) == wanted.argmax(axis=-1)).all()


@pytest.mark.long
def test_all_kinds_and_the_bare_backbone_in_one_batch(backbone, adapters):
    own = [*adapters.values(), (None, None)]
    lengths = [2 + 5 * i % 17 for i in range(len(own))]
    found, wanted = both_logits(backbone, own, lengths, separate=False)
    assert_equal_logits(found, wanted)


def random_adapters(config):
    """A LoRA and a bottleneck whose arrays are all random."""
    lora = LoRA(3, 6.0, target_modules=("q_proj", "down_proj"))
    for seed, spec in enumerate((lora, Bottleneck("houlsby", 5))):
        kind, rng = kind_of(spec), np.random.default_rng(seed)
        first = kind.initial(spec, kind.targets(spec, config), config, seed, None)
        yield (
            spec,
            jax.tree.map(lambda x, rng=rng: np.float32(x + 0.1 * rng.normal(size=x.shape)), first),
        )


@pytest.mark.long
@pytest.mark.parametrize(
    ("fields", "separate", "tolerance"),
    [
        (
            {"sliding_window": 6, "tie_word_embeddings": True, "qk_norm": True}
            | {"attention_bias": True, "mlp_bias": True, "output_bias": True},
            True,
            2e-5,
        ),
        pytest.param({"backbone_format": "int8"}, True, 2e-5, marks=pytest.mark.slow),
        pytest.param({"backbone_format": "nf4"}, False, 2e-5, marks=pytest.mark.slow),
        # Activations that differ in the last bit may be rounded to other numbers in float8.
        ({"backbone_format": "float8"}, True, 1e-3),
    ],
    ids=["window, tied, norms, biases", "int8", "nf4", "float8"],
)
def test_backbones(fields, separate, tolerance, config):
    """Adapters and the bare backbone have three and two sequences, so chunks have several rows, and
    a row has no sequence. The layers' weights are separate or in stacks."""
    if "backbone_format" in fields:
        fields = fields | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
        fields = fields | {"num_layers": 1}
    own_config = dataclasses.replace(config, **fields)
    random = Backbone.random(own_config, seed=3)
    rng = np.random.default_rng(1)

    def moved(leaf):
        is_plain = leaf.dtype == jnp.float32 and leaf.ndim > 1
        return leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32) if is_plain else leaf

    if "backbone_format" not in fields:
        random = dataclasses.replace(random, weights=jax.tree.map(moved, random.weights))
    kinds = [*random_adapters(own_config), (None, None)]
    if "backbone_format" in fields:
        kinds = kinds[::2]
    own = [each for each in kinds for _ in range(3)][:-1]
    lengths = [3 + 4 * i % 15 for i in range(len(own))]
    assert_equal_logits(*both_logits(random, own, lengths, separate), tolerance)
