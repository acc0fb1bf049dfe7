"""`jaxmux COMMAND` and `python -m jaxmux.COMMAND` are the same commands, and their help is fast."""

import functools
import os
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

from jaxmux.cli.arguments import COMMANDS
from jaxmux.cli.main import main

# Runs the module that the first argument names, with the other arguments as its own. At the end it
# prints whether JAX was imported.
RUN_MODULE = """
import runpy, sys

name = sys.argv.pop(1)
try:
    runpy.run_module(name, run_name="__main__")
finally:
    print("imported JAX:", "jax" in sys.modules)
"""


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", RUN_MODULE, name, *arguments]
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@functools.cache
def help_of_module(command: str) -> subprocess.CompletedProcess:
    return run_module(f"jaxmux.{command}", "--help")


def exit_code(*arguments: str) -> int:
    """The code with which the console command exits before it runs any command."""
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    return exit.value.code


def test_the_console_script_is_main():
    (script,) = entry_points(group="console_scripts", name="jaxmux")
    assert script.load() is main


def test_the_package_is_a_command_too():
    result = run_module("jaxmux", "--version")
    assert result.stdout.startswith(f"jaxmux {version('jaxmux')}\n")


def test_the_help_describes_every_command(capsys):
    assert exit_code("--help") == 0
    shown = capsys.readouterr().out
    for command, (summary, _) in COMMANDS.items():
        assert f"  {command:10}{summary}\n" in shown


def test_the_version_is_that_of_the_package(capsys):
    assert exit_code("--version") == 0
    assert capsys.readouterr().out == f"jaxmux {version('jaxmux')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "commands:\n  train "),
        (["trian"], "unknown command 'trian'; did you mean train?"),
        (["benchmark"], "unknown command 'benchmark'; choose from train, plan, data, profile"),
        (["--gin_file=x.gin"], "required: COMMAND"),
        (["generate", "--adapter=x"], "--backbone is required, or --run_dir"),
        (
            ["export", "--run_dir=x", "--out=y", "--rond=3"],
            "unknown argument --rond=3; did you mean --round?",
        ),
        (
            ["generate", "--backbone=x", "--prompt=y", "--zzz=1"],
            "unknown argument --zzz=1; --help lists the options",
        ),
        (["export", "--run_dir=x", "--out="], "argument --out: should be a path, found nothing"),
        (["eval", "--run_dir=x", "--out="], "argument --out: should be a path, found nothing"),
        (["generate", "--backbone=x", "--prompt=y", "--out="], "should be a path, found nothing"),
    ],
)
def test_unusable_arguments_exit_with_two_and_a_message(arguments, message, capsys):
    assert exit_code(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_how_it_was_called(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert exit_code(command, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: jaxmux {command} [-h]")
    assert max(map(len, shown.splitlines())) <= 80

    module = help_of_module(command)
    assert module.returncode == 0, module.stderr
    assert module.stdout.startswith(f"usage: python -m jaxmux.{command} [-h]")


def test_the_help_of_generate_says_that_prompts_are_passed_as_they_are(capsys):
    assert exit_code("generate", "--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "A prompt is passed as it is; for an adapter that was trained on chats" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_imports_no_jax(command):
    assert "imported JAX: False" in help_of_module(command).stdout


def test_arguments_after_the_command_belong_to_it(capsys):
    assert main(["generate", "--backbone=/nowhere", "--prompt=x"]) == 2
    assert capsys.readouterr().err.startswith("error: /nowhere")


@pytest.mark.long
def test_a_module_runs_its_command():
    done = run_module("jaxmux.export", "--run_dir=/nowhere", "--out=/nowhere")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "/nowhere" in done.stderr
