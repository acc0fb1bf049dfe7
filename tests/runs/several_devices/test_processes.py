"""Two processes of four devices each train one run: the results of one process and one device."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmux.cli.main import run_command

TASKS = """
fine_tune.checkpoint_every = 4
fine_tune.tokens_per_microbatch = 64
fine_tune.max_sequences = 4
fine_tune.tasks = [@tiny/Task(), @other/Task()]
tiny/Task.steps = 12
tiny/Task.batch_size = 14
tiny/AdamW.learning_rate = 1e-3
tiny/LoRA.dropout = 0.1
tiny/LoRA.target_modules = ("q_proj", "down_proj")
other/Task.name = "other"
other/Task.steps = 5
other/Task.batch_size = 8
other/Task.adapter = @other/LoRA()
other/LoRA.rank = 3
other/LoRA.target_modules = ("v_proj", "down_proj")
other/Task.optimizer = @other/SGD()
other/SGD.learning_rate = 1e-2
"""
LINES = 12 + 5


class Pair:
    """The command of a training run in two processes."""

    def __init__(self, config: str, run_dir: Path):
        self.run_dir, self.arguments = run_dir, [f"--gin_file={config}", f"--run_dir={run_dir}"]
        devices = "--xla_force_host_platform_device_count="
        flags = os.environ["XLA_FLAGS"].replace(f"{devices}8", f"{devices}4")
        self.environment = os.environ | {"XLA_FLAGS": flags}
        # The tests' setting would leave XLA too few threads.
        del self.environment["NPROC"]

    def start(self, mesh: str, *of_second: str) -> list[subprocess.Popen]:
        """Starts both processes; `of_second` are arguments of the second one alone."""
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "jaxmux.train", *self.arguments]
        command += [f"--gin.fine_tune.mesh={mesh!r}", f"--coordinator=localhost:{port}"]
        command += ["--processes=2"]
        return [
            subprocess.Popen([*command, f"--process={i}", *own], env=self.environment, **pipes)
            for i, own in enumerate([(), of_second])
        ]

    def lines(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def ended(processes: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """The exit code and the output of each process."""
    texts = [process.communicate(timeout=240) for process in processes]
    return [(p.returncode, *own) for p, own in zip(processes, texts, strict=True)]


def losses(run_dir: Path) -> dict[tuple[str, int], float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {(line["task"], line["task_step"]): line["loss"] for line in lines}


@pytest.fixture(scope="module")
def config(write_config, data) -> str:
    return write_config(TASKS, f"other/Task.data = {data['short']!r}")


def test_two_processes_stop_go_on_and_end_like_one_device(config, tmp_path):
    """A signal reaches only the second process, within a round. The run goes on in two processes on
    another mesh, whose stages each belong to both."""
    pair = Pair(config, tmp_path / "pair")
    processes = pair.start("pp2,dp2,tp2")
    while pair.lines() < 4:
        assert processes[0].poll() is None, processes[0].communicate()
        time.sleep(0.01)
    processes[1].send_signal(signal.SIGTERM)
    for code, _, errors in ended(processes):
        assert code == 128 + signal.SIGTERM, errors
        assert "state saved, the same command continues from here" in errors
    assert 4 <= pair.lines() < LINES
    (first, printed, errors), (second, silent, _) = ended(pair.start("dp4,tp2"))
    assert (first, second) == (0, 0), errors
    assert "going on from the checkpoint after round" in printed
    assert "task tiny" not in silent and "adapter" not in silent
    one = [f"--gin_file={config}", f"--run_dir={tmp_path / 'one'}"]
    assert run_command("train", one, prog="jaxmux train") == 0
    expected, found = losses(tmp_path / "one"), losses(pair.run_dir)
    assert len(found) == LINES
    assert found == pytest.approx(expected, rel=1e-5)
    for name in ("tiny", "other"):
        assert (pair.run_dir / "adapters" / name / "adapter_model.safetensors").exists()


def test_processes_that_read_other_data_are_refused(config, data, tmp_path):
    pair = Pair(config, tmp_path / "run")
    other = f"--gin.other/Task.data={data['long']!r}"
    for code, _, errors in ended(pair.start("dp8", other)):
        assert code == 2
        assert "process 1 reads another data of task 'other' than process 0" in errors
    assert not pair.run_dir.exists()


def test_an_error_of_one_process_ends_all(config, tmp_path):
    pair = Pair(config, tmp_path / "run")
    missing = "--gin.other/Task.data='missing.jsonl'"
    first, second = ended(pair.start("dp8", missing))
    assert (first[0], second[0]) == (2, 2)
    assert "error: process 1: " in first[2] and "missing.jsonl" in first[2]
    assert "error: process" not in second[2] and "missing.jsonl" in second[2]
    assert not pair.run_dir.exists()


def test_a_process_without_devices_of_the_mesh_is_refused(config, tmp_path):
    first, second = ended(Pair(config, tmp_path / "run").start("pp2"))
    assert (first[0], second[0]) == (2, 2)
    assert "2 devices, of which process 1 has none; take a mesh of all 8 devices" in first[2]
