"""Files that are replaced as a whole, whether they can be written, and who can read them."""

import os
from pathlib import Path

from .errors import InputError


def require_writable(path: Path) -> None:
    """Checks that a file can be written, before hours are spent on its content. Creates its folder.

    Args:
      path: the file.

    Raises:
      InputError: the folder cannot be created or written to, or `path` is a folder.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise InputError(f"{path}: is a folder; name a file")
        probe = path.with_name(f".{path.name}.partial")
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise InputError(f"{path}: cannot be written ({e.strerror})") from None


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that readers find it complete or not at all, even after a crash.

    A symbolic link at `path` is replaced; the file to which it points stays as it is.

    Args:
      path: the file.
      text: its new content.

    Raises:
      OSError: the file cannot be written, for example because the disk is full.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(opened, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on disk. A file that was synced can still
    lose its name if the machine loses power before its folder was.

    Args:
      path: the file or the folder.

    Raises:
      OSError: its file system reports an error.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def share_like_folder(path: Path) -> None:
    """Gives a file the permissions of its folder, but none to execute it. safetensors makes files
    that only their owner can read.

    Args:
      path: the file.

    Raises:
      OSError: it belongs to another user.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)
