"""Decides when held-out losses are measured and when tasks stop because of their time limit."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor as Threads

import numpy as np
from jaxtyping import Int

from jaxmux.data.stored_samples import stream_lengths

from ..devices.executor import Executor
from ..state.slots import Measuring, Slot, Slots
from .results import EVALUATION, DeviceTime, DispatchedEvaluation, RoundResults
from .rounds import RoundPlan, turn_from


class HeldOut:
    """Dispatches the measurements of held-out losses. Their results arrive with those of updates,
    and decide whether a task stops early.

    If the held-out data of a task have more tokens than `most_tokens`, they are measured in several
    turns, one in each round. The task trains again when all turns have been dispatched; other tasks
    do not wait for it.
    """

    def __init__(
        self,
        slots: Slots,
        results: RoundResults,
        executor: Executor,
        copies: Threads,
        most_tokens: int | None,
        device_time: DeviceTime,
    ):
        self._slots, self._results = slots, results
        self._executor, self._copies = executor, copies
        self._most_tokens, self._device_time = most_tokens, device_time

    @property
    def unfinished(self) -> list[int]:
        return [n for n, slot in self._slots if slot.measuring and slot.progress.status != "failed"]

    def takes_turns(self, slot: Slot) -> bool:
        if self._most_tokens is None:
            return False
        return int(self._lengths(slot).sum(dtype=np.int64)) > self._most_tokens

    def _lengths(self, slot: Slot) -> Int[np.ndarray, " samples"]:
        """The number of tokens that each held-out sample counts in a turn."""
        least = self._executor.replicas[0].shape.least_tokens
        return np.maximum(stream_lengths(slot.prepared.eval_samples), least)

    def end_round(self, plan: RoundPlan, begun: RoundPlan | None, rounds: int) -> None:
        """After a round has been dispatched, stops tasks that have reached their time limit, begins
        the measurements that are due, and continues those that have begun. `begun` is the round
        after `plan`, if it has begun, and `rounds` the number of dispatched rounds."""
        trained = plan.steps | (begun.steps if begun else {})
        self._stop_in_time({n: step + 1 for n, step in trained.items()})
        updated = {n: plan.steps[n] for n in plan.steps if n in plan.ends and self._slots.runs(n)}
        self._begin(n for n, step in updated.items() if self._slots[n].is_measured_after(step + 1))
        self.go_on(rounds)

    def measure(self, numbers: Sequence[int], rounds: int) -> None:
        """Begins to measure the held-out losses of tasks, with the adapters after everything that
        has been dispatched, and dispatches the first turns. Tasks without held-out samples are left
        out."""
        self._begin(n for n in numbers if self._slots[n].prepared.eval_samples)
        self._dispatch([n for n in self.unfinished if n in numbers], rounds)

    def go_on(self, rounds: int) -> None:
        """Dispatches the next turn of every measurement that has begun."""
        begun = {n: self._slots[n].measuring.step for n in self.unfinished}
        self._stop_in_time({n: step for n, step in begun.items() if step})
        self._dispatch(list(begun), rounds)

    def _begin(self, numbers: Iterable[int]) -> None:
        for slot in map(self._slots.__getitem__, numbers):
            slot.measuring = slot.measuring or Measuring(slot.steps_dispatched)

    def _dispatch(self, numbers: Sequence[int], rounds: int) -> None:
        if not numbers:
            return
        tasks = {n: self._slots[n] for n in numbers}
        measured = {n: slot.measuring for n, slot in tasks.items()}
        turns = {n: self._next_turn(slot) for n, slot in tasks.items()}
        prepared = {n: slot.prepared for n, slot in tasks.items()}
        begun = time.monotonic()
        dispatched = self._executor.evaluate(prepared, turns)
        losses = self._device_time.add(EVALUATION, begun, dispatched.losses).result
        ended, adapters = [], {}
        for n, slot in tasks.items():
            slot.measuring.samples = turns[n].stop
            if turns[n].stop < len(slot.prepared.eval_samples):
                continue
            ended.append(n)
            if slot.prepared.task.keep_best and slot.measuring.step:
                copied = self._slots.copy_to_host(slot.name, ("adapter",))
                adapters[n] = self._copies.submit(copied).result
            slot.measuring = None
        self._results.add_evaluation(
            DispatchedEvaluation(
                rounds, tasks, measured, frozenset(ended), adapters, losses, dispatched.tokens
            )
        )

    def _next_turn(self, slot: Slot) -> range:
        return turn_from(slot.measuring.samples, self._lengths(slot), self._most_tokens)

    def _stop_in_time(self, steps: Mapping[int, int]) -> None:
        """Stops tasks that have reached their time limit, each after its number of steps in
        `steps`."""
        for number, step in steps.items():
            if not self._slots.runs(number):
                continue
            slot = self._slots[number]
            longest = slot.prepared.task.max_seconds
            if longest and slot.stop_after is None and slot.progress.seconds >= longest:
                slot.stop_after = step
