"""The results of a round, which the host fetches one round later: updates, losses, what each device
computed, the order of the passes in each stage of a pipeline, and where the time went.
"""

import dataclasses
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmux.peft import SlotArrays
from jaxmux.planner.costs.pool_spec import PoolSpec

from ..state.slots import Measuring, Slot
from ..state.updates import UpdateStats
from ..tasks.progress import (
    TaskEvaluation,
    TaskUpdate,
    record_evaluation,
    record_update,
    stop_in_time,
)
from .rounds import ReplicaInput, RoundPlan


class ComputedTurn(NamedTuple):
    """What a round has computed of a task's global batch. All tokens are those of chunks, with
    padding.

    Attributes:
      task: name of the task.
      step: index of the global batch, from 0.
      before: number of tokens of the global batch that had been computed before, since it was begun
        last. A global batch begins again if its gradients are lost.
      tokens: number of tokens that the round has computed of it.
    """

    task: str
    step: int
    before: int
    tokens: int


class Computed(NamedTuple):
    """What has been computed of all tasks.

    Attributes:
      turns: what rounds have computed of training samples.
      held_out: by name of the task, number of tokens of chunks with held-out samples.
      measured: the same of the measurements that have been completed, whose first turns may have
        been computed before. Those that were begun and are begun again do not count.
    """

    turns: list[ComputedTurn]
    held_out: dict[str, int]
    measured: dict[str, int]

    @property
    def by_task(self) -> dict[str, int]:
        """By name, number of tokens of each task, held-out ones included."""
        tokens = Counter(self.held_out)
        for turn in self.turns:
            tokens[turn.task] += turn.tokens
        return dict(tokens)


class ComputedTokens:
    """Counts every turn when its results have arrived, and a turn that was begun and not completed
    when it is known what has been computed of it. Whether its task is still trained makes no
    difference."""

    def __init__(self):
        """Starts without tokens."""
        self._turns: list[ComputedTurn] = []
        self._held_out: Counter[str] = Counter()
        self._measured: Counter[str] = Counter()

    def count(self, number: int, slot: Slot, plan: RoundPlan) -> None:
        """Counts the turn of a task in a round, but for the parts of it that have been counted.

        Args:
          number: number of its slot in the round.
          slot: the task.
          plan: the round.
        """
        self._add(slot, plan.steps[number], plan.computed_tokens[number] - slot.part_of_turn)
        slot.part_of_turn = 0

    def count_part(self, slot: Slot, step: int, tokens: int) -> None:
        """Counts a part of a turn, the rest of which will be planned anew.

        Args:
          slot: the task.
          step: index of the global batch.
          tokens: number of tokens of the part.
        """
        self._add(slot, step, tokens)
        slot.part_of_turn += tokens

    def count_in_vain(self, slot: Slot, step: int, tokens: int) -> None:
        """Counts what a round has computed of a task that has left. If the task comes back, the
        turn is computed again.

        Args:
          slot: the task.
          step: index of the global batch.
          tokens: number of tokens.
        """
        if tokens:
            self._turns.append(ComputedTurn(slot.name, step, slot.computed[step], tokens))

    def count_held_out(self, slot: Slot, tokens: int) -> None:
        """Counts a turn of a measurement of the held-out loss.

        Args:
          slot: the task.
          tokens: number of tokens.
        """
        self._held_out[slot.name] += tokens

    def count_measured(self, slot: Slot, tokens: int) -> None:
        """Counts a measurement whose turns have all been counted.

        Args:
          slot: the task.
          tokens: number of tokens of all turns.
        """
        self._measured[slot.name] += tokens

    def take(self) -> Computed:
        """What has been counted since the last call."""
        taken = Computed(self._turns, dict(self._held_out), dict(self._measured))
        self._turns, self._held_out, self._measured = [], Counter(), Counter()
        return taken

    def _add(self, slot: Slot, step: int, tokens: int) -> None:
        self.count_in_vain(slot, step, tokens)
        slot.computed[step] += tokens


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


@dataclasses.dataclass(frozen=True)
class DispatchedUpdate:
    """An update of several slots in a round, whose results have not been fetched.

    Attributes:
      index: number of the round, from 0.
      plan: the round.
      tasks: by slot number, the tasks that are updated. A task may have left its slot since.
      learning_rates: by slot number, the learning rate of the update.
      pools: the pool that each task of the round needs alone.
      stats: losses and gradient norms, on the device.
    """

    index: int
    plan: RoundPlan
    tasks: Mapping[int, Slot]
    learning_rates: Mapping[int, float]
    pools: list[PoolSpec]
    stats: UpdateStats


@dataclasses.dataclass(frozen=True)
class DispatchedTurns:
    """The turns of a round whose global batches go on in the following round; or what has been
    trained of a round that had begun and is forgotten.

    Attributes:
      plan: the round.
      tasks: by slot number, the tasks.
      left: by slot number, the tasks that had left when the round had begun.
      marker: arrays that are ready when the round has ended, from `Executor.marker`.
      ended: indices of the microbatches that have been trained of a forgotten round; else None.
    """

    plan: RoundPlan
    tasks: Mapping[int, Slot]
    left: Mapping[int, Slot]
    marker: Any = ()
    ended: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class DispatchedEvaluation:
    """Turns of measurements of held-out losses whose results have not been fetched.

    Attributes:
      index: number of rounds that have been dispatched.
      tasks: by slot number, the tasks.
      measured: by slot number, the measurement to which the turn belongs.
      ended: the slots whose measurements end with these turns.
      adapters: by slot number, function that waits for the measured adapter and returns its arrays
        by path, for tasks of `ended` that keep their best adapter.
      losses: function that waits for the losses by slot, as in `Measurement`.
      tokens: by slot number, number of tokens of the chunks with held-out samples.
    """

    index: int
    tasks: Mapping[int, Slot]
    measured: Mapping[int, Measuring]
    ended: frozenset[int]
    adapters: Mapping[int, Callable[[], SlotArrays]]
    losses: Callable[[], np.ndarray]
    tokens: Mapping[int, int]


class Results:
    """Fetches the results of updates, and records them in the progress of their tasks.

    Attributes:
      computed: counts what has been computed.
    """

    def __init__(self, max_bad_steps: int):
        """Creates it without updates.

        Args:
          max_bad_steps: number of consecutive skipped updates after which a task has failed.
        """
        self.computed = ComputedTokens()
        self._max_bad_steps = max_bad_steps
        self._dispatched: list[DispatchedUpdate | DispatchedTurns] = []
        self._measured: list[DispatchedEvaluation] = []
        # Results that have been fetched and not yet taken.
        self._fetched: list[TaskUpdate] = []
        self._evaluations: list[TaskEvaluation] = []
        # What has been computed in the rounds whose updates were taken last.
        self._taken = Computed([], {}, {})

    def add(self, dispatched: DispatchedUpdate | DispatchedTurns) -> None:
        """Adds an update, or turns, that have been dispatched."""
        if isinstance(dispatched, DispatchedUpdate):
            for slot in dispatched.tasks.values():
                slot.awaited += 1
        self._dispatched.append(dispatched)

    def add_evaluation(self, evaluation: DispatchedEvaluation) -> None:
        """Adds turns of measurements that have been dispatched after all updates."""
        self._measured.append(evaluation)

    def awaits(self, slot: Slot) -> bool:
        """Whether a result of this task has not been fetched."""
        return any(slot is own for own in self._awaited)

    @property
    def awaited(self) -> set[str]:
        """Names of the tasks of which results have not been fetched."""
        return {slot.name for slot in self._awaited}

    @property
    def _awaited(self) -> Iterator[Slot]:
        for results in (*self._dispatched, *self._measured):
            yield from results.tasks.values()
            if isinstance(results, DispatchedTurns):
                yield from results.left.values()

    def fetch(self) -> Iterator[DispatchedUpdate]:
        """Waits for all that has been added, records the results, and yields each update when that
        is done.

        Raises:
          jax.errors.JaxRuntimeError: a round has failed on the device.
        """
        while self._dispatched:
            first = self._dispatched[0]
            if isinstance(first, DispatchedTurns):
                jax.block_until_ready(first.marker)
                self._record_turns(first)
                del self._dispatched[0]
            else:
                self._record(first, jax.device_get(first.stats))
                del self._dispatched[0]
                yield first
        while self._measured:
            self._record_evaluation(self._measured[0], self._measured[0].losses())
            del self._measured[0]

    def take(self) -> list[TaskUpdate]:
        """The results of updates that have been fetched since the last call."""
        fetched, self._fetched = self._fetched, []
        self._taken = self.computed.take()
        return fetched

    def take_computed(self) -> Computed:
        """What has been computed in the rounds whose updates the last call of `take` returned; what
        is not taken before the next call is forgotten."""
        taken, self._taken = self._taken, Computed([], {}, {})
        return taken

    def take_evaluations(self) -> list[TaskEvaluation]:
        """The held-out losses that have been fetched since the last call."""
        fetched, self._evaluations = self._evaluations, []
        return fetched

    def _record(self, update: DispatchedUpdate, stats: UpdateStats) -> None:
        for number, slot in update.tasks.items():
            slot.awaited -= 1
            self.computed.count(number, slot, update.plan)
            if not slot.running:
                continue
            done = TaskUpdate(
                round=update.index,
                task=slot.name,
                task_step=update.plan.steps[number] + 1,
                loss=float(stats.loss[number]),
                lr=update.learning_rates[number],
                grad_norm=float(stats.grad_norm[number]),
                target_tokens=update.plan.target_tokens[number],
                tokens=update.plan.tokens[number],
                computed_tokens=slot.computed.pop(update.plan.steps[number]),
                skipped=not stats.applied[number],
            )
            slot.count_seconds(begins=True)
            record_update(slot.progress, done, slot.steps, self._max_bad_steps)
            if not slot.prepared.eval_samples:
                _succeed_after(done.task_step, slot)
            self._fetched.append(done)

    def _record_turns(self, turns: DispatchedTurns) -> None:
        plan, whole, microbatches = turns.plan, turns.plan.steps, turns.plan.microbatches
        if turns.ended is not None:
            # Turns that have been trained as a whole are not planned again.
            whole = plan.trained_turns(turns.ended)
            microbatches = [microbatches[i] for i in turns.ended]

        def trained(number: int) -> int:
            return sum(own.trained_tokens.get(number, 0) for own in microbatches)

        for number, slot in turns.tasks.items():
            if number in whole:
                self.computed.count(number, slot, plan)
            else:
                self.computed.count_part(slot, plan.steps[number], trained(number))
        for number, slot in turns.left.items():
            self.computed.count_in_vain(slot, plan.steps[number], trained(number))

    def _record_evaluation(self, evaluation: DispatchedEvaluation, losses: np.ndarray) -> None:
        for number, slot in evaluation.tasks.items():
            measured = evaluation.measured[number]
            measured.loss += float(losses[number])
            measured.tokens += evaluation.tokens[number]
            self.computed.count_held_out(slot, evaluation.tokens[number])
            slot.count_seconds()
            if number in evaluation.ended:
                self.computed.count_measured(slot, measured.tokens)
                if slot.progress.status != "failed":
                    adapter = evaluation.adapters.get(number)
                    self._record_loss(slot, measured, evaluation.index, adapter)

    def _record_loss(
        self,
        slot: Slot,
        measured: Measuring,
        index: int,
        adapter: Callable[[], SlotArrays] | None,
    ) -> None:
        """Records the result of a whole measurement."""
        progress, task, step = slot.progress, slot.prepared.task, measured.step
        finite = math.isfinite(measured.loss)
        best = progress.best_loss is None or measured.loss < progress.best_loss
        best = step > 0 and finite and best
        tokens = slot.held_out_tokens
        done = TaskEvaluation(index, slot.name, step, measured.loss, tokens, best)
        _succeed_after(step, slot)
        record_evaluation(progress, done, task.patience, task.keep_best)
        if step == slot.pause_after:
            progress.rung_losses.append(measured.loss if finite else None)
        if best and adapter:
            slot.best = adapter
        self._evaluations.append(done)


def _succeed_after(step: int, slot: Slot) -> None:
    """Notes that a task has succeeded if this was its last step, and it has not failed."""
    if slot.running and step == slot.steps:
        slot.progress.status = "succeeded"
        if slot.steps < slot.prepared.steps:
            stop_in_time(slot.progress)
