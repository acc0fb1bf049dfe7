"""An engine whose tasks are all known: there may be more tasks than places, they may wait for each
other at rungs, and the engine shrinks when they have ended."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmux.errors import OutOfDeviceMemory
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.peft.leaves import named_leaves

from .brackets import Bracket, reason_to_stop, refuse_brackets
from .engine import Engine
from .engine_options import EngineSize
from .prepared_task import PreparedTask
from .progress import TaskProgress, TaskUpdate, stop_early
from .shrinking import Shrinking
from .size_ahead import SizeAhead
from .slot import Slot
from .suspended_task import SuspendedTask, best_arrays, without_best
from .train_state import SlotState

_log = logging.getLogger("jaxmux")


class QueuedEngine(Engine):
    """An engine that also knows tasks without a place. They begin in the order of their
    registration, when another task has ended or waits at a rung. A task gets the same bits as with
    a place from the beginning (on CPU; see "Why a task's adapter does not depend on its
    neighbours" in docs/design.md).

    All methods treat tasks with and without a place alike. A task that has ended keeps its place
    until another one needs it, or until there are fewer slots. `options.reserved` has to have room
    for every task in any slot, so that programs are compiled once for each size.
    """

    def __init__(
        self,
        *arguments: Any,
        places: int,
        brackets: Sequence[Bracket] = (),
        shrinking: Shrinking | None = None,
        **keywords: Any,
    ):
        """Creates an engine without tasks.

        Args:
          *arguments, **keywords: as for `Engine`.
          places: number of tasks that train at the same time, at most `options.reserved.slots`.
          brackets: tasks that compete in successive halving. Each of them has to be registered
            before training begins.
          shrinking: decides when the engine gets smaller; None keeps its size.
        """
        super().__init__(*arguments, **keywords)
        self._brackets = tuple(brackets)
        self._places = places
        self._shrinking = shrinking
        self._ahead: SizeAhead | None = None
        # By name, the tasks without a place; and the names of all tasks, in their order.
        self._outside: dict[str, SuspendedTask] = {}
        self._order: list[str] = []
        # The tasks that have never had a place.
        self._new: set[str] = set()

    def register_tasks(self, tasks: Sequence[PreparedTask], begin: bool = True) -> None:
        """Adds tasks, which get places when the next round begins. `begin` has no effect, because
        initial adapters are made only then."""
        self._refuse_stages({f"task {p.task.name!r}": p.pool for p in tasks})
        refuse_brackets(self._brackets, {p.task.name: bool(p.eval_samples) for p in tasks})
        for prepared in tasks:
            prepared.refuse_rows_of(self.options.shape.row_len)
            name, slot = prepared.task.name, Slot(prepared, TaskProgress())
            initial = _initial(prepared, self._slots.specs_of(slot))
            self._outside[name] = SuspendedTask(slot, initial)
            self._order.append(name)
            self._new.add(name)
        self._make_room([])
        self._slots.add([])
        self._slots.coming = {slot.kind.optimizer for slot in map(self._slot, self._order)}

    def begin_tasks(self) -> None:
        """Does nothing: initial adapters are made when tasks get their places."""

    def begin_evaluation(self, names: Sequence[str]) -> None:
        """Measures held-out losses as `Engine` does, of tasks with a place. Those before training
        are measured when a task gets its first place."""
        super().begin_evaluation([name for name in names if name not in self._outside])

    @property
    def finished(self) -> bool:
        """True if every task has ended or has had its last step and measurement dispatched."""
        return super().finished and not any(
            slot.running and (self._steps_of(slot) < slot.steps or slot.measuring)
            for slot in map(self._slot, self._order)
        )

    def train_round(
        self, stop: Callable[[], bool] = lambda: False, stream: bool = True
    ) -> list[TaskUpdate]:
        """Decides the rungs that all their tasks have reached, gets smaller if few tasks are left,
        gives places to tasks that wait, and trains a round as `Engine` does."""
        if self._is_between_rounds:
            self._decide_rungs()
            self._shrink()
            self._give_places()
        following = self._expected_size()
        # What has begun of the next round would end before the state moves.
        stream = stream and (following == self.size or not self._some_end_now())
        updates = super().train_round(stop, stream)
        if self._is_between_rounds:
            self._compile_ahead(following)
        return updates

    @property
    def names(self) -> list[str]:
        """Names of all tasks, in the order of their registration."""
        return list(self._order)

    def prepared(self, name: str) -> PreparedTask:
        return self._slot(name).prepared

    def progress(self, name: str) -> TaskProgress:
        return self._slot(name).progress

    @property
    def begun(self) -> list[str]:
        return [name for name in self._order if name not in self._new]

    def accumulated(self, name: str) -> list[int]:
        if name in self._outside:
            return list(self._outside[name].accumulated)
        return super().accumulated(name)

    def adapter(self, name: str) -> Adapter:
        if name not in self._outside:
            return super().adapter(name)
        return self._adapter_of(name, self._outside[name].arrays())

    def result(
        self, name: str, snapshot: Callable[[], SlotArrays] | None = None
    ) -> Callable[[], Adapter]:
        if name not in self._outside:
            return super().result(name, snapshot)
        own = self._outside[name]
        return lambda: self._adapter_of(name, (own.slot.best or own.arrays)())

    def task_arrays(self, name: str) -> SlotArrays:
        if name not in self._outside:
            return super().task_arrays(name)
        own, specs = self._outside[name], named_leaves(self.task_specs(name))
        empty = {path: np.zeros(spec.shape, spec.dtype) for path, spec in specs.items()}
        return empty | own.arrays() | best_arrays(own.slot)()

    def task_specs(self, name: str) -> SlotState:
        return self._slots.specs_of(self._slot(name))

    def restore_task(
        self,
        name: str,
        arrays: SlotArrays,
        progress: TaskProgress,
        accumulated: Sequence[int] = (),
    ) -> None:
        """Puts a registered task without a place back to the moment at which its checkpoint was
        taken. It gets a place when the next round begins."""
        slot = self._outside[name].slot
        slot.restore(progress)
        own, slot.best = without_best(arrays)
        self._outside[name] = SuspendedTask(slot, lambda: own, accumulated)
        self._new.discard(name)

    def _slot(self, name: str) -> Slot:
        return self._outside[name].slot if name in self._outside else self._slots.named(name)

    def _steps_of(self, slot: Slot) -> int:
        return slot.progress.step + self._results.steps_awaited(slot)

    def _adapter_of(self, name: str, arrays: SlotArrays) -> Adapter:
        return adapter_of(arrays, self.prepared(name).task.adapter, self.backbone.config)

    def _decide_rungs(self) -> None:
        """Stops the tasks that have lost at a rung; the others train up to the next one."""
        for bracket in self._brackets:
            slots = {name: self._slot(name) for name in bracket.tasks}
            running = [slot for slot in slots.values() if slot.running]
            if running and not any(map(self._has_steps, running)):
                # Nothing of the bracket can go on before these results are known.
                self._fetch()
            progress = {name: slot.progress for name, slot in slots.items()}
            rungs = bracket.decided(progress, self._results.awaited)
            following = bracket.rungs[len(rungs)] if len(rungs) < len(bracket.rungs) else None
            for name, slot in slots.items():
                reason = reason_to_stop(rungs, name) if slot.running else None
                if reason:
                    stop_early(slot.progress, reason, slot.prepared.task.keep_best)
                slot.pause_after = following

    @property
    def _is_between_rounds(self) -> bool:
        return self._position.current is None or self._position.begun_ahead

    def _ended(self) -> dict[str, int]:
        """By name of every task that trains no more, its number of steps."""
        slots = {name: self._slot(name) for name in self._order}
        return {
            name: slot.steps if slot.running else slot.progress.step
            for name, slot in slots.items()
            if not slot.running or (self._steps_of(slot) >= slot.steps and not slot.measuring)
        }

    def _shrink(self) -> None:
        """Takes the size that suffices for the tasks that are left."""
        if self._shrinking is None:
            return
        ended = self._ended()
        size = self._shrinking.size(ended)
        if size == self.size or size.rows >= self.options.shape.rows:
            return
        idle = [slot.name for _, slot in self._slots if slot.name in ended]
        for name in idle[: max(0, len(self._slots.names) - size.slots)]:
            self._outside[name] = self.suspend(name)
        ahead, self._ahead = self._ahead, None
        fitting = ahead if ahead and ahead.sizes == (self.size, size) else None
        try:
            self.resize(size, fitting)
        except OutOfDeviceMemory as e:
            # To move an array, a device holds it twice.
            _log.warning("%s; the engine keeps its size", e)
            self._shrinking = None
            return
        self._places = size.slots
        _log.info("%d slots, microbatches of %d rows", *size)

    def _expected_size(self) -> EngineSize:
        """The size after the next rung or the next last step, if the tasks that have the lowest
        losses now go on at the rung and no other task ends."""
        ended = self._ended()
        left = {name: self._slot(name) for name in self._order if name not in ended}
        if self._shrinking is None or not left:
            return self.size
        step = min(slot.steps_for_now for slot in left.values())
        for bracket in self._brackets:
            if step in bracket.rungs:
                come = sorted((name for name in bracket.tasks if name in left), key=self._loss_of)
                stopped = come[bracket.kept(bracket.rungs.index(step)) :]
                ended |= dict.fromkeys(stopped, step)
        ended |= {name: step for name, slot in left.items() if slot.steps == step}
        size = self._shrinking.size(ended)
        return size if size.rows < self.options.shape.rows else self.size

    def _loss_of(self, name: str) -> float:
        loss = self.progress(name).eval_loss
        return math.inf if loss is None or math.isnan(loss) else loss

    def _some_end_now(self) -> bool:
        """Whether tasks train their last step before they end, or wait at a rung, in the next
        round."""
        slots = [slot for _, slot in self._slots if slot.running]
        return any(self._steps_of(slot) + 1 == slot.steps_for_now for slot in slots)

    def _compile_ahead(self, size: EngineSize) -> None:
        """Begins to compile the programs for the next size beside training."""
        sizes = self.size, size
        if size == self.size or jax.process_count() > 1:
            return
        if self._ahead is None or (self._ahead.ready and self._ahead.sizes != sizes):
            self._ahead = self.compile_ahead(size)

    def _has_steps(self, slot: Slot) -> bool:
        """Whether a task has something to train before it has to wait."""
        return slot.running and self._steps_of(slot) < slot.steps_for_now

    def _is_unmeasured(self, slot: Slot) -> bool:
        """Whether a task has come to a rung, and its loss there is neither known nor awaited. So it
        is if a run was stopped within the round before, or if a task that had ended there has got
        more steps."""
        if not slot.running or slot.pause_after != self._steps_of(slot):
            return False
        (bracket,) = (own for own in self._brackets if slot.name in own.tasks)
        known = len(slot.progress.rung_losses) > bracket.rungs.index(slot.pause_after)
        return not (known or slot.measuring or self._results.awaits(slot))

    def _wants_place(self, slot: Slot) -> bool:
        measured = slot.running and slot.measuring is not None
        return self._has_steps(slot) or measured or self._is_unmeasured(slot)

    def _give_places(self) -> None:
        """Gives places to waiting tasks: free ones, then those of tasks that have nothing to train
        for now."""
        inside = [slot for _, slot in self._slots]
        idle = [slot.name for slot in inside if not self._wants_place(slot)]
        free = self._places - len(inside)
        entering: list[str] = []
        for name in self._order:
            if name not in self._outside or not self._wants_place(self._outside[name].slot):
                continue
            if free:
                free -= 1
            elif idle:
                leaving = idle.pop(0)
                self._outside[leaving] = self.suspend(leaving)
            else:
                break
            entering.append(name)
        for name in entering:
            self.resume(self._outside[name])
            del self._outside[name]
        measured = [
            slot.name
            for _, slot in self._slots
            if slot.name in self._new or self._is_unmeasured(slot)
        ]
        self._new.difference_update(measured)
        self.begin_evaluation(measured)


def _initial(prepared: PreparedTask, specs: SlotState) -> Callable[[], SlotArrays]:
    """A function that makes the arrays with which a task begins, by path. Those that are left out
    are empty."""

    def make() -> SlotArrays:
        described = named_leaves(specs).items()
        counts = {path: np.zeros((), spec.dtype) for path, spec in described if not spec.axes}
        adapter = named_leaves(prepared.make_adapter())
        return counts | {f"adapter/{path}": array for path, array in adapter.items()}

    return make
