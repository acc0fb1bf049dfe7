"""Rollouts of tokens and of texts: their samples, values, groups and errors."""

import math

import numpy as np
import pytest

from jaxmux.data import DataError, Source, load_samples
from jaxmux.objectives import Policy

TOKENS = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9], "logprobs": [-1.5, -0.25]}


@pytest.fixture
def load(write_jsonl, gpt):
    def load(*records, max_length=64, **fields):
        source = Source(str(write_jsonl(*records)), **fields)
        return load_samples(source, gpt, max_length=max_length, records="rollouts")

    return load


def test_tokens_and_values_are_those_of_the_record(load):
    by_answer = {**TOKENS, "advantages": 2.5}
    by_token = {**TOKENS, "advantages": [1.0, -3.0]}
    one, other = load(by_answer, by_token).samples
    assert one.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert one.target_mask.tolist() == [False] * 3 + [True] * 2
    np.testing.assert_array_equal(one.values["logprobs"][3:], np.float32([-1.5, -0.25]))
    assert np.isnan(one.values["logprobs"][:3]).all()
    assert one.values["advantages"][3:].tolist() == [2.5, 2.5]
    assert other.values["advantages"][3:].tolist() == [1.0, -3.0]
    assert math.isnan(one.numbers["reward"])


def test_texts_are_tokenized_as_for_sft(load, gpt, write_jsonl):
    record = {"prompt": "What is", "completion": " it?"}
    expected = load_samples(Source(str(write_jsonl(record))), gpt, max_length=64).samples[0]
    count = expected.target_tokens
    found = load({**record, "reward": 1, "logprobs": [-0.5] * count}).samples[0]
    np.testing.assert_array_equal(found.input_ids, expected.input_ids)
    np.testing.assert_array_equal(found.target_mask, expected.target_mask)
    assert (found.values["logprobs"][found.target_mask] == -0.5).all()


def test_a_cut_sample_keeps_the_values_of_its_tokens(load):
    samples = load({**TOKENS, "advantages": [1.0, 2.0]}, max_length=4)
    (sample,) = samples.samples
    assert sample.input_ids.tolist() == [5, 6, 7, 8] and samples.truncated == 1
    assert sample.values["advantages"][3:].tolist() == [1.0]


def test_groups_are_named_or_are_the_answers_to_one_prompt(load):
    rewards = {name: value for name, value in TOKENS.items() if name != "logprobs"}
    other = {**rewards, "prompt_ids": [5]}
    found = load(
        {**rewards, "reward": 1},
        {**other, "reward": 2},
        {**rewards, "reward": 3},
        {**other, "reward": 4, "group": "a"},
    )
    assert found.samples.numbers["group"].tolist() == [0, 1, 0, 2]
    assert found.samples.numbers["reward"].tolist() == [1, 2, 3, 4]
    kept = found.samples.take(np.array([2, 0]))
    assert kept[0].numbers == {"reward": 3, "group": 0}


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_advantages_compare_an_answer_with_its_group(scale, leave_one_out):
    rewards, groups = np.array([1.0, 4.0, 2.0, 7.0, 3.0, 3.0]), np.array([0, 1, 0, 0, 2, 2])
    policy = Policy(scale_rewards=scale, leave_one_out=leave_one_out)
    found = policy.advantages(rewards, groups)
    for group in range(3):
        own = rewards[groups == group]
        for reward, advantage in zip(own, found[groups == group], strict=True):
            others = np.delete(own, own.tolist().index(reward)) if leave_one_out else own
            expected = reward - others.mean() if len(others) else 0
            deviation = own.std(ddof=1) if len(own) > 1 else 0
            expected /= deviation + 1e-4 if scale == "group" else 1
            assert advantage == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs advantages or a reward, one of the two"),
        ({"advantages": 1, "reward": 1}, "needs advantages or a reward, one of the two"),
        ({"reward": math.nan}, "reward should have finite numbers, found nan"),
        ({"reward": True}, "reward should have finite numbers, found True"),
        ({"advantages": [1.0]}, "advantages has 1 numbers, and the completion has 2 tokens"),
        ({"advantages": 1, "logprobs": 3}, "logprobs should be a list of numbers"),
        ({"advantages": 1, "logprobs": [0, "a"]}, "logprobs should have finite numbers"),
        ({"reward": 1, "group": {}}, "group should be a name or a number"),
        ({"reward": 1, "completion_ids": []}, "completion_ids is empty"),
        ({"reward": 1, "completion_ids": [1.5]}, "completion_ids should be a list of token ids"),
        ({"reward": 1, "prompt_ids": None}, "prompt_ids should be a list of token ids"),
    ],
)
def test_what_is_no_rollout_is_refused_with_its_line(fields, message, load):
    good = {**TOKENS, "advantages": 1.0}
    with pytest.raises(DataError, match=f":2: .*{message}"):
        load(good, TOKENS | fields)
    found = load(good, TOKENS | fields, on_bad_record="skip")
    assert (len(found.samples), found.skipped) == (1, 1)
