"""A lock that keeps a folder for one process."""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from jaxmux.errors import LONGEST_LINE, cause_of, first_line, message_of
from jaxmux.printable import spaced

_NAME = ".lock"
# A folder that other processes remove at the same time is created again at most so many times.
_ATTEMPTS = 10
# `lock_state` holds the lock for a moment, so a lock that is not free is tried again for so long.
_TRIES, _SECONDS_A_TRY = 5, 0.005
# How the file begins when an exception has ended its process; the exception's message follows.
_FAILED = "failed: "


class FolderLockError(Exception):
    """A folder cannot be created or locked; the message says why."""


class FolderLock:
    """Holds a folder against other processes until `close`. The file ".lock" in it is what other
    processes find locked. It holds the process's number until `close`, so a process that was killed
    leaves its number behind, and afterwards the exception that has ended the process, if there was
    one.

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
                self._before = self._file.read()
                self._write(f"{os.getpid()}\n")
                return
            self._file.close()
            reason = "another process creates and removes it"
        raise FolderLockError(f"not writable ({reason})")

    def close(
        self, *, remove: bool = False, unused: bool = False, error: BaseException | None = None
    ) -> None:
        """Releases the folder.

        Args:
          remove: True removes a folder that this lock created, if there is nothing else in it.
          unused: True leaves behind what the process before has left, because this one did not use
            the folder.
          error: the exception that ends the process. Signals are none.
        """
        # The folder is still locked here, so no other process begins to use it.
        with suppress(OSError):  # Something may have come into the folder, or it is gone.
            if remove and self.created and os.listdir(self._folder) == [_NAME]:
                (self._folder / _NAME).unlink()
                self._folder.rmdir()
        failure = f"{_FAILED}{_message(error)}\n" if isinstance(error, Exception) else ""
        self._write(self._before if unused else failure)
        self._file.close()

    def _write(self, text: str) -> None:
        """Replaces what the file holds. Only people and `lock_state` need it, so a full disk
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
        self._file = open(os.open(self._folder / _NAME, flags, 0o666), "r+", errors="replace")

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
      holder: "alive" (a process holds the folder), "ended" (it released the folder), "failed" (it
        released the folder because of an exception), "killed" (it ended without releasing the
        folder), or "unknown" (there is no lock, or it cannot be read).
      since: when the process took the folder or released it, in seconds since 1970; 0 if unknown.
      failure: the first line of the exception's message; None unless the process failed.
    """

    holder: Literal["alive", "ended", "failed", "killed", "unknown"]
    since: float
    failure: str | None = None

    def __str__(self) -> str:
        """What has become of a training process; empty if it ended in order, or is not known."""
        ends = {
            "alive": "its training process is running",
            "failed": f"its training process failed: {self.failure}",
            "killed": "its training process was killed",
        }
        return ends.get(self.holder, "")


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
        text = os.read(file, 4 * LONGEST_LINE).decode(errors="replace")
        if text.startswith(_FAILED):
            return LockState("failed", changed, text.removeprefix(_FAILED).rstrip("\n"))
        return LockState("killed" if text else "ended", changed)
    except OSError:
        return LockState("unknown", 0.0)
    finally:
        os.close(file)


def _message(error: Exception) -> str:
    """The first line of what is told of an exception."""
    error = cause_of(error)
    message = message_of(error) or f"{type(error).__name__}: {first_line(error)}"
    return spaced((message.splitlines() or [""])[0][:LONGEST_LINE])
