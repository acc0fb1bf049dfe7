"""Where the time from the start of a training run's process to its first results goes."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

# What JAX reports of each program, and the words for it.
_OF_PROGRAMS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
    "/jax/compilation_cache/cache_retrieval_time_sec": "read from the cache of programs",
}
# Shorter times of a program are added up under "other programs".
_LEAST_SECONDS = 0.1


class Span(NamedTuple):
    """A part of the start.

    Attributes:
      what: what happened, for example "read the data".
      begin: seconds since the process began.
      seconds: how long it took.
      thread: name of the thread; several may work at the same time.
    """

    what: str
    begin: float
    seconds: float
    thread: str


class StartTimeline:
    """Records what a training run does before its first results, and how long JAX traces, lowers
    and compiles each program meanwhile. A context manager."""

    def __init__(self):
        """Begins to record. The time until now counts as the import of modules."""
        self._spans: list[Span] = []
        # Seconds of short work on programs, by kind.
        self._short: dict[str, float] = {}
        self._began = _process_start()
        self._add("start Python, import modules", self._began, time.time())

    def __enter__(self) -> "StartTimeline":
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Records the time that a context takes.

        Args:
          what: what happens in it.
        """
        begin = time.time()
        try:
            yield
        finally:
            self._add(what, begin, time.time())

    @property
    def spans(self) -> list[Span]:
        """What was recorded so far, in the order of the beginnings."""
        spans = sorted(self._spans, key=lambda span: span.begin)
        return spans + [
            Span(f"{kind} other programs", spans[-1].begin, seconds, "")
            for kind, seconds in self._short.items()
        ]

    def _add(self, what: str, begin: float, end: float) -> None:
        thread = threading.current_thread().name
        self._spans.append(Span(what, begin - self._began, end - begin, thread))

    def _listen(self, event: str, seconds: float, **facts: Any) -> None:
        kind = _OF_PROGRAMS.get(event)
        if kind is None:
            return
        if seconds < _LEAST_SECONDS:
            self._short[kind] = self._short.get(kind, 0.0) + seconds
            return
        name = facts.get("fun_name", "")
        self._add(f"{kind} {name}".strip(), time.time() - seconds, time.time())


def _process_start() -> float:
    """Seconds from 1970 to the start of this process; now, where the system does not tell."""
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError):
        return time.time()
