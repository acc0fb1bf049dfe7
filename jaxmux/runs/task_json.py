"""Tasks as JSON objects: written for records of training runs, and read from tenants who are not
trusted.

A specification is data. Nothing in it names code, a module, a network address or a file outside the
tenant's folder, and it cannot ask for more than `SpecificationLimits` permit.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxmux.left_out import why_left_out
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.peft import kind_of
from jaxmux.similar_names import did_you_mean
from jaxmux.tasks import LONGEST_NAME, TASK_NAME, Task, TaskError

from .confined_files import read_bytes, why_outside
from .specification_limits import SpecificationLimits
from .strict_json import parse_object, refusal, shown
from .task_fields import KIND, PARTS, Part, required_fields, to_json, value_schema
from .tenant_files import check_files, relative_to, with_paths

_SUFFIX = ".json"


def task_from_json(
    text: str | bytes,
    folder: str | Path,
    *,
    name: str | None = None,
    limits: SpecificationLimits | None = None,
) -> Task:
    """Makes a task from a specification whose author is not trusted, and checks its files.

    Paths of the specification are relative to `folder` and stay inside it. The files are checked as
    they are now, and a tenant can replace them later: train on the copy that `copy_files` makes.

    Args:
      text: the specification, a JSON object with the fields of `Task`; `task_schema` describes it.
      folder: the folder with the tenant's files. No other tenant's files may lie in it.
      name: the name that the task must have, that of the specification's file without ".json"; None
        for any.
      limits: the most that the specification may ask for; None for the defaults.

    Returns:
      The task, with absolute paths.

    Raises:
      TaskError: the specification is refused. The message names the file or key at fault, what was
        found and what was expected.
    """
    limits = limits or SpecificationLimits()
    try:
        fields = parse_object(text, limits.specification_bytes)
    except ValueError as e:
        raise TaskError(f"{name_of_specification(name)}: {e}") from None
    task = task_from_fields(fields, name, limits)
    check_files(task, folder, limits, name_of_specification(name))
    root = Path(folder).resolve()
    return with_paths(task, lambda path: str(root / path))


def task_from_fields(
    fields: Mapping[str, Any], name: str | None, limits: SpecificationLimits
) -> Task:
    """Makes a task from the fields of a specification whose author is not trusted. Its files are
    not looked at.

    Args:
      fields: the JSON object, from `parse_object`.
      name: as for `task_from_json`.
      limits: the most that the specification may ask for.

    Returns:
      The task, with paths relative to the tenant's folder.

    Raises:
      TaskError: the specification is refused.
    """
    where = name_of_specification(name)
    task = _Reader(where, limits).specification(Task, fields)
    kind = kind_of(task.adapter)
    rank = max(kind.rank(task.adapter), kind.rank_in(LOW_RANK_KIND, task.adapter))
    if rank > limits.rank:
        raise TaskError(
            f"{where}: adapter: its arrays would have rank {rank}, and at most {limits.rank} is "
            "permitted"
        )
    if name not in (None, task.name):
        raise TaskError(
            f"{where}: name should be {name!r}, as the file is called, found {task.name!r}"
        )
    return task


def name_of_specification(name: str | None) -> str:
    """The file of a specification, as it begins error messages.

    Args:
      name: its name without ".json"; None if it has no file.

    Raises:
      TaskError: no task may have this name.
    """
    if name is None:
        return "specification"
    _require_name(name)
    return name + _SUFFIX


def read_specification(
    file: str | Path, folder: str | Path, limits: SpecificationLimits | None = None
) -> Task:
    """Reads the specification of a task from a file NAME.json, as `task_from_json`.

    Args:
      file: a regular file and no link; the folders above it are trusted.
      folder: the folder with the tenant's files. No other tenant's files may lie in it.
      limits: the most that the specification may ask for; None for the defaults.

    Raises:
      TaskError: the file cannot be read, its name is not that of a task with ".json", or the
        specification is refused.
    """
    limits, file = limits or SpecificationLimits(), Path(file)
    if file.suffix != _SUFFIX:
        raise TaskError(f"file {file.name!r}: should be called NAME{_SUFFIX}")
    # The name is checked before it begins messages, because a tenant has chosen it.
    _require_name(name := file.name.removesuffix(_SUFFIX))
    data = read_bytes(file.parent, file.name, limits.specification_bytes, file.name)
    return task_from_json(data, folder, name=name, limits=limits)


def task_to_json(task: Task, folder: str | Path | None = None) -> dict[str, Any]:
    """A task as a JSON object with all fields, which `task_from_json` reads.

    Reading returns an equal task, if `task_from_json` permits its paths and values.

    Args:
      task: the task, trusted or not.
      folder: makes paths relative to this folder, as specifications have them; None leaves paths as
        they are.

    Raises:
      TaskError: a path of the task is not inside `folder`.
    """
    if folder is not None:
        task = relative_to(task, folder)
    return to_json(task)


def _require_name(name: str) -> None:
    if not re.fullmatch(TASK_NAME, name) or len(name) > LONGEST_NAME:
        raise TaskError(
            f"file {name + _SUFFIX!r}: should be called NAME{_SUFFIX}, with a name of at most "
            f"{LONGEST_NAME} letters, digits, '.', '_' and '-' that begins with a letter or digit"
        )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Makes specifications of classes from JSON objects.

    Attributes:
      where: the specification, for error messages.
      limits: the most that it may ask for.
    """

    where: str
    limits: SpecificationLimits

    def specification(self, cls: type, fields: Mapping[str, Any], at: str = "") -> Any:
        """The instance of a class with these fields; `at` is the key of the object with a dot."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in names:
                hint = why_left_out(key) or did_you_mean(key, names)
                hint = hint or f"the keys are {', '.join(names)}"
                raise self._error(f"{shown(at + key)} is no key of a specification; {hint}")
        if missing := [name for name in required_fields(cls) if name not in fields]:
            raise self._error(f"{at}{missing[0]} is missing")
        values = {name: self._value(cls, name, value, at) for name, value in fields.items()}
        try:
            return cls(**values)
        except ValueError as e:
            raise self._error(f"{at.removesuffix('.')}: {e}" if at else str(e)) from None

    def _value(self, cls: type, name: str, value: Any, at: str) -> Any:
        if (part := PARTS.get(name)) is None:
            return self._checked(value, cls, name, at + name)
        if isinstance(value, dict):
            return self._part(part, value, at + name)
        default = {field.name: field.default for field in dataclasses.fields(cls)}[name]
        if value is None and default is None:
            return None
        if isinstance(value, str) and part.short:
            ((_, short_for),) = part.classes.items()
            return short_for(self._checked(value, short_for, part.short, at + name))
        expected = "a string or an object" if part.short else f"an object with {KIND!r}"
        raise self._error(f"{at}{name} should be {expected}, found {shown(value)}")

    def _part(self, part: Part, value: dict[str, Any], key: str) -> Any:
        if "" in part.classes:
            return self.specification(part.classes[""], value, f"{key}.")
        kind, fields = value.get(KIND), {k: v for k, v in value.items() if k != KIND}
        if problem := refusal(kind, {"enum": list(part.classes)}):
            hint = did_you_mean(kind, part.classes) if isinstance(kind, str) else ""
            hint = why_left_out(kind) or hint
            raise self._error(f"{key}.{KIND} {problem}{hint and f'; {hint}'}")
        return self.specification(part.classes[kind], fields, f"{key}.")

    def _checked(self, value: Any, cls: type, name: str, key: str) -> Any:
        schema = value_schema(cls, name, self.limits)
        if problem := refusal(value, schema):
            is_path = isinstance(value, str) and name in ("path", "resume_from")
            reason = why_outside(value) if is_path else ""
            if isinstance(value, str) and "enum" in schema:
                reason = did_you_mean(value, filter(None, schema["enum"]))
            reason = (why_left_out(value) if name == "initialisation" else "") or reason
            raise self._error(f"{key} {problem}{reason and f'; {reason}'}")
        return value

    def _error(self, message: str) -> TaskError:
        return TaskError(f"{self.where}: {message}")
