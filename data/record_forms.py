"""Record forms: which fields a record has, and how they become one text with its target ranges."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .columns import field_names, hint
from .errors import DataError
from .forms import REQUIRED_FIELDS, Form
from .sources import LossOn, Record


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


def render(record: Record, form: Form, loss_on: LossOn) -> RenderedText:
    """Renders a record of any form except `CHAT_FORMS`, which `chat.render_chat` renders.

    Args:
      record: the record.
      form: "prompt_completion", "alpaca" or "text".
      loss_on: as in `Source`; "last_turn" equals "completion".

    Raises:
      DataError: a field is missing or not a string.
      ValueError: the form is another one.
    """
    match form:
        case "prompt_completion":
            prompt = string_field(record, form, "prompt")
            completion = string_field(record, form, "completion")
        case "alpaca":
            prompt = _alpaca_prompt(record)
            completion = string_field(record, form, "output")
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


def _alpaca_prompt(record: Record) -> str:
    instruction = string_field(record, "alpaca", "instruction")
    prompt = f"### Instruction:\n{instruction}\n\n"
    # In public data sets an unused `input` is missing, null or empty.
    if record.fields.get("input") not in (None, ""):
        prompt += f"### Input:\n{string_field(record, 'alpaca', 'input')}\n\n"
    return prompt + "### Response:\n"
