"""Log-probabilities of samples, and of all tokens in their place, under adapters: against a plain
model, and alone and in company."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxmux.peft import PromptTuning
from jaxmux.tasks import TaskError
from tests.engine.conftest import SMALL, random_samples

from .reference_llama import logits_of


@pytest.fixture(scope="module")
def samples():
    return random_samples(7, 9, (5, 90))


@pytest.fixture(scope="module")
def found(make_engine, make_task, samples):
    """Log-probabilities under the adapter of the task "a" after two steps, and the adapter."""
    engine = make_engine(make_task("a"), shape=SMALL)
    engine.train_round()
    engine.train_round()
    engine.drain()
    return engine.scores("a", samples), engine.adapter("a"), engine.prepared("a")


def test_they_are_those_of_a_plain_model(found, config, backbone, samples):
    scores, adapter, prepared = found
    spec = prepared.task.adapter
    for sample, of_sample in zip(samples, scores, strict=True):
        ids = sample.input_ids
        with jax.enable_x64(True):
            logits = logits_of(config, backbone.weights, "lora", spec, adapter, ids[:-1])
            every = jax.nn.log_softmax(logits)
            squares = jax.nn.logsumexp(2 * every, axis=-1)
            expected = np.stack([every[np.arange(len(ids) - 1), ids[1:]], squares], axis=1)
        assert of_sample.dtype == np.float32
        np.testing.assert_allclose(of_sample, expected, rtol=1e-4, atol=1e-4)


def test_neighbours_and_order_change_no_bit(found, make_engine, make_task, samples):
    expected, *_ = found
    engine = make_engine(make_task("b"), make_task("a"), shape=SMALL)
    for _ in range(2):
        engine.train_round()
    engine.drain()
    order = np.random.default_rng(0).permutation(len(samples))
    moved = engine.scores("a", [samples[i] for i in order])
    for i, of_sample in zip(order, moved, strict=True):
        np.testing.assert_array_equal(of_sample, expected[i])


def test_held_out_loss_is_their_mean(make_engine, make_task, samples):
    task = dataclasses.replace(make_task("a"), eval_samples=samples)
    engine = make_engine(task, shape=SMALL)
    log_probs = engine.log_probs("a", samples)
    total = sum(
        of_sample[sample.target_mask[1:]].sum(dtype=np.float64)
        for sample, of_sample in zip(samples, log_probs, strict=True)
    )
    targets = sum(sample.target_tokens for sample in samples)
    assert engine.evaluate(["a"])["a"] == pytest.approx(-total / targets, rel=1e-12)


def test_virtual_tokens_of_the_adapter_are_read(make_engine, make_task_with, samples):
    spec = PromptTuning(3)
    engine = make_engine(make_task_with("prompt", spec, seed=1), shape=SMALL)
    log_probs = engine.log_probs("prompt", samples)
    lengths = [len(sample.input_ids) - 1 for sample in samples]
    assert [len(of_sample) for of_sample in log_probs] == lengths
    assert all(np.isfinite(of_sample).all() for of_sample in log_probs)


def test_a_sample_longer_than_a_row_is_refused(make_engine, make_task):
    engine = make_engine(make_task("a"), shape=SMALL)
    with pytest.raises(TaskError, match="task 'a': a sample takes 140 places in a row, and a row"):
        engine.log_probs("a", random_samples(1, 1, (141, 142)))
