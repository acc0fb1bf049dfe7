"""The files of a watched directory: what they may hold, and how they may change."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from jaxmux import DPO, AdamW, LoRA, Schedule, SimPO, Task, TaskError
from jaxmux.specifications import SpecificationLimits, TenantLimits, watched_schema
from jaxmux.specifications.schema import refused_change, registered_task, watched_specification

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watched_directory.md").read_text()


def test_the_specification_of_the_documentation_is_accepted():
    text = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    Draft202012Validator(watched_schema()).validate(json.loads(text))
    wanted = watched_specification(text.encode(), "billing", TenantLimits())
    assert (wanted.priority, wanted.paused, wanted.task.steps) == (2, False, 500)


def test_the_limits_of_the_documentation_are_the_defaults():
    units = {"GiB": 2**30, "": 1}
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d,]+) ?(\w*) \|$", PAGE, flags=re.MULTILINE)
    found = {name: int(number.replace(",", "")) * units[unit] for name, number, unit in rows}
    own = TenantLimits.__dataclass_fields__.keys() - SpecificationLimits.__dataclass_fields__
    assert found == {name: getattr(TenantLimits(), name) for name in own}


def test_the_published_schema_is_the_one_of_the_code():
    published = (ROOT / "docs" / "watched_task.schema.json").read_text(encoding="utf-8")
    made = json.dumps(watched_schema(), indent=2, ensure_ascii=False) + "\n"
    assert published == made, "run scripts/write_task_schema.py"


@pytest.mark.parametrize("value", [None, 1.5, 101, -101, True, "1", 0, 100])
def test_the_schema_permits_exactly_the_priorities_that_the_reader_permits(value):
    fields = {"name": "a", "data": "a.jsonl", "steps": 1, "priority": value}
    try:
        watched_specification(json.dumps(fields).encode(), "a", TenantLimits())
        permitted = True
    except TaskError:
        permitted = False
    assert Draft202012Validator(watched_schema()).is_valid(fields) == permitted


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("prioritty", "did you mean priority"),
        ("pausd", "did you mean paused"),
        ("zzz", "the keys are name, .*, priority, paused$"),
    ],
)
def test_the_keys_of_scheduling_are_among_those_that_a_refusal_names(key, hint):
    fields = {"name": "a", "data": "a.jsonl", "steps": 1, key: 1}
    with pytest.raises(TaskError, match=f'^a.json: "{key}" is no key of a specification; {hint}'):
        watched_specification(json.dumps(fields).encode(), "a", TenantLimits())


CHANGES = {
    "name": "b",
    "data": "b.jsonl",
    "eval_data": "c.jsonl",
    "adapter": LoRA(rank=3),
    "optimizer": AdamW(schedule=Schedule("cosine")),
    "resume_from": "b",
    "sample_prompt": "b",
    "keep_best": True,
    "objective": DPO(),
    "best_metric": "rewards/margins",
    "stop_when": "loss < 1",
}


def test_every_field_of_a_task_but_its_length_is_fixed():
    old = Task("a", "a.jsonl", steps=5, eval_data="b.jsonl", eval_every=3, objective=SimPO())
    for field in dataclasses.fields(Task):
        if field.name not in ("steps", "epochs", "validation_fraction", "validation_seed"):
            other = CHANGES.get(field.name) or (getattr(old, field.name) or 0) + 1
            new = dataclasses.replace(old, **{field.name: other})
            assert refused_change(old, new).startswith(field.name)
    old, split = (Task("a", "a.jsonl", steps=5, validation_fraction=own) for own in (None, 0.1))
    assert refused_change(old, split).startswith("validation_fraction")
    other = dataclasses.replace(split, validation_seed=1)
    assert refused_change(split, other).startswith("validation_seed")


def test_a_task_may_only_become_longer():
    old = Task("a", "a.jsonl", epochs=2)
    longer = dataclasses.replace(old, epochs=None, steps=9)

    def refusal(new, steps):
        return refused_change(registered_task(old, new, steps), new)

    assert refusal(old, 8) is None
    assert refusal(longer, 8) is None
    assert refusal(longer, None) is None
    assert "at least 10, as registered, found 9" in refusal(longer, 10)
    assert "epochs cannot change to 3" in refusal(dataclasses.replace(old, epochs=3), 8)


def test_a_task_that_the_server_has_extended_is_registered_with_its_steps():
    accepted = Task("a", "a.jsonl", steps=5)
    longer, epochs = (
        dataclasses.replace(accepted, steps=steps, epochs=epochs)
        for steps, epochs in ((9, None), (None, 2))
    )
    assert registered_task(accepted, longer, 9) == longer
    assert registered_task(accepted, accepted, 9) == longer
    assert registered_task(epochs, longer, 9) == longer
    assert registered_task(accepted, epochs, 9) == accepted
    assert registered_task(accepted, longer, None) == accepted
