"""Prepares items in a background thread while the device computes."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Iterates over `items` while a background thread computes the next ones ahead.

    If `items` raises an exception, `next` raises this exception in place of the next item. After
    `close`, the items that were computed ahead are lost. A caller that wants to continue must
    create `items` again, from the item after the last one that the caller received.
    """

    def __init__(self, items: Iterable[T], depth: int = 2):
        """Starts the thread.

        Args:
          items: the items; the background thread iterates over them.
          depth: most finished items that wait while the thread computes another one, at least 1.
            The thread pauses when depth + 1 items are finished.
        """
        self._items = iter(items)
        self._executor = ThreadPoolExecutor(1)
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth + 1):
            self._compute_another()

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        # The end of `items` and its exception stay in front, so every later call raises them again.
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._compute_another()
        return item

    def close(self) -> None:
        """Stops the thread, waits for its end, and drops the items computed ahead. After `close`,
        `next` raises StopIteration."""
        self._executor.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _compute_another(self) -> None:
        self._ahead.append(self._executor.submit(next, self._items))
