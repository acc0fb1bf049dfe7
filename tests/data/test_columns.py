"""Fields with other names: columns rename them, and errors say which columns fit."""

import re

import numpy as np
import pytest

from jaxmux.data import DataError, Record, Source, load_samples
from jaxmux.data.record_forms import Columns, detect_form, render

QA = {"question": "2+2=", "answer": " 4"}
COLUMNS = {"prompt": "question", "completion": "answer"}
TURN = {"role": "user", "content": "hi"}


def record(**fields) -> Record:
    return Record(0, fields, "train.jsonl:7")


def samples(path, tokenizer, **options):
    return load_samples(Source(path, **options), tokenizer, max_length=512).samples


def test_columns_give_fields_the_names_of_the_form(gpt, write_jsonl):
    path = write_jsonl(QA)
    plain = write_jsonl({"prompt": QA["question"], "completion": QA["answer"]}, name="plain.jsonl")
    ((ids, mask, *_),) = samples(path, gpt, columns=COLUMNS)
    ((expected, targets, *_),) = samples(plain, gpt)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(mask, targets)


def test_columns_choose_among_the_forms_that_have_them(gpt, write_jsonl):
    path = write_jsonl(QA | {"messages": [TURN], "completion": "no", "text": "no"})
    (sample,) = samples(path, gpt, columns=COLUMNS)
    assert gpt.decode(sample.input_ids) == "2+2= 4<|endoftext|>"


def test_columns_may_exchange_names():
    source = Source("a.jsonl", columns={"prompt": "completion", "completion": "prompt"})
    found = Columns(source).renamed(record(prompt="a", completion="b", other=1))
    assert found.fields == {"prompt": "b", "completion": "a", "other": 1}


def test_a_missing_column_is_named(gpt, write_jsonl):
    path = write_jsonl(QA, {"question": "x"})
    with pytest.raises(DataError, match=":2: no field 'answer', which columns names for 'compl"):
        samples(path, gpt, columns=COLUMNS)


def test_an_optional_column_may_be_missing_but_not_everywhere(gpt, write_jsonl):
    rows = [{"instruction": "Add.", "output": "4"}, {"instruction": "Add.", "output": "4"}]
    rows[1]["context"] = "2 2"
    columns = {"input": "context"}
    first, second = samples(write_jsonl(*rows), gpt, columns=columns)
    assert "Input" not in gpt.decode(first.input_ids)
    assert "### Input:\n2 2" in gpt.decode(second.input_ids)
    with pytest.raises(DataError, match="no record has the field 'context', which .* 'input'"):
        samples(write_jsonl(rows[0]), gpt, columns=columns)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"columns": {"promt": "a"}}, "columns: 'promt' is no field of a form; did you mean promp"),
        (
            {"columns": {"zzz": "a"}},
            "columns: 'zzz' is no field of a form; the fields are messages",
        ),
        ({"columns": {"prompt": "a", "text": "b"}}, "columns: no form has the fields prompt, text"),
        (
            {"columns": {"prompt": "a"}, "form": "alpaca"},
            "columns: no form has the fields prompt; the forms and their fields are alpaca ("
            "instruction, output, input, system, history)",
        ),
        ({"columns": [("text", "a"), ("text", "b")]}, "columns names 'text' twice"),
        ({"columns": {"text": 3}}, "columns should be a mapping from names to a string"),
        ({"columns": {"text": ""}}, "columns should be a mapping from names to a string"),
        ({"columns": "text"}, "columns should be a mapping"),
    ],
)
def test_impossible_columns_are_refused(options, problem):
    with pytest.raises(DataError, match=re.escape(f"a.jsonl: {problem}")):
        Source("a.jsonl", **options)


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        (QA, 'set columns={"prompt": "question", "completion": "answer"}'),
        ({"input": "a", "output": "b"}, 'set columns={"prompt": "input", "completion": "output"}'),
        ({"prompt": "a", "response": "b"}, 'set columns={"completion": "response"}'),
        ({"Prompt": "a", "Response": "b"}, '{"prompt": "Prompt", "completion": "Response"}'),
        (
            {"instruction": "a", "context": "b", "response": "c"},
            'set columns={"output": "response", "input": "context"}',
        ),
        ({"content": "a", "id": 3}, 'set columns={"text": "content"}'),
        ({"dialogue": [TURN]}, 'set columns={"messages": "dialogue"}'),
        (
            {"conversation": [{"from": "human", "value": "hi"}], "tools": "[]"},
            'set columns={"conversations": "conversation"}',
        ),
    ],
)
def test_a_record_that_nearly_fits_gets_the_setting_that_makes_it_fit(fields, setting):
    with pytest.raises(DataError, match=re.escape(setting) + "$") as error:
        detect_form(record(**fields))
    columns = eval(str(error.value).rpartition("columns=")[2])
    source = Source("a.jsonl", columns=columns)
    detect_form(Columns(source).renamed(record(**fields)), source.forms)


@pytest.mark.parametrize(
    ("fields", "form", "setting"),
    [
        ({"conversations": [{"from": "human"}]}, "messages", 'set form="sharegpt"'),
        ({"instruction": "a", "response": "b"}, "alpaca", 'set columns={"output": "response"}'),
        ({"text": "a"}, "prompt_completion", 'set form="text"'),
    ],
)
def test_a_record_of_another_form_than_the_source_says_gets_a_hint(
    gpt, write_jsonl, fields, form, setting
):
    with pytest.raises(DataError, match=re.escape(setting) + "$"):
        samples(write_jsonl(fields), gpt, form=form)


def test_a_record_that_tells_nothing_gets_no_hint():
    with pytest.raises(DataError, match=r"sharegpt \(conversations\)$"):
        detect_form(record(url="a", n=3))


@pytest.mark.parametrize(
    ("fields", "setting"),
    [
        ({"prompt": "a"}, 'set columns={"completion": "chosen"}'),
        ({"question": "a"}, 'set columns={"prompt": "question", "completion": "chosen"}'),
        ({}, 'set columns={"text": "chosen"}'),
        ({"chosen": [TURN], "rejected": [TURN]}, 'set columns={"messages": "chosen"}'),
    ],
)
def test_preference_data_is_refused_by_name(fields, setting):
    fields = {"chosen": "b", "rejected": "c"} | fields
    with pytest.raises(DataError, match="preference data, for an objective such as DPO") as e:
        detect_form(record(**fields))
    assert str(e.value).endswith(f"to train on the chosen answers only, {setting}")


def test_preference_data_is_refused_in_a_given_form_too():
    fields = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match="no field 'completion'.*preference data"):
        render(record(**fields), "prompt_completion", "completion")
    with pytest.raises(DataError, match='preference data.*set form="prompt_completion" and col'):
        render(record(**fields), "text", "completion")
