"""The tasks that a server has accepted from tenants, and the copies of their files.

The copies of a task's files are in the folder "inputs/NAME/" of the server's folder. They are
deleted when the task has ended.
"""

import dataclasses
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from jaxmux.atomic_files import sync
from jaxmux.planner.numbers import size_text
from jaxmux.specifications.files import copy_files, with_paths
from jaxmux.specifications.limits import TenantLimits
from jaxmux.tasks import LONGEST_NAME, Task, TaskError

from .. import TaskStatus
from ..task import ENDED
from .directory import Place, Signature, WatchedDirectory


class AcceptedTasks:
    """The accepted tasks, by the names that they have in the server. Only one thread may use it."""

    def __init__(self, folder: Path, tasks: Mapping[str, Task], unfinished: Iterable[str]):
        """Starts with the tasks that an earlier server in the same folder has accepted, and deletes
        copies that belong to none of them. `folder` is the server's folder, `tasks` has the tasks
        as their tenants specified them, and `unfinished` names those that have not ended."""
        self._inputs = folder / "inputs"
        self._tasks = dict(tasks)
        self._count = Counter(map(tenant_of, tasks))
        self._inputs.mkdir(exist_ok=True)
        sync(folder)
        # For each task that has not ended, the bytes of its copies.
        self._copied = {name: _size(self.copies(name)) for name in unfinished}
        for path in self._inputs.iterdir():
            if path.name not in self._copied:
                shutil.rmtree(path, ignore_errors=True)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tasks))

    def __getitem__(self, name: str) -> Task:
        """The task as the tenant's file specifies it, with the file's name for the task and with
        relative paths."""
        return self._tasks[name]

    def copies(self, name: str) -> Path:
        """Path of the folder with the copies of a task's files. `name` is the task's name in the
        server."""
        return self._inputs / name

    def copied_bytes(self, tenant: str) -> int:
        """Bytes of the copies of a tenant's files, for tasks that have not ended."""
        return sum(size for name, size in self._copied.items() if tenant_of(name) == tenant)

    def count(self, tenant: str) -> int:
        """Number of known tasks of a tenant, including tasks that have ended."""
        return self._count[tenant]

    def accept(self, name: str, task: Task, folder: Path, limits: TenantLimits) -> Task:
        """Copies the files of a task and returns when the copies are on disk.

        Args:
          name: the task's name in the server.
          task: the task, with paths relative to `folder`, the tenant's folder.
          limits: the most that the task may ask for.

        Returns:
          The task that the server is to train: with this name and the paths of the copies.

        Raises:
          TaskError: the files are refused, as by `copy_files`.
          OSError: the copies cannot be written.
        """
        copies = self.copies(name)
        copied = copy_files(_below(task, folder), folder, copies, limits)
        try:
            for path in (*copies.rglob("*"), copies):
                sync(path)
            sync(self._inputs)
        except BaseException:
            shutil.rmtree(copies, ignore_errors=True)
            raise
        self._copied[name] = _size(copies)
        self._tasks[name] = task
        self._count[tenant_of(name)] += 1
        return dataclasses.replace(copied, name=name)

    def delete_copies(self, known: Mapping[str, TaskStatus]) -> None:
        """Deletes the copies of the files of tasks that have ended. `known` has, by name, the
        statuses of the tasks that the server knows."""
        for name in list(self._copied):
            if name in known and known[name].state in ENDED:
                self._delete_copies(name)

    def forget(self, name: str) -> None:
        """Forgets a task that the server no longer knows, by its name in the server. The name may
        be used again."""
        if self._tasks.pop(name, None):
            self._count[tenant_of(name)] -= 1
        self._delete_copies(name)

    def _delete_copies(self, name: str) -> None:
        self._copied.pop(name, None)
        shutil.rmtree(self.copies(name), ignore_errors=True)


def tenant_of(name: str) -> str:
    """The tenant of a task, from the task's name in the server, TENANT.NAME. Names of tenants have
    no dots."""
    return name.partition(".")[0]


def _below(task: Task, folder: Path) -> Task:
    """The task with the absolute paths that `copy_files` expects."""
    root = folder.resolve()
    return with_paths(task, lambda path: str(root / path))


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class TryLater(TaskError):
    """A task must wait until other tasks of its tenant have ended."""


class Intake:
    """Copies the files of tasks that tenants want, and accepts the tasks. Only one thread may use
    it."""

    def __init__(self, directory: WatchedDirectory, accepted: AcceptedTasks, limits: TenantLimits):
        """New tasks are added to `accepted`. `limits` are the most that a tenant may ask for."""
        self._directory, self._accepted, self._limits = directory, accepted, limits
        self._last = ""

    def check_name(self, place: Place) -> None:
        """Raises TaskError if the name that a task would have in the server is too long. `place` is
        the place of the task's specification."""
        if len(place.task) > LONGEST_NAME:
            raise TaskError(
                f"{place.name}.json: the name of the folder and that of the file have "
                f"{len(place.task) - 1} characters; expected at most {LONGEST_NAME - 1}"
            )

    def in_turns(self, places: Iterable[Place]) -> Iterator[Place]:
        """Yields the places in an order in which tenants take turns. The first tenant is the one
        after the tenant that came last in an earlier iteration, even if that iteration was not
        completed."""
        waiting: dict[str, list[Place]] = defaultdict(list)
        for place in sorted(places, reverse=True):
            waiting[place.tenant].append(place)
        later = sorted(waiting, key=lambda tenant: (tenant <= self._last, tenant))
        while waiting:
            for tenant in later:
                if tenant in waiting:
                    self._last = tenant
                    yield waiting[tenant].pop()
                    if not waiting[tenant]:
                        del waiting[tenant]

    def take(
        self, place: Place, task: Task, files: Mapping[str, Signature | None], unfinished: int
    ) -> Task:
        """Copies the files of a task, and accepts the task.

        Args:
          place: the place of its specification.
          task: the task, with relative paths.
          files: the files that it names, with their signatures.
          unfinished: number of the tenant's tasks that have not ended.

        Returns:
          The task that the server is to train.

        Raises:
          TryLater: the tenant has too many tasks.
          TaskError: the files are refused.
          OSError: the copies cannot be written.
        """
        limits, where = self._limits, f"{place.name}.json"
        if unfinished >= limits.specifications:
            raise TryLater(
                f"{where}: {place.tenant} has {unfinished} tasks that have not ended; expected at "
                f"most {limits.specifications}"
            )
        if (count := self._accepted.count(place.tenant)) >= limits.tasks:
            raise TryLater(f"{where}: {place.tenant} has had {count} tasks, as many as it may have")
        size = sum(signature[1] for signature in files.values() if signature)
        copied = self._accepted.copied_bytes(place.tenant)
        if copied + size > limits.copied_bytes:
            raise TryLater(
                f"{where}: its files have {size_text(size)}, and those of the other tasks of "
                f"{place.tenant} {size_text(copied)}; expected at most "
                f"{size_text(limits.copied_bytes)}"
            )
        folder = self._directory.folder(place.tenant)
        return self._accepted.accept(place.task, task, folder, limits)
