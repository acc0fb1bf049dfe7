"""The JSON Schema of tasks and of the files of a watched folder, for editors and for programs that
write specifications."""

import dataclasses
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from jaxmux.field_checks import (
    EXACT,
    KIND,
    LARGEST_INTEGER,
    Part,
    checked_dataclass,
    parts_of,
    to_object,
)
from jaxmux.tasks import Task, TaskError

from .limits import LOWEST_PRIORITY, SpecificationLimits, TenantLimits, refusals, value_schema
from .reading import name_of_specification, read_object, task_from_fields
from .strict_json import parse_object, shown

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
# These fields accept less than the docstrings of their classes say.
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

    It is made from the fields of `Task` and of its parts: their types, defaults and descriptions,
    and the rules about fields that may be set together. docs/task_files.md lists what it leaves
    out.

    Args:
      limits: the largest values; None means the defaults of `SpecificationLimits`.
    """
    limits = limits or SpecificationLimits()
    return {
        "$schema": _DRAFT,
        "title": "A fine-tuning task of jaxmux",
        "description": "Where a description says None, True or False, write null, true or false.",
        **_object(Task, "", limits),
        "$defs": dict(sorted(_parts(Task, limits))),
    }


def _parts(cls: type, limits: SpecificationLimits) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in parts_of(cls).values():
        for kind, inner in part.classes.items():
            yield inner.__name__, _object(inner, kind, limits)
            yield from _parts(inner, limits)


def _object(cls: type, kind: str, limits: SpecificationLimits) -> dict[str, Any]:
    """The schema of the specifications of one class, with their kind if they have one."""
    descriptions, parts = _descriptions(cls), parts_of(cls)
    properties: dict[str, Any] = {KIND: {"const": kind}} if kind else {}
    refused, required = _refused_defaults(cls, limits), list(properties)
    for field in dataclasses.fields(cls):
        part, default = parts.get(field.name), field.default
        schema = _one_of(part, limits) if part else _exact(value_schema(cls, field.name, limits))
        if default is dataclasses.MISSING or field.name in refused:
            required.append(field.name)
        elif part:
            schema["default"] = part.to_object(default)
        else:
            schema["default"] = _as_json(default, schema)
        schema["description"] = _OWN_DESCRIPTIONS.get(field.name, descriptions[field.name])
        properties[field.name] = schema
    rules = [rule.json_schema(cls) for rule in getattr(cls, "rules", ())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
        **({"allOf": rules} if rules else {}),
    }


def _refused_defaults(cls: type, limits: SpecificationLimits) -> set[str]:
    """The fields that a specification must give because the limits refuse their defaults."""
    refused, values = set(), {}
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.default):
            if _refused_defaults(type(field.default), limits):
                refused.add(field.name)
        elif field.default is not dataclasses.MISSING and field.name not in parts_of(cls):
            schema = value_schema(cls, field.name, limits)
            values[field.name] = _as_json(field.default, schema)
    return refused | refusals(cls, values, limits).keys()


def _as_json(default: Any, schema: Mapping[str, Any]) -> Any:
    if isinstance(default, tuple):
        return dict(default) if schema.get("type") == "object" else list(default)
    return default


def _one_of(part: Part, limits: SpecificationLimits) -> dict[str, Any]:
    schemas = [{"$ref": f"#/$defs/{cls.__name__}"} for cls in part.classes.values()]
    if part.short:
        schemas.append(_exact(value_schema(part.classes[""], part.short, limits)))
    if part.optional:
        schemas.append({"type": "null"})
    return {"oneOf": schemas} if len(schemas) > 1 else schemas[0]


def _exact(schema: Any) -> Any:
    """Copies a schema and bounds its numbers by the largest exact JSON integer, because
    `parse_object` refuses larger numbers."""
    if isinstance(schema, list):
        return [_exact(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    copy = {key: _exact(value) for key, value in schema.items()}
    for key, bound in (("minimum", max), ("maximum", min)):
        if key in copy:
            copy[key] = bound(copy[key], -LARGEST_INTEGER if bound is max else LARGEST_INTEGER)
    return copy


def _descriptions(cls: type) -> dict[str, str]:
    """Reads the descriptions of a class's attributes from its docstring, or from the docstring of
    the class from which it inherits them."""
    docs = [each.__doc__ for each in cls.__mro__ if "Attributes:\n" in (each.__doc__ or "")]
    _, _, attributes = (docs or [""])[0].partition("Attributes:\n")
    attributes = textwrap.dedent(attributes.partition("\n\n")[0])
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in entries}


_DESCRIPTIONS = {
    "priority": "tasks of higher numbers are trained first. It may change at any time.",
    "paused": "whether the task gives up its place, or does not take one, until this becomes "
    "false. It may change at any time.",
}


@checked_dataclass
class WatchedSpecification:
    """The content of a file of a watched directory.

    Attributes:
      task: the task, with paths relative to the tenant's folder.
      priority: tasks of higher numbers are trained first.
      paused: whether the task waits until this becomes False.
    """

    task: SkipValidation[Task]
    priority: Annotated[int, Field(ge=LOWEST_PRIORITY), EXACT] = 0
    paused: bool = False


def watched_specification(data: bytes, name: str, limits: TenantLimits) -> WatchedSpecification:
    """Reads the content of a file of a watched directory, without checking the files of the task.

    Args:
      data: the content of the file.
      name: the name of the file without ".json".
      limits: the most that the specification may ask for.

    Raises:
      TaskError: the content is refused. The message names the file and the key at fault.
    """
    where = name_of_specification(name)
    try:
        fields = parse_object(data, limits.specification_bytes)
    except ValueError as e:
        raise TaskError(f"{where}: {e}") from None
    scheduling = {key: fields.pop(key) for key in _DESCRIPTIONS if key in fields}
    task = task_from_fields(fields, name, limits, _DESCRIPTIONS)
    read = read_object(WatchedSpecification, scheduling | {"task": task}, where, limits)
    if read.priority > limits.priority:
        raise TaskError(
            f"{where}: priority should be an integer of at least {LOWEST_PRIORITY} and of at most "
            f"{limits.priority}, found {read.priority}"
        )
    return read


def watched_schema(limits: TenantLimits | None = None) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the files of a watched directory: the schema of
    `task_schema`, with additional keys for scheduling. `limits` are the largest values; None means
    the defaults of `TenantLimits`."""
    limits = limits or TenantLimits()
    schema = task_schema(limits)
    schema["title"] = "A task of a directory that jaxmux watches"
    defaults = {field.name: field.default for field in dataclasses.fields(WatchedSpecification)}
    for key, description in _DESCRIPTIONS.items():
        values = value_schema(WatchedSpecification, key, limits)
        described = values | {"default": defaults[key], "description": description}
        schema["properties"][key] = described
    schema["properties"]["priority"]["maximum"] = limits.priority
    return schema


def registered_task(accepted: Task, new: Task, steps: int | None) -> Task:
    """Returns the task in its present state in the server, to compare it with a new specification.

    The server may have extended the task since it was accepted. A new specification may give steps
    instead of epochs.

    Args:
      accepted: the task as it was accepted.
      new: the task that the specification asks for now.
      steps: number of steps that the server lets the task train; None if unknown.
    """
    if None in (steps, new.steps):
        return accepted
    return dataclasses.replace(accepted, steps=steps, epochs=None)


def refused_change(old: Task, new: Task) -> str | None:
    """Returns why a specification may not change in this way after its task was registered. Only
    the number of steps may change, and it may only grow.

    Args:
      old: the task as it is registered, from `registered_task`.
      new: the task that the specification asks for now.

    Returns:
      The key at fault with its old and new value; None if the change is permitted.
    """
    before, now = dict(_flat(to_object(old))), dict(_flat(to_object(new)))
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


def _flat(fields: Mapping[str, Any], at: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of nested objects with their keys, such as "adapter.rank"."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{at}{key}.")
        else:
            yield at + key, value
