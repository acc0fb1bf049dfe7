"""An interrupted run, repeated, ends with the bits of one that was left alone."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path

import pytest

from jaxmux import Interrupted, Lion, LoRA
from jaxmux.cli.main import run_command
from jaxmux.engine import EngineOptions
from jaxmux.engine.devices import programs
from jaxmux.engine.rounds.rounds import pack_tightly
from jaxmux.runs import RunDirectoryError, read_task
from jaxmux.runs.run_directory import lock_state

main = partial(run_command, "train", prog="jaxmux train")

STEPS = 10
TASKS = f"""
fine_tune.checkpoint_every = 4
fine_tune.keep_checkpoints = 2
fine_tune.tokens_per_microbatch = 128
fine_tune.tasks = [@tiny/Task(), @other/Task(), @pairs/Task()]
tiny/Task.steps = {STEPS}
tiny/Task.batch_size = 12
tiny/LoRA.dropout = 0.1
tiny/AdamW.schedule = @Schedule()
Schedule.kind = "cosine"
Schedule.warmup_steps = 4
other/Task.name = "other"
other/Task.epochs = 3
other/Task.batch_size = 5
other/Task.max_length = 96
other/Task.adapter = @other/LoRA()
other/LoRA.rank = 3
other/LoRA.target_modules = ("q_proj", "down_proj")
other/LoRA.dropout = 0.2
other/Task.optimizer = @other/Lion()
other/Lion.learning_rate = 1e-3
pairs/Task.name = "pairs"
pairs/Task.steps = {STEPS}
pairs/Task.batch_size = 9
pairs/Task.eval_every = 3
pairs/Task.best_metric = "rewards/margins"
pairs/Task.keep_best = True
pairs/Task.objective = @DPO()
pairs/Task.adapter = @pairs/LoRA()
pairs/LoRA.rank = 2
pairs/LoRA.target_modules = ("q_proj", "down_proj")
pairs/LoRA.dropout = 0.1
pairs/Task.optimizer = @pairs/AdamW()
pairs/AdamW.learning_rate = 1e-2
"""
# Of "other", twenty samples in batches of five.
LINES = STEPS + 3 * 4 + STEPS
# Of the tasks of all tests here, one has dropout and one has Lion, so that they share programs.
DROPPED = LoRA(2, 4.0, target_modules=("q_proj", "down_proj"), dropout=0.1)


class Command:
    """The same command again and again: in processes of its own, which may be killed, and to the
    end in this one."""

    def __init__(self, config: str, run_dir: Path):
        self.run_dir = run_dir
        self.arguments = [f"--gin_file={config}", f"--run_dir={run_dir}"]
        # JAX does not write its cache atomically, so what may be killed should only read it.
        self.environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}

    def start(self) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        command = [sys.executable, "-m", "jaxmux.train", *self.arguments]
        return subprocess.Popen(command, env=self.environment, **pipes)

    def finish(self) -> None:
        assert main(self.arguments) == 0

    def lines(self) -> int:
        metrics = self.run_dir / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any("tmp" in path.name for path in self.run_dir.glob("checkpoints/*"))

    def saved(self) -> bool:
        """Whether there is a checkpoint."""
        return any(path.name.isdecimal() for path in self.run_dir.glob("checkpoints/*"))


@pytest.fixture(autouse=True)
def sigint_raises():
    """As from a terminal: a shell's background jobs, and all that they start, ignore SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def wait_until(condition, process: subprocess.Popen) -> None:
    while not condition():
        assert process.poll() is None, f"ended too early: {process.stdout.read()}"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def config(write_config, data, pairs) -> str:
    return write_config(
        TASKS,
        f"other/Task.data = {data['long']!r}",
        f"pairs/Task.data = {pairs['train']!r}",
        f"pairs/Task.eval_data = {pairs['eval']!r}",
    )


@pytest.fixture(scope="module")
def reference(config, tmp_path_factory) -> Path:
    """Folder of the finished run that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("runs") / "reference"
    assert main([f"--gin_file={config}", f"--run_dir={run_dir}"]) == 0
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == LINES
    return run_dir


def untimed_metrics(run_dir: Path, file: str = "metrics.jsonl") -> list[dict]:
    """The lines of a file without the time of day."""
    lines = (run_dir / file).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time"} for line in lines]


def recorded_rounds(run_dir: Path) -> list[int]:
    """The numbers of the rounds in rounds.jsonl."""
    lines = (run_dir / "rounds.jsonl").read_text().splitlines()
    return [json.loads(line)["round"] for line in lines]


def assert_same_result(run_dir, reference, adapter_bytes):
    for file in ("metrics.jsonl", "held_out.jsonl"):
        assert untimed_metrics(run_dir, file) == untimed_metrics(reference, file)
    rounds = [line["step"] for line in untimed_metrics(reference)]
    assert recorded_rounds(run_dir) == list(range(max(rounds) + 1))
    found, expected = adapter_bytes(run_dir / "adapters"), adapter_bytes(reference / "adapters")
    one, other = (json.loads((d / "summary.json").read_text()) for d in (run_dir, reference))
    assert len(expected) == 2 * len(other["tasks"]) and found == expected
    assert one["tasks"] == other["tasks"]
    assert one["padding_fraction"] == other["padding_fraction"]


@pytest.mark.long
@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_run_ends_with_the_bits_of_an_uninterrupted_one(
    kills, config, reference, tmp_path, adapter_bytes, capsys
):
    """The last process is killed while a checkpoint is written, one before it at any moment."""
    rng = random.Random(20)
    killed = Command(config, tmp_path / "killed")
    for kill in range(kills):
        has_checkpoint = killed.saved()
        process = killed.start()
        target = int((kill + rng.random()) * 0.8 * LINES / kills) + 1
        wait_until(lambda target=target: killed.lines() >= target, process)
        if kill + 1 < kills:
            time.sleep(0.03 * rng.random())
        else:
            # Not the first checkpoint.
            wait_until(lambda: killed.saving() and killed.saved(), process)
        process.kill()
        output, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, output
        assert lock_state(killed.run_dir).holder == "killed"
        assert ("going on from the checkpoint" in output) == has_checkpoint, output
        assert not (killed.run_dir / "summary.json").exists()
    capsys.readouterr()
    killed.finish()
    assert "going on from the checkpoint" in "".join(capsys.readouterr())
    assert_same_result(killed.run_dir, reference, adapter_bytes)


@pytest.mark.long
def test_terminated_run_saves_and_goes_on(
    config, reference, tmp_path, adapter_bytes, monkeypatch, capsys
):
    stopped = Command(config, tmp_path / "stopped")
    with monkeypatch.context() as patch:
        raise_signal_at_microbatch(20, signal.SIGTERM, patch)
        assert main(stopped.arguments) == 128 + signal.SIGTERM
    assert "state saved" in capsys.readouterr().err
    assert 0 < stopped.lines() < LINES
    stopped.finish()
    assert_same_result(stopped.run_dir, reference, adapter_bytes)


def test_run_stopped_within_a_round_goes_on_within_it(
    train, make_task, tmp_path, adapter_bytes, monkeypatch
):
    tasks = [
        make_task("a", steps=6, batch_size=14, adapter=DROPPED),
        make_task("b", steps=3, batch_size=8, optimizer=Lion(1e-3)),
    ]
    options = {"tokens_per_microbatch": 128, "checkpoint_every": 4}
    train(tmp_path / "whole", *tasks, **options)

    # The test above sends SIGTERM.
    raise_signal_at_microbatch(8, signal.SIGINT, monkeypatch)
    with pytest.raises(Interrupted) as interruption:
        train(tmp_path / "stopped", *tasks, **options)
    assert interruption.value.signal_number == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    (saved,) = (tmp_path / "stopped" / "checkpoints").glob("*/run/metadata")
    saved = json.loads(saved.read_text())
    # Three microbatches a round, of which two are done; the samples of the third are missing.
    assert saved["position"]["rounds"] == 2 and saved["position"]["microbatches"] == 8
    accumulated = [saved["tasks"][task.name]["accumulated"] for task in tasks]
    for samples, task in zip(accumulated, tasks, strict=True):
        assert samples == sorted(set(samples)) and set(samples) <= set(range(task.batch_size))
    assert 0 < sum(map(len, accumulated)) < sum(task.batch_size for task in tasks)

    train(tmp_path / "stopped", *tasks, **options)
    assert_same_result(tmp_path / "stopped", tmp_path / "whole", adapter_bytes)


def numbers_of(checkpoints: Path) -> dict[int, tuple[int, int]]:
    """By number of a checkpoint, the rounds and microbatches before it."""
    records = {
        int(path.parts[-3]): json.loads(path.read_text())["position"]
        for path in checkpoints.glob("*/run/metadata")
        if path.parts[-3].isdecimal()
    }
    return {n: (own["rounds"], own["microbatches"]) for n, own in records.items()}


def test_checkpoints_have_the_numbers_of_rounds_those_of_earlier_versions_too(
    train, make_task, tmp_path, adapter_bytes, monkeypatch
):
    tasks = [
        make_task("a", steps=6, batch_size=14, adapter=DROPPED),
        make_task("b", steps=3, batch_size=8, optimizer=Lion(1e-3)),
    ]
    options = {"tokens_per_microbatch": 128, "checkpoint_every": 2}
    train(tmp_path / "whole", *tasks, **options)
    assert numbers_of(tmp_path / "whole" / "checkpoints").keys() == {2, 4, 6}

    raise_signal_at_microbatch(8, signal.SIGTERM, monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", *tasks, **options)
    monkeypatch.undo()
    # Two of three microbatches of the round after the second one.
    assert numbers_of(tmp_path / "stopped" / "checkpoints") == {2: (2, 8)}
    for case in ("killed", "earlier version"):
        shutil.copytree(tmp_path / "stopped", tmp_path / case)
    killed, earlier = (tmp_path / own / "checkpoints" for own in ("killed", "earlier version"))
    # Before a checkpoint was complete that replaces another one of its number.
    shutil.rmtree(killed / "2")
    # Earlier versions added microbatches, and kept both.
    (earlier / "2").rename(earlier / "10")
    (earlier / "replaced.2").rename(earlier / "8")
    rounds, progress, _ = read_task(earlier, "a", 2)
    assert (rounds, progress.step) == (2, 2)
    with pytest.raises(RunDirectoryError, match=r"rounds 2 \(in checkpoints/8\), 2 \(in check"):
        read_task(earlier, "a", 3)
    for case in ("stopped", "killed", "earlier version"):
        train(tmp_path / case, *tasks, **options)
        assert_same_result(tmp_path / case, tmp_path / "whole", adapter_bytes)
        names = {path.name for path in (tmp_path / case / "checkpoints").iterdir()}
        assert names == {"2", "4", "6"}, case


def raise_signal_at_microbatch(number: int, signal_number: int, monkeypatch, times: int = 1):
    accumulate, seen = programs.accumulate, itertools.count(1)

    def accumulate_and_raise(*arguments):
        if next(seen) == number:
            for _ in range(times):
                signal.raise_signal(signal_number)
        return accumulate(*arguments)

    accumulate_and_raise.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", accumulate_and_raise)


def test_second_signal_acts_at_once(train, make_task, tmp_path, monkeypatch):
    raise_signal_at_microbatch(2, signal.SIGINT, monkeypatch, times=2)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, make_task(steps=4))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert train(tmp_path, make_task(steps=4)).tasks["tiny"]["steps"] == 4


def test_a_round_packed_otherwise_is_taken_up_in_its_middle(
    train, make_task, tmp_path, monkeypatch
):
    """A checkpoint names the samples that the accumulators hold, not how they were packed."""
    tasks = [
        make_task("a", steps=3, batch_size=14, adapter=DROPPED),
        make_task("b", steps=3, batch_size=9, optimizer=Lion(1e-3)),
    ]
    options = {"tokens_per_microbatch": 128}
    whole = train(tmp_path / "whole", *tasks, **options)
    raise_signal_at_microbatch(5, signal.SIGTERM, monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", *tasks, **options)
    monkeypatch.undo()

    packed = []

    def one_by_one(lengths, shape):
        """Every sample in a microbatch of its own, the last one first."""
        placements = [place for places in pack_tightly(lengths, shape) for place in places]
        packed.append(len(placements))
        return [[place] for place in reversed(placements)]

    monkeypatch.setattr(EngineOptions.__init__, "__defaults__", defaults_with(one_by_one))
    resumed = train(tmp_path / "stopped", *tasks, **options)
    # The second round, in whose middle the run was stopped, and the third: an epoch of b has
    # batches of 9 and 5 samples.
    assert packed == [14 + 5, 14 + 9]
    for name, task in whole.tasks.items():
        for field in ("train_loss_first", "train_loss_last"):
            assert resumed.tasks[name][field] == pytest.approx(task[field], rel=1e-5)
        assert resumed.tasks[name]["tokens"] == task["tokens"]


def defaults_with(packing):
    """The defaults of `EngineOptions` with another packing."""
    options = [field for field in fields(EngineOptions) if field.default is not MISSING]
    return tuple(packing if own.name == "packing" else own.default for own in options)


@pytest.mark.parametrize(("record", "present"), [("checkpoint", 4), ("run.json", 3)])
def test_records_of_an_older_format_are_refused(record, present, train, make_task, tmp_path):
    train(tmp_path, make_task(), checkpoint_every=1)
    (tmp_path / "summary.json").unlink()
    if record == "run.json":
        path = tmp_path / "run.json"
    else:
        path = max(tmp_path.glob("checkpoints/*/run/metadata"), key=lambda p: int(p.parts[-3]))
    fields = json.loads(path.read_text())
    del fields["format"]
    fields.pop("checksum", None)
    path.write_text(json.dumps(fields))
    message = f"has format 1, .* reads format {present}; .* --restart"
    with pytest.raises(RunDirectoryError, match=message):
        train(tmp_path, make_task())
    assert train(tmp_path, make_task(), restart=True).succeeded


def test_a_run_goes_on_that_was_recorded_before_there_were_some_settings(
    train, make_task, tmp_path
):
    train(tmp_path, make_task())
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    (task,) = record["tasks"].values()
    del task["validation_fraction"]
    for name in ("columns", "max_samples", "repeat"):
        del task["data"][name]
    path.write_text(json.dumps(record))
    assert train(tmp_path, make_task()).succeeded
    task["data"]["columns"] = {"text": "body"}
    path.write_text(json.dumps(record))
    with pytest.raises(RunDirectoryError, match=r"tasks.*\.data\.columns\.text: only there"):
        train(tmp_path, make_task())
