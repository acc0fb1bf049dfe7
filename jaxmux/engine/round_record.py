"""What a round held, the order in which the stages of a pipeline got its passes, and where the time
of the devices went."""

import dataclasses
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from .replica_input import ReplicaInput
from .rounds import RoundPlan


class DispatchedPass(NamedTuple):
    """A pass that the host has given to a stage.

    Attributes:
      seconds: when, by `time.perf_counter`. The stage may run the pass later.
      replica: index of the replica.
      stage: index of the stage.
      part: index of the part of the backbone; several parts may lie on a stage.
      microbatch: index of the microbatch in its round.
      forward: True for a forward pass, False for a backward pass.
      steps: the `RoundPlan.steps` of the round, which tell the rounds apart.
    """

    seconds: float
    replica: int
    stage: int
    part: int
    microbatch: int
    forward: bool
    steps: Mapping[int, int]


class TaskTokens(NamedTuple):
    """The tokens of a task in a microbatch.

    Attributes:
      chunks: tokens of the task's chunks, with padding.
      read: tokens that the model reads, without padding.
    """

    chunks: int
    read: int


class MicrobatchRecord(NamedTuple):
    """What a microbatch held.

    Attributes:
      replica: index of the replica that trained it.
      capacity: tokens of the microbatches of all data shards together, with padding.
      tasks: by name, the tokens of each task in it.
    """

    replica: int
    capacity: int
    tasks: dict[str, TaskTokens]


class RoundRecord(NamedTuple):
    """What a dispatched round held.

    Attributes:
      index: number of the round, from 0.
      microbatches: its microbatches, but those that an earlier process had trained.
      passes: the passes that the host has given to the stages of pipelines since the round before,
        in this order; empty on one device. With schedules in which rounds follow each other, some
        of them belong to the following round.
      steps: the `RoundPlan.steps` of the round.
    """

    index: int
    microbatches: list[MicrobatchRecord]
    passes: Sequence[DispatchedPass]
    steps: Mapping[int, int]

    @classmethod
    def of(
        cls,
        index: int,
        plan: RoundPlan,
        names: Mapping[int, str],
        replicas: Sequence[ReplicaInput],
        passes: Sequence[DispatchedPass],
    ) -> "RoundRecord":
        """The record of a round.

        Args:
          index: number of the round, from 0.
          plan: the round.
          names: by slot, the name of each of its tasks.
          replicas: the replicas that have trained it.
          passes: as for `RoundRecord`.
        """
        microbatches = [
            MicrobatchRecord(
                own.replica,
                replicas[own.replica].tokens,
                {
                    names[slot]: TaskTokens(own.trained_tokens[slot], read)
                    for slot, read in own.read_tokens.items()
                },
            )
            for own in plan.microbatches
        ]
        return cls(index, microbatches, passes, plan.steps)


# What the devices compute.
TRAINING, EVALUATION = "training", "evaluation"
# What the devices wait for; "idle" stands for all else.
COMPILING, CHECKPOINTS, IDLE = "compiling", "checkpoints", "idle"
# Spans that are kept where nobody asks where the time went.
_MOST_SPANS = 4096


@dataclasses.dataclass
class _Span:
    """A span of time, on `time.monotonic`; its end is infinite until it is known."""

    kind: str
    begin: float
    end: float = math.inf


class DeviceTime:
    """Where the time of the devices goes. They compute in the order in which work was dispatched,
    so a piece of work begins when it has been dispatched and the one before has ended. A thread
    notes when it has ended, and nobody else waits.
    """

    def __init__(self):
        """Starts with idle devices."""
        self._watch: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._work: deque[_Span] = deque(maxlen=_MOST_SPANS)
        self._waits: deque[_Span] = deque(maxlen=_MOST_SPANS)
        # When the work ended of which nothing is known any more.
        self._ended = -math.inf

    def add(self, kind: str, begin: float, wait: Callable[[], Any]) -> Future[Any]:
        """Takes note of work that has been dispatched.

        Args:
          kind: "training" or "evaluation".
          begin: when its dispatch began, on `time.monotonic`.
          wait: function that returns when the work has ended. It dispatches nothing.

        Returns:
          A future of what `wait` returns.
        """
        span = _Span(kind, begin)
        with self._lock:
            self._work.append(span)

        def watched() -> Any:
            try:
                return wait()
            finally:
                with self._lock:
                    span.end = time.monotonic()

        self._watch = self._watch or ThreadPoolExecutor(1)
        return self._watch.submit(watched)

    def close(self) -> None:
        """Ends the thread when the work has ended; `add` starts another one."""
        if self._watch is not None:
            self._watch.shutdown()
            self._watch = None

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Takes note of what the host does within this context, for which the devices may wait.

        Args:
          kind: "compiling" or "checkpoints".
        """
        span = _Span(kind, time.monotonic())
        self._waits.append(span)
        try:
            yield
        finally:
            span.end = time.monotonic()

    def spent(self, since: float, now: float) -> dict[str, float]:
        """Where the time went between two moments, in seconds by kind. The sum is the time between
        them. What was before the second one is forgotten.

        Args:
          since, now: the moments, on `time.monotonic`.
        """
        with self._lock:
            work = [dataclasses.replace(span) for span in self._work]
            self._work = _unended(self._work, now)
        waits, self._waits = self._waits, _unended(self._waits, now)
        found: Counter[str] = Counter()
        ended = max(since, self._ended)
        for span in (*work, _Span(IDLE, now, now)):
            begin = min(max(span.begin, ended), now)
            for kind, seconds in _idle(ended, begin, waits):
                found[kind] += seconds
            ended, before = max(ended, min(span.end, now)), max(ended, begin)
            found[span.kind] += max(0.0, ended - before)
        self._ended = max((span.end for span in work if span.end <= now), default=self._ended)
        return {kind: seconds for kind, seconds in found.items() if seconds > 0}


def _unended(spans: Iterable[_Span], now: float) -> deque[_Span]:
    return deque((span for span in spans if span.end > now), maxlen=_MOST_SPANS)


def _idle(begin: float, end: float, waits: Iterable[_Span]) -> Iterator[tuple[str, float]]:
    """What the devices waited for between two moments, and for how many seconds."""
    left = max(0.0, end - begin)
    for span in waits:
        seconds = max(0.0, min(span.end, end) - max(span.begin, begin))
        left -= seconds
        yield span.kind, seconds
    yield IDLE, max(0.0, left)
