"""A source may bring its own chat template, which counts like the tokenizer's."""

import json

import numpy as np
import pytest

from jaxmux.data import DataError, Rendering, Source, load_samples

TURNS = [
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another?"},
    {"role": "assistant", "content": "Brown."},
]
MARKED = """{% for m in messages %}
[{{ m['role'] }}]
{% if m['role'] == 'assistant' %}
{% generation %}
 {{ m['content'] }}{{ eos_token }}{% endgeneration %}

{% else %}
 {{ m['content'] }}
{% endif %}
{% endfor %}"""


@pytest.fixture
def loads(llama, write_jsonl):
    """Loads one chat with a template of its own."""

    def load(template, **fields):
        path = write_jsonl(fields or {"messages": TURNS})
        source = Source(path, chat_template=template)
        return load_samples(source, llama, max_length=512).samples[0]

    return load


@pytest.mark.parametrize("name", [None, "chat.jinja", "chat.txt"])
def test_tokens_and_mask_are_those_of_transformers(loads, llama, tmp_path, name):
    template = MARKED
    if name:
        template = tmp_path / name
        template.write_text(MARKED)
    sample = loads(template)
    expected = llama.apply_chat_template(
        TURNS, chat_template=MARKED, return_dict=True, return_assistant_tokens_mask=True
    )
    np.testing.assert_array_equal(sample.input_ids, expected["input_ids"])
    np.testing.assert_array_equal(sample.target_mask, np.array(expected["assistant_masks"]) > 0)
    assert 0 < sample.target_tokens < len(sample.input_ids)
    assert llama.chat_template is None


def test_samples_tell_how_records_became_text(llama, gpt, write_jsonl):
    chats, texts = write_jsonl({"messages": TURNS}), write_jsonl({"text": "a b c"}, name="b.jsonl")

    def rendering(tokenizer, *source, **fields) -> Rendering:
        return load_samples(Source(*source, **fields), tokenizer, max_length=512).rendering

    own, general = rendering(llama, chats, chat_template=MARKED), rendering(gpt, chats)
    assert own == Rendering(False, (MARKED,)) and general == Rendering(False, (None,))
    together = Rendering.together([general, rendering(gpt, texts), own, own])
    assert together == Rendering(True, (None, MARKED)) and together.own_template == MARKED
    assert together.kinds == "chats and texts" and general.kinds == "chats"
    assert Rendering.from_json(json.loads(json.dumps(together._asdict()))) == together


def test_a_template_goes_before_the_tokenizers(gpt, write_jsonl):
    source = Source(write_jsonl({"messages": TURNS}), chat_template=MARKED)
    (sample,) = load_samples(source, gpt, max_length=512).samples
    assert gpt.decode(sample.input_ids).startswith("[user]\n Name a colour.\n[assistant]\n")


def test_a_template_without_marks_is_rendered_by_prefixes(loads, llama):
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    sample = loads(template)
    found = llama.decode(sample.input_ids[sample.target_mask])
    assert found.replace(" ", "") == "Blue.</s>Brown.</s>"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for m in messages %}\n\n{% endif %}", r"train.jsonl: chat_template: the .*line 3 of"),
        (
            "a\n{{ raise_exception('no tools here') }}",
            r"train.jsonl:1: .*no tools here \(line 2 of",
        ),
        ("a\n\n{{ messages[9].content.x }}", r"train.jsonl:1: .*\(line 3 of the template\)"),
        ("missing.jinja", "train.jsonl: chat_template: missing.jinja: .*No such file"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{# \ud800 #}", "train.jsonl: chat_template: .*surrogates not allowed"),
    ],
)
def test_errors_name_the_source_and_the_line(loads, template, problem):
    with pytest.raises(DataError, match=problem):
        loads(template)


def test_a_file_is_named_in_errors(loads, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("\n{{ raise_exception('no') }}")
    with pytest.raises(DataError, match=rf"{path} refuses the messages: no \(line 2 of"):
        loads(path)


def test_other_forms_have_no_use_for_a_template(loads):
    with pytest.raises(DataError, match="chat_template renders chats, .* form 'text'"):
        loads("x", text="A text.")


@pytest.mark.parametrize(
    ("prompt", "answer", "found"),
    [("Bot:", " ", ""), ("Bot: ", "", "?;Bot: "), ("Bot:\n", "", ""), ("", " ", "")],
)
def test_a_prompt_that_the_tokenizer_joins_with_the_answer_is_noticed(
    prompt, answer, found, gpt, write_jsonl
):
    said = prompt + "{% generation %}" + answer + "{{ m.content }}{% endgeneration %}"
    other = "{% if m.role == 'user' %}{{ m.content }};{% else %}" + said + "{% endif %}"
    template = "{% for m in messages %}" + other + "{% endfor %}"
    template += "{% if add_generation_prompt %}" + prompt + "{% endif %}"
    source = Source(write_jsonl({"messages": TURNS}), chat_template=template)
    assert load_samples(source, gpt, max_length=512).joined_prompt == found
