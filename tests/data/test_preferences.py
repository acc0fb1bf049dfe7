"""Records of preferences and labels in many forms: their texts, tokens and targets, mismatched
answers, and errors."""

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
    "axolotl, argilla": {
        "instruction": "What is 2 + 3?",
        "chosen_response": "It is 5.",
        "rejected_response": "It is 23.",
    },
    "axolotl, chat_template": {"messages": CHAT, "chosen": GOOD[0], "rejected": BAD[0]},
    "axolotl, chat_template of a text": {
        "messages": "What is 2 + 3?",
        "chosen": "It is 5.",
        "rejected": "It is 23.",
    },
    "axolotl, chat_template of lists": {"messages": CHAT, "chosen": GOOD, "rejected": BAD},
    "axolotl, icr": {"input": "What is 2 + 3?", "chosen": "It is 5.", "rejected": "It is 23."},
    "axolotl, intel": {
        "system": "",
        "question": "What is 2 + 3?",
        "chosen": "It is 5.",
        "rejected": "It is 23.",
    },
    "axolotl, prompt_pairs": {
        "system": None,
        "prompt": "What is 2 + 3?",
        "chosen": "It is 5.",
        "rejected": "It is 23.",
    },
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


def test_a_system_prompt_beside_a_question_is_rendered(pairs_of):
    record = SAME_AS_EXPLICIT["axolotl, intel"] | {"system": "Be brief."}
    ((chosen, _),) = pairs_of(record)
    assert chosen[0].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat")


@pytest.fixture
def labels_of(write_jsonl, gpt):
    """Loads labelled records: for each sample, its text, that of its targets, and its label."""

    def load(*records, mismatched_in=None, max_length=512, **fields):
        source = Source(str(write_jsonl(*records)), **fields)
        samples = load_samples(
            source,
            gpt,
            max_length=max_length,
            records="labels",
            mismatched_in=mismatched_in,
        ).samples
        assert len(set(samples.sample_ids.tolist())) == len(samples)
        return [
            (
                gpt.decode(sample.input_ids),
                gpt.decode(sample.input_ids[sample.target_mask]),
                sample.numbers["label"],
            )
            for sample in samples
        ]

    return load


LABELLED_TEXT = {"prompt": "Two and three?", "completion": " Five.", "label": True}
LABELLED_CHAT = {"prompt": CHAT, "completion": GOOD, "label": True}
SAME_AS_LABELLED = {
    "whole conversation": {"completion": CHAT + GOOD, "label": True},
    "whole conversation beside a text": {
        "prompt": "What is 2 + 3?",
        "completion": CHAT + GOOD,
        "label": True,
    },
    "llama-factory, alpaca": {
        "instruction": "What is 2 + 3?",
        "input": "",
        "output": "It is 5.",
        "kto_tag": True,
    },
    "llama-factory, sharegpt": {
        "conversations": [
            {"from": "human", "value": "What is 2 + 3?"},
            {"from": "gpt", "value": "It is 5."},
        ],
        "kto_tag": True,
    },
    "llama-factory, messages": {"messages": CHAT + GOOD, "label": True},
    "axolotl, argilla": {
        "instruction": "What is 2 + 3?",
        "completion": "It is 5.",
        "label": True,
    },
    "axolotl, intel": {
        "system": "",
        "question": "What is 2 + 3?",
        "completion": "It is 5.",
        "label": True,
    },
    "axolotl, ultra": {
        "system": None,
        "prompt": "What is 2 + 3?",
        "completion": "It is 5.",
        "label": True,
    },
}


def test_labelled_texts_end_with_eos(labels_of, gpt):
    eos = gpt.eos_token
    assert labels_of(LABELLED_TEXT, {**LABELLED_TEXT, "label": False}) == [
        (f"Two and three? Five.{eos}", f" Five.{eos}", 1),
        (f"Two and three? Five.{eos}", f" Five.{eos}", 0),
    ]


@pytest.mark.parametrize("form", SAME_AS_LABELLED)
def test_labelled_chats_of_all_forms_become_the_same_sample(form, labels_of, gpt):
    ((text, targets, label),) = expected = labels_of(LABELLED_CHAT)
    prompt = gpt.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == gpt.apply_chat_template(CHAT + GOOD, tokenize=False)
    assert (targets, label) == (text.removeprefix(prompt), 1)
    assert labels_of(SAME_AS_LABELLED[form]) == expected


def test_a_pair_is_two_labelled_answers(labels_of, pairs_of):
    (pair,) = pairs_of(TEXT)
    found = labels_of(TEXT, form="preference")
    assert found == [(*pair[0], 1), (*pair[1], 0)] == labels_of(TEXT)


def test_columns_rename_labelled_answers(labels_of):
    renamed = {"question": "Two and three?", "answer": " Five.", "good": True}
    columns = {"prompt": "question", "completion": "answer", "label": "good"}
    assert labels_of(renamed, columns=columns) == labels_of(LABELLED_TEXT)


def asked(n, label=True):
    return {"prompt": f"Q{n}:", "completion": f" A{n}", "label": label}


def mismatches(found, eos):
    """The numbers of the prompt and of the answer of each mismatched sample."""
    texts = [text.removesuffix(eos).split(": A") for text, _, _ in found[1::2]]
    return [(int(prompt[1:]), int(answer)) for prompt, answer in texts]


@pytest.mark.parametrize(
    ("records", "groups"),
    [(4, [4]), (3, [3]), (8, [4, 4]), (9, [4, 5]), (10, [4, 4, 2]), (2, [2])],
)
def test_mismatched_answers_are_those_of_the_record_before(records, groups, labels_of, gpt):
    found = labels_of(*(asked(n) for n in range(records)), mismatched_in=4)
    plain = labels_of(*(asked(n) for n in range(records)))
    assert found[::2] == plain
    expected, begin = [], 0
    for size in groups:
        expected += [(begin + n, begin + (n - 1) % size) for n in range(size)]
        begin += size
    assert mismatches(found, gpt.eos_token) == expected
    assert all(target.startswith(" A") for _, target, _ in found)


def test_a_mismatched_answer_belongs_to_another_prompt(labels_of, gpt):
    records = [asked(0), {**asked(0), "completion": " A7"}, asked(1)]
    found = labels_of(*records, mismatched_in=3)
    assert mismatches(found, gpt.eos_token) == [(0, 1), (0, 1), (1, 7)]
    # Where all have the same prompt, the answer of the record before is taken.
    alike = [{**asked(0), "completion": f" A{n}"} for n in range(3)]
    found = labels_of(*alike, mismatched_in=3)
    assert mismatches(found, gpt.eos_token) == [(0, 2), (0, 0), (0, 1)]


def test_pairs_are_mismatched_with_answers_of_the_same_label(labels_of, gpt):
    records = [{"prompt": f"Q{n}:", "chosen": f" A{n}", "rejected": f" A{n}5"} for n in range(3)]
    found = labels_of(*records, mismatched_in=3)
    expected = [(0, 2), (0, 25), (1, 0), (1, 5), (2, 1), (2, 15)]
    assert mismatches(found, gpt.eos_token) == expected


def test_mismatched_answers_are_cut_and_never_dropped(write_jsonl, gpt):
    # The long prompt gets the long answer.
    records = {**asked(0), "prompt": "Q" * 20}, asked(1), {**asked(2), "completion": " A" * 20}
    source = Source(str(write_jsonl(*records)), overlong="drop")
    whole, cut = (
        load_samples(source, gpt, max_length=most, records="labels", mismatched_in=3)
        for most in (64, 44)
    )
    assert (len(cut.samples), cut.dropped, cut.truncated, cut.read) == (6, 0, 0, 3)
    lengths = [[len(sample.input_ids) for sample in found.samples] for found in (whole, cut)]
    assert lengths[0][0] < lengths[0][4] == 44 < lengths[0][1]
    assert lengths[1] == [min(length, 44) for length in lengths[0]]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({**LABELLED_TEXT, "label": 1}, "'label' should be true or false, found 1"),
        ({**LABELLED_TEXT, "label": "yes"}, "'label' should be true or false, found 'yes'"),
        ({"instruction": "a", "output": "b", "kto_tag": None}, "'kto_tag' should be true or"),
        ({"prompt": "a", "completion": "b"}, "no labelled answer: expected a prompt, a compl"),
        ({"completion": "b", "label": True}, "no prompt before completion"),
        ({**LABELLED_TEXT, "completion": GOOD}, "the last of several messages should be"),
        ({"prompt": CHAT, "completion": "b", "label": True}, "should both be texts, or both"),
        ({"messages": CHAT, "label": True}, "the last of several messages should be"),
        ({"prompt": CHAT, "completion": [], "label": True}, "completion should be a list of m"),
        ({"label": True}, "field 'conversations' should be a list of messages"),
        (LABELLED_CHAT, "has messages, and the first record has texts"),
        ({**LABELLED_TEXT, "completion": 3}, "should both be texts, or both lists"),
    ],
)
def test_what_is_not_labelled_is_refused_with_its_line(record, message, write_jsonl, gpt):
    path = str(write_jsonl(LABELLED_TEXT, record))
    with pytest.raises(DataError, match=f"{path}:2: .*{message}"):
        load_samples(Source(path), gpt, max_length=64, records="labels")


def test_labels_need_an_objective_and_two_records(write_jsonl, gpt):
    path = str(write_jsonl(LABELLED_TEXT))
    with pytest.raises(DataError, match="need an objective of labelled answers, such as KTO"):
        load_samples(Source(path, form="labelled"), gpt, max_length=64)
    with pytest.raises(DataError, match="needs labelled answers"):
        load_samples(Source(path, form="text"), gpt, max_length=64, records="labels")
    with pytest.raises(DataError, match="one record only, and KTO needs"):
        load_samples(Source(path), gpt, max_length=64, records="labels", mismatched_in=8)
