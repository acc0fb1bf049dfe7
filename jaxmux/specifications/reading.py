"""Tasks as JSON objects: written for records of training runs, and read from tenants who are not
trusted.

A specification is data. Nothing in it names code, a module, a network address or a file outside the
tenant's folder, and it cannot ask for more than `SpecificationLimits` permit.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxmux.data import Source
from jaxmux.left_out import why_left_out
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.peft import LoRA, kind_of
from jaxmux.similar_names import did_you_mean
from jaxmux.tasks import LONGEST_NAME, TASK_NAME, Task, TaskError

from .fields import (
    CALIBRATED,
    KIND,
    PARTS,
    Part,
    refused_default,
    required_fields,
    to_json,
    value_schema,
)
from .files import check_files, read_bytes, relative_to, why_outside, with_paths
from .limits import SpecificationLimits
from .strict_json import parse_object, refusal, shown

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
    fields: Mapping[str, Any],
    name: str | None,
    limits: SpecificationLimits,
    other_keys: Iterable[str] = (),
) -> Task:
    """Makes a task from the fields of a specification whose author is not trusted. Its files are
    not looked at.

    Args:
      fields: the JSON object, from `parse_object`.
      name: as for `task_from_json`.
      limits: the most that the specification may ask for.
      other_keys: further keys that the JSON object may have, as refusals of unknown keys name them.

    Returns:
      The task, with paths relative to the tenant's folder.

    Raises:
      TaskError: the specification is refused.
    """
    where = name_of_specification(name)
    task = _Reader(where, limits, tuple(other_keys)).specification(Task, fields)
    kind = kind_of(task.adapter)
    rank = max(kind.rank(task.adapter), kind.rank_in(LOW_RANK_KIND, task.adapter))
    if rank > limits.rank:
        how = getattr(task.adapter, "initialisation", "")
        with_it = f" with the initialisation {how!r}" if how else ""
        raise TaskError(
            f"{where}: adapter: its arrays would have rank {rank}{with_it}; expected at most "
            f"{limits.rank}"
        )
    if task.resume_from is not None and not isinstance(task.adapter, LoRA):
        raise TaskError(
            f"{where}: resume_from: only tasks with adapters of the kinds 'lora' and 'dora' can go "
            f"on from an adapter, found {fields['adapter'][KIND]!r}"
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
      other_keys: further keys that the task's JSON object may have.
    """

    where: str
    limits: SpecificationLimits
    other_keys: tuple[str, ...] = ()

    def specification(self, cls: type, fields: Mapping[str, Any], at: str = "") -> Any:
        """The instance of a class with these fields; `at` is the key of the object with a dot."""
        names = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in names:
                raise self._error(
                    f"{shown(at + key)} is no key of a specification; {self._hint(key, cls, at)}"
                )
        self._require_fields(cls, fields, at)
        values = {name: self._value(cls, name, value, at) for name, value in fields.items()}
        try:
            return cls(**values)
        except ValueError as e:
            # These classes begin messages with the task's name and the path, which `where` and the
            # key tell already.
            own = {Task: f"task {values.get('name')!r}: ", Source: f"{values.get('path')}: "}
            message = str(e).removeprefix(own.get(cls, ""))
            raise self._error(f"{at.removesuffix('.')}: {message}" if at else message) from None

    def _hint(self, key: str, cls: type, at: str) -> str:
        """What the author of an unknown key may have meant."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in names:
            classes = PARTS[name].classes.values() if name in PARTS else ()
            if any(key == field.name for own in classes for field in dataclasses.fields(own)):
                return f"it is a key of {at}{name}"
        has_kind = any(
            kind and own is cls for part in PARTS.values() for kind, own in part.classes.items()
        )
        names += [*([KIND] if has_kind else []), *(self.other_keys if cls is Task else [])]
        hint = why_left_out(key) or did_you_mean(key, names)
        return hint or f"the keys are {', '.join(names)}"

    def _require_fields(self, cls: type, fields: Mapping[str, Any], at: str) -> None:
        required = list(required_fields(cls, self.limits))
        if cls in CALIBRATED and fields.get(CALIBRATED[cls][0]) == CALIBRATED[cls][1]:
            required.append("calibration_tokens")
        for name in required:
            problem = refused_default(cls, name, self.limits)
            if name not in fields and (problem or name != "calibration_tokens"):
                default = f", and its default is not permitted: {problem}" if problem else ""
                raise self._error(f"{at}{name} is missing{default}")

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
        example = json.dumps({KIND: next(iter(part.classes))})
        expected = "a string or an object" if part.short else f"an object such as {example}"
        hint = "; a specification names its one file" if isinstance(value, list) else ""
        raise self._error(f"{at}{name} should be {expected}, found {shown(value)}{hint}")

    def _part(self, part: Part, value: dict[str, Any], key: str) -> Any:
        if "" in part.classes:
            return self.specification(part.classes[""], value, f"{key}.")
        if KIND not in value:
            known = ", ".join(map(json.dumps, part.classes))
            raise self._error(f"{key}.{KIND} is missing; it is one of {known}")
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
            known = [*schema.get("enum", []), *schema.get("examples", [])]
            if isinstance(value, str):
                reason = reason or did_you_mean(value, filter(None, known))
            if isinstance(value, dict) and "enum" in schema.get("propertyNames", {}):
                known = schema["propertyNames"]["enum"]
                reason = next((did_you_mean(own, known) for own in value if own not in known), "")
            reason = (why_left_out(value) if name == "initialisation" else "") or reason
            raise self._error(f"{key} {problem}{reason and f'; {reason}'}")
        return value

    def _error(self, message: str) -> TaskError:
        return TaskError(f"{self.where}: {message}")
