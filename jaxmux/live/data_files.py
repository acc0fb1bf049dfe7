"""Tells whether the files with a task's data are still those that were registered."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from jaxmux.data import Source
from jaxmux.data.chat_templates import template_file
from jaxmux.data.file_kinds import files_of, is_pattern
from jaxmux.data.hugging_face import is_saved_data_set
from jaxmux.data.sources import HUGGING_FACE_PREFIX
from jaxmux.engine import PreparedTask
from jaxmux.package_files import resolve_path
from jaxmux.tasks import Task, TaskError


def file_identities(task: Task) -> dict[str, str]:
    """What tells the files of a task's data from others, without reading them: by path, a text of
    the file's size, the time of its last change and its inode.

    A pattern of names is told from others by the names that match it. A link stands for the file to
    which it leads. The inode tells a file from one that has taken its
    place with the same time. Left out are files that are not there, and data sets of the Hugging
    Face hub, which have no file of their own. What does not show is a change in place that keeps
    the size, if it comes before the time stamps of the file system go on: milliseconds after the
    change before, on some network disks up to two seconds.

    Args:
      task: the task.
    """
    found = {}
    for path in _paths(task):
        try:
            stat = os.stat(path)
        except (OSError, ValueError):
            # Reading the data tells what is wrong with the path.
            continue
        found[path] = f"{stat.st_size} bytes, {stat.st_mtime_ns} ns, inode {stat.st_ino}"
    for path in map(_path_of, _sources(task)):
        if is_pattern(path):
            names = "\0".join(files_of(path)).encode(errors="surrogateescape")
            found[path] = f"files named {hashlib.sha256(names).hexdigest()[:16]}"
    return found


def read_unchanged(
    prepare: Callable[[Task], PreparedTask], task: Task, files: Mapping[str, str]
) -> PreparedTask:
    """Prepares a task, if its files are those that were registered and stay so meanwhile.

    Args:
      prepare: function that prepares the task.
      task: the task.
      files: its files when it was registered, from `file_identities`; empty if that does not
        matter.

    Raises:
      TaskError: a file has changed; the message names it. `prepare` may raise other exceptions.
    """
    before = file_identities(task)
    for path, identity in before.items():
        if files.get(path, identity) != identity:
            raise TaskError(
                f"{path}: changed after the task was registered; register another task for the "
                "data as they are now"
            )
    try:
        return prepare(task)
    finally:
        # Reading a file while somebody writes it may fail, and this is then the cause.
        after = file_identities(task)
        for path in sorted({*before, *after}):
            if before.get(path) != after.get(path):
                raise TaskError(
                    f"{path}: changed after the task was registered, while the data were read; "
                    "register another task, or resume this one if it is paused, when the file is "
                    "complete"
                )


def _paths(task: Task) -> Iterator[str]:
    """The paths of the local files with a task's training and held-out data."""
    for source in _sources(task):
        yield from _files_of(source)
        if template := template_file(source):
            yield template


def _sources(task: Task) -> list[Source]:
    return [*task.sources, *([task.eval_data] if task.eval_data else [])]


def _path_of(source: Source) -> str:
    return resolve_path(source.path)


def _files_of(source: Source) -> list[str]:
    path = _path_of(source)
    if not path.startswith(HUGGING_FACE_PREFIX):
        return files_of(path)
    folder = Path(path.removeprefix(HUGGING_FACE_PREFIX))
    try:
        if is_saved_data_set(folder):
            return sorted(str(file) for file in folder.rglob("*") if file.is_file())
    except OSError:
        # Reading the data tells what is wrong with the folder.
        pass
    return []
