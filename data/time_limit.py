"""A time limit for code that users bring, such as chat templates."""

import ctypes
import threading
import time
from types import TracebackType


class TimeLimitExceeded(Exception):
    """Code under a `TimeLimit` took too long."""


class TimeLimit:
    """Raises `TimeLimitExceeded` in the thread that takes too long between two calls of `restart`.

    It can stop Python code only, for example the code that Jinja makes of a template. Use it as a
    context manager, any number of times, in the thread that runs the code.
    """

    def __init__(self, seconds: float):
        """Sets the longest time from one call of `restart` to the next, or to the end."""
        self.seconds = seconds
        self._lock = threading.Lock()

    def __enter__(self) -> "TimeLimit":
        self._thread, self._ended = threading.get_ident(), threading.Event()
        self.restart()
        threading.Thread(target=self._watch, args=(self._ended,), daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: object, trace: TracebackType | None) -> None:
        with self._lock:  # Nothing is raised after this block.
            self._ended.set()

    def restart(self) -> None:
        """Begins a new period."""
        self._deadline = time.monotonic() + self.seconds

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(max(0.01, self._deadline - time.monotonic())):
            with self._lock:
                if not ended.is_set() and time.monotonic() > self._deadline:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self._thread), ctypes.py_object(TimeLimitExceeded)
                    )
                    self.restart()
