"""The results of the benchmarked programs for small shapes on CPU, and the command line."""

import json
import sys

import benchmark_grouped_lora
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_lora_chain import (
    Case,
    Linear,
    adapted_program,
    frozen_program,
    make_adapters,
    make_frozen,
)

LINEAR, TOKENS, LAYERS = Linear(64, (64, 128)), 256, 3


def test_every_layer_has_results_of_its_own_weights():
    frozen = make_frozen(LINEAR, TOKENS, LAYERS)
    results = frozen_program(frozen)()
    assert len(results) == LAYERS
    for layer, (outputs, dx) in enumerate(results):
        weights = [np.asarray(w.at_layer(layer).decoded(), np.float32) for w in frozen.weights]
        x, *dys = (np.asarray(array, np.float32) for array in (frozen.x, *frozen.gradients))
        for output, weight in zip(outputs, weights, strict=True):
            np.testing.assert_allclose(output.astype(jnp.float32), x @ weight, atol=2e-2)
        expected = sum(dy @ weight.T for dy, weight in zip(dys, weights, strict=True))
        np.testing.assert_allclose(dx.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.slow
def test_without_factors_the_adapted_program_is_the_frozen_one():
    frozen = make_frozen(LINEAR, TOKENS, LAYERS)
    adapters = make_adapters(Case(LINEAR, (8, 16)), TOKENS, LAYERS)
    zeros = jax.tree.map(jnp.zeros_like, adapters.factors)
    results = adapted_program("xla", frozen, adapters._replace(factors=zeros))()
    for found, expected in zip(
        *map(jax.tree.leaves, (results, frozen_program(frozen)())), strict=True
    ):
        np.testing.assert_allclose(
            found.astype(jnp.float32), expected.astype(jnp.float32), atol=1e-2
        )


def test_ranks_below_the_pools_are_padded_with_zeros():
    factors = make_adapters(Case(LINEAR, (8, 16)), TOKENS, LAYERS).factors[0]
    assert not factors.a[:, 0, :, 8:].any() and not factors.b[:, 0, 8:].any()
    assert factors.a[:, 1, :, 8:].all() and factors.a[:, 0, :, :8].all()


@pytest.mark.long
def test_the_benchmark_works_on_small_shapes(tmp_path, monkeypatch):
    out = tmp_path / "records.json"
    command = [benchmark_grouped_lora.__file__, "--out", str(out)]
    command += ["--implementations", "xla", "--groups", "ranks", "--shrink", "64"]
    sizes = {"tokens": 256, "repeat": 2, "turns": 2, "seconds": 0.01}
    command += [f"--{name}={value}" for name, value in sizes.items()]
    monkeypatch.setattr(sys, "argv", command)
    benchmark_grouped_lora.main()
    records = json.loads(out.read_text())
    assert [max(r["ranks"]) for r in records] == [64, 64, 16]
    assert all(r["ratio"] > 0 and r["layers"] == 2 for r in records)
