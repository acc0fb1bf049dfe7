"""Preference records of many forms: the pair of texts, its tokens and targets, and errors."""

import numpy as np
import pytest

from jaxmux.data import DataError, Source, load_samples


def turn(role, content):
    return {"role": role, "content": content}


CHAT = [turn("user", "What is 2 + 3?")]
GOOD, BAD = [turn("assistant", "It is 5.")], [turn("assistant", "It is 23.")]


@pytest.fixture
def pairs_of(write_jsonl, gpt):
    """Loads preference records: for each, the texts of both samples and of their targets."""

    def load(*records, tokenizer=gpt, **fields):
        source = Source(str(write_jsonl(*records)), **fields)
        samples = load_samples(source, tokenizer, max_length=512, records="pairs").samples
        texts = [tokenizer.decode(sample.input_ids) for sample in samples]
        targets = [tokenizer.decode(s.input_ids[s.target_mask]) for s in samples]
        found = list(zip(texts, targets, strict=True))
        return list(zip(found[::2], found[1::2], strict=True))

    return load


TEXT = {"prompt": "Two and three?", "chosen": " Five.", "rejected": " Twenty-three."}
EXPLICIT = {"prompt": CHAT, "chosen": GOOD, "rejected": BAD}
SAME_AS_EXPLICIT = {
    "whole conversations": {"chosen": CHAT + GOOD, "rejected": CHAT + BAD},
    "ultrafeedback": {
        "prompt": "What is 2 + 3?",
        "chosen": CHAT + GOOD,
        "rejected": CHAT + BAD,
        "score_chosen": 9.0,
    },
    "openai": {
        "input": {"messages": CHAT},
        "preferred_output": GOOD,
        "non_preferred_output": BAD,
    },
    "llama-factory, sharegpt": {
        "conversations": [{"from": "human", "value": "What is 2 + 3?"}],
        "chosen": {"from": "gpt", "value": "It is 5."},
        "rejected": {"from": "gpt", "value": "It is 23."},
    },
    "llama-factory, alpaca": {
        "instruction": "What is 2 + 3?",
        "input": "",
        "chosen": "It is 5.",
        "rejected": "It is 23.",
    },
    "llama-factory, old": {"instruction": "What is 2 + 3?", "output": ["It is 5.", "It is 23."]},
}


def test_texts_end_with_eos(pairs_of, gpt):
    ((chosen, rejected),) = pairs_of(TEXT)
    eos = gpt.eos_token
    assert chosen == (f"Two and three? Five.{eos}", f" Five.{eos}")
    assert rejected == (f"Two and three? Twenty-three.{eos}", f" Twenty-three.{eos}")


def test_texts_that_end_with_eos_get_no_second_one(pairs_of, gpt):
    with_eos = {**TEXT, "chosen": TEXT["chosen"] + gpt.eos_token}
    assert pairs_of(with_eos) == pairs_of(TEXT)


def test_a_prompt_is_found_in_whole_texts(pairs_of):
    whole = {name: TEXT["prompt"] + TEXT[name] for name in ("chosen", "rejected")}
    # The space before the place where the answers part belongs to them.
    assert pairs_of(whole) == pairs_of(TEXT)


@pytest.mark.parametrize("form", SAME_AS_EXPLICIT)
def test_chats_of_all_forms_become_the_same_pair(form, pairs_of, gpt):
    ((chosen, rejected),) = expected = pairs_of(EXPLICIT)
    prompt = gpt.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    whole = gpt.apply_chat_template(CHAT + GOOD, tokenize=False)
    assert chosen == (whole, whole.removeprefix(prompt))
    assert rejected[1].startswith("It is 23.")
    assert pairs_of(SAME_AS_EXPLICIT[form]) == expected


def test_columns_rename_the_answers(pairs_of):
    renamed = {"question": TEXT["prompt"], "good": TEXT["chosen"], "bad": TEXT["rejected"]}
    columns = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    assert pairs_of(renamed, columns=columns) == pairs_of(TEXT)


def test_both_samples_of_a_pair_have_ids_of_their_own(write_jsonl, gpt):
    path = str(write_jsonl(TEXT, TEXT, TEXT))
    found = load_samples(Source(path), gpt, max_length=512, records="pairs")
    assert found.samples.sample_ids.tolist() == [0, 1, 2, 3, 4, 5] and found.read == 3


def test_a_pair_is_dropped_if_an_answer_is_cut_away(write_jsonl, gpt):
    long = {**TEXT, "prompt": "word " * 50}
    source = Source(str(write_jsonl(TEXT, long)))
    found = load_samples(source, gpt, max_length=40, records="pairs")
    assert (len(found.samples), found.read, found.dropped) == (2, 2, 1)
    short = load_samples(source, gpt, max_length=20, records="pairs")
    # Both answers are cut by themselves.
    assert [len(sample.input_ids) for sample in short.samples] == [18, 20]
    assert short.truncated == 1


def test_equal_answers_are_counted(write_jsonl, gpt):
    path = str(write_jsonl(TEXT, {**TEXT, "rejected": TEXT["chosen"]}))
    assert load_samples(Source(path), gpt, max_length=64, records="pairs").equal_answers == 1


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "no pair of answers: expected the fields chosen"),
        ({**TEXT, "rejected": BAD}, "should both be texts, or both lists of messages"),
        ({**TEXT, "rejected": 3}, "should both be texts, or both lists of messages"),
        ({"chosen": "Yes", "rejected": "No"}, "have no common beginning"),
        ({"prompt": CHAT, "chosen": [], "rejected": BAD}, "chosen should be a list of messages"),
        ({"preferred_output": GOOD, "non_preferred_output": BAD}, "field 'input' should be"),
        (EXPLICIT, "has messages, and the first record has texts"),
    ],
)
def test_what_is_no_pair_is_refused_with_its_line(record, message, write_jsonl, gpt):
    path = str(write_jsonl(TEXT, record))
    with pytest.raises(DataError, match=f"{path}:2: .*{message}"):
        load_samples(Source(path), gpt, max_length=64, records="pairs")
    source = Source(path, on_bad_record="skip")
    found = load_samples(source, gpt, max_length=64, records="pairs")
    assert (len(found.samples), found.skipped) == (2, 1)


def test_pairs_need_an_objective_of_pairs(write_jsonl, gpt):
    path = str(write_jsonl(TEXT))
    with pytest.raises(DataError, match="for an objective such as DPO"):
        load_samples(Source(path), gpt, max_length=64)
    with pytest.raises(DataError, match="need an objective of pairs, such as DPO"):
        load_samples(Source(path, form="preference"), gpt, max_length=64)
    with pytest.raises(DataError, match="needs pairs of a chosen and a rejected answer"):
        load_samples(Source(path, form="text"), gpt, max_length=64, records="pairs")


def test_targets_begin_where_the_tokens_part(write_jsonl, gpt):
    # The prompt ends within a token of one whole text, so both answers begin before it.
    record = {"prompt": "The word is sun", "chosen": "shine", "rejected": " set"}
    samples = load_samples(
        Source(str(write_jsonl(record))), gpt, max_length=64, records="pairs"
    ).samples
    prompt = gpt("The word is sun")["input_ids"]
    chosen, rejected = (list(sample.input_ids) for sample in samples)
    begin = min(
        next(n for n, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b)
        if ids[: len(prompt)] != prompt
        else len(prompt)
        for ids in (chosen, rejected)
    )
    for sample in samples:
        np.testing.assert_array_equal(sample.target_mask, np.arange(len(sample.input_ids)) >= begin)
