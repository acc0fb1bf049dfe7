"""The files of an untrusted tenant: checked against limits, and copied to a place where the tenant
cannot change them.

`check_files` guarantees only that the files were right when it read them; the tenant may change
them before they are read again. `copy_files` applies the same checks to the bytes that it copies,
and the tenant cannot change the copy. This matters for weights, which are mapped into memory when
training starts: a tenant who shortens a mapped file ends the whole process with SIGBUS. The folder
of the copies is trusted.

Each part of a path below the tenant's folder is opened separately, relative to the folder above it,
and without following links (`openat` with `O_NOFOLLOW`). A file that is reached through a symbolic
link is therefore refused, even if the link appears while the path is opened. Files with several
hard links are refused, because they may belong to someone else. Everything that is not a regular
file is refused, because opening a FIFO may block and opening a device may have effects. The
tenant's folder itself, the folders above it and the file system are trusted.
"""

import dataclasses
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from jaxmux.data.json_arrays import BYTE_ORDER_MARK, begins_array
from jaxmux.field_checks import to_object
from jaxmux.peft import LoRA, kind_of
from jaxmux.peft.lora_tokens import token_indices
from jaxmux.peft.peft_folder import SETTINGS, WEIGHTS
from jaxmux.tasks import Task, TaskError

from .limits import SpecificationLimits, refusals
from .strict_json import parse_object, shown

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISCHR, "a device"),
)


def read_bytes(folder: str | Path, path: str, most_bytes: int, where: str) -> bytes:
    """Reads a small file of a folder, with arguments as for `open_inside`. Raises TaskError if the
    file is larger than `most_bytes`, or `open_inside` cannot open it."""
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
      folder: the folder, which is trusted and may be reached through links.
      path: path relative to the folder, with "/" between its components.
      most_bytes: the largest permitted size now. The file may grow while it is read.
      where: the first words of error messages.

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
        # The tenant may have replaced the file between the check and the opening.
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise TaskError(f"{where}: {path!r} should be a file, found {_kind(info.st_mode)}")
        if info.st_nlink > 1:
            raise TaskError(
                f"{where}: {path!r} has {info.st_nlink} hard links, so it may be somebody else's; "
                "make a copy"
            )
        if info.st_size > most_bytes:
            raise TaskError(
                f"{where}: {path!r} has {info.st_size} bytes; expected at most {most_bytes}"
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


_CHUNK = 2**20


def with_paths(task: Task, changed: Callable[[str], str]) -> Task:
    """Returns the task with changed paths of its data, of its held-out data and of the adapter from
    which it begins."""
    held_out, adapter = task.eval_data, task.resume_from
    data = tuple(dataclasses.replace(each, path=changed(each.path)) for each in task.sources)
    return dataclasses.replace(
        task,
        data=data if isinstance(task.data, tuple) else data[0],
        eval_data=held_out and dataclasses.replace(held_out, path=changed(held_out.path)),
        resume_from=adapter and changed(adapter),
    )


def relative_to(task: Task, folder: str | Path) -> Task:
    """Returns a task whose absolute paths are made relative to a folder. Raises TaskError if a path
    is not inside the folder."""
    root = Path(folder).resolve()

    def relative(path: str) -> str:
        if not Path(path).is_relative_to(root):
            raise TaskError(f"task {task.name!r}: {path!r} is not inside {root}")
        return Path(path).relative_to(root).as_posix()

    return with_paths(task, relative)


def check_files(task: Task, folder: str | Path, limits: SpecificationLimits, where: str) -> None:
    """Checks the files of a task in their present state, in constant memory.

    Args:
      task: the task, with paths relative to `folder`.
      folder: the folder with the tenant's files.
      limits: the largest numbers of bytes, lines and steps.
      where: the first words of error messages.

    Raises:
      TaskError: a file cannot be opened as `open_inside` does, or exceeds a limit; or the adapter
        with which the task begins has another rank, or target modules that are not names.
    """
    _Files(task, Path(folder), None, limits, where).visit()


def copy_files(
    task: Task, folder: str | Path, store: str | Path, limits: SpecificationLimits | None = None
) -> Task:
    """Copies the files of a task to a place where the tenant cannot change them, and checks the
    copies.

    Args:
      task: the task, from `task_from_json` with the same folder.
      folder: the folder with the tenant's files.
      store: the folder of the copies, which must not exist. It is created when the copies are
        complete, with the same relative paths as in `folder`; only the user of this process can
        open it.
      limits: the most that the specification may ask for; None means the defaults.

    Returns:
      The task with the paths of the copies.

    Raises:
      TaskError: as for `check_files`, for the bytes that are copied; or a path of the task is not
        inside `folder`.
      OSError: the copies cannot be written, for example because the disk is full.
    """
    root, store = Path(folder).resolve(), Path(store).absolute()
    where = f"{task.name}.json"
    task = relative_to(task, root)
    if store.exists():
        raise FileExistsError(f"{store}: exists already")
    store.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{store.name}.", dir=store.parent))
    try:
        _Files(task, root, partial, limits or SpecificationLimits(), where).visit()
        partial.rename(store)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return with_paths(task, lambda path: str(store / path))


@dataclasses.dataclass(frozen=True)
class _Files:
    """Reads the files of a task once, checks them, and copies them to `store` if it is not None.
    Paths of the task are relative to `folder`. Error messages begin with `where`."""

    task: Task
    folder: Path
    store: Path | None
    limits: SpecificationLimits
    where: str

    def visit(self) -> None:
        task, limits = self.task, self.limits
        paths = [source.path for source in task.sources]
        lines = sum(self._data(path, "data") for path in paths)
        if task.eval_data and task.eval_data.path not in paths:
            self._data(task.eval_data.path, "eval_data")
        steps = (task.epochs or 0) * math.ceil(lines / task.batch_size)
        if steps > limits.steps:
            raise TaskError(
                f"{self.where}: epochs={task.epochs} of {lines} records in batches of "
                f"{task.batch_size} are up to {steps} steps; expected at most {limits.steps}"
            )
        if task.resume_from is not None:
            self._adapter(task.resume_from, f"{self.where}: resume_from")

    def _data(self, path: str, key: str) -> int:
        """Checks and copies a data file line by line, and returns its number of lines."""
        limits, where, lines, size = self.limits, f"{self.where}: {key}", 0, 0
        is_blank = True
        with (
            open_inside(self.folder, path, limits.data_bytes, where) as file,
            self._copy(path, where) as copy,
        ):
            # A tenant's line may be as long as the file, so `readline` gets a bound.
            while line := _read(file.readline, limits.record_bytes + 1, where):
                lines, size = lines + 1, size + len(line)
                if len(line) > limits.record_bytes:
                    raise TaskError(
                        f"{where}: line {lines} of {path} has more than {limits.record_bytes} bytes"
                    )
                if lines > limits.records:
                    raise TaskError(f"{where}: {path} has more than {limits.records} lines")
                _refuse_growth(path, size, limits.data_bytes, where)
                # The limits on lines would not apply to the elements of an array.
                if is_blank and path.endswith(".json") and begins_array(line):
                    raise TaskError(
                        f"{where}: {path} holds a JSON array; write one object per line, without "
                        "brackets around them and commas between them"
                    )
                is_blank = is_blank and not line.removeprefix(BYTE_ORDER_MARK).strip()
                copy.write(line)
        return lines

    def _adapter(self, folder: str, where: str) -> None:
        path = f"{folder}/{SETTINGS}"
        settings = read_bytes(self.folder, path, self.limits.specification_bytes, where)
        self._check_settings(settings, f"{where}: {path}")
        with self._copy(path, where) as copy:
            copy.write(settings)
        # Other formats of weights are pickles, which run code when they are read.
        path, size, most = f"{folder}/{WEIGHTS}", 0, self.limits.adapter_bytes
        with open_inside(self.folder, path, most, where) as file, self._copy(path, where) as copy:
            while self.store and (data := _read(file.read, _CHUNK, where)):
                size += len(data)
                _refuse_growth(path, size, most, where)
                copy.write(data)

    def _check_settings(self, data: bytes, where: str) -> None:
        """Checks the settings of an adapter without interpreting expressions in them."""
        try:
            settings = parse_object(data, self.limits.specification_bytes)
        except ValueError as e:
            raise TaskError(f"{where}: {e}") from None
        kind = kind_of(self.task.adapter)
        wanted = kind.as_stored(self.task.adapter)
        if not kind.recognise(settings):
            hint = _hint(self.task.adapter, wanted) if kind_of(wanted).recognise(settings) else ""
            raise TaskError(f"{where}: holds no adapter of the kind {kind.name!r}{hint}")
        if (rank := settings.get("r")) != wanted.rank or isinstance(rank, bool):
            raise TaskError(
                f"{where}: r should be the rank of the task, {wanted.rank}, found {shown(rank)}"
            )
        for field in ("rank_pattern", "alpha_pattern"):
            # Matching a stranger's regular expression can take years.
            stored = settings.get(field) or {}
            of_task = getattr(wanted, field)
            if not isinstance(stored, dict) or tuple(stored.items()) != of_task:
                raise TaskError(
                    f"{where}: {field} should be that of the task, {shown(dict(of_task))}, found "
                    f"{shown(stored)}"
                )
        try:
            tokens = token_indices(settings)
        except ValueError as e:
            raise TaskError(f"{where}: {e}") from None
        if tokens != self.task.adapter.trained_tokens:
            raise TaskError(
                f"{where}: trainable_token_indices should be those of the task, "
                f"{shown(wanted.trained_tokens)}, found {shown(tokens)}"
            )
        modules = {"target_modules": settings.get("target_modules")}
        for problem in refusals(LoRA, modules, self.limits).values():
            raise TaskError(f"{where}: {problem}")

    def _copy(self, path: str, where: str) -> BinaryIO:
        """Opens the file in the store for the copy, or the null device if there is no store."""
        if self.store is None:
            return open(os.devnull, "wb")
        copy = self.store / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            return copy.open("xb")
        except FileExistsError:
            raise TaskError(f"{where}: the task names {path!r} twice") from None


def _hint(adapter: Any, stored: Any) -> str:
    """Tells how a task can go on from a folder that holds its adapter as another kind. `adapter` is
    the specification of the task's adapter, `stored` that of the same adapter in a folder."""
    asked = to_object(adapter)
    changes = {key: value for key, value in to_object(stored).items() if value != asked[key]}
    return (
        f", which folders hold as one of the kind {kind_of(stored).name!r}; to go on from such a "
        f"folder, ask for an adapter with {shown(changes)}"
    )


def _read(read: Callable[[int], bytes], size: int, where: str) -> bytes:
    try:
        return read(size)
    except OSError as e:
        raise TaskError(f"{where}: cannot be read ({e.strerror})") from None


def _refuse_growth(path: str, size: int, most: int, where: str) -> None:
    if size > most:
        raise TaskError(f"{where}: {path} grew beyond {most} bytes while it was read")
