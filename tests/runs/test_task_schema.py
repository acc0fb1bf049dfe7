"""The JSON Schema of tasks is the published one, and permits all that the reader permits."""

import dataclasses
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
from jsonschema import Draft202012Validator
from pydantic import Field

from jaxmux.data import Source
from jaxmux.field_checks import (
    EXACT,
    Count,
    Names,
    Text,
    checked_dataclass,
    field_schema,
    parts_of,
)
from jaxmux.objectives import OBJECTIVES
from jaxmux.optimizers import OPTIMIZERS, Schedule
from jaxmux.peft import SPECIFICATIONS as ADAPTERS
from jaxmux.specifications import SpecificationLimits
from jaxmux.specifications.limits import refusals, value_schema
from jaxmux.specifications.reading import task_from_fields
from jaxmux.specifications.schema import task_schema
from jaxmux.specifications.strict_json import parse_object
from jaxmux.tasks import Task

ROOT = Path(__file__).parents[2]
SPECIFICATIONS = (Task, Source, *ADAPTERS.values(), Schedule, *OPTIMIZERS.values())
SPECIFICATIONS += tuple(OBJECTIVES.values())
NUMBERS = [0, 1, -1, 2.5, 1e-9, 10**6, 1e300]
TEXTS = ["", "x", "cosine", "q_proj", "norm", "houlsby", "a.json", "../a.json", "/a", ".*", "a\x00"]
LISTS = [[], ["q_proj"], [".*"], [1]]
OBJECTS = [{}, {"kind": "cosine"}, {"kind": "lora", "rank": 3}, {"kind": "sgd"}]
OBJECTS += [{"path": "a.json"}, {"path": "hf:a"}]
VALUES = [None, True, False, *NUMBERS, *TEXTS, *LISTS, *OBJECTS]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    return Draft202012Validator(task_schema())


def test_the_schema_is_a_valid_schema(validator):
    validator.check_schema(validator.schema)


def test_the_published_schema_is_the_one_of_the_code(tmp_path):
    published = (ROOT / "docs" / "task.schema.json").read_text(encoding="utf-8")
    made = json.dumps(task_schema(), indent=2, ensure_ascii=False) + "\n"
    assert published == made, "run scripts/write_task_schema.py"


@pytest.mark.long
def test_the_script_writes_the_published_schema():
    script = ROOT / "scripts" / "write_task_schema.py"
    code = f"import runpy; print(runpy.run_path({str(script)!r})['schema_text'](), end='')"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == (ROOT / "docs" / "task.schema.json").read_text(encoding="utf-8")


def test_the_example_of_the_documentation_is_valid(validator):
    text = (ROOT / "docs" / "task_files.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    validator.validate(json.loads(example))


def test_every_field_is_described_and_no_object_is_open(validator):
    objects = [validator.schema, *validator.schema["$defs"].values()]
    assert len(objects) == len(SPECIFICATIONS)
    for schema in objects:
        assert schema["additionalProperties"] is False
        for name, field in schema["properties"].items():
            assert "const" in field or len(field["description"]) > 5, name


def test_the_defaults_are_valid(validator):
    fields = {"name": "a", "data": "a.json", "steps": 1}
    for name, field in validator.schema["properties"].items():
        if "default" in field:
            validator.validate({name: field["default"]} | fields)


# By field, values that rules across fields tell apart; other values come from VALUES.
TIED = {
    "initialisation": ["kaiming", "orthogonal", "eva", "pissa", "olora", "pissa_niter_4"],
    "rank": [1, 2, 7, 8, 127, 128, 129, 256, 257],
    "rank_pattern": [{}, {"q_proj": 3}, {"q_proj": 128}, {"q_proj": 129}, {"q_proj": 2**53}],
    "alpha": [0, -1, 2.5, 2**53 - 1, 2**53, 1e16],
    "alpha_pattern": [{}, {"q_proj": 0}, {"q_proj": 2}, {"q_proj": 1e300}],
    "dropout": [0, 0.0, 0.5],
    "target_modules": ["q_proj", "lm_head", ["lm_head"], ["q_proj", "embed_tokens"], ["norm"]],
    "trained_tokens": [[], [0], [1, 1], [2**53]],
    "eva_rho": [1, 4, 5],
    "start": ["vocabulary", "random"],
    "start_text": [None, "a", "\x1b"],
    "start_tokens": [[], [0]],
    "mask": ["random", "gradient"],
    "calibration_tokens": [1, 100, 8192],
    "form": ["auto", "messages", "alpaca", "text"],
    "columns": [{}, {"tools": "a"}, {"text": "a"}, {"text": "a", "tools": "b"}, {"input": "b"}],
    "resume_from": [None, "a/b"],
    "epochs": [None, 2, 2**53],
    "steps": [None, 2],
    "eval_data": [None, "b.json"],
    "validation_fraction": [None, 0.5],
    "validation_seed": [None, 0],
    "eval_every": [None, 2],
    "patience": [None, 2],
    "keep_best": [False, True],
    "best_metric": ["loss", "kl", "reward"],
    "stop_when": [None, "loss < 0.5", "kl > 1", "loss<1", "loss < 1e999"],
    "max_seconds": [None, 1e300, 2**53, 2**53 - 1],
    "schedule": ["cosine", {"kind": "linear", "warmup_steps": 3}, {"warmup_ratio": 0.5}],
    "max_length": [2, 300],
}
NARROW = SpecificationLimits(rank=8, batch_size=16, max_length=512, steps=9, calibration_tokens=100)


def random_specification(rng: random.Random) -> dict:
    kind, own = rng.choice(list(ADAPTERS)), rng.choice(list(OPTIMIZERS))
    kind = rng.choice([kind, kind, "lora"])  # the kind with the most rules
    adapter, optimizer, schedule = {"kind": kind}, {"kind": own}, {}
    if kind == "trained_tokens":
        adapter["indices"] = [3]
    if "rank" in {f.name for f in dataclasses.fields(ADAPTERS[kind])} and rng.random() < 0.5:
        adapter["rank"] = 4
    fields = {"name": "a", "data": {"path": "a.json"}, "steps": 3, "max_length": 64}
    fields |= {"adapter": adapter, "optimizer": optimizer | {"schedule": schedule}}
    places = [(fields, Task), (fields["data"], Source), (adapter, ADAPTERS[kind])]
    places += [(fields["optimizer"], OPTIMIZERS[own]), (schedule, Schedule)]
    inner, cls = rng.choice([*places, (adapter, ADAPTERS[kind])])
    keys = [field.name for field in dataclasses.fields(cls)]
    tied = [key for key in keys if key in TIED]
    for _ in range(rng.randrange(1, 5)):
        if tied and rng.random() < 0.85:
            key = rng.choice(tied)
            inner[key] = rng.choice(TIED[key])
        else:
            inner[rng.choice([*keys, "kind", "other"])] = rng.choice(VALUES)
    if rng.random() < 0.1:
        inner.pop(rng.choice(list(inner)))
    return fields


def is_read(fields: dict, limits: SpecificationLimits) -> bool:
    try:
        task_from_fields(parse_object(json.dumps(fields), 10**6), None, limits)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("limits", [SpecificationLimits(), NARROW], ids=["default", "narrow"])
def test_the_schema_permits_what_the_reader_permits(limits):
    oracle, rng = Draft202012Validator(task_schema(limits)), random.Random(0)
    fields = [random_specification(rng) for _ in range(300)]
    permitted = [task for task in fields if is_read(task, limits)]
    assert [task for task in permitted if not oracle.is_valid(task)] == []
    assert 40 < len(permitted) < 240


def choices(values: dict) -> list[dict]:
    """All choices of some of the fields."""
    sizes = range(len(values) + 1)
    return [dict(c) for n in sizes for c in itertools.combinations(values.items(), n)]


TOGETHER = {"epochs": 2, "steps": 3, "eval_data": "b.json", "validation_fraction": 0.5}
TOGETHER |= {"eval_every": 2, "keep_best": True, "patience": 2, "validation_seed": 0}
TOGETHER |= {"stop_when": "loss < 1"}
STARTS = {"start": "random", "start_text": "a", "start_tokens": [0]}


def test_the_schema_and_the_classes_permit_the_same_fields_together(validator):
    least, limits = {"name": "a", "data": "a.json"}, SpecificationLimits()
    fields = [least | choice for choice in choices(TOGETHER)]
    prompts = [{"kind": "prompt_tuning"} | choice for choice in choices(STARTS)]
    fields += [least | {"steps": 3, "adapter": prompt} for prompt in prompts]
    for task in fields:
        assert validator.is_valid(task) == is_read(task, limits), task
    assert sum(map(validator.is_valid, fields)) == 56 + 4


def test_values_are_refused_as_by_their_schemas():
    fields = [(cls, f.name) for cls in SPECIFICATIONS for f in dataclasses.fields(cls)]
    for cls, name in fields:
        if name in parts_of(cls):
            continue
        oracle = Draft202012Validator(value_schema(cls, name, SpecificationLimits()))
        for value in VALUES:
            is_refused = bool(refusals(cls, {name: value}, SpecificationLimits()))
            assert oracle.is_valid(value) <= (not is_refused), (cls, name, value)


def test_limits_are_bounds_of_the_schema():
    schema = task_schema(SpecificationLimits(rank=7, steps=9))
    assert schema["$defs"]["LoRA"]["properties"]["rank"]["maximum"] == 7
    assert schema["properties"]["steps"]["anyOf"][0]["maximum"] == 9


@checked_dataclass
class Example:
    free: Text = "any"
    several: Names = "any"
    count: Count = 1
    share: Annotated[float, Field(gt=0, le=1), EXACT] | None = 0.5


@pytest.mark.parametrize("name", ["free", "several"])
def test_a_new_field_of_free_text_is_open_to_nobody(name):
    limits = SpecificationLimits()
    assert refusals(Example, {"free": "any", "several": "any", "count": 3}, limits) == {}
    assert refusals(Example, {name: "x"}, limits) == {
        name: f"{name} cannot be set: jaxmux.specifications.limits does not say which texts it may "
        "hold"
    }


def test_checks_of_fields_and_their_schemas_permit_the_same():
    for name in ("free", "several", "count", "share"):
        schema = field_schema(Example, name)
        oracle = Draft202012Validator(schema)
        for value in [*VALUES, 0.5, 3e38, 1e39]:
            if name == "count" and isinstance(value, float) and value.is_integer():
                continue  # JSON Schema takes such a number for an integer.
            try:
                Example(**{name: value})
                permitted = True
            except ValueError:
                permitted = False
            assert oracle.is_valid(value) == permitted, (name, value)
