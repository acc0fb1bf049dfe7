"""Every record form renders to one text whose target ranges cover exactly the part to learn."""

import re

import pytest

from jaxmux.data import DataError, Record
from jaxmux.data.record_forms import (
    RenderedText,
    TextRange,
    detect_form,
    render,
    unread_fields,
)


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


ALPACA = record(
    instruction="And in winter?",
    input="Be exact.",
    output="It is cold.",
    system="You talk like a pirate.",
    history=[["How is summer?", "It is hot."], ("And spring?", "Mild.")],
)


def test_alpaca_with_system_and_history_is_in_llama_factorys_order():
    """Its template "alpaca": the system prompt, then turns that an EOS token and a blank line end.
    "The responses in the history will also be learned by the model", says its documentation."""
    rendered = render(ALPACA, "alpaca", "completion", "</s>")
    assert rendered.text == (
        "You talk like a pirate.\n\n"
        "### Instruction:\nHow is summer?\n\n### Response:\nIt is hot.</s>\n\n"
        "### Instruction:\nAnd spring?\n\n### Response:\nMild.</s>\n\n"
        "### Instruction:\nAnd in winter?\n\n### Input:\nBe exact.\n\n### Response:\nIt is cold."
    )
    assert learned(rendered) == ["It is hot.</s>", "Mild.</s>", "It is cold."]
    assert learned(render(ALPACA, "alpaca", "last_turn", "</s>")) == ["It is cold."]
    assert render(ALPACA, "alpaca", "all", "</s>").target_ranges is None


@pytest.mark.parametrize("empty", [None, "", []])
def test_alpaca_without_system_and_history_is_as_before(empty):
    fields = ALPACA.fields | {"system": empty or None, "history": empty}
    rendered = render(record(**fields), "alpaca", "completion", "</s>")
    assert rendered.text.startswith("### Instruction:\nAnd in winter?\n\n### Input:")
    assert learned(rendered) == ["It is cold."]


@pytest.mark.parametrize(
    ("history", "problem"),
    [
        ("Hello", "field 'history' must be a list of pairs .*, found str"),
        ([["a", "b", "c"]], "entry 0 of field 'history' must be a pair .*, found \\['a', 'b', 'c'"),
        ([["a", "b"], "cd"], "entry 1 of field 'history' must be a pair .*, found 'cd'"),
        ([["a", None]], "entry 0 of field 'history' must be a string, found NoneType"),
    ],
)
def test_a_malformed_history_is_named(history, problem):
    with pytest.raises(DataError, match=f"train.jsonl:7: {problem}"):
        render(record(**ALPACA.fields | {"history": history}), "alpaca", "completion")


CHAT = [
    {"role": "user", "content": "Hello there, my friend"},
    {"role": "assistant", "content": "Hi"},
]


@pytest.mark.parametrize(
    ("form", "fields", "unread"),
    [
        # Context under other names, and texts beside the form.
        ("prompt_completion", {"prompt": "Why?", "completion": "So."}, []),
        ("prompt_completion", {"prompt": "a", "completion": "b", "system": "Rhyme."}, ["system"]),
        ("prompt_completion", {"prompt": "a", "completion": "b", "history": [["c"]]}, ["history"]),
        ("prompt_completion", {"prompt": "a", "completion": "b", "input": ""}, []),
        ("text", {"text": "a b", "notes": "four words of text", "url": "http://a"}, ["notes"]),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "dialog": [["how are you", "x"]]},
            ["dialog"],
        ),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "functions": [{"name": "f"}]},
            ["functions"],
        ),
        ("messages", {"messages": CHAT, "input": "Paris"}, ["input"]),
        ("messages", {"messages": CHAT, "documents": [{"title": "A", "text": "b"}]}, ["documents"]),
        ("messages", {"messages": CHAT, "images": [b"\x89PNG"]}, ["images"]),
        # Labels, numbers and what stands in the sample anyway.
        ("messages", {"messages": CHAT, "category": "open qa", "id": 7, "score": 0.5}, []),
        ("messages", {"messages": CHAT, "prompt": "Hello there, my friend"}, []),
        (
            "alpaca",
            {"instruction": "Say b.", "output": "b!", "text": "Below is: Say b.\n### Response: b!"},
            [],
        ),
        # An answer that stands in the passage which was to be read, as in extractive tasks.
        (
            "alpaca",
            {"instruction": "Who?", "output": "Ada", "context": "Ada wrote it."},
            ["context"],
        ),
        (
            "prompt_completion",
            {"prompt": "Who?", "completion": "Ada", "passage": "It was Ada who wrote it."},
            ["passage"],
        ),
        ("messages", {"messages": CHAT, "page": "They said Hi to all"}, ["page"]),
        # Keys that leave messages out of the loss elsewhere.
        (
            "messages",
            {"messages": [CHAT[0], CHAT[1] | {"train": False}]},
            ["messages: train"],
        ),
        # Parts of messages that the template leaves out.
        (
            "messages",
            {"messages": [{"role": "system", "content": "Rhyme."}, *CHAT]},
            ["messages: role system"],
        ),
        (
            "messages",
            {"messages": [CHAT[0], CHAT[1] | {"reasoning_content": "They greet me kindly"}]},
            ["messages: reasoning_content"],
        ),
    ],
)
def test_fields_that_look_like_text_and_are_not_read_are_named(form, fields, unread):
    if form == "messages":
        rendered = RenderedText("Hello there, my friend: Hi.", (TextRange(24, 27),))
    else:
        rendered = render(record(**fields), form, "completion")
    assert unread_fields(record(**fields), form, rendered.text) == unread
