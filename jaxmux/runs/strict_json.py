"""JSON of strangers: parsing with bounds, and the check of single values against JSON Schema."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from jaxmux.field_checks import LARGEST_INTEGER

# A specification nests its optimizer, and in it a schedule; adapter_config.json of PEFT nests less.
_DEEPEST = 8
_LONGEST_SHOWN = 80
_LARGE = 1e38
_BRACKETS = {"{": 1, "[": 1, "}": -1, "]": -1}


def parse_object(text: str | bytes, most_bytes: int) -> dict[str, Any]:
    """Parses a JSON object that may be malformed on purpose.

    Args:
      text: the JSON document, as UTF-8 if it is bytes.
      most_bytes: the largest permitted size.

    Raises:
      ValueError: the document is too large, not UTF-8, not JSON or not an object; it nests deeply,
        names a key twice, or holds NaN, an infinity, a number that float64 or exact JSON integers
        cannot express, or half of a surrogate pair. The message says what was found.
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
            parse_constant=_refuse_constant,
        )
    except json.JSONDecodeError as e:
        raise ValueError(f"is no JSON: {e.msg}, line {e.lineno}, column {e.colno}") from None
    if not isinstance(found, dict):
        raise ValueError(f"should be a JSON object, found {shown(found)}")
    _refuse_surrogates(found)
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
    return f"should be {in_words(schema)}, found {shown(value)}"


def in_words(schema: Mapping[str, Any]) -> str:
    """The values that the schema of one field permits, in words, as they follow "should be".

    Args:
      schema: as for `refusal`.
    """
    if "enum" in schema:
        return f"one of {', '.join(map(json.dumps, schema['enum']))}"
    if "$comment" in schema:
        expected = [schema["$comment"]]
    else:
        expected = [_TYPE_WORDS[name] for name in types_of(schema) if name != "null"]
    bounds = [
        word.format(schema[key])
        for key, word in _BOUND_WORDS.items()
        # Nobody who writes a specification asks for a number beyond float32.
        if key in schema and abs(schema[key]) < _LARGE
    ]
    words = f"{' or '.join(expected)} {' and '.join(bounds)}".strip()
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
_BOUND_WORDS = {
    "minimum": "of at least {:g}",
    "exclusiveMinimum": "above {:g}",
    "maximum": "of at most {:.17g}",
    "exclusiveMaximum": "below {:g}",
    "minLength": "of at least {} characters",
    "maxLength": "of at most {} characters",
    "maxItems": "of at most {} entries",
}


def _permits(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        # Python takes True for 1; the enumerations of fields hold strings and null.
        return isinstance(value, str | None) and value in schema["enum"]
    types = types_of(schema)
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            fits = "number" in types or ("integer" in types and isinstance(value, int))
            return (
                fits
                and schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
                and schema.get("exclusiveMinimum", -math.inf) < value
                and value < schema.get("exclusiveMaximum", math.inf)
            )
        case str():
            # The length is checked first, so that no pattern works on a long text.
            return (
                "string" in types
                and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)
                and _matches(schema.get("pattern", ""), value)
            )
        case list():
            return (
                "array" in types
                and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf)
                and all(_permits(item, schema["items"]) for item in value)
                and not (schema.get("uniqueItems") and len({*map(json.dumps, value)}) < len(value))
            )
        case dict():
            return (
                "object" in types
                and len(value) <= schema.get("maxProperties", math.inf)
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


def _integer(digits: str) -> int:
    # The length is checked first, because long numbers take time to convert.
    if len(digits) > 20 or abs(int(digits)) > LARGEST_INTEGER:
        raise ValueError(
            f"holds the integer {digits[:20]}{'…' * (len(digits) > 20)}; expected at most "
            f"{LARGEST_INTEGER} (2^53 - 1), without its sign"
        )
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"holds the number {digits[:20]}, which float64 cannot express")
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}; expected finite numbers")


def _refuse_surrogates(value: Any) -> None:
    match value:
        case str():
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise ValueError(f"holds half of a surrogate pair in {shown(value)}")
        case dict():
            for key, part in value.items():
                _refuse_surrogates(key)
                _refuse_surrogates(part)
        case list():
            for part in value:
                _refuse_surrogates(part)
