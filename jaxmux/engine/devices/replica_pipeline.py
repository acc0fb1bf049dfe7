"""The pipeline of one replica: its microbatches, and the order in which their passes run."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxmux.models import SlotTable
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import AUTO_SCHEDULE, INTERLEAVED, SCHEDULES, Replica, Stage
from jaxmux.planner.pipeline.schedules import (
    STREAMING,
    TASK_BY_TASK,
    Ended,
    Pass,
    ScheduledMicrobatch,
    Sent,
    StreamOrder,
    round_table,
    walk,
)
from jaxmux.sharding import Passed, PlacedBackbone, forward, log_probs
from jaxmux.sharding.stage_mesh import DATA

from ..engine_options import EngineOptions
from ..rounds.results import DispatchedPass
from ..rounds.rounds import PackedMicrobatch, ReplicaInput, RoundPlan
from ..state.stored_state import StoredState
from .compiled_stages import CompiledStages
from .executor import Queued


class ReplicaPipeline:
    """The stages of a `PlacedBackbone`, and the microbatches that pass through them. `input` is the
    form in which the replica takes microbatches, and `state` the part of the train state that it
    works on.

    With S stages, part v is on stage v mod S. The host dispatches the passes of a schedule; each
    stage runs its passes in order, at its own pace. With 1F1B and LoRAPP, rounds follow each other
    without a gap: 1F1B keeps the order of the round, and LoRAPP skips a microbatch that waits for
    an update (mLoRA 3.2). With other schedules the pipeline is empty between two rounds.
    """

    def __init__(
        self,
        backbone: PlacedBackbone,
        options: EngineOptions,
        state: StoredState,
        number: int = 0,
        replicas: int = 1,
    ):
        """Creates a pipeline; nothing is compiled yet. `number` is its index among the `replicas`,
        which exchange gradients and adapters. Raises PlanningError if the parts are not on the
        stages in turn, the stages have different numbers of data shards, or `options.schedule` does
        not suit them."""
        self.state = state
        self._number = number
        self._passes: list[DispatchedPass] = []
        self._backbone, self._options = backbone, options
        self.compiled = CompiledStages(backbone, options, state, replicas)
        self._stages = self.compiled.stages
        self._refuse_schedule()
        devices = tuple(Stage(**stage.mesh.shape) for stage in self._stages)
        groups = "planned" if options.schedule == AUTO_SCHEDULE else "together"
        self.input = ReplicaInput(
            options.shape,
            Replica(devices, len(backbone.parts) // len(devices)),
            "alone" if options.schedule in TASK_BY_TASK else groups,
            self.compiled.place,
        )
        # Microbatches that have not begun; and those that have, by their number. Numbers are never
        # reused. Microbatches of a table get a number before they begin.
        self._waiting: list[Queued] = []
        self._running: dict[int, Queued] = {}
        self._numbered = 0
        # The order of passes: without end, or from a table for one round.
        streams = options.schedule in STREAMING
        self._order = StreamOrder(len(self._stages)) if streams else None
        self._tabled: Iterator[Pass | Sent] = iter(())
        # Results that are to be sent; and inputs of passes, by part and number of the microbatch.
        self._results: dict[Pass, Any] = {}
        self._passed: dict[tuple[int, int], Passed] = {}
        self._residuals: dict[tuple[int, int], Any] = {}
        self._gradients: dict[tuple[int, int], jax.Array] = {}

    def _refuse_schedule(self) -> None:
        schedule, homes = self._options.schedule, self._backbone.homes
        stages, parts = len(self._stages), len(homes)
        if [self._stages[part % stages] for part in range(parts)] != list(homes) or parts % stages:
            raise PlanningError("the parts of a backbone should lie on its stages in turn")
        if len({stage.shards for stage in self._stages}) > 1:
            raise PlanningError("all stages should have the same number of data shards (dp, fsdp)")
        if schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise PlanningError(f"schedule should be one of {known}, found {schedule!r}")
        if self._options.remat == "none" and any(stage.weights.fsdp > 1 for stage in self._stages):
            raise PlanningError(
                "remat='none' would keep every layer's gathered weights, for which fsdp has no "
                "room; use remat='norms'"
            )
        if (schedule == INTERLEAVED) != (parts > stages):
            raise PlanningError(
                f"schedule={schedule!r} does not suit {parts} parts on {stages} stages: several "
                "parts on a stage are interleaved"
            )

    @property
    def streams(self) -> bool:
        """Whether rounds follow each other without a gap."""
        return self._order is not None

    @property
    def begun_all(self) -> bool:
        """Whether every known microbatch has begun, so that another round may begin."""
        return not self._waiting

    def refuse_implementations(self, dropout: bool) -> None:
        compiled = self.compiled
        arguments = compiled.forward_arguments(0, *compiled.empty_inputs(0))
        try:
            forward.trace(compiled.program(0, dropout), *arguments)
        except ValueError as e:
            raise PlanningError(str(e)) from None

    def add(self, plan: RoundPlan, indices: Iterable[int]) -> None:
        tables = [stage.put(plan.slots, P()) for stage in self._stages]
        added = [Queued(plan, index, tables) for index in indices]
        if self._order:
            self._waiting += added
        elif added:
            slots = [tuple(queued.microbatch.samples) for queued in added]
            buckets = {together: i for i, together in enumerate(dict.fromkeys(slots))}
            microbatches = [
                ScheduledMicrobatch(together, (0,) * len(together), buckets[together])
                for together in slots
            ]
            stages, first = len(self._stages), self._numbered
            parts_per_stage = self.input.replica.parts
            table, order = round_table(
                self._options.schedule, microbatches, stages, parts_per_stage
            )
            self._running = {first + number: added[i] for number, i in enumerate(order)}
            self._numbered += len(added)
            self._tabled = (_renumbered(step, first) for step in walk(table))

    def forget(self) -> None:
        """Drops the microbatches that have not begun. All others must have ended."""
        self._waiting.clear()
        self._running.clear()
        self.compiled.release()

    def advance(self, may_begin: Callable[[Queued], bool]) -> tuple[bool, Queued | None]:
        """Dispatches the next pass, sends a result, or ends a microbatch. Returns whether one of
        these was possible, and the microbatch that has ended or None. `may_begin` tells whether a
        microbatch may begin."""
        step = self._next(may_begin)
        if step is None:
            return False, None
        if isinstance(step, Ended):
            return True, self._running.pop(step.microbatch)
        if isinstance(step, Sent):
            self._send(step.result_of)
            return True, None
        self._run_pass(step)
        ends = self._order is None and not step.forward and step.virtual_stage == 0
        return True, self._running.pop(step.microbatch) if ends else None

    def take_passes(self) -> list[DispatchedPass]:
        taken, self._passes = self._passes, []
        return taken

    def _next(self, may_begin: Callable[[Queued], bool]) -> Pass | Sent | Ended | None:
        if self._order:
            candidates = self._waiting if self._options.schedule == "lorapp" else self._waiting[:1]
            first = next((i for i, queued in enumerate(candidates) if may_begin(queued)), None)
            step = self._order.next(self._order.begun + (first is not None))
            if isinstance(step, Pass) and step.forward and step.virtual_stage == 0:
                self._running[step.microbatch] = self._waiting.pop(first)
            return step
        for step in self._tabled:
            if isinstance(step, Sent):
                if step.result_of in self._results:
                    return step
                continue
            at = step.virtual_stage, step.microbatch
            if step.forward and step.virtual_stage == 0:
                if may_begin(self._running[step.microbatch]):
                    return step
            elif at in (self._passed if step.forward else self._gradients):
                return step
        return None

    def _run_pass(self, step: Pass) -> None:
        part, m = at = step.virtual_stage, step.microbatch
        queued, stage = self._running[m], part % len(self._stages)
        self._passes.append(
            DispatchedPass(
                time.perf_counter(),
                self._number,
                stage,
                part,
                microbatch=queued.index,
                forward=step.forward,
                steps=queued.plan.steps,
            )
        )
        if step.forward:
            arrays, passed = queued.microbatch.arrays[stage], self._passed.pop(at, None)
            out, self._residuals[at] = self.compiled.forward(
                part, arrays, queued.tables[stage], passed
            )
            if part == len(self._backbone.parts) - 1:
                self._gradients[at] = out.x
            else:
                self._results[step] = out
        else:
            dx = self.compiled.backward(part, self._residuals.pop(at), self._gradients.pop(at))
            if part > 0:
                self._results[step] = dx

    def _send(self, step: Pass) -> None:
        part, homes = step.virtual_stage, self._backbone.homes
        target, arrived = (part + 1, self._passed) if step.forward else (part - 1, self._gradients)
        result = self._results.pop(step)
        arrived[target, step.microbatch] = homes[part].move(result, homes[target], P(DATA))

    def log_probs(
        self, microbatches: Iterable[PackedMicrobatch], slots: SlotTable, dropout: bool
    ) -> list[jax.Array]:
        """Dispatches the forward passes of microbatches without gradients. Returns for each the
        results of `microbatch_log_probs` by data shard, which every process can read."""
        homes, stages = self._backbone.homes, len(self._stages)
        programs = [self.compiled.program(part, dropout) for part in range(len(homes))]
        tables = [stage.put(slots, P()) for stage in self._stages]
        found = []
        for microbatch in microbatches:
            arrays, passed = self.compiled.place(microbatch.arrays), None
            for part, program in enumerate(programs):
                if part > 0:
                    passed = homes[part - 1].move(passed, homes[part], P(DATA))
                passed = homes[part].run(
                    log_probs,
                    program,
                    self._backbone.weights[part],
                    self.state.states[part].adapters,
                    arrays[part % stages],
                    tables[part % stages],
                    passed,
                )
            found.append(passed)
        self.state.measured = found
        return homes[-1].share(found)


def _renumbered(step: Pass | Sent, first: int) -> Pass | Sent:
    if isinstance(step, Sent):
        return Sent(_renumbered(step.result_of, first))
    return step._replace(microbatch=first + step.microbatch)
