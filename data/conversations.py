"""The messages and tools of chat records, as chat templates take them."""

import json
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from .errors import DataError
from .record_forms import required_field, string_field, valid_text
from .sources import Form, Record

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]]

ASSISTANT = "assistant"
# The roles that chat templates of public models use. Only messages of the assistant are targets.
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")
_OTHER_NAMES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT}

# The role of each ShareGPT speaker. The value of a function call is JSON, not text.
SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    ASSISTANT: ASSISTANT,
    "tool": "tool",
    "observation": "tool",
    "function_call": ASSISTANT,
}
# The speaker of a function call in ShareGPT, and the key of a call in OpenAI's old form.
_FUNCTION_CALL = "function_call"


def read_tools(record: Record, form: Form) -> Tools | None:
    """The descriptions of functions that the assistant may call, from the field "tools", or from
    the field "functions" of OpenAI's old form. Descriptions may be JSON texts, as in columnar
    files. Descriptions in "functions", and many in ShareGPT records, lack {"type": "function",
    "function": …} around them; it is then added, because templates expect it.

    Args:
      form: "messages" or "sharegpt".

    Returns:
      The descriptions, as transformers' `apply_chat_template` takes them; None if there are none.

    Raises:
      DataError: the field is not a list of objects, its text is not JSON, or there are both fields.
    """
    by_field = {name: _described(record, name) for name in ("tools", "functions")}
    if all(by_field.values()):
        raise DataError(f"{record.where}: has both 'tools' and 'functions'; keep one of them")
    tools = by_field["tools"] or by_field["functions"]
    if form == "sharegpt" or by_field["functions"]:
        tools = [
            tool if {"type", "function"} & tool.keys() else {"type": "function", "function": tool}
            for tool in tools
        ]
    return tools or None


def _described(record: Record, field: str) -> Tools:
    """The descriptions of functions in a field; empty if there are none."""
    value = record.fields.get(field)
    if isinstance(value, str) and value.strip():
        value = _parsed(record, f"field {field!r}", value)
    if not value or isinstance(value, str):
        return []
    tools = list(value) if _is_list(value) else [None]
    for number, tool in enumerate(tools):
        if isinstance(tool, str):
            tools[number] = _parsed(record, f"entry {number} of field {field!r}", tool)
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise DataError(
            f"{record.where}: field {field!r} must be a list of objects that describe functions, "
            f"or the JSON text of one, found {type(value).__name__}"
        )
    return tools


def read_messages(record: Record, form: Form, template: str) -> Messages:
    """The messages of a record, each with a role that the template knows.

    Arguments of tool calls that are JSON texts become objects, as transformers recommends. Fields
    that are null are left out: in columnar files every message has the fields of all messages, and
    some templates would print these nulls. Null content of a message with tool calls is kept.

    The record may have its system prompt in the field "system". Messages of OpenAI's old form are
    rewritten: "function_call" becomes "tool_calls", and the role "function" becomes "tool" unless
    the template compares roles with "function".

    Args:
      form: "messages" or "sharegpt".
      template: the chat template, which may define further roles.

    Raises:
      DataError: the messages are malformed; the error names the first message at fault.
    """
    if form == "sharegpt":
        messages = _of_sharegpt(record)
    else:
        messages = _list_of_messages(record, form, "messages")
    valid = [_valid_message(record, number, message) for number, message in enumerate(messages)]
    _insert_system(record, form, valid)
    _rename_functions(record, valid, template)
    for number, message in enumerate(valid):
        _refuse_unknown_role(record, number, message["role"], template)
        if "tool_calls" in message and "tool_calls" not in template:
            raise DataError(
                f"{record.where}: message {number} has tool calls, which the chat template does "
                "not render; use a tokenizer whose template does"
            )
    return valid


def _insert_system(record: Record, form: Form, messages: Messages) -> None:
    if record.fields.get("system") in (None, ""):
        return
    text = string_field(record, form, "system")
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text})
    elif messages[0].get("content") != text:
        raise DataError(
            f"{record.where}: the system prompt stands twice, in field 'system' and in the first "
            "message"
        )


def _rename_functions(record: Record, messages: Messages, template: str) -> None:
    """Renames the role "function" to its successor "tool", unless the template handles
    "function"."""
    # A template that compares no role prints every role, so it says nothing about "tool".
    is_old = record.fields.get("functions") or any("tool_calls" in message for message in messages)
    if (is_old or _compares(template, "tool")) and not _compares(template, "function"):
        for message in messages:
            if message["role"] == "function":
                message["role"] = "tool"


def _compares(template: str, role: str) -> bool:
    """Whether a template handles a role separately."""
    return bool(re.search(rf"==\s*['\"]{re.escape(role)}['\"]", template))


def _list_of_messages(record: Record, form: Form, field: str) -> Sequence[Any]:
    messages = required_field(record, form, field)
    if not _is_list(messages) or not messages:
        raise DataError(f"{record.where}: {field!r} must be a non-empty list of messages")
    return messages


def _valid_message(record: Record, number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(
            f"{record.where}: message {number} must be an object with 'role' and 'content', "
            f"found {type(message).__name__}"
        )
    if message.get("role") is None and message.get("from") is not None:
        raise DataError(
            f"{record.where}: message {number} has 'from' in place of 'role', as ShareGPT has it; "
            'write form="sharegpt", and if the field has another name than conversations, '
            'columns={"conversations": "NAME"}'
        )
    valid_text(record, f"'role' of message {number}", message.get("role"))
    kept = {key: value for key, value in message.items() if value is not None}
    by_assistant = message["role"] == ASSISTANT
    calls = kept.pop("tool_calls", None)
    if old := kept.pop(_FUNCTION_CALL, None):
        if calls:
            raise DataError(
                f"{record.where}: message {number} has both 'tool_calls' and 'function_call'; keep "
                "one of them"
            )
        if isinstance(old, str):
            old = _parsed(record, f"'function_call' of message {number}", old)
        calls = [{"type": "function", "function": old}]
        if kept.get("content") == "":
            message = {key: value for key, value in message.items() if key != "content"}
            del kept["content"]
    if calls:
        if not by_assistant:
            raise DataError(
                f"{record.where}: message {number} has tool calls, but its role is "
                f"{message['role']!r}; only the assistant calls tools"
            )
        kept["tool_calls"] = _valid_calls(record, number, calls)
    if not calls or message.get("content") is not None:
        valid_text(record, f"'content' of message {number}", message.get("content"))
    elif "content" in message:
        kept["content"] = None
    weight = kept.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(
            f"{record.where}: 'weight' of message {number} must be 0 or 1, found {weight!r}"
        )
    if "weight" in kept and weight and not by_assistant:
        raise DataError(
            f"{record.where}: message {number} has weight 1, but its role is {message['role']!r}; "
            "only messages of the assistant count in the loss"
        )
    return kept


def _refuse_unknown_role(record: Record, number: int, role: str, template: str) -> None:
    if role in ROLES or (_compares(template, role) and role not in _OTHER_NAMES):
        return
    similar = _OTHER_NAMES.get(role) or next(iter(get_close_matches(role, ROLES, 1)), None)
    hint = f"; did you mean {similar!r}?" if similar else ""
    raise DataError(
        f"{record.where}: message {number} has the unknown role {role!r}; the roles are "
        f"{', '.join(ROLES)}{hint}"
    )


def _valid_calls(record: Record, number: int, calls: Any) -> list[dict[str, Any]]:
    if not _is_list(calls):
        raise DataError(
            f"{record.where}: 'tool_calls' of message {number} must be a list of objects, found "
            f"{type(calls).__name__}"
        )
    return [
        _valid_call(record, f"tool call {k} of message {number}", c) for k, c in enumerate(calls)
    ]


def _valid_call(record: Record, name: str, call: Any) -> dict[str, Any]:
    """A call {"type": "function", "function": {"name", "arguments"}}, or only its inner object,
    which some templates expect."""
    if not isinstance(call, Mapping):
        raise DataError(f"{record.where}: {name} must be an object, found {type(call).__name__}")
    kept = {key: value for key, value in call.items() if value is not None}
    if "function" in kept:
        return kept | {"function": _valid_function(record, name, kept["function"])}
    return _valid_function(record, name, kept)


def _valid_function(record: Record, name: str, function: Any) -> dict[str, Any]:
    if not isinstance(function, Mapping):
        raise DataError(
            f"{record.where}: {name} must have an object 'function' with 'name' and 'arguments', "
            f"found {type(function).__name__}"
        )
    valid_text(record, f"'name' of {name}", function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parsed(record, f"'arguments' of {name}", arguments)
    if not isinstance(arguments, Mapping):
        raise DataError(
            f"{record.where}: 'arguments' of {name} must be an object or the JSON text of one, "
            f"found {type(arguments).__name__}"
        )
    return dict(function) | {"arguments": dict(arguments)}


def _of_sharegpt(record: Record) -> list[Any]:
    """The messages of a record with "conversations". Messages that have a role are not changed."""
    turns = _list_of_messages(record, "sharegpt", "conversations")
    messages = [_of_turn(record, number, turn) for number, turn in enumerate(turns)]
    _name_observations(messages)
    return messages


def _name_observations(messages: Sequence[Any]) -> None:
    """Adds the names of functions to the results of their calls, which are in the order of the
    calls. Some templates need these names."""
    names: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping):
            continue
        if isinstance(calls := message.get("tool_calls"), list):
            functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
            names = [
                function.get("name") for function in functions if isinstance(function, Mapping)
            ]
        elif message.get("role") == "tool" and message.get("name") is None and names:
            message["name"] = names.pop(0)


def _of_turn(record: Record, number: int, turn: Any) -> Any:
    if not isinstance(turn, Mapping):
        return turn
    if turn.get("role") is not None:
        return dict(turn)
    speaker, value = turn.get("from"), turn.get("value")
    for name, text in (("from", speaker), ("value", value)):
        valid_text(record, f"{name!r} of message {number}", text)
    if speaker not in SPEAKERS:
        similar = next(iter(get_close_matches(speaker, SPEAKERS, 1)), None)
        raise DataError(
            f"{record.where}: message {number} is from the unknown speaker {speaker!r}; the "
            f"speakers are {', '.join(SPEAKERS)}" + (f"; did you mean {similar!r}?" * bool(similar))
        )
    rest = {key: part for key, part in turn.items() if key not in ("from", "value", "role")}
    if speaker != _FUNCTION_CALL:
        return {"role": SPEAKERS[speaker], "content": value} | rest
    calls = _parsed(record, f"'value' of message {number}", value)
    calls = calls if isinstance(calls, list) else [calls]
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": ASSISTANT, "tool_calls": calls} | rest


def _parsed(record: Record, name: str, text: str) -> Any:
    valid_text(record, name, text)
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{record.where}: {name} is not valid JSON: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
