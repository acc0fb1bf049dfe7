"""Parses JSON from strangers, with bounds."""

import itertools
import json
import re
from typing import Any

from jaxmux.field_checks import LARGEST_INTEGER

# A specification contains its optimizer, which contains a schedule; PEFT's adapter_config.json is
# nested less deeply.
_DEEPEST = 8
_LONGEST_SHOWN = 80
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)


def parse_object(text: str | bytes, most_bytes: int) -> dict[str, Any]:
    """Parses a JSON object that may be malformed on purpose.

    Args:
      text: the JSON document, as UTF-8 if it is bytes.
      most_bytes: the largest permitted size.

    Raises:
      ValueError: the document is too large, not UTF-8, not JSON or not an object; it is nested too
        deeply, names a key twice, or holds NaN, a number beyond 2^53 - 1 or half of a surrogate
        pair. The message says what was found under which key.
    """
    # Every character takes at least one byte, so a text that is too long is refused without
    # encoding it.
    if len(text) > most_bytes:
        raise ValueError(f"has more than {most_bytes} bytes")
    try:
        data = text if isinstance(text, bytes) else text.encode()
        if len(data) > most_bytes:
            raise ValueError(f"has more than {most_bytes} bytes")
        text_of_file = data.decode()
    except UnicodeError as e:
        raise ValueError(f"should be UTF-8: {e.reason} at position {e.start}") from None
    if (depth := _depth(text_of_file)) > _DEEPEST:
        raise ValueError(f"nests {depth} objects and lists; expected at most {_DEEPEST}")
    try:
        value = json.loads(
            text_of_file,
            object_pairs_hook=_without_duplicates,
            # Converting a long integer takes time, and only its size matters.
            parse_int=lambda digits: int(digits) if len(digits) <= 20 else float(digits),
        )
    except json.JSONDecodeError as e:
        raise ValueError(f"is no JSON: {e.msg}, line {e.lineno}, column {e.colno}") from None
    _refuse_inexpressible(value)
    if not isinstance(value, dict):
        raise ValueError(f"should be a JSON object, found {shown(value)}")
    return value


def shown(value: Any) -> str:
    """Writes a JSON value for an error message, in ASCII and cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _depth(text: str) -> int:
    """The largest number of objects and lists that are open at the same place of a JSON
    document."""
    brackets = (_BRACKETS.get(character, 0) for character in _STRING.sub("", text))
    return max(itertools.accumulate(brackets, initial=0))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for key, value in pairs:
        if key in members:
            raise ValueError(f"names the key {shown(key)} twice")
        members[key] = value
    return members


def _refuse_inexpressible(value: Any, key: str = "") -> None:
    """Raises ValueError for numbers and texts that not all programs that read JSON can hold. `key`
    is the path to the value."""
    where = f"{shown(key)} holds" if key else "holds"
    match value:
        case int() | float():
            # The comparison is false for NaN. Programs differ in how they read larger numbers.
            if not abs(value) <= LARGEST_INTEGER:
                raise ValueError(
                    f"{where} {shown(value)}; expected a number of at most {LARGEST_INTEGER} "
                    "(2^53 - 1), without its sign"
                )
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"{where} half of a surrogate pair in {shown(value)}")
        case dict():
            for name, part in value.items():
                _refuse_inexpressible(name, key)
                _refuse_inexpressible(part, f"{key}.{name}" if key else name)
        case list():
            for part in value:
                _refuse_inexpressible(part, key)
