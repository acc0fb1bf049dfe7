"""What a status file tells a tenant about a task."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.live import Meter, StateChange, TaskStatus
from jaxmux.live.states import QUEUED
from jaxmux.printable import shown_state

from .json_lines import finite_or_none

# In a reason, tasks that are named one after another.
_TASKS = re.compile(r"\btasks? ('[^']+'(?:, '[^']+')*)")


class Shown(NamedTuple):
    """What a status file is made from. The file is written again when this changes.

    Attributes:
      task: the name of the task in the server; None if there can be none of this name.
      status: the task as the server sees it; None if it is not registered.
      place: the place of a waiting task in the queue, from 1; None if it does not wait.
      adapter: the folder with the adapter of a task that has succeeded or stopped early; None
        before.
      error: why the specification is refused, or a change of it; None if it is not.
      copies: the folder of the copies of the task's files; None if there are none.
      waits: whether the specification is not refused, but waits for what `error` tells.
    """

    task: str | None
    status: TaskStatus | None = None
    place: int | None = None
    adapter: Path | None = None
    error: str | None = None
    copies: Path | None = None
    waits: bool = False

    def is_like(self, other: "Shown | None") -> bool:
        """Whether another one says the same; quick for a status that has not changed.

        Args:
          other: the other one; None for none.
        """
        return (
            other is not None
            and self.status is other.status
            and (self.place, self.adapter) == (other.place, other.adapter)
            and (self.error, self.waits) == (other.error, other.waits)
        )

    def text(self) -> str:
        """The content of the status file."""
        return json.dumps(self.fields(), indent=2) + "\n"

    def fields(self) -> dict[str, Any]:
        """The entries of the status file. `status_of` has the inverse."""
        status, error = self.status, self.error
        state = "waiting" if self.waits else "refused"
        fields: dict[str, Any] = {"task": self.task, "state": state, "error": error}
        if status:
            fields |= {
                "state": status.state,
                "reason": self._of_tenant(status.reason),
                "priority": status.priority,
                "place_in_queue": self.place,
                "step": status.step,
                "steps": status.steps,
                "rank": status.rank,
                "loss": finite_or_none(status.loss),
                "held_out_loss": finite_or_none(status.held_out_loss),
                "best_step": status.best_step,
                "share": round(status.share, 4),
                "adapter": self.adapter and str(self.adapter),
                "warnings": [self._of_tenant(warning) for warning in status.warnings],
                "meter": dataclasses.asdict(status.meter),
                "history": [
                    change._asdict() | {"reason": self._of_tenant(change.reason)}
                    for change in status.history
                ],
            }
        return fields

    def _of_tenant(self, reason: str | None) -> str | None:
        """A reason with the tenant's own paths in place of those of the copies, and without names
        of other tenants' tasks."""
        if reason and self.copies:
            reason = reason.replace(f"{self.copies}/", "")
        return reason and _TASKS.sub(self._own_tasks, reason)

    def _own_tasks(self, named: re.Match[str]) -> str:
        """What a reason says to the tenant in place of names of tasks."""
        tenant = f"'{self.task.partition('.')[0]}."
        names = named[1].split(", ")
        own = [name for name in names if name.startswith(tenant)]
        if own == names:
            return named[0]
        if own:
            return f"tasks {', '.join(own)} and others"
        return "another tenant's task" if len(names) == 1 else "other tenants' tasks"


def status_of(fields: Mapping[str, Any]) -> TaskStatus:
    """The status of a task from the entries that `Shown.fields` has made of it.

    Args:
      fields: the entries. Only those of the server's own files are trusted.

    Raises:
      KeyError, TypeError: they are damaged.
    """
    # Files of earlier versions tell of no rank and no warnings.
    fields = {"rank": None, "warnings": (), **fields}
    own = {key: fields[key] for key in TaskStatus._fields if key != "name"}
    history = tuple(StateChange.of(change) for change in fields["history"])
    own |= {"name": fields["task"], "meter": Meter(**fields["meter"]), "history": history}
    own |= {"state": shown_state(own["state"], own["reason"]), "warnings": tuple(own["warnings"])}
    return TaskStatus(**own)


def places_in_queue(statuses: Iterable[TaskStatus]) -> dict[str, int]:
    """By name, the places of the waiting tasks, from 1. Tasks that arrived together have places one
    after the other, although the scheduler may prefer a later one of them.

    Args:
      statuses: all tasks, in the order in which they were registered.
    """
    waiting = [status for status in statuses if status.state == QUEUED]
    waiting.sort(key=lambda status: -status.priority)
    return {status.name: place for place, status in enumerate(waiting, start=1)}
