"""The most that untrusted tenants may ask for: limits of one specification, limits of all
specifications of one tenant, and the check of a task against the former.

A new field of free text is refused to tenants until `_permitted` says which texts it may hold.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypedDict

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from jaxmux.data import Source
from jaxmux.data.file_kinds import JSONL_SUFFIXES
from jaxmux.data.sources import all_fields
from jaxmux.field_checks import (
    EXACT,
    Count,
    Natural,
    checked_dataclass,
    field_schema,
    in_words,
    parts_of,
    to_object,
    why_left_out,
)
from jaxmux.models.adapter_ops import LOW_RANK_KIND
from jaxmux.optimizers import Schedule
from jaxmux.peft import (
    IA3,
    Bottleneck,
    DiffPruning,
    DoRA,
    LNTuning,
    LoRA,
    PromptTuning,
    SparseDiff,
    TrainedTokens,
    VeRA,
    kind_of,
)
from jaxmux.peft.ln_tuning import NORMS
from jaxmux.peft.targets import ALL_LINEAR, MODULE_NAMES, TABLES
from jaxmux.similar_names import did_you_mean
from jaxmux.tasks import TASK_NAME, Task

from .strict_json import shown

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
# The lowest priority that a tenant may give to a task.
LOWEST_PRIORITY = -100


@checked_dataclass
class SpecificationLimits:
    """Limits of tasks that come as JSON from untrusted tenants.

    They are checked before a task takes memory. Tasks from configs and from Python are trusted and
    have no such limits.

    Attributes:
      specification_bytes: bytes of a specification, and of the adapter_config.json of an adapter
        from which a task begins.
      data_bytes: bytes of one data file. The tokenized samples of a task are in a temporary file
        with up to 4 bytes for a byte of the data. Memory holds 20 bytes for each sample and at most
        4 MiB of tokens.
      record_bytes: bytes of one line of a data file. Tokenizing a line takes up to 280 bytes of
        memory for each of its bytes.
      records: lines of one data file, blank lines included.
      adapter_bytes: bytes of the weights of an adapter from which a task begins.
      rank: rank of an adapter. The arrays of all tasks are as large as those of the largest rank.
      batch_size: samples in a global batch (the samples of one optimizer update).
      max_length: tokens of a sample.
      steps: global batches that a task trains, even if it gives epochs instead, and steps of a
        warm-up.
      epochs: number of times that a task trains on each of its samples.
      prompt_characters: characters of the prompt that is completed after training, and of a text
        with which a trained prompt begins.
      target_modules: names in a list of target modules.
      calibration_tokens: tokens that the backbone reads on the host for the initial values of an
        adapter.

    Raises:
      ValueError: a limit is not an integer of at least 1.
    """

    specification_bytes: Count = 64 * _KIB
    data_bytes: Count = 64 * _MIB
    record_bytes: Count = _MIB
    records: Count = 1_000_000
    adapter_bytes: Count = _GIB
    rank: Count = 256
    batch_size: Count = 1024
    max_length: Count = 8192
    steps: Count = 100_000
    epochs: Count = 1000
    prompt_characters: Count = 4096
    target_modules: Count = 1024
    calibration_tokens: Count = 8192


@checked_dataclass
class TenantLimits(SpecificationLimits):
    """Limits of a tenant who is not trusted: the limits of each specification, from
    `SpecificationLimits`, and limits of all specifications of the tenant together.

    Attributes:
      priority: the highest priority of a task; the lowest is -100. With 0, no tenant can have tasks
        trained before the tasks of others.
      specifications: specifications that the tenant's folder may hold, and tasks of the tenant that
        have not ended. Further ones are refused.
      tasks: tasks of the tenant that the server knows, including those that have ended.
      folder_entries: files and folders that lie directly in the tenant's folder. In a folder with
        more, only specifications that are already known are read.
      copied_bytes: bytes of the copies of the tenant's files, for tasks that have not ended.

    Raises:
      ValueError: a limit is not an integer within its range.
    """

    priority: Annotated[int, Field(ge=LOWEST_PRIORITY), EXACT] = 100
    specifications: Count = 1000
    tasks: Count = 100_000
    folder_entries: Count = 10_000
    copied_bytes: Count = 10 * 2**30


_LONGEST_PATH, _LONGEST_LINEAR, _LONGEST_COLUMN = 1024, 100, 100
# The arrays of all tasks have the largest rank of any task, and eva_rho multiplies a task's rank.
_MOST_RHO = 4
_WITHIN = f"(?:{TASK_NAME}/)*{TASK_NAME}"
_PATH_RULE = (
    f"relative to the tenant's folder and inside it, of at most {_LONGEST_PATH} characters, in "
    "parts of letters, digits, '.', '_' and '-' that begin with a letter or digit"
)
_SUFFIXES = "|".join(suffix.removeprefix(".") for suffix in JSONL_SUFFIXES)
# For each class, the field and its value with which the backbone reads `calibration_tokens` tokens.
_CALIBRATED: Mapping[type, tuple[str, str]] = {
    LoRA: ("initialisation", "eva"),
    DoRA: ("initialisation", "eva"),
    SparseDiff: ("mask", "gradient"),
}
_REASONS = (
    (lambda path: "://" in path, "specifications name no network addresses"),
    (
        lambda path: path.startswith("hf:"),
        "data sets come over the network, and saved ones name their files themselves",
    ),
    (lambda path: path.startswith("jaxmux:"), "files of jaxmux are not the tenant's"),
    (lambda path: path.startswith(("/", "~")), "paths are relative to the tenant's folder"),
    (lambda path: ".." in path.split("/"), "'..' could lead out of the tenant's folder"),
    (
        lambda path: path.endswith(".parquet"),
        "a small Parquet file can expand to more memory than there is",
    ),
    (
        lambda path: path.endswith((".gz", ".zst")),
        "a small compressed file can expand to more memory than there is",
    ),
    (
        lambda path: path.endswith((".csv", ".tsv")),
        "limits count lines, and a row may have several; write one JSON object per line",
    ),
    (lambda path: "*" in path or "?" in path, "a specification names its one file"),
)


def refusal(task: Task, limits: SpecificationLimits) -> str | None:
    """Returns the first reason why the limits do not permit a task; None if they permit it. The
    limits apply to defaults and to values that the tenant has written. Paths of the task are
    relative to the tenant's folder."""
    if isinstance(task.data, tuple):
        return (
            f"data should be a string or an object, found {len(task.data)} sources; a "
            "specification names its one file"
        )
    for cls, fields, key in _parts(task, to_object(task)):
        if problem := next(iter(refusals(cls, fields, limits).values()), None):
            return key + problem
    kind = kind_of(task.adapter)
    rank = max(kind.rank(task.adapter), kind.rank_in(LOW_RANK_KIND, task.adapter))
    if rank > limits.rank:
        initialisation = getattr(task.adapter, "initialisation", "")
        cause = f" with the initialisation {initialisation!r}" if initialisation else ""
        return f"adapter: its arrays would have rank {rank}{cause}; expected at most {limits.rank}"
    if task.resume_from is not None and not isinstance(task.adapter, LoRA):
        return (
            "resume_from: only tasks with adapters of the kinds 'lora' and 'dora' can go on from "
            f"an adapter, found {kind.name!r}"
        )
    return None


def refusals(cls: type, fields: Mapping[str, Any], limits: SpecificationLimits) -> dict[str, str]:
    """Returns, by name of a field, why a tenant may not give the field its value. `fields` are some
    fields of a specification as JSON; specifications inside them are not checked."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    switch, value = _CALIBRATED.get(cls, (None, None))
    if switch and fields.get(switch) != value:
        unread = ("calibration_tokens", defaults["calibration_tokens"])
        fields = dict(item for item in fields.items() if item != unread)
    try:
        _checks(cls, limits).validate_python(fields)
        refused = []
    except ValidationError as e:
        refused = list(dict.fromkeys(fault["loc"][0] for fault in e.errors(include_url=False)))
    refused += [
        name
        for name in _open_fields(cls, limits)
        if name in fields and not _is_default(fields[name], defaults[name])
    ]
    return {
        name: f"{name} {expected_and_found(cls, name, fields[name], limits)}" for name in refused
    }


def expected_and_found(cls: type, name: str, value: Any, limits: SpecificationLimits) -> str:
    """Returns, for a refused value, a text with the values that a tenant may give to the field, the
    value found, and what the tenant may have meant."""
    if name in _open_fields(cls, limits):
        return f"cannot be set: {__name__} does not say which texts it may hold"
    schema = value_schema(cls, name, limits)
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, dict) else []
    known = [*_known(schema)]
    hints = [did_you_mean(text, known) for text in texts if text not in known]
    if name == "initialisation":
        hints.insert(0, why_left_out(value))
    if name in ("path", "resume_from") and isinstance(value, str):
        hints.insert(0, next((reason for applies, reason in _REASONS if applies(value)), ""))
    hint, words = next(filter(None, hints), ""), in_words(schema, shown)
    (default,) = (field.default for field in dataclasses.fields(cls) if field.name == name)
    which = ", the default" if _is_default(value, default) else ""
    return f"should be {words}, found {shown(value)}{which}{hint and f'; {hint}'}"


def _is_default(value: Any, default: Any) -> bool:
    """Whether a JSON value is the default of a field."""
    if isinstance(value, list | dict):
        value = tuple(value.items() if isinstance(value, dict) else value)
    return type(value) is type(default) and value == default


@functools.cache
def value_schema(cls: type, name: str, limits: SpecificationLimits) -> dict[str, Any]:
    """The values that a tenant may give to a field, as a JSON Schema. Callers must not change
    it."""
    permitted = _checks(cls, limits).json_schema().get("properties", {})
    schema = dict(permitted.get(name) or field_schema(cls, name))
    for key in ("title", "default"):
        schema.pop(key, None)
    return schema


def _parts(
    specification: Any, fields: Mapping[str, Any], key: str = ""
) -> Iterator[tuple[type, Mapping[str, Any], str]]:
    """Yields, for a specification and for each specification inside it, its class, its JSON object
    and the beginning of its keys ("adapter.")."""
    yield type(specification), fields, key
    for name in parts_of(type(specification)):
        if (part := getattr(specification, name)) is not None:
            yield from _parts(part, fields[name], f"{key}{name}.")


def _known(schema: Mapping[str, Any]) -> Iterator[str]:
    """The single texts that a schema permits."""
    values = [*schema.get("enum", []), schema.get("const"), *schema.get("examples", [])]
    yield from (value for value in values if isinstance(value, str))
    names = [schema["propertyNames"]] if "propertyNames" in schema else []
    for inner in [*schema.get("anyOf", []), *names]:
        yield from _known(inner)


@functools.cache
def _open_fields(cls: type, limits: SpecificationLimits) -> list[str]:
    """The fields that may hold any text and have no type in `_permitted`."""
    others = {*parts_of(cls), *_checks(cls, limits).json_schema().get("properties", {})}
    names = [field.name for field in dataclasses.fields(cls) if field.name not in others]
    return [name for name in names if _is_open(field_schema(cls, name))]


def _is_open(schema: Mapping[str, Any]) -> bool:
    if schema.get("type") == "string" and not {"pattern", "enum", "const"} & schema.keys():
        return True
    if schema.get("type") == "array":
        return _is_open(schema["items"])
    return schema.get("type") == "object" or any(map(_is_open, schema.get("anyOf", [])))


@functools.cache
def _checks(cls: type, limits: SpecificationLimits) -> TypeAdapter:
    """A pydantic type that checks those fields of a JSON object that have a type in
    `_permitted`."""
    permitted = _permitted(limits)
    fields = {n: each for c in reversed(cls.__mro__) for n, each in permitted.get(c, {}).items()}
    checked = TypedDict(cls.__name__, fields, total=False)
    checked.__pydantic_config__ = ConfigDict(strict=True)
    return TypeAdapter(checked)


def _text(pattern: str, longest: int, words: str = "") -> Any:
    extra = {"$comment": words} if words else None
    return Annotated[str, Field(pattern=pattern, max_length=longest, json_schema_extra=extra)]


def _described(values: Any, words: str, **schema: Any) -> Any:
    return Annotated[values, Field(json_schema_extra={"$comment": words, **schema})]


@functools.cache
def _permitted(limits: SpecificationLimits) -> dict[type, dict[str, Any]]:
    """Returns, by class and field, the type of the JSON values that a tenant may give. A field is
    left out if its class itself permits no more than a tenant may give.

    Reasons for the restrictions: Python's `re` can take years for a regular expression for target
    modules. A data set of the hub is fetched over the network, and the loader of a saved data set
    reads files that the data set names. A small Parquet or compressed file can expand to more
    memory than there is. Limits of data are counted in lines, but a row of a table or an element of
    an array need not be a line. Texts may be printed on the operator's terminal, which obeys
    control characters.
    """

    def count(most: int, least: int = 1) -> Any:
        return Annotated[int, Field(ge=least, le=most), EXACT]

    most_names = limits.target_modules
    linear = _text("^[A-Za-z0-9_.]+$", _LONGEST_LINEAR)

    def names(known: Any, each: Any, words: str, least: int = 1, most: int = most_names) -> Any:
        several = Annotated[list[each], Field(min_length=least, max_length=most)]
        return _described(Literal[*known] | several, words)

    linears = sorted({ALL_LINEAR, *MODULE_NAMES})
    no_expression = f"or a list of at most {most_names} names (no regular expression)"
    of_linears = f"{ALL_LINEAR!r}, the name of a linear such as 'q_proj', {no_expression}"
    of_tables = (
        f"{ALL_LINEAR!r}, the name of a linear such as 'q_proj' or of a table such as 'lm_head', "
        f"{no_expression}"
    )
    tokens = Annotated[list[Natural], Field(max_length=limits.rank)]
    different = f"a list of at most {limits.rank} different ids of tokens"

    def by_linear(values: Any, words: str) -> Any:
        entries = Annotated[dict[linear, values], Field(max_length=most_names)]
        # pydantic describes names by "patternProperties", which leaves other names open.
        return _described(entries, words, additionalProperties=False)

    prompt = _text(
        r"^[^\u0000-\u0008\u000b-\u001f\u007f-\u009f]*$",
        limits.prompt_characters,
        f"a text of at most {limits.prompt_characters} characters, without control characters but "
        "line breaks and tabs",
    )
    column = Annotated[
        _text(r"^[^\u0000-\u001f\u007f-\u009f]*$", _LONGEST_COLUMN), Field(min_length=1)
    ]
    once = _described(None, "null, because repeated samples would not count in the limits of data")
    target_modules = {"target_modules": names(linears, linear, of_linears)}
    calibration = {"calibration_tokens": count(limits.calibration_tokens)}
    rank = {"rank": count(limits.rank)}
    return {
        Task: {
            "batch_size": count(limits.batch_size),
            "max_length": count(limits.max_length, least=2),
            "epochs": count(limits.epochs) | None,
            "steps": count(limits.steps) | None,
            "resume_from": _text(
                f"^{_WITHIN}$", _LONGEST_PATH, f"the folder of an adapter ({_PATH_RULE})"
            )
            | None,
            "sample_prompt": Annotated[prompt, Field(min_length=1)] | None,
        },
        Source: {
            "path": _text(
                rf"^{_WITHIN}\.(?:{_SUFFIXES})$",
                _LONGEST_PATH,
                f"a {' or '.join(JSONL_SUFFIXES)} file ({_PATH_RULE})",
            ),
            # Only data sets of the hub have other splits.
            "split": _described(Literal["train"], '"train", because files have no splits'),
            "columns": _described(
                dict[Literal[*all_fields()], column],
                "an object that gives fields of a form their names in the records (of at most "
                f"{_LONGEST_COLUMN} characters, without control characters); the fields are "
                + ", ".join(all_fields()),
            ),
            "chat_template": _described(
                None, "null, because a template is a program and nothing bounds its memory"
            ),
            "repeat": once,
            "weight": once,
        },
        Schedule: {"warmup_steps": count(limits.steps, least=0)},
        LoRA: {
            **rank,
            **calibration,
            "target_modules": names([*linears, *sorted(TABLES)], linear, of_tables),
            "rank_pattern": by_linear(
                count(limits.rank),
                f"an object with a rank of 1 to {limits.rank} by the name of a linear",
            ),
            "alpha_pattern": by_linear(
                Annotated[float, EXACT], "an object with a number by the name of a linear"
            ),
            "eva_rho": Annotated[float, Field(ge=1, le=_MOST_RHO), EXACT],
            "trained_tokens": _described(tokens, different, uniqueItems=True),
        },
        DoRA: {
            **target_modules,
            "trained_tokens": _described(
                Annotated[list[Natural], Field(max_length=0)],
                "an empty list, because DoRA trains linears only",
            ),
        },
        IA3: {
            **target_modules,
            "feedforward_modules": names(linears, linear, of_linears, least=0),
        },
        LNTuning: {
            "target_modules": names(
                NORMS,
                Literal[*NORMS],
                f"the name of a norm, or a list of names; the names are {', '.join(NORMS)}",
                most=len(NORMS),
            )
        },
        Bottleneck: {"size": count(limits.rank)},
        DiffPruning: {"columns": count(limits.rank), **target_modules},
        SparseDiff: {**rank, **calibration, **target_modules},
        VeRA: {**rank, **target_modules},
        PromptTuning: {
            "virtual_tokens": count(limits.rank),
            "start_text": Annotated[prompt, Field(min_length=1)] | None,
            "start_tokens": _described(tokens, f"a list of at most {limits.rank} ids of tokens"),
        },
        TrainedTokens: {
            "indices": _described(
                Annotated[tokens, Field(min_length=1)], different, uniqueItems=True
            )
        },
    }
