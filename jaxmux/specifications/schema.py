"""The JSON Schema of tasks and of the files of a watched folder, for editors and for programs that
write specifications.

The rules that tie several fields stand here as JSON Schema; the classes check them in Python, with
messages of their own. A test compares both on random specifications.
"""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from jaxmux.data import Source
from jaxmux.data.forms import REQUIRED_FIELDS, fields_of
from jaxmux.field_checks import EXACT, checked_dataclass
from jaxmux.peft import SPECIFICATIONS, DoRA, LoRA, PromptTuning
from jaxmux.peft.lora import ZERO_PRODUCTS
from jaxmux.peft.targets import TABLES
from jaxmux.tasks import Task, TaskError

from .fields import (
    CALIBRATED,
    KIND,
    PARTS,
    Part,
    part_to_json,
    refused_default,
    required_fields,
    to_json,
    value_schema,
)
from .limits import SpecificationLimits, TenantLimits
from .reading import name_of_specification, task_from_fields
from .strict_json import parse_object, refusal, shown

_Schema = dict[str, Any]
_NO_TABLES = {"not": {"enum": sorted(TABLES)}, "items": {"not": {"enum": sorted(TABLES)}}}


def rules(cls: type, limits: SpecificationLimits) -> list[_Schema]:
    """The rules of a class, all of which its specifications have to keep.

    One rule is left out, because JSON Schema does not multiply: `eva_rho` times `rank` may not
    exceed the largest rank.

    Args:
      cls: the class of a specification.
      limits: the largest values.
    """
    found = []
    if issubclass(cls, Task):
        found += _of_task()
    if issubclass(cls, Source):
        found += [{"anyOf": [_columns_of(form) for form in REQUIRED_FIELDS]}]
    if issubclass(cls, LoRA):
        found += _of_lora(limits)
    if issubclass(cls, DoRA):
        found += [{"properties": {"target_modules": _NO_TABLES}}]
    if issubclass(cls, PromptTuning):
        found += _at_most_one(
            _given("start", {"not": {"const": "vocabulary"}}),
            _has_value("start_text"),
            _given("start_tokens", {"minItems": 1}),
        )
    if cls in CALIBRATED and refused_default(cls, "calibration_tokens", limits):
        field, value = CALIBRATED[cls]
        found += [_if(_given(field, {"const": value}), {"required": ["calibration_tokens"]})]
    return found


def _of_task() -> list[_Schema]:
    low_rank = {
        KIND: {"enum": [kind for kind, own in SPECIFICATIONS.items() if issubclass(own, LoRA)]}
    }
    held_out = [_has_value("eval_data"), _has_value("validation_fraction")]
    return [
        _if(_has_value("resume_from"), {"properties": {"adapter": {"properties": low_rank}}}),
        {"oneOf": [_has_value("epochs"), _has_value("steps")]},
        *_at_most_one(*held_out),
        _if(_has_value("eval_every"), {"anyOf": held_out}),
        _if(_has_value("patience"), _has_value("eval_every")),
        _if(_given("keep_best", {"const": True}), _has_value("eval_every")),
        _if(_has_value("validation_seed"), _has_value("validation_fraction")),
    ]


def _columns_of(form: str) -> _Schema:
    """Sources that may have this form, with columns for its fields only."""
    columns = {"propertyNames": {"enum": list(fields_of(form))}}
    return {"properties": {"form": {"enum": ["auto", form]}, "columns": columns}}


def _of_lora(limits: SpecificationLimits) -> list[_Schema]:
    def ranks(of_each: _Schema) -> _Schema:
        return {"rank": of_each, "rank_pattern": {"additionalProperties": of_each}}

    positive = {"exclusiveMinimum": 0}
    no_tables = {"properties": {"target_modules": _NO_TABLES}}
    begins_at_weight = {
        "properties": {
            "dropout": {"const": 0},
            "alpha": positive,
            "alpha_pattern": {"additionalProperties": positive},
            "trained_tokens": {"maxItems": 0},
            "target_modules": _NO_TABLES,
            # The arrays have twice the rank.
            **ranks({"maximum": limits.rank // 2}),
        },
        "required": ["rank"] if 2 * LoRA().rank > limits.rank else [],
    }
    eva = {"properties": {"rank_pattern": {"maxProperties": 0}, "target_modules": _NO_TABLES}}
    even = {"properties": ranks({"multipleOf": 2})}
    return [
        _if(_given("initialisation", {"not": {"enum": list(ZERO_PRODUCTS)}}), begins_at_weight),
        _if(_given("initialisation", {"const": "eva"}), eva),
        _if(_given("initialisation", {"const": "orthogonal"}), even),
        _if(_given("trained_tokens", {"minItems": 1}), no_tables),
    ]


def _given(field: str, schema: _Schema) -> _Schema:
    """A field is given and has such a value."""
    return {"properties": {field: schema}, "required": [field]}


def _has_value(field: str) -> _Schema:
    return _given(field, {"not": {"type": "null"}})


def _if(condition: _Schema, then: _Schema) -> _Schema:
    return {"if": condition, "then": then}


def _at_most_one(*conditions: _Schema) -> list[_Schema]:
    pairs = [(a, b) for i, a in enumerate(conditions) for b in conditions[i + 1 :]]
    return [{"not": {"allOf": list(pair)}} for pair in pairs]


_DRAFT = "https://json-schema.org/draft/2020-12/schema"
# These fields accept less than the attributes of their classes say.
_OWN_DESCRIPTIONS = {
    "path": "a .jsonl or .json file with one JSON object per line, relative to the tenant's folder "
    "and inside it.",
    "split": 'only "train", because files have no splits.',
    "target_modules": 'the linears that are adapted: "all-linear", one module name ("q_proj"), or '
    "a list of names, which the full names equal or end with. LoRA also takes the embedding and "
    'the head, "embed_tokens" and "lm_head". Regular expressions are refused.',
}


def task_schema(limits: SpecificationLimits | None = None) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the specifications that `task_from_json` accepts.

    It is made from the fields of `Task` and of its parts: their checks, defaults and descriptions.
    docs/task_files.md lists what it cannot express.

    Args:
      limits: the largest values; None for the defaults of `SpecificationLimits`.
    """
    limits = limits or SpecificationLimits()
    parts = {cls.__name__: (kind, cls) for part in PARTS.values() for kind, cls in _of(part)}
    return {
        "$schema": _DRAFT,
        "title": "A fine-tuning task of jaxmux",
        "description": "Where a description says None, True or False, write null, true or false.",
        **_object(Task, "", limits),
        "$defs": {name: _object(cls, kind, limits) for name, (kind, cls) in sorted(parts.items())},
    }


def _of(part: Part) -> list[tuple[str, type]]:
    return list(part.classes.items())


def _object(cls: type, kind: str, limits: SpecificationLimits) -> dict[str, Any]:
    """The schema of a specification, with its kind if it has one."""
    descriptions = _descriptions(cls)
    properties: dict[str, Any] = {KIND: {"const": kind}} if kind else {}
    needed = list(required_fields(cls, limits))
    for field in dataclasses.fields(cls):
        part = PARTS.get(field.name)
        schema = _part(part, field, limits) if part else value_schema(cls, field.name, limits)
        if field.name not in needed and field.default is not dataclasses.MISSING:
            is_part = dataclasses.is_dataclass(field.default)
            default = part_to_json(field.name, field.default) if is_part else field.default
            schema["default"] = dict(default) if schema.get("type") == "object" else default
        schema["description"] = _OWN_DESCRIPTIONS.get(field.name, descriptions[field.name])
        properties[field.name] = schema
    return {
        "type": "object",
        "properties": properties,
        "required": [*([KIND] if kind else []), *needed],
        "additionalProperties": False,
        **({"allOf": tied} if (tied := rules(cls, limits)) else {}),
    }


def _part(part: Part, field: dataclasses.Field, limits: SpecificationLimits) -> dict[str, Any]:
    schemas = [{"$ref": f"#/$defs/{cls.__name__}"} for _, cls in _of(part)]
    if part.short:
        ((_, cls),) = _of(part)
        schemas.append(value_schema(cls, part.short, limits))
    if field.default is None:
        schemas.append({"type": "null"})
    return {"oneOf": schemas} if len(schemas) > 1 else schemas[0]


def _descriptions(cls: type) -> dict[str, str]:
    """The descriptions of a class's attributes, from its docstring or that of the class from which
    it has them."""
    docs = [own.__doc__ for own in cls.__mro__ if "Attributes:\n" in (own.__doc__ or "")]
    _, _, attributes = (docs or [""])[0].partition("Attributes:\n")
    attributes = textwrap.dedent(attributes.partition("\n\n")[0])
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}


_LOWEST_PRIORITY = -100
_DESCRIPTIONS = {
    "priority": "tasks of higher numbers are trained first. It may change at any time.",
    "paused": "whether the task gives up its place, or does not take one, until this becomes "
    "false. It may change at any time.",
}


@checked_dataclass
class WatchedSpecification:
    """What a file of a watched directory asks for.

    Attributes:
      task: the task, with paths relative to the tenant's folder.
      priority: tasks of higher numbers go first.
      paused: whether the task is not to be trained for the time being.
    """

    task: SkipValidation[Task]
    priority: Annotated[int, Field(ge=_LOWEST_PRIORITY), EXACT] = 0
    paused: bool = False


def watched_specification(data: bytes, name: str, limits: TenantLimits) -> WatchedSpecification:
    """Reads the content of a file of a watched directory. The files of the task are not looked at.

    Args:
      data: the content of the file.
      name: the name of the file without ".json".
      limits: the most that it may ask for.

    Raises:
      TaskError: it is refused. The message names the file and the key at fault.
    """
    where = name_of_specification(name)
    try:
        fields = parse_object(data, limits.specification_bytes)
    except ValueError as e:
        raise TaskError(f"{where}: {e}") from None
    own = {key: fields.pop(key) for key in _DESCRIPTIONS if key in fields}
    for key, value in own.items():
        if problem := refusal(value, _schema_of(key, limits)):
            raise TaskError(f"{where}: {key} {problem}")
    return WatchedSpecification(task_from_fields(fields, name, limits, _DESCRIPTIONS), **own)


def watched_schema(limits: TenantLimits | None = None) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the files of a watched directory: that of `task_schema`,
    with the keys for scheduling.

    Args:
      limits: the largest values; None for the defaults of `TenantLimits`.
    """
    limits = limits or TenantLimits()
    schema = task_schema(limits)
    schema["title"] = "A task of a directory that jaxmux watches"
    defaults = {field.name: field.default for field in dataclasses.fields(WatchedSpecification)}
    for key, description in _DESCRIPTIONS.items():
        own = {"default": defaults[key], "description": description}
        schema["properties"][key] = _schema_of(key, limits) | own
    return schema


def registered_task(accepted: Task, new: Task, steps: int | None) -> Task:
    """A task as it is registered now, with which its specification is compared.

    The server may have extended it since it was accepted, also in the last moment before its end. A
    specification may tell its steps in place of its epochs.

    Args:
      accepted: the task as it was accepted.
      new: the task that the specification asks for now.
      steps: number of steps that the server lets it train; None if that is not known.
    """
    if None in (steps, new.steps):
        return accepted
    return dataclasses.replace(accepted, steps=steps, epochs=None)


def refused_change(old: Task, new: Task) -> str | None:
    """Why a specification may not become another one, once its task is registered.

    Only a larger number of steps is permitted.

    Args:
      old: the task as it is registered, from `registered_task`.
      new: the task that the specification asks for now.

    Returns:
      The key at fault, what it was and what it is; None if the change is permitted.
    """
    before, now = dict(_flat(to_json(old))), dict(_flat(to_json(new)))
    for key in {**before, **now}:
        if key not in ("steps", "epochs") and before.get(key) != now.get(key):
            return (
                f"{key} cannot change from {shown(before.get(key))} to {shown(now.get(key))} once "
                "the task is registered; nothing was changed"
            )
    if (old.steps, old.epochs) == (new.steps, new.epochs):
        return None
    if new.steps is None:
        return (
            f"epochs cannot change to {shown(new.epochs)} once the task is registered; give a "
            "larger number of steps instead"
        )
    if old.steps is not None and new.steps < old.steps:
        return f"steps should be at least {old.steps}, as registered, found {new.steps}"
    return None


def _schema_of(key: str, limits: SpecificationLimits) -> dict[str, Any]:
    schema = value_schema(WatchedSpecification, key, limits)
    if key == "priority":
        schema["maximum"] = limits.priority
    return schema


def _flat(fields: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested objects by their keys, such as "adapter.rank"."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield at + key, value
