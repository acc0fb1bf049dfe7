"""Damage to checkpoints and run files ends in exact recovery, or in one line that names the file
and says what to do."""

import json
import os
import re
import shutil
import signal
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux import AdamW, Interrupted
from jaxmux.cli.main import main
from jaxmux.data import Source, load_tokenizer
from jaxmux.engine import prepare_task
from jaxmux.errors import InputError
from jaxmux.models import BackboneConfig
from jaxmux.peft import is_adapter_folder
from jaxmux.runs import checkpoints, run_layout, training
from jaxmux.runs.checkpoints import RunPosition
from jaxmux.runs.metrics import MetricsWriter
from jaxmux.runs.trackers import RunTrackers, TrackedRun

STEPS = 8
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def tasks(make_task, data):
    return [
        make_task("a", steps=STEPS, eval_data=data["short.eval"]),
        make_task("b", steps=STEPS - 2, seed=3),
    ]


@pytest.fixture(scope="module")
def finished(tasks, train, tmp_path_factory) -> Path:
    """A run that nothing disturbed, with three checkpoints."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert train(folder, *tasks, checkpoint_every=3).succeeded
    return folder


@pytest.fixture
def run_dir(finished, tmp_path) -> Path:
    """A copy of the finished run as it was before its end: there is no summary yet."""
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    (copy / "summary.json").unlink()
    shutil.rmtree(copy / "adapters")
    return copy


@pytest.fixture
def assert_same_adapters(finished, adapter_bytes):
    def check(folder: Path) -> None:
        found, expected = adapter_bytes(folder / "adapters"), adapter_bytes(finished / "adapters")
        assert len(expected) == 4
        assert found == expected

    return check


def newest(run_dir: Path) -> Path:
    return max((run_dir / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))


def largest_file(folder: Path) -> Path:
    """The largest file of arrays. Beside the folder `d`, in which Orbax merges what the processes
    have written, it leaves their own files, and never reads them."""
    return max((folder / "d").iterdir(), key=lambda path: path.stat().st_size)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# Where in a checkpoint the damage is.
PLACES = {
    "arrays": lambda folder: largest_file(folder / "tasks"),
    "record": lambda folder: folder / "run" / "metadata",
}
DAMAGE = {"truncated": truncate, "emptied": empty, "flipped": flip, "missing": remove}
DAMAGE |= {"a folder": make_folder}


DAMAGED_PLACES = [
    pytest.param(
        at, damage, id=f"{place}-{name}", marks=() if name in ("flipped", "missing") else SLOW
    )
    for place, at in PLACES.items()
    for name, damage in DAMAGE.items()
]


@pytest.mark.parametrize(("place", "damage"), DAMAGED_PLACES)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    place, damage, run_dir, tasks, train, assert_same_adapters, capsys
):
    step = newest(run_dir).name
    damage(place(newest(run_dir)))
    assert train(run_dir, *tasks, checkpoint_every=3).succeeded
    lines = [line for line in capsys.readouterr().out.splitlines() if "is damaged" in line]
    assert len(lines) == 1 and f"checkpoint of step {step} is damaged" in lines[0]
    assert_same_adapters(run_dir)


def test_a_checkpoint_without_arrays_gives_way_to_the_one_before(
    run_dir, tasks, train, assert_same_adapters
):
    shutil.rmtree(newest(run_dir) / "tasks")
    assert train(run_dir, *tasks, checkpoint_every=3).succeeded
    assert_same_adapters(run_dir)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(run_dir, tasks, train):
    for folder in (run_dir / "checkpoints").glob("[0-9]*"):
        flip(largest_file(folder / "tasks"))
    with pytest.raises(InputError, match="checkpoints: .* is damaged .*, and no other can be read"):
        train(run_dir, *tasks)


def export(run_dir: Path, out: Path, *arguments: str) -> int:
    return main(["export", f"--run_dir={run_dir}", f"--out={out}", *arguments])


@pytest.mark.parametrize(
    "place", ["tasks/manifest.ocdbt", "run", pytest.param("tasks", marks=SLOW)]
)
def test_an_export_tells_of_a_damaged_checkpoint_in_one_line(place, run_dir, tmp_path, capfd):
    folder = run_dir / "checkpoints"
    older = sorted((int(path.name) for path in folder.glob("[0-9]*")), reverse=True)[1:]
    rounds, _, _ = checkpoints.read_task(folder, "a")
    remove(newest(run_dir) / place)

    assert export(run_dir, tmp_path / "out", "--task=a", "--task=b") == 0
    damage, *warnings = capfd.readouterr().err.splitlines()
    assert damage.startswith(f"{folder}: the checkpoint of step {newest(run_dir).name} is damaged")
    assert damage.endswith(f"; the one of step {older[0]} takes its place")
    assert all(line.startswith("task ") for line in warnings)

    # The checkpoint of a round that is named is not replaced.
    assert export(run_dir, tmp_path / "other", f"--round={rounds}") == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert error.startswith(f"error: {folder}: the checkpoint of step {newest(run_dir).name}")
    assert "restore the folder from a backup, or give --round for one of those after" in error
    rounds_of = re.search(r"those after rounds ([\d, ]+)$", error)[1].split(", ")
    assert sorted(map(int, rounds_of), reverse=True) == older

    for path in folder.glob("[0-9]*"):
        if path != newest(run_dir):
            remove(path / place)
    assert export(run_dir, tmp_path / "none") == 2
    (error,) = capfd.readouterr().err.splitlines()
    assert f"{folder}: the checkpoint of step" in error
    assert error.endswith("restore the folder from a backup, or begin anew with --restart")
    assert not (tmp_path / "none").exists()


def test_a_run_without_checkpoints_begins_anew(run_dir, tasks, train, assert_same_adapters):
    shutil.rmtree(run_dir / "checkpoints")
    assert train(run_dir, *tasks, checkpoint_every=3).succeeded
    assert_same_adapters(run_dir)


@pytest.mark.parametrize(
    "damage",
    [pytest.param(truncate, marks=SLOW), pytest.param(empty, marks=SLOW), flip, remove],
    ids=lambda f: f.__name__,
)
def test_damaged_metrics_do_not_disturb_training(
    damage, run_dir, tasks, train, assert_same_adapters
):
    damage(run_dir / "metrics.jsonl")
    assert train(run_dir, *tasks).succeeded
    assert b"\0" not in (run_dir / "metrics.jsonl").read_bytes()
    assert (run_dir / "loss.png").stat().st_size > 0
    assert_same_adapters(run_dir)


@pytest.fixture
def go_on(tmp_path):
    """Opens the files of a run with this content at a checkpoint that knows so many bytes of them,
    and writes one more line. Returns the lines of the file, and what was said."""

    def write(content: bytes, known: int) -> tuple[list[bytes], list[str]]:
        path, said = tmp_path / "rounds.jsonl", []
        path.write_bytes(content)
        files = {name: tmp_path / f"{name}.jsonl" for name in ("metrics", "held_out")}
        none = RunTrackers((), TrackedRun("run", tmp_path, None, {}), print)
        directory, position = SimpleNamespace(rounds=path, **files), RunPosition(rounds_bytes=known)
        with closing(MetricsWriter(directory, position, none, said.append)) as metrics:
            metrics.write_round({"round": "new"})
        return path.read_bytes().splitlines(keepends=True), said

    return write


LINES = [b'{"round": 0, "seconds": 1.5}\n', b'{"round": 10}\n', b'{"round": 2, "time": 3.25}\n']


def test_a_line_never_goes_on_with_one_that_was_cut_off(go_on):
    """The content is cut off at every byte, and the checkpoint knows any number of its lines."""
    content = b"".join(LINES)
    for count in range(len(LINES) + 1):
        known = len(b"".join(LINES[:count]))
        for end in range(len(content) + 1):
            *before, last = go_on(content[:end], known)[0]
            complete = content[: min(end, known)].count(b"\n")
            assert before == LINES[:complete]
            assert json.loads(last)["round"] == "new"


@pytest.mark.parametrize(
    "put",
    [
        b"mine\n",
        b"mine",
        b"a\nb",
        *(pytest.param(each, marks=SLOW) for each in (b'{"round": 7}\n', b"\n", b"x" * 99)),
    ],
)
def test_what_was_put_into_a_file_merges_no_lines(put, go_on):
    """Wherever it was put: what the checkpoint's length then cuts through is removed as a whole."""
    content = b"".join(LINES)
    for count in range(len(LINES) + 1):
        known = len(b"".join(LINES[:count]))
        for place in range(len(content) + 1):
            changed = content[:place] + put + content[place:]
            (*before, last), said = go_on(changed, known)
            complete = changed[:known].count(b"\n")
            assert before == changed.splitlines(keepends=True)[:complete]
            assert json.loads(last)["round"] == "new"
            assert len(said) == (len(b"".join(before)) < known)


@pytest.mark.parametrize(
    "damage", [truncate, pytest.param(empty, marks=SLOW), remove], ids=lambda f: f.__name__
)
def test_a_damaged_summary_is_written_again(damage, finished, tasks, train, tmp_path):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    damage(copy / "summary.json")
    assert train(copy, *tasks).succeeded
    found, expected = (json.loads((f / "summary.json").read_text()) for f in (copy, finished))
    assert found["tasks"] == expected["tasks"]


@pytest.mark.parametrize(
    "lost",
    ["adapters", pytest.param("adapters/a", marks=SLOW), "adapters/a/adapter_config.json"],
)
def test_lost_adapters_of_a_finished_run_are_exported_again(
    lost, finished, tasks, train, tmp_path, assert_same_adapters
):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    remove(copy / lost)
    assert train(copy, *tasks).succeeded
    assert_same_adapters(copy)


@pytest.mark.parametrize("damage", [truncate, empty], ids=lambda f: f.__name__)
@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_record_is_refused_and_nothing_is_deleted(damage, restart, run_dir, tasks, train):
    damage(run_dir / "run.json")
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(InputError, match=f"{run_dir / 'run.json'}: damaged .* restore it, or"):
        train(run_dir, *tasks, restart=restart)
    assert sorted(run_dir.rglob("*")) == before


FILES = ("run.json", "config.gin", "metrics.jsonl", "summary.json", "loss.png")


FOLDERS = ("checkpoints", "adapters", "adapters/a", "tensorboard")
LINKS = [
    pytest.param(
        name,
        restart,
        marks=SLOW if restart and name not in ("checkpoints", "metrics.jsonl") else (),
    )
    for name in (*FILES, *FOLDERS)
    for restart in (False, True)
]


@pytest.mark.parametrize(("name", "restart"), LINKS)
def test_nothing_is_written_or_deleted_through_a_link(
    name, restart, finished, tasks, train, tmp_path
):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    target = tmp_path / "target"
    path = copy / name
    if not path.exists():
        path.write_text("mine")
    path.rename(target)
    path.symlink_to(target)
    before = {p: p.read_bytes() for p in (target, *target.rglob("*")) if p.is_file()}
    with pytest.raises(InputError, match=f"{name} is a symbolic link; remove the link"):
        train(copy, *tasks, restart=restart)
    assert {p: p.read_bytes() for p in (target, *target.rglob("*")) if p.is_file()} == before


def test_a_lock_that_is_a_link_leaves_its_target_alone(tasks, train, tmp_path):
    (tmp_path / "target").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "target")
    with pytest.raises(InputError, match="not writable"):
        train(tmp_path / "run", *tasks)
    assert (tmp_path / "target").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "adapters", "tensorboard"])
def test_a_file_in_place_of_a_folder_is_named(name, finished, tasks, train, tmp_path):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(copy / name)
    (copy / name).write_text("")
    with pytest.raises(InputError, match=f"{name} is a file, but should be a folder"):
        train(copy, *tasks)


@pytest.mark.parametrize("restart", [False, True])
def test_a_strangers_folders_are_kept(restart, tasks, train, tmp_path):
    """A folder without run.json is not proved to be a run directory."""
    for name in ("checkpoints", "adapters"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").write_text("mine")
    with pytest.raises(InputError, match="holds adapters, checkpoints but no run.json"):
        train(tmp_path, *tasks, restart=restart)
    assert (tmp_path / "checkpoints" / "precious").read_text() == "mine"


class Changes:
    """What may change between two calls, by name: functions of the folder of the run's inputs."""

    @staticmethod
    def weights(inputs: Path) -> None:
        path = inputs / "backbone" / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"] *= np.float32(1.5)
        save_file(tensors, path, metadata={"format": "pt"})

    @staticmethod
    def data(inputs: Path) -> None:
        lines = (inputs / "data.jsonl").read_text().splitlines()
        (inputs / "data.jsonl").write_text("\n".join(lines[:-1]) + "\n")

    @staticmethod
    def held_out_data(inputs: Path) -> None:
        (inputs / "eval.jsonl").write_text('{"prompt": "red", "completion": " fig"}\n')


@pytest.fixture(scope="module")
def begun(backbone, data, make_task, train, tmp_path_factory):
    """The folder of a finished run's inputs, and a function that goes on with the run."""
    inputs = tmp_path_factory.mktemp("inputs")
    shutil.copytree(backbone, inputs / "backbone")
    shutil.copy(data["short"], inputs / "data.jsonl")
    shutil.copy(data["short.eval"], inputs / "eval.jsonl")
    paths = {"data": str(inputs / "data.jsonl"), "eval_data": str(inputs / "eval.jsonl")}

    def go_on():
        return train(inputs / "run", make_task(**paths), backbone=inputs / "backbone")

    go_on()
    return inputs, go_on


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (Changes.weights, "backbone"),
        (Changes.data, "data of task 'tiny'"),
        (Changes.held_out_data, "held-out data of task 'tiny'"),
    ],
    ids=["weights", "data", "held-out data"],
)
def test_changed_inputs_are_named(change, named, begun):
    """Whether the run is finished or not. Nothing but the change is refused."""
    inputs, go_on = begun
    restored = [*inputs.glob("*.jsonl"), inputs / "run" / "summary.json"]
    restored.append(inputs / "backbone" / "model.safetensors")
    before = {path: path.read_bytes() for path in restored}
    go_on()
    change(inputs)
    for is_finished in (True, False):
        if not is_finished:
            (inputs / "run" / "summary.json").unlink()
        with pytest.raises(InputError, match=f"the {named} changed since the run began; restore"):
            go_on()
    for path, content in before.items():
        path.write_bytes(content)


def test_a_finished_run_can_be_extended(make_task, train, tmp_path, adapter_bytes):
    """With a constant learning rate, the extended run ends where a longer one would."""
    settings = {"optimizer": AdamW(1e-2)}
    whole = train(tmp_path / "whole", make_task(steps=5, **settings))
    train(tmp_path / "run", make_task(steps=3, **settings))
    extended = train(tmp_path / "run", make_task(steps=5, **settings))
    assert extended.tasks == whole.tasks
    found, expected = (adapter_bytes(tmp_path / f / "adapters") for f in ("run", "whole"))
    assert found == expected and is_adapter_folder(tmp_path / "run" / "adapters" / "tiny")


def test_a_signal_during_start_up_is_not_lost(make_task, train, tmp_path, monkeypatch):
    def load(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal was swallowed")

    monkeypatch.setattr(run_layout, "load_backbone", load)
    with pytest.raises(Interrupted) as interruption:
        train(tmp_path, make_task())
    assert interruption.value.signal_number == signal.SIGTERM and not interruption.value.saved


def test_a_signal_while_restoring_keeps_every_checkpoint(
    run_dir, tasks, train, monkeypatch, assert_same_adapters
):
    read = checkpoints._read

    def interrupted(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return read(*arguments)

    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_read", interrupted)
        with pytest.raises(Interrupted):
            train(run_dir, *tasks)
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == before
    assert train(run_dir, *tasks).succeeded
    assert_same_adapters(run_dir)


def test_an_extended_run_that_is_interrupted_is_not_finished(
    make_task, train, tmp_path, monkeypatch
):
    train(tmp_path, make_task(steps=3))

    def stop(*_):
        raise Interrupted(signal.SIGTERM, saved=False)

    with monkeypatch.context() as patch:
        patch.setattr(training.Training, "_restore", stop)
        with pytest.raises(Interrupted):
            train(tmp_path, make_task(steps=5))
    assert train(tmp_path, make_task(steps=5)).tasks["tiny"]["steps"] == 5


def test_an_interrupted_restart_can_be_repeated(make_task, train, tmp_path, monkeypatch):
    train(tmp_path, make_task())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Interrupted):
            train(tmp_path, make_task(steps=2), restart=True)
    assert train(tmp_path, make_task(steps=2), restart=True).tasks["tiny"]["steps"] == 2


def test_restart_keeps_the_adapter_with_which_a_task_begins(make_task, train, tmp_path):
    train(tmp_path, make_task())
    adapter = str(tmp_path / "adapters" / "tiny")
    with pytest.raises(InputError, match=f"restart would delete {adapter}"):
        train(tmp_path, make_task(resume_from=adapter), restart=True)
    assert is_adapter_folder(Path(adapter))


def test_metadata_in_config_json_may_change(backbone, make_task, train, tmp_path):
    copy = Path(shutil.copytree(backbone, tmp_path / "backbone"))
    train(tmp_path / "run", make_task(), backbone=copy)
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"transformers_version": "9"}))
    assert train(tmp_path / "run", make_task(), backbone=copy).succeeded


def test_training_goes_on_when_tensorboards_thread_has_ended(
    make_task, train, tmp_path, monkeypatch, capsys
):
    """As on a full disk. Adding a value would block for ever once the queue is full."""
    from tensorboardX.event_file_writer import EventFileWriter

    create = EventFileWriter.__init__

    def ended(self, *arguments, **keywords):
        create(self, *arguments, **keywords)
        self._worker.stop()
        self._worker.join()

    monkeypatch.setattr(EventFileWriter, "__init__", ended)
    assert train(tmp_path, make_task(steps=12)).succeeded
    assert capsys.readouterr().out.count("TensorBoard: its files cannot be written") == 1


def test_another_chat_template_is_other_data(backbone, make_task, tmp_path):
    template, path = tmp_path / "chat.jinja", tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "fig"}]
    path.write_text(json.dumps({"messages": chat}) + "\n")
    task = make_task("chat", data=Source(str(path), chat_template=template), steps=1)
    config, tokenizer = BackboneConfig.from_folder(backbone), load_tokenizer(backbone)

    def fingerprints(colon: str) -> dict[str, str]:
        template.write_text(
            "{% for m in messages %}{{ m.role }}" + colon + "{% generation %}{{ m.content }}"
            "{% endgeneration %}{% endfor %}"
        )
        return prepare_task(task, config, tokenizer).fingerprints

    assert fingerprints(":") == fingerprints(":") != fingerprints(" ")
