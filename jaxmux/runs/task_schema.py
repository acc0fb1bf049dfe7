"""The JSON Schema of tasks, for editors and for programs that write specifications."""

import dataclasses
import re
import textwrap
from typing import Any

from jaxmux.tasks import Task

from .schema_rules import rules
from .specification_limits import SpecificationLimits
from .task_fields import KIND, PARTS, Part, part_to_json, required_fields, value_schema

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
