"""The executor of several devices: a pipeline of stages that follows a schedule of the planner."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import SlotTable
from jaxmux.planner import PlanningError
from jaxmux.sharding import Pass, Passed, PlacedBackbone, evaluate, forward, walk
from jaxmux.sharding.stage_mesh import DATA
from jaxmux.sharding.stream_order import StreamOrder

from .compiled_stages import CompiledStages
from .engine_options import EngineOptions
from .executor import RoundOutcome
from .prepared_task import PreparedTask
from .round_table import SCHEDULES, round_table
from .rounds import RoundPlan, fill_microbatches, slot_table
from .stored_state import StoredState
from .updates import DueUpdates, update_parts


class _Queued(NamedTuple):
    """A microbatch that has not ended.

    Attributes:
      plan: its round.
      index: its index in the round.
      tables: the round's `SlotTable` on each stage.
    """

    plan: RoundPlan
    index: int
    tables: list[SlotTable]


class Pipeline:
    """Runs rounds on the stages of a `PlacedBackbone`: the `Executor` of several devices.

    The stages take the parts in turn: with S stages, part v lies on stage v mod S. The host
    dispatches the passes of a schedule; a stage runs what it was given in order, at its own pace.
    With 1F1B, rounds follow each other without a gap: a microbatch begins as soon as the tasks in
    it have been updated in the round before. With other schedules the pipeline is empty between two
    rounds.
    """

    def __init__(self, backbone: PlacedBackbone, options: EngineOptions, stored: StoredState):
        """Creates an executor; nothing is compiled yet.

        Args:
          backbone: the frozen backbone.
          options: the options of the engine.
          stored: the train state, in the parts of the backbone.

        Raises:
          PlanningError: the parts do not lie on the stages in turn, the stages have different
            numbers of data shards, or `options.schedule` is unknown or does not suit them.
        """
        self._backbone, self._options, self._stored = backbone, options, stored
        self._compiled = CompiledStages(backbone, options, stored)
        self._stages = self._compiled.stages
        stages, parts = len(self._stages), len(backbone.parts)
        in_turn = [self._stages[part % stages] for part in range(parts)]
        if in_turn != list(backbone.homes) or parts % stages:
            raise PlanningError("the parts of a backbone should lie on its stages in turn")
        if len({stage.shards for stage in self._stages}) > 1:
            raise PlanningError("all stages should have the same number of data shards (dp, fsdp)")
        if options.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise PlanningError(f"schedule should be one of {known}, found {options.schedule!r}")
        if options.remat == "none" and any(stage.weights.fsdp > 1 for stage in self._stages):
            raise PlanningError(
                "remat='none' would keep every layer's gathered weights, for which fsdp has no "
                "room; use remat='norms'"
            )
        if (options.schedule == "interleaved") != (parts > stages):
            raise PlanningError(
                f"schedule={options.schedule!r} does not suit {parts} parts on {stages} stages: "
                "several parts on a stage are interleaved"
            )
        # Microbatches that have not ended, by their number; numbers are never used again.
        self._queue: dict[int, _Queued] = {}
        self._known = 0
        # The order of passes: an endless one, or that of a table for a round.
        self._order = StreamOrder(stages) if options.schedule == "1f1b" else None
        self._tabled: Iterator[Pass] = iter(())
        # The round that has begun before the current one has ended, and its ended microbatches.
        self._ahead: RoundPlan | None = None
        self._ahead_done: list[int] = []
        # What travels between passes, by part and number of the microbatch.
        self._passed: dict[tuple[int, int], Passed] = {}
        self._residuals: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], jax.Array] = {}
        # True if a round ended in an exception, with microbatches between two parts.
        self._broken = False

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        return self._compiled.remat

    @property
    def shards(self) -> int:
        return self._compiled.shards

    def refuse_implementations(self, dropout: bool) -> None:
        if not (self._options.attention or self._options.grouped_lora):
            return
        compiled = self._compiled
        arguments = compiled.empty_microbatches()[0], compiled.empty_table(), None
        try:
            forward.trace(compiled.program(0, dropout), *compiled.forward_arguments(0, *arguments))
        except ValueError as e:
            raise PlanningError(str(e)) from None

    def place(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        return self._compiled.place(microbatches)

    @property
    def stages(self) -> int:
        return len(self._stages) if self._order else 1

    def run(
        self,
        plan: RoundPlan,
        done: list[int],
        stop: Callable[[], bool],
        due: Callable[[tuple[int, ...]], DueUpdates],
        following: Callable[[], RoundPlan | None],
    ) -> RoundOutcome:
        if self._broken:
            raise RuntimeError(
                "an earlier round ended in an exception; restore a checkpoint in a new engine"
            )
        # The flag stays if the call ends in an exception between two passes of a microbatch.
        self._broken = True
        outcome = self._run(plan, done, stop, due, following)
        self._broken = False
        return outcome

    def _run(self, plan, done, stop, due, following) -> RoundOutcome:
        self._compiled.compile(plan.dropout)
        if self._ahead is plan:
            self._ahead = None
        else:
            self._add(plan, [i for i in range(len(plan.microbatches)) if i not in done])
        left, updates = list(plan.updates), {}
        asked = stopped = False
        while True:
            while left and not stopped and all(i in done for i in range(left[0].after + 1)):
                slots = left.pop(0).slots
                updates[slots] = update_parts(self._stored, due(slots))
            if not left and not stopped and len(done) == len(plan.microbatches):
                break
            if not asked and not stopped and self._order and self._order.begun == self._known:
                asked, self._ahead, self._ahead_done = True, following(), []
                if self._ahead:
                    self._add(self._ahead, range(len(self._ahead.microbatches)))
            step = self._next(stopped, {slot for update in left for slot in update.slots})
            if step is None:
                break
            self._run_pass(step)
            if not step.forward and step.virtual_stage == 0:
                ended = self._queue.pop(step.microbatch)
                (done if ended.plan is plan else self._ahead_done).append(ended.index)
                stopped = stop() or stopped
        ahead = tuple(self._ahead_done) if self._ahead else ()
        if stopped:
            self._forget()
        return RoundOutcome(updates, ahead=ahead)

    def settle(self) -> tuple[int, ...]:
        if not self._ahead:
            return ()
        while step := self._next(True, set()):
            self._run_pass(step)
            if not step.forward and step.virtual_stage == 0:
                self._ahead_done.append(self._queue.pop(step.microbatch).index)
        ahead = tuple(self._ahead_done)
        self._forget()
        return ahead

    def recover(self) -> None:
        raise RuntimeError("a pipeline never reports that a round is lost")

    def _add(self, plan: RoundPlan, indices: Iterable[int]) -> None:
        """Puts microbatches of a plan behind those that are known."""
        tables, first = [stage.put(plan.slots, P()) for stage in self._stages], self._known
        for index in indices:
            self._queue[self._known] = _Queued(plan, index, tables)
            self._known += 1
        if not self._order and self._queue:
            samples = [plan.microbatches[q.index].samples for q in self._queue.values()]
            stages, parts = len(self._stages), len(self._backbone.parts)
            table = round_table(self._options.schedule, stages, parts, samples)
            self._tabled = (p._replace(microbatch=first + p.microbatch) for p in walk(table))

    def _forget(self) -> None:
        """Forgets the microbatches that have not begun."""
        self._queue.clear()
        if self._order:
            self._known = self._order.begun
        self._ahead, self._ahead_done = None, []

    def _next(self, stopped: bool, waiting: set[int]) -> Pass | None:
        """The next pass; None if there is nothing to do.

        Args:
          stopped: whether no further microbatch may begin.
          waiting: slots whose update in the current round has not been dispatched.
        """
        if not self._order:
            return self._next_of_table(stopped)
        begun = self._order.begun
        may_begin = not stopped and begun < self._known
        if may_begin and (queued := self._queue[begun]).plan is self._ahead:
            may_begin = waiting.isdisjoint(queued.plan.microbatches[queued.index].samples)
        return self._order.next(begun + may_begin)

    def _next_of_table(self, stopped: bool) -> Pass | None:
        for step in self._tabled:
            at = step.virtual_stage, step.microbatch
            if step.forward and step.virtual_stage == 0:
                if not stopped:
                    return step
            elif at in (self._passed if step.forward else self._gradients):
                return step
        return None

    def _run_pass(self, step: Pass) -> None:
        """Dispatches a pass, and sends its result to the next stage or the one before."""
        part, m = step.virtual_stage, step.microbatch
        at, last = (part, m), len(self._backbone.parts) - 1
        if step.forward:
            queued, stage = self._queue[m], part % len(self._stages)
            arrays = queued.plan.microbatches[queued.index].arrays[stage]
            passed = self._passed.pop(at) if part > 0 else None
            out, self._residuals[at] = self._compiled.forward(
                part, arrays, queued.tables[stage], passed
            )
            if part == last:
                self._gradients[at] = out.x
            else:
                self._passed[part + 1, m] = self._backbone.homes[part + 1].put(out, P(DATA))
        else:
            dx = self._compiled.backward(part, self._residuals.pop(at), self._gradients.pop(at))
            if part > 0:
                self._gradients[part - 1, m] = self._backbone.homes[part - 1].put(dx, P(DATA))

    def evaluate(self, tasks: Mapping[int, PreparedTask]) -> np.ndarray:
        backbone, slots = self._backbone, self._compiled.slots
        programs = [self._compiled.program(part, False) for part in range(len(backbone.parts))]
        table = slot_table(tasks, None, slots)
        tables = [stage.put(table, P()) for stage in self._stages]
        none = np.zeros((self.shards, slots), np.float32)
        losses = [home.put(none, P(DATA)) for home in backbone.homes]
        batches = {slot: task.eval_samples for slot, task in tasks.items()}
        for microbatch in fill_microbatches(batches, self._options.shape, shards=self.shards):
            arrays, passed = self.place(microbatch.arrays), None
            for part, program in enumerate(programs):
                stage = part % len(self._stages)
                if part > 0:
                    passed = backbone.homes[part].put(passed, P(DATA))
                passed, losses[part] = evaluate(
                    program,
                    backbone.weights[part],
                    self._stored.states[part].adapters,
                    losses[part],
                    arrays[stage],
                    tables[stage],
                    passed,
                )
        return jax.device_get(losses[-1]).sum(axis=0)

    def close(self) -> None:
        pass
