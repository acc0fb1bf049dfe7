"""A directory with a folder for each tenant, which is scanned again and again.

    DIR/TENANT/NAME.json          a task that the tenant wants
    DIR/TENANT/NAME.status.json   the state of this task

The directory is the operator's, and only the operator can write to it. Each folder in it is a
tenant's, who may change anything in it at any moment. Nothing below the directory is therefore
opened through a link, and everything is opened relative to a folder that is already open.
"""

import os
import re
from collections.abc import Set
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jaxmux.errors import InputError
from jaxmux.runs.run_directory import FolderLock, FolderLockError
from jaxmux.specifications.files import read_bytes
from jaxmux.specifications.limits import TenantLimits
from jaxmux.tasks import Task

_LOCK = ".lock"
_SUFFIX, _STATUS = ".json", ".status.json"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
_MOST_TENANTS = 10_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# The files of an adapter from which a task begins.
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# The inode, the size, and the times of change in nanoseconds of a file. It changes when the file
# does.
Signature = tuple[int, int, int, int]


class WatchedDirectoryError(InputError):
    """A directory cannot be watched. The message names the directory and says what to do."""


class Place(NamedTuple):
    """The place of a specification: the name of the tenant's folder, and the name of the file
    without ".json". Tenants choose the latter, so it may hold any characters."""

    tenant: str
    name: str

    @property
    def task(self) -> str:
        return f"{self.tenant}.{self.name}"

    def __str__(self) -> str:
        """The path within the directory, with characters that are safe on a terminal."""
        path = f"{self.tenant}/{self.name}{_SUFFIX}"
        return path if re.fullmatch(r"[\w./-]+", path, re.ASCII) else ascii(path)


class Scan(NamedTuple):
    """The result of scanning the directory.

    Attributes:
      files: the specifications that may be read, with their signatures.
      ignored: specifications that must not be read, each with the reason. If there are very many,
        some are left out.
      problems: by tenant, what is wrong with the folder.
      unread: the tenants whose folders could not be read, so that it is not known whether their
        files still exist.
    """

    files: dict[Place, Signature]
    ignored: dict[Place, str]
    problems: dict[str, str]
    unread: set[str]


class WatchedDirectory:
    """A directory that one process watches, locked against others until `close`. `created` is True
    if it did not exist before."""

    def __init__(self, path: str | Path, limits: TenantLimits, known: bool = False):
        """Opens the directory, or creates it.

        Args:
          limits: the most files that a tenant's folder may hold.
          known: whether the directory was watched before. Then it is not created.

        Raises:
          WatchedDirectoryError: the directory is not writable, another process watches it, or it
            was not watched before although `known` says so.
        """
        self.path, self._limits = Path(path).absolute(), limits
        if known and not (self.path / _LOCK).exists():
            # A disk that is not mounted must not look like a directory without tasks.
            raise self._error(
                f"the tasks of this server came from here, but {_LOCK} is missing in it; if its "
                f"disk is mounted and it is the right one, create an empty file {_LOCK}"
            )
        try:
            self._lock = FolderLock(self.path)
        except FolderLockError as e:
            raise self._error(str(e)) from None
        self.created, self._begun = self._lock.created, False
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def begin(self) -> None:
        """Marks the directory as used. Without this call, `close` removes the directory if it was
        created here."""
        self._begun = True

    def close(self) -> None:
        """Releases the directory, so that another process can watch it."""
        os.close(self._fd)
        self._lock.close(remove=not self._begun)

    def folder(self, tenant: str) -> Path:
        return self.path / tenant

    def scan(self, known: Set[Place], ignored: Set[Place] = frozenset()) -> Scan:
        """Lists the specifications without reading them.

        Args:
          known: specifications that are listed even if there are more than permitted.
          ignored: the ignored specifications of the last scan, which are looked for again.

        Raises:
          OSError: the directory cannot be read, or another one has taken its place.
        """
        if not os.path.samestat(os.stat(self.path), os.fstat(self._fd)):
            raise OSError(None, "another folder has taken its place", str(self.path))
        scan = Scan({}, {}, {}, set())
        tenants: list[str] = []
        with os.scandir(self._fd) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                    continue
                if not _TENANT.fullmatch(entry.name):
                    scan.problems[ascii(entry.name)] = (
                        "the name of a tenant's folder consists of letters, digits, '_' and '-', "
                        "and begins with a letter or digit"
                    )
                else:
                    tenants.append(entry.name)
                if len(tenants) + len(scan.problems) > _MOST_TENANTS:
                    raise OSError(None, f"has more than {_MOST_TENANTS} folders", str(self.path))
        for tenant in tenants:
            try:
                self._scan_tenant(tenant, known, ignored, scan)
            except OSError as e:
                scan.problems[tenant] = f"cannot be read ({e.strerror})"
                scan.unread.add(tenant)
        return scan

    def read(self, place: Place) -> bytes:
        """The content of a specification. Raises TaskError if it is not a regular file, or is too
        large."""
        where = str(place).removeprefix(f"{place.tenant}/")
        path = f"{place.tenant}/{place.name}{_SUFFIX}"
        return read_bytes(self.path, path, self._limits.specification_bytes, where)

    def files(self, tenant: str, task: Task) -> dict[str, Signature | None]:
        """The files that a task with relative paths names, with their signatures; None for missing
        files.

        If something on the way to a file cannot be opened as a folder, for example a link, the
        signature is that of this thing. The signature then changes when a folder takes its place.
        """
        paths = [source.path for source in task.sources]
        if task.eval_data:
            paths.append(task.eval_data.path)
        if task.resume_from:
            paths += [f"{task.resume_from}/{name}" for name in _ADAPTER_FILES]
        return {path: self._signature_inside(f"{tenant}/{path}") for path in paths}

    def write_status(self, place: Place, text: str) -> None:
        """Replaces the whole status file beside a specification by `text`. Anything with the file's
        name is replaced, never followed or written to. The function does not wait until the content
        is on disk, because status files are written anew when training is started again. Raises
        OSError if the file cannot be written."""
        name = place.name + _STATUS
        partial = f".{name}.partial"
        folder = os.open(place.tenant, _FOLDER, dir_fd=self._fd)
        try:
            with suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=folder)
            with open(os.open(partial, _NEW_FILE, 0o644, dir_fd=folder), "wb") as file:
                file.write(text.encode())
            os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with suppress(OSError):
                os.unlink(partial, dir_fd=folder)
            raise
        finally:
            os.close(folder)

    def remove_status(self, place: Place) -> None:
        """Removes the status file of a specification, if possible."""
        with suppress(OSError):
            folder = os.open(place.tenant, _FOLDER, dir_fd=self._fd)
            try:
                os.unlink(place.name + _STATUS, dir_fd=folder)
            finally:
                os.close(folder)

    def _signature_inside(self, path: str) -> Signature | None:
        """The signature of a file, or of the first thing on the way to it that cannot be opened as
        a folder."""
        *folders, name = path.split("/")
        at = os.dup(self._fd)
        try:
            for part in folders:
                try:
                    inner = os.open(part, _FOLDER, dir_fd=at)
                except OSError:
                    name = part
                    break
                os.close(at)
                at = inner
            return _signature(os.stat(name, dir_fd=at, follow_symlinks=False))
        except OSError:
            return None
        finally:
            os.close(at)

    def _scan_tenant(self, tenant: str, known: Set[Place], ignored: Set[Place], scan: Scan) -> None:
        """Adds the specifications of a tenant to `scan`."""
        most, entries = self._limits.specifications, self._limits.folder_entries
        folder = os.open(tenant, _FOLDER, dir_fd=self._fd)
        try:
            found, is_whole = _specifications(folder, tenant, entries)
            if not is_whole:
                for place in (*known, *ignored):
                    if place.tenant == tenant and place not in found:
                        with suppress(FileNotFoundError):
                            name = place.name + _SUFFIX
                            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                            found[place] = _signature(status)
        finally:
            os.close(folder)
        if is_whole and len(found) <= most:
            scan.files.update(found)
            return
        # The messages have no numbers of files, because a tenant could make the numbers change
        # again and again.
        if is_whole:
            scan.problems[tenant] = f"has more than {most} specifications; the others are not read"
            why = f"is not read: a tenant may have {most} specifications; delete others"
        else:
            scan.problems[tenant] = f"has more than {entries} files; no new specification is read"
            why = f"is not read: a tenant's folder may hold {entries} files; delete some"
        places = sorted(found, key=lambda place: (place not in known, place not in ignored, place))
        count = max(most if is_whole else 0, sum(place in known for place in places))
        scan.files.update((place, found[place]) for place in places[:count])
        scan.ignored.update(dict.fromkeys(places[count : count + most], why))

    def _error(self, message: str) -> WatchedDirectoryError:
        return WatchedDirectoryError(f"watched directory {self.path}: {message}")


def _signature(found: os.stat_result) -> Signature:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _specifications(folder: int, tenant: str, most: int) -> tuple[dict[Place, Signature], bool]:
    """The specifications of a tenant, and whether they are complete: at most `most` entries of the
    open folder are read."""
    found: dict[Place, Signature] = {}
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= most:
                return found, False
            name = entry.name
            if name.endswith(_SUFFIX) and not name.endswith(_STATUS) and name[0] != ".":
                with suppress(FileNotFoundError):
                    signature = _signature(entry.stat(follow_symlinks=False))
                    found[Place(tenant, name.removesuffix(_SUFFIX))] = signature
    return found, True
