"""One process at a time has a folder, also while others create and remove it."""

import fcntl
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from jaxmux.errors import InputError, Interrupted, OutOfDeviceMemory
from jaxmux.runs.run_directory import FolderLock, FolderLockError, lock_state


def test_a_locked_folder_is_refused_and_kept(tmp_path):
    lock = FolderLock(tmp_path / "a" / "run")
    assert lock.created
    with pytest.raises(FolderLockError, match="in use by another process"):
        FolderLock(tmp_path / "a" / "run")
    assert (tmp_path / "a" / "run").is_dir()
    lock.close()
    second = FolderLock(tmp_path / "a" / "run")
    assert not second.created
    second.close(remove=True)
    assert (tmp_path / "a" / "run").is_dir()


def test_a_folder_with_other_files_is_not_removed(tmp_path):
    lock = FolderLock(tmp_path / "run")
    (tmp_path / "run" / "notes.txt").touch()
    lock.close(remove=True)
    assert (tmp_path / "run" / "notes.txt").exists()


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("file", "file/run", "link"):
        with pytest.raises(FolderLockError, match="not writable"):
            FolderLock(tmp_path / path)


def test_a_folder_that_its_holders_remove_has_one_holder_at_a_time(tmp_path):
    """Each open lock file has a lock of its own, so threads stand in for processes."""
    folder, holder = tmp_path / "run", tmp_path / "holder"

    def hold_again_and_again(_: int) -> int:
        held = tries = 0
        # On a busy machine a thread may have no luck for long.
        while tries < 200 or not held:
            tries += 1
            with suppress(FolderLockError):
                lock = FolderLock(folder)
                os.close(os.open(holder, os.O_CREAT | os.O_EXCL))  # fails for a second holder
                holder.unlink()
                lock.close(remove=True)
                held += 1
        return held

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(hold_again_and_again, range(4)))


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    folder, flock = tmp_path / "run", fcntl.flock

    def remove_and_flock(file, operation):
        """As if another process had removed the folder since its lock file was opened."""
        monkeypatch.undo()
        shutil.rmtree(folder)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_and_flock)
    lock = FolderLock(folder)
    assert lock.created
    with pytest.raises(FolderLockError, match="in use"):
        FolderLock(folder)
    lock.close(remove=True)
    assert not folder.exists()


def test_a_lock_tells_whether_its_process_lives_or_has_ended(tmp_path):
    """test_serving.py has a process that was killed."""
    folder = tmp_path / "run"
    assert lock_state(folder).holder == "unknown"
    for _ in range(2):
        lock = FolderLock(folder)
        assert lock_state(folder).holder == "alive"
        lock.close()
        assert lock_state(folder).holder == "ended"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OutOfDeviceMemory("too little\nmemory"), "too little"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "the device ran out of memory; "),
        (MemoryError(), "the host has no memory left"),
        (OSError(28, "No space left on device", "a/metrics.jsonl"), "a/metrics.jsonl: No space"),
        (ZeroDivisionError("by\x1b[1m zero"), "ZeroDivisionError: by [1m zero"),
        (ValueError(), "ValueError: ValueError"),
        (InputError("a.jsonl, line 3: no text"), "a.jsonl, line 3: no text"),
    ],
)
def test_a_lock_tells_which_exception_has_ended_its_process(tmp_path, error, told):
    """Until another process has used the folder."""
    lock = FolderLock(tmp_path)
    lock.close(error=error)
    state = lock_state(tmp_path)
    assert state.holder == "failed" and state.failure.startswith(told)
    FolderLock(tmp_path).close(unused=True)
    assert lock_state(tmp_path)[::2] == state[::2]
    FolderLock(tmp_path).close(error=Interrupted(signal.SIGINT, saved=True))
    assert lock_state(tmp_path)[::2] == ("ended", None)
