"""Writing files: checks before a file is written, replacing it as a whole, and its permissions."""

import errno
import json
import os
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from .errors import InputError


def require_writable(path: Path) -> None:
    """Checks that a file can be written, before hours are spent on its content. Creates its folder.

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
    """Checks that a command may write its output to a file, and that it can. The command replaces
    its own output of an earlier call, and a line on standard error says so. It replaces no other
    file.

    Args:
      path: the file.
      what: the kind of output, for messages, for example "plan file".
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
    """Raises InputError if a path holds anything but an earlier output of a command, as described
    for `require_output`. Folders are allowed, because `require_writable` refuses them."""
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
    """Whether a file, or its first line, is a JSON object that has these keys."""
    try:
        # Files of lines may be large, so the rest is read only if the first line is no JSON.
        with path.open(encoding="utf-8") as file:
            first = file.readline()
            try:
                value = json.loads(first)
            except ValueError:
                value = json.loads(first + file.read())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.keys() >= set(keys)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that readers find it complete or not at all, even after a crash.

    A symbolic link at `path` is replaced; the file to which it points stays as it is.

    Raises:
      OSError: the file cannot be written, for example because the disk is full.
    """
    with opened_atomically(path) as file:
        file.write(text)


@contextmanager
def opened_atomically(path: Path) -> Iterator[TextIO]:
    """Opens a file for writing as `write_atomically` writes it. The file gets its name when the
    block ends. If it raises an error, what has been written is deleted."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with open(opened, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync(path.parent)
    except (Exception, KeyboardInterrupt):
        partial.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Waits until the content of a file, or the list of files in a folder, is on disk. A file can
    still lose its name in a power failure until its folder is on disk too.

    Raises:
      OSError: the file system reports an error.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def share_like_folder(path: Path) -> None:
    """Gives a file the permissions of its folder, except those to execute. It is for files of
    safetensors, which only their owner can read.

    Raises:
      OSError: the file belongs to another user.
    """
    path.chmod(path.parent.stat().st_mode & 0o666)


@contextmanager
def unwritable_named(path: Path) -> Iterator[None]:
    """Turns an error of safetensors while it writes into an OSError that names a file or folder."""
    # Imported here because safetensors imports NumPy, which is too slow for help texts.
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as e:
        raise OSError(errno.EIO, str(e), str(path)) from None
