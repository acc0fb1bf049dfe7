"""The executor of several devices: a pipeline of stages that follows a schedule of the planner."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import Backbone, ForwardOptions, SlotTable, device_memory
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
from jaxmux.sharding.stage_mesh import DATA, on_one_device

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


class Pipeline:
    """Runs rounds on the stages of a `PlacedBackbone`: the `Executor` of several devices.

    The stages take the parts in turn: with S stages, part v lies on stage v mod S. The host
    dispatches the passes of a schedule; a stage runs what it was given in order, at its own pace.
    The pipeline is empty between two rounds. A single stage runs one microbatch after another.
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
        if (options.schedule == "interleaved") != (parts > stages):
            raise PlanningError(
                f"schedule={options.schedule!r} does not suit {parts} parts on {stages} stages: "
                "several parts on a stage are interleaved"
            )
        self._programs: list[StageOptions] = []
        self._compiled_for: tuple[Layout, bool] | None = None
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

    def run(
        self,
        plan: RoundPlan,
        done: list[int],
        stop: Callable[[], bool],
        due: Callable[[tuple[int, ...]], DueUpdates],
    ) -> RoundOutcome:
        if self._broken:
            raise RuntimeError(
                "an earlier round ended in an exception; restore a checkpoint in a new engine"
            )
        outcome = RoundOutcome({})
        left = [i for i in range(len(plan.microbatches)) if i not in done]
        self._broken = True
        stopped = left and self._run_microbatches(plan, left, stop, done)
        self._broken = False
        if stopped:
            return outcome
        for update in plan.updates:
            numbers = due(update.slots)
            self._broken = True
            outcome.updates[update.slots] = update_parts(self._stored, numbers)
            self._broken = False
        return outcome

    def recover(self) -> None:
        raise RuntimeError("a pipeline never reports that a round is lost")

    def _run_microbatches(
        self, plan: RoundPlan, left: Sequence[int], stop: Callable[[], bool], done: list[int]
    ) -> bool:
        """Dispatches the passes of microbatches, and appends their indices to `done`. Returns True
        if it was stopped; then the microbatches that had begun are done."""
        self._compile(plan.dropout)
        tables = [stage.put(plan.slots, P()) for stage in self._stages]
        schedule = self._schedule([plan.microbatches[i].samples for i in left])
        last = len(self._programs) - 1
        # By virtual stage and microbatch.
        passed: dict[tuple[int, int], Passed | None] = {(0, m): None for m in range(len(left))}
        residuals: dict[tuple[int, int], Any] = {}
        gradients: dict[tuple[int, int], jax.Array] = {}
        stopped = False
        for step in walk(schedule):
            part, m = step.virtual_stage, step.microbatch
            program, at = self._programs[part], (part, m)
            if step.forward:
                if stopped and part == 0:
                    del passed[at]
                if at not in passed:
                    continue
                stage = part % len(self._stages)
                arrays, table = plan.microbatches[left[m]].arrays[stage], tables[stage]
                out, loss, residuals[at] = forward(
                    program, *self._arguments(part, arrays, table, passed.pop(at))
                )
                self._stored.states[part] = self._stored.states[part]._replace(loss=loss)
                if part == last:
                    gradients[at] = out.x
                else:
                    passed[part + 1, m] = self._backbone.homes[part + 1].put(out, P(DATA))
            elif at in gradients:
                dx = self._run_backward(program, part, residuals.pop(at), gradients.pop(at))
                if part > 0:
                    gradients[part - 1, m] = self._backbone.homes[part - 1].put(dx, P(DATA))
                    continue
                done.append(left[m])
                stopped = stop() or stopped
        return stopped

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
        policies = self._remat(forward_options(backbone, self._options, dropout))
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

        with ThreadPoolExecutor() as threads:
            list(threads.map(warm, range(len(programs))))
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

    def _remat(self, forward: ForwardOptions) -> list[str | tuple[str, ...]]:
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
                # One layer's weights are gathered while another one's are used.
                room -= 2 * bytes_of(own.weights["layers"]) // part.layers
            given = own, forward, held[i][1], microbatch, self._table(), room
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
