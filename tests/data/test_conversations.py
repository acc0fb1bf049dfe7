"""Chats of other trainers: ShareGPT, tools and tool calls, weights of messages, the last turn."""

import json

import numpy as np
import pytest

from jaxmux.data import DataError, Record, Source, load_samples
from jaxmux.data.chat import render_chat
from jaxmux.data.conversations import read_messages, read_tools
from jaxmux.data.record_forms import detect_form

# Like the templates of Qwen and Hermes. `or ''` serves messages without content.
_SPEECH = (
    "{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    "<call>{{ c['function'] | tojson }}</call>{% endfor %}<|im_end|>\n"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    + _SPEECH
    + "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_TEMPLATE = TOOL_TEMPLATE.replace(
    _SPEECH,
    "{% if m['role'] == 'assistant' %}{% generation %}"
    + _SPEECH
    + "{% endgeneration %}{% else %}"
    + _SPEECH
    + "{% endif %}",
)
# Like the template of Qwen3, which keeps the reasoning of the last turn only.
FORGETFUL_TEMPLATE = TOOL_TEMPLATE.replace(
    _SPEECH, "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}" + _SPEECH
)

TOOL = {
    "type": "function",
    "function": {
        "name": "colour_of",
        "description": "The colour of a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}
ARGUMENTS = {"thing": "sky"}
CALL = {"type": "function", "function": {"name": "colour_of", "arguments": ARGUMENTS}}
CHAT = [
    {"role": "user", "content": "What colour is the sky?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "content": "blue"},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
SPOKEN = [
    'I look.<call>{"name": "colour_of", "arguments": {"thing": "sky"}}</call><|im_end|>\n',
    "Blue.<|im_end|>\n",
    "Yes.<|im_end|>\n",
]
SHAREGPT = {
    "conversations": [
        {"from": "human", "value": "What colour is the sky?"},
        {"from": "function_call", "value": json.dumps(CALL["function"])},
        {"from": "observation", "value": "blue"},
        {"from": "gpt", "value": "Blue."},
    ],
    "tools": json.dumps([TOOL["function"]]),
}


def record(**fields) -> Record:
    return Record(0, fields, "chat.jsonl:3")


def assert_tokens_of_transformers(sample, tokenizer, messages):
    """The sample has the tokens and the mask that transformers makes of messages with the tool."""
    oracle = tokenizer.apply_chat_template(
        messages,
        tools=[TOOL],
        chat_template=MARKED_TEMPLATE,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    np.testing.assert_array_equal(sample.input_ids, oracle["input_ids"])
    np.testing.assert_array_equal(sample.target_mask, np.array(oracle["assistant_masks"], bool))


def weighted(weights: dict[int, int]) -> list[dict]:
    return [m | {"weight": weights[n]} if n in weights else m for n, m in enumerate(CHAT)]


def learned(rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.target_ranges]


@pytest.fixture(params=[TOOL_TEMPLATE, MARKED_TEMPLATE], ids=["prefixes", "marks"])
def with_tools(request, gpt):
    """A tokenizer whose template renders tools, without and with marks around what is generated."""
    gpt.chat_template = request.param
    return gpt


def test_tokens_and_mask_of_a_chat_with_tools_are_those_of_transformers(
    with_tools, gpt, write_jsonl
):
    texts = [{**CALL, "function": {"name": "colour_of", "arguments": json.dumps(ARGUMENTS)}}]
    messages = [CHAT[0], CHAT[1] | {"tool_calls": texts}, *CHAT[2:]]
    source = Source(write_jsonl({"messages": messages, "tools": [TOOL]}))
    (sample,) = load_samples(source, with_tools, max_length=1024).samples
    assert_tokens_of_transformers(sample, gpt, CHAT)
    assert gpt.decode(sample.input_ids[sample.target_mask]) == "".join(SPOKEN)


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_with_tool_calls_needs_no_content_and_keeps_a_null(with_tools, content):
    messages = [CHAT[0], {"role": "assistant", "tool_calls": [CALL]} | content, *CHAT[2:]]
    found = read_messages(record(messages=messages), "messages", TOOL_TEMPLATE)
    assert found == messages
    rendered = render_chat(record(messages=messages, tools=[TOOL]), with_tools, "completion")
    assert learned(rendered) == [SPOKEN[0].removeprefix("I look."), *SPOKEN[1:]]


def test_only_the_last_assistant_message_counts(with_tools):
    rendered = render_chat(record(messages=CHAT, tools=[TOOL]), with_tools, "last_turn")
    assert learned(rendered) == SPOKEN[-1:]
    # Also if the user has the last word.
    rendered = render_chat(record(messages=CHAT[:-1]), with_tools, "last_turn")
    assert learned(rendered) == SPOKEN[1:2]


def test_the_last_turn_is_found_where_the_template_rewrites_earlier_ones(gpt):
    gpt.chat_template = FORGETFUL_TEMPLATE
    with pytest.raises(DataError, match='does not preserve prefixes: .*loss_on="last_turn"'):
        render_chat(record(messages=CHAT), gpt, "completion")
    rendered = render_chat(record(messages=CHAT), gpt, "last_turn")
    assert learned(rendered) == ["<think></think>Yes.<|im_end|>\n"]


def test_assistant_messages_of_weight_0_do_not_count(with_tools):
    messages = weighted({1: 0, 3: 1})
    assert learned(render_chat(record(messages=messages), with_tools, "completion")) == SPOKEN[1:]
    rendered = render_chat(record(messages=weighted({1: 1, 3: 0})), with_tools, "completion")
    assert learned(rendered) == [SPOKEN[0], SPOKEN[2]]
    assert learned(render_chat(record(messages=weighted({5: 0})), with_tools, "last_turn")) == []


def test_the_whole_chat_counts_except_messages_of_weight_0(with_tools):
    plain = render_chat(record(messages=CHAT), with_tools, "all")
    assert plain.target_ranges is None
    rendered = render_chat(record(messages=weighted({1: 0, 5: 0})), with_tools, "all")
    assert rendered.text == plain.text
    first, last = SPOKEN[0], SPOKEN[2]
    before, _, rest = plain.text.partition(first)
    assert learned(rendered) == [before, rest.removesuffix(last)]


def test_marks_that_move_when_messages_follow_are_refused(gpt):
    gpt.chat_template = MARKED_TEMPLATE.replace("m['content'] or ''", "loop.last and m['content']")
    with pytest.raises(DataError, match="chat.jsonl:3: .*message 1.* weights"):
        render_chat(record(messages=weighted({3: 0})), gpt, "completion")


def test_sharegpt_is_the_same_chat_as_messages(with_tools):
    fields = SHAREGPT | {"system": "Be brief."}
    assert detect_form(record(**fields)) == "sharegpt"
    messages = [
        {"role": "system", "content": "Be brief."},
        CHAT[0],
        {"role": "assistant", "tool_calls": [CALL]},
        *CHAT[2:4],
    ]
    expected = render_chat(record(messages=messages, tools=[TOOL]), with_tools, "completion")
    assert render_chat(record(**fields), with_tools, "completion", form="sharegpt") == expected
    assert "colour_of" in expected.text.partition("What colour")[0]


def test_a_system_prompt_beside_messages_is_their_first_message(with_tools):
    text = "Be brief."
    expected = [{"role": "system", "content": text}, *CHAT]
    assert read_messages(record(messages=CHAT, system=text), "messages", TOOL_TEMPLATE) == expected
    # A column may repeat the first message.
    twice = record(messages=expected, system=text)
    assert read_messages(twice, "messages", TOOL_TEMPLATE) == expected
    with pytest.raises(DataError, match="the system prompt stands twice"):
        read_messages(record(messages=expected, system="Be wordy."), "messages", TOOL_TEMPLATE)
    for empty in (None, ""):
        assert read_messages(record(messages=CHAT, system=empty), "messages", TOOL_TEMPLATE) == CHAT


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_openais_old_form_is_the_same_chat_as_tools_and_tool_calls(
    is_text, content, with_tools, gpt, write_jsonl
):
    function, arguments = TOOL["function"], json.dumps(ARGUMENTS)
    call, functions = {"name": "colour_of", "arguments": arguments}, [function]
    if is_text:
        call, functions = json.dumps(call), [json.dumps(function)]
    old = [
        CHAT[0],
        {"role": "assistant", "function_call": call} | content,
        {"role": "function", "name": "colour_of", "content": "blue"},
        CHAT[3] | {"function_call": None},
    ]
    new = [CHAT[0], {"role": "assistant", "tool_calls": [CALL]}, *CHAT[2:4]]
    source = Source(write_jsonl({"messages": old, "functions": functions}))
    (sample,) = load_samples(source, with_tools, max_length=1024).samples
    assert_tokens_of_transformers(sample, gpt, new)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{{ m['role'] }}", "function"),
        ("{% if m['role'] == 'tool' %}", "tool"),
        ("{% if m['role'] == 'tool' or m['role'] == \"function\" %}", "function"),
    ],
)
def test_results_have_the_role_that_the_template_knows(template, role):
    messages = [{"role": "function", "name": "f", "content": "3"}]
    assert read_messages(record(messages=messages), "messages", template)[0]["role"] == role


def test_two_forms_of_calls_or_tools_in_one_record_are_refused():
    both = CHAT[1] | {"function_call": CALL["function"]}
    with pytest.raises(DataError, match="message 0 has both 'tool_calls' and 'function_call'"):
        read_messages(record(messages=[both]), "messages", TOOL_TEMPLATE)
    with pytest.raises(DataError, match="has both 'tools' and 'functions'"):
        read_tools(record(tools=[TOOL], functions=[TOOL["function"]]), "messages")


@pytest.mark.parametrize("tools", [json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL]])
def test_tools_may_be_json_texts(tools):
    assert read_tools(record(messages=CHAT, tools=tools), "messages") == [TOOL]


def test_results_of_sharegpt_calls_have_the_names_of_the_functions():
    calls = [{"name": name, "arguments": {}} for name in ("one", "two")]
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": json.dumps(calls)},
        *({"from": "observation", "value": value} for value in "bcd"),
    ]
    found = read_messages(record(conversations=turns), "sharegpt", TOOL_TEMPLATE)
    results = [(m.get("name"), m["content"]) for m in found if m["role"] == "tool"]
    assert results == [("one", "b"), ("two", "c"), (None, "d")]


def test_conversations_with_roles_are_messages(with_tools):
    found = render_chat(record(conversations=CHAT), with_tools, "completion", form="sharegpt")
    assert found == render_chat(record(messages=CHAT), with_tools, "completion")


@pytest.mark.parametrize("none", [None, "", [], "[]"])
def test_a_record_may_have_no_tools(none):
    assert read_tools(record(messages=CHAT, tools=none), "messages") is None


def test_special_tokens_in_json_texts_are_escaped_too(with_tools, write_jsonl):
    arguments = '{"thing": "\\u003c|im_end|>", "<|im_start|>": 1}'
    calls = [{"type": "function", "function": {"name": "colour_of", "arguments": arguments}}]
    messages = [CHAT[0], {"role": "assistant", "tool_calls": calls}]
    path = write_jsonl({"messages": messages})
    parsed, escaped = (
        load_samples(Source(path, special_tokens=rule), with_tools, max_length=1024).samples[0]
        for rule in ("parse", "escape")
    )
    special = with_tools.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert [np.isin(s.input_ids, special).sum() for s in (parsed, escaped)] == [6, 4]


def test_the_template_may_know_further_roles(gpt):
    messages = [{"role": "documents", "content": "The sky is blue."}, *CHAT[:1], *CHAT[3:4]]
    with pytest.raises(DataError, match="message 0 has the unknown role 'documents'"):
        render_chat(record(messages=messages), gpt, "completion")
    gpt.chat_template = "{% if messages[0]['role'] == 'documents' %}{% endif %}" + gpt.chat_template
    rendered = render_chat(record(messages=messages), gpt, "completion")
    assert rendered.text.startswith("<|im_start|>documents\n")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tools": "{"}, "field 'tools' is not valid JSON"),
        ({"tools": {"name": "f"}}, "field 'tools' must be a list of objects"),
        ({"tools": [TOOL]}, "has tools, which the chat template of .* does not render"),
        ({"messages": CHAT}, "message 1 has tool calls, which the chat template does not"),
    ],
)
def test_tools_that_cannot_be_rendered_are_refused(gpt, fields, problem):
    fields = {"messages": CHAT[:1]} | fields
    with pytest.raises(DataError, match=f"chat.jsonl:3: .*{problem}"):
        render_chat(record(**fields), gpt, "completion")


def call(function) -> dict:
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user", "tool_calls": [CALL]}, "message 0 has tool calls, but its role is"),
        ({"role": "assistant", "tool_calls": {}, "content": None}, "'content' of message 0 must"),
        ({"role": "assistant", "tool_calls": {"a": 1}}, "'tool_calls' of message 0 must be a list"),
        ({"role": "assistant", "tool_calls": ["f"]}, "tool call 0 of message 0 must be an object"),
        (call("f"), "tool call 0 of message 0 must have an object 'function'"),
        (call({"arguments": "{}"}), "'name' of tool call 0 of message 0 must be a string"),
        (call({"name": "f"}), "'arguments' of tool call 0 of message 0 must be an object or"),
        (call({"name": "f", "arguments": "{"}), "'arguments' of tool .* is not valid JSON"),
        (call({"name": "f", "arguments": "[]"}), "'arguments' of .* must be .*, found list"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "'weight' of .* found 0.5"),
        ({"role": "assistant", "content": "a", "weight": True}, "'weight' of .* found True"),
        ({"role": "user", "content": "a", "weight": 1}, "message 0 has weight 1, but its role"),
        (
            {"from": "human", "value": "a"},
            "message 0 has 'from' in place of 'role'.*form=\"sharegpt\"",
        ),
    ],
)
def test_malformed_messages_are_named(message, problem):
    with pytest.raises(DataError, match=f"chat.jsonl:3: {problem}"):
        read_messages(record(messages=[message]), "messages", TOOL_TEMPLATE)


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ({"from": "humn", "value": "a"}, "unknown speaker 'humn'; .*did you mean 'human'"),
        ({"from": "human"}, "'value' of message 0 must be a string"),
        ({"value": "a"}, "'from' of message 0 must be a string"),
        ({"from": "function_call", "value": "f()"}, "'value' of message 0 is not valid JSON"),
        ("hello", "message 0 must be an object"),
        ({"from": "system", "value": "a"}, "the system prompt stands twice"),
    ],
)
def test_malformed_turns_are_named(turn, problem):
    fields = {"conversations": [turn]} | ({"system": "b"} if "twice" in problem else {})
    with pytest.raises(DataError, match=f"chat.jsonl:3: .*{problem}"):
        read_messages(record(**fields), "sharegpt", TOOL_TEMPLATE)
