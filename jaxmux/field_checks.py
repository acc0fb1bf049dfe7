"""Specifications such as `Task`, `LoRA` and `AdamW` are frozen dataclasses that pydantic checks.

The annotation of a field says what it may hold: `Count`, `Literal["a", "b"]`, or
`Annotated[float, Field(gt=0), EXACT]`. Numbers of NumPy are accepted like those of Python and
become numbers of Python. A bool is not a number, and a string is neither a number nor a bool.

`why_left_out` explains names of Hugging Face PEFT that jaxmux does not have, for error messages.
"""

import dataclasses
import functools
import inspect
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NoReturn, TypeVar, dataclass_transform, get_type_hints

from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WrapValidator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ArgsKwargs, core_schema

# The key of a JSON object that names the class of an adapter or an optimizer.
KIND = "kind"
# JSON of other programs holds integers as float64, which is exact up to this one.
LARGEST_INTEGER = 2**53 - 1

_LARGEST_FLOAT32 = (2 - 2**-23) * 2.0**127
_VALUES = TypeVar("_VALUES")
# By name in small letters and digits, the usual spelling of the name and the reason.
_LEFT_OUT = {
    "boft": ("BOFT", "its butterfly factors would need a product of their own for every linear"),
    "oft": ("OFT", "its rotations give linears that read the same input different inputs"),
    "prefixtuning": (
        "prefix tuning",
        "it trains worse than prompts and low-rank adapters; take PromptTuning or LoRA",
    ),
    "modulestosave": (
        "modules_to_save",
        "it would be a whole copy for each task; train some rows of the embedding "
        "(`trained_tokens`) or low-rank adapters of the tables (`target_modules`)",
    ),
    "loftq": (
        "LoftQ",
        "it quantises the backbone anew for every adapter, and here all tasks share one",
    ),
    "loraga": (
        "LoRA-GA",
        "it begins with the gradients of whole weights; take 'eva', which begins with the task's "
        "data too",
    ),
    "corda": (
        "CorDA",
        "it begins with the inverted covariances of all inputs; take 'eva', which begins with the "
        "task's data too",
    ),
}


class _Exact:
    """Restricts an int to those that JSON holds exactly, or a float to those that float32 can
    express. An integer in a field for floats stays an integer."""

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
        # pydantic would write 3 as 3.0 in a field for floats.
        as_it_is = core_schema.simple_ser_schema("any")
        return core_schema.no_info_wrap_validator_function(check, number, serialization=as_it_is)


class _ByName:
    """Describes pairs of names and values as a JSON object."""

    def __get_pydantic_json_schema__(self, schema, handler):
        _, values = handler(schema)["items"]["prefixItems"]
        return {"type": "object", "additionalProperties": values}


@dataclasses.dataclass(frozen=True)
class Part:
    """Marks a field that holds a specification of one of several classes.

    A JSON object stands for a specification only where `from_object` reads it. If there are several
    classes, its "kind" names the class.

    Attributes:
      classes: the classes, by kind. The mapping may grow. The key of a class without a kind is "".
      words: the permitted values in words, as they follow "should be".
      short: the field of the class for which a string is short, as a path is for `Source(path)`;
        empty if there is none.
      several: whether the field may hold a list of specifications too.
      optional: whether the field may be None.
      base: class of which the field may hold other subclasses too, which have no JSON but a `kind`;
        None if there is none.
    """

    classes: Mapping[str, type]
    words: str = ""
    short: str = ""
    several: bool = False
    optional: bool = False
    base: type | None = None

    def __get_pydantic_core_schema__(self, source, handler):
        written = core_schema.plain_serializer_function_ser_schema(self.to_object)
        return core_schema.with_info_plain_validator_function(self._checked, serialization=written)

    def __get_pydantic_json_schema__(self, schema, handler):
        return {"$comment": self.words}

    def to_object(self, value: Any) -> Any:
        """The value of the field as JSON: an object with every field, a list of them, or None."""
        if value is None or isinstance(value, tuple):
            return value and [self.to_object(part) for part in value]
        kind = next((kind for kind, cls in self.classes.items() if type(value) is cls), "")
        if self.base and not kind:
            kind = value.kind
        return ({KIND: kind} if kind else {}) | to_object(value)

    def class_of(self, fields: Mapping[str, Any]) -> type | None:
        """The class of the specification for which a JSON object stands; None if its kind is
        unknown or missing."""
        kind = "" if "" in self.classes else fields.get(KIND)
        return self.classes.get(kind) if isinstance(kind, str) else None

    def _checked(self, value: Any, info: ValidationInfo) -> Any:
        if self.several and isinstance(value, list | tuple) and value:
            return tuple(self._checked_one(part, info) for part in value)
        return None if self.optional and value is None else self._checked_one(value, info)

    def _checked_one(self, value: Any, info: ValidationInfo) -> Any:
        if self.short and isinstance(value, str | os.PathLike):
            return self.classes[""](**{self.short: value})
        if info.context == _OBJECTS and isinstance(value, dict) and (cls := self.class_of(value)):
            has_kind = "" not in self.classes
            return from_object(cls, {k: v for k, v in value.items() if not has_kind or k != KIND})
        if isinstance(value, (*self.classes.values(), *filter(None, [self.base]))):
            return value
        hint = "; write it with parentheses" if isinstance(value, type) else ""
        if reason := why_left_out(getattr(value, "__name__", value)):
            hint = f"; {reason}"
        names = ", ".join(sorted(cls.__name__ for cls in self.classes.values()))
        words = self.words or f"a specification ({names})"
        raise ValueError(f"{info.field_name} should be {words}, found {value!r}{hint}")


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule on which fields of a specification may be set together. A field is set if its value is
    not the default. At most one of `fields` may be set, unless `needed_by` is given.

    Attributes:
      message: what is wrong with a specification that breaks the rule.
      fields: names of fields.
      required: whether one of two fields must be set.
      needed_by: a field that may be set only if one of `fields` is set.
    """

    message: str
    fields: tuple[str, ...]
    required: bool = False
    needed_by: str = ""

    def refusal(self, specification: Any) -> str | None:
        """The message if a specification breaks the rule, else None."""
        defaults = _defaults(type(specification))

        def is_set(name: str) -> bool:
            return getattr(specification, name) != defaults[name]

        count = sum(map(is_set, self.fields))
        if self.needed_by:
            return self.message if is_set(self.needed_by) and not count else None
        if self.required and count != 1:
            return f"{self.message}; found {'both' if count else 'neither'}"
        return self.message if count > 1 else None

    def json_schema(self, cls: type) -> dict[str, Any]:
        """The rule as JSON Schema of the class's objects."""
        defaults = _defaults(cls)

        def is_set(name: str) -> dict[str, Any]:
            default = defaults[name]
            other = {"not": {"const": list(default) if isinstance(default, tuple) else default}}
            return {"properties": {name: other}, "required": [name]}

        sets = [is_set(name) for name in self.fields]
        if self.needed_by:
            return {"if": is_set(self.needed_by), "then": {"anyOf": sets}}
        return {"oneOf": sets if self.required else [{"not": {"anyOf": sets}}, *sets]}


def _defaults(cls: type) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


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


def _pairs(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, Mapping):
        return tuple(value.items())
    if info.context == _OBJECTS:
        return value
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
# The context in which pydantic takes JSON objects for specifications.
_OBJECTS = "objects"
# Several values: a list becomes a tuple.
Names = Annotated[AnyText | tuple[AnyText, ...], BeforeValidator(_tuple)]
Naturals = Annotated[tuple[Natural, ...], BeforeValidator(_tuple)]
# Values by name: a mapping becomes a tuple of pairs, in its order.
ByName = Annotated[
    tuple[tuple[AnyText, _VALUES], ...], BeforeValidator(_pairs), _ByName(), PlainSerializer(dict)
]


@dataclass_transform(frozen_default=True)
def checked_dataclass(cls: Any = None, *, kw_only: bool = False, rules: Sequence[Rule] = ()) -> Any:
    """Makes a class a frozen dataclass whose fields pydantic checks.

    If a field gets a value that is not permitted, the exception is the one that the method `_error`
    of the class makes from a message, or ValueError if the class has no such method. The message
    names the field, the permitted values and the value found.

    Args:
      cls: the class. Its `__post_init__` may check fields against each other and raise ValueError.
      kw_only: True permits no positional arguments.
      rules: rules on which fields may be set together. They are checked before `__post_init__`
        runs, and are a part of the JSON Schema of the class.
    """
    if cls is None:
        return lambda cls: checked_dataclass(cls, kw_only=kw_only, rules=rules)
    if rules:
        _check_rules_first(cls, rules)
    config = {"strict": True, "extra": "forbid"}
    made: Any = pydantic_dataclass(frozen=True, kw_only=kw_only, config=config)(cls)
    made.rules = tuple(rules)

    def init(self, *args, **kwargs):
        try:
            _fill(self, ArgsKwargs(args, kwargs))
        except ValidationError as e:
            _refuse(self, e, args, kwargs)

    signature = inspect.signature(made)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # gin, for one, looks for the names of parameters here.
    init.__signature__ = signature.replace(parameters=[itself, *signature.parameters.values()])
    init.__qualname__ = f"{made.__qualname__}.__init__"
    made.__init__ = init
    return made


def _check_rules_first(cls: Any, rules: Sequence[Rule]) -> None:
    check_others = getattr(cls, "__post_init__", lambda self: None)

    def check(self):
        for rule in rules:
            if problem := rule.refusal(self):
                raise getattr(self, "_error", ValueError)(problem)
        check_others(self)

    cls.__post_init__ = check


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
    # `_error` may name the specification by its values.
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


def _fill(specification: Any, arguments: ArgsKwargs, context: str | None = None) -> None:
    validator = type(specification).__pydantic_validator__
    validator.validate_python(arguments, self_instance=specification, context=context)


def from_object(cls: type, fields: Mapping[str, Any]) -> Any:
    """Makes a specification from a JSON object, in which further objects stand for its parts (see
    `Part`).

    Args:
      cls: the class of the specification.
      fields: the values by name of the field.

    Raises:
      pydantic.ValidationError: a key is unknown or missing, or a value is refused. The location of
        a fault consists of the keys of the nested objects.
    """
    if not hasattr(cls, "__pydantic_validator__"):
        # An adapter kind of another program may have a plain dataclass.
        kind = "unexpected_keyword_argument"
        unknown = [key for key in fields if key not in _defaults(cls)]
        if faults := [{"type": kind, "loc": (key,), "input": fields[key]} for key in unknown]:
            raise ValidationError.from_exception_data(cls.__name__, faults)
        return _adapter(cls).validate_python(dict(fields))
    specification = cls.__new__(cls)
    _fill(specification, ArgsKwargs((), dict(fields)), context=_OBJECTS)
    return specification


def to_object(specification: Any) -> dict[str, Any]:
    """A specification as a JSON object with every field, defaults included."""
    return _adapter(type(specification)).dump_python(specification, mode="json")


@functools.cache
def _adapter(cls: type) -> TypeAdapter:
    return TypeAdapter(cls)


@functools.cache
def parts_of(cls: type) -> Mapping[str, Part]:
    """The fields of a specification that hold other specifications."""
    hints = get_type_hints(cls, include_extras=True)
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {n: mark for n, each in marks.items() for mark in each if isinstance(mark, Part)}


# Building a `TypeAdapter` takes most of the time in which a specification is read.
@functools.cache
def field_schema(cls: type, name: str) -> dict[str, Any]:
    """Returns the values that a field of a specification may hold, as JSON Schema. Callers must not
    change the result."""
    return TypeAdapter(get_type_hints(cls, include_extras=True)[name]).json_schema()


def in_words(schema: Mapping[str, Any], show: Callable[[Any], str] = repr) -> str:
    """Describes the values that the JSON Schema of a field permits, in words after "should be".

    Args:
      schema: the schema; if it has a "$comment", that is the description.
      show: writes a single value.
    """
    if words := schema.get("$comment"):
        return words
    if "anyOf" in schema:
        return " or ".join(in_words(each, show) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return f"one of {', '.join(map(show, known))}"
    match schema.get("type"):
        case "null":
            return show(None)
        case "boolean":
            return f"{show(True)} or {show(False)}"
        case "integer":
            words = {"minimum": "of at least", "maximum": "of at most", "exclusiveMaximum": "below"}
            bounds = [f"{words[key]} {schema[key]}" for key in words if key in schema]
            bounds = [each for each in bounds if each != f"of at most {LARGEST_INTEGER}"]
            return " ".join(["an integer", " and ".join(bounds)]).rstrip()
        case "number":
            return _number_in_words(schema)
        case "array" if "enum" in schema["items"]:
            return "a list of them"
        case "array":
            return f"a list of {_plural(in_words(schema['items'], show))}"
        case "object":
            return f"a mapping from names to {in_words(schema['additionalProperties'], show)}"
    return "a string that is not empty" if schema.get("minLength") else "a string"


def _plural(words: str) -> str:
    return re.sub(r"(number|integer|string|object)", r"\1s", words.partition(" ")[2], count=1)


def _number_in_words(schema: Mapping[str, Any]) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if below is None and most == _LARGEST_FLOAT32:
        if above is not None:
            return f"a number above {above:g}"
        return "a finite number" if least == -most else f"a number of at least {least:g}"
    low = f"({above:g}" if above is not None else f"[{least:g}"
    return f"a number in {low}, {f'{most:g}]' if below is None else f'{below:g})'}"


def why_left_out(name: object) -> str:
    """Returns the reason why jaxmux leaves out an adapter or an initialisation, as in "OFT is left
    out: its rotations …". The text is empty for other names and for values that are not texts.

    Args:
      name: a name in any spelling, such as "OFT", "OFTConfig", "prefix_tuning" or "lora_ga".
    """
    if not isinstance(name, str):
        return ""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()).removesuffix("config")
    if plain not in _LEFT_OUT:
        return ""
    written, reason = _LEFT_OUT[plain]
    return f"{written} is left out: {reason}"
