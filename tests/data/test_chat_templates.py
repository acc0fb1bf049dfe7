"""A source may bring its own chat template, which counts like the tokenizer's."""

import json
import subprocess
import sys
from datetime import datetime

import numpy as np
import pytest

from jaxmux.data import DataError, Rendering, Source, load_samples
from jaxmux.data.chat_templates import TemplateClock

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


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}[assistant]{% endif %}"
SEVERAL = {"rag": PLAIN + PROMPT, "tool_use": "{{ tools }}" + PLAIN + PROMPT}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def tokens(samples) -> list[list[int]]:
    return [sample.input_ids.tolist() for sample in samples]


def test_one_of_several_templates_is_taken_as_transformers_takes_it(gpt, write_jsonl):
    chat = {"messages": TURNS}
    path = write_jsonl(chat | {"tools": TOOLS})
    gpt.chat_template = SEVERAL
    expected = gpt.apply_chat_template(TURNS, tools=TOOLS)["input_ids"]
    assert tokens(load_samples(Source(path), gpt, max_length=512).samples) == [expected]
    # Chats without tools need a name, and a template of this name.
    both = write_jsonl(chat, chat | {"tools": TOOLS})
    problem = (
        r"jsonl:1: the tokenizer .* has several chat templates \('rag', 'tool_use'\).*Source.c"
    )
    with pytest.raises(DataError, match=problem):
        load_samples(Source(both), gpt, max_length=512)
    skipping = load_samples(Source(both, on_bad_record="skip"), gpt, max_length=512)
    assert tokens(skipping.samples) == [expected] and skipping.skipped == 1
    named = load_samples(Source(write_jsonl(chat), chat_template="rag"), gpt, max_length=512)
    expected = gpt.apply_chat_template(TURNS, chat_template="rag")["input_ids"]
    assert tokens(named.samples) == [expected]
    # The adapter's folder gets the template itself.
    assert named.rendering.own_template == SEVERAL["rag"]
    gpt.chat_template = SEVERAL | {"default": PLAIN + PROMPT}
    default = load_samples(Source(write_jsonl(chat)), gpt, max_length=512)
    assert tokens(default.samples) == [expected] and default.rendering.chat_templates == (None,)


def test_a_byte_order_mark_is_no_part_of_a_template(gpt, write_jsonl, tmp_path):
    path = write_jsonl({"messages": TURNS})
    expected = gpt.apply_chat_template(TURNS, chat_template=PLAIN + PROMPT)["input_ids"]
    file = tmp_path / "marked.jinja"
    file.write_text(PLAIN + PROMPT, encoding="utf-8-sig")
    for template in (str(file), "\ufeff" + PLAIN + PROMPT):
        source = Source(path, chat_template=template)
        assert tokens(load_samples(source, gpt, max_length=512).samples) == [expected]
    gpt.chat_template = "\ufeff" + PLAIN + PROMPT
    found = load_samples(Source(path), gpt, max_length=512)
    assert tokens(found.samples) == [expected]
    # Others would render the mark, so the adapter brings the template without it.
    assert found.rendering.own_template == PLAIN + PROMPT
    texts = write_jsonl({"text": "a b c"}, name="b.jsonl")
    assert load_samples(Source(texts), gpt, max_length=512).rendering == Rendering(True)


@pytest.mark.parametrize("template", [PLAIN + PROMPT, MARKED], ids=["prefixes", "marks"])
def test_a_template_that_reads_the_clock_gets_the_time_of_the_run(template, gpt, write_jsonl):
    path, date = write_jsonl({"messages": TURNS}), datetime(2024, 7, 6, 5, 4, 3)
    reading = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y %H:%M:%S') }}{% endif %}"
    gpt.chat_template = "06 Jul 2024 05:04:03" + template
    expected = load_samples(Source(path), gpt, max_length=512)
    gpt.chat_template = reading + template
    with TemplateClock(date):
        found = load_samples(Source(path), gpt, max_length=512)
    assert tokens(found.samples) == tokens(expected.samples)
    np.testing.assert_array_equal(found.samples[0].target_mask, expected.samples[0].target_mask)
    assert found.rendering.date == "2024-07-06 05:04:03" and expected.rendering.date == ""
    # Elsewhere the clock goes on.
    now = gpt.apply_chat_template(TURNS, chat_template="{{ strftime_now('%Y') }}", tokenize=False)
    assert now == str(datetime.now().year)


@pytest.mark.long
def test_templates_before_tokenizers_let_transformers_warn_of_nothing():
    program = "from jaxmux.data.chat_templates import TemplateClock; TemplateClock().__enter__()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""
