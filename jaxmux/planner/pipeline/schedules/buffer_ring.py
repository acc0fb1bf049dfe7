"""Slots of a ring buffer, handed out first-fit."""

from collections.abc import Iterable


class BufferRing:
    """Hands out runs of consecutive slots, the lowest that are free.

    Args:
      limit: slots that there are; None for as many as it takes.
    """

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._taken: list[bool] = []

    def find(self, size: int) -> int | None:
        """First slot of the lowest free run of `size` slots, or None if there is none."""
        start = 0
        for slot, taken in enumerate(self._taken):
            if taken:
                start = slot + 1
            elif slot + 1 - start == size:
                return start
        return start if self._limit is None or start + size <= self._limit else None

    def take(self, size: int) -> int:
        """Takes the run that `find` names, which must exist."""
        start = self.find(size)
        assert start is not None
        self._taken += [False] * (start + size - len(self._taken))
        self._taken[start : start + size] = [True] * size
        return start

    def free(self, start: int, size: int) -> None:
        self._taken[start : start + size] = [False] * size


def first_fit(waits: Iterable[tuple[int, int, int]]) -> list[int]:
    """Slots for waits (first tick, last tick, size); a slot is used again from the next tick on."""
    waits = list(waits)
    slots = [0] * len(waits)
    ring = BufferRing()
    held: list[int] = []
    for i in sorted(range(len(waits)), key=lambda i: waits[i]):
        first, _, size = waits[i]
        for ended in [h for h in held if waits[h][1] < first]:
            ring.free(slots[ended], waits[ended][2])
            held.remove(ended)
        slots[i] = ring.take(size)
        held.append(i)
    return slots
