"""Checks of the fields of specifications such as `Task`, `LoRA` and `AdamW`: types and ranges.

A specification is a frozen dataclass. Its fields are made by `integer`, `number`, `flag`, `text`,
`names`, `integers` or `choice`, which state what the field may hold, and its `__post_init__` calls
`check_fields`. Numbers of NumPy are accepted like those of Python and become numbers of Python. A
bool is not a number, and a string is neither a number nor a bool.
"""

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

# JSON of other programs holds integers as float64, which is exact up to this one.
LARGEST_INTEGER = 2**53 - 1

_RULE = "rule"
_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_REFUSED = object()


@dataclasses.dataclass(frozen=True)
class _Rule:
    """What a field may hold.

    Attributes:
      expected: the permitted values in words, as they follow "should be" in an error message.
      accept: function that returns a permitted value as a value of Python, and `_REFUSED` for any
        other value.
      schema: the permitted values as JSON Schema.
    """

    expected: str
    accept: Callable[[Any], Any]
    schema: dict[str, Any]


def integer(default: Any = dataclasses.MISSING, *, least: int, optional: bool = False) -> Any:
    """A field that holds an integer, of at most `LARGEST_INTEGER`.

    Args:
      default: the field's default value; without it, the field must be given.
      least: the smallest permitted value.
      optional: True permits None too.
    """

    def accept(value: Any) -> Any:
        is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return int(value) if is_integer and least <= value <= LARGEST_INTEGER else _REFUSED

    schema = {"type": "integer", "minimum": least, "maximum": LARGEST_INTEGER}
    return _field(default, f"an integer of at least {least}", accept, schema, optional)


def number(
    default: Any = dataclasses.MISSING,
    *,
    least: float = -math.inf,
    most: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> Any:
    """A field that holds a finite number that float32 can express.

    Args:
      default: the field's default value; without it, the field must be given.
      least: the smallest permitted value.
      most: the largest permitted value.
      above: a bound; only larger values are permitted.
      below: a bound; only smaller values are permitted.
      optional: True permits None too.
    """

    def accept(value: Any) -> Any:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            return _REFUSED
        value = value if isinstance(value, int) else float(value)
        inside = least <= value <= most and above < value < below and abs(value) <= _LARGEST_FLOAT32
        return value if inside else _REFUSED

    if min(most, below) < math.inf:
        low = f"[{least:g}" if least > -math.inf else f"({above:g}"
        expected = f"a number in {low}, {f'{most:g}]' if most < math.inf else f'{below:g})'}"
    elif least > -math.inf:
        expected = f"a number of at least {least:g}"
    else:
        expected = "a finite number" if above == -math.inf else f"a number above {above:g}"
    schema = {
        "type": "number",
        **_bound("minimum", max(least, -_LARGEST_FLOAT32), "exclusiveMinimum", above),
        **_bound("maximum", min(most, _LARGEST_FLOAT32), "exclusiveMaximum", below),
    }
    return _field(default, expected, accept, schema, optional)


def flag(default: bool) -> Any:
    """A field that holds True or False.

    Args:
      default: the field's default value.
    """
    return _field(
        default,
        "True or False",
        lambda value: value if isinstance(value, bool) else _REFUSED,
        {"type": "boolean"},
    )


def text(default: Any = dataclasses.MISSING, *, optional: bool = False) -> Any:
    """A field that holds a string that is not empty.

    Args:
      default: the field's default value; without it, the field must be given.
      optional: True permits None too.
    """
    return _field(
        default,
        "a string that is not empty",
        lambda value: value if isinstance(value, str) and value else _REFUSED,
        {"type": "string", "minLength": 1},
        optional,
    )


def names(default: Any, *, optional: bool = False) -> Any:
    """A field that holds a string or several strings; a list becomes a tuple.

    Args:
      default: the field's default value.
      optional: True permits None too.
    """

    def accept(value: Any) -> Any:
        if isinstance(value, str):
            return value
        several = isinstance(value, Iterable) and not isinstance(value, Mapping | bytes)
        found = tuple(value) if several else (None,)
        return found if all(isinstance(name, str) for name in found) else _REFUSED

    schema = {"type": ["string", "array"], "items": {"type": "string"}}
    return _field(default, "a string or a list of strings", accept, schema, optional)


def integers(default: Any = dataclasses.MISSING, *, least: int) -> Any:
    """A field that holds several integers; a list becomes a tuple.

    Args:
      default: the field's default value; without it, the field must be given.
      least: the smallest permitted value.
    """

    def is_integer(value: Any) -> bool:
        integral = isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return integral and least <= value <= LARGEST_INTEGER

    def accept(value: Any) -> Any:
        several = isinstance(value, Iterable) and not isinstance(value, Mapping | str | bytes)
        found = tuple(value) if several else (None,)
        return tuple(map(int, found)) if all(map(is_integer, found)) else _REFUSED

    items = {"type": "integer", "minimum": least, "maximum": LARGEST_INTEGER}
    schema = {"type": "array", "items": items}
    return _field(default, f"a list of integers of at least {least}", accept, schema)


def by_name(default: Any = (), *, rule: Any) -> Any:
    """A field that holds values by name. A mapping becomes a tuple of pairs, in its order.

    Args:
      default: the field's default value, a tuple of pairs.
      rule: a field from `integer`, `number` or `text` that holds one of the values.
    """
    of_value: _Rule = rule.metadata[_RULE]

    def accept(value: Any) -> Any:
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            return _REFUSED
        pairs = list(value.items() if isinstance(value, Mapping) else value)
        found = []
        for pair in pairs:
            if isinstance(pair, str) or not isinstance(pair, Sequence) or len(pair) != 2:
                return _REFUSED
            name, own = pair
            accepted = of_value.accept(own)
            if not isinstance(name, str) or accepted is _REFUSED:
                return _REFUSED
            found.append((name, accepted))
        return tuple(found)

    schema = {"type": "object", "additionalProperties": of_value.schema}
    return _field(default, f"a mapping from names to {of_value.expected}", accept, schema)


def choice(default: Any, known: Sequence[str | None], pattern: str = "", in_words: str = "") -> Any:
    """A field that holds one of several strings.

    Args:
      default: the field's default value.
      known: the permitted values.
      pattern: regular expression of further permitted values, which match it as a whole; empty if
        there are none.
      in_words: these values as error messages name them.
    """

    def accept(value: Any) -> Any:
        is_known = isinstance(value, str | None) and value in known
        if not is_known and pattern and isinstance(value, str):
            is_known = re.fullmatch(pattern, value) is not None
        return value if is_known else _REFUSED

    expected = f"one of {', '.join(map(repr, known))}"
    if not pattern:
        return _field(default, expected, accept, {"enum": list(known)})
    expected = f"{expected}, {in_words}"
    whole = f"^(?:{'|'.join([*map(re.escape, filter(None, known)), pattern])})$"
    # The examples are for editors, and for hints at misspelt values.
    examples = list(filter(None, known))
    schema = {"type": "string", "pattern": whole, "examples": examples, "$comment": expected}
    return _field(default, expected, accept, schema)


def check_fields(specification: Any, error: Callable[[str], Exception] = ValueError) -> None:
    """Checks every field that a function of this module made, and replaces numbers of NumPy by
    numbers of Python.

    Args:
      specification: an instance of a frozen dataclass.
      error: function that makes the exception from its message.

    Raises:
      Exception: a field holds a value that it may not hold; the exception is made by `error`. The
        message names the field, the permitted values and the value.
    """
    for field in dataclasses.fields(specification):
        if (rule := field.metadata.get(_RULE)) is None:
            continue
        value = getattr(specification, field.name)
        accepted = rule.accept(value)
        if accepted is _REFUSED:
            if isinstance(value, int) and value > LARGEST_INTEGER:
                raise error(f"{field.name} should be at most 2^53 - 1, found a larger number")
            raise error(f"{field.name} should be {rule.expected}, found {value!r}")
        object.__setattr__(specification, field.name, accepted)


def field_schema(field: dataclasses.Field) -> dict[str, Any] | None:
    """The values that a field may hold, as JSON Schema: one type or a list of types, with bounds,
    or an enumeration. None for a field that no function of this module made.

    Args:
      field: a field of a specification, from `dataclasses.fields`.
    """
    rule = field.metadata.get(_RULE)
    return None if rule is None else dict(rule.schema)


def _bound(including: str, bound: float, excluding: str, excluded: float) -> dict[str, float]:
    """One side of an interval, as JSON Schema. An infinite bound excludes nothing."""
    return {including: bound} if math.isinf(excluded) else {excluding: excluded}


def _field(
    default: Any,
    expected: str,
    accept: Callable[[Any], Any],
    schema: dict[str, Any],
    optional: bool = False,
) -> Any:
    rule = _Rule(expected, accept, schema)
    if optional:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        rule = _Rule(
            f"{expected} or None",
            lambda value: None if value is None else accept(value),
            schema | {"type": [*types, "null"]},
        )
    return dataclasses.field(default=default, metadata={_RULE: rule})
