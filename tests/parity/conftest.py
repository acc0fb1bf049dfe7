"""Fixtures of the comparison with Hugging Face; jaxmux runs in a process of the main environment.

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
import torch

HERE = Path(__file__).resolve().parent
# For the modules beside the tests; pytest's importlib mode does not add their folder.
sys.path.insert(0, str(HERE))

# The models are so small that several threads would be slower than one.
torch.set_num_threads(1)

from backbones import random_prompts  # noqa: E402
from scenarios import (  # noqa: E402
    KIND_TASKS,
    OTHER_OPTIMIZER_TASKS,
    PARITY_TASKS,
    make_backbone,
    vocabulary,
    write_tasks,
)

# By name: the largest error, its limit, and the test in which it occurred.
LARGEST_ERRORS = pytest.StashKey[dict[str, tuple[float, float, str]]]()

Jaxmux = Callable[[str, Path, dict[str, Any]], None]


class Trained(NamedTuple):
    """The results of tasks that jaxmux trained together on one backbone.

    Attributes:
      folder: contains `backbone` and everything that `jaxmux_side.train` writes.
      tasks: by name, the specification of the task.
      batches: by task, the global batches of all steps.
      updates: by task, the metrics of every update.
      microbatches: for every round and every microbatch of it, the names of its tasks.
      prompts: by task, the prompts (token ids) whose logits with the trained adapter are in
        `logits/final.npz`.
    """

    folder: Path
    tasks: dict[str, dict[str, Any]]
    batches: dict[str, list[list[dict]]]
    updates: dict[str, list[dict]]
    microbatches: list[list[list[str]]]
    prompts: dict[str, list[list[int]]]


@pytest.fixture(scope="session")
def jaxmux() -> Jaxmux:
    """Runs a command of jaxmux_side.py on a request; the results are written into `folder`."""
    python = os.environ.get("JAXMUX_PYTHON")
    if not python:
        pytest.fail("JAXMUX_PYTHON should name the main environment's Python; run make test-peft")

    def run(command: str, folder: Path, request: dict[str, Any]) -> None:
        (folder / "request.json").write_text(json.dumps(request))
        script = [python, str(HERE / "jaxmux_side.py"), command, str(folder)]
        done = subprocess.run(script, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(script)} failed:\n{done.stderr[-6000:]}"

    return run


# Adapters of other kinds, and one of LoRA, are trained on qwen2.
QWEN2 = pytest.param("qwen2", marks=pytest.mark.slow)


@pytest.fixture(scope="session", params=["stories260k", QWEN2, "qwen3"])
def trained(request, tmp_path_factory, jaxmux) -> Trained:
    """The three parity tasks, trained together on one of three backbones."""
    folder = tmp_path_factory.mktemp(request.param)
    return train_together(jaxmux, folder, request.param, PARITY_TASKS)


@pytest.fixture(scope="session")
def trained_by_other_optimizers(tmp_path_factory, jaxmux) -> Trained:
    """A task with SGD, which starts from an adapter of PEFT, trained together with one of LoRA+ and
    one that trains tokens, on a backbone whose head is its embedding."""
    folder = tmp_path_factory.mktemp("other-optimizers")
    return train_together(jaxmux, folder, "llama-tied", OTHER_OPTIMIZER_TASKS)


@pytest.fixture(scope="session")
def trained_kinds(tmp_path_factory, jaxmux) -> Trained:
    """Tasks with different kinds of adapters, trained together."""
    return train_together(jaxmux, tmp_path_factory.mktemp("kinds"), "qwen2", KIND_TASKS)


def train_together(jaxmux: Jaxmux, folder: Path, backbone: str, tasks) -> Trained:
    make_backbone(backbone, folder / "backbone", os.environ.get("JAXMUX_SHARED"))
    requested = write_tasks(tasks, folder)
    of_slots = random_prompts(vocabulary(folder / "backbone"))
    # Virtual tokens take places of the prompts. Slots without a task have no adapter.
    virtual = [task["adapter"].get("virtual_tokens", 0) for task in requested]
    virtual += [0] * (-len(requested) % len(of_slots))
    prompts = [
        [ids[number:] for ids in of_slots[i % len(of_slots)]] for i, number in enumerate(virtual)
    ]
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
        dict(zip(names, prompts[: len(names)], strict=True)),
    )


@pytest.fixture
def at_most(request) -> Callable[[str, float, float], None]:
    """Asserts that an error is at most `limit`. The largest error of every name is printed at the
    end of the test session."""
    largest = request.config.stash.setdefault(LARGEST_ERRORS, {})

    def check(name: str, error: float, limit: float) -> None:
        largest[name] = max(largest.get(name, (0.0, limit, "")), (error, limit, request.node.name))
        assert error <= limit, f"{name}: {error:.2e}, at most {limit:.0e}"

    return check


def pytest_terminal_summary(terminalreporter, config):
    if largest := config.stash.get(LARGEST_ERRORS, {}):
        terminalreporter.section("largest errors")
        for name, (error, limit, test) in largest.items():
            terminalreporter.write_line(f"{name}: {error:.2e}, at most {limit:.0e} ({test})")


@pytest.fixture(scope="session")
def backbone():
    """The folder of the backbone that ships with jaxmux."""
    code = "from jaxmux.installation import resolve_path; print(resolve_path('jaxmux:demo/base'))"
    command = [os.environ["JAXMUX_PYTHON"], "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
