"""Fixtures of the comparison with Hugging Face; jaxmux runs in a process of the main environment.

`make test-peft` names that environment's interpreter in JAXMUX_PYTHON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# bitsandbytes lets torch compile its functions for every shape, which takes longer than all else.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
import torch  # noqa: E402

HERE = Path(__file__).resolve().parent
# For the modules beside the tests; pytest's importlib mode does not add their folder.
sys.path.insert(0, str(HERE))

# The models are so small that several threads would be slower than one.
torch.set_num_threads(1)

from backbones import random_prompts  # noqa: E402
from scenarios import (  # noqa: E402
    FAST_KINDS,
    KIND_TASKS,
    OTHER_OPTIMIZER_TASKS,
    PARITY_TASKS,
    make_backbone,
    vocabulary,
    write_tasks,
)

# By name: the largest error, its limit, and the test in which it occurred.
LARGEST_ERRORS = pytest.StashKey[dict[str, tuple[float, float, str]]]()


class Jaxmux:
    """A process of the main environment that runs jaxmux_side.py.

    Args:
      environment: the process's environment variables.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ):
        python = environment.get("JAXMUX_PYTHON")
        if not python:
            pytest.fail("JAXMUX_PYTHON should name the main environment's Python: make test-peft")
        self._process = subprocess.Popen(
            [python, str(HERE / "jaxmux_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __call__(self, command: str, folder: Path, request: dict[str, Any]) -> Any:
        """Runs a command on a request; most results are written into `folder`."""
        print(json.dumps([command, str(folder), request]), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process ended during the command {command}"
        result, error = json.loads(answer)
        assert error is None, f"{command} failed in jaxmux:\n{error[-6000:]}"
        return result

    def close(self) -> None:
        self._process.communicate()


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
def jaxmux() -> Iterator[Jaxmux]:
    """One process for all tests, which keeps the programs that it has compiled."""
    process = Jaxmux()
    yield process
    process.close()


# Adapters of other kinds, and one of LoRA, are trained on qwen2, others on a small Llama.
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("stories260k", "qwen2")]


@pytest.fixture(scope="session", params=["qwen3", *SLOW])
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
    tasks = [task for task in KIND_TASKS if task["name"] in FAST_KINDS]
    return train_together(jaxmux, tmp_path_factory.mktemp("kinds"), "qwen2", tasks)


@pytest.fixture(scope="session")
def trained_all_kinds(tmp_path_factory, jaxmux) -> Trained:
    """The same and all others, trained together."""
    return train_together(jaxmux, tmp_path_factory.mktemp("all-kinds"), "qwen2", KIND_TASKS)


@pytest.fixture(scope="session")
def trained_with(request) -> Callable[[str], Trained]:
    """A function that returns the results of a run in which a task of `KIND_TASKS` was trained."""

    def found(task: str) -> Trained:
        fixture = "trained_kinds" if task in FAST_KINDS else "trained_all_kinds"
        return request.getfixturevalue(fixture)

    return found


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
def backbone(jaxmux) -> str:
    """The folder of the backbone that ships with jaxmux."""
    return jaxmux("resolve", Path(), {"name": "jaxmux:demo/base"})
