"""JSON of strangers: parsing with bounds, and the check of single values against JSON Schema."""

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxmux.field_checks import LARGEST_INTEGER

# A specification nests its optimizer, and in it a schedule; adapter_config.json of PEFT nests less.
_DEEPEST = 8
_LONGEST_SHOWN = 80
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


def parse_object(text: str | bytes, most_bytes: int) -> dict[str, Any]:
    """Parses a JSON object that may be malformed on purpose.

    Args:
      text: the JSON document, as UTF-8 if it is bytes.
      most_bytes: the largest permitted size.

    Raises:
      ValueError: the document is too large, not UTF-8, not JSON or not an object; it nests deeply,
        names a key twice, or holds NaN, an infinity, a number that float64 or exact JSON integers
        cannot express, or half of a surrogate pair. The message says what was found, and under
        which key.
    """
    # Every character is at least one byte, so a long text need not be encoded to be refused.
    if len(text) > most_bytes:
        raise ValueError(f"has more than {most_bytes} bytes")
    try:
        data = text if isinstance(text, bytes) else text.encode()
        if len(data) > most_bytes:
            raise ValueError(f"has more than {most_bytes} bytes")
        decoded = data.decode()
    except UnicodeError as e:
        raise ValueError(f"should be UTF-8: {e.reason} at position {e.start}") from None
    if (depth := _depth(decoded)) > _DEEPEST:
        raise ValueError(f"nests {depth} objects and lists; expected at most {_DEEPEST}")
    try:
        found = json.loads(
            decoded,
            object_pairs_hook=_without_duplicates,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=lambda name: _Refused(f"{name}; expected finite numbers"),
        )
    except json.JSONDecodeError as e:
        raise ValueError(f"is no JSON: {e.msg}, line {e.lineno}, column {e.colno}") from None
    _refuse_inexpressible(found)
    if not isinstance(found, dict):
        raise ValueError(f"should be a JSON object, found {shown(found)}")
    return found


def refusal(value: Any, schema: Mapping[str, Any]) -> str | None:
    """Why a schema does not permit a value; None if it does.

    It knows the keywords of fields: type, enum, minimum, maximum, exclusiveMinimum,
    exclusiveMaximum, minLength, maxLength, pattern, items, minItems, maxItems, uniqueItems,
    propertyNames, additionalProperties and maxProperties. In contrast to JSON Schema, 16.0 is no
    integer, and no pattern matches a line break at the end.

    Args:
      value: a value from `parse_object`.
      schema: the schema of one field. Its "$comment" describes what the pattern permits.

    Returns:
      What was expected and what was found, such as "should be an integer of at least 1, found 0".
    """
    if _permits(value, schema):
        return None
    return f"should be {in_words(schema, value)}, found {shown(value)}"


def in_words(schema: Mapping[str, Any], value: Any = None) -> str:
    """The values that the schema of one field permits, in words, as they follow "should be".

    Args:
      schema: as for `refusal`.
      value: a value that the schema refuses. A bound that this value exceeds is told even where
        nobody would ask for it, such as the largest integer.
    """
    told = schema.get("$comment", "")
    if "enum" in schema:
        return told or f"one of {', '.join(map(json.dumps, schema['enum']))}"
    exceeded = [
        bound.in_words(schema[key])
        for key, bound in _BOUNDS.items()
        if key in schema
        and (schema[key] or not told)  # comments say that a list is empty
        and (bound.refuses(value, schema[key]) or (not told and abs(schema[key]) < LARGEST_INTEGER))
    ]
    words = told or " or ".join(_TYPE_WORDS[name] for name in types_of(schema) if name != "null")
    bounds = " and ".join(exceeded)
    words += f"{',' * bool(told)} {bounds}" if bounds else ""
    return f"{words}, or null" if "null" in types_of(schema) else words


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types that the schema of one field names; none if it names none.

    Args:
      schema: as for `refusal`.
    """
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def shown(value: Any) -> str:
    """A value for an error message: JSON in ASCII, cut if it is long.

    Args:
      value: a value from `parse_object`.
    """
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


_TYPE_WORDS = {
    "array": "a list of strings",
    "boolean": "true or false",
    "integer": "an integer",
    "number": "a number",
    "object": "an object",
    "string": "a string",
}


class _Bound(NamedTuple):
    """A keyword that bounds values.

    Attributes:
      types: the types that it bounds.
      permits: function (number or size of the value, bound) that says whether the value is inside.
      words: the bound in words, with a place for its number.
    """

    types: Any
    permits: Callable[[Any, Any], bool]
    words: str

    def refuses(self, value: Any, bound: float) -> bool:
        if not isinstance(value, self.types) or isinstance(value, bool):
            return False
        return not self.permits(value if isinstance(value, int | float) else len(value), bound)

    def in_words(self, bound: float) -> str:
        text = str(bound) if isinstance(bound, int) else f"{bound:g}"
        return self.words.format(text).replace(" 1 entries", " 1 entry")


_BOUNDS = {
    "minimum": _Bound(int | float, operator.ge, "of at least {}"),
    "exclusiveMinimum": _Bound(int | float, operator.gt, "above {}"),
    "maximum": _Bound(int | float, operator.le, "of at most {}"),
    "exclusiveMaximum": _Bound(int | float, operator.lt, "below {}"),
    "minLength": _Bound(str, operator.ge, "not empty"),
    "maxLength": _Bound(str, operator.le, "of at most {} characters"),
    "minItems": _Bound(list, operator.ge, "of at least {} entries"),
    "maxItems": _Bound(list, operator.le, "of at most {} entries"),
    "maxProperties": _Bound(dict, operator.le, "of at most {} entries"),
}


def _permits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        # Python takes True for 1; the enumerations of fields hold strings and null.
        return isinstance(value, str | None) and value in schema["enum"]
    types = types_of(schema)
    # Lengths are checked first, so that no pattern works on a long text.
    if any(bound.refuses(value, schema[key]) for key, bound in _BOUNDS.items() if key in schema):
        return False
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            return "number" in types or ("integer" in types and isinstance(value, int))
        case str():
            return "string" in types and _matches(schema.get("pattern", ""), value)
        case list():
            return (
                "array" in types
                and all(_permits(item, schema["items"]) for item in value)
                and not (schema.get("uniqueItems") and len({*map(json.dumps, value)}) < len(value))
            )
        case dict():
            return (
                "object" in types
                and all(_permits(name, schema["propertyNames"]) for name in value)
                and all(_permits(own, schema["additionalProperties"]) for own in value.values())
            )
    return False


def _matches(pattern: str, value: str) -> bool:
    # The patterns of schemas end in "$", which in Python also matches before a last line break.
    return re.search(pattern.removesuffix("$") + r"\Z" if pattern else "", value) is not None


def _depth(text: str) -> int:
    """The largest number of objects and lists that are open at one place of a JSON document."""
    deepest = depth = 0
    in_string = escaped = False
    for character in text:
        if in_string:
            in_string = escaped or character != '"'
            escaped = not escaped and character == "\\"
        elif character == '"':
            in_string = True
        elif step := _BRACKETS.get(character):
            depth += step
            deepest = max(deepest, depth)
    return deepest


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"names the key {shown(key)} twice")
        found[key] = value
    return found


class _Refused(str):
    """In place of a number that is refused: what was found and what was expected."""


def _integer(digits: str) -> int | _Refused:
    # The length is checked first, because long numbers take time to convert.
    if len(digits) > 20 or abs(int(digits)) > LARGEST_INTEGER:
        return _Refused(
            f"the integer {digits[:20]}{'…' * (len(digits) > 20)}; expected at most "
            f"{LARGEST_INTEGER} (2^53 - 1), without its sign"
        )
    return int(digits)


def _finite(digits: str) -> float | _Refused:
    number = float(digits)
    if math.isinf(number):
        return _Refused(f"the number {digits[:20]}, which float64 cannot express")
    return number


def _refuse_inexpressible(value: Any, key: str = "") -> None:
    """Refuses numbers and texts that JSON of other programs cannot hold; `key` leads to a value."""
    where = f"{shown(key)} holds" if key else "holds"
    match value:
        case _Refused():
            raise ValueError(f"{where} {value}")
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
