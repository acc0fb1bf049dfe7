"""Two processes, of one or two devices each, train one run: the results of one process and one
device."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE

import pytest

from jaxmux.cli.main import run_command

TASKS = """
fine_tune.checkpoint_every = 2
fine_tune.sample_tokens = 2
fine_tune.tokens_per_microbatch = 64
fine_tune.max_sequences = 4
fine_tune.tasks = [@tiny/Task(), @other/Task()]
tiny/Task.steps = 7
tiny/Task.batch_size = 14
tiny/AdamW.learning_rate = 1e-3
tiny/LoRA.dropout = 0.1
tiny/LoRA.target_modules = ("q_proj", "down_proj")
tiny/Task.sample_prompt = "red"
other/Task.name = "other"
other/Task.steps = 3
other/Task.batch_size = 8
other/Task.adapter = @other/LoRA()
other/LoRA.rank = 3
other/LoRA.target_modules = ("down_proj",)
other/Task.optimizer = @other/AdamW()
other/AdamW.learning_rate = 1e-2
"""
LINES = 7 + 3


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


class Pair:
    """The command of a training run in two processes, which have `devices` devices each."""

    devices = 2

    def __init__(self, config: str, run_dir: Path):
        self.run_dir, self.arguments = run_dir, [f"--gin_file={config}", f"--run_dir={run_dir}"]
        self.processes: list[subprocess.Popen] = []

    @property
    def environment(self) -> dict[str, str]:
        count = "--xla_force_host_platform_device_count="
        flags = os.environ["XLA_FLAGS"].replace(f"{count}8", f"{count}{self.devices}")
        # The tests' setting NPROC would leave XLA too few threads.
        others = {name: text for name, text in os.environ.items() if name != "NPROC"}
        return others | {"XLA_FLAGS": flags}

    def start(self, mesh: str, *of_second: str) -> None:
        """Starts both processes; `of_second` are arguments of the second one alone."""
        port = free_port()
        pipes = {"stdout": PIPE, "stderr": PIPE, "text": True}
        command = [sys.executable, "-m", "jaxmux.train", *self.arguments]
        command += [f"--gin.fine_tune.mesh={mesh!r}", f"--coordinator=localhost:{port}"]
        command += ["--processes=2"]
        self.processes = [
            subprocess.Popen(
                [*command, f"--process={i}", *own],
                env=self.environment,
                **pipes,
            )
            for i, own in enumerate([(), of_second])
        ]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            for process in self.processes:
                assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)

    def ended(self) -> list[tuple[int, str, str]]:
        """The exit code and the output of each process."""
        texts = [process.communicate(timeout=200) for process in self.processes]
        return [(p.returncode, *own) for p, own in zip(self.processes, texts, strict=True)]

    def lines(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


@pytest.fixture
def pair(config, tmp_path):
    """The run directory does not exist yet."""
    pair = Pair(config, tmp_path / "pair")
    yield pair
    for process in pair.processes:
        process.kill()


def losses(run_dir: Path) -> dict[tuple[str, int], float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {(line["task"], line["task_step"]): line["loss"] for line in lines}


@pytest.fixture(scope="module")
def config(write_config, data) -> str:
    own = [f"other/Task.data = {data['short']!r}", f"tiny/Task.eval_data = {data['short.eval']!r}"]
    return write_config(TASKS, *own)


@pytest.fixture(scope="module")
def on_one_device(config, tmp_path_factory) -> Path:
    """Folder of a run in this process, on one device."""
    run_dir = tmp_path_factory.mktemp("runs") / "one"
    arguments = [f"--gin_file={config}", f"--run_dir={run_dir}"]
    assert run_command("train", arguments, prog="jaxmux train") == 0
    return run_dir


def test_two_processes_end_like_one_device(pair, on_one_device):
    """With a stage in each process."""
    pair.devices = 1
    pair.start("pp2")
    check_end(pair, on_one_device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "first", "then"), [(1, "pp2", "2*(tp1)"), (2, "pp2,tp2", "2*(tp2)")]
)
def test_two_processes_stop_go_on_and_end_like_one_device(
    devices, first, then, pair, on_one_device
):
    """A signal reaches only the second process, within a round. The run goes on with two replicas,
    one in each process."""
    pair.devices = devices
    pair.start(first)
    pair.wait_until(lambda: pair.lines() >= 2)
    pair.processes[1].send_signal(signal.SIGTERM)
    for code, _, errors in pair.ended():
        assert code == 128 + signal.SIGTERM, errors
        assert "state saved, the same command continues from here" in errors
    assert 2 <= pair.lines() < LINES
    pair.start(then)
    assert "going on from the checkpoint after round" in check_end(pair, on_one_device)


def check_end(pair: Pair, on_one_device: Path) -> str:
    """Waits for the end of a run, compares it with that of one device, and returns what the first
    process has printed."""
    (code, printed, errors), (other_code, silent, _) = pair.ended()
    assert (code, other_code) == (0, 0), errors
    assert "tiny: red" in printed
    assert "tiny" not in silent
    expected, found = losses(on_one_device), losses(pair.run_dir)
    assert len(found) == LINES
    assert found == pytest.approx(expected, rel=1e-5)
    summaries = [
        json.loads((folder / "summary.json").read_text())["tasks"]["tiny"]["eval_loss"]
        for folder in (on_one_device, pair.run_dir)
    ]
    assert summaries[1] == pytest.approx(summaries[0], rel=1e-5)
    for name in ("tiny", "other"):
        assert (pair.run_dir / "adapters" / name / "adapter_model.safetensors").exists()
    return printed


@pytest.fixture(scope="module")
def left_alone(config, tmp_path_factory) -> Path:
    """Folder of a run in two processes that nothing interrupted."""
    pair = Pair(config, tmp_path_factory.mktemp("runs") / "pair")
    pair.start("pp2,tp2")
    assert [code for code, *_ in pair.ended()] == [0, 0]
    return pair.run_dir


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_after_a_kill_the_run_goes_on_to_the_same_bits(killed, pair, left_alone, adapter_bytes):
    """The process that is left ends by itself, though JAX may have to abort it."""
    pair.start("pp2,tp2")
    pair.wait_until(lambda: pair.lines() >= 6)
    pair.processes[killed].kill()
    assert 0 not in [code for code, *_ in pair.ended()]
    pair.start("pp2,tp2")
    (code, printed, errors), _ = pair.ended()
    assert code == 0, errors
    assert "going on from the checkpoint after round" in printed
    assert losses(pair.run_dir) == losses(left_alone)
    assert adapter_bytes(pair.run_dir / "adapters") == adapter_bytes(left_alone / "adapters")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        pytest.param(
            "--gin.other/Task.data={long!r}",
            "process 1 differs from process 0 in the data of task",
            id="data",
        ),
        pytest.param(
            "--gin.tiny/AdamW.learning_rate=1",
            "process 1 differs from process 0 in the settings of task 'tiny'",
            id="task",
        ),
        pytest.param("--gin.other/Task.data='missing.jsonl'", "missing.jsonl", id="file"),
        pytest.param("--gin.other/Task.data=", "process 1: ", id="gin"),
    ],
)
def test_what_one_process_cannot_do_ends_all(argument, message, pair, data):
    """The argument reaches only the second process."""
    pair.start("dp4", argument.format(**data))
    (first, _, of_first), (second, _, of_second) = pair.ended()
    assert (first, second) == (2, 2), of_second
    assert message in of_first
    assert of_second.startswith("error: ")
    assert not pair.run_dir.exists()


# Rarely the process that is left waits in a collective, until JAX aborts it after 100 seconds.
@pytest.mark.slow
def test_a_signal_that_ends_the_start_of_one_process_ends_all(pair):
    pair.start("dp4")
    pair.wait_until(lambda: (pair.run_dir / ".lock").exists())
    pair.processes[1].send_signal(signal.SIGTERM)
    for code, _, errors in pair.ended():
        assert code == 128 + signal.SIGTERM, errors
    assert not (pair.run_dir / "run.json").exists()


@pytest.mark.slow
def test_a_process_without_devices_of_the_mesh_is_refused(pair):
    pair.start("pp2")
    for code, _, errors in pair.ended():
        assert code == 2
        assert "2 devices, of which process 1 has none; take a mesh of all 4 devices" in errors


HANGS = """
import sys, time
from jaxmux.cli import train_command
from jaxmux.runs import processes
processes._HANGING_SECONDS = 1
port, index = sys.argv[1], int(sys.argv[2])
processes.join_processes(f"localhost:{port}", 2, index)
if index:
    processes.leave(OSError("no room"))
with processes.watching_others(train_command._end_at_once):
    time.sleep(100)
"""


def test_a_process_that_hangs_ends_when_another_one_has_ended(pair):
    """As one does that waits for the devices of the other."""
    port = str(free_port())
    found = [
        subprocess.Popen(
            [sys.executable, "-c", HANGS, port, str(i)],
            env=pair.environment,
            stderr=PIPE,
            text=True,
        )
        for i in range(2)
    ]
    pair.processes = found
    _, errors = found[0].communicate(timeout=60)
    assert found[0].returncode == 3
    assert errors.splitlines()[-1] == "error: process 1: no room"


@pytest.mark.slow
def test_two_processes_stop_the_same_configurations_at_rungs(write_config, data, tmp_path):
    """Three of the four configurations have a place at the same time. The losses are far apart, so
    that their order does not depend on rounding."""
    config = write_config(
        "fine_tune.tasks = [@tiny/Sweep()]",
        "tiny/Sweep.task = @tiny/Task()",
        "tiny/Sweep.space = {'optimizer.learning_rate': [1e-4, 3e-2, 1e-2, 3e-3]}",
        "tiny/Sweep.first_rung = 2",
        "tiny/Task.steps = 5",
        "tiny/Task.batch_size = 14",
        f"tiny/Task.eval_data = {data['short']!r}",
        "tiny/LoRA.target_modules = ('q_proj', 'down_proj')",
        run={"tokens_per_microbatch": 64, "max_sequences": 4, "tasks_at_once": 3},
    )
    pair = Pair(config, tmp_path / "pair")
    try:
        pair.start("dp2,pp2")
        assert [code for code, *_ in pair.ended()] == [0, 0]
    finally:
        for process in pair.processes:
            process.kill()
    one = [f"--gin_file={config}", f"--run_dir={tmp_path / 'one'}"]
    assert run_command("train", one, prog="jaxmux train") == 0
    found, expected = (
        json.loads((tmp_path / name / "summary.json").read_text())["tasks"]
        for name in ("pair", "one")
    )
    reasons = [task["stopped_early"] for task in expected.values()]
    assert [task["stopped_early"] for task in found.values()] == reasons
    assert reasons.count(None) == 1
