"""Record forms: which fields a record has, and how they become one text with its target ranges."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .columns import field_names, hint
from .errors import DataError
from .forms import CHAT_FORMS, REQUIRED_FIELDS, Form, fields_of
from .sources import LossOn, Record

# Fields that give models context, whatever their values look like.
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
# Other fields look like text if they have a text of so many words. Labels have fewer.
_WORDS = 3
# Keys of messages whose values are rewritten before templates see them.
_PARTS_OF_CALLS = ("tool_calls", "function_call")
# Keys of messages that say in other trainers what counts in the loss, as `weight` does here.
_LOSS_KEYS = ("train", "training", "train_detail", "training_detail", "loss", "mask", "masked")


class TextRange(NamedTuple):
    """The characters of a text from `start` (included) to `end` (excluded)."""

    start: int
    end: int


class RenderedText(NamedTuple):
    """The text of one record.

    Attributes:
      text: the text to tokenize.
      target_ranges: the parts of the text that the model learns to predict; None for the whole
        text.
      has_special_tokens: True if the text already contains its BOS and EOS tokens, as the texts of
        chat templates do. If False, the tokenization adds these tokens.
    """

    text: str
    target_ranges: tuple[TextRange, ...] | None
    has_special_tokens: bool = False


def detect_form(record: Record, forms: Sequence[Form] = tuple(REQUIRED_FIELDS)) -> Form:
    """The first form whose fields the record has.

    Args:
      record: usually the first record of a source.
      forms: the forms that are considered, from `Source.forms`.

    Raises:
      DataError: the record has the fields of no form.
    """
    for form in forms:
        if all(name in record.fields for name in REQUIRED_FIELDS[form]):
            return form
    known = "; ".join(f"{form} ({', '.join(REQUIRED_FIELDS[form])})" for form in forms)
    raise DataError(
        f"{record.where}: the fields fit no record form: found {field_names(record)}; "
        f"the forms and their fields are {known}{hint(record, forms)}"
    )


def render(record: Record, form: Form, loss_on: LossOn, eos: str = "") -> RenderedText:
    """Renders a record of any form except `CHAT_FORMS`, which `chat.render_chat` renders.

    Args:
      record: the record.
      form: "prompt_completion", "alpaca" or "text".
      loss_on: as in `Source`; "last_turn" leaves out the answers of an Alpaca record's history.
      eos: text of the tokenizer's EOS token, which ends these answers.

    Raises:
      DataError: a field is missing or not a string.
      ValueError: the form is another one.
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
    """Returns `value`. Raises DataError with `name` if it is not a string of valid Unicode."""
    if not isinstance(value, str):
        raise DataError(f"{record.where}: {name} must be a string, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{record.where}: {name} is not valid Unicode: {error}") from error
    return value


def _render_alpaca(record: Record, loss_on: LossOn, eos: str) -> RenderedText:
    """The system prompt, the history and the instruction, in the order of LLaMA-Factory's template
    "alpaca". As there, the answers of the history are learned too."""
    # In public data sets unused fields are missing, null or empty.
    text, ranges = "", []
    if record.fields.get("system") not in (None, ""):
        text = string_field(record, "alpaca", "system") + "\n\n"
    for instruction, answer in _history(record):
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


def _history(record: Record) -> Iterator[tuple[str, str]]:
    """The earlier instructions of an Alpaca record and their answers."""
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


def unread_fields(record: Record, form: Form, rendered: RenderedText) -> list[str]:
    """The fields of which the rendered text of a record has nothing although they look like text or
    give models context: fields that are none of the form, and parts of messages that the chat
    template does not render.

    Fields are left out if the rendered text has all of their texts. A field that is no context is
    left out too if a text of it has all texts of the form's required fields, because it holds the
    record already rendered.

    Args:
      record: the record.
      form: its form.
      rendered: the text of the record.
    """
    known = fields_of(form)
    # A prompt for generation has no answer.
    required = [record.fields[name] for name in REQUIRED_FIELDS[form] if name in record.fields]
    if form in CHAT_FORMS:
        required = [own.get("content") or own.get("value") for own in required[0]]
    found = [
        name
        for name, value in record.fields.items()
        if name not in known and value and _is_unread(name, value, rendered.text, required)
    ]
    if form in CHAT_FORMS:
        field = REQUIRED_FIELDS[form][0]
        found += [
            f"{field}: {name}"
            for name, texts in _of_messages(record.fields[field]).items()
            if not any(own.strip() in rendered.text for own in texts)
        ]
    return found


def _of_messages(messages: Sequence[Any]) -> Mapping[str, list[str]]:
    """By what holds them, texts of messages that templates may leave out."""
    found: dict[str, list[str]] = {}
    for message in messages:
        for key, value in message.items():
            if key in _LOSS_KEYS and value is not None:
                found.setdefault(key, [])
            if not isinstance(value, str) or not value.strip():
                continue
            if key in ("content", "value"):
                # Templates cut the answers of the assistant, and rewrite the results of tools.
                role = message.get("role") or message.get("from")
                if role in ("system", "developer", "user", "human"):
                    found.setdefault(f"role {role}", []).append(value)
            elif key not in _PARTS_OF_CALLS and len(value.split(None, _WORDS)) >= _WORDS:
                found.setdefault(key, []).append(value)
    return found


def _is_unread(name: str, value: Any, text: str, required: Sequence[Any]) -> bool:
    texts = list(_texts(value))
    if name not in CONTEXT_FIELDS:
        if all(len(own.split(None, _WORDS)) < _WORDS for own in texts):
            return False
        parts = [part.strip() for part in _texts(required)]
        if any(all(part in own for part in parts) for own in texts):
            return False
    return not texts or not all(own.strip() in text for own in texts)


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
