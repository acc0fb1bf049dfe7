"""Records whose fields have other names than those of a form: `Source.columns` and hints for it."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError
from .sources import OPTIONAL_FIELDS, REQUIRED_FIELDS, Form, Record, Source, fields_of

# The names that other data sets give to a form's fields, by field.
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "input", "instruction", "problem", "request", "user"),
    "completion": ("answer", "response", "output", "reply", "solution", "assistant"),
    "output": ("response", "answer", "completion", "reply", "solution"),
    "input": ("context",),
    "messages": ("conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    "conversations": ("conversation", "messages", "dialogue", "dialog", "chat", "turns"),
    "text": ("content", "body", "document", "article"),
}
# The order in which forms are tried for hints; the first one that fits is named.
_ORDER: Sequence[Form] = ("messages", "sharegpt", "alpaca", "prompt_completion", "text")


class Columns:
    """Renames the fields of records to those of their form, by `Source.columns`."""

    def __init__(self, source: Source):
        self._source = source
        optional = {name for names in OPTIONAL_FIELDS.values() for name in names}
        self._unseen = {name: field for name, field in source.columns if name in optional}
        self._required = {name for name, _ in source.columns} - optional

    def see(self, record: Record) -> None:
        """Notes which optional fields a record has, as it comes from its source, for
        `refuse_unseen`."""
        for name, field in list(self._unseen.items()):
            if field in record.fields:
                del self._unseen[name]

    def renamed(self, record: Record) -> Record:
        """The record with the fields of its form. DataError if a required field is missing."""
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
    """The setting with which a record that fits no permitted form could be trained on, for the end
    of an error message; empty if there is none."""
    fields = record.fields
    if {"chosen", "rejected"} <= fields.keys():
        return (
            "; chosen and rejected are preference data, and there is no task for them yet; to "
            f"train on the chosen answers, set {_chosen(fields, forms)}"
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
    """The columns that make a record fit a form; empty if there are none."""
    by_name = {name: _found(fields, name) for name in fields_of(form)}
    if any(by_name[name] is None for name in REQUIRED_FIELDS[form]):
        return {}
    return {name: field for name, field in by_name.items() if field is not None and field != name}


def _found(fields: Mapping[str, Any], name: str) -> str | None:
    """The field of a record that holds the values which a form calls `name`."""
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
