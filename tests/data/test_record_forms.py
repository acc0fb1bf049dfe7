"""Every record form renders to one text whose target ranges cover exactly the part to learn."""

import re

import pytest

from jaxmux.data import DataError, Record
from jaxmux.data.record_forms import detect_form, render


def record(**fields) -> Record:
    return Record(0, fields, "train.jsonl:7")


def learned(rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.target_ranges]


def test_prompt_completion_learns_the_completion():
    rendered = render(record(prompt="2+2=", completion=" 4"), "prompt_completion", "completion")
    assert rendered.text == "2+2= 4"
    assert learned(rendered) == [" 4"]


def test_alpaca_is_the_usual_prompt_and_learns_the_output():
    rendered = render(record(instruction="Add.", input="2 2", output="4"), "alpaca", "completion")
    assert rendered.text == "### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n4"
    assert learned(rendered) == ["4"]


@pytest.mark.parametrize("empty", [{}, {"input": ""}, {"input": None}])
def test_alpaca_without_input_has_no_input_section(empty):
    rendered = render(record(instruction="Go.", output="ok", **empty), "alpaca", "completion")
    assert rendered.text == "### Instruction:\nGo.\n\n### Response:\nok"


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"text": "a"}, "text"),
    ],
)
def test_loss_on_all_learns_every_token(fields, form):
    assert render(record(**fields), form, "all").target_ranges is None


def test_text_learns_every_token():
    assert render(record(text="a b"), "text", "completion") == ("a b", None, False)


@pytest.mark.parametrize(
    ("names", "form"),
    [
        (("prompt", "completion"), "prompt_completion"),
        (("messages", "prompt"), "messages"),
        (("instruction", "output"), "alpaca"),
        (("instruction", "input", "output", "text"), "alpaca"),
        (("text", "url"), "text"),
    ],
)
def test_form_is_detected_from_fields(names, form):
    assert detect_form(record(**dict.fromkeys(names, "x"))) == form


def test_unknown_fields_are_refused_with_the_forms():
    with pytest.raises(DataError, match="train.jsonl:7: .*'question', 'answer'.*alpaca"):
        detect_form(record(question="x", answer="y"))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": "x"}, "no field 'completion'.*found fields: 'prompt'"),
        ({"prompt": "x", "completion": None}, "null in field 'completion'"),
        ({"prompt": "x", "completion": 4}, "field 'completion' must be a string, found int"),
        ({"prompt": "\ud83d", "completion": "x"}, "field 'prompt' is not valid Unicode"),
    ],
)
def test_bad_field_is_named_with_its_line(fields, problem):
    with pytest.raises(DataError, match=re.escape("train.jsonl:7: ") + problem):
        render(record(**fields), "prompt_completion", "completion")
