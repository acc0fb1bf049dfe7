"""The fields of a task as JSON: which values each may hold, and how specifications nest.

The schema and the reader of specifications both take the fields from here. A field of free text
raises an error here: what a stranger may write into a new field is decided here first.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxmux.data import Source
from jaxmux.data.file_kinds import JSONL_SUFFIXES
from jaxmux.data.forms import all_fields
from jaxmux.field_checks import LARGEST_INTEGER, field_schema, fields_by_name
from jaxmux.learning_rates import Schedule
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import (
    IA3,
    SPECIFICATIONS,
    Bottleneck,
    DiffPruning,
    DoRA,
    LNTuning,
    LoRA,
    PromptTuning,
    SparseDiff,
    TrainedTokens,
    VeRA,
)
from jaxmux.peft.ln_tuning import NORMS
from jaxmux.peft.targets import ALL_LINEAR, MODULE_NAMES, TABLES
from jaxmux.tasks import LONGEST_NAME, TASK_NAME, Task

from .limits import SpecificationLimits
from .strict_json import refusal, types_of

# The part of a JSON object that names the class of an adapter or an optimizer.
KIND = "kind"
_LONGEST_PATH = 1024
# The arrays of all tasks are as large as those of the largest rank, which a tenant multiplies so.
_MOST_RHO = 4
_WITHIN = f"(?:{TASK_NAME}/)*{TASK_NAME}"
_PATH_RULE = (
    "relative to the tenant's folder and inside it, in parts of letters, digits, '.', '_' and '-' "
    "that begin with a letter or digit"
)
_SUFFIXES = "|".join(suffix.removeprefix(".") for suffix in JSONL_SUFFIXES)


class Part(NamedTuple):
    """The specifications that a field of another specification may hold.

    Attributes:
      classes: the classes, by their kind; the key of a class without a kind is "".
      short: the field of the class for which a string is short, as a path is for `Source(path)`;
        empty if there is none.
    """

    classes: Mapping[str, type]
    short: str = ""


# By field, the parts of a task.
PARTS: Mapping[str, Part] = {
    "data": Part({"": Source}, "path"),
    "eval_data": Part({"": Source}, "path"),
    "adapter": Part(SPECIFICATIONS),
    "optimizer": Part(OPTIMIZERS),
    "schedule": Part({"": Schedule}, "kind"),
}

# By class, the field and its value with which the backbone reads `calibration_tokens` tokens.
CALIBRATED: Mapping[type, tuple[str, str]] = {
    LoRA: ("initialisation", "eva"),
    DoRA: ("initialisation", "eva"),
    SparseDiff: ("mask", "gradient"),
}


def value_schema(cls: type, name: str, limits: SpecificationLimits) -> dict[str, Any]:
    """The values that a specification may give to a field that is no part, as JSON Schema.

    Args:
      cls: the class of the specification, such as `Task`.
      name: name of the field.
      limits: the largest values.

    Raises:
      ValueError: the class does not say what the field may hold, or would accept any text.
    """
    schema = _flat(field_schema(cls, name))
    schema |= _narrower(limits).get((cls, name), {})
    if "additionalProperties" in schema:
        schema["additionalProperties"] = _exact(schema["additionalProperties"])
    schema = _exact(schema)
    texts = schema.get("items", schema)
    is_free_text = "string" in types_of(texts) and not {"pattern", "enum"} & texts.keys()
    is_free_text |= "object" in types_of(schema) and "propertyNames" not in schema
    if not schema or is_free_text:
        raise ValueError(
            f"{cls.__name__}.{name}: say in {__name__} which values a specification that is not "
            "trusted may give it"
        )
    return schema


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without "anyOf": its types become one list, and enumerations one enumeration."""
    found: dict[str, Any] = {}
    for each in map(dict, schema.pop("anyOf", [])):
        kind = each.pop("type")
        found["type"] = [*found.get("type", []), kind]
        found |= each
    found |= schema
    if "pattern" in found and "enum" in found:
        known = found.pop("enum")
        whole = "|".join([*map(re.escape, known), found["pattern"].strip("^$")])
        in_words = f"one of {', '.join(map(repr, known))}, {found['$comment']}"
        # The examples are for editors, and for hints at misspelt values.
        found |= {"type": "string", "pattern": f"^(?:{whole})$"}
        found |= {"examples": known, "$comment": in_words}
    if "enum" in found:
        return {"enum": [*found["enum"], *([None] if "null" in types_of(found) else [])]}
    return found


def required_fields(cls: type, limits: SpecificationLimits) -> Iterator[str]:
    """The names of the fields without a default that the limits permit.

    `calibration_tokens` is not among them, because few tasks read it; `CALIBRATED` names them.

    Args:
      cls: the class of a specification.
      limits: the largest values.
    """
    for field in dataclasses.fields(cls):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield field.name
        elif field.name != "calibration_tokens" and refused_default(cls, field.name, limits):
            yield field.name


@functools.cache
def refused_default(cls: type, name: str, limits: SpecificationLimits) -> str:
    """Why the limits do not permit the default of a field; empty if they do, or if it has none.

    Args:
      cls: the class of the specification.
      name: name of the field.
      limits: the largest values.
    """
    (field,) = (field for field in dataclasses.fields(cls) if field.name == name)
    default = field.default
    if default in (dataclasses.MISSING, None):
        return ""
    if name in PARTS:
        own = type(default)
        found = ((n, refused_default(own, n, limits)) for n in required_fields(own, limits))
        return next((f"{inner} {problem}" for inner, problem in found), "")
    schema = value_schema(cls, name, limits)
    if isinstance(default, tuple):
        default = dict(default) if "object" in types_of(schema) else list(default)
    return refusal(default, schema) or ""


def to_json(specification: Any) -> dict[str, Any]:
    """A task or one of its parts as a JSON object with every field, defaults included.

    Args:
      specification: a `Task`, `Source`, `LoRA`, `Schedule` or an optimizer.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(specification):
        value = getattr(specification, field.name)
        if dataclasses.is_dataclass(value):
            value = part_to_json(field.name, value)
        elif field.name in PARTS and isinstance(value, tuple):
            value = [part_to_json(field.name, part) for part in value]
        if field.name in fields_by_name(type(specification)):
            value = dict(value)
        fields[field.name] = list(value) if isinstance(value, tuple) else value
    return fields


def from_json(fields: Mapping[str, Any], cls: type = Task) -> Any:
    """The inverse of `to_json`, for objects that jaxmux itself has written. `task_from_json` reads
    those of others.

    Args:
      fields: the JSON object.
      cls: the class of the specification.

    Raises:
      ValueError, KeyError, TypeError: the object does not describe such a specification.
    """
    values = {}
    for name, value in fields.items():
        if name in PARTS and isinstance(value, dict):
            value = _part_from_json(value, PARTS[name])
        elif name in PARTS and isinstance(value, list):
            value = [_part_from_json(own, PARTS[name]) for own in value]
        values[name] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def _part_from_json(value: dict[str, Any], part: Part) -> Any:
    own = {key: x for key, x in value.items() if key != KIND or "" in part.classes}
    return from_json(own, part.classes["" if "" in part.classes else value[KIND]])


def part_to_json(field: str, part: Any) -> dict[str, Any]:
    """The value of a field that holds a part, as a JSON object with its kind, if it has one.

    Args:
      field: name of the field, a key of `PARTS`.
      part: the value of the field.
    """
    kind = next((kind for kind, cls in PARTS[field].classes.items() if type(part) is cls), "")
    return ({KIND: kind} if kind else {}) | to_json(part)


def _exact(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of numbers without those beyond exact integers, with which programs that read JSON
    differ: a schema cannot refuse 9007199254740992 and permit 9007199254740992.0."""
    found = dict(schema)
    if "maximum" in schema:
        found["maximum"] = min(schema["maximum"], LARGEST_INTEGER)
    if "minimum" in schema:
        found["minimum"] = max(schema["minimum"], -LARGEST_INTEGER)
    return found


@functools.cache
def _narrower(limits: SpecificationLimits) -> dict[tuple[type, str], dict[str, Any]]:
    """By class and field, what a tenant may ask for where the class permits more.

    A regular expression for target modules can take Python's `re` years. A data set of the hub is
    fetched over the network, and the loader of a saved one reads files that it names itself. A
    small Parquet or compressed file can expand to more memory than there is. The limits of data are
    counted in lines, which a row of a table or an element of an array need not be. Texts may be
    printed on the operator's terminal, which obeys control characters.
    """
    names = "|".join(sorted({ALL_LINEAR, *MODULE_NAMES})).replace(".", r"\.")
    linears = {
        "pattern": f"^(?:{names})$",
        "items": {"type": "string", "pattern": "^[A-Za-z0-9_.]+$", "maxLength": 100},
        "minItems": 1,
        "maxItems": limits.target_modules,
        "$comment": f"{ALL_LINEAR!r}, the name of a linear such as 'q_proj', or a list of "
        "names (no regular expression)",
    }
    tables = "|".join(sorted(TABLES)).replace(".", r"\.")
    with_tables = linears | {
        "pattern": f"^(?:{names}|{tables})$",
        "$comment": f"{ALL_LINEAR!r}, the name of a linear such as 'q_proj' or of a table such as "
        "'lm_head', or a list of names (no regular expression)",
    }
    linears["examples"] = [ALL_LINEAR, *(name for name in sorted(MODULE_NAMES) if "." not in name)]
    with_tables["examples"] = [*linears["examples"], *sorted(TABLES)]
    any_tokens = {
        "items": {"type": "integer", "minimum": 0, "maximum": LARGEST_INTEGER},
        "maxItems": limits.rank,
        "$comment": "a list of ids of tokens",
    }
    tokens = any_tokens | {
        "minItems": 1,
        "uniqueItems": True,
        "$comment": "a list of different ids of tokens",
    }
    norms = "|".join(NORMS)
    by_linear = {
        "propertyNames": {"type": "string", "pattern": "^[A-Za-z0-9_.]+$", "maxLength": 100},
        "maxProperties": limits.target_modules,
    }
    ranks = by_linear | {
        "additionalProperties": {"type": "integer", "minimum": 1, "maximum": limits.rank},
        "$comment": f"an object with a rank of 1 to {limits.rank} by the name of a linear",
    }
    prompt = {
        "pattern": r"^[^\u0000-\u0008\u000b-\u001f\u007f-\u009f]*$",
        "maxLength": limits.prompt_characters,
        "$comment": "a text without control characters but line breaks and tabs",
    }
    columns = {
        "propertyNames": {"enum": all_fields()},
        "additionalProperties": {
            "type": "string",
            "pattern": r"^[^\u0000-\u001f\u007f-\u009f]*$",
            "minLength": 1,
            "maxLength": 100,
        },
        "$comment": "an object that gives fields of a form their names in the records (without "
        f"control characters); the fields are {', '.join(all_fields())}",
    }
    alphas = by_linear | {"$comment": "an object with a number by the name of a linear"}
    once = {
        "enum": [None],
        "$comment": "null, because repeated samples would not count in the limits of data",
    }
    return {
        (Task, "name"): {
            "type": "string",
            "pattern": f"^{TASK_NAME}$",
            "maxLength": LONGEST_NAME,
            "$comment": "a name of letters, digits, '.', '_' and '-' that begins with a letter or "
            "digit",
        },
        (Task, "batch_size"): {"maximum": limits.batch_size},
        (Task, "max_length"): {"maximum": limits.max_length},
        (Task, "epochs"): {"maximum": limits.epochs},
        (Task, "steps"): {"maximum": limits.steps},
        (Task, "resume_from"): {
            "pattern": f"^{_WITHIN}$",
            "maxLength": _LONGEST_PATH,
            "$comment": f"the folder of an adapter ({_PATH_RULE})",
        },
        (Task, "sample_prompt"): prompt,
        (Source, "path"): {
            "pattern": rf"^{_WITHIN}\.(?:{_SUFFIXES})$",
            "maxLength": _LONGEST_PATH,
            "$comment": f"a {' or '.join(JSONL_SUFFIXES)} file ({_PATH_RULE})",
        },
        # Only data sets of the hub have other splits.
        (Source, "split"): {
            "enum": ["train"],
            "$comment": '"train", because files have no splits',
        },
        (Source, "columns"): columns,
        # A template is a program, whose memory nothing bounds.
        (Source, "chat_template"): {
            "enum": [None],
            "$comment": "null, because a template is a program and nothing bounds its memory",
        },
        (Source, "repeat"): once,
        (Source, "weight"): once,
        (LoRA, "rank"): {"maximum": limits.rank},
        (LoRA, "target_modules"): with_tables,
        (LoRA, "rank_pattern"): ranks,
        (LoRA, "alpha_pattern"): alphas,
        (LoRA, "trained_tokens"): tokens | {"minItems": 0},
        (DoRA, "trained_tokens"): {
            "items": any_tokens["items"],
            "maxItems": 0,
            "$comment": "an empty list, because DoRA trains linears only",
        },
        (DoRA, "rank_pattern"): ranks,
        (DoRA, "alpha_pattern"): alphas,
        (DoRA, "rank"): {"maximum": limits.rank},
        (DoRA, "target_modules"): linears,
        (IA3, "target_modules"): linears,
        (IA3, "feedforward_modules"): linears | {"minItems": 0},
        (LNTuning, "target_modules"): {
            "pattern": f"^(?:{norms})$",
            "items": {"type": "string", "enum": list(NORMS)},
            "minItems": 1,
            "maxItems": len(NORMS),
            "$comment": "the name of a norm, or a list of names; the names are " + ", ".join(NORMS),
        },
        (Bottleneck, "size"): {"maximum": limits.rank},
        (DiffPruning, "columns"): {"maximum": limits.rank},
        (DiffPruning, "target_modules"): linears,
        (SparseDiff, "rank"): {"maximum": limits.rank},
        (SparseDiff, "target_modules"): linears,
        (VeRA, "rank"): {"maximum": limits.rank},
        (VeRA, "projection_key"): {"maximum": 2**32 - 1},
        (VeRA, "target_modules"): linears,
        (PromptTuning, "virtual_tokens"): {"maximum": limits.rank},
        (PromptTuning, "start_text"): prompt,
        (PromptTuning, "start_tokens"): any_tokens,
        (TrainedTokens, "indices"): tokens,
        (Schedule, "warmup_steps"): {"maximum": limits.steps},
        (LoRA, "eva_rho"): {"maximum": _MOST_RHO},
        (LoRA, "calibration_tokens"): {"maximum": limits.calibration_tokens},
        (DoRA, "eva_rho"): {"maximum": _MOST_RHO},
        (DoRA, "calibration_tokens"): {"maximum": limits.calibration_tokens},
        (SparseDiff, "calibration_tokens"): {"maximum": limits.calibration_tokens},
    }
