"""`python -m jaxmux.train`: arguments, configs, run directories and exit codes."""

import dataclasses
import fcntl
import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import gin
import pytest

from jaxmux.cli import gin_bindings
from jaxmux.cli.main import run_command

main = partial(run_command, "train", prog="jaxmux train")


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


@pytest.fixture
def refused(tmp_path, capsys):
    """Runs a command that should refuse its input; returns the one line that says why."""

    def run(*arguments: str) -> str:
        assert main([*arguments, f"--run_dir={tmp_path / 'run'}"]) == 2
        output = capsys.readouterr()
        assert output.err.startswith("error: ")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return output.err

    return run


def test_help_is_useful(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--help"])
    assert exit.value.code == 0
    shown = capsys.readouterr().out
    for wanted in ("--gin_file", "--run_dir", "--restart", "--gin.NAME", "fine_tune.backbone"):
        assert wanted in shown
    assert "Exit code" in shown and "demo" in shown


def test_config_in_the_help_names_real_parameters(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["--help"])
    example = capsys.readouterr().out.split("a config:")[1].split("...")[0]
    path = tmp_path / "example.gin"
    path.write_text("\n".join(line.strip() for line in example.splitlines()))
    support = ["support/Task.name='support'", "support/Task.data='s.jsonl'", "support/Task.steps=1"]
    gin_bindings.parse([str(path)], support)
    names = [task.name for task in gin_bindings.run_config().tasks]
    assert names == ["billing", "support"]


@pytest.mark.parametrize("argument", ["--gin_fiel=x.gin", "x.gin", "--gin.Task.steps", "--steps=3"])
def test_unknown_argument_is_named(argument, capsys):
    with pytest.raises(SystemExit) as exit:
        main([argument])
    assert exit.value.code == 2
    assert f"unknown argument {argument}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "hint"),
    [("--resart", "did you mean --restart?"), ("--steps=3", "a parameter is set by --gin.NAME")],
)
def test_unknown_option_gets_a_hint(argument, hint, capsys):
    with pytest.raises(SystemExit):
        main([argument])
    assert hint in capsys.readouterr().err


def test_help_lists_the_exit_codes_of_the_documentation(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = " ".join(capsys.readouterr().out.split("Exit codes:")[1].split("options:")[0].split())
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    rows = re.findall(r"^\| (\d[\d, ]*) \| (.*) \|$", page, re.MULTILINE)
    assert " ".join(f"{code} {meaning}" for code, meaning in rows) == listed


@pytest.mark.long
def test_command_trains_and_exits_with_zero(write_config, tmp_path, monkeypatch, capsys):
    """In a folder of its own: the run directory is named by the config."""
    monkeypatch.chdir(tmp_path)
    assert main([f"--gin_file={write_config(name='my_tasks')}"]) == 0
    shown = capsys.readouterr().out
    adapter = tmp_path / "runs" / "my_tasks" / "adapters" / "tiny"
    assert str(adapter) in shown
    assert (adapter / "adapter_model.safetensors").exists()
    assert "tiny step 3/3" in shown
    assert "\x1b" not in shown


def test_refused_config_exits_with_two_and_one_line(refused):
    (line,) = refused("--gin_file=nowhere.gin").splitlines()
    assert line.startswith("error: nowhere.gin: cannot be read")


@pytest.mark.long
def test_finished_run_exits_with_its_original_status(write_config, tmp_path, capsys):
    config = write_config(
        "tiny/Task.optimizer = @SGD()",
        "SGD.learning_rate = 1e38",
        "SGD.clip_norm = None",
        "tiny/LoRA.alpha = 64.0",
        "tiny/Task.steps = 5",
        run={"max_bad_steps": 2},
    )
    arguments = [f"--gin_file={config}", f"--run_dir={tmp_path}"]
    assert main(arguments) == 1
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    assert "FAILED task tiny: " in capsys.readouterr().out
    assert main(arguments) == 1
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics
    assert "FAILED task tiny: " in capsys.readouterr().out


def test_binding_overrides_the_file(write_config, tmp_path):
    config = write_config()
    arguments = [f"--gin_file={config}", f"--run_dir={tmp_path}"]
    assert main([*arguments, "--gin.tiny/Task.steps=2", "--gin.Task.seed=5"]) == 0
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["tasks"]["tiny"]["steps"] == 2
    assert run["tasks"]["tiny"]["seed"] == 5
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tasks"]["tiny"]["steps"] == 2


def test_later_file_overrides_an_earlier_one(write_config, tmp_path):
    override = tmp_path / "longer.gin"
    override.write_text("tiny/Task.steps = 4\n")
    gin_bindings.parse([write_config(), str(override)], [])
    assert gin_bindings.run_config().tasks[0].steps == 4


@pytest.mark.long
def test_resolved_config_means_the_same(write_config, tmp_path):
    """Also with a prompt of several lines and beyond a line's width."""
    prompt = "first line\n'second' \"line\" " + "and more words " * 20
    binding = f"--gin.tiny/Task.sample_prompt={prompt!r}"
    config = write_config("tiny/AdamW.schedule = @Schedule()", "Schedule.kind = 'linear'")
    assert main([f"--gin_file={config}", binding, f"--run_dir={tmp_path}"]) == 0
    gin_bindings.parse([config], [binding.removeprefix("--gin.")])
    expected = gin_bindings.run_config()
    gin_bindings.parse([str(tmp_path / "config.gin")], [])
    resolved = gin_bindings.run_config()
    assert resolved == expected
    assert expected.tasks[0].sample_prompt == prompt
    text = (tmp_path / "config.gin").read_text()
    for field in dataclasses.fields(gin_bindings.RunConfig):
        assert text.count(f"fine_tune.{field.name} = ") == 1
    # And so the directory is that of the resolved config, too.
    resolved = tmp_path / "config.gin"
    assert main([f"--gin_file={resolved}", f"--run_dir={tmp_path}"]) == 0


def test_scope_that_nothing_uses_is_a_typo(write_config, tmp_path, capsys):
    config = write_config()
    arguments = [f"--gin_file={config}", f"--run_dir={tmp_path / 'run'}"]
    assert main([*arguments, "--gin.tinny/LoRA.rank=3"]) == 2
    error = capsys.readouterr().err
    assert "tinny/LoRA.rank: nothing in the config has the name 'tinny'" in error
    assert "did you mean tiny?" in error


def test_a_binding_may_replace_a_reference_whose_scope_then_stays_unused(write_config):
    config = write_config(
        "tiny/AdamW.schedule = @cosine/Schedule()", "cosine/Schedule.kind = 'cosine'"
    )
    gin_bindings.parse([config], ["tiny/AdamW.schedule='constant'"])
    (task,) = gin_bindings.run_config().tasks
    assert task.optimizer.schedule.kind == "constant"


def test_a_task_that_no_list_names_is_refused_though_it_refers_to_itself(write_config):
    config = write_config("other/Task.adapter = @other/LoRA()", "other/LoRA.rank = 4")
    gin_bindings.parse([config], [])
    with pytest.raises(gin_bindings.ConfigError, match="has the name 'other'"):
        gin_bindings.run_config()


def test_a_parameter_that_is_not_set_is_named(tmp_path):
    config = tmp_path / "config.gin"
    config.write_text(
        "fine_tune.backbone = 'b'\nfine_tune.tasks = [@tiny/Task()]\ntiny/Task.name = 'tiny'\n"
    )
    gin_bindings.parse([str(config)], [])
    with pytest.raises(gin_bindings.ConfigError, match="^tiny/Task: not set: data$"):
        gin_bindings.run_config()
    gin_bindings.parse([str(config)], ["fine_tune.tasks=[@Task()]"])
    with pytest.raises(gin_bindings.ConfigError, match="^Task: not set: name, data$"):
        gin_bindings.run_config()


@pytest.mark.long
def test_run_directory_of_another_config_is_refused_by_key(write_config, tmp_path, capsys):
    config = write_config()
    arguments = [f"--gin_file={config}", f"--run_dir={tmp_path}"]
    assert main(arguments) == 0
    capsys.readouterr()
    assert main([*arguments, "--gin.tiny/LoRA.rank=3"]) == 2
    message = capsys.readouterr().err
    assert f"run directory {tmp_path}: belongs to another config" in message
    assert "tasks.tiny.adapter.rank: 2 there, 3 here" in message
    assert main([*arguments, "--gin.tiny/LoRA.rank=3", "--restart"]) == 0


@pytest.mark.long
def test_mended_config_may_use_the_directory_of_the_refused_one(write_config, tmp_path):
    """Nothing was trained, so there is nothing to protect."""
    arguments = [f"--gin_file={write_config()}", f"--run_dir={tmp_path / 'run'}"]
    assert main([*arguments, "--gin.tiny/LoRA.target_modules=['q_porj']"]) == 2
    assert main([*arguments, "--gin.tiny/LoRA.target_modules=['q_proj']"]) == 0


@pytest.mark.parametrize("exists", [False, True])
def test_refused_run_leaves_no_folder_that_it_made(exists, write_config, tmp_path):
    run_dir = tmp_path / "run"
    if exists:
        run_dir.mkdir()
    config = write_config("tiny/Task.eval_data = 'nowhere.jsonl'")
    assert main([f"--gin_file={config}", f"--run_dir={run_dir}"]) == 2
    assert run_dir.exists() is exists


def test_restart_with_a_bad_task_keeps_the_earlier_run(write_config, tmp_path, adapter_bytes):
    arguments = [f"--gin_file={write_config()}", f"--run_dir={tmp_path}"]
    assert main(arguments) == 0
    before = adapter_bytes(tmp_path / "adapters")
    assert main([*arguments, "--restart", "--gin.tiny/Task.data='nowhere.jsonl'"]) == 2
    assert adapter_bytes(tmp_path / "adapters") == before


def test_unwritable_run_directory_is_named(write_config, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    for run_dir in (file, file / "run"):
        assert main([f"--gin_file={write_config()}", f"--run_dir={run_dir}"]) == 2
        assert f"run directory {run_dir}: not writable" in capsys.readouterr().err


def test_locked_run_directory_is_refused(write_config, tmp_path, capsys):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main([f"--gin_file={write_config()}", f"--run_dir={tmp_path}"]) == 2
    assert f"run directory {tmp_path}: in use by another process" in capsys.readouterr().err
    assert main([f"--gin_file={write_config()}", f"--run_dir={tmp_path}"]) == 0


def test_folder_with_files_of_an_unknown_run_is_refused(write_config, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert main([f"--gin_file={write_config()}", f"--run_dir={tmp_path}"]) == 2
    assert "holds metrics.jsonl but no run.json" in capsys.readouterr().err


IMPORTS = ("import os", "from os import path", "from __gin__ import dynamic_registration")


@pytest.mark.parametrize("statement", IMPORTS)
def test_import_is_refused_by_file_and_line(statement, write_config, refused):
    config = write_config("# A comment.", statement)
    line = Path(config).read_text().splitlines().index(statement) + 1
    assert f"{config}:{line}: configs may not import modules" in refused(f"--gin_file={config}")


@pytest.fixture
def module_that_tells(tmp_path, monkeypatch) -> Path:
    """A module on the path that leaves a file behind when it is imported."""
    trace = tmp_path / "imported"
    (tmp_path / "telltale.py").write_text(f"open({str(trace)!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return trace


def test_import_of_an_included_file_is_refused(write_config, refused, tmp_path, module_that_tells):
    inner, outer = tmp_path / "inner.gin", tmp_path / "outer.gin"
    inner.write_text("\nimport telltale\n")
    outer.write_text(f"include {str(inner)!r}\n")
    config = write_config(f"include {str(outer)!r}")
    assert f"{inner}:2: configs may not import modules" in refused(f"--gin_file={config}")
    assert not module_that_tells.exists()


LINES = """\
first/Task.data = 'a.jsonl'
fine_tune.backbone = 'b'
fine_tune.tasks = [
  @first/Task(),
]
include '{inner}'  # before the last line

first/Task.max_length = 9
"""
INNER = "first/Task.name = 'inner'\nfirst/Task.steps = 7\nfirst/Task.max_length = 8\n"
# What Python calls the end of a line, but LF and CRLF.
NO_ENDS = "\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_only_line_feeds_end_the_lines_of_configs_and_of_what_they_include(end, tmp_path):
    """A setting behind another separator belongs to the comment before it."""
    comment = "".join(f"{other} # {other}first/Task.seed = 5" for other in NO_ENDS)
    inner, outer = tmp_path / "inner.gin", tmp_path / "outer.gin"
    for path, text in ((inner, INNER), (outer, LINES.format(inner=inner))):
        commented = "".join(f"{line} # {comment}{end}" for line in text.splitlines())
        path.write_bytes((commented + f"first/Task.seed = 4\r{end}").encode("utf-8-sig"))
        gin_bindings.parse([str(path)], [])
    (task,) = gin_bindings.run_config().tasks
    assert (task.name, task.steps, task.max_length, task.seed) == ("inner", 7, 9, 4)


def test_a_return_within_a_line_of_a_config_is_refused(tmp_path):
    inner, outer = tmp_path / "inner.gin", tmp_path / "outer.gin"
    for line in ("a/Task.seed = 1\ra/Task.steps = 9", "a/Task.name = 'x\ry'", "a/Task.seed =\r1"):
        inner.write_bytes(f"{INNER}# a\rb\r\n\r\n{line}\r\n".encode())
        outer.write_bytes(LINES.format(inner=inner).encode())
        with pytest.raises(gin_bindings.ConfigError, match="carriage return") as error:
            gin_bindings.parse([str(outer)], [])
        assert str(error.value).startswith(f"{inner}:6: ")


def test_lines_around_an_include_keep_their_numbers(tmp_path):
    inner, outer = tmp_path / "inner.gin", tmp_path / "outer.gin"
    inner.write_text(f"{INNER}\nfirst/Task.stepps = 3\n")
    outer.write_text(LINES.format(inner=inner))
    with pytest.raises(gin_bindings.ConfigError, match=f"{inner}:5: Task has no field 'stepps'"):
        gin_bindings.parse([str(outer)], [])
    inner.write_text(INNER)
    outer.write_text(LINES.format(inner=inner) + "first/Task.stepps = 3\n")
    with pytest.raises(gin_bindings.ConfigError, match=f"{outer}:9: Task has no field 'stepps'"):
        gin_bindings.parse([str(outer)], [])


@pytest.mark.parametrize("statement", ["import telltale", "include 'inner.gin'"])
def test_import_through_a_binding_is_refused(
    statement, write_config, refused, tmp_path, module_that_tells, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner.gin").write_text("import telltale\n")
    message = refused(f"--gin_file={write_config()}", f"--gin.Task.seed=1\n{statement}")
    assert "configs may not import modules (telltale)" in message
    assert not module_that_tells.exists()


def test_file_that_includes_itself_is_refused(refused, tmp_path):
    config = tmp_path / "round.gin"
    config.write_text(f"include {str(config)!r}\n")
    assert str(config) in refused(f"--gin_file={config}")


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("--gin.tiny/Task.data=bad.jsonl", """'--gin.tiny/Task.data="bad.jsonl"'"""),
        ("--gin.tiny/Task.data=/a/b c.jsonl", """'--gin.tiny/Task.data="/a/b c.jsonl"'"""),
        ("--gin.tiny/LoRA.target_modules=[q_proj]", "'q_proj'"),
    ],
)
def test_string_without_quotes_is_shown_with_them(argument, hint, write_config, refused):
    message = refused(f"--gin_file={write_config()}", argument)
    assert message == f"error: {argument}: a string needs quotes: {hint}\n"


@pytest.mark.long
def test_both_forms_of_a_binding_mean_the_same(write_config, tmp_path):
    for number, form in enumerate(("--gin.", "--gin_param=")):
        run_dir = tmp_path / str(number)
        binding = f"{form}tiny/Task.steps=1"
        assert main([f"--gin_file={write_config()}", binding, f"--run_dir={run_dir}"]) == 0
        assert json.loads((run_dir / "run.json").read_text())["tasks"]["tiny"]["steps"] == 1


MISTAKES = {
    "unknown parameter": ("tiny/LoRA.rnak = 8", "'rnak'; did you mean rank?"),
    "parameter like no other": ("tiny/LoRA.xyz = 8", "'xyz'; its fields are rank, "),
    "string without quotes": (
        "tiny/Task.eval_data = bad.jsonl",
        '{config}:{line}: a string needs quotes: tiny/Task.eval_data = "bad.jsonl"',
    ),
    "unknown configurable": ("tiny/Task.optimizer = @Adam()", "@Adam()'; did you mean AdamW?"),
    "left out": ("tiny/Task.adapter = @OFT()", "'@OFT()'; OFT is left out: its rotations"),
    "parameter that is left out": ("tiny/LoRA.modules_to_save = 'lm_head'", "it would be a whole"),
    "initialisation that is left out": ("tiny/LoRA.initialisation = 'loftq'", "LoftQ is left out"),
    "unknown name of a binding": ("Tsak.steps = 3", "'Tsak'; did you mean Task?"),
    "malformed value": ("tiny/Task.steps = = 3", "{config}:{line}"),
    "unclosed bracket": ("fine_tune.tasks = [@tiny/Task(),", "{config}"),
    "missing file of an include": ("include 'nowhere.gin'", "nowhere.gin"),
    "value that its class refuses": ("tiny/LoRA.rank = 0", "rank should be an integer"),
    "no number of steps": ("tiny/Task.steps = None", "give epochs or steps"),
    "a task that is none": ("fine_tune.tasks = ['tiny']", "tasks"),
    "a task without a list": ("fine_tune.tasks = @tiny/Task()", "tasks"),
    "run_dir within the config": ("fine_tune.run_dir = 'elsewhere'", "run_dir"),
    "unknown dtype": ("fine_tune.dtype = 'float61'", "float61"),
    "unknown remat policy": ("fine_tune.remat = 'dost'", "dost"),
    "checkpoints never": ("fine_tune.checkpoint_every = 0", "checkpoint_every"),
    "microbatches of nothing": ("fine_tune.tokens_per_microbatch = 0", "microbatch"),
    "row of an odd length": ("fine_tune.row_len = 100", "row_len=100"),
}


@pytest.mark.parametrize(("line", "culprit"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_config_is_named(line, culprit, write_config, refused):
    config = write_config(line)
    number = Path(config).read_text().splitlines().index(line) + 1
    assert culprit.format(config=config, line=number) in refused(f"--gin_file={config}")


@pytest.mark.parametrize("parameter", ["backbone", "tasks"])
def test_missing_parameter_is_named(parameter, write_config, refused):
    lines = Path(write_config()).read_text().splitlines()
    config = write_config()
    Path(config).write_text("\n".join(x for x in lines if f"fine_tune.{parameter}" not in x))
    assert f"fine_tune.{parameter}" in refused(f"--gin_file={config}")


def test_config_that_is_no_text_is_named(refused, tmp_path):
    config = tmp_path / "binary.gin"
    config.write_bytes(b"\xff\xfe\x00")
    assert str(config) in refused(f"--gin_file={config}")


class LeavingReader(io.RawIOBase):
    """A pipe whose reader goes away behind the first line."""

    def __init__(self):
        self.line, (self._reader, self._writer) = b"", os.pipe()

    def writable(self) -> bool:
        return True

    def write(self, content) -> int:
        written = os.write(self._writer, content)
        if not self.line.endswith(b"\n"):
            self.line += os.read(self._reader, written)
            if self.line.endswith(b"\n"):
                os.close(self._reader)
        return written


def test_training_goes_on_when_the_reader_of_its_output_is_gone(
    write_config, tmp_path, monkeypatch, capsys
):
    """As in `jaxmux train … | head -1`, on a terminal that knows only ASCII."""
    output = LeavingReader()
    monkeypatch.setattr(
        sys, "stdout", io.TextIOWrapper(output, encoding="ascii", write_through=True)
    )
    assert main([f"--gin_file={write_config()}", f"--run_dir={tmp_path}"]) == 0
    assert output.line.startswith(b"task tiny: 14 samples")
    error = capsys.readouterr().err
    assert "the reader of the output is gone; training goes on in silence" in error
    assert "Traceback" not in error
    assert (tmp_path / "summary.json").exists()


@pytest.mark.slow
def test_a_process_ends_in_order_when_the_reader_of_its_output_is_gone(write_config, tmp_path):
    command = [sys.executable, "-m", "jaxmux.train", f"--gin_file={write_config()}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([*command, f"--run_dir={tmp_path}"], env=environment, **pipes)
    assert process.stdout.readline().startswith("task tiny: 14 samples")
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(timeout=120) == 0, error
    assert "the reader of the output is gone; training goes on in silence" in error
    assert "Traceback" not in error
    assert (tmp_path / "summary.json").exists()
