"""Objectives that are functions in `jax.numpy`, against those that are written by hand."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux import AdamW, LoRA, Task
from jaxmux.field_checks import to_object
from jaxmux.objectives import DPO, CustomLoss, Policy, Recorded

LENGTHS = 5, 3, 2, 6


@pytest.fixture
def drawn():
    rng = np.random.default_rng(0)
    return [[-rng.uniform(0.1, 3, n) for n in LENGTHS] for _ in range(3)]


def preference(log_probs, inputs):
    """DPO with beta = 0.1."""
    rewards = 0.1 * jnp.where(inputs.is_target, log_probs - inputs.reference, 0).sum(axis=1)
    margins = rewards[::2] - rewards[1::2]
    loss = -jax.nn.log_sigmoid(margins).mean()
    return loss, {"rewards/margins": margins.mean()}


def surrogate(log_probs, inputs):
    """PPO whose losses are added up."""
    ratio = jnp.exp(jnp.where(inputs.is_target, log_probs - inputs.values["logprobs"], 0))
    advantages = inputs.values["advantages"]
    clipped = jnp.clip(ratio, 0.8, 1.2)
    return -jnp.where(
        inputs.is_target, jnp.minimum(ratio * advantages, clipped * advantages), 0
    ).sum()


def assert_same(found, expected):
    assert found.loss == pytest.approx(expected.loss, rel=1e-12)
    for one, other in zip(found.slopes, expected.slopes, strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-14)


def test_a_function_of_pairs_has_the_slopes_of_dpo(drawn):
    log_probs, reference, _ = drawn
    custom = CustomLoss(preference, "pairs", with_reference=True)
    found = custom.grade(log_probs, custom.known(reference))
    expected = DPO(0.1).grade(log_probs, DPO(0.1).known(reference))
    assert_same(found, expected)
    margins = expected.metrics["rewards/margins"]
    assert found.metrics == pytest.approx({"rewards/margins": margins})


def test_a_function_of_rollouts_has_the_slopes_of_ppo(drawn):
    log_probs, sampled, advantages = drawn
    recorded = Recorded({"logprobs": sampled, "advantages": advantages}, {})
    custom = CustomLoss(surrogate, "rollouts")
    assert_same(
        custom.grade(log_probs, None, recorded), Policy("ppo").grade(log_probs, None, recorded)
    )


def test_a_loss_that_is_no_scalar_is_refused(drawn):
    with pytest.raises(ValueError, match=r"test_custom.*should return a scalar, found shape \(4,"):
        CustomLoss(lambda log_probs, inputs: log_probs.sum(axis=1)).grade(drawn[0])
    with pytest.raises(ValueError, match="function should be a function of Python, found 'mean'"):
        CustomLoss("mean")


def test_its_name_stands_in_records(drawn):
    objective = CustomLoss(preference, "pairs")
    task = Task("a", "a.jsonl", LoRA(4), AdamW(1e-3), steps=1, objective=objective)
    assert json.loads(json.dumps(to_object(task)))["objective"] == {
        "kind": "custom",
        "function": f"{__name__}.preference",
        "of": "pairs",
        "with_reference": False,
    }
    assert dataclasses.replace(task, steps=3).objective.function is preference
