"""What the module says of Orbax holds for the version that is installed."""

import asyncio
import errno
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxmux.runs import orbax_files

RECORD = {"position": {"rounds": 1}, "größe": [1, 2.5, None]}
# So many that reading or writing them goes on when the first of them fails.
TASKS, ARRAYS = 2, 15


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)

    def of_task():
        return {f"adapter/l{j}": rng.random((32, 32)).astype(np.float32) for j in range(ARRAYS)}

    return {f"t{i}": of_task() for i in range(TASKS)}


@pytest.fixture(scope="module")
def written(arrays, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "1"
    orbax_files.write(folder, RECORD, arrays)
    return folder


@pytest.fixture
def logged():
    """What passes the filters of the loggers that Orbax uses, which pytest does not capture."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield messages
    for logger in loggers:
        logger.removeHandler(handler)


@pytest.fixture(scope="module", autouse=True)
def nothing_older_is_collected():
    """After other tests, to look at all their objects would take seconds in each test."""
    gc.freeze()


@pytest.fixture
def assert_calm(capfd, logged, monkeypatch):
    """Fails if something was printed or logged, or a thread was left, since the test began."""
    before, unraisable = set(threading.enumerate()), []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: unraisable.append(args.exc_value))

    def check():
        gc.collect()
        assert (unraisable, logged, capfd.readouterr()) == ([], [], ("", ""))
        for thread in set(threading.enumerate()) - before:
            thread.join(timeout=30)
            assert not thread.is_alive(), thread

    return check


def paths(arrays):
    return {name: [*of_task] for name, of_task in arrays.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].keys() == expected[name].keys()
        for path, array in expected[name].items():
            np.testing.assert_array_equal(found[name][path], array, strict=True)


@pytest.mark.long
def test_writing_and_reading_prints_nothing_and_leaves_no_thread(arrays, tmp_path, assert_calm):
    orbax_files.write(tmp_path / "7", RECORD, arrays)
    assert orbax_files.read_record(tmp_path / "7") == RECORD
    assert_same(orbax_files.read_arrays(tmp_path / "7", paths(arrays)), arrays)
    assert os.listdir(tmp_path) == ["7"] and orbax_files.numbers(tmp_path) == [7]
    assert_calm()


def test_a_checkpoint_of_the_manager_that_earlier_versions_used_can_be_read(arrays, tmp_path):
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="jaxmux"
    )
    options = ocp.CheckpointManagerOptions(create=False, multiprocessing_options=alone)
    (tmp_path / "checkpoints").mkdir()
    with ocp.CheckpointManager(tmp_path / "checkpoints", options=options) as manager:
        items = {"run": ocp.args.JsonSave(RECORD), "tasks": ocp.args.PyTreeSave(arrays)}
        manager.save(5, args=ocp.args.Composite(**items))
    assert orbax_files.numbers(tmp_path / "checkpoints") == [5]
    assert orbax_files.read_record(tmp_path / "checkpoints" / "5") == RECORD
    found = orbax_files.read_arrays(tmp_path / "checkpoints" / "5", paths(arrays))
    assert_same(found, arrays)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def remove(path: Path) -> None:
    path.unlink() if path.is_file() else shutil.rmtree(path)


def make_folder(path: Path) -> None:
    remove(path)
    path.mkdir()


@pytest.mark.long
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(truncate, marks=pytest.mark.slow),
        zero,
        remove,
        pytest.param(make_folder, marks=pytest.mark.slow),
    ],
    ids=lambda f: f.__name__,
)
def test_no_damage_prints_or_leaves_anything(damage, written, arrays, tmp_path, assert_calm):
    """Whatever file or folder is damaged: what is read is right, or there is one exception."""
    outcomes = []
    for place in sorted(path.relative_to(written) for path in written.rglob("*")):
        if (written / place).is_dir() and damage in (truncate, zero):
            continue
        copy = Path(shutil.copytree(written, tmp_path / "1"))
        damage(copy / place)
        try:
            assert orbax_files.read_record(copy) == RECORD
            assert_same(orbax_files.read_arrays(copy, paths(arrays)), arrays)
            outcomes.append(None)
        except (OSError, ValueError, KeyError) as e:
            outcomes.append(orbax_files.reason(e))
            assert "\n" not in outcomes[-1] and "tensorstore_spec" not in outcomes[-1]
        shutil.rmtree(copy)
    assert any(outcomes) and not all(outcomes)
    assert_calm()


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """The closest a test gets to a full disk. It holds for all files, those of pytest too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.long
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(0, marks=pytest.mark.slow),
        200,
        pytest.param(2_000, marks=pytest.mark.slow),
        20_000,
    ],
)
def test_what_cannot_be_written_is_one_error_and_leaves_nothing(
    size, arrays, tmp_path, assert_calm
):
    with pytest.raises(OSError, match="File too large") as error, no_file_larger_than(size):
        orbax_files.write(tmp_path / "7", RECORD, arrays)
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path / "7"))
    assert os.listdir(tmp_path) == []
    assert_calm()


@pytest.mark.long
def test_an_error_is_raised_when_no_array_is_being_written_any_more(
    arrays, tmp_path, monkeypatch, assert_calm
):
    """Whichever array fails, and however long the others take."""
    handler, ended = ocp.type_handlers.NumpyHandler, []
    real = handler._open_and_write

    async def write(self, value, *args):
        if len(ended) == 7:
            ended.append("failed")
            raise ValueError("NOT_FOUND")
        ended.append("begun")
        await asyncio.sleep(0.05)
        await real(self, value, *args)
        ended.append("written")

    monkeypatch.setattr(handler, "_open_and_write", write)
    with pytest.raises(OSError, match="NOT_FOUND"):
        orbax_files.write(tmp_path / "7", RECORD, arrays)
    counts = {word: ended.count(word) for word in ("begun", "failed", "written")}
    others = TASKS * ARRAYS - 1
    assert counts == {"begun": others, "failed": 1, "written": others}
    assert_calm()


def test_what_orbax_logs_is_dropped_and_what_others_log_is_not(written, tmp_path, logged):
    from absl import logging as absl

    copy = Path(shutil.copytree(written, tmp_path / "1"))
    (copy / "_CHECKPOINT_METADATA").write_text("")
    orbax_files.read_record(copy)
    assert logged == []
    absl.warning("of a stranger")
    assert logged == ["of a stranger"]


def test_an_unfinished_checkpoint_of_orbax_is_known_by_its_name(arrays, tmp_path, monkeypatch):
    """Orbax moves a checkpoint to its name at the end, so one without it is not complete."""
    names = []

    def interrupt(self, *args, **keywords):
        names.extend(path.name for path in tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "finalize", interrupt)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(orbax_files, "remove_unfinished", lambda folder: None)
        orbax_files.write(tmp_path / "7", RECORD, arrays)
    assert names and orbax_files.numbers(tmp_path) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    orbax_files.remove_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_half_deleted_is_unfinished(written, tmp_path, monkeypatch):
    shutil.copytree(written, tmp_path / "1")
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **keywords: None)
    orbax_files.delete(tmp_path / "1")
    assert orbax_files.numbers(tmp_path) == [] and len(os.listdir(tmp_path)) == 1
    monkeypatch.undo()
    orbax_files.remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == []


def test_only_folders_of_plain_numbers_are_checkpoints(tmp_path):
    for name in ("3", "12", "007", "²", "٣", "-1", "damaged.4", "5.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").write_text("")
    assert orbax_files.numbers(tmp_path) == [3, 12]


def test_nothing_else_in_jaxmux_imports_orbax():
    package = Path(orbax_files.__file__).parent.parent
    users = [
        path.name
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in ("orbax.checkpoint", "import tensorstore"))
    ]
    assert users == ["orbax_files.py"]
