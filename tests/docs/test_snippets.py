"""Code in README.md and docs/ refers to names, options and parameters that exist, and runs."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import gin
import pytest

from docs.extension.snippets import commands, pages, snippets
from jaxmux.cli import gin_bindings
from jaxmux.cli.arguments import COMMANDS
from jaxmux.installation import resolve_path

ROOT = Path(__file__).parents[2]
ALL = [s for page in pages(ROOT) for s in snippets(ROOT, page)]
LANGUAGES = {"python", "gin", "sh", "json", "text"}
# Commands of the shell and of other projects.
OTHERS = {".", "vllm", "curl", "mkdir", "sqlite3"}
# Their blocks are written by scripts/benchmark_tables.py.
GENERATED = {"docs/benchmarks.md"}


def where(snippet):
    return f"{snippet.page}:{snippet.line}"


def of(*languages):
    found = [s for s in ALL if s.language in languages and not s.skipped]
    return pytest.mark.parametrize("snippet", found, ids=where)


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


def test_blocks_name_their_language():
    named = [s for s in ALL if s.page not in GENERATED]
    assert [where(s) for s in named if s.language not in LANGUAGES] == []
    assert all("," in s.mark for s in ALL if s.skipped or s.mark.startswith("check"))
    assert len(ALL) > 60


@of("python")
def test_python_compiles(snippet):
    compile(snippet.code, where(snippet), "exec")


@of("json")
def test_json_can_be_read(snippet):
    lines = snippet.code.splitlines() if (snippet.file or "").endswith(".jsonl") else [snippet.code]
    for line in lines:
        json.loads(line)


@of("gin")
def test_configs_set_parameters_that_exist(snippet, tmp_path):
    file = tmp_path / "a.gin"
    file.write_text(snippet.code)
    gin_bindings.parse([str(file)], [])
    if "fine_tune.backbone" in snippet.code:
        assert gin_bindings.run_config().tasks
    if "serve.backbone" in snippet.code:
        assert gin_bindings.serve_config()


@of("sh")
def test_commands_have_options_that_exist(snippet, tmp_path):
    for command in commands(snippet.code):
        words = shlex.split(command)
        while "=" in words[0] or words[0] == "srun":
            words.pop(0)
        check(words, tmp_path)


def check(words, folder):
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "jaxmux":
        name, *arguments = arguments
        options = COMMANDS[name][1](arguments, f"jaxmux {name}")
        if bindings := getattr(options, "bindings", []):
            file = folder / "two_tasks.gin"
            (config,) = [s.code for s in ALL if s.page == "README.md" and s.language == "gin"]
            file.write_text(config)
            bundled = [f for f in options.gin_file or [] if f.startswith("jaxmux:")]
            gin_bindings.parse([resolve_path(f) for f in bundled] or [str(file)], bindings)
            gin_bindings.run_config()
    elif program == "make":
        targets = re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.M)
        assert {a for a in arguments if "=" not in a} <= {*targets}
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        named = re.findall(r"\[([\w,]+)\]", " ".join(arguments))
        assert {e for n in named for e in n.split(",")} <= extras["optional-dependencies"].keys()
    elif program in ("pytest", "python"):
        paths = [a.split("::")[0] for a in arguments if re.match(r"(tests|scripts)\b", a)]
        assert paths and all((ROOT / path).exists() for path in paths)
    else:
        assert program in OTHERS


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({s.page for s in ALL if s.runs and s.language != "text"}))
def test_a_page_runs(page, workshop, substituted):
    """Blocks in their order: files are written, commands and programs run."""
    for snippet in (s for s in ALL if s.page == page and s.runs):
        code = substituted(snippet.code)
        if snippet.file is not None:
            file = workshop / snippet.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code)
        elif snippet.language == "python":
            run([sys.executable, "-c", code], workshop, snippet)
        elif snippet.language == "sh":
            run(["bash", "-ec", code], workshop, snippet)


def run(command, folder, snippet):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, f"{where(snippet)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
