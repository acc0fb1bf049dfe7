"""Adapters of a table that is both embedding and head."""

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jaxmux.models.adapter_ops import EMBEDDING, TIED
from jaxmux.optimizers import SGD
from jaxmux.peft import TrainedTokens, kind_of, size_of_adapter

from .reference_llama import loss_of

SPECS = {"tokens": TrainedTokens((7, 0, 100, 31, 55)), "token": TrainedTokens((1,))}


@pytest.fixture(scope="module")
def model_of_tasks(backbone):
    """The backbone of the other tests, with its embedding as its head."""
    config = dataclasses.replace(backbone.config, tie_word_embeddings=True)
    weights = {name: own for name, own in backbone.weights.items() if name != "lm_head"}
    return dataclasses.replace(backbone, config=config, weights=weights)


@pytest.fixture(scope="module")
def tasks(model_of_tasks, make_task_with, make_task):
    def of_both(name, spec, seed, **fields):
        prepared = make_task_with(name, spec, seed, **fields)
        own = prepared.make_adapter()[EMBEDDING]
        targets = kind_of(spec).targets(spec, model_of_tasks.config)
        assert targets.keys() == {TIED}
        size = size_of_adapter(spec, model_of_tasks.config)
        return dataclasses.replace(
            prepared, targets=targets, make_adapter=lambda: {TIED: own}, size=size
        )

    found = {
        name: of_both(name, spec, i, steps=3, samples=12)
        for i, (name, spec) in enumerate(SPECS.items())
    }
    return found | {"lora": make_task("lora", steps=3)}


@pytest.mark.parametrize("name", [*SPECS, "lora"])
def test_a_task_gets_the_same_bits_alone(name, assert_same_alone):
    assert_same_alone(name)


@pytest.mark.long
@pytest.mark.parametrize("name", ["tokens", pytest.param("token", marks=pytest.mark.slow)])
def test_a_step_equals_that_of_a_float64_model(name, model_of_tasks, make_mixed, tasks):
    rate, prepared = 0.5, tasks[name]
    sgd = dataclasses.replace(prepared.task, optimizer=SGD(rate, momentum=0.0, clip_norm=None))
    prepared = dataclasses.replace(prepared, task=sgd, eval_samples=list(prepared.batches[0]))
    first = prepared.make_adapter()[TIED]["rows"]
    with jax.enable_x64(True):
        given = model_of_tasks.config, model_of_tasks.weights, "trained_tokens", SPECS[name]
        function = partial(loss_of, *given, samples=prepared.batches[0])
        loss, gradient = jax.jit(
            jax.value_and_grad(lambda rows: function(adapter={TIED: {"rows": rows}}))
        )(np.asarray(first, np.float64))
    engine = make_mixed(prepared)
    np.testing.assert_allclose(engine.evaluate([name])[name], loss, rtol=1e-6)
    engine.train_round()
    (update,) = engine.drain()
    np.testing.assert_allclose(update.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(update.grad_norm, np.linalg.norm(gradient), rtol=1e-5)
    change = engine.adapter(name)[TIED]["rows"] - first
    error = np.linalg.norm(change + rate * np.asarray(gradient))
    assert error < 3e-5 * np.linalg.norm(change) + 1e-7 * np.linalg.norm(first)
