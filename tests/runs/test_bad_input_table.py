"""Every kind of bad input ends in one line that names the culprit, with exit code 2, quickly, and
without a trace in the run directory.

A case is the arguments of `jaxmux train` and what the message must hold. Everything runs in one
process.
"""

import json
import shutil
import time
from functools import partial
from pathlib import Path

import gin
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux.cli.main import run_command
from jaxmux.tasks import LONGEST_NAME

main = partial(run_command, "train", prog="jaxmux train")

INTEGERS = {
    "tiny/Task": {"batch_size": 1, "max_length": 2, "steps": 1, "seed": 0},
    "tiny/LoRA": {"rank": 1},
    "tiny/Source": {"max_samples": 1},
    "tiny/Schedule": {"warmup_steps": 0},
    "fine_tune": {
        "tokens_per_microbatch": 1,
        "row_len": 1,
        "chunk_len": 1,
        "reserved_slots": 1,
        "reserved_rank": 1,
        "max_sequences": 1,
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "max_bad_steps": 1,
        "log_every": 1,
        "sample_tokens": 1,
    },
}
# By field, values outside its range.
NUMBERS = {
    "tiny/Task": {"validation_fraction": (0, 1.0, -0.1)},
    "tiny/Source": {"repeat": (0, -1.0)},
    "tiny/LoRA": {"alpha": (), "dropout": (-0.1, 1.0), "loraplus_ratio": (0, -1.0)},
    "tiny/AdamW": {
        "learning_rate": (-1e-3,),
        "weight_decay": (-0.1,),
        "clip_norm": (0, -1.0),
        "b1": (-0.1, 1.0),
        "b2": (-0.1, 1.5),
        "eps": (0, -1e-8),
    },
    "tiny/SGD": {"momentum": (-0.1, 1)},
    "tiny/Lion": {"b1": (1,), "b2": (2.0,)},
    "tiny/Schedule": {"warmup_ratio": (-0.1, 1.1)},
    "fine_tune": {"memory_gib": (0, -4)},
}
CHOICES = {
    "tiny/LoRA": ("initialisation",),
    "tiny/Schedule": ("kind",),
    "tiny/Source": ("form", "loss_on", "overlong", "on_bad_record", "special_tokens"),
    "fine_tune": ("dtype", "backbone_format", "remat", "attention", "grouped_lora"),
}
TEXTS = {
    "tiny/Task": ("resume_from", "sample_prompt"),
    "tiny/Source": ("path", "split"),
    "fine_tune": ("mesh",),
}
FLAGS = {"tiny/LoRA": ("rslora",), "fine_tune": ("reserved_dropout",)}
NAMES = {"tiny/LoRA": ("target_modules",), "fine_tune": ("reserved_targets",)}
# What must be set for a scope to be used.
USES = {
    "tiny/SGD": ["tiny/Task.optimizer=@tiny/SGD()"],
    "tiny/Lion": ["tiny/Task.optimizer=@tiny/Lion()"],
    "tiny/Schedule": ["tiny/AdamW.schedule=@tiny/Schedule()"],
    "tiny/Source": ["tiny/Task.data=@tiny/Source()", "tiny/Source.path='x.jsonl'"],
}


def field_cases() -> dict[str, list]:
    """For every field of every specification, values of wrong types and outside its range. Of wrong
    types, the first field of a scope gets all in CI, and the others one."""
    found = {}

    def add(scope, *fields):
        """A field is a name, values of wrong types, values outside the range, and the message."""
        for place, (field, wrong, outside, expected) in enumerate(fields):
            for value in (*wrong, *outside):
                bindings = [*USES.get(scope, ()), f"{scope}.{field}={value}"]
                if scope == "tiny/AdamW" and field == "schedule":
                    bindings = bindings[-1:]
                name = f"{scope}.{field}={value}"[:60]
                marks = pytest.mark.slow if place and value in wrong[1:] else ()
                case = bindings, f"{field} should be {expected}"
                found[name] = pytest.param(*case, id=name, marks=marks)

    for scope, fields in INTEGERS.items():
        wrong = ("True", "'3'", "1.5", "[]", "1e400")
        integer = "an integer of at least"
        add(scope, *((n, wrong, (str(m - 1),), f"{integer} {m}") for n, m in fields.items()))
    for scope, ranges in NUMBERS.items():
        wrong = ("True", "'0.1'", "1e400", "1e39", "[0.1]")
        add(scope, *((field, wrong, map(str, own), "a ") for field, own in ranges.items()))
    for table, wrong, expected in (
        (CHOICES, ("'auot'", "3", "True", "['xla']"), "one of "),
        (TEXTS, ("''", "3", "True"), "a string that is not empty"),
        (FLAGS, ("'no'", "1", "None"), "True or False"),
        (NAMES, ("3", "True", "['q_proj', 3]"), "a string or a list of strings"),
    ):
        for scope, names in table.items():
            add(scope, *((field, wrong, (), expected) for field in names))
    schedule = "a Schedule or one of 'constant', 'linear', 'cosine'"
    add("tiny/AdamW", ("schedule", ("None", "3", "True", "[]"), (), schedule))
    return found


FIELDS = field_cases()
OTHER_SETTINGS = {
    "schedule by a wrong name": (["tiny/AdamW.schedule='cosin'"], "schedule: kind should be one"),
    "steps and epochs": (["tiny/Task.epochs=1"], "task 'tiny': give epochs or steps"),
    "neither steps nor epochs": (["tiny/Task.steps=None"], "task 'tiny': give epochs or steps"),
    "name of a path": (["tiny/Task.name='../up'"], "name should be a name of at most 100 letters"),
    "empty name": (["tiny/Task.name=''"], "name should be a name of at most 100 letters"),
    "number as name": (["tiny/Task.name=3"], "name should be a name of at most 100 letters"),
    "long name": ([f"tiny/Task.name='{'n' * 300}'"], f"at most {LONGEST_NAME} letters"),
    "no adapter": (["tiny/Task.adapter=None"], "adapter should be a specification"),
    "class as adapter": (
        ["tiny/Task.adapter=@tiny/LoRA"],
        "--gin.tiny/Task.adapter=@tiny/LoRA: @tiny/LoRA needs parentheses: @tiny/LoRA()",
    ),
    "text as optimizer": (
        ["tiny/Task.optimizer='adamw'"],
        "optimizer should be a specification (AdamW, Lion, SGD)",
    ),
    "no data": (["tiny/Task.data=None"], "task 'tiny': data should be a path or a Source"),
    "number as data": (["tiny/Task.data=3"], "task 'tiny': data should be a path or a Source"),
    "list as held-out data": (["tiny/Task.eval_data=['a']"], "task 'tiny': eval_data should be"),
    "reserved targets": (
        ["fine_tune.reserved_targets='q_prok'"],
        "reserved_targets: 'q_prok' matches no linear",
    ),
    "mesh of no devices": (["fine_tune.mesh='pp0'"], "pp should be at least 1; try pp1"),
    "mesh of too many": (["fine_tune.mesh='pp2'"], "2 devices, but there is 1; it would fit with"),
    "mesh of more than layers": (["fine_tune.mesh='pp64'"], "64 stages for 2 layers"),
    "mesh of tensors": (["fine_tune.mesh='pp2,tp2'"], "4 devices, but there is 1"),
    "unknown mesh": (["fine_tune.mesh='ring4'"], "mesh 'ring4': 'ring4' is no axis"),
    "sequences without lengths": (
        ["fine_tune.max_sequences=4", "fine_tune.row_len=None"],
        "max_sequences needs row_len and chunk_len beside it",
    ),
    "no targets": (["tiny/LoRA.target_modules=[]"], "task 'tiny': target_modules is empty"),
    "empty target": (["tiny/LoRA.target_modules=''"], "task 'tiny': target_modules is empty"),
    "number as target": (["tiny/LoRA.target_modules=3"], "target_modules should be a string"),
    "numbers as targets": (["tiny/LoRA.target_modules=[3]"], "target_modules should be a string"),
    "unknown target": (["tiny/LoRA.target_modules=['query']"], "'query' matches no linear"),
    "unknown single target": (["tiny/LoRA.target_modules='query'"], "'query' matches no linear"),
    "broken expression": (["tiny/LoRA.target_modules='(q'"], "is no valid regular expression"),
    "expression without match": (["tiny/LoRA.target_modules='.*x'"], "matches no linear"),
    "norm as target": (["tiny/LoRA.target_modules=['norm']"], "'norm' matches no linear"),
    "head as target of DoRA": (
        ["tiny/Task.adapter=@DoRA()", "DoRA.target_modules=['lm_head']"],
        "DoRA trains linears only, found 'lm_head'",
    ),
    "tables and their tokens": (
        ["tiny/LoRA.target_modules=['lm_head']", "tiny/LoRA.trained_tokens=[3]"],
        "trained_tokens cannot be combined with 'lm_head' among the target_modules",
    ),
    "rank above every width": (["tiny/LoRA.rank=33"], "task 'tiny': rank is 33, but no linear"),
    "huge bottleneck": (
        ["tiny/Task.adapter=@Bottleneck()", "Bottleneck.size=100000000"],
        "task 'tiny': size is 100000000, more than 8 times the width 48 of the backbone's widest",
    ),
    "huge rank of VeRA": (
        ["tiny/Task.adapter=@VeRA()", "VeRA.rank=100000000"],
        "task 'tiny': rank is 100000000, more than 8 times the width 48",
    ),
    "huge rank": (["tiny/LoRA.rank=10**30"], "10**30"),
    "row too short": (
        ["fine_tune.row_len=64", "tiny/Task.data='LONG_DATA'"],
        "task 'tiny': its longest sample",
    ),
    "row no power of two": (["fine_tune.row_len=100"], "100"),
    "chunk no power of two": (["fine_tune.chunk_len=96"], "96"),
    "chunk too short": (["fine_tune.chunk_len=32"], "32"),
    "memory for nothing": (["fine_tune.memory_gib=1e-5"], "task 'tiny' does not fit even alone"),
    "memory as text": (["fine_tune.memory_gib='40'"], "memory_gib should be a number above 0"),
    "attention of another device": (["fine_tune.attention='short'"], "short"),
    "kernel of another device": (["fine_tune.grouped_lora='mosaic_gpu'"], "mosaic_gpu"),
    "backbone by hub id": (
        ["fine_tune.backbone='org/name'"],
        "backbone 'org/name': there is no such folder, and models of the Hugging Face hub are not "
        "downloaded; run `hf download org/name --local-dir FOLDER`",
    ),
    "backbone by hub id, spelt like data": (
        ["fine_tune.backbone='hf:org/name'"],
        "backbone 'hf:org/name': there is no such folder, and models of the Hugging Face hub",
    ),
    "missing backbone": (["fine_tune.backbone='nowhere'"], "there is no such folder; download"),
    "backbone as number": (["fine_tune.backbone=3"], "backbone"),
    "no backbone": (["fine_tune.backbone=None"], "backbone"),
    "missing data": (["tiny/Task.data='nowhere.jsonl'"], "nowhere.jsonl: file not found"),
    "data of unknown kind": (["tiny/Task.data='notes.txt'"], "unknown kind of file '.txt'"),
    "folder as data": (["tiny/Task.data='FOLDER.jsonl'"], "is not a file"),
    "split of a file": ([*USES["tiny/Source"], "tiny/Source.split='test'"], "x.jsonl: file not"),
    "missing held-out data": (["tiny/Task.eval_data='no.jsonl'"], "no.jsonl: file not found"),
    "missing adapter": (["tiny/Task.resume_from='nowhere'"], "nowhere"),
    "tasks as text": (["fine_tune.tasks='tiny'"], "fine_tune.tasks should be a list of @NAME"),
    "no tasks": (["fine_tune.tasks=[]"], "fine_tune.tasks is empty"),
    "a class among the tasks": (["fine_tune.tasks=[@tiny/Task]"], "@tiny/Task needs parentheses"),
    "the same task twice": (["fine_tune.tasks=[@tiny/Task(), @tiny/Task()]"], "2 tasks have this"),
    "itself": (["fine_tune.tasks=@fine_tune()"], "refers to itself"),
    "unknown parameter": (
        ["tiny/LoRA.rnak=8"],
        "error: --gin.tiny/LoRA.rnak=8: LoRA has no field 'rnak'; did you mean rank?",
    ),
    "unknown class to set": (["Tusk.steps=8"], "--gin.Tusk.steps=8: there is no 'Tusk'; did you"),
    "a name of the config's language": (["singleton.x=8"], "there is no 'singleton'; there are"),
    "a field of nothing": (["steps=8"], "'steps' is no parameter; the name of one says whose"),
    "macro that is not set": (["tiny/Task.steps=%N"], "%N is used, but not set"),
    "unknown class": (
        ["tiny/Task.optimizer=@Adafactor()"],
        "no '@Adafactor()'; there are",
    ),
    "unknown scope": (["tyni/LoRA.rank=8"], "has the name 'tyni', as in @tyni/LoRA()"),
    "import": (["import os"], "unknown argument --gin.import os"),
    "unclosed bracket": (["tiny/LoRA.target_modules=['q'"], ""),
    "no value": (["tiny/LoRA.rank="], "there is no value behind '='"),
    "expression": (["tiny/LoRA.rank=2+2"], ""),
    "call": (["tiny/LoRA.rank=int('3')"], ""),
    "prompt beyond the context": (["tiny/Task.sample_prompt='LONG_PROMPT'"], "sample_prompt has"),
}

GOOD = {"prompt": "red", "completion": " apple"}
RECORDS = {
    "malformed JSON": ([GOOD, "{"], ":2: malformed JSON line"),
    "array": (["[", "1]"], ":1: malformed JSON line"),
    "number": ([GOOD, "7"], ":2: expected a JSON object"),
    "text": (['"red"'], ":1: expected a JSON object"),
    "null": (["null"], ":1: expected a JSON object"),
    "deep nesting": (["[" * 100_000], ":1: malformed JSON line"),
    "latin-1": ([b'{"prompt": "caf\xe9", "completion": "x"}'], ":1: malformed JSON line"),
    "NUL bytes": ([b"\0\0\0\0"], ":1: malformed JSON line"),
    "UTF-16": (["{}".encode("utf-16")], ":1: malformed JSON line"),
    "two objects": (["{} {}"], ":1: malformed JSON line"),
    "lone surrogate": (['{"prompt": "\\ud800", "completion": "x"}'], ":1: field 'prompt' is not"),
    "missing field": ([GOOD, {"prompt": "red"}], ":2: no field 'completion'"),
    "null field": ([GOOD | {"prompt": None}], ":1: null in field 'prompt'"),
    "number field": ([GOOD | {"completion": 4}], ":1: field 'completion' must be a string"),
    "list field": ([GOOD | {"completion": ["a"]}], ":1: field 'completion' must be a string"),
    "unknown fields": ([{"question": "a", "answer": "b"}], ":1: the fields fit no record form"),
    "no fields": (["{}"], ":1: the fields fit no record form"),
    "another form later": ([GOOD, {"text": "a"}], ":2: no field 'prompt'"),
    "empty completion": ([GOOD | {"completion": ""}], ":1: no target tokens"),
    "blank completion": ([GOOD | {"completion": " "}], ":1: no target tokens"),
    "blank lines in the completion": ([GOOD | {"completion": "\n\n"}], ":1: no target tokens"),
    "empty text": ([{"text": ""}], ":1: no target tokens"),
    "blank text": ([{"text": " "}], ":1: no target tokens"),
    "empty alpaca output": ([{"instruction": "a", "output": ""}], ":1: no target tokens"),
    "alpaca input of a number": (
        [{"instruction": "a", "input": 3, "output": "b"}],
        ":1: field 'input' must be a string",
    ),
    "empty file": ([], ": no records"),
    "blank lines": (["", " "], ": no records"),
}
USER = {"role": "user", "content": "fig"}
ANSWER = {"role": "assistant", "content": "red"}
CHATS = {
    "no list": ("fig", "'messages' must be a non-empty list"),
    "empty list": ([], "'messages' must be a non-empty list"),
    "an object": (USER, "'messages' must be a non-empty list"),
    "a text": ([USER, "red"], "message 1 must be an object"),
    "no role": ([USER, {"content": "red"}], "'role' of message 1 must be a string"),
    "no content": ([USER, {"role": "assistant"}], "'content' of message 1 must be a string"),
    "a number as content": ([USER, ANSWER | {"content": 3}], "'content' of message 1 must be"),
    "typing error in a role": ([USER, ANSWER | {"role": "asistant"}], "did you mean 'assistant'?"),
    "role gpt": ([USER, ANSWER | {"role": "gpt"}], "role 'gpt'; the roles are system, developer"),
    "role human": ([USER | {"role": "human"}, ANSWER], "did you mean 'user'?"),
    "role in capitals": ([USER | {"role": "User"}, ANSWER], "unknown role 'User'"),
    "empty role": ([USER | {"role": ""}, ANSWER], "unknown role ''"),
    "no answer": ([USER], "no target tokens"),
    "the assistant first": ([ANSWER], "begins with an assistant message"),
}
CONFIGS = {
    "a list": ([], "config.json: should be a JSON object, found list"),
    "a text": ("x", "config.json: should be a JSON object, found str"),
    "no architecture": ({"architectures": None}, "unknown architecture '<none>'"),
    "another architecture": ({"architectures": ["GPT2"]}, "unknown architecture 'GPT2'"),
    "architectures as a number": ({"architectures": 3}, "config.json: "),
    "layers as text": ({"num_hidden_layers": "2"}, "num_hidden_layers should be a positive"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers should be a positive"),
    "negative width": ({"hidden_size": -32}, "hidden_size should be a positive integer"),
    "width as a bool": ({"hidden_size": True}, "hidden_size should be a positive integer"),
    "vocabulary missing": ({"vocab_size": None}, "vocab_size should be a positive integer"),
    "vocabulary too small": ({"vocab_size": 3}, ""),
    "heads that do not divide": ({"num_key_value_heads": 3}, "config.json: "),
    "rope as text": ({"rope_theta": "big", "rope_parameters": None}, "config.json: "),
    "another activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
    "more layers than weights": ({"num_hidden_layers": 3}, "is missing"),
    "another width than the weights": ({"intermediate_size": 64}, "config.json implies"),
    "fewer layers than weights": ({"num_hidden_layers": 1}, "does not account for"),
}
ADAPTERS = {
    "another rank": ({"r": 3}, "has shape"),
    "no rank": ({"r": None}, "rank should be an integer"),
    "rank as text": ({"r": "2"}, "rank should be an integer"),
    "alpha of another task": ({"lora_alpha": 1}, "alpha is 1, the task asks for 32.0"),
    "another kind": ({"peft_type": "OFT"}, "peft_type='OFT' is not supported; OFT is left out: "),
    "biases": ({"bias": "all"}, "bias='all' is not supported"),
    "DoRA without magnitudes": ({"use_dora": True}, "lora_magnitude_vector is missing"),
    "ranks of others": (
        {"rank_pattern": {"q_proj": 4}},
        "has shape [2, 32], rank and backbone imply [4",
    ),
    "some layers": ({"layers_to_transform": [0]}, "layers_to_transform=[0] is not supported"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save is left out: it would"),
    "rsLoRA as text": ({"use_rslora": "no"}, "rslora should be True or False"),
    "unknown modules": ({"target_modules": ["query"]}, "'query' matches no linear"),
    "no modules": ({"target_modules": None}, "target_modules is empty"),
}


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


@pytest.fixture(scope="module")
def config(write_config) -> str:
    return write_config()


@pytest.fixture(scope="module")
def earlier(config, tmp_path_factory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("earlier")
    assert main([f"--gin_file={config}", f"--run_dir={folder}"]) == 0
    return folder


@pytest.fixture
def refused(config, tmp_path, capsys):
    """Gives the bindings to the command; returns the one line that it prints as an error."""

    def run(*bindings: str) -> str:
        run_dir = tmp_path / "run"
        capsys.readouterr()
        started = time.process_time()
        arguments = [f"--gin.{binding}" for binding in bindings]
        try:
            code = main([f"--gin_file={config}", f"--run_dir={run_dir}", *arguments])
        except SystemExit as e:  # argparse
            code = e.code
        # What other processes of the machine do does not count.
        assert time.process_time() - started < 5
        error = capsys.readouterr().err
        assert code == 2, error
        assert "Traceback" not in error
        (line,) = [line for line in error.splitlines() if "error: " in line]
        left = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
        assert left <= {".lock"}
        return line

    return run


def test_the_table_has_at_least_300_cases():
    tables = (FIELDS, OTHER_SETTINGS, RECORDS, CHATS, CONFIGS, ADAPTERS)
    assert sum(map(len, tables)) >= 300


@pytest.mark.parametrize(("bindings", "expected"), FIELDS.values())
def test_bad_field(bindings, expected, refused):
    assert expected in refused(*bindings)


@pytest.mark.long
@pytest.mark.parametrize(("bindings", "expected"), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_bad_setting(bindings, expected, refused, write_lines, tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    places = {
        "LONG_PROMPT": "red " * 5000,
        "LONG_DATA": write_lines({"prompt": "red", "completion": " apple" * 100}),
        "FOLDER.jsonl": str(tmp_path / "folder.jsonl"),
    }
    for name, value in places.items():
        bindings = [binding.replace(name, value) for binding in bindings]
    assert expected in refused(*bindings)


@pytest.mark.parametrize(("lines", "expected"), RECORDS.values(), ids=RECORDS)
def test_bad_record(lines, expected, refused, tmp_path):
    path = tmp_path / "records.jsonl"
    rows = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"".join((r if isinstance(r, bytes) else r.encode()) + b"\n" for r in rows))
    assert f"task 'tiny': {path}{expected}" in refused(f"tiny/Task.data='{path}'")


@pytest.mark.parametrize(("messages", "expected"), CHATS.values(), ids=CHATS)
def test_bad_chat(messages, expected, refused, chat_backbone, write_lines):
    path = write_lines({"messages": messages})
    line = refused(f"tiny/Task.data='{path}'", f"fine_tune.backbone='{chat_backbone}'")
    assert f"task 'tiny': {path}:1: " in line and expected in line


@pytest.mark.parametrize(("changes", "expected"), CONFIGS.values(), ids=CONFIGS)
def test_bad_backbone_config(changes, expected, refused, backbone, tmp_path):
    copy = Path(shutil.copytree(backbone, tmp_path / "backbone"))
    settings = json.loads((copy / "config.json").read_text())
    changed = settings | changes if isinstance(changes, dict) else changes
    (copy / "config.json").write_text(json.dumps(changed))
    line = refused(f"fine_tune.backbone='{copy}'")
    assert str(copy) in line or "tiny" in line
    assert expected in line


@pytest.mark.parametrize(("changes", "expected"), ADAPTERS.values(), ids=ADAPTERS)
def test_bad_adapter_to_resume_from(changes, expected, refused, earlier, tmp_path):
    copy = Path(shutil.copytree(earlier / "adapters" / "tiny", tmp_path / "adapter"))
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(settings | changes))
    line = refused(f"tiny/Task.resume_from='{copy}'")
    assert f"task 'tiny': {copy}" in line and expected in line


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_adapter_without_a_setting(key, refused, earlier, tmp_path):
    copy = Path(shutil.copytree(earlier / "adapters" / "tiny", tmp_path / "adapter"))
    settings = json.loads((copy / "adapter_config.json").read_text())
    del settings[key]
    (copy / "adapter_config.json").write_text(json.dumps(settings))
    assert f"'{key}'" in refused(f"tiny/Task.resume_from='{copy}'")


def test_adapter_of_another_backbone(refused, earlier, backbone, tmp_path):
    copy = Path(shutil.copytree(backbone, tmp_path / "backbone"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"] *= np.float32(2)
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    adapter = earlier / "adapters" / "tiny"
    line = refused(f"fine_tune.backbone='{copy}'", f"tiny/Task.resume_from='{adapter}'")
    assert f"{adapter}: was trained on another backbone ({backbone})" in line


@pytest.mark.parametrize("extra", ["--gin_file=nowhere.gin", "--restrat", "tiny.gin"])
def test_bad_arguments(extra, config, capsys):
    try:
        assert main([f"--gin_file={config}", extra]) == 2
    except SystemExit as e:
        assert e.code == 2
    assert extra.removeprefix("--gin_file=") in capsys.readouterr().err
