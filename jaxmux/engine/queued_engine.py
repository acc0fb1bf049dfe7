"""An engine whose tasks are all known in advance. There may be more tasks than slots, tasks may
wait for each other at the rungs of successive halving (Jamieson & Talwalkar 2016, Algorithm 1), and
the engine shrinks when tasks have ended."""

import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmux.errors import OutOfDeviceMemory
from jaxmux.objectives import LOSS, Comparison
from jaxmux.peft import Adapter, SlotArrays, adapter_of
from jaxmux.peft.leaves import named_leaves
from jaxmux.planner.packing import PricedShape
from jaxmux.tasks import TaskError

from .devices.programs_ahead import ProgramsAhead
from .engine import Engine
from .engine_options import EngineSize
from .state.slots import Slot, SuspendedTask, kept_arrays, without_kept
from .state.train_state import SlotState
from .tasks.prepared_task import PreparedTask
from .tasks.progress import TaskProgress, TaskUpdate, stop_early


class Rung(NamedTuple):
    """A rung whose tasks have all been measured after `step` steps. `ranking` has the names of the
    tasks that reached it, the best one first. The first `kept` of them continue."""

    step: int
    ranking: tuple[str, ...]
    kept: int


class Bracket(NamedTuple):
    """Tasks that compete in successive halving. At each rung, those with the worst values of a
    metric of held-out data stop. Of equal values, that of the earlier task is better. Decisions
    depend only on the tasks' progress, so a continued run, and every process, decides in the same
    way.

    Attributes:
      tasks: names of the tasks.
      rungs: for each rung, the number of steps after which tasks are compared, ascending.
      factor: at each rung, the number of tasks is divided by this factor.
      metric: the `Task.best_metric` of the tasks.
    """

    tasks: tuple[str, ...]
    rungs: tuple[int, ...]
    factor: int
    metric: str = LOSS

    def kept(self, rung: int) -> int:
        """The most tasks that continue after the rung with this index."""
        return max(1, len(self.tasks) // self.factor ** (rung + 1))

    def decided(
        self, progress: Mapping[str, TaskProgress], awaited: Collection[str] = ()
    ) -> list[Rung]:
        """The rungs that all their tasks have reached, in order. `awaited` are the names of tasks
        whose last results have not arrived."""
        decided, come = [], self.tasks
        for i, step in enumerate(self.rungs):
            if not all(_is_measured(progress[name], i, name in awaited) for name in come):
                break
            # Sorting keeps the order of equal values.
            ranking = tuple(sorted(come, key=lambda name: self._cost_at(progress[name], i)))
            decided.append(Rung(step, ranking, min(self.kept(i), len(ranking))))
            come = tuple(name for name in come if name in ranking[: decided[-1].kept])
        return decided

    def cost(self, progress: TaskProgress) -> float:
        """A number that is the lower, the better the last measurement of a task is."""
        compared = Comparison(self.metric)
        return compared.cost(compared.value(progress.eval_loss, progress.eval_metrics))

    def reason_to_stop(self, rungs: Sequence[Rung], name: str) -> str | None:
        """Why a task stops at one of the decided rungs; None if it continues."""
        for number, rung in enumerate(rungs, start=1):
            if name in rung.ranking[rung.kept :]:
                place = rung.ranking.index(name) + 1
                return (
                    f"at rung {number} (step {rung.step}), {_ordinal(place)} of "
                    f"{len(rung.ranking)} by {Comparison(self.metric).label}"
                )
        return None

    def _cost_at(self, progress: TaskProgress, rung: int) -> float:
        """The cost by which a task is ranked: that at the rung, or the last one if the task ended
        before."""
        if len(progress.rung_values) > rung:
            return Comparison(self.metric).cost(progress.rung_values[rung])
        return math.inf if progress.status == "failed" else self.cost(progress)


def refuse_brackets(brackets: Sequence[Bracket], measured: Mapping[str, bool]) -> None:
    """Raises TaskError if a task of a bracket has no held-out samples; `measured` tells by name
    whether it has."""
    for bracket in brackets:
        for name in bracket.tasks:
            if bracket.rungs and not measured[name]:
                raise TaskError(
                    f"task {name!r}: it has no held-out samples, by which first_rung compares tasks"
                )


def rung_of(reason: str | None) -> int | None:
    """The number, from 1, of the rung at which a task has stopped, given its
    `TaskProgress.stopped_early`; None if it has not stopped at a rung."""
    match = re.match(r"at rung (\d+) ", reason or "")
    return int(match[1]) if match else None


def _is_measured(progress: TaskProgress, rung: int, awaited: bool) -> bool:
    return len(progress.rung_values) > rung or (progress.status != "running" and not awaited)


def _ordinal(n: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{'th' if n % 100 in (11, 12, 13) else ending}"


# Programs of another size are compiled only if a task has at least this number of steps left.
_LEAST_STEPS = 8
# They are compiled only if microbatches get at most this fraction of their present rows.
_MOST_ROWS = 0.75


class Shrinking(NamedTuple):
    """Decides when an engine gets fewer slots, and microbatches of fewer rows, because tasks have
    ended. The size depends only on the numbers of steps after which tasks have ended, so a run that
    was interrupted continues with the size that it would have had.

    Attributes:
      first: the size with which the run begins.
      places: number of tasks that train at the same time at first.
      shape_of: function from the names of tasks to the shape class in which they train fastest. The
        shape class has at most the rows of the first one, and is otherwise the same.
      steps: by name, the number of steps of every task of the run.
    """

    first: EngineSize
    places: int
    shape_of: Callable[[tuple[str, ...]], PricedShape]
    steps: Mapping[str, int]

    def size(self, ended: Mapping[str, int]) -> EngineSize:
        """The size of the engine. `ended` holds the tasks that no longer train: by name, the number
        of steps after which each of them ended."""
        size = self.first
        for step, left in self._phases(ended):
            if max(self.steps[name] for name in left) - step < _LEAST_STEPS:
                break
            rows = self.shape_of(left[: self.places]).shape.rows
            if rows <= _MOST_ROWS * size.rows:
                size = EngineSize(min(self.places, len(left)), rows)
        return size

    def _phases(self, ended: Mapping[str, int]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Yields, each time that tasks have ended, the step and the remaining tasks."""
        if ended and len(self.steps) > self.places:
            # Tasks that wait for a slot begin late, so their steps do not tell which ended first.
            left = {0: tuple(name for name in self.steps if name not in ended)}
        else:
            left = {
                step: tuple(name for name in self.steps if ended.get(name, math.inf) > step)
                for step in sorted(set(ended.values()))
            }
        return ((step, names) for step, names in left.items() if names)

    def expected(self, brackets: Sequence[Bracket]) -> Iterator["ExpectedSize"]:
        """Yields the sizes that the engine will get if every task ends at its last step or at a
        rung, and the first tasks of each bracket continue."""
        rungs = {step for bracket in brackets for step in bracket.rungs}
        ended: dict[str, int] = {}
        size = self.first
        for step in sorted({*rungs, *self.steps.values()}):
            last = [name for name, steps in self.steps.items() if steps == step]
            ended |= {name: step for name in last if name not in ended}
            for bracket in brackets:
                if step in bracket.rungs:
                    come = [name for name in bracket.tasks if name not in ended]
                    stopped = come[bracket.kept(bracket.rungs.index(step)) :]
                    ended |= dict.fromkeys(stopped, step)
            if (new := self.size(ended)) != size:
                size = new
                left = tuple(name for name in self.steps if name not in ended)
                yield ExpectedSize(step, len(left), self.shape_of(left[: self.places]))


class ExpectedSize(NamedTuple):
    """The shape class that an engine is expected to get when tasks have ended after `step` steps,
    and the number of tasks that still train then."""

    step: int
    tasks: int
    shape: PricedShape


_log = logging.getLogger("jaxmux")


class QueuedEngine(Engine):
    """An engine that also knows tasks without a slot. They begin in the order of their
    registration, when another task has ended or waits at a rung. A task gets the same bits as with
    a slot from the beginning (on CPU; see "Why a task's adapter does not depend on its neighbours"
    in docs/design.md).

    All methods treat tasks with and without a slot alike. A task that has ended keeps its slot
    until another one needs it, or until there are fewer slots. `options.reserved` must have room
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
          brackets: tasks that compete in successive halving. Each of them must be registered before
            training begins.
          shrinking: decides when the engine gets smaller; None keeps its size.
        """
        super().__init__(*arguments, **keywords)
        self._brackets = tuple(brackets)
        self._places = places
        self._shrinking = shrinking
        self._ahead: ProgramsAhead | None = None
        # By name, the tasks without a slot; and the names of all tasks, in their order.
        self._outside: dict[str, SuspendedTask] = {}
        self._order: list[str] = []
        # The tasks that have never had a slot.
        self._new: set[str] = set()

    def register_tasks(self, tasks: Sequence[PreparedTask], begin: bool = True) -> None:
        """Adds tasks, which get slots when the next round begins. `begin` has no effect, because
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
        """Does nothing, because initial adapters are made when tasks get their slots."""

    def begin_evaluation(self, names: Sequence[str]) -> None:
        """Measures held-out losses as `Engine` does, but only of tasks with a slot. A task is
        measured before training when it gets its first slot."""
        super().begin_evaluation([name for name in names if name not in self._outside])

    @property
    def finished(self) -> bool:
        return super().finished and not any(
            slot.running and (slot.steps_dispatched < slot.steps or slot.measuring)
            for slot in map(self._slot, self._order)
        )

    def train_round(
        self, stop: Callable[[], bool] = lambda: False, stream: bool = True
    ) -> list[TaskUpdate]:
        """Decides the rungs that all their tasks have reached, shrinks the engine if few tasks are
        left, gives slots to waiting tasks, and trains a round as `Engine` does."""
        if self._is_between_rounds:
            self._decide_rungs()
            self._shrink()
            self._give_places()
        following = self._expected_size()
        # Before the state moves, started microbatches of the next round would have to end.
        stream = stream and (following == self.size or not self._some_end_now())
        updates = super().train_round(stop, stream)
        if self._is_between_rounds:
            self._compile_ahead(following)
        return updates

    @property
    def names(self) -> list[str]:
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
        suspended = self._outside[name]
        return lambda: self._adapter_of(name, (suspended.slot.best or suspended.arrays)())

    def task_arrays(self, name: str) -> SlotArrays:
        if name not in self._outside:
            return super().task_arrays(name)
        suspended, specs = self._outside[name], named_leaves(self.task_specs(name))
        empty = {path: np.zeros(spec.shape, spec.dtype) for path, spec in specs.items()}
        return empty | suspended.arrays() | kept_arrays(suspended.slot)()

    def task_specs(self, name: str) -> SlotState:
        return self._slots.specs_of(self._slot(name))

    def restore_task(
        self,
        name: str,
        arrays: SlotArrays,
        progress: TaskProgress,
        accumulated: Sequence[int] = (),
    ) -> None:
        """Puts a registered task without a slot back to the moment at which its checkpoint was
        taken. It gets a slot when the next round begins."""
        slot = self._outside[name].slot
        current, (slot.best, slot.reference) = without_kept(arrays)
        slot.restore(progress)
        self._outside[name] = SuspendedTask(slot, lambda: current, accumulated)
        self._new.discard(name)

    def _slot(self, name: str) -> Slot:
        return self._outside[name].slot if name in self._outside else self._slots.named(name)

    def _adapter_of(self, name: str, arrays: SlotArrays) -> Adapter:
        return adapter_of(arrays, self.prepared(name).task.adapter, self.backbone.config)

    def _decide_rungs(self) -> None:
        for bracket in self._brackets:
            slots = {name: self._slot(name) for name in bracket.tasks}
            running = [slot for slot in slots.values() if slot.running]
            if running and not any(map(self._has_steps, running)):
                # No task of the bracket can continue before these results are known.
                self._fetch()
            progress = {name: slot.progress for name, slot in slots.items()}
            rungs = bracket.decided(progress, self._results.awaited)
            following = bracket.rungs[len(rungs)] if len(rungs) < len(bracket.rungs) else None
            for name, slot in slots.items():
                reason = bracket.reason_to_stop(rungs, name) if slot.running else None
                if reason:
                    stop_early(slot.progress, reason, slot.prepared.task.keep_best)
                slot.pause_after = following

    @property
    def _is_between_rounds(self) -> bool:
        return self._position.current is None or self._position.begun_ahead

    def _ended(self) -> dict[str, int]:
        slots = {name: self._slot(name) for name in self._order}
        return {
            name: slot.steps if slot.running else slot.progress.step
            for name, slot in slots.items()
            if not slot.running or (slot.steps_dispatched >= slot.steps and not slot.measuring)
        }

    def _shrink(self) -> None:
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
            # A device holds an array twice while it is moved, so even shrinking takes memory.
            _log.warning("%s; the engine keeps its size", e)
            self._shrinking = None
            return
        self._places = size.slots
        _log.info("%d slots, microbatches of %d rows", *size)

    def _expected_size(self) -> EngineSize:
        """The size after the next rung or the next last step, if the tasks that are best now
        continue at the rung and no other task ends."""
        ended = self._ended()
        left = {name: self._slot(name) for name in self._order if name not in ended}
        if self._shrinking is None or not left:
            return self.size
        step = min(slot.steps_for_now for slot in left.values())
        for bracket in self._brackets:
            if step in bracket.rungs:
                come = [name for name in bracket.tasks if name in left]
                come.sort(key=lambda name: bracket.cost(self.progress(name)))
                stopped = come[bracket.kept(bracket.rungs.index(step)) :]
                ended |= dict.fromkeys(stopped, step)
        ended |= {name: step for name, slot in left.items() if slot.steps == step}
        size = self._shrinking.size(ended)
        return size if size.rows < self.options.shape.rows else self.size

    def _some_end_now(self) -> bool:
        """Whether a task ends or waits at a rung after the next round."""
        slots = [slot for _, slot in self._slots if slot.running]
        return any(slot.steps_dispatched + 1 == slot.steps_for_now for slot in slots)

    def _compile_ahead(self, size: EngineSize) -> None:
        sizes = self.size, size
        if size == self.size or jax.process_count() > 1:
            return
        if self._ahead is None or (self._ahead.ready and self._ahead.sizes != sizes):
            self._ahead = self.compile_ahead(size)

    def _has_steps(self, slot: Slot) -> bool:
        return slot.running and slot.steps_dispatched < slot.steps_for_now

    def _is_unmeasured(self, slot: Slot) -> bool:
        """Whether a task has reached a rung, and its loss there is neither known nor awaited. This
        happens if a run was stopped within the round before, or if a task that had ended there has
        been extended."""
        if not slot.running or slot.pause_after != slot.steps_dispatched:
            return False
        (bracket,) = (each for each in self._brackets if slot.name in each.tasks)
        known = len(slot.progress.rung_values) > bracket.rungs.index(slot.pause_after)
        return not (known or slot.measuring or self._results.awaits(slot))

    def _wants_place(self, slot: Slot) -> bool:
        measured = slot.running and slot.measuring is not None
        return self._has_steps(slot) or measured or self._is_unmeasured(slot)

    def _give_places(self) -> None:
        """Gives slots to waiting tasks: first free slots, then those of tasks that have nothing to
        train now."""
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
    def make() -> SlotArrays:
        described = named_leaves(specs).items()
        counts = {path: np.zeros((), spec.dtype) for path, spec in described if not spec.axes}
        adapter = named_leaves(prepared.make_adapter())
        return counts | {f"adapter/{path}": array for path, array in adapter.items()}

    return make
