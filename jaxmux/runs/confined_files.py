"""Files that lie inside a folder, opened although somebody who is not trusted may change it.

Every component of a path below the folder is opened by itself, relative to the one above it, and
without following links (`openat` with `O_NOFOLLOW`). So a file is refused that is reached through a
symbolic link, also through one that appears while the path is opened. Refused, too, are files with
several hard links, which may be somebody else's, and everything that is not a regular file: opening
a FIFO or a device may block or act.

The folder itself and the folders above it are trusted, and so is the file system: the server of a
network file system may answer every read with other bytes.
"""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxmux.tasks import TaskError

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)
_REASONS = (
    (lambda path: "://" in path, "specifications name no network addresses"),
    (
        lambda path: path.startswith("hf:"),
        "data sets come over the network, and saved ones name their files themselves",
    ),
    (lambda path: path.startswith("jaxmux:"), "files of jaxmux are not the tenant's"),
    (lambda path: path.startswith(("/", "~")), "paths are relative to the tenant's folder"),
    (lambda path: ".." in path.split("/"), "'..' could lead out of the tenant's folder"),
    (
        lambda path: path.endswith(".parquet"),
        "a small Parquet file can expand to more memory than there is",
    ),
    (
        lambda path: path.endswith((".gz", ".zst")),
        "a small compressed file can expand to more memory than there is",
    ),
    (
        lambda path: path.endswith((".csv", ".tsv")),
        "limits count lines, and a row may have several; write one JSON object per line",
    ),
    (lambda path: "*" in path or "?" in path, "a specification names its one file"),
)


def why_outside(path: str) -> str:
    """Why a path of a specification is refused, in a few words; empty if its spelling says nothing.

    Args:
      path: the path, as the specification spells it.
    """
    return next((reason for applies, reason in _REASONS if applies(path)), "")


def read_bytes(folder: str | Path, path: str, most_bytes: int, where: str) -> bytes:
    """Reads a small file of a folder.

    Args:
      folder: the folder, which is trusted.
      path: path of the file relative to the folder.
      most_bytes: the largest permitted size.
      where: what an error message begins with.

    Raises:
      TaskError: the file is larger, or cannot be opened as `open_inside` does.
    """
    try:
        with open_inside(folder, path, most_bytes, where) as file:
            data = file.read(most_bytes + 1)
    except OSError as e:
        raise TaskError(f"{where}: cannot be read ({e.strerror})") from None
    if len(data) > most_bytes:
        raise TaskError(f"{where}: has more than {most_bytes} bytes")
    return data


def open_inside(folder: str | Path, path: str, most_bytes: int, where: str) -> BinaryIO:
    """Opens a regular file inside a folder for reading, without following links below the folder.

    Args:
      folder: the folder, which is trusted, and may be reached through links.
      path: path relative to the folder, with "/" between its components.
      most_bytes: the largest permitted size at this time. The file may grow while it is read.
      where: what an error message begins with.

    Raises:
      TaskError: there is no such file, it is reached through a symbolic link, it has several hard
        links, it is not a regular file, or it is too large.
    """
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise TaskError(f"{where}: {path!r} is no path inside the tenant's folder")
    try:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for part in parts[:-1]:
                _require(part, at, stat.S_ISDIR, "a folder", where)
                inner = os.open(part, _OPEN | os.O_DIRECTORY, dir_fd=at)
                os.close(at)
                at = inner
            # Opening a device can have effects, so the kind of the file is checked first.
            _require(parts[-1], at, stat.S_ISREG, "a file", where)
            descriptor = os.open(parts[-1], _OPEN, dir_fd=at)
        finally:
            os.close(at)
    except OSError as e:
        raise TaskError(f"{where}: {path!r} cannot be opened ({e.strerror})") from None
    file = open(descriptor, "rb")
    try:
        # Between the check and the opening, the tenant may have put something else there.
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise TaskError(f"{where}: {path!r} should be a file, found {_kind(found.st_mode)}")
        if found.st_nlink > 1:
            raise TaskError(
                f"{where}: {path!r} has {found.st_nlink} hard links, so it may be somebody else's; "
                "make a copy"
            )
        if found.st_size > most_bytes:
            raise TaskError(
                f"{where}: {path!r} has {found.st_size} bytes; expected at most {most_bytes}"
            )
    except BaseException:
        file.close()
        raise
    return file


def _require(part: str, at: int, is_kind: Callable[[int], bool], expected: str, where: str) -> None:
    mode = os.stat(part, dir_fd=at, follow_symlinks=False).st_mode
    if not is_kind(mode):
        raise TaskError(f"{where}: {part!r} should be {expected}, found {_kind(mode)}")


def _kind(mode: int) -> str:
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a file")
