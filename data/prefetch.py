"""Prepares items in a background thread while the device computes."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Iterates over `items` while a background thread computes the next ones.

    If `items` raises an exception, `next` raises it in place of the next item. After `close`, the
    items that were computed ahead are lost. To continue, a caller must create `items` again, from
    the item after the last one that it received.
    """

    def __init__(self, items: Iterable[T], depth: int = 2):
        """Starts the thread, which computes at most `depth` + 1 items ahead; `depth` is at least
        1."""
        self._items = iter(items)
        self._executor = ThreadPoolExecutor(1)
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth + 1):
            self._compute_another()

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        # The end of `items`, or its exception, stays first in the queue, so that later calls raise
        # it again.
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._compute_another()
        return item

    def close(self) -> None:
        """Stops the thread, waits for its end, and drops the items that were computed ahead."""
        self._executor.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _compute_another(self) -> None:
        self._ahead.append(self._executor.submit(next, self._items))
