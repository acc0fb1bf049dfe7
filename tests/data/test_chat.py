"""In chat records the targets are the tokens that the assistant generates."""

from itertools import product

import numpy as np
import pytest

from jaxmux.data import DataError, Record, Source, load_samples
from jaxmux.data.chat import render_chat

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Another?"},
    {"role": "assistant", "content": "Brown."},
]
LEARNED = ["Blue.<|im_end|>\n", "Brown.<|im_end|>\n"]

GENERATION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
# Like the template of Qwen3, which keeps the reasoning of the last turn only.
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSING_TEMPLATE = "{{ raise_exception('roles must alternate') }}"


def record(messages) -> Record:
    return Record(0, {"messages": messages}, "chat.jsonl:3")


def learned(rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.target_ranges]


def test_assistant_turns_are_found_by_rendering_prefixes(gpt):
    assert learned(render_chat(record(TURNS), gpt, "completion")) == LEARNED


@pytest.mark.parametrize("mark", ["{% generation %}", "{%- generation -%}", "{%+generation+%}"])
def test_generation_blocks_and_prefixes_agree(gpt, mark):
    by_prefix = render_chat(record(TURNS), gpt, "completion")
    gpt.chat_template = GENERATION_TEMPLATE.replace("{% generation %}", mark)
    assert render_chat(record(TURNS), gpt, "completion") == by_prefix


@pytest.mark.parametrize("template", [None, GENERATION_TEMPLATE])
def test_tokens_are_those_of_the_chat_template_alone(gpt, write_jsonl, template):
    gpt.chat_template = template or gpt.chat_template
    source = Source(write_jsonl({"messages": TURNS}))
    (sample,) = load_samples(source, gpt, max_length=512).samples
    expected = gpt.apply_chat_template(TURNS)["input_ids"]
    np.testing.assert_array_equal(sample.input_ids, expected)
    assert gpt.decode(sample.input_ids[sample.target_mask]) == "".join(LEARNED)


@pytest.mark.parametrize("bos", ["", "{{ bos_token }}"])
def test_chat_has_only_the_special_tokens_of_its_template(llama, write_jsonl, bos):
    llama.chat_template = bos + (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    source = Source(write_jsonl({"messages": TURNS[1:]}))
    (sample,) = load_samples(source, llama, max_length=512).samples
    assert np.flatnonzero(sample.input_ids == llama.bos_token_id).tolist() == [0] * bool(bos)
    assert np.count_nonzero(sample.input_ids == llama.eos_token_id) == len(TURNS[1:])
    assert sample.input_ids[-1] == llama.eos_token_id
    assert sample.target_mask[-1]


def test_loss_on_all_needs_no_ranges(gpt, write_jsonl):
    gpt.chat_template = FORGETFUL_TEMPLATE
    source = Source(write_jsonl({"messages": TURNS}), loss_on="all")
    (sample,) = load_samples(source, gpt, max_length=512).samples
    assert sample.target_tokens == sample.stream_length


def test_null_fields_of_columnar_files_reach_no_template(gpt):
    gpt.chat_template = "{% for m in messages %}{{ m.keys() | list }}{% endfor %}"
    padded = [{**turn, "tool_calls": None} for turn in TURNS]
    assert "tool_calls" not in render_chat(record(padded), gpt, "all").text


def test_template_that_rewrites_earlier_turns_is_refused(gpt):
    gpt.chat_template = FORGETFUL_TEMPLATE
    with pytest.raises(DataError, match='chat.jsonl:3: .*message 2 .*loss_on="all"'):
        render_chat(record(TURNS), gpt, "completion")


def test_template_that_refuses_the_messages_is_reported(gpt):
    gpt.chat_template = REFUSING_TEMPLATE
    with pytest.raises(DataError, match="chat.jsonl:3: .*roles must alternate"):
        render_chat(record(TURNS), gpt, "completion")


def test_tokenizer_without_chat_template_is_refused(llama, llama_folder, write_jsonl):
    path = write_jsonl({"messages": TURNS})
    with pytest.raises(DataError, match="a chat needs a chat template") as caught:
        load_samples(Source(path), llama, max_length=512)
    assert path in str(caught.value)
    assert str(llama_folder) in str(caught.value)
    assert 'add "chat_template" to its tokenizer_config.json' in str(caught.value)


def test_chat_without_assistant_message_has_no_target_tokens(gpt, write_jsonl):
    path = write_jsonl({"messages": TURNS}, {"messages": TURNS[:2]})
    with pytest.raises(DataError, match="train.jsonl:2: no target tokens"):
        load_samples(Source(path), gpt, max_length=512)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], "message 0 must be an object"),
        ([{"role": "user"}], "'content' of message 0 must be a string, found NoneType"),
        ([{"content": "hi"}], "'role' of message 0 must be a string"),
        ([{"role": "user", "content": "\ud83d"}], "'content' of message 0 is not valid Unicode"),
        (TURNS[2:3], "begins with an assistant message"),
    ],
)
def test_malformed_messages_are_named(gpt, messages, problem):
    with pytest.raises(DataError, match=f"chat.jsonl:3: .*{problem}"):
        render_chat(record(messages), gpt, "completion")


@pytest.mark.parametrize("blocks", ["", "{% generation %}x{% endgeneration %}"])
def test_templates_run_in_a_sandbox(blocks, gpt):
    gpt.chat_template = "{{ messages.__class__.__mro__[1].__subclasses__() }}" + blocks
    with pytest.raises(DataError, match="refuses the messages: .*unsafe"):
        render_chat(record(TURNS), gpt, "completion")


def turns(begin: str, end: str) -> str:
    return "{% for m in messages %}" + begin + "{{ m['content'] }}" + end + "{% endfor %}"


# By name, what is written for each message, and the generation prompt.
ALWAYS = {
    "ChatML": (turns("<|im_start|>{{ m['role'] }}\n", "<|im_end|>\n"), "<|im_start|>assistant\n"),
    "no white space": (
        turns("<|im_start|>{{ m['role'] }}:", "<|im_end|>"),
        "<|im_start|>assistant:",
    ),
    "system prompt": (
        "<|im_start|>system\nHelp.<|im_end|>\n"
        + turns("<|im_start|>{{ m['role'] }}\n", "<|im_end|>\n"),
        "<|im_start|>assistant\n",
    ),
    "Zephyr": (turns("<|{{ m['role'] }}|>\n", "{{ eos_token }}\n"), "<|assistant|>\n"),
    "no end of turns": (turns("<|im_start|>{{ m['role'] }}\n", "\n"), "<|im_start|>assistant\n"),
    "headings": (turns("### {{ m['role'] }}:\n", "\n\n"), "### assistant:\n"),
    "Vicuna": (
        turns(
            "{{ 'USER: ' if m['role'] == 'user' else 'ASSISTANT: ' }}",
            "{{ ' ' if m['role'] == 'user' else eos_token }}",
        ),
        "ASSISTANT: ",
    ),
}


@pytest.mark.parametrize(("body", "prompt"), ALWAYS.values(), ids=ALWAYS)
def test_a_generation_prompt_that_is_always_written_is_not_learned(body, prompt, gpt):
    """The right value is that of the template that writes the prompt only where it is asked to."""
    # The second question and its answer may end alike.
    chats = [
        [
            {"role": "user", "content": "Name a colour"},
            {"role": "assistant", "content": "Brown."},
            {"role": "user", "content": "at all"},
            {"role": "assistant", "content": answer},
        ]
        for answer in ("Blue.", "not at all")
    ]
    for chat, loss_on in product(chats, ("completion", "last_turn", "all")):
        for messages in (chat[2:], chat):
            gpt.chat_template = body + "{% if add_generation_prompt %}" + prompt + "{% endif %}"
            expected = render_chat(record(messages), gpt, loss_on)
            # Jinja drops a line's end at the end of a template.
            for always in (prompt, "{% set add_generation_prompt = true %}" + prompt):
                gpt.chat_template = body + always + "{{ '' }}"
                assert render_chat(record(messages), gpt, loss_on) == expected


@pytest.mark.parametrize(
    "template",
    [
        turns("[{{ m['role'] }}]", "<|im_end|>\n"),
        turns("[{{ m['role'] }}]", "\n") + "{{ eos_token }}",
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
        "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
    ],
)
def test_templates_without_a_generation_prompt_keep_their_ends(template, gpt):
    gpt.chat_template = template
    text = gpt.apply_chat_template(TURNS, tokenize=False)
    assert render_chat(record(TURNS), gpt, "all").text == text
