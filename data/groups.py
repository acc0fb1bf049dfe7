"""Divides records into groups that are tokenized in one call, so that few are in memory at once."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .record_forms import RenderedText
from .sources import Record

_RECORDS_PER_CALL = 1024
# The tokens and offsets of a call are Python objects with up to 280 bytes for each character.
_CHARACTERS_PER_CALL = 2**18


def groups_of_records(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Divides records into groups. A group has at most `_RECORDS_PER_CALL` records and
    `_CHARACTERS_PER_CALL` characters, or is one record."""
    group: list[Record] = []
    characters = 0
    for record in records:
        size = _characters(record.fields)
        if group and (len(group) == _RECORDS_PER_CALL or characters + size > _CHARACTERS_PER_CALL):
            yield group
            group, characters = [], 0
        group.append(record)
        characters += size
    if group:
        yield group


def _characters(value: Any) -> int:
    """Number of characters of all texts in the fields of a record."""
    try:
        match value:
            case str():
                return len(value)
            case Mapping():
                return sum(map(_characters, value.values()))
            case list():
                return sum(map(_characters, value))
    except RecursionError:
        # Such a record is refused when it is rendered.
        pass
    return 0


def groups_of_texts(
    rendered: Sequence[tuple[Record, RenderedText]],
) -> Iterator[list[tuple[Record, RenderedText]]]:
    """Divides rendered records into at least one group. A group has at most `_CHARACTERS_PER_CALL`
    characters, or is one text."""
    part: list[tuple[Record, RenderedText]] = []
    characters = 0
    for record, text in rendered:
        if part and characters + len(text.text) > _CHARACTERS_PER_CALL:
            yield part
            part, characters = [], 0
        part.append((record, text))
        characters += len(text.text)
    yield part
