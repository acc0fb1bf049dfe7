"""A disk for simulations: it can be full or slow, and it knows what a loss of power would leave."""

import errno
import os
import threading
from pathlib import Path

from safetensors import SafetensorError

from jaxmux.peft import peft_folder
from jaxmux.runs.checkpoints import Checkpoints
from jaxmux.server.database import Database
from jaxmux.server.folder import DATABASE
from jaxmux.server.store import ServerStore


class Crash(BaseException):
    """The process ends here. Nothing in jaxmux catches it."""


class SimulatedDisk:
    """Stands between a server in this process and its folder.

    Attributes:
      full: whether files in the folder cannot be created, and cannot grow.
      crash: whether the process crashes "before" or "after" the next transaction; None for neither.
      steps: by number of a checkpoint, the steps of all tasks in it by their keys.
    """

    def __init__(self, monkeypatch, folder: Path):
        """Takes the place of the real disk.

        Args:
          monkeypatch: the fixture of pytest.
          folder: what lies in other folders is written as usual.
        """
        self.full, self.crash = False, None
        self.steps: dict[int, dict[str, int]] = {}
        self._folder = str(folder)
        self._fast = threading.Event()
        self._fast.set()
        # By inode, the content of a file or the entries of a folder when it was synced.
        self._synced: dict[int, bytes | dict[str, int]] = {}
        self._replace_functions(monkeypatch)

    @property
    def slow(self) -> bool:
        """Whether the thread that writes checkpoints and adapters waits."""
        return not self._fast.is_set()

    @slow.setter
    def slow(self, slow: bool) -> None:
        self._fast.clear() if slow else self._fast.set()

    def unsynced(self, folder: Path) -> tuple[dict[Path, int], list[Path]]:
        """What a loss of power may destroy.

        Args:
          folder: a folder.

        Returns:
          By file, the bytes at its beginning that are on the disk, if the rest need not be; and the
          files and folders whose names need not be there.
        """
        contents, entries = {}, []
        for path in folder.rglob("*"):
            # SQLite syncs its files itself; tests/runs/test_crash_points.py looks at that.
            if path.name.startswith(DATABASE):
                continue
            synced = self._synced.get(path.stat().st_ino, b"")
            if path.is_file() and synced != (content := path.read_bytes()):
                # The number of the inode may have been that of a folder.
                synced = synced if isinstance(synced, bytes) else b""
                contents[path] = len(os.path.commonprefix([synced, content]))
            listed = self._synced.get(path.parent.stat().st_ino)
            listed = listed if isinstance(listed, dict) else {}
            if listed.get(path.name) != path.stat().st_ino:
                entries.append(path)
        return contents, entries

    def sync(self, folder: Path) -> None:
        """Everything in a folder has reached the disk.

        Args:
          folder: the folder.
        """
        for path in (folder, *folder.rglob("*")):
            self._synced[path.stat().st_ino] = _content(path)

    def _replace_functions(self, monkeypatch) -> None:
        for name in ("open", "write", "fsync"):
            real = getattr(os, name)
            own = getattr(self, f"_{name}")
            monkeypatch.setattr(os, name, lambda *a, real=real, own=own, **k: own(real, *a, **k))
        for owner, name in (
            (peft_folder, "save_file"),
            (Checkpoints, "save"),
            (ServerStore, "_write_adapters"),
            (ServerStore, "_write_checkpoint"),
            (Database, "write"),
        ):
            method = "transaction" if owner is Database else name.strip("_")
            real, own = getattr(owner, name), getattr(self, f"_{method}")
            monkeypatch.setattr(owner, name, lambda *a, real=real, own=own, **k: own(real, *a, **k))

    def _ours(self, file: int) -> bool:
        return os.readlink(f"/proc/self/fd/{file}").startswith(self._folder)

    def _no_space(self, path: object = None) -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path and str(path))

    def _open(self, real, path, flags, *args, **keywords):
        creates = flags & os.O_CREAT and not os.path.exists(path)
        if self.full and creates and str(path).startswith(self._folder):
            raise self._no_space(path)
        return real(path, flags, *args, **keywords)

    def _write(self, real, file, content):
        if self.full and self._ours(file):
            # A disk is seldom full at the end of a line.
            written = len(content) // 3
            if self.full == "partly" and written:
                self.full = True
                return real(file, content[:written])
            raise self._no_space()
        return real(file, content)

    def _transaction(self, real, database, *arguments):
        crash, self.crash = self.crash, None
        if crash == "before":
            raise Crash
        if self.full and str(database._path).startswith(self._folder):
            raise self._no_space(database._path)
        real(database, *arguments)
        if crash == "after":
            raise Crash

    def _fsync(self, real, file):
        # Syncing for real would take most of the simulation's time.
        path = os.readlink(f"/proc/self/fd/{file}")
        if not path.startswith(self._folder):
            return real(file)
        self._synced[os.fstat(file).st_ino] = _content(Path(path))

    def _save_file(self, real, tensors, path, **keywords):
        real(tensors, path, **keywords)
        if self.full and str(path).startswith(self._folder):
            os.truncate(path, os.path.getsize(path) // 2)
            raise SafetensorError("Error while serializing: I/O error: No space left on device")

    def _save(self, real, checkpoints, number, record, arrays):
        if self.full:
            (checkpoints._folder / f"{number}.orbax-checkpoint-tmp").mkdir()
            raise self._no_space(checkpoints._folder)
        real(checkpoints, number, record, arrays)

    def _write_adapters(self, real, store):
        self._fast.wait()
        return real(store)

    def _write_checkpoint(self, real, store, number, copies):
        self.steps[number] = {key: copy.progress.step for key, copy in copies.items()}
        return real(store, number, copies)


def _content(path: Path) -> bytes | dict[str, int]:
    """The content of a file, or the inodes in a folder by name."""
    if path.is_dir():
        return {entry.name: entry.inode() for entry in os.scandir(path)}
    return path.read_bytes()
