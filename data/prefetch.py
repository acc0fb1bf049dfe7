"""Runs host work ahead of the device in one background thread."""

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Iterates over `items` while a background thread computes up to `depth` of them ahead.

    An exception of `items` is raised again where the item would have come. `close` ends the thread;
    items computed ahead are lost with it, so the source must be able to begin again where the
    consumer stopped.
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
        """Stops the thread and waits for it; from then on there are no items."""
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
        except Exception as error:  # handed to the consumer's thread, whatever it is
            self._offer(("error", error))

    def _offer(self, entry: tuple) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False
