"""Tasks survive JSON unchanged; a specification that asks for more is refused, with its key."""

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from jaxmux.data import Source
from jaxmux.field_checks import to_object
from jaxmux.optimizers import SGD, AdamW, Lion, Schedule
from jaxmux.peft import LoRA
from jaxmux.specifications import (
    SpecificationLimits,
    read_specification,
    task_from_json,
    task_to_json,
)
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import Task, TaskError

DOCS = Path(__file__).parents[2] / "docs"
LEAST = {"name": "tiny", "data": "train.jsonl", "steps": 5}
LORA, ADAMW = {"kind": "lora"}, {"kind": "adamw"}
HUGE = 2**53

# Changes of a specification that is accepted, and what the message says.
REFUSED = {
    "unknown key": ({"stpes": 3}, '"stpes" is no key of a specification; did you mean steps?'),
    "unlike key": ({"zzz": 3}, '"zzz" is no key of a specification; the keys are name, data'),
    "key of a terminal": ({"\x1b[2J": 3}, '"\\u001b[2J" is no key'),
    "inner unknown key": (
        {"adapter": LORA | {"rnak": 2}},
        '"adapter.rnak" is no key of a specification; did you mean rank?',
    ),
    "deeper unknown key": (
        {"optimizer": ADAMW | {"schedule": {"knid": "cosine"}}},
        '"optimizer.schedule.knid" is no key of a specification; did you mean kind?',
    ),
    "code": ({"__class__": "os.system"}, '"__class__" is no key'),
    "no name": ({"name": ...}, "name is missing"),
    "no data": ({"data": ...}, "data is missing"),
    "no path": ({"data": {}}, "data.path is missing"),
    "neither epochs nor steps": ({"steps": ...}, "give epochs or steps, one of the two"),
    "epochs and steps": (
        {"epochs": 2},
        "specification: give epochs or steps, one of the two; found both",
    ),
    "name of a path": ({"name": "../up"}, "name should be a name of at most 100 letters, digits, "),
    "name with a line break": ({"name": "tiny\n"}, 'found "tiny\\n"'),
    "name of a number": ({"name": 3}, "name should be a name"),
    "long name": ({"name": "a" * 101}, "of at most 100 letters"),
    "chat template": (
        {"data": {"path": "train.jsonl", "chat_template": "{{ messages }}"}},
        "data.chat_template should be null, because a template is a program and nothing bounds its "
        "memory, found",
    ),
    "weight": (
        {"data": {"path": "train.jsonl", "weight": 2}},
        "data: a weight is a share beside other sources",
    ),
    "repeat": (
        {"data": {"path": "train.jsonl", "repeat": 2}},
        "data.repeat should be null, because repeated samples would not count",
    ),
    "rank as text": (
        {"adapter": LORA | {"rank": "16"}},
        'adapter.rank should be an integer of at least 1 and of at most 256, found "16"',
    ),
    "rank as a bool": ({"adapter": LORA | {"rank": True}}, "adapter.rank should be an integer"),
    "rank as a float": ({"adapter": LORA | {"rank": 16.0}}, "found 16.0"),
    "rank of zero": ({"adapter": LORA | {"rank": 0}}, "of at least 1"),
    "rank above the limit": ({"adapter": LORA | {"rank": 257}}, "of at most 256, found 257"),
    "rank of null": ({"adapter": LORA | {"rank": None}}, "found null"),
    "adapter without a kind": (
        {"adapter": {"rank": 4}},
        'adapter.kind is missing; it is one of "lora", "dora", "ia3", "ln_tuning", "bottleneck", '
        '"diff_pruning", "vera", "sparse_diff", "prompt_tuning", "trained_tokens"',
    ),
    "unknown adapter": ({"adapter": {"kind": "lroa"}}, 'found "lroa"; did you mean lora?'),
    "kind as a list": ({"adapter": {"kind": ["lora"]}}, 'found ["lora"]'),
    "adapter as text": (
        {"adapter": "lora"},
        'adapter should be an object such as {"kind": "lora"}',
    ),
    "adapter of null": ({"adapter": None}, 'adapter should be an object such as {"kind": "lora"}'),
    "reference of gin": ({"adapter": "@tiny/LoRA()"}, 'found "@tiny/LoRA()"'),
    "unknown optimizer": (
        {"optimizer": {"kind": "adafactor"}},
        'optimizer.kind should be one of "adamw", "sgd", "lion", found "adafactor"',
    ),
    "key of another optimizer": (
        {"optimizer": {"kind": "sgd", "b1": 0.9}},
        '"optimizer.b1" is no key',
    ),
    "rate as text": (
        {"optimizer": ADAMW | {"learning_rate": "fast"}},
        'optimizer.learning_rate should be a number of at least 0, found "fast"',
    ),
    "rate beyond float32": (
        {"optimizer": ADAMW | {"learning_rate": 1e39}},
        '"optimizer.learning_rate" holds 1e+39; expected a number of at most 9007199254740991',
    ),
    "negative rate": ({"optimizer": ADAMW | {"learning_rate": -1}}, "found -1"),
    "unknown schedule": (
        {"optimizer": ADAMW | {"schedule": "cosien"}},
        'optimizer.schedule should be one of "constant", "linear", "cosine", found "cosien"; '
        "did you mean cosine?",
    ),
    "schedule of null": ({"optimizer": ADAMW | {"schedule": None}}, "optimizer.schedule should be"),
    "endless warm-up": (
        {"optimizer": ADAMW | {"schedule": {"warmup_steps": HUGE - 1}}},
        "optimizer.schedule.warmup_steps should be",
    ),
    "batch of nothing": ({"batch_size": 0}, "batch_size should be an integer of at least 1"),
    "huge batch": ({"batch_size": 1025}, "of at most 1024, found 1025"),
    "long samples": ({"max_length": 8193}, "max_length should be"),
    "endless training": ({"steps": 100_001}, "steps should be"),
    "negative seed": ({"seed": -1}, "seed should be an integer of at least 0"),
    "huge seed": ({"seed": HUGE}, '"seed" holds 9007199254740992'),
    "endless seconds": (
        {"max_seconds": 1e300},
        '"max_seconds" holds 1e+300; expected a number of at most',
    ),
    "key of a part": ({"rank": 8}, '"rank" is no key of a specification; it is a key of adapter'),
    "misspelt initialisation": (
        {"adapter": LORA | {"initialisation": "pisa"}},
        "did you mean pissa?",
    ),
    "misspelt linear": ({"adapter": LORA | {"target_modules": "qproj"}}, "did you mean q_proj?"),
    "twice the rank": (
        {"adapter": LORA | {"initialisation": "pissa", "rank": 129}},
        "its arrays would have rank 258 with the initialisation 'pissa'; expected at most 256",
    ),
    "tokens of DoRA": (
        {"adapter": {"kind": "dora", "trained_tokens": [1]}},
        "adapter: trained_tokens: DoRA trains linears only",
    ),
    "regular expression": (
        {"adapter": LORA | {"target_modules": "(.*)*x"}},
        "adapter.target_modules should be 'all-linear', the name of a linear such as 'q_proj' or "
        "of a table such as 'lm_head', or a list of at most 1024 names (no regular "
        'expression), found "(.*)*x"',
    ),
    "expression of a pattern": (
        {"adapter": LORA | {"rank_pattern": {"(.*)*x": 3}}},
        "adapter.rank_pattern should be an object with a rank of 1 to 256 by the name of a linear",
    ),
    "expression in a list": ({"adapter": LORA | {"target_modules": [".*"]}}, 'found [".*"]'),
    "no modules": ({"adapter": LORA | {"target_modules": []}}, "found []"),
    "many modules": ({"adapter": LORA | {"target_modules": ["q_proj"] * 1025}}, "target_modules"),
    "module as a number": ({"adapter": LORA | {"target_modules": [1]}}, "found [1]"),
    "flag as a number": ({"adapter": LORA | {"rslora": 1}}, "rslora should be true or false"),
    "escape sequence": ({"sample_prompt": "\x1b]0;owned\x07"}, "sample_prompt should be a text"),
    "long prompt": ({"sample_prompt": "a" * 4097}, "of at most 4096 characters"),
    "empty prompt": ({"sample_prompt": ""}, "sample_prompt should be"),
    "hub": ({"data": "hf:a/b"}, 'found "hf:a/b"; data sets come over the network'),
    "saved data set": ({"data": {"path": "hf:folder"}}, "saved ones name their files themselves"),
    "package file": ({"data": "jaxmux:demo/tasks/mood.train.jsonl"}, "are not the tenant's"),
    "address": ({"data": "https://a.b/c.jsonl"}, "specifications name no network addresses"),
    "address of a bucket": ({"eval_data": "s3://a/c.jsonl"}, "eval_data.path should be a .jsonl"),
    "absolute path": ({"data": "/etc/passwd.jsonl"}, "paths are relative to the tenant's folder"),
    "home": ({"data": "~/train.jsonl"}, "paths are relative to the tenant's folder"),
    "folder above": ({"data": "../train.jsonl"}, "'..' could lead out of the tenant's folder"),
    "folder above, later": ({"data": "a/../../train.jsonl"}, "'..' could lead out"),
    "this folder": ({"data": "./train.jsonl"}, "data.path should be a .jsonl or .json file"),
    "double slash": ({"data": "a//train.jsonl"}, "data.path should be"),
    "hidden file": ({"data": ".ssh/train.jsonl"}, "data.path should be"),
    "backslash": ({"data": "..\\train.jsonl"}, "data.path should be"),
    "NUL": ({"data": "train\0.jsonl"}, "data.path should be"),
    "line break": ({"data": "train.jsonl\n"}, "data.path should be"),
    "full-width dots": ({"data": "．．/train.jsonl"}, "data.path should be"),
    "long path": ({"data": "a/" * 600 + "a.jsonl"}, "data.path should be"),
    "Parquet": ({"data": "train.parquet"}, "a small Parquet file can expand"),
    "Arrow": ({"data": "train.arrow"}, "data.path should be a .jsonl or .json file"),
    "compressed file": ({"data": "train.jsonl.gz"}, "a small compressed file can expand"),
    "compressed by zstd": ({"data": "train.json.zst"}, "a small compressed file can expand"),
    "table": ({"data": "train.csv"}, "limits count lines, and a row may have several"),
    "pattern": ({"data": "part-*.jsonl"}, "a specification names its one file"),
    "another split": ({"data": {"path": "train.jsonl", "split": "test"}}, 'be "train", because'),
    "split of a hub": ({"data": {"path": "train.jsonl", "split": "train[:9]"}}, "data.split"),
    "data as a list": ({"data": ["train.jsonl"]}, "a specification names its one file"),
    "data of null": ({"data": None}, "data should be a string or an object, found null"),
    "unknown form": (
        {"data": {"path": "train.jsonl", "form": "messsages"}},
        "did you mean messages?",
    ),
    "columns of no form": (
        {"data": {"path": "train.jsonl", "columns": {"zzz": "a"}}},
        "data: columns: 'zzz' is no field of a form; the fields are messages, ",
    ),
    "columns as a list": (
        {"data": {"path": "train.jsonl", "columns": [["text", "a"]]}},
        "data.columns should be an object that gives fields of a form their names in the records",
    ),
    "misspelt column": (
        {"data": {"path": "train.jsonl", "columns": {"promt": "a"}}},
        "did you mean prompt?",
    ),
    "columns of a terminal": (
        {"data": {"path": "train.jsonl", "columns": {"text": "\x1b[2J"}}},
        "data.columns should be",
    ),
    "long columns": (
        {"data": {"path": "train.jsonl", "columns": {"text": "a" * 101}}},
        "data.columns should be",
    ),
    "columns of two forms": (
        {"data": {"path": "train.jsonl", "columns": {"text": "a", "prompt": "b"}}},
        "specification: data: columns: no form has the fields text, prompt",
    ),
    "no samples": ({"data": {"path": "train.jsonl", "max_samples": 0}}, "data.max_samples should"),
    "whole validation": ({"validation_fraction": 1}, "validation_fraction should be a number"),
    "validation twice": (
        {"validation_fraction": 0.5, "eval_data": "train.jsonl"},
        "give eval_data or validation_fraction, not both",
    ),
    "eval_every of nothing": ({"eval_every": 1}, "eval_every needs eval_data or validation_fract"),
    "adapter of a hub": ({"resume_from": "org/../name"}, "'..' could lead out"),
    "adapter elsewhere": ({"resume_from": "/adapters/a"}, "paths are relative"),
    "adapter of another kind": (
        {"resume_from": "other", "adapter": {"kind": "ia3"}},
        "resume_from: only tasks with adapters of the kinds 'lora' and 'dora' can go on from an",
    ),
    "missing data": ({"data": "other.jsonl"}, "data: 'other.jsonl' cannot be opened (No such"),
    "missing held-out data": ({"eval_data": "other.jsonl"}, "eval_data: 'other.jsonl' cannot be"),
    "missing adapter": ({"resume_from": "other"}, "resume_from: 'other/adapter_config.json'"),
}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "held-out_2.json").write_text('{"text": "three"}\n')
    return tmp_path


@pytest.mark.parametrize(("changes", "problem"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_key_and_what_is_expected(changes, problem, folder):
    fields = {k: v for k, v in (LEAST | changes).items() if v is not ...}
    with pytest.raises(TaskError) as error:
        task_from_json(json.dumps(fields), folder)
    message = str(error.value)
    assert message.startswith("specification: ") and problem in message
    assert message.isprintable() and len(message) < 1000


@pytest.mark.parametrize(
    ("limits", "fields", "problem"),
    [
        (
            {"max_length": 512},
            {},
            "max_length should be .* of at least 2 and of at most 512, found 1024, the default",
        ),
        ({"rank": 8}, {}, "adapter.rank should be .* at most 8, found 16, the default"),
        (
            {"rank": 8},
            {"adapter": LORA},
            "adapter.rank should be .* at most 8, found 16, the default",
        ),
        ({"calibration_tokens": 99}, {"adapter": LORA}, None),
        (
            {"calibration_tokens": 99},
            {"adapter": LORA | {"calibration_tokens": 100}},
            "adapter.calibration_tokens should be .* of at most 99, found 100",
        ),
        (
            {"calibration_tokens": 99},
            {"adapter": LORA | {"initialisation": "eva"}},
            "adapter.calibration_tokens should be an integer of at least 1 and of at most 99, "
            "found 2048, the default",
        ),
    ],
)
def test_defaults_obey_the_limits(limits, fields, problem, folder):
    text, limits = json.dumps(LEAST | fields), SpecificationLimits(**limits)
    with pytest.raises(TaskError, match=problem) if problem else nullcontext():
        task_from_json(text, folder, limits=limits)


def test_a_specification_of_nothing_else_takes_the_defaults_of_tasks(folder):
    assert task_from_json(json.dumps(LEAST), folder) == Task(
        "tiny", str(folder / "train.jsonl"), steps=5
    )


def test_every_message_names_the_file(folder):
    for text in ("{", "{}", json.dumps(LEAST | {"seed": None}), json.dumps(LEAST | {"a": 1})):
        with pytest.raises(TaskError, match="^tiny.json: "):
            task_from_json(text, folder, name="tiny")


def test_the_name_is_that_of_the_file(folder):
    (folder / "other.json").write_text(json.dumps(LEAST))
    with pytest.raises(TaskError, match="^other.json: name should be 'other', as the file"):
        read_specification(folder / "other.json", folder)
    (folder / "tiny.json").write_text(json.dumps(LEAST))
    assert read_specification(folder / "tiny.json", folder).name == "tiny"


@pytest.mark.parametrize("name", ["tiny.gin", "tiny", ".json", ".tiny.json", "a b.json", "ü.json"])
def test_files_of_other_names_are_refused(name, folder):
    (folder / name).write_text(json.dumps(LEAST))
    with pytest.raises(TaskError, match="should be called NAME.json"):
        read_specification(folder / name, folder)


def test_a_name_of_control_characters_is_not_printed(folder):
    with pytest.raises(TaskError) as error:
        task_from_json(json.dumps(LEAST), folder, name="\x1b[2J")
    assert str(error.value).isprintable()


def test_a_specification_is_no_link_and_not_larger_than_its_limit(folder):
    (folder / "real").write_text(json.dumps(LEAST))
    (folder / "tiny.json").symlink_to(folder / "real")
    with pytest.raises(TaskError, match="tiny.json: .* found a symbolic link"):
        read_specification(folder / "tiny.json", folder)
    (folder / "large.json").write_bytes(b" " * 70_000)
    with pytest.raises(TaskError, match="^large.json: .*70000 bytes; expected at most 65536"):
        read_specification(folder / "large.json", folder)


def test_limits_are_the_operators(folder):
    text = json.dumps(LEAST | {"batch_size": 9})
    with pytest.raises(TaskError, match="of at most 8, found 9"):
        task_from_json(text, folder, limits=SpecificationLimits(batch_size=8))


def random_task(rng: random.Random, folder: Path) -> Task:
    def some(cls, **values):
        return cls(**{k: rng.choice(v) for k, v in values.items() if rng.random() < 0.5})

    def source():
        path = rng.choice(["train.jsonl", "data/held-out_2.json"])
        return some(
            lambda **options: Source(str(folder / path), **options),
            form=("auto", "messages"),
            loss_on=("all",),
            overlong=("drop", "error"),
            on_bad_record=("skip",),
            special_tokens=("escape",),
            columns=({"messages": "caf\u00e9 2"}, {}),
            max_samples=(1, 2**53 - 1),
        )

    schedule = some(
        Schedule, kind=("linear", "cosine"), warmup_steps=(0, 7), warmup_ratio=(0, 1, 0.1)
    )
    optimizer = some(
        lambda **values: rng.choice((AdamW, SGD, Lion))(schedule=schedule, **values),
        learning_rate=(0, 1, rng.random(), 1e-300),
        weight_decay=(rng.random(),),
        clip_norm=(None, 3),
    )
    adapter = some(
        LoRA,
        rank=(2, 256),
        alpha=(-1, 0.1 + 0.2, 7),
        dropout=(0.5,),
        target_modules=("q_proj", ("q_proj",), ("layers.3.mlp.up_proj", "v_proj")),
        rslora=(True,),
        initialisation=("gaussian", "orthogonal"),
    )
    ends = rng.choice([{"epochs": 2}, {"steps": 3}])
    return some(
        lambda **values: Task("a-1", source(), adapter, optimizer, **values, **ends),
        batch_size=(1, 1024),
        max_length=(2, 8192),
        seed=(0, 2**53 - 1),
        eval_data=(source(),),
        sample_prompt=("\tWhat?\n", "日本🙂"),
    )


@pytest.mark.long
def test_random_tasks_survive_json(folder):
    rng = random.Random(0)
    for _ in range(200):
        task = random_task(rng, folder)
        fields = task_to_json(task, folder)
        found = task_from_json(json.dumps(fields), folder, name="a-1")
        assert found == task and repr(found) == repr(task)
        assert task_to_json(found, folder) == fields == json.loads(json.dumps(fields))


@pytest.mark.long
def test_random_damage_is_accepted_or_a_task_error(folder):
    rng = random.Random(1)
    values = [None, True, -1, 0, 3, 1e300, "", "x", "../x", [], ["q_proj"], {}, {"kind": "lora"}]
    accepted = 0
    for _ in range(1000):
        fields = task_to_json(random_task(rng, folder), folder)
        inner = rng.choice([fields, fields["adapter"], fields["optimizer"], fields["data"]])
        key = rng.choice([*inner, "other"])
        if rng.random() < 0.2:
            inner.pop(key, None)
        else:
            inner[key] = rng.choice(values)
        try:
            task = task_from_json(json.dumps(fields), folder)
        except TaskError:
            continue
        accepted += 1
        assert task_to_json(task, folder).keys() >= fields.keys()
    assert 50 < accepted < 950


def test_a_damaged_record_of_jaxmux_is_refused_with_its_key():
    fields = to_object(Task("tiny", "train.jsonl", steps=1))
    fields["optimizer"]["schedule"]["warmup_ratio"] = 2
    with pytest.raises(ValueError, match="^Task: optimizer.schedule.warmup_ratio: Input should be"):
        from_json(fields)


def test_a_task_outside_the_folder_has_no_relative_paths(folder):
    with pytest.raises(TaskError, match="task 'tiny': '/other/train.jsonl' is not inside"):
        task_to_json(Task("tiny", "/other/train.jsonl", steps=1), folder)


def test_the_example_of_the_documentation_is_accepted(folder):
    text = (DOCS / "task_files.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    for name in ("billing", "billing_eval"):
        (folder / "data" / f"{name}.jsonl").write_text('{"text": "one"}\n')
    task = task_from_json(example, folder, name="billing")
    assert (task.adapter.rank, task.optimizer.schedule.kind) == (16, "cosine")
    with pytest.raises(TaskError) as error:
        task_from_json(example.replace('"rank"', '"rnak"'), folder, name="billing")
    assert str(error.value) in text
    with pytest.raises(TaskError) as error:
        task_from_json(example.replace('"rank": 16', '"rank": 512'), folder, name="billing")
    assert str(error.value) in text


def test_the_limits_of_the_documentation_are_the_defaults():
    text = (DOCS / "task_files.md").read_text()
    units = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "": 1}
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\d,]+) ?(\w*) \|$", text, flags=re.MULTILINE)
    found = {name: int(number.replace(",", "")) * units[unit] for name, number, unit in rows}
    assert SpecificationLimits(**found) == SpecificationLimits()
    assert len(found) == len(SpecificationLimits.__dataclass_fields__)
