"""The files of a watched directory: a task and how it is to be scheduled, as JSON."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jaxmux.field_checks import flag, integer
from jaxmux.live import TaskStatus
from jaxmux.live.states import PAUSED
from jaxmux.tasks import Task, TaskError

from .specification_limits import SpecificationLimits
from .strict_json import parse_object, refusal, shown
from .task_fields import to_json, value_schema
from .task_json import name_of_specification, task_from_fields
from .task_schema import task_schema
from .tenant_limits import TenantLimits

_LOWEST_PRIORITY = -100
_DESCRIPTIONS = {
    "priority": "tasks of higher numbers are trained first. It may change at any time.",
    "paused": "whether the task gives up its place, or does not take one, until this becomes "
    "false. It may change at any time.",
}


@dataclasses.dataclass(frozen=True)
class WatchedSpecification:
    """What a file of a watched directory asks for.

    Attributes:
      task: the task, with paths relative to the tenant's folder.
      priority: tasks of higher numbers go first.
      paused: whether the task is not to be trained for the time being.
    """

    task: Task
    priority: int = integer(0, least=_LOWEST_PRIORITY)
    paused: bool = flag(False)


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


def came_too_late(wanted: WatchedSpecification, status: TaskStatus) -> bool:
    """Whether a priority or a pause is wanted that a task which has ended did not have at its end.

    Args:
      wanted: what the specification asks for now.
      status: the status of the task.
    """
    before = status.history[-2]
    # The server pauses tasks too, and then tells why.
    by_server = before.state == PAUSED and before.reason is not None
    paused = wanted.paused if by_server else before.state == PAUSED
    return (wanted.priority, wanted.paused) != (status.priority, paused)


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
