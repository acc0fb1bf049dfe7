"""Tells when the copies of a task's files are not needed any more."""

import re
from collections.abc import Collection
from pathlib import Path


class CopiesNeeded:
    """When a task has ended, its end is not on disk yet. If the process dies, the task goes on from
    a checkpoint, and reads its data again. So the copies are needed as long as there is a
    checkpoint in which the task has not ended.

    Checkpoints are numbered, and one of them is written at a time. The one that is written when the
    task ends may have been begun before, but the next one has the task's end.
    """

    def __init__(self, checkpoints: Path):
        """Starts without tasks.

        Args:
          checkpoints: the folder of the checkpoints.
        """
        self._folder = checkpoints
        # By task, the number of the first checkpoint that surely has its end.
        self._first: dict[str, int] = {}

    def not_needed(self, ended: Collection[str]) -> list[str]:
        """The tasks whose copies are not needed.

        Args:
          ended: the tasks that have ended and still have copies.
        """
        self._first = {name: first for name, first in self._first.items() if name in ended}
        if not ended:
            return []
        numbers = [int(p.name) for p in self._folder.iterdir() if re.fullmatch(r"\d+", p.name)]
        for name in ended:
            self._first.setdefault(name, max(numbers, default=0) + 2)
        return [name for name in ended if numbers and min(numbers) >= self._first[name]]
