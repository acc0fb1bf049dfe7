"""A lock that keeps a folder for one process."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

_NAME = ".lock"
# A folder that other processes remove at the same time is created again at most so many times.
_ATTEMPTS = 10


class FolderLockError(Exception):
    """A folder cannot be created or locked; the message says why."""


class FolderLock:
    """Holds a folder against other processes until `close`. The file ".lock" in it is what other
    processes find locked.

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
        self._file.close()

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
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._file.close()
            if isinstance(e, BlockingIOError):
                raise FolderLockError("in use by another process") from None
            raise FolderLockError(
                f"its file system cannot lock files ({e.strerror}); choose one that can"
            ) from None

    def _is_in_folder(self) -> bool:
        """True if the locked file is the one that other processes find in the folder."""
        try:
            found = (self._folder / _NAME).stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(os.fstat(self._file.fileno()), found)
