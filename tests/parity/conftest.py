"""Fixtures of the comparison with Hugging Face: jaxmux runs in a process of the main environment.

`make test-peft` names that environment's interpreter in JAXMUX_PYTHON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
# The helpers beside the tests; pytest's importlib mode adds no folder by itself.
sys.path.insert(0, str(HERE))

from backbones import random_prompts  # noqa: E402
from scenarios import OTHER_OPTIMIZER_TASKS, PARITY_TASKS, make_backbone, vocabulary, write_tasks  # noqa: E402

SHARED = HERE.parent.parent.parent / "shared"
FIGURES = pytest.StashKey[dict[str, tuple[float, float, str]]]()

Jaxmux = Callable[[str, Path, dict[str, Any]], None]


class Trained(NamedTuple):
    """What jaxmux made of tasks that it trained together on one backbone.

    Attributes:
      folder: holds `backbone` and all that `jaxmux_side.train` writes.
      tasks: their specifications, by name.
      batches: by task, the global batches of all steps.
      updates: by task, the lines of metrics.
      microbatches: by round and microbatch, the tasks in it.
      prompts: by task, token ids whose logits through the trained adapter `logits/final.npz` holds.
    """

    folder: Path
    tasks: dict[str, dict[str, Any]]
    batches: dict[str, list[list[dict]]]
    updates: dict[str, list[dict]]
    microbatches: list[list[list[str]]]
    prompts: dict[str, list[list[int]]]


@pytest.fixture(scope="session")
def jaxmux() -> Jaxmux:
    """Runs a command of jaxmux_side.py on a request, in the folder where its results will lie."""
    python = os.environ.get("JAXMUX_PYTHON")
    if not python:
        pytest.fail("JAXMUX_PYTHON should name the main environment's Python; run make test-peft")

    def run(command: str, folder: Path, request: dict[str, Any]) -> None:
        (folder / "request.json").write_text(json.dumps(request))
        script = [python, str(HERE / "jaxmux_side.py"), command, str(folder)]
        done = subprocess.run(script, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(script)} failed:\n{done.stderr[-6000:]}"

    return run


@pytest.fixture(scope="session", params=["stories260k", "qwen2", "qwen3"])
def trained(request, tmp_path_factory, jaxmux) -> Trained:
    """The three parity tasks, trained together on one of the backbones."""
    folder = tmp_path_factory.mktemp(request.param)
    return train_together(jaxmux, folder, request.param, PARITY_TASKS)


@pytest.fixture(scope="session")
def trained_by_other_optimizers(tmp_path_factory, jaxmux) -> Trained:
    """SGD and LoRA+ side by side, the one from an adapter made by PEFT."""
    folder = tmp_path_factory.mktemp("other-optimizers")
    return train_together(jaxmux, folder, "llama", OTHER_OPTIMIZER_TASKS)


def train_together(jaxmux: Jaxmux, folder: Path, backbone: str, tasks) -> Trained:
    make_backbone(backbone, folder / "backbone", SHARED)
    requested = write_tasks(tasks, folder)
    # Prompts of slots behind the last task go through the bare backbone.
    prompts = random_prompts(vocabulary(folder / "backbone"))
    jaxmux("train", folder, {"backbone": "backbone", "tasks": requested, "prompts": prompts})
    results = {
        name: json.loads((folder / f"{name}.json").read_text())
        for name in ("batches", "updates", "microbatches")
    }
    names = [task["name"] for task in requested]
    return Trained(
        folder,
        dict(zip(names, requested, strict=True)),
        results["batches"],
        {name: [u for u in results["updates"] if u["task"] == name] for name in names},
        results["microbatches"],
        dict(zip(names, prompts, strict=False)),
    )


@pytest.fixture
def at_most(request) -> Callable[[str, float, float], None]:
    """Asserts that a figure keeps its limit. The worst one of each name is printed at the end."""
    figures = request.config.stash.setdefault(FIGURES, {})

    def check(name: str, figure: float, limit: float) -> None:
        figures[name] = max(figures.get(name, (0.0, limit, "")), (figure, limit, request.node.name))
        assert figure <= limit, f"{name}: {figure:.2e}, at most {limit:.0e}"

    return check


def pytest_terminal_summary(terminalreporter, config):
    if figures := config.stash.get(FIGURES, {}):
        terminalreporter.section("worst figures")
        for name, (figure, limit, test) in figures.items():
            terminalreporter.write_line(f"{name}: {figure:.2e} of {limit:.0e} ({test})")
