"""Signals that stop a training run: at once while it starts, and after a microbatch while it
trains."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, TracebackType

from jaxmux.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STOPPING = "stopping after this microbatch; a second signal stops at once"


class StopSignals:
    """Handles SIGINT, SIGTERM and SIGHUP as a context manager.

    A signal raises `Interrupted` at once, except within `deferred`: there it only sets `arrived`,
    so that the state can be saved. The state counts as saved when `deferred` has ended.
    After the first signal, a second one takes its usual effect. Python allows only the main thread
    to handle signals; in other threads nothing is handled.

    Attributes:
      number: number of the signal that arrived; 0 before.
    """

    def __init__(self):
        """Handles nothing yet."""
        self.number = 0
        self._deferred = self._saved = False
        self._notice = _STOPPING
        self._previous: dict[int, object] = {}
        # The lines to print; None ends the thread that prints them.
        self._lines: SimpleQueue[str | None] = SimpleQueue()

    @property
    def arrived(self) -> bool:
        """True if a signal has arrived."""
        return bool(self.number)

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # Whoever lets a process ignore SIGHUP (nohup) wants it to go on.
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                # None stands for a handler in C, which Python cannot set again.
                self._previous[number] = signal.signal(number, self._receive) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self, say: Callable[[str], None], notice: str = _STOPPING) -> Iterator[None]:
        """Within this context, a signal only sets `arrived`, so that the state can be saved.

        Args:
          say: function that prints one line; it is told that a signal has arrived, in a thread of
            its own.
          notice: what it is told.

        Raises:
          Interrupted: a signal arrived before, but its exception was lost in code of others.
        """
        if self.arrived:
            raise Interrupted(self.number, saved=self._saved)
        # A handler of signals may interrupt whatever prints, so a thread prints in its place.
        thread = threading.Thread(target=self._say_lines, args=(say,), daemon=True)
        self._deferred, self._notice = True, notice
        thread.start()
        try:
            yield
        finally:
            self._deferred, self._saved = False, True
            self._lines.put(None)
            thread.join()

    def _say_lines(self, say: Callable[[str], None]) -> None:
        for line in iter(self._lines.get, None):
            say(line)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, self._previous[number])
        if not self._deferred:
            raise Interrupted(number, saved=self._saved)
        self._lines.put(self._notice)
