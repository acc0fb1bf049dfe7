"""Bad input is refused before anything is trained, in one line that names the culprit."""

import json
import shutil
from functools import partial

import gin
import pytest

from jaxmux.cli.main import run_command

main = partial(run_command, "train", prog="jaxmux train")

GOOD = {"prompt": "red", "completion": " apple"}
CHAT = {"messages": [{"role": "user", "content": "fig"}, {"role": "assistant", "content": "red"}]}


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


@pytest.fixture(scope="module")
def runs(write_config, tmp_path_factory):
    """A folder of runs, one of them finished."""
    folder = tmp_path_factory.mktemp("runs")
    assert main([f"--gin_file={write_config()}", f"--run_dir={folder / 'earlier'}"]) == 0
    return folder


@pytest.fixture
def refused(runs, write_config, data, adapter_bytes, tmp_path, capsys):
    """Runs a good task, "tiny", beside "bad", which the given lines spoil; returns the message."""

    def run(*lines: str, backbone=None, run_dir=None) -> str:
        config = write_config(
            "fine_tune.tasks = [@tiny/Task(), @bad/Task()]",
            "bad/Task.name = 'bad'",
            f"bad/Task.data = {data['short']!r}",
            "bad/Task.steps = 2",
            "bad/Task.adapter = @bad/LoRA()",
            *lines,
            run={"backbone": str(backbone)} if backbone else None,
        )
        before = adapter_bytes(runs / "earlier" / "adapters")
        capsys.readouterr()
        run_dir = run_dir or runs / tmp_path.name
        assert main([f"--gin_file={config}", f"--run_dir={run_dir}"]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("error: ")
        assert "step" not in output.out
        if run_dir != runs / "earlier":
            assert not any((run_dir / name).exists() for name in ("metrics.jsonl", "adapters"))
        assert len(before) == 2
        assert adapter_bytes(runs / "earlier" / "adapters") == before
        return output.err

    return run


FILES = {
    "malformed JSON": ([GOOD, "", '{"prompt": "red"'], ":3: malformed JSON line"),
    "array instead of objects": (["[", '{"a": 1}', "]"], ":1: malformed JSON line"),
    "no object": ([GOOD, "7"], ":2: expected a JSON object"),
    "missing field": ([GOOD, {"prompt": "red"}], ":2: no field 'completion'"),
    "null in a field": ([GOOD, GOOD | {"prompt": None}], ":2: null in field 'prompt'"),
    "number in a field": ([GOOD | {"completion": 4}], ":1: field 'completion' must be a string"),
    "fields of no form": ([{"question": "a", "answer": "b"}], ":1: the fields fit no record form"),
    "empty": ([], ": no records"),
    "blank lines only": (["", ""], ": no records"),
    "no target tokens": ([GOOD, GOOD | {"completion": ""}], ":2: no target tokens"),
    "chat without template": ([CHAT], ":1: a chat needs a chat template"),
}


@pytest.mark.parametrize(("lines", "expected"), FILES.values(), ids=FILES)
def test_bad_record_is_named_by_task_file_and_line(lines, expected, write_lines, refused):
    path = write_lines(*lines)
    assert f"task 'bad': {path}{expected}" in refused(f"bad/Task.data = {path!r}")


def test_bad_record_of_the_held_out_data_is_named(write_lines, refused):
    path = write_lines(GOOD, "{", name="held_out.jsonl")
    assert f"task 'bad': {path}:2: malformed" in refused(f"bad/Task.eval_data = {path!r}")


@pytest.mark.parametrize("field", ["data", "eval_data"])
def test_missing_file_is_named(field, refused):
    message = refused(f"bad/Task.{field} = 'nowhere.jsonl'")
    assert "task 'bad': nowhere.jsonl: file not found" in message


def test_conversation_that_answers_nothing_is_named(write_lines, refused, chat_backbone):
    silent = {"messages": [{"role": "user", "content": "fig"}]}
    path = write_lines(CHAT, silent)
    message = refused(f"bad/Task.data = {path!r}", backbone=chat_backbone)
    assert f"task 'bad': {path}:2: no target tokens" in message


@pytest.mark.long
def test_chat_data_trains_where_the_tokenizer_has_a_template(
    write_config, data, chat_backbone, tmp_path
):
    config = write_config(
        f"tiny/Task.data = {data['chat']!r}", run={"backbone": f"{chat_backbone}"}
    )
    assert main([f"--gin_file={config}", f"--run_dir={tmp_path}"]) == 0


SETTINGS = {
    "unknown target module": (
        "bad/LoRA.target_modules = ['q_proj', 'c_attn']",
        "task 'bad': target_modules: 'c_attn' matches no linear",
    ),
    "bad expression": ("bad/LoRA.target_modules = '*_proj'", "task 'bad': target_modules: '*_pr"),
    "no target modules": ("bad/LoRA.target_modules = []", "target_modules is empty"),
    "rank 0": ("bad/LoRA.rank = 0", "rank should be an integer of at least 1, found 0"),
    "duplicate task names": ("bad/Task.name = 'tiny'", "task 'tiny': 2 tasks have this name"),
    "unknown optimizer": (
        "bad/Task.optimizer = 'adamw'",
        "task 'bad': optimizer should be a specification (AdamW, Lion, SGD), found 'adamw'",
    ),
    "unknown optimizer class": ("bad/Task.optimizer = @Adafactor()", "Adafactor"),
    "negative learning rate": ("bad/AdamW.learning_rate = -1", "learning_rate"),
    "unknown schedule": (
        "bad/Schedule.kind = 'cosin'",
        "bad/Schedule: schedule: kind should be one of",
    ),
    "gin typo": ("bad/LoRA.rnak = 8", "rnak"),
    "empty batch": ("bad/Task.batch_size = 0", "task 'bad': batch_size"),
    "both lengths": ("bad/Task.epochs = 1", "task 'bad': give epochs or steps"),
    "no adapter to resume from": ("bad/Task.resume_from = 'nowhere'", "task 'bad': nowhere"),
}
# What a line of `SETTINGS` needs before it matters.
USES = {
    "bad/AdamW": "bad/Task.optimizer = @bad/AdamW()",
    "bad/Schedule": "bad/Task.optimizer = @bad/AdamW()\nbad/AdamW.schedule = @bad/Schedule()",
}


@pytest.mark.parametrize(("line", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_bad_setting_is_named(line, expected, refused):
    assert expected in refused(USES.get(line.split(".")[0], ""), line)


def test_task_beyond_the_memory_is_named_with_the_change_that_would_help(
    write_config, data, tmp_path, capsys
):
    config = write_config(
        "fine_tune.tasks = [@tiny/Task(), @large/Task()]",
        "large/Task.name = 'large'",
        f"large/Task.data = {data['short']!r}",
        "large/Task.steps = 2",
        "large/Task.adapter = @large/LoRA()",
        "large/LoRA.rank = 32",
        "fine_tune.remat = 'auto'",
        "fine_tune.memory_gib = 0.0012",
        run={"reserved_slots": None, "reserved_rank": None, "reserved_targets": None},
    )
    assert main([f"--gin_file={config}", f"--run_dir={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: task 'large' does not fit even alone on pp1,tp1: a step of 1 slot of"
    )
    assert "it would fit with ranks of at most" in line and "stages" not in line
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("kind", ["rank 0", "negative learning rate", "unknown schedule"])
def test_setting_that_its_class_refuses_is_named_with_its_task(kind, refused):
    """A config has many LoRAs; the one at fault is told by its scope."""
    line, _ = SETTINGS[kind]
    assert "bad" in refused(USES.get(line.split(".")[0], ""), line)


def test_unknown_reference_is_named_with_those_that_there_are(refused):
    message = refused("bad/Task.optimizer = @Adafactor()")
    assert "'@Adafactor()'; there are fine_tune, serve, Task, " in message
    assert "AdamW, SGD, Lion" in message


def test_config_without_tasks_says_so(refused):
    assert refused("fine_tune.tasks = []") == "error: fine_tune.tasks is empty\n"


@pytest.fixture
def spoilt(backbone, tmp_path):
    """A copy of the backbone to spoil."""
    folder = tmp_path / "spoilt"
    shutil.copytree(backbone, folder)
    return folder


def test_vocabulary_mismatch_is_named(spoilt, refused, data):
    """A tokenizer with more tokens than the model has embeddings."""
    config = json.loads((spoilt / "tokenizer.json").read_text())
    vocabulary = config["model"]["vocab"]
    config["model"]["vocab"] = {t: i + 400 * (i > 5) for t, i in vocabulary.items()}
    (spoilt / "tokenizer.json").write_text(json.dumps(config))
    message = refused(backbone=spoilt)
    assert f"task 'tiny': {data['short']}:1: token id" in message
    assert f"outside the model's vocabulary of {len(vocabulary)}" in message


def test_backbone_without_config_is_named(spoilt, refused):
    (spoilt / "config.json").unlink()
    assert f"{spoilt / 'config.json'}: not found" in refused(backbone=spoilt)


def test_missing_backbone_is_named(tmp_path, refused):
    assert str(tmp_path / "nowhere") in refused(backbone=tmp_path / "nowhere")


def test_backbone_without_tokenizer_is_named(spoilt, refused):
    for path in spoilt.glob("*token*"):
        path.unlink()
    assert f"{spoilt}: " in (message := refused(backbone=spoilt))
    assert "tokenizer" in message


@pytest.mark.parametrize("kept", [0, 7, 200, -100], ids=["empty", "7 bytes", "header", "tail"])
def test_truncated_safetensors_are_named(kept, spoilt, refused):
    path = spoilt / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert f"{path}: cannot be read as safetensors" in refused(backbone=spoilt)


def test_truncated_adapter_is_named(runs, refused, tmp_path):
    folder = tmp_path / "adapter"
    shutil.copytree(runs / "earlier" / "adapters" / "tiny", folder)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    message = refused(f"bad/Task.resume_from = {str(folder)!r}", "bad/LoRA.rank = 2")
    assert f"task 'bad': {folder}: cannot be read" in message


def test_adapter_of_another_rank_is_named(runs, refused):
    folder = runs / "earlier" / "adapters" / "tiny"
    message = refused(f"bad/Task.resume_from = {str(folder)!r}", "bad/LoRA.rank = 5")
    assert f"task 'bad': {folder}: rank is 2, the task asks for 5" in message


def test_run_directory_below_a_file_is_named(refused, tmp_path):
    (tmp_path / "file").write_text("")
    run_dir = tmp_path / "file" / "run"
    assert f"run directory {run_dir}: not writable" in refused(run_dir=run_dir)


def test_run_directory_of_another_config_is_named(runs, refused):
    message = refused(run_dir=runs / "earlier")
    assert f"run directory {runs / 'earlier'}: belongs to another config" in message
    assert "tasks.bad: only here" in message
