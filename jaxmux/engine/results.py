"""The results of dispatched updates, which the host fetches one round later."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.peft import SlotArrays
from jaxmux.planner.costs.pool_spec import PoolSpec

from .computed_tokens import Computed, ComputedTokens
from .due_updates import UpdateStats
from .progress import (
    TaskEvaluation,
    TaskUpdate,
    record_evaluation,
    record_update,
    stop_in_time,
)
from .rounds import RoundPlan
from .slot import Measuring, Slot


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
        self._dispatched.append(dispatched)

    def add_evaluation(self, evaluation: DispatchedEvaluation) -> None:
        """Adds turns of measurements that have been dispatched after all updates."""
        self._measured.append(evaluation)

    def steps_awaited(self, slot: Slot) -> int:
        """Number of updates of this task whose results have not been fetched: 0 or 1."""
        updates = (own for own in self._dispatched if isinstance(own, DispatchedUpdate))
        return sum(slot is own for update in updates for own in update.tasks.values())

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
            self.computed.count(number, slot, update.plan)
            if not slot.running:
                continue
            done = TaskUpdate(
                step=update.index,
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
