"""Records whose fields have other names than those of a form: `Source.columns`, and hints."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import DataError
from .forms import OPTIONAL_FIELDS, REQUIRED_FIELDS, Form, fields_of
from .sources import Record, Source

# By field of a form, the names that other data sets give it.
_SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "query", "input", "instruction", "problem", "request", "user"),
    "completion": ("answer", "response", "output", "reply", "solution", "assistant"),
    "output": ("response", "answer", "completion", "reply", "solution"),
    "input": ("context",),
    "messages": ("conversation", "conversations", "dialogue", "dialog", "chat", "turns"),
    "conversations": ("conversation", "messages", "dialogue", "dialog", "chat", "turns"),
    "text": ("content", "body", "document", "article"),
}
# Hints name the first form that fits.
_ORDER: Sequence[Form] = ("messages", "sharegpt", "alpaca", "prompt_completion", "text")


class Columns:
    """Gives the fields of records the names that their form has, as `Source.columns` says."""

    def __init__(self, source: Source):
        """No record has been seen yet.

        Args:
          source: the source of the records.
        """
        self._source = source
        optional = {name for names in OPTIONAL_FIELDS.values() for name in names}
        self._unseen = {name: own for name, own in source.columns if name in optional}
        self._required = {name for name, _ in source.columns} - optional

    def see(self, record: Record) -> None:
        """Takes note of the optional fields of a record, for `refuse_unseen`.

        Args:
          record: a record as it comes from its source.
        """
        for name, own in list(self._unseen.items()):
            if own in record.fields:
                del self._unseen[name]

    def renamed(self, record: Record) -> Record:
        """The record with the fields of its form.

        Args:
          record: a record as it comes from its source.

        Raises:
          DataError: the record lacks a field that its form needs.
        """
        if not self._source.columns:
            return record
        found: dict[str, Any] = {}
        for name, own in self._source.columns:
            if own in record.fields:
                found[name] = record.fields[own]
            elif name in self._required:
                raise DataError(
                    f"{record.where}: no field {own!r}, which columns names for {name!r}; "
                    f"found fields: {field_names(record)}"
                )
        names = {name for name, _ in self._source.columns}
        rest = {name: value for name, value in record.fields.items() if name not in names}
        return record._replace(fields=rest | found)

    def refuse_unseen(self) -> None:
        """Raises DataError if no record that was seen had an optional field that the columns
        name, as after a typing error."""
        for name, own in self._unseen.items():
            raise DataError(
                f"{self._source.path}: no record has the field {own!r}, which columns names for "
                f"{name!r}"
            )


def field_names(record: Record) -> str:
    """The names of a record's fields, as error messages list them.

    Args:
      record: the record.
    """
    return ", ".join(map(repr, record.fields)) or "none"


def hint(record: Record, forms: Sequence[Form]) -> str:
    """How the source of a record that fits no form can be trained on, behind an error message;
    empty if the record tells nothing.

    Args:
      record: the record.
      forms: the forms that the source permits.
    """
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
        own = {} if prompt == "prompt" else {"prompt": prompt}
        return _setting(own | {"completion": "chosen"}, "prompt_completion", forms)
    return _setting({"text": "chosen"}, "text", forms)


def _columns(fields: Mapping[str, Any], form: Form) -> dict[str, str]:
    """The columns that make a record fit a form; empty if there are none."""
    found = {name: _found(fields, name) for name in fields_of(form)}
    if any(found[name] is None for name in REQUIRED_FIELDS[form]):
        return {}
    return {name: own for name, own in found.items() if own is not None and own != name}


def _found(fields: Mapping[str, Any], name: str) -> str | None:
    """The field of a record that holds what a form calls `name`."""
    own = {field.lower(): field for field in fields if _may_be(fields[field], name)}
    names = (name, *_SYNONYMS.get(name, ()))
    return next((own[similar] for similar in names if similar in own), None)


def _may_be(value: Any, name: str) -> bool:
    if name in ("tools", "functions", "history"):
        return True
    if name not in ("messages", "conversations"):
        return isinstance(value, str)
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and ("role" if name == "messages" else "from") in first


def _setting(columns: Mapping[str, str], form: Form, forms: Sequence[Form]) -> str:
    own = "" if form in forms else f'form="{form}" and '
    return f"{own}columns={json.dumps(columns)}"
