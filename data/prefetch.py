"""Prepares items in a background thread while the device computes."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Iterates over `items` while a background thread computes up to `depth` of them ahead.

    An exception in `items` is raised to the consumer in place of the next item. `close` ends the
    thread and drops the items that it computed ahead, so the caller must be able to create `items`
    again from the point at which the consumer stopped.
    """

    def __init__(self, items: Iterable[T], depth: int = 2):
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
        """Stops the thread and waits for its end; the iterator is exhausted afterwards."""
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
