"""A server that is killed at any step of a write loses no command and no task."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from jaxmux.models import load_backbone
from jaxmux.runs.trackers import RunTrackers, TrackedRun
from jaxmux.server.folder import DATABASE, ServerDirectory
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.store import ServerStore
from jaxmux.server.task import ENDED

from . import crash_images
from .recorded_server import TASKS
from .simulated_tasks import OPTIONS, make_task

HERE = Path(__file__).parent
# Of so many copies, one is trained to the end; and the first images of an adapter that was being
# written are.
FINISHED, MOST_EXPORTS = 96, 2


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No machine loses power in these tests, and syncing would take most of their time."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(scope="module")
def recording(backbone, data, tmp_path_factory):
    """Copies of a server's folder before every system call that changed it, the names of the calls,
    and the commands: the number of the first copy after each was acknowledged, kind and task."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("recording")
    library = folder / "crash_points.so"
    source = HERE / "crash_points.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-lpthread"],
        check=True,
    )
    copies = folder / "copies"
    arguments = (library, backbone, data["short"], folder / "server", copies)
    root = str(HERE.parent.parent)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": root}
    command = [sys.executable, "-m", "tests.runs.recorded_server", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    commands = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    calls = (copies / "calls").read_text().split()
    return [copies / f"{number:04d}" for number in range(len(calls))], calls, commands


@pytest.fixture(scope="module")
def serve(backbone):
    def open_server(folder, said):
        return tuning_server(backbone, folder, ServerOptions(**OPTIONS), say=said.append)

    return open_server


@pytest.fixture(scope="module")
def calm(serve, data, adapter_bytes, tmp_path_factory):
    """The adapters of tasks that nothing disturbs, by name."""
    folder = tmp_path_factory.mktemp("calm") / "server"
    with serve(folder, []) as server:
        for name, (kind, steps) in TASKS.items():
            server.register(make_task(kind, name, steps, data))
        finish(server)
    return {name: adapter_bytes(folder / "adapters" / name) for name in TASKS}


def finish(server):
    server.step()
    for status in server.statuses():
        if status.state == "paused":
            server.resume(status.name)
    for _ in range(1000):
        if not server.step():
            time.sleep(0.01)
        if all(status.state in ENDED for status in server.statuses()):
            return
    raise AssertionError(server.statuses())


@pytest.fixture(scope="module")
def kept(backbone):
    """A function that reads what a server finds in its folder: the names of the tasks, the paused
    ones, and the steps of those in the checkpoint. The arrays are read too, and their checksums
    compared."""
    loaded = load_backbone(backbone, "float32")

    def read(folder, said):
        identity = {
            key: value
            for key, value in json.loads((folder / "server.json").read_text()).items()
            if key != "format"
        }
        with closing(ServerDirectory(folder, identity)) as directory:
            none = RunTrackers((), TrackedRun("server", folder, None, {}), print)
            with closing(ServerStore(directory, loaded, 2, none, said.append)) as store:
                found = store.read()
        names = [own.name for own in found.tasks]
        paused = {own.name for own in found.tasks if own.state == "paused"}
        steps = {own.name: own.progress.step if own.progress else 0 for own in found.tasks}
        return names, paused, steps

    return read


def check(found, number, commands):
    """Every command that was acknowledged before a copy was made holds."""
    names, paused, steps = found
    given = [(kind, name) for first, kind, name in commands if first <= number]
    registered = [name for kind, name in given if kind == "register"]
    assert names[: len(registered)] == registered
    # Of commands that were not acknowledged yet, the next one may have been written.
    later = [(kind, name) for first, kind, name in commands if first > number]
    assert set(names) - set(registered) <= {name for _, name in later[:1]}
    if ("pause", "two") in given and ("resume", "two") not in given:
        assert "two" in paused or later[:1] == [("resume", "two")]
    assert steps["two"] >= 1


def half_written(before, after, folder):
    """A copy of `before` in which the file that the next call enlarged has half of the addition;
    None if that call enlarged no file."""
    for path in sorted(after.rglob("*")):
        inside = path.relative_to(after)
        old = before / inside
        if path.is_file() and old.is_file() and path.stat().st_size > old.stat().st_size + 1:
            content, size = path.read_bytes(), old.stat().st_size
            shutil.copytree(before, folder)
            (folder / inside).write_bytes(content[: (size + len(content)) // 2])
            return folder
    return None


def after_loss_of_power(copy, folder):
    """A copy in which the files of the database are as they were synced last."""
    shutil.copytree(copy, folder)
    for path in folder.glob(f"{DATABASE}*"):
        path.unlink()
    for path in Path(f"{copy}.synced").iterdir():
        shutil.copy(path, folder)
    return folder


def files_of(folder):
    """The contents of the files in a folder, by path."""
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_a_server_killed_between_any_two_system_calls_loses_nothing(
    every, recording, serve, kept, calm, adapter_bytes, tmp_path
):
    """Of calls that rename nothing, one of `every` is looked at."""
    copies, calls, commands = recording
    assert {"rename", "unlink", "mkdir", "pwrite64"} & set(calls)
    # Some copies were made while events.jsonl was set aside, and an old file was deleted.
    assert any(not (copy / "events.jsonl").exists() for copy in copies)
    assert len({path.name for copy in copies for path in copy.glob("events.*.jsonl")}) > 3
    torn = exports = lost = 0
    for number, copy in enumerate(copies):
        # While weights are written, safetensors has a file with a random name.
        half_exported = any(copy.glob("adapters/*/.partial/.*"))
        if number % every and "rename" not in calls[number] and not half_exported:
            continue
        images = [copy]
        if number + 1 < len(copies):
            image = half_written(copy, copies[number + 1], tmp_path / f"half{number}")
            images += [image] if image else []
            torn += image is not None
        power = after_loss_of_power(copy, tmp_path / f"power{number}")
        # Mostly everything was synced, and the copy says it all.
        images += [power] if files_of(power) != files_of(copy) else []
        lost += images[-1] is power
        for image in images:
            said = []
            check(kept(image, said), number, commands)
            assert not said, (calls[number], said)
            exports += half_exported
            if number % FINISHED and (not half_exported or exports > MOST_EXPORTS):
                continue
            with serve(image, said) as server:
                finish(server)
                names = [status.name for status in server.statuses()]
            for name in names:
                assert adapter_bytes(image / "adapters" / name) == calm[name]
    assert torn and exports and lost


@pytest.mark.parametrize("damage", ["torn", "flipped", "missing"])
def test_any_damaged_file_of_the_newest_checkpoint_is_harmless(damage, recording, kept, tmp_path):
    """The checkpoint is read as it was, or the one before takes its place."""
    copies, _, _ = recording
    image = copies[-1]
    older, newest = crash_images.checkpoint_numbers(image)
    steps = {}
    for number in (older, newest):
        alone = shutil.copytree(image, tmp_path / str(number))
        for other in {older, newest} - {number}:
            shutil.rmtree(alone / "checkpoints" / str(other))
        steps[number] = kept(alone, [])
    random, outcomes = Random(1), set()
    folder = image / "checkpoints" / str(newest)
    for i, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        copy = shutil.copytree(image, tmp_path / f"damaged{i}")
        file, said = copy / path.relative_to(image), []
        if damage == "torn":
            crash_images.torn(random, file)
        elif damage == "flipped" and file.stat().st_size:
            crash_images.flip(random, file)
        elif damage == "missing":
            file.unlink()
        found = kept(copy, said)
        assert found == steps[older if said else newest], (path, said)
        outcomes.add(bool(said))
        if said:
            assert f"the checkpoint of step {newest} is damaged" in said[0]
    assert True in outcomes
