"""Files that are replaced as a whole, whether they may and can be written, and who can read
them."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection
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
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as e:
        raise InputError(f"{path}: cannot be written ({e.strerror})") from None


def require_output(path: Path, what: str, is_ours: Callable[[Path], bool]) -> None:
    """Checks that the output of a command may be written, and can be. What an earlier call of the
    command has written is replaced, and a line on standard error says so. Nothing else is.

    Args:
      path: the file.
      what: what the command writes, for messages, for example "plan file".
      is_ours: function of the file that tells whether it holds such an output.

    Raises:
      InputError: there is another file, a folder, a device or a symbolic link, or the file cannot
        be written.
    """
    refuse_foreign(path, what, is_ours)
    if path.is_file():
        print(f"{path}: an earlier {what} is replaced", file=sys.stderr)
    require_writable(path)


def refuse_foreign(path: Path, what: str, is_ours: Callable[[Path], bool]) -> None:
    """Raises InputError if there is something else than an earlier output of a command; see
    `require_output`. A folder is left to `require_writable`."""
    if path.is_symlink():
        raise InputError(f"{path}: is a symbolic link, which is not written through; name a file")
    if not path.exists() or path.is_dir():
        return
    if not path.is_file():
        raise InputError(f"{path}: is no regular file; name another --out")
    if path.stat().st_size and not is_ours(path):
        raise InputError(
            f"{path}: exists and is no {what} of jaxmux, so it is not replaced; choose another "
            "--out, or move it away"
        )


def holds_object(path: Path, keys: Collection[str]) -> bool:
    """Whether the first line of a file, or all of it, is a JSON object with certain keys.

    Args:
      path: the file.
      keys: the keys.
    """
    try:
        text = path.read_text(encoding="utf-8")
        try:
            found = json.loads(text)
        except ValueError:
            found = json.loads(text.partition("\n")[0])
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() >= set(keys)


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
