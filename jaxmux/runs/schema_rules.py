"""The rules of specifications that tie several fields, as JSON Schema.

The classes check them in Python, with messages of their own. A test compares both on random
specifications.
"""

from typing import Any

from jaxmux.data import Source
from jaxmux.data.forms import REQUIRED_FIELDS, fields_of
from jaxmux.peft import SPECIFICATIONS, DoRA, LoRA, PromptTuning
from jaxmux.peft.lora import ZERO_PRODUCTS
from jaxmux.peft.targets import TABLES
from jaxmux.tasks import Task

from .specification_limits import SpecificationLimits
from .task_fields import CALIBRATED, KIND, refused_default

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
