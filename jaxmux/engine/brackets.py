"""Successive halving: which tasks go on at a rung (Jamieson & Talwalkar 2016, Algorithm 1)."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from jaxmux.tasks import TaskError

from .progress import TaskProgress


class Rung(NamedTuple):
    """A rung whose tasks have all been measured.

    Attributes:
      step: the number of steps after which they are compared.
      ranking: names of the tasks that came so far, the one with the lowest loss first.
      kept: number of tasks, the first of the ranking, that go on.
    """

    step: int
    ranking: tuple[str, ...]
    kept: int


class Bracket(NamedTuple):
    """Tasks that compete in successive halving. At each rung, those with the highest held-out
    losses stop.

    What is decided at a rung depends on the tasks' progress only, so it is decided again in the
    same way after a break, and alike in all processes.

    Attributes:
      tasks: names of the tasks. Of equal losses, that of the earlier task is better.
      rungs: for each rung, the number of steps after which tasks are compared, ascending.
      factor: one of so many tasks goes on at each rung.
    """

    tasks: tuple[str, ...]
    rungs: tuple[int, ...]
    factor: int

    def kept(self, rung: int) -> int:
        """The most tasks that go on at a rung.

        Args:
          rung: index of the rung.
        """
        return max(1, len(self.tasks) // self.factor ** (rung + 1))

    def decided(
        self, progress: Mapping[str, TaskProgress], awaited: Collection[str] = ()
    ) -> list[Rung]:
        """The rungs, from the first one, that all their tasks have reached.

        Args:
          progress: by name, the progress of the tasks.
          awaited: names of tasks whose last results have not arrived.
        """
        found, come = [], self.tasks
        for i, step in enumerate(self.rungs):
            if not all(_is_measured(progress[name], i, name in awaited) for name in come):
                break
            # Sorting keeps the order of equal losses.
            ranking = tuple(sorted(come, key=lambda name: _loss_at(progress[name], i)))
            found.append(Rung(step, ranking, min(self.kept(i), len(ranking))))
            come = tuple(name for name in come if name in ranking[: found[-1].kept])
        return found


def refuse_brackets(brackets: Sequence[Bracket], measured: Mapping[str, bool]) -> None:
    """Checks that tasks can be compared.

    Args:
      brackets: the brackets.
      measured: by name of a task, whether it has held-out samples.

    Raises:
      TaskError: a task has no held-out samples.
    """
    for bracket in brackets:
        for name in bracket.tasks:
            if bracket.rungs and not measured[name]:
                raise TaskError(
                    f"task {name!r}: it has no held-out samples, by which first_rung compares tasks"
                )


def reason_to_stop(rungs: Sequence[Rung], name: str) -> str | None:
    """Why a task stops; None if it goes on.

    Args:
      rungs: the rungs that are decided.
      name: name of the task.
    """
    for number, rung in enumerate(rungs, start=1):
        if name in rung.ranking[rung.kept :]:
            place = rung.ranking.index(name) + 1
            return (
                f"at rung {number} (step {rung.step}), {_ordinal(place)} of {len(rung.ranking)} "
                "by held-out loss"
            )
    return None


def rung_of(reason: str | None) -> int | None:
    """The number of the rung at which a task has stopped, from 1; None if it has not stopped at
    one.

    Args:
      reason: `TaskProgress.stopped_early` of the task.
    """
    found = re.match(r"at rung (\d+) ", reason or "")
    return int(found[1]) if found else None


def _is_measured(progress: TaskProgress, rung: int, awaited: bool) -> bool:
    return len(progress.rung_losses) > rung or (progress.status != "running" and not awaited)


def _loss_at(progress: TaskProgress, rung: int) -> float:
    """The loss by which a task is ranked: that at the rung, or the last one of a task that has
    ended before."""
    loss = progress.eval_loss
    if len(progress.rung_losses) > rung:
        loss = progress.rung_losses[rung]
    elif progress.status == "failed":
        loss = None
    return math.inf if loss is None else loss


def _ordinal(n: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{'th' if n % 100 in (11, 12, 13) else ending}"
