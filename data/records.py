"""Record forms: how a record's fields become one text with the spans that are to be learned."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from .errors import DataError
from .sources import Form, LossOn, Record

# Alphabetical order would not do: of the forms that fit a record the first is taken, and public
# Alpaca sets carry a rendered `text` beside their own fields.
REQUIRED_FIELDS: Mapping[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}


class Span(NamedTuple):
    """Characters start (included) to end (excluded) of a text."""

    start: int
    end: int


class RenderedText(NamedTuple):
    """The text of one record.

    Attributes:
      text: what is tokenized.
      target_spans: the parts to be predicted; None stands for every token.
      has_special_tokens: True where the text already spells its BOS and EOS tokens, as chat
        templates do; otherwise the tokenization adds them.
    """

    text: str
    target_spans: tuple[Span, ...] | None
    has_special_tokens: bool = False


def detect_form(record: Record) -> Form:
    """The first form of `REQUIRED_FIELDS` whose fields the record has.

    Raises:
      DataError: no form fits.
    """
    for form, names in REQUIRED_FIELDS.items():
        if all(name in record.fields for name in names):
            return form
    forms = "; ".join(f"{form} ({', '.join(names)})" for form, names in REQUIRED_FIELDS.items())
    raise DataError(
        f"{record.where}: the fields fit no record form: found {_field_names(record)}; "
        f"the forms and their fields are {forms}"
    )


def render(record: Record, form: Form, loss_on: LossOn) -> RenderedText:
    """Renders a record of any form but "messages", which needs a chat template (see `chat`).

    Raises:
      DataError: a field is missing or not a string.
    """
    match form:
        case "prompt_completion":
            prompt = string_field(record, form, "prompt")
            completion = string_field(record, form, "completion")
        case "alpaca":
            prompt = _alpaca_prompt(record)
            completion = string_field(record, form, "output")
        case "text":
            return RenderedText(string_field(record, form, "text"), target_spans=None)
        case _:
            raise ValueError(f"form {form!r} has no plain rendering")
    text = prompt + completion
    spans = None if loss_on == "all" else (Span(len(prompt), len(text)),)
    return RenderedText(text, spans)


def required_field(record: Record, form: Form, name: str) -> Any:
    """A field's value; DataError where it is missing or null."""
    if (value := record.fields.get(name)) is None:
        problem = f"null in field {name!r}" if name in record.fields else f"no field {name!r}"
        raise DataError(
            f"{record.where}: {problem}, which a {form} record needs; "
            f"found fields: {_field_names(record)}"
        )
    return value


def string_field(record: Record, form: Form, name: str) -> str:
    """A field's text; DataError where it is missing or not a valid string."""
    return valid_text(record, f"field {name!r}", required_field(record, form, name))


def valid_text(record: Record, what: str, value: Any) -> str:
    """`value` itself; DataError naming `what` where it is no string or not encodable."""
    if not isinstance(value, str):
        raise DataError(f"{record.where}: {what} must be a string, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{record.where}: {what} is not valid Unicode: {error}") from error
    return value


def _alpaca_prompt(record: Record) -> str:
    instruction = string_field(record, "alpaca", "instruction")
    prompt = f"### Instruction:\n{instruction}\n\n"
    # Published sets leave `input` out, null or empty alike.
    if record.fields.get("input") not in (None, ""):
        prompt += f"### Input:\n{string_field(record, 'alpaca', 'input')}\n\n"
    return prompt + "### Response:\n"


def _field_names(record: Record) -> str:
    return ", ".join(map(repr, record.fields)) or "none"
