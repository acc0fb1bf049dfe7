"""The forms of records: which fields a record of each form has."""

from collections.abc import Mapping
from typing import Literal

Form = Literal["prompt_completion", "messages", "alpaca", "text", "sharegpt"]

# The fields that a record of each form needs. `detect_form` takes the first form that fits. "text"
# comes after "alpaca" because public Alpaca data sets also have the rendered record in `text`.
REQUIRED_FIELDS: Mapping[Form, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
    "sharegpt": ("conversations",),
}
# The fields that a record of each form may have.
OPTIONAL_FIELDS: Mapping[Form, tuple[str, ...]] = {
    "messages": ("system", "tools", "functions"),
    "alpaca": ("input", "system", "history"),
    "sharegpt": ("system", "tools", "functions"),
}
# The forms that a chat template renders.
CHAT_FORMS: tuple[Form, ...] = ("messages", "sharegpt")


def fields_of(form: Form) -> tuple[str, ...]:
    """The fields of a form, required ones first."""
    return (*REQUIRED_FIELDS[form], *OPTIONAL_FIELDS.get(form, ()))


def all_fields() -> list[str]:
    """The fields of all forms, each once."""
    return list(dict.fromkeys(name for form in REQUIRED_FIELDS for name in fields_of(form)))


def forms_with(names: set[str]) -> list[Form]:
    """The forms that have all of these fields."""
    return [form for form in REQUIRED_FIELDS if names <= {*fields_of(form)}]
