"""The executor of several devices in a pipeline, which follows a schedule of the planner."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.data.microbatch import Microbatch
from jaxmux.models import Backbone, ForwardOptions, SlotTable, device_memory
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

from .compile import forward_options
from .engine_options import EngineOptions
from .executor import RoundOutcome
from .prepared_task import PreparedTask
from .remat_choice import choose_remat, step_room
from .rounds import RoundPlan, empty_microbatch, fill_microbatches, slot_table
from .stored_state import StoredState
from .updates import DueUpdates, update_parts

SCHEDULES = ("1f1b", "gpipe", "interleaved")
# A backward pass takes about twice as long as a forward pass.
_FORWARD, _BACKWARD = 1.0, 2.0


class Pipeline:
    """Runs rounds on the devices of a `PlacedBackbone`: the `Executor` of a pipeline.

    The devices take the parts in turn: with S devices, part v lies on device v mod S. The host
    dispatches the passes of a schedule; a device runs what it was given in order, at its own pace.
    The pipeline is empty between two rounds.
    """

    def __init__(self, backbone: PlacedBackbone, options: EngineOptions, stored: StoredState):
        """Creates an executor; nothing is compiled yet.

        Args:
          backbone: the frozen backbone.
          options: the options of the engine.
          stored: the train state, in the parts of the backbone.

        Raises:
          PlanningError: the parts do not lie on the devices in turn, or `options.schedule` is
            unknown or does not suit them.
        """
        self._backbone, self._options, self._stored = backbone, options, stored
        self._devices = list(dict.fromkeys(backbone.devices))
        stages, parts = len(self._devices), len(backbone.parts)
        in_turn = [self._devices[part % stages] for part in range(parts)]
        if in_turn != list(backbone.devices) or parts % stages:
            raise PlanningError("the parts of a backbone should lie on its devices in turn")
        if options.schedule not in SCHEDULES:
            known = ", ".join(SCHEDULES)
            raise PlanningError(f"schedule should be one of {known}, found {options.schedule!r}")
        if (options.schedule == "interleaved") != (parts > stages):
            raise PlanningError(
                f"schedule={options.schedule!r} does not suit {parts} parts on {stages} devices: "
                "several parts on a device are interleaved"
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

    def refuse_implementations(self, dropout: bool) -> None:
        if not (self._options.attention or self._options.grouped_lora):
            return
        options = forward_options(self._backbone, self._options, dropout)
        program = StageOptions(self._backbone.config, options, self._backbone.parts[0])
        try:
            forward.trace(program, *self._arguments(0, self._empty()[0], self._table(), None))
        except ValueError as e:
            raise PlanningError(str(e)) from None

    def place(self, microbatch: Microbatch) -> list[Microbatch]:
        return [jax.device_put(microbatch, device) for device in self._devices]

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
        tables = [jax.device_put(plan.slots, device) for device in self._devices]
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
                arrays = plan.microbatches[left[m]].arrays[part % len(self._devices)]
                table = tables[part % len(self._devices)]
                out, loss, residuals[at] = forward(
                    program, *self._arguments(part, arrays, table, passed.pop(at))
                )
                self._stored.states[part] = self._stored.states[part]._replace(loss=loss)
                if part == last:
                    gradients[at] = out.x
                else:
                    device = self._backbone.devices[part + 1]
                    passed[part + 1, m] = jax.device_put(out, device)
            elif at in gradients:
                dx = self._run_backward(program, part, residuals.pop(at), gradients.pop(at))
                if part > 0:
                    gradients[part - 1, m] = jax.device_put(dx, self._backbone.devices[part - 1])
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
        stages = len(self._devices)
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
        """Compiles the programs of all parts, and runs each once on its device, in threads, so that
        no stage waits for another one's compilation."""
        if self._compiled_for == (self._stored.layout, dropout):
            return
        backbone = self._backbone
        shared = forward_options(backbone, self._options, dropout)
        microbatches, table = self._empty(), self._table()
        programs = [
            StageOptions(backbone.config, shared._replace(remat=remat), part)
            for part, remat in zip(
                backbone.parts, self._remat(shared, microbatches[0]), strict=True
            )
        ]
        shape, dtype = self._options.shape, backbone.compute_dtype

        def warm(part: int) -> None:
            home = backbone.devices[part]
            arrays = microbatches[part % len(microbatches)]
            passed = None
            if part > 0:
                x = jnp.zeros((shape.tokens, backbone.config.hidden_size), dtype)
                passed = jax.device_put(Passed(x, np.ones(shape.chunks, bool)), home)
            arguments = self._arguments(part, arrays, jax.device_put(table, home), passed)
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

    def _remat(
        self, forward: ForwardOptions, microbatch: Microbatch
    ) -> list[str | tuple[str, ...]]:
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
        stages, parts = len(self._devices), len(backbone.parts)
        # Residuals of a part that are on each device at the same time, in a long round.
        in_flight = self._schedule([{0: (0,)}] * (4 * parts)).peak_buffers()
        pools = [state.adapters["lora"] for state in self._stored.states]
        found = []
        for i, part in enumerate(backbone.parts):
            on_device = slice(i % stages, None, stages)
            room = step_room(backbone.weights[on_device], pools[on_device], memory)
            config = dataclasses.replace(backbone.config, num_layers=part.layers)
            own = Backbone(config, self._whole(i), "")
            given = own, forward, pools[i], microbatch, self._table(), room
            found.append(choose_remat(*given, int(in_flight[i % stages])))
        return found

    def _whole(self, part: int) -> Any:
        """The weights of a part, with the shapes of the ends that it lacks."""
        weights = self._backbone.weights
        ends = {name: w for own in weights for name, w in own.items() if name != "layers"}
        return ends | dict(weights[part])

    def _empty(self) -> list[Microbatch]:
        """A microbatch without samples, for each device."""
        return self.place(empty_microbatch(self._options.shape))

    def _table(self) -> SlotTable:
        return slot_table({}, None, len(self._stored.states[0].loss))

    def evaluate(self, tasks: Mapping[int, PreparedTask]) -> np.ndarray:
        backbone, slots = self._backbone, len(self._stored.states[0].loss)
        options = forward_options(backbone, self._options)
        programs = [StageOptions(backbone.config, options, part) for part in backbone.parts]
        table = slot_table(tasks, None, slots)
        tables = [jax.device_put(table, device) for device in self._devices]
        losses = [jax.device_put(np.zeros(slots, np.float32), d) for d in backbone.devices]
        batches = {slot: task.eval_samples for slot, task in tasks.items()}
        for microbatch in fill_microbatches(batches, self._options.shape):
            arrays, passed = self.place(microbatch.arrays), None
            for part, program in enumerate(programs):
                home = part % len(self._devices)
                passed = jax.device_put(passed, backbone.devices[part])
                passed, losses[part] = evaluate(
                    program,
                    backbone.weights[part],
                    self._stored.states[part].adapters,
                    losses[part],
                    arrays[home],
                    tables[home],
                    passed,
                )
        return jax.device_get(losses[-1])

    def close(self) -> None:
        pass
