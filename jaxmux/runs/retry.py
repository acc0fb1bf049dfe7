"""When to try again what has failed."""

import time

_FIRST, _LONGEST = 1.0, 60.0


class Retry:
    """Tells when to try again: a second after the first of several failures in a row, and after
    each further one twice as late, but at most a minute later. Any thread may use it.

    Attributes:
      has_failed: whether it has failed the last time.
    """

    def __init__(self):
        """Begins without a failure."""
        self.has_failed = False
        self._seconds = 0.0
        self._at = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it can be tried, again or for the first time."""
        return time.monotonic() >= self._at

    def note_failure(self) -> None:
        """Takes note that it has failed."""
        self.has_failed = True
        self._seconds = min(max(_FIRST, 2 * self._seconds), _LONGEST)
        self._at = time.monotonic() + self._seconds

    def note_success(self) -> None:
        """Takes note that it has succeeded."""
        self.has_failed = False
        self._seconds = self._at = 0.0
