"""The lines that the server of a watched directory prints about its files."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxmux.errors import without_task

from .watched_directory import Place

# Lines about specifications that are printed in a minute; tenants can cause any number.
_LINES_A_MINUTE = 10
# A problem with a folder is told again if it was gone for so many seconds.
_SECONDS_GONE = 60


class WatchLines:
    """Prints what is wrong with files, and not more often than helps. One thread uses it."""

    def __init__(self, directory: Path, say: Callable[[str], None]):
        """Starts without having printed anything.

        Args:
          directory: the watched directory.
          say: function that prints one line.
        """
        self._directory, self._say = directory, say
        self._count, self._since = 0, float("-inf")
        # The problems of tenants' folders, and when they were there last.
        self._seen: dict[tuple[str, str], float] = {}

    def say_refused(self, place: Place, error: str, waits: bool) -> None:
        """Says why a specification is refused, or what it waits for.

        Args:
          place: the place of the specification.
          error: why, as its status file tells it.
          waits: whether it waits.
        """
        now = time.monotonic()
        if now - self._since > 60:
            self._count, self._since = 0, now
        self._count += 1
        if self._count <= _LINES_A_MINUTE:
            # The line begins with the file already.
            error = without_task(error.removeprefix(f"{place.name}.json: "), place.name)
            self._say(f"{place}: {'waits' if waits else 'refused'}: {error}")
        elif self._count == _LINES_A_MINUTE + 1:
            self._say("more specifications are refused or wait; their status files tell why")

    def say_problems(self, problems: Mapping[str, str]) -> None:
        """Says what has not been there for some time.

        Args:
          problems: by tenant, what is wrong; "" stands for the directory.
        """
        now = time.monotonic()
        self._seen = {own: at for own, at in self._seen.items() if now - at < _SECONDS_GONE}
        for name, problem in problems.items():
            if (name, problem) not in self._seen:
                self._say(f"{self._directory}{name and '/'}{name}: {problem}")
            self._seen[name, problem] = now
