"""The JSON Schema of tasks is the published one, and permits what the reader of tasks permits."""

import dataclasses
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from jaxmux.data import Source
from jaxmux.field_checks import check_fields, field_schema, integer, names, number, text
from jaxmux.learning_rates import Schedule
from jaxmux.optimizers import OPTIMIZERS
from jaxmux.peft import SPECIFICATIONS as ADAPTERS
from jaxmux.runs import SpecificationLimits, task_from_json, task_schema
from jaxmux.runs.strict_json import refusal
from jaxmux.runs.task_fields import PARTS, value_schema
from jaxmux.tasks import Task, TaskError

ROOT = Path(__file__).parents[2]
SPECIFICATIONS = (Task, Source, *ADAPTERS.values(), Schedule, *OPTIMIZERS.values())
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


def test_the_schema_permits_exactly_what_the_reader_permits(validator, tmp_path):
    (tmp_path / "a.json").write_text('{"text": "one"}\n')
    rng = random.Random(0)
    keys = {cls: [f.name for f in dataclasses.fields(cls)] for cls in SPECIFICATIONS}
    both = 0
    for _ in range(4000):
        kind = rng.choice(list(ADAPTERS))
        adapter, optimizer, schedule = {"kind": kind}, {"kind": "adamw"}, {}
        if kind == "trained_tokens":
            adapter["indices"] = [3]
        optimizer["schedule"] = schedule
        fields = {"name": "a", "data": {"path": "a.json"}, "steps": 3}
        fields |= {"adapter": adapter, "optimizer": optimizer}
        inner, cls = rng.choice(
            [
                (fields, Task),
                (fields["data"], Source),
                (adapter, ADAPTERS[kind]),
                (optimizer, OPTIMIZERS["adamw"]),
                (schedule, Schedule),
            ]
        )
        if rng.random() < 0.1:
            fields["validation_fraction"] = rng.choice([None, 0.5])
        for _ in range(rng.randrange(1, 3)):
            inner[rng.choice([*keys[cls], "kind", "other"])] = rng.choice(VALUES)
        if rng.random() < 0.1:
            inner.pop(rng.choice(list(inner)))
        if fields.get("resume_from"):
            continue  # no such folder
        try:
            task_from_json(json.dumps(fields), tmp_path)
            permitted = True
        except TaskError as e:
            if "cannot be opened" in str(e):
                continue
            permitted = False
        assert validator.is_valid(fields) == permitted, fields
        both += permitted
    assert 150 < both < 3800


def test_held_out_records_come_from_one_place(validator):
    fields = {"name": "a", "data": "a.json", "steps": 3, "eval_every": 1}
    share, file = {"validation_fraction": 0.1}, {"eval_data": "b.json"}
    given = [{}, share, file, share | file, share | {"eval_data": None}]
    valid = [False, True, True, False, True]
    assert [validator.is_valid(fields | own) for own in given] == valid


def test_single_values_are_refused_as_by_jsonschema():
    fields = [(cls, f.name) for cls in SPECIFICATIONS for f in dataclasses.fields(cls)]
    for cls, name in fields:
        if name in PARTS:
            continue
        schema = value_schema(cls, name, SpecificationLimits())
        oracle = Draft202012Validator(schema)
        for value in VALUES:
            assert (refusal(value, schema) is None) == oracle.is_valid(value), (cls, name, value)


def test_limits_are_bounds_of_the_schema():
    schema = task_schema(SpecificationLimits(rank=7, steps=9))
    assert schema["$defs"]["LoRA"]["properties"]["rank"]["maximum"] == 7
    assert schema["properties"]["steps"]["maximum"] == 9


@dataclasses.dataclass(frozen=True)
class Example:
    free: str = text("any")
    several: str = names("any")
    unchecked: int = 3
    count: int = integer(1, least=1)
    share: float | None = number(0.5, above=0, most=1, optional=True)

    def __post_init__(self):
        check_fields(self)


@pytest.mark.parametrize("name", ["free", "several", "unchecked"])
def test_a_new_field_of_free_text_or_without_a_check_is_open_to_nobody(name):
    with pytest.raises(ValueError, match=f"Example.{name}: say in jaxmux.runs.task_fields"):
        value_schema(Example, name, SpecificationLimits())


def test_checks_of_fields_and_their_schemas_permit_the_same():
    schemas = {field.name: field_schema(field) for field in dataclasses.fields(Example)}
    assert schemas.pop("unchecked") is None
    for name, schema in schemas.items():
        oracle = Draft202012Validator(schema)
        for value in [*VALUES, 0.5, 3e38, 1e39]:
            if schema["type"] == "integer" and isinstance(value, float) and value.is_integer():
                continue  # JSON Schema takes such a number for an integer.
            try:
                Example(**{name: value})
                permitted = True
            except ValueError:
                permitted = False
            assert oracle.is_valid(value) == permitted, (name, value)
