"""The tasks that a server has accepted from tenants, and the copies of their files.

The folder of the server gets two folders for this. "specifications/NAME.json" is what the tenant
asked for when the task was accepted, and its status at its end: the server forgets tasks some time
after their ends, and they must neither begin anew nor lose their results. "inputs/NAME/" has the
copies, which are deleted when the task has ended.
"""

import dataclasses
import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from pathlib import Path

from jaxmux.atomic_files import sync, write_atomically
from jaxmux.field_checks import to_object
from jaxmux.planner.numbers import size_text
from jaxmux.runs.run_directory import RunDirectoryError
from jaxmux.specifications.files import copy_files, with_paths
from jaxmux.specifications.limits import TenantLimits
from jaxmux.specifications.reading import from_json
from jaxmux.tasks import LONGEST_NAME, Task, TaskError

from .. import TaskStatus
from ..task import ENDED
from .directory import Place, Signature, WatchedDirectory
from .status import Shown, status_of

_SUFFIX = ".json"


class AcceptedTasks:
    """The tasks by the names that they have in the server. One thread uses it, and any thread may
    call `is_unfinished`."""

    def __init__(self, folder: Path):
        """Reads what an earlier server has accepted in the same folder.

        Args:
          folder: the folder of the server.

        Raises:
          RunDirectoryError: a specification that was accepted is damaged.
        """
        self._specifications, self._inputs = folder / "specifications", folder / "inputs"
        self._tasks: dict[str, Task] = {}
        # By name, the states in which tasks have ended for good.
        self._ends: dict[str, str] = {}
        self._last: dict[str, TaskStatus] = {}
        # By name of a task that has not ended, the bytes of its copies.
        self._copied: dict[str, int]
        self._count: Counter[str] = Counter()
        for own in (self._specifications, self._inputs):
            own.mkdir(exist_ok=True)
            sync(own.parent)
        for path in sorted(self._specifications.glob(f"*{_SUFFIX}")):
            # Files whose names begin with a dot were not complete when a server ended.
            if not path.name.startswith("."):
                name = path.name.removesuffix(_SUFFIX)
                task, end, last = _read(path)
                self._keep(name, task)
                if end:
                    self._ends[name] = end
                if last:
                    self._last[name] = last
        self._copied = {n: _size(self.copies(n)) for n in self._tasks if n not in self._ends}
        for path in self._inputs.iterdir():
            if path.name not in self._copied:
                shutil.rmtree(path, ignore_errors=True)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tasks))

    def __getitem__(self, name: str) -> Task:
        """The task as its specification had it: with the tenant's own name and relative paths."""
        return self._tasks[name]

    @property
    def finished(self) -> Set[str]:
        """The names of the tasks that have ended for good."""
        return self._ends.keys()

    @property
    def last_statuses(self) -> Mapping[str, TaskStatus]:
        """By name, the statuses of the tasks that have ended for good. Those whose ends an earlier
        version has noted are not among them."""
        return self._last

    def newly_ended(self, known: Mapping[str, TaskStatus]) -> list[TaskStatus]:
        """The statuses of the tasks that have ended, and for which `end` has yet to be called, or
        once more because they have used more since.

        Args:
          known: by name, the statuses of the tasks that the server knows.
        """
        found = [known.get(name) for name in self._copied]
        for name, last in self._last.items():
            status = known.get(name)
            if status and status is not last and status.meter != last.meter:
                found.append(status)
        return [status for status in found if status and status.state in ENDED]

    def is_unfinished(self, name: str) -> bool:
        """Whether a task may still go on: `end` has not been called, and its copies are there.

        Args:
          name: the name of the task in the server.
        """
        return name in self._copied

    def copies(self, name: str) -> Path:
        """Path of the folder with the copies of a task's files.

        Args:
          name: the name of the task in the server.
        """
        return self._inputs / name

    def copied_bytes(self, tenant: str) -> int:
        """Bytes of the copies of a tenant's files, for tasks that have not ended.

        Args:
          tenant: name of the tenant.
        """
        return sum(size for name, size in self._copied.items() if tenant_of(name) == tenant)

    def count(self, tenant: str) -> int:
        """Number of tasks of a tenant that are known, those that have ended included.

        Args:
          tenant: name of the tenant.
        """
        return self._count[tenant]

    def accept(self, name: str, task: Task, folder: Path, limits: TenantLimits) -> Task:
        """Copies the files of a task, and keeps its specification. Both are on disk afterwards.

        Args:
          name: the name of the task in the server.
          task: the task, with paths relative to `folder`.
          folder: the tenant's folder.
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
            self._write(name, task, None)
        except BaseException:
            shutil.rmtree(copies, ignore_errors=True)
            raise
        self._copied[name] = _size(copies)
        self._keep(name, task)
        return dataclasses.replace(copied, name=name)

    def extend(self, name: str, steps: int) -> None:
        """Takes note of a task's new number of steps.

        Args:
          name: the name of the task in the server.
          steps: the number of steps.

        Raises:
          OSError: it cannot be written.
        """
        task = dataclasses.replace(self._tasks[name], steps=steps, epochs=None)
        self._write(name, task, None)
        self._tasks[name] = task

    def ended(self, name: str) -> str | None:
        """The state in which a task has ended for good; None if it may still go on.

        Args:
          name: the name of the task in the server.
        """
        return self._ends.get(name)

    def end(self, status: TaskStatus) -> None:
        """Takes note that a task has ended, or has used more since its end, and deletes the copies
        of its files.

        Args:
          status: its last status, with the name of the task in the server.

        Raises:
          OSError: it cannot be written; the copies are still there.
        """
        name = status.name
        self._write(name, self._tasks[name], status)
        self._ends[name], self._last[name] = status.state, status
        self._delete_copies(name)

    def forget(self, name: str) -> None:
        """Forgets a task that the server does not know. The name may be used again.

        Args:
          name: the name of the task in the server.
        """
        if self._tasks.pop(name, None):
            self._count[tenant_of(name)] -= 1
        self._ends.pop(name, None)
        self._last.pop(name, None)
        self._delete_copies(name)
        with suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def _delete_copies(self, name: str) -> None:
        self._copied.pop(name, None)
        shutil.rmtree(self.copies(name), ignore_errors=True)

    def _keep(self, name: str, task: Task) -> None:
        self._tasks[name] = task
        self._count[tenant_of(name)] += 1

    def _write(self, name: str, task: Task, last: TaskStatus | None) -> None:
        record = {
            "ended": last and last.state,
            "specification": to_object(task),
            # Without the paths of the copies, which are deleted.
            "status": last and Shown(name, last, copies=self.copies(name)).fields(),
        }
        write_atomically(self._path(name), json.dumps(record, indent=2) + "\n")

    def _path(self, name: str) -> Path:
        return self._specifications / f"{name}{_SUFFIX}"


def tenant_of(name: str) -> str:
    """The tenant of a task.

    Args:
      name: the name of the task in the server, TENANT.NAME. Names of tenants have no dots.
    """
    return name.partition(".")[0]


def _below(task: Task, folder: Path) -> Task:
    """The task with the absolute paths that `copy_files` expects."""
    root = folder.resolve()
    return with_paths(task, lambda path: str(root / path))


def _read(path: Path) -> tuple[Task, str | None, TaskStatus | None]:
    """What was accepted, the state in which it ended, and its last status."""
    try:
        record = json.loads(path.read_bytes())
        # Records of earlier versions have no status.
        last = record.get("status") and status_of(record["status"])
        return from_json(record["specification"]), last.state if last else record["ended"], last
    except (ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(
            f"{path}: damaged ({e}); restore it from a backup, or delete it if the task is not "
            "needed any more"
        ) from None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class TryLater(TaskError):
    """A task cannot be taken in before others of its tenant have ended."""


class Intake:
    """Copies the files of tasks that are wanted, and accepts them. One thread uses it."""

    def __init__(self, directory: WatchedDirectory, accepted: AcceptedTasks, limits: TenantLimits):
        """Starts with the tasks that have been accepted before.

        Args:
          directory: the directory of the specifications.
          accepted: the tasks that are accepted; new ones are added.
          limits: the most that a tenant may ask for.
        """
        self._directory, self._accepted, self._limits = directory, accepted, limits
        self._last = ""

    def check_name(self, place: Place) -> None:
        """Checks that a task can have the name that it would have in the server.

        Args:
          place: the place of its specification.

        Raises:
          TaskError: the name is too long.
        """
        if len(place.task) > LONGEST_NAME:
            raise TaskError(
                f"{place.name}.json: the name of the folder and that of the file have "
                f"{len(place.task) - 1} characters; expected at most {LONGEST_NAME - 1}"
            )

    def in_turns(self, places: Iterable[Place]) -> Iterator[Place]:
        """The places in an order in which tenants take turns. The tenant after the one that came
        last in an earlier iteration, which need not have come to its end, comes first.

        Args:
          places: the places of specifications.
        """
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
        """Copies the files of a task, and accepts it.

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
