"""The executor of several devices: a pipeline of stages that follows a schedule of the planner."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import Backbone, SlotTable, device_memory
from jaxmux.models.modules import abstract_weights
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout
from jaxmux.planner import PlanningError
from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    gpipe,
    interleaved,
    one_forward_one_backward,
    uniform_workload,
    validate,
)
from jaxmux.sharding import (
    Passed,
    PlacedBackbone,
    StageOptions,
    backward,
    evaluate,
    forward,
    walk,
)
from jaxmux.sharding.schedule_walk import Pass
from jaxmux.sharding.stage_mesh import DATA, on_one_device
from jaxmux.sharding.stream_order import StreamOrder

from .compile import forward_options
from .engine_options import EngineOptions
from .executor import RoundOutcome
from .prepared_task import PreparedTask
from .remat_choice import bytes_of, choose_remat, step_room
from .rounds import RoundPlan, empty_microbatch, fill_microbatches, slot_table
from .stored_state import StoredState
from .updates import DueUpdates, update_parts

SCHEDULES = ("1f1b", "gpipe", "interleaved")

# A backward pass takes about twice as long as a forward pass.
_FORWARD, _BACKWARD = 1.0, 2.0


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
        self._stages = list(dict.fromkeys(backbone.homes))
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
        self._programs: list[StageOptions] = []
        self._compiled_for: tuple[Layout, bool] | None = None
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
        if not self._programs or self._compiled_for[0] != self._stored.layout:
            return None
        policies = [program.forward.remat for program in self._programs]
        if all(isinstance(policy, str) for policy in policies):
            return policies[0]
        return tuple(policy for own in policies for policy in own)

    @property
    def shards(self) -> int:
        return self._stages[0].shards

    def refuse_implementations(self, dropout: bool) -> None:
        if not (self._options.attention or self._options.grouped_lora):
            return
        program = self._program(0, dropout, "dots")
        try:
            forward.trace(program, *self._arguments(0, self._empty()[0], self._table(), None))
        except ValueError as e:
            raise PlanningError(str(e)) from None

    def place(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        stacked = jax.tree.map(lambda *shards: np.stack(shards), *microbatches)
        return [stage.put(stacked, P(DATA)) for stage in self._stages]

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
        self._compile(plan.dropout)
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
        if not self._order:
            samples = [plan.microbatches[q.index].samples for q in self._queue.values()]
            if samples:
                self._tabled = (
                    p._replace(microbatch=p.microbatch + first)
                    for p in walk(self._schedule(samples))
                )

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
        program, at, last = self._programs[part], (part, m), len(self._programs) - 1
        if step.forward:
            queued, stage = self._queue[m], part % len(self._stages)
            arrays = queued.plan.microbatches[queued.index].arrays[stage]
            passed = self._passed.pop(at) if part > 0 else None
            out, loss, self._residuals[at] = forward(
                program, *self._arguments(part, arrays, queued.tables[stage], passed)
            )
            self._stored.states[part] = self._stored.states[part]._replace(loss=loss)
            if part == last:
                self._gradients[at] = out.x
            else:
                self._passed[part + 1, m] = self._backbone.homes[part + 1].put(out, P(DATA))
        else:
            dx = self._run_backward(program, part, self._residuals.pop(at), self._gradients.pop(at))
            if part > 0:
                self._gradients[part - 1, m] = self._backbone.homes[part - 1].put(dx, P(DATA))

    def _run_backward(
        self, program: StageOptions, part: int, residuals: Any, gradient: jax.Array
    ) -> jax.Array | None:
        state = self._stored.states[part]
        weights = self._backbone.weights[part]
        dx, accumulators = backward(
            program, residuals, weights, state.adapters, state.accumulators, gradient
        )
        self._stored.states[part] = state._replace(accumulators=accumulators)
        return dx

    def _arguments(
        self, part: int, microbatch: Microbatch, slots: SlotTable, passed: Passed | None
    ) -> tuple[Any, ...]:
        """The arguments of `forward` after the options."""
        state = self._stored.states[part]
        weights = self._backbone.weights[part]
        tasks = weights, state.adapters, state.accumulators, state.loss
        return *tasks, microbatch, slots, passed

    def _schedule(self, samples: Sequence[Mapping[int, Sequence[int]]]) -> PipelineSchedule:
        """The schedule of the microbatches with these samples by slot."""
        stages = len(self._stages)
        microbatches = [ScheduledMicrobatch(tuple(own), (0,) * len(own)) for own in samples]
        workload = uniform_workload(microbatches, [_FORWARD] * stages, [_BACKWARD] * stages)
        if self._options.schedule == "gpipe":
            schedule = gpipe(workload)
        elif self._options.schedule == "interleaved":
            schedule = interleaved(workload, len(self._backbone.parts) // stages)
        else:
            schedule = one_forward_one_backward(workload)
        validate(schedule)
        return schedule

    def _compile(self, dropout: bool) -> None:
        """Compiles the programs of all parts, and runs each once on its stage, in threads, so that
        no stage waits for another one's compilation."""
        if self._compiled_for == (self._stored.layout, dropout):
            return
        backbone = self._backbone
        microbatches, table = self._empty(), self._table()
        policies = self._remat(dropout)
        programs = [self._program(i, dropout, remat) for i, remat in enumerate(policies)]
        shape, dtype = self._options.shape, backbone.compute_dtype

        def warm(part: int) -> None:
            home = backbone.homes[part]
            arrays = microbatches[part % len(microbatches)]
            passed = None
            if part > 0:
                x = np.zeros((self.shards, shape.tokens, backbone.config.hidden_size), dtype)
                passed = Passed(x, np.ones((self.shards, shape.chunks), bool))
                passed = home.put(passed, P(DATA))
            arguments = self._arguments(part, arrays, home.put(table, P()), passed)
            program = programs[part]
            compiled(forward.lower(program, *arguments))
            out, _, residuals = forward(program, *arguments)
            state = self._stored.states[part]
            tasks = backbone.weights[part], state.adapters, state.accumulators
            compiled(backward.lower(program, residuals, *tasks, out.x))
            # An empty microbatch adds nothing to the accumulators.
            jax.block_until_ready(self._run_backward(program, part, residuals, out.x))
            jax.block_until_ready(self._stored.states[part])

        def warm_stage(stage: int) -> None:
            # The collectives of one mesh are always dispatched in one order.
            for part in range(stage, len(programs), len(self._stages)):
                warm(part)

        with ThreadPoolExecutor() as threads:
            list(threads.map(warm_stage, range(len(self._stages))))
        self._programs, self._compiled_for = programs, (self._stored.layout, dropout)

    def _program(
        self, part: int, dropout: bool, remat: str | tuple[str, ...] = "full"
    ) -> StageOptions:
        """The static choices of a part's programs."""
        backbone = self._backbone
        options = forward_options(backbone, self._options, dropout)
        return StageOptions(
            backbone.config,
            options._replace(remat=remat, sharding=backbone.homes[part].weights),
            backbone.parts[part],
            backbone.homes[part],
            self._stored.layouts[part],
        )

    def _remat(self, dropout: bool) -> list[str | tuple[str, ...]]:
        """The remat policy of each part."""
        backbone, remat = self._backbone, self._options.remat
        memory = self._options.memory or device_memory()
        if remat != "auto":
            return [remat] * len(backbone.parts)
        if memory is None:
            return ["dots"] * len(backbone.parts)
        if self._options.schedule == "gpipe":
            raise PlanningError(
                "schedule='gpipe' keeps the values of all microbatches of a round, so remat='auto' "
                "cannot know how much fits; name a remat policy"
            )
        forward = forward_options(backbone, self._options, dropout)
        stages, parts = len(self._stages), len(backbone.parts)
        # Residuals of a part that are on each stage at the same time, in a long round.
        in_flight = self._schedule([{0: (0,)}] * (4 * parts)).peak_buffers()
        held = [
            on_one_device((weights, state.adapters["lora"]))
            for weights, state in zip(backbone.weights, self._stored.states, strict=True)
        ]
        microbatch, found = empty_microbatch(self._options.shape), []
        for i, (part, home) in enumerate(zip(backbone.parts, backbone.homes, strict=True)):
            weights, pools = zip(*held[i % stages :: stages], strict=True)
            config = home.device_config(backbone.config, part.layers)
            own = Backbone(config, abstract_weights(config, backbone.compute_dtype), "")
            room = step_room(weights, pools, memory)
            if home.weights.fsdp > 1:
                # One layer's weights are gathered while another one's are used; so is the head.
                head = config.vocab_size * config.hidden_size * backbone.compute_dtype.itemsize
                layer = bytes_of(own.weights["layers"]) // part.layers
                room -= max(2 * layer, head * part.is_last)
            adapters = home.device_factors(held[i][1], config)
            given = own, forward, adapters, microbatch, self._table(), room
            found.append(choose_remat(*given, int(in_flight[i % stages])))
        return found

    def _empty(self) -> list[Microbatch]:
        """A microbatch without samples, for each stage."""
        return self.place([empty_microbatch(self._options.shape)] * self.shards)

    def _table(self) -> SlotTable:
        return slot_table({}, None, self._slots)

    @property
    def _slots(self) -> int:
        return self._stored.layout.tree.loss.shape[0]

    def evaluate(self, tasks: Mapping[int, PreparedTask]) -> np.ndarray:
        backbone, slots = self._backbone, self._slots
        programs = [self._program(part, False) for part in range(len(backbone.parts))]
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
