"""Reads tasks from the JSON of untrusted tenants, and writes tasks as JSON.

A specification is data. It names no code, module, network address or file outside the tenant's
folder, and it cannot ask for more than `SpecificationLimits` permit.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxmux.field_checks import KIND, from_object, parts_of, to_object, why_left_out
from jaxmux.peft import LoRA
from jaxmux.similar_names import did_you_mean
from jaxmux.tasks import LONGEST_NAME, TASK_NAME, Task, TaskError

from .files import check_files, read_bytes, relative_to, with_paths
from .limits import SpecificationLimits, expected_and_found, refusal, refusals
from .strict_json import parse_object, shown

_SUFFIX = ".json"


def task_from_json(
    text: str | bytes,
    folder: str | Path,
    *,
    name: str | None = None,
    limits: SpecificationLimits | None = None,
) -> Task:
    """Makes a task from a specification by an untrusted author, and checks its files.

    Paths in the specification are relative to `folder` and stay inside it. A tenant can replace the
    files after this check: train on the copies that `copy_files` makes.

    Args:
      text: the specification, a JSON object with the fields of `Task`; `task_schema` describes it.
      folder: the folder with the tenant's files. No other tenant's files may lie in it.
      name: the name that the task must have: the name of the specification's file without ".json".
        None permits any name.
      limits: the most that the specification may ask for; None means the defaults.

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
    """Makes a task from the fields of a specification by an untrusted author, without checking its
    files.

    Args:
      fields: the JSON object, from `parse_object`.
      name: as for `task_from_json`.
      limits: the most that the specification may ask for.
      other_keys: keys, besides the fields, that the author may have meant, for error messages.

    Returns:
      The task, with paths relative to the tenant's folder.

    Raises:
      TaskError: the specification is refused.
    """
    where, adapter = name_of_specification(name), fields.get("adapter")
    for key in ("rank_pattern", "alpha_pattern") if isinstance(adapter, dict) else ():
        # `LoRA` compiles these names as regular expressions, and some of these take long to
        # compile.
        if key in adapter and (refused := refusals(LoRA, {key: adapter[key]}, limits)):
            raise TaskError(f"{where}: adapter.{refused[key]}")
    task = read_object(Task, fields, where, limits, other_keys)
    if refused := refusal(task, limits):
        raise TaskError(f"{where}: {refused}")
    if name not in (None, task.name):
        raise TaskError(
            f"{where}: name should be {name!r}, as the file is called, found {task.name!r}"
        )
    return task


def read_object(
    cls: type,
    fields: Mapping[str, Any],
    where: str,
    limits: SpecificationLimits,
    other_keys: Iterable[str] = (),
) -> Any:
    """Makes a specification from a JSON object by an untrusted author. `limits` are used only in
    error messages; the specification may ask for more. Messages begin with `where`. Raises
    TaskError if the object does not describe such a specification."""
    try:
        return from_object(cls, fields)
    except ValidationError as e:
        faults = e.errors(include_url=False)
    # A misspelt key often causes a missing one.
    order = {"unexpected_keyword_argument": 0, "missing": 1}
    fault = min(faults, key=lambda fault: order.get(fault["type"], 2))
    raise TaskError(f"{where}: {_in_words(fault, cls, fields, limits, other_keys)}")


def _in_words(
    fault: Mapping[str, Any],
    cls: type,
    fields: Mapping[str, Any],
    limits: SpecificationLimits,
    other_keys: Iterable[str],
) -> str:
    """Describes a fault that pydantic has found in a JSON object, beginning with its key."""
    at, name, part, *places = "", "", None, *fault["loc"]
    for i, name in enumerate(places):
        part, value = parts_of(cls).get(name), fields.get(name)
        is_object = part and isinstance(value, dict)
        inner = part.class_of(value) if is_object else None
        if inner is None or i == len(places) - 1:
            break
        cls, fields, at = inner, value, f"{at}{name}."
        other_keys = () if "" in part.classes else (KIND,)
    key = at + name
    if fault["type"] == "unexpected_keyword_argument":
        hint = _hint(name, cls, at, other_keys)
        return f"{shown(key)} is no key of a specification; {hint}"
    if fault["type"] == "missing":
        return f"{key} is missing"
    if not places or inner:
        # The class itself found the fault. Its message begins with the name of the task or with the
        # path.
        message, values = str(fault["ctx"]["error"]), value if places else fields
        for prefix in (f"task {values.get('name')!r}: ", f"{values.get('path')}: "):
            message = message.removeprefix(prefix)
        return f"{key}: {message}" if key else message
    if part is None:
        return f"{key} {expected_and_found(cls, name, value, limits)}"
    if isinstance(value, str) and part.short:
        return f"{key} {expected_and_found(part.classes[''], part.short, value, limits)}"
    if not is_object:
        example = shown({KIND: next(iter(part.classes))})
        expected = "a string or an object" if part.short else f"an object such as {example}"
        hint = "; a specification names its one file" if isinstance(value, list) else ""
        return f"{key} should be {expected}, found {shown(value)}{hint}"
    known = ", ".join(map(shown, part.classes))
    if KIND not in value:
        return f"{key}.{KIND} is missing; it is one of {known}"
    kind = value[KIND]
    hint = did_you_mean(kind, part.classes) if isinstance(kind, str) else ""
    hint = why_left_out(kind) or hint
    return f"{key}.{KIND} should be one of {known}, found {shown(kind)}{hint and f'; {hint}'}"


def _hint(key: str, cls: type, at: str, other_keys: Iterable[str]) -> str:
    """Tells which key the author of an unknown key may have meant."""
    for name, part in parts_of(cls).items():
        if any(key == field.name for c in part.classes.values() for field in dataclasses.fields(c)):
            return f"it is a key of {at}{name}"
    names = [*(field.name for field in dataclasses.fields(cls)), *other_keys]
    hint = why_left_out(key) or did_you_mean(key, names)
    return hint or f"the keys are {', '.join(names)}"


def name_of_specification(name: str | None) -> str:
    """Returns the first words of error messages about a specification: the name of its file, which
    is `name` and ".json". `name` is None if there is no file. Raises TaskError if no task may have
    this name."""
    if name is None:
        return "specification"
    _require_name(name)
    return name + _SUFFIX


def read_specification(
    file: str | Path, folder: str | Path, limits: SpecificationLimits | None = None
) -> Task:
    """Reads the specification of a task from a file NAME.json, like `task_from_json`.

    Args:
      file: a regular file and not a link; the folders above it are trusted.
      folder: the folder with the tenant's files. No other tenant's files may lie in it.
      limits: the most that the specification may ask for; None means the defaults.

    Raises:
      TaskError: the file cannot be read, its name is not that of a task with ".json", or the
        specification is refused.
    """
    limits, file = limits or SpecificationLimits(), Path(file)
    if file.suffix != _SUFFIX:
        raise TaskError(f"file {file.name!r}: should be called NAME{_SUFFIX}")
    # A tenant has chosen the name, so it is checked before messages begin with it.
    _require_name(name := file.name.removesuffix(_SUFFIX))
    data = read_bytes(file.parent, file.name, limits.specification_bytes, file.name)
    return task_from_json(data, folder, name=name, limits=limits)


def task_to_json(task: Task, folder: str | Path | None = None) -> dict[str, Any]:
    """Returns a task as a JSON object with all fields. `task_from_json` makes an equal task from
    it, if it permits the paths and values.

    Args:
      task: the task, trusted or not.
      folder: folder to which paths become relative, as in specifications; None leaves the paths
        unchanged.

    Raises:
      TaskError: a path of the task is not inside `folder`.
    """
    if folder is not None:
        task = relative_to(task, folder)
    return to_object(task)


def from_json(fields: Mapping[str, Any], cls: type = Task) -> Any:
    """The inverse of `field_checks.to_object`, for objects that jaxmux itself has written. For
    other objects, use `task_from_json`. Raises ValueError if the object does not describe such a
    specification."""
    try:
        return from_object(cls, fields)
    except ValidationError as e:
        fault = e.errors(include_url=False)[0]
        key, message = ".".join(map(str, fault["loc"])), fault["msg"]
        raise ValueError(f"{cls.__name__}: {key}: {message}") from None


def _require_name(name: str) -> None:
    if not re.fullmatch(TASK_NAME, name) or len(name) > LONGEST_NAME:
        raise TaskError(
            f"file {name + _SUFFIX!r}: should be called NAME{_SUFFIX}, with a name of at most "
            f"{LONGEST_NAME} letters, digits, '.', '_' and '-' that begins with a letter or digit"
        )
