"""Specifications as JSON objects: a `Task`, or a part of one such as `Source`, `LoRA`, `AdamW` or
`Schedule`."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from jaxmux.field_checks import from_object, parts_of, to_object
from jaxmux.tasks import Task


def to_json(specification: Any) -> dict[str, Any]:
    """A specification as a JSON object with every field, defaults included."""
    return to_object(specification)


def part_to_json(field: str, part: Any) -> dict[str, Any]:
    """The value of a field of `Task` that holds another specification, such as "adapter", as a JSON
    object. It begins with the kind of the specification if the field may hold several kinds."""
    return parts_of(Task)[field].to_object(part)


def from_json(fields: Mapping[str, Any], cls: type = Task) -> Any:
    """The inverse of `to_json`, for objects that jaxmux itself has written. `task_from_json` reads
    those of others.

    Raises:
      ValueError: the object does not describe such a specification.
    """
    try:
        return from_object(cls, fields)
    except ValidationError as e:
        fault = e.errors(include_url=False)[0]
        key, message = ".".join(map(str, fault["loc"])), fault["msg"]
        raise ValueError(f"{cls.__name__}: {key}: {message}") from None
