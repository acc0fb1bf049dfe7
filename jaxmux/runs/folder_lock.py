"""A lock that keeps a folder for one process."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

_NAME = ".lock"
# A folder that other processes remove at the same time is created again at most so many times.
_ATTEMPTS = 10
# `lock_state` holds the lock for a moment, so a lock that is not free is tried again for so long.
_TRIES, _SECONDS_A_TRY = 5, 0.005


class FolderLockError(Exception):
    """A folder cannot be created or locked; the message says why."""


class FolderLock:
    """Holds a folder against other processes until `close`. The file ".lock" in it is what other
    processes find locked. It holds the process's number until `close`, so a process that was killed
    leaves its number behind.

    Attributes:
      created: True if the folder did not exist before.
    """

    def __init__(self, folder: Path):
        """Opens a folder, or creates it with its parents, and locks it.

        Args:
          folder: the folder.

        Raises:
          FolderLockError: the folder is not writable, another process holds it, or its file system
            has no locks.
        """
        self.created = False
        self._folder = folder
        for _ in range(_ATTEMPTS):
            try:
                self._open()
            except FileNotFoundError as e:
                # Another process may have removed a folder that it created and did not use.
                reason = e.strerror
                continue
            except OSError as e:
                raise FolderLockError(f"not writable ({e.strerror})") from None
            self._lock()
            if self._is_in_folder():
                self._write(f"{os.getpid()}\n")
                return
            self._file.close()
            reason = "another process creates and removes it"
        raise FolderLockError(f"not writable ({reason})")

    def close(self, *, remove: bool = False) -> None:
        """Releases the folder.

        Args:
          remove: True removes a folder that this lock created, if there is nothing else in it.
        """
        # The folder is still locked here, so no other process begins to use it.
        with suppress(OSError):  # Something may have come into the folder, or it is gone.
            if remove and self.created and os.listdir(self._folder) == [_NAME]:
                (self._folder / _NAME).unlink()
                self._folder.rmdir()
        self._write("")
        self._file.close()

    def _write(self, text: str) -> None:
        """Replaces what the file holds. Only people and `lock_state` read it, so a full disk
        hinders nothing."""
        with suppress(OSError, ValueError):  # ValueError: it has been closed before.
            os.ftruncate(self._file.fileno(), 0)
            os.pwrite(self._file.fileno(), text.encode(), 0)

    def _open(self) -> None:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._folder.mkdir()
            self.created = True
        except FileExistsError:
            self.created = False
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._file = open(os.open(self._folder / _NAME, flags, 0o666), "r+")

    def _lock(self) -> None:
        for left in reversed(range(_TRIES)):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if left:
                    time.sleep(_SECONDS_A_TRY)
            except OSError as e:
                self._file.close()
                raise FolderLockError(
                    f"its file system cannot lock files ({e.strerror}); choose one that can"
                ) from None
        self._file.close()
        raise FolderLockError("in use by another process")

    def _is_in_folder(self) -> bool:
        """True if the locked file is the one that other processes find in the folder."""
        try:
            found = (self._folder / _NAME).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._file.fileno()), found)


class LockState(NamedTuple):
    """What the lock of a folder tells of the process that holds or held it.

    Attributes:
      holder: "alive" (a process holds the folder), "ended" (it released the folder), "killed" (it
        ended without releasing the folder), or "unknown" (there is no lock, or it cannot be read).
      since: when the process took the folder or released it, in seconds since 1970; 0 if unknown.
    """

    holder: Literal["alive", "ended", "killed", "unknown"]
    since: float


def lock_state(folder: Path) -> LockState:
    """Looks at the lock of a folder that another process may hold.

    Args:
      folder: the folder.
    """
    try:
        file = os.open(folder / _NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return LockState("unknown", 0.0)
    try:
        changed = os.fstat(file).st_mtime
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return LockState("alive", changed)
        return LockState("killed" if os.fstat(file).st_size else "ended", changed)
    except OSError:
        return LockState("unknown", 0.0)
    finally:
        os.close(file)
