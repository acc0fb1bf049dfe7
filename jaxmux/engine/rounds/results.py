"""The results of a round, which the host fetches one round later: updates, losses, tokens that were
computed, the order of the passes in each stage of a pipeline, and the use of the devices' time."""

import dataclasses
import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxmux.data import Sample
from jaxmux.data.batches import GivenBatches
from jaxmux.objectives import Comparison, Graded, Known, Objective, Recorded
from jaxmux.peft import SlotArrays
from jaxmux.planner.costs.pool_spec import PoolSpec

from ..state.slots import Measuring, Reference, Slot
from ..state.updates import UpdateStats
from ..tasks.progress import (
    TaskEvaluation,
    TaskUpdate,
    record_evaluation,
    record_update,
    stop_in_time,
)
from .rounds import ReplicaInput, RoundPlan, recorded_of


class ComputedTurn(NamedTuple):
    """The tokens of a task's global batch that a round has computed. All tokens are those of
    chunks, with padding.

    Attributes:
      step: index of the global batch, from 0.
      before: number of tokens of the global batch that earlier rounds had computed. The count
        starts at 0 again if gradients are lost and the batch begins again.
    """

    task: str
    step: int
    before: int
    tokens: int


class HeldOutTokens(NamedTuple):
    """Tokens of chunks with held-out samples of a task, with padding. They include those of the
    training samples that are read once for the reference of an objective.

    Attributes:
      step: number of steps that the measured adapter has trained.
    """

    task: str
    step: int
    tokens: int


class Computed(NamedTuple):
    """The tokens that have been computed for all tasks, in turns of training and measurements.

    Attributes:
      held_out: the tokens of turns of measurements.
      measured: the tokens of measurements that have been completed, including their turns in
        earlier rounds. Measurements that had to begin again count once.
    """

    turns: list[ComputedTurn]
    held_out: list[HeldOutTokens]
    measured: list[HeldOutTokens]

    @property
    def by_task(self) -> dict[str, int]:
        """By name, number of tokens of each task, held-out ones included."""
        tokens: Counter[str] = Counter()
        for part in (*self.turns, *self.held_out):
            tokens[part.task] += part.tokens
        return dict(tokens)


class ComputedTokens:
    """Counts computed tokens when results have arrived, whether or not the task is still trained.
    An interrupted turn is counted as far as it has been computed."""

    def __init__(self):
        self._turns: list[ComputedTurn] = []
        self._held_out: list[HeldOutTokens] = []
        self._measured: list[HeldOutTokens] = []

    def count(self, number: int, slot: Slot, plan: RoundPlan) -> None:
        """Counts the turn of the task in slot `number`, without the parts that have been
        counted."""
        self._add(slot, plan.steps[number], plan.computed_tokens[number] - slot.part_of_turn)
        slot.part_of_turn = 0

    def count_part(self, slot: Slot, step: int, tokens: int) -> None:
        self._add(slot, step, tokens)
        slot.part_of_turn += tokens

    def count_in_vain(self, slot: Slot, step: int, tokens: int) -> None:
        """Counts tokens of a task that has left. If the task comes back, they are computed
        again."""
        if tokens:
            self._turns.append(ComputedTurn(slot.name, step, slot.computed[step], tokens))

    def count_held_out(self, slot: Slot, step: int, tokens: int) -> None:
        self._held_out.append(HeldOutTokens(slot.name, step, tokens))

    def count_measured(self, slot: Slot, step: int, tokens: int) -> None:
        self._measured.append(HeldOutTokens(slot.name, step, tokens))

    def take(self) -> Computed:
        taken = Computed(self._turns, self._held_out, self._measured)
        self._turns, self._held_out, self._measured = [], [], []
        return taken

    def _add(self, slot: Slot, step: int, tokens: int) -> None:
        self.count_in_vain(slot, step, tokens)
        slot.computed[step] += tokens


class DispatchedPass(NamedTuple):
    """A forward or backward pass that the host has given to a stage. It is identified by the
    indices of the replica, the stage, the part of the backbone (a stage may have several), and the
    microbatch in its round.

    Attributes:
      seconds: time of dispatch on `time.perf_counter`. The stage may run the pass later.
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
    """The tokens of a task in a microbatch: those of its chunks, with padding, and those that the
    model reads, without padding."""

    chunks: int
    read: int


class MicrobatchRecord(NamedTuple):
    """The contents of a microbatch of the replica with this index. `capacity` is the tokens of the
    microbatches of all data shards together, with padding; `tasks` has each task's tokens by
    name."""

    replica: int
    capacity: int
    tasks: dict[str, TaskTokens]


class RoundRecord(NamedTuple):
    """The contents of a dispatched round with the number `index`, from 0.

    Attributes:
      microbatches: its microbatches, without those that an earlier process had trained.
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
        microbatches = [
            MicrobatchRecord(
                microbatch.replica,
                replicas[microbatch.replica].tokens,
                {
                    names[slot]: TaskTokens(microbatch.trained_tokens[slot], read)
                    for slot, read in microbatch.read_tokens.items()
                },
            )
            for microbatch in plan.microbatches
        ]
        return cls(index, microbatches, passes, plan.steps)


# The log-probability of every token of a sample but the first, in nats.
LogProbs = Float[np.ndarray, " read_tokens"]
# The same, and behind it log Σ p² over the probabilities p of all tokens in its place.
Scores = Float[np.ndarray, "read_tokens 2"]

# Kinds of time in which the devices compute.
TRAINING, EVALUATION = "training", "evaluation"
# Kinds of time in which the devices wait; "idle" is any other wait.
COMPILING, CHECKPOINTS, IDLE = "compiling", "checkpoints", "idle"
# Maximum number of spans that are kept if `spent` is never called.
_MOST_SPANS = 4096


@dataclasses.dataclass
class _Span:
    """A span of time, on `time.monotonic`; its end is infinite until it is known."""

    kind: str
    begin: float
    end: float = math.inf


class DeviceTime:
    """Measures how the devices spend their time. They compute in the order of dispatch, so a piece
    of work begins when it has been dispatched and the one before has ended. A thread waits for the
    end of each piece, so that the training loop need not wait."""

    def __init__(self):
        self._watch: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._work: deque[_Span] = deque(maxlen=_MOST_SPANS)
        self._waits: deque[_Span] = deque(maxlen=_MOST_SPANS)
        # End of the last work whose span has been dropped.
        self._ended = -math.inf

    def add(self, kind: str, begin: float, wait: Callable[[], Any]) -> Future[Any]:
        """Records work of the kind "training" or "evaluation" that has been dispatched, and returns
        a future of the result of `wait`. The dispatch began at `begin` on `time.monotonic`. `wait`
        returns when the work has ended, and must not dispatch work."""
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
        if self._watch is not None:
            self._watch.shutdown()
            self._watch = None

    @contextmanager
    def waiting(self, kind: str) -> Iterator[None]:
        """Records that the host compiles or writes checkpoints within this context (`kind`), for
        which the devices may wait."""
        span = _Span(kind, time.monotonic())
        self._waits.append(span)
        try:
            yield
        finally:
            span.end = time.monotonic()

    def spent(self, since: float, now: float) -> dict[str, float]:
        """The seconds of each kind between two times on `time.monotonic`. They add up to the time
        between the two. Spans before `now` are dropped."""
        with self._lock:
            work = [dataclasses.replace(span) for span in self._work]
            self._work = _unended(self._work, now)
        waits, self._waits = self._waits, _unended(self._waits, now)
        seconds_of: Counter[str] = Counter()
        ended = max(since, self._ended)
        for span in (*work, _Span(IDLE, now, now)):
            begin = min(max(span.begin, ended), now)
            for kind, seconds in _idle(ended, begin, waits):
                seconds_of[kind] += seconds
            ended, before = max(ended, min(span.end, now)), max(ended, begin)
            seconds_of[span.kind] += max(0.0, ended - before)
        self._ended = max((span.end for span in work if span.end <= now), default=self._ended)
        return {kind: seconds for kind, seconds in seconds_of.items() if seconds > 0}


def _unended(spans: Iterable[_Span], now: float) -> deque[_Span]:
    return deque((span for span in spans if span.end > now), maxlen=_MOST_SPANS)


def _idle(begin: float, end: float, waits: Iterable[_Span]) -> Iterator[tuple[str, float]]:
    """Yields each kind of waiting between two times, with its seconds."""
    left = max(0.0, end - begin)
    for span in waits:
        seconds = max(0.0, min(span.end, end) - max(span.begin, begin))
        left -= seconds
        yield span.kind, seconds
    yield IDLE, max(0.0, left)


@dataclasses.dataclass(frozen=True)
class DispatchedUpdate:
    """An update of several slots in the round with the number `index`, whose results have not been
    fetched.

    Attributes:
      tasks, learning_rates: by slot number. A task may have left its slot since.
      pools: for each task of the round, the pool that would hold only this task.
      stats: losses and gradient norms, on the device.
      graded: the objectives of tasks whose losses on the device are not those of their objective.
    """

    index: int
    plan: RoundPlan
    tasks: Mapping[int, Slot]
    learning_rates: Mapping[int, float]
    pools: list[PoolSpec]
    stats: UpdateStats
    graded: Mapping[int, Graded]


@dataclasses.dataclass(frozen=True)
class DispatchedTurns:
    """Turns of a round that are not followed by an update: their global batches continue in the
    next round, or the plan of the round has been discarded. Tasks are given by slot number.

    Attributes:
      left: the tasks that had left when the round had begun.
      marker: arrays that are ready when the round has ended, from `Executor.marker`.
      ended: for a discarded plan, indices of its trained microbatches; else None.
    """

    plan: RoundPlan
    tasks: Mapping[int, Slot]
    left: Mapping[int, Slot]
    marker: Any = ()
    ended: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True)
class DispatchedEvaluation:
    """Turns of measurements of held-out losses whose results have not been fetched. Keys are slot
    numbers.

    Attributes:
      index: number of rounds that have been dispatched.
      measured: the measurements to which the turns belong.
      ended: the slots whose measurements end with these turns.
      adapters: functions that wait for the measured adapter and return its arrays by path, for
        tasks of `ended` that keep their best adapter.
      scores: function that waits for the scores of the samples' tokens, by slot.
      tokens: numbers of tokens of the chunks with held-out samples.
    """

    index: int
    tasks: Mapping[int, Slot]
    measured: Mapping[int, Measuring]
    ended: frozenset[int]
    adapters: Mapping[int, Callable[[], SlotArrays]]
    scores: Callable[[], Mapping[int, list[Scores]]]
    tokens: Mapping[int, int]


class RoundResults:
    """Fetches the results of updates, and records them in the progress of their tasks."""

    def __init__(self, max_bad_steps: int):
        self.computed = ComputedTokens()
        self._max_bad_steps = max_bad_steps
        self._dispatched: list[DispatchedUpdate | DispatchedTurns] = []
        self._measured: list[DispatchedEvaluation] = []
        # Results that have been fetched and not yet taken.
        self._fetched: list[TaskUpdate] = []
        self._evaluations: list[TaskEvaluation] = []
        # Computed tokens of the rounds whose updates were taken last.
        self._taken = Computed([], {}, {})

    def add(self, dispatched: DispatchedUpdate | DispatchedTurns) -> None:
        if isinstance(dispatched, DispatchedUpdate):
            for slot in dispatched.tasks.values():
                slot.awaited += 1
        self._dispatched.append(dispatched)

    def add_evaluation(self, evaluation: DispatchedEvaluation) -> None:
        self._measured.append(evaluation)

    def awaits(self, slot: Slot) -> bool:
        return any(slot is awaited for awaited in self._awaited)

    @property
    def awaited(self) -> set[str]:
        return {slot.name for slot in self._awaited}

    @property
    def _awaited(self) -> Iterator[Slot]:
        for results in (*self._dispatched, *self._measured):
            yield from results.tasks.values()
            if isinstance(results, DispatchedTurns):
                yield from results.left.values()

    def fetch(self) -> Iterator[DispatchedUpdate]:
        """Waits for everything that has been added and records the results. Yields each update once
        it is recorded. Raises JaxRuntimeError if a round has failed on the device."""
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
            self._record_evaluation(self._measured[0], self._measured[0].scores())
            del self._measured[0]

    def take(self) -> list[TaskUpdate]:
        fetched, self._fetched = self._fetched, []
        self._taken = self.computed.take()
        return fetched

    def take_computed(self) -> Computed:
        """The computed tokens of the rounds whose updates the last call of `take` returned. They
        are dropped at the next call of `take`."""
        taken, self._taken = self._taken, Computed([], {}, {})
        return taken

    def take_evaluations(self) -> list[TaskEvaluation]:
        fetched, self._evaluations = self._evaluations, []
        return fetched

    def _record(self, update: DispatchedUpdate, stats: UpdateStats) -> None:
        for number, slot in update.tasks.items():
            slot.awaited -= 1
            self.computed.count(number, slot, update.plan)
            if not slot.running:
                continue
            graded = update.graded.get(number)
            done = TaskUpdate(
                round=update.index,
                task=slot.name,
                task_step=update.plan.steps[number] + 1,
                loss=graded.loss if graded else float(stats.sums[number, 0]),
                lr=update.learning_rates[number],
                grad_norm=float(stats.grad_norm[number]),
                target_tokens=update.plan.target_tokens[number],
                tokens=update.plan.tokens[number],
                computed_tokens=slot.computed.pop(update.plan.steps[number]),
                skipped=not stats.applied[number],
                metrics=graded.metrics if graded else _metrics(update.plan, number, slot, stats),
            )
            slot.count_seconds(begins=True)
            # A task that gets its batches one by one may get another one.
            is_driven = isinstance(slot.prepared.batches, GivenBatches)
            steps = sys.maxsize if is_driven else slot.steps
            record_update(slot.progress, done, steps, self._max_bad_steps)
            if not slot.prepared.eval_samples:
                _succeed_after(done.task_step, slot)
            self._fetched.append(done)

    def _record_turns(self, turns: DispatchedTurns) -> None:
        plan, whole, microbatches = turns.plan, turns.plan.steps, turns.plan.microbatches
        if turns.ended is not None:
            # Turns that have been trained completely are not planned again.
            whole = plan.trained_turns(turns.ended)
            microbatches = [microbatches[i] for i in turns.ended]

        def trained(number: int) -> int:
            return sum(each.trained_tokens.get(number, 0) for each in microbatches)

        for number, slot in turns.tasks.items():
            if number in whole:
                self.computed.count(number, slot, plan)
            else:
                self.computed.count_part(slot, plan.steps[number], trained(number))
        for number, slot in turns.left.items():
            self.computed.count_in_vain(slot, plan.steps[number], trained(number))

    def _record_evaluation(
        self, evaluation: DispatchedEvaluation, scores: Mapping[int, list[Scores]]
    ) -> None:
        for number, slot in evaluation.tasks.items():
            measured = evaluation.measured[number]
            measured.scores += scores[number]
            measured.tokens += evaluation.tokens[number]
            self.computed.count_held_out(slot, measured.step, evaluation.tokens[number])
            slot.count_seconds()
            if number in evaluation.ended:
                self.computed.count_measured(slot, measured.step, measured.tokens)
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
        progress, task, step = slot.progress, slot.prepared.task, measured.step
        if measured.training is not None:
            log_probs = of_targets(measured.batch, measured.scores)
            slot.reference = Reference.of(slot.prepared, log_probs, measured.held_out)
        if not measured.held_out:
            return
        known = slot.reference.of_held_out(slot.prepared) if slot.reference else None
        held_out = measured.scores[: measured.held_out]
        graded = grade(task.objective, slot.prepared.eval_samples, held_out, known)
        compared, loss = Comparison(task.best_metric), graded.loss
        value = compared.value(loss, graded.metrics) if math.isfinite(loss) else None
        before = compared.value(progress.best_loss, progress.best_metrics)
        best = step > 0 and compared.cost(value) < compared.cost(before)
        tokens = slot.held_out_tokens
        done = TaskEvaluation(index, slot.name, step, loss, tokens, best, graded.metrics)
        _succeed_after(step, slot)
        record_evaluation(progress, done, task)
        if step == slot.pause_after:
            progress.rung_values.append(None if math.isinf(compared.cost(value)) else value)
        if best and adapter:
            slot.best = adapter
        self._evaluations.append(done)


def of_targets(
    samples: Sequence[Sample], scores: Sequence[Scores], column: int = 0
) -> list[Float[np.ndarray, " targets"]]:
    """The log-probabilities of the target tokens of samples, or another column of their scores,
    float64."""
    pairs = zip(samples, scores, strict=True)
    return [found[sample.target_mask[1:], column].astype(np.float64) for sample, found in pairs]


def grade(
    objective: Objective,
    samples: Sequence[Sample],
    scores: Sequence[Scores],
    reference: Known | None,
    recorded: Recorded | None = None,
) -> Graded:
    """The objective of a global batch, or of all held-out samples. `recorded` may be left out."""
    return objective.grade(
        of_targets(samples, scores),
        reference,
        recorded or recorded_of(objective, samples),
        of_targets(samples, scores, column=1),
    )


def _metrics(plan: RoundPlan, number: int, slot: Slot, stats: UpdateStats) -> Mapping[str, float]:
    return slot.prepared.task.objective.metrics(
        stats.sums[number],
        plan.target_tokens[number],
        plan.samples[number],
        plan.recorded[number],
    )


def _succeed_after(step: int, slot: Slot) -> None:
    if slot.running and step == slot.steps:
        slot.progress.status = "succeeded"
        if slot.steps < slot.prepared.steps:
            stop_in_time(slot.progress)
