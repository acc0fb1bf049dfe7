"""Specifications such as `Task`, `LoRA` and `AdamW` are frozen dataclasses that pydantic checks.

The annotation of a field says what it may hold: `Count`, `Literal["a", "b"]`, or
`Annotated[float, Field(gt=0), EXACT]`. Numbers of NumPy are accepted like those of Python and
become numbers of Python. A bool is not a number, and a string is neither a number nor a bool.
"""

import copy
import functools
import inspect
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, dataclass_transform, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import core_schema

# JSON of other programs holds integers as float64, which is exact up to this one.
LARGEST_INTEGER = 2**53 - 1

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_VALUES = TypeVar("_VALUES")


class _Exact:
    """Marks an int as one that JSON holds exactly, or a float as one that float32 can express. An
    integer in place of a float stays an integer."""

    def __get_pydantic_core_schema__(self, source, handler):
        number = handler(source)
        number["strict"] = True
        is_integer = number["type"] == "int"
        largest = LARGEST_INTEGER if is_integer else _LARGEST_FLOAT32
        if not {"le", "lt"} & number.keys():
            number["le"] = largest
        if not {"ge", "gt"} & number.keys():
            number["ge"] = -largest
        if not is_integer:
            number["allow_inf_nan"] = False
        check = _checked_integer if is_integer else _checked_number
        return core_schema.no_info_wrap_validator_function(check, number)


class _ByName:
    """Describes pairs of names and values as a JSON object."""

    def __get_pydantic_json_schema__(self, schema, handler):
        _, values = handler(schema)["items"]["prefixItems"]
        return {"type": "object", "additionalProperties": values}


def _checked_integer(value: Any, check: Callable[[Any], int]) -> int:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return check(int(value) if is_integer else value)


def _checked_number(value: Any, check: Callable[[Any], float]) -> float:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        # pydantic would take what has `__float__`.
        return check(None)
    value = value if isinstance(value, int) else float(value)
    # pydantic would make a float of an integer.
    check(value)
    return value


def _any_characters(text: Any, check: Callable[[Any], Any]) -> Any:
    # Names of files may hold bytes that are no UTF-8, which pydantic refuses.
    check(text.encode(errors="replace").decode() if isinstance(text, str) else text)
    return text


def _tuple(value: Any) -> Any:
    several = isinstance(value, Iterable) and not isinstance(value, Mapping | str | bytes)
    return tuple(value) if several else value


def _pairs(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    pairs = _tuple(value)
    if isinstance(pairs, tuple):
        pairs = tuple(
            tuple(pair) if isinstance(pair, Sequence) and not isinstance(pair, str) else pair
            for pair in pairs
        )
    return pairs


EXACT = _Exact()
Count = Annotated[int, Field(ge=1), EXACT]
Natural = Annotated[int, Field(ge=0), EXACT]
Number = Annotated[float, EXACT]
Positive = Annotated[float, Field(gt=0), EXACT]
AnyText = Annotated[str, WrapValidator(_any_characters)]
Text = Annotated[str, Field(min_length=1), WrapValidator(_any_characters)]
PathText = Annotated[
    Text, BeforeValidator(lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path)
]
# Several values: a list becomes a tuple.
Names = Annotated[AnyText | tuple[AnyText, ...], BeforeValidator(_tuple)]
Naturals = Annotated[tuple[Natural, ...], BeforeValidator(_tuple)]
# Values by name: a mapping becomes a tuple of pairs, in its order.
ByName = Annotated[tuple[tuple[AnyText, _VALUES], ...], BeforeValidator(_pairs), _ByName()]


@dataclass_transform(frozen_default=True)
def checked_dataclass(cls: Any = None, *, kw_only: bool = False) -> Any:
    """Makes a class a frozen dataclass whose fields pydantic checks.

    A field that holds another value raises the exception that the method `_error` of the class
    makes from a message, or ValueError without such a method. The message names the field, the
    permitted values and the value.

    Args:
      cls: the class. Its `__post_init__` may check what ties several fields, and raise ValueError.
      kw_only: True permits no positional arguments.
    """
    if cls is None:
        return lambda cls: checked_dataclass(cls, kw_only=kw_only)
    config = {"strict": True, "extra": "forbid"}
    made: Any = pydantic_dataclass(frozen=True, kw_only=kw_only, config=config)(cls)
    checked = made.__init__

    def init(self, *args, **kwargs):
        try:
            checked(self, *args, **kwargs)
        except ValidationError as e:
            _refuse(self, e, args, kwargs)

    signature = inspect.signature(made)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # gin, for one, looks for the names of parameters here.
    init.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    init.__qualname__ = checked.__qualname__
    made.__init__ = init
    return made


def _refuse(made: Any, error: ValidationError, args: Any, kwargs: Any) -> NoReturn:
    """Raises the first fault that pydantic found, as an exception of one line."""
    cls, faults = type(made), error.errors(include_url=False)
    signature = inspect.signature(cls)
    try:
        arguments = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as e:
        raise TypeError(f"{cls.__name__}.__init__() {e}") from None
    missing = [f["loc"][0] for f in faults if f["type"] == "missing" and len(f["loc"]) == 1]
    if missing:
        names = ", ".join(map(repr, missing))
        raise TypeError(f"{cls.__name__}.__init__() missing required arguments: {names}") from None
    # `_error` names a specification by what it was to hold.
    vars(made).update(arguments)
    error_of = getattr(made, "_error", ValueError)
    if reason := faults[0].get("ctx", {}).get("error"):
        raise (error_of(str(reason)) if type(reason) is ValueError else reason) from None
    # pydantic numbers arguments that are given by position.
    name = faults[0]["loc"][0]
    name = [*signature.parameters][name] if isinstance(name, int) else name
    schema, value = field_schema(cls, name), arguments[name]
    if isinstance(value, int) and value > LARGEST_INTEGER and "$comment" not in schema:
        raise error_of(f"{name} should be at most 2^53 - 1, found a larger number") from None
    raise error_of(f"{name} should be {in_words(schema)}, found {value!r}") from None


def field_schema(cls: type, name: str) -> dict[str, Any]:
    """The values that a field of a specification may hold, as JSON Schema.

    Args:
      cls: the class of the specification.
      name: name of the field.
    """
    return copy.deepcopy(_field_schema(cls, name))


# Building a `TypeAdapter` takes most of the time in which a specification is read.
@functools.cache
def _field_schema(cls: type, name: str) -> dict[str, Any]:
    return TypeAdapter(get_type_hints(cls, include_extras=True)[name]).json_schema()


@functools.cache
def fields_by_name(cls: type) -> frozenset[str]:
    """The fields of a specification that hold values by name (`ByName`)."""
    hints = get_type_hints(cls, include_extras=True)
    return frozenset(
        name
        for name, hint in hints.items()
        if any(isinstance(mark, _ByName) for mark in getattr(hint, "__metadata__", ()))
    )


def in_words(schema: Mapping[str, Any]) -> str:
    """The values that a JSON Schema of one field permits, in words, as they follow "should be".

    Args:
      schema: the schema; its "$comment" stands for what it permits.
    """
    if told := schema.get("$comment"):
        return told
    if "anyOf" in schema:
        return " or ".join(map(in_words, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return f"one of {', '.join(map(repr, known))}"
    match schema.get("type"):
        case "null":
            return "None"
        case "boolean":
            return "True or False"
        case "integer":
            below = schema.get("exclusiveMaximum")
            return (
                f"an integer of at least {schema['minimum']}{f' and below {below}' * bool(below)}"
            )
        case "number":
            return _number_in_words(schema)
        case "array":
            return f"a list of {_plural(in_words(schema['items']))}"
        case "object":
            return f"a mapping from names to {in_words(schema['additionalProperties'])}"
    return "a string that is not empty" if schema.get("minLength") else "a string"


def _plural(words: str) -> str:
    kind, _, limits = words.partition(" ")[2].partition(" ")
    return f"{kind}s {limits}".rstrip()


def _number_in_words(schema: Mapping[str, Any]) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if below is None and most == _LARGEST_FLOAT32:
        if above is not None:
            return f"a number above {above:g}"
        return "a finite number" if least == -most else f"a number of at least {least:g}"
    low = f"({above:g}" if above is not None else f"[{least:g}"
    return f"a number in {low}, {f'{most:g}]' if below is None else f'{below:g})'}"
