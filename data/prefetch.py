"""Prepares items in a background thread while the device computes."""

import queue
import threading
from collections.abc import Iterable, Iterator
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
          depth: most finished items that wait for the consumer, at least 1. The thread pauses when
            this many wait.
        """
        self._queue: queue.Queue = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, args=(items,), daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        kind, value = self._queue.get()
        if kind == "item":
            return value
        self._queue.put((kind, value))
        raise StopIteration if kind == "end" else value

    def close(self) -> None:
        """Stops the thread, waits for its end, and drops the items computed ahead. After `close`,
        `next` raises StopIteration."""
        self._closed.set()
        self._thread.join()
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put(("end", None))

    def _produce(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                if not self._offer(("item", item)):
                    return
            self._offer(("end", None))
        except Exception as error:  # `__next__` raises it in the consumer's thread
            self._offer(("error", error))

    def _offer(self, entry: tuple) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False
