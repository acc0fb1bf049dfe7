"""Record forms: the fields of a record, and how they become one text with target ranges.

If the fields of records have other names than those of a form, `Columns` renames them
(`Source.columns`); `hint` suggests this setting.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import DataError
from .sources import (
    ANSWER_FORMS,
    CHAT_FORMS,
    OPTIONAL_FIELDS,
    REQUIRED_FIELDS,
    Form,
    LossOn,
    Record,
    Source,
    fields_of,
)

# Fields that give models context, whatever their values are.
CONTEXT_FIELDS = (
    "system",
    "system_prompt",
    "history",
    "input",
    "context",
    "documents",
    "tools",
    "functions",
    "function_call",
    "images",
    "videos",
    "audios",
    "chat_template_kwargs",
)
# A field that is not in `CONTEXT_FIELDS` looks like text if it contains a text of at least this
# many words. Labels have fewer.
_WORDS = 3
# Keys of messages whose values are rewritten before they are rendered.
_PARTS_OF_CALLS = ("tool_calls", "function_call")
# Keys of messages with which other training programs select what counts in the loss, as `weight`
# does here.
_LOSS_KEYS = ("train", "training", "train_detail", "training_detail", "loss", "mask", "masked")
# For each field of a form, the names that other data sets give it.
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "input", "instruction", "problem", "request", "user"),
    "completion": ("answer", "response", "output", "reply", "solution", "assistant"),
    "output": ("response", "answer", "completion", "reply", "solution"),
    "input": ("context",),
    "messages": ("conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    "conversations": ("conversation", "messages", "dialogue", "dialog", "chat", "turns"),
    "text": ("content", "body", "document", "article"),
}
# The order in which forms are tried for hints; the first form that fits is named.
_ORDER: Sequence[Form] = ("messages", "sharegpt", "alpaca", "prompt_completion", "text")


class TextRange(NamedTuple):
    """The characters of a text from `start` (included) to `end` (excluded)."""

    start: int
    end: int


class RenderedText(NamedTuple):
    """The text of one record.

    Attributes:
      target_ranges: the parts of the text that the model learns to predict; None means the whole
        text.
      has_special_tokens: whether the text contains its BOS and EOS tokens, as texts of chat
        templates do. If False, they are added when the text is tokenized.
    """

    text: str
    target_ranges: tuple[TextRange, ...] | None
    has_special_tokens: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)


def detect_form(record: Record, forms: Sequence[Form] = ANSWER_FORMS) -> Form:
    """The first of these forms whose required fields the record has; DataError if there is none."""
    for form in forms:
        if all(name in record.fields for name in REQUIRED_FIELDS[form]):
            return form
    known = "; ".join(f"{form} ({', '.join(REQUIRED_FIELDS[form])})" for form in forms)
    raise DataError(
        f"{record.where}: the fields fit no record form: found {field_names(record)}; "
        f"the forms and their fields are {known}{hint(record, forms)}"
    )


def render(record: Record, form: Form, loss_on: LossOn, eos: str = "") -> RenderedText:
    """Renders a record of any form but `CHAT_FORMS`, which `chat.render_chat` renders.

    Args:
      form: "prompt_completion", "alpaca" or "text"; others raise ValueError.
      loss_on: as in `Source`; "last_turn" excludes the answers in an Alpaca record's history.
      eos: text of the tokenizer's EOS token, which ends these answers.

    Raises:
      DataError: a field is missing or not a string.
    """
    match form:
        case "prompt_completion":
            prompt = string_field(record, form, "prompt")
            completion = string_field(record, form, "completion")
        case "alpaca":
            return _render_alpaca(record, loss_on, eos)
        case "text":
            return RenderedText(string_field(record, form, "text"), target_ranges=None)
        case _:
            raise ValueError(f"form {form!r} has no plain rendering")
    text = prompt + completion
    ranges = None if loss_on == "all" else (TextRange(len(prompt), len(text)),)
    return RenderedText(text, ranges)


def required_field(record: Record, form: Form, name: str) -> Any:
    """The value of a field. Raises DataError if the field is missing or null."""
    if (value := record.fields.get(name)) is None:
        problem = f"null in field {name!r}" if name in record.fields else f"no field {name!r}"
        raise DataError(
            f"{record.where}: {problem}, which a {form} record needs; "
            f"found fields: {field_names(record)}{hint(record, [form])}"
        )
    return value


def string_field(record: Record, form: Form, name: str) -> str:
    """The text of a field. Raises DataError if the field is missing or not a valid string."""
    return valid_text(record, f"field {name!r}", required_field(record, form, name))


def valid_text(record: Record, name: str, value: Any) -> str:
    """Returns `value`. Raises DataError, with `name` in the message, if it is not a string of valid
    Unicode."""
    if not isinstance(value, str):
        raise DataError(f"{record.where}: {name} must be a string, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{record.where}: {name} is not valid Unicode: {error}") from error
    return value


def _render_alpaca(record: Record, loss_on: LossOn, eos: str) -> RenderedText:
    """Renders the system prompt, the history and the instruction, in the order of LLaMA-Factory's
    template "alpaca". As in this template, the answers in the history are targets."""
    # In public data sets, unused fields are missing, null or empty.
    text, ranges = "", []
    if record.fields.get("system") not in (None, ""):
        text = string_field(record, "alpaca", "system") + "\n\n"
    for instruction, answer in history_of(record):
        text += f"### Instruction:\n{instruction}\n\n### Response:\n"
        ranges.append(TextRange(len(text), len(text) + len(answer + eos)))
        text += answer + eos + "\n\n"
    text += f"### Instruction:\n{string_field(record, 'alpaca', 'instruction')}\n\n"
    if record.fields.get("input") not in (None, ""):
        text += f"### Input:\n{string_field(record, 'alpaca', 'input')}\n\n"
    text += "### Response:\n"
    last = TextRange(len(text), len(text) + len(string_field(record, "alpaca", "output")))
    text += record.fields["output"]
    if loss_on == "all":
        return RenderedText(text, None)
    return RenderedText(text, (last,) if loss_on == "last_turn" else (*ranges, last))


def history_of(record: Record) -> Iterator[tuple[str, str]]:
    """Yields the earlier instructions of an Alpaca record, and their answers."""
    history = record.fields.get("history") or ()
    if isinstance(history, str | Mapping) or not isinstance(history, Sequence):
        raise DataError(
            f"{record.where}: field 'history' must be a list of pairs of an instruction and its "
            f"answer, found {type(history).__name__}"
        )
    for number, pair in enumerate(history):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise DataError(
                f"{record.where}: entry {number} of field 'history' must be a pair of an "
                f"instruction and its answer, found {pair!r:.60}"
            )
        name = f"entry {number} of field 'history'"
        yield valid_text(record, name, pair[0]), valid_text(record, name, pair[1])


def unread_fields(record: Record, form: Form, rendered: str) -> list[str]:
    """The names of fields that look like text or give models context, but are missing from the text
    `rendered`: fields that the form does not have, and parts of messages that the chat template
    does not render.

    A field is not listed if the rendered text contains all texts of the field. A field that is not
    in `CONTEXT_FIELDS` is also not listed if one of its texts contains all texts of the form's
    required fields, because then it holds the rendered record.
    """
    known = fields_of(form)
    # The record of a prompt for generation has no answer.
    required = [record.fields[name] for name in REQUIRED_FIELDS[form] if name in record.fields]
    if form in CHAT_FORMS:
        required = [message.get("content") or message.get("value") for message in required[0]]
    names = [
        field
        for field, value in record.fields.items()
        if field not in known and value and _is_unread(field, value, rendered, required)
    ]
    if form in CHAT_FORMS:
        field = REQUIRED_FIELDS[form][0]
        names += [
            f"{field}: {name}"
            for name, texts in _of_messages(record.fields[field]).items()
            if not any(part.strip() in rendered for part in texts)
        ]
    return names


def _of_messages(messages: Sequence[Any]) -> Mapping[str, list[str]]:
    """Texts of messages that templates may leave out, by the key or role that holds them."""
    by_holder: dict[str, list[str]] = {}
    for message in messages:
        for key, value in message.items():
            if key in _LOSS_KEYS and value is not None:
                by_holder.setdefault(key, [])
            if not isinstance(value, str) or not value.strip():
                continue
            if key in ("content", "value"):
                # Templates cut answers of the assistant and rewrite results of tools.
                role = message.get("role") or message.get("from")
                if role in ("system", "developer", "user", "human"):
                    by_holder.setdefault(f"role {role}", []).append(value)
            elif key not in _PARTS_OF_CALLS and len(value.split(None, _WORDS)) >= _WORDS:
                by_holder.setdefault(key, []).append(value)
    return by_holder


def _is_unread(name: str, value: Any, text: str, required: Sequence[Any]) -> bool:
    texts = list(_texts(value))
    if name not in CONTEXT_FIELDS:
        if all(len(part.split(None, _WORDS)) < _WORDS for part in texts):
            return False
        required_parts = [part.strip() for part in _texts(required)]
        if any(all(needed in part for needed in required_parts) for part in texts):
            return False
    return not texts or not all(part.strip() in text for part in texts)


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for part in value.values():
                yield from _texts(part)
        case list() | tuple():
            for part in value:
                yield from _texts(part)


class Columns:
    """Renames the fields of records to those of their form, as `Source.columns` says."""

    def __init__(self, source: Source):
        self._source = source
        optional = {name for names in OPTIONAL_FIELDS.values() for name in names}
        self._unseen = {name: field for name, field in source.columns if name in optional}
        self._required = {name for name, _ in source.columns} - optional

    def see(self, record: Record) -> None:
        """Notes, for `refuse_unseen`, which optional fields a record has in its source."""
        for name, field in list(self._unseen.items()):
            if field in record.fields:
                del self._unseen[name]

    def renamed(self, record: Record) -> Record:
        """The record with the fields of its form. Raises DataError if a required field is
        missing."""
        if not self._source.columns:
            return record
        fields: dict[str, Any] = {}
        for name, field in self._source.columns:
            if field in record.fields:
                fields[name] = record.fields[field]
            elif name in self._required:
                raise DataError(
                    f"{record.where}: no field {field!r}, which columns names for {name!r}; "
                    f"found fields: {field_names(record)}"
                )
        names = {name for name, _ in self._source.columns}
        rest = {name: value for name, value in record.fields.items() if name not in names}
        return record._replace(fields=rest | fields)

    def refuse_unseen(self) -> None:
        """Raises DataError if the columns name an optional field that no record had, for example
        because it is misspelt."""
        for name, field in self._unseen.items():
            raise DataError(
                f"{self._source.path}: no record has the field {field!r}, which columns names for "
                f"{name!r}"
            )


def field_names(record: Record) -> str:
    """The names of a record's fields, as error messages list them."""
    return ", ".join(map(repr, record.fields)) or "none"


def hint(record: Record, forms: Sequence[Form]) -> str:
    """The setting with which a record that fits no permitted form could be used, for the end of an
    error message; empty if there is none."""
    fields = record.fields
    if {"chosen", "rejected"} <= fields.keys():
        return (
            "; chosen and rejected are preference data, for an objective such as DPO(); to train "
            f"on the chosen answers only, set {_chosen(fields, forms)}"
        )
    for form in [form for form in _ORDER if form in forms]:
        if columns := _columns(fields, form):
            return f"; set {_setting(columns, form, forms)}"
    for form in _ORDER:
        if all(name in fields for name in REQUIRED_FIELDS[form]) and form not in forms:
            return f'; set form="{form}"'
    return ""


def _chosen(fields: Mapping[str, Any], forms: Sequence[Form]) -> str:
    if not isinstance(fields["chosen"], str):
        return _setting({"messages": "chosen"}, "messages", forms)
    if prompt := _found(fields, "prompt"):
        prompt_column = {} if prompt == "prompt" else {"prompt": prompt}
        return _setting(prompt_column | {"completion": "chosen"}, "prompt_completion", forms)
    return _setting({"text": "chosen"}, "text", forms)


def _columns(fields: Mapping[str, Any], form: Form) -> dict[str, str]:
    """The columns with which a record fits a form; empty if there are none."""
    by_name = {name: _found(fields, name) for name in fields_of(form)}
    if any(by_name[name] is None for name in REQUIRED_FIELDS[form]):
        return {}
    return {name: field for name, field in by_name.items() if field is not None and field != name}


def _found(fields: Mapping[str, Any], name: str) -> str | None:
    """The field of a record that holds the values that a form calls `name`."""
    by_lower_case = {field.lower(): field for field in fields if _may_be(fields[field], name)}
    names = (name, *_SYNONYMS.get(name, ()))
    return next((by_lower_case[similar] for similar in names if similar in by_lower_case), None)


def _may_be(value: Any, name: str) -> bool:
    if name in ("tools", "functions", "history"):
        return True
    if name not in ("messages", "conversations"):
        return isinstance(value, str)
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ("role" if name == "messages" else "from") in first


def _setting(columns: Mapping[str, str], form: Form, forms: Sequence[Form]) -> str:
    form_setting = "" if form in forms else f'form="{form}" and '
    return f"{form_setting}columns={json.dumps(columns)}"
