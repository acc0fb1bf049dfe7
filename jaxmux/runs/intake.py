"""Takes in the tasks of tenants: within the limits of each tenant, and in turns."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from jaxmux.planner.numbers import size_text
from jaxmux.tasks import LONGEST_NAME, Task, TaskError

from .accepted_tasks import AcceptedTasks
from .tenant_limits import TenantLimits
from .watched_directory import Place, Signature, WatchedDirectory


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
