"""The compiled programs of all pipeline stages, and their arrays."""

import math
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxmux.data.batches import Microbatch
from jaxmux.errors import microbatch_too_large
from jaxmux.models import Backbone, SlotTable, device_memory
from jaxmux.models.modules import abstract_weights
from jaxmux.models.remat_policies import leaner, per_layer
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.memory_model import exchanged_bytes
from jaxmux.planner.pipeline.schedules import residuals_in_flight
from jaxmux.sharding import (
    Passed,
    PlacedBackbone,
    StageMesh,
    StageOptions,
    backward,
    forward,
    forward_into,
    in_threads,
)
from jaxmux.sharding.stage_mesh import AXES, DATA

from ..engine_options import EngineOptions
from ..rounds.rounds import empty_microbatch, slot_table
from ..state.stored_state import StoredState
from ..tasks.prepared_task import size_of
from .programs import bytes_of, choose_remat, forward_options, step_room


class StagePrograms(NamedTuple):
    """The programs of a pipeline's parts.

    Attributes:
      made_for: the layout of the train state, and whether any task has dropout.
      residuals: by part, a function that makes empty residuals.
    """

    made_for: tuple[Layout, bool]
    options: list[StageOptions]
    residuals: dict[int, Callable[[], list[jax.Array]]]


class CompiledStages:
    """Compiles the programs of a pipeline's parts, and dispatches them. With S stages, part v is on
    stage v mod S. `programs` is None before the programs are chosen."""

    def __init__(
        self, backbone: PlacedBackbone, options: EngineOptions, stored: StoredState, replicas: int
    ):
        self._replicas = replicas
        self.stages = list(dict.fromkeys(backbone.homes))
        self._backbone, self._options, self._stored = backbone, options, stored
        self.programs: StagePrograms | None = None
        # The programs that have been compiled ahead.
        self._ahead: StagePrograms | None = None
        # Whether the programs have run.
        self._has_run = False
        # How often a device ran out of memory.
        self._leaner_by = 0
        # For each part, residuals whose memory the next forward pass reuses.
        self._spent: list[list[list[jax.Array]]] = [[] for _ in backbone.parts]
        self._released = True

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        if not self._has_run or self.programs.made_for[0] != self._stored.layout:
            return None
        policies = [options.forward.remat for options in self.programs.options]
        if all(isinstance(policy, str) for policy in policies):
            return policies[0]
        return tuple(policy for of_part in policies for policy in of_part)

    @property
    def shards(self) -> int:
        return self.stages[0].shards

    @property
    def slots(self) -> int:
        return self._stored.layout.tree.count.shape[0]

    def place(self, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
        stacked = _stacked(microbatches)
        return [stage.put(stacked, P(DATA)) for stage in self.stages]

    def forward(
        self, part: int, microbatch: Microbatch, slots: SlotTable, passed: Passed | None
    ) -> tuple[Passed, Any]:
        """Dispatches the forward pass of a part, whose losses are added to the state, and returns
        the values for the next part and the residuals for `backward`. All arrays are on the part's
        stage. `passed` comes from the part before; the first part gets None."""
        spent, programs = self._spent[part], self.programs
        out, sums, residuals = self._backbone.homes[part].run(
            forward_into,
            programs.options[part],
            spent.pop() if spent else programs.residuals[part](),
            *self.forward_arguments(part, microbatch, slots, passed),
        )
        self._stored.states[part] = self._stored.states[part]._replace(sums=sums)
        return out, residuals

    def backward(self, part: int, residuals: Any, gradient: jax.Array) -> jax.Array | None:
        """Dispatches the backward pass of a part, whose gradients are added to the state.
        `gradient` is that of the part's output, on the part's stage. Returns the gradient of the
        part's input; None from the first part."""
        dx, accumulators = self._backbone.homes[part].run(
            backward,
            self.programs.options[part],
            *self._backward_arguments(part, residuals, gradient),
        )
        state = self._stored.states[part]
        self._stored.states[part] = state._replace(accumulators=accumulators)
        self._spent[part].append(jax.tree.leaves(residuals))
        return dx

    def forward_arguments(
        self, part: int, microbatch: Microbatch, slots: SlotTable, passed: Passed | None
    ) -> tuple[Any, ...]:
        state = self._stored.states[part]
        return (
            self._backbone.weights[part],
            state.adapters,
            state.accumulators,
            state.sums,
            microbatch,
            slots,
            passed,
        )

    def _backward_arguments(self, part: int, residuals: Any, gradient: Any) -> tuple[Any, ...]:
        state = self._stored.states[part]
        weights = self._backbone.weights[part]
        return residuals, weights, state.adapters, state.accumulators, gradient

    def release(self) -> None:
        """Frees the memory of residuals; `compile` allocates it again. No microbatch may be between
        its passes."""
        for spent in self._spent:
            spent.clear()
        self._released = True

    def take(self, programs: StagePrograms | None) -> None:
        """Takes the `programs` of another executor."""
        self.programs = self._ahead = programs

    def is_ready(self, dropout: bool, run: bool) -> bool:
        """Whether `compile` has nothing to do."""
        return self.serves(dropout) and not self._released and (self._has_run or not run)

    def compile(self, dropout: bool, run: bool) -> None:
        """Allocates the memory of residuals; then, with `run`, compiles the programs of all parts
        and runs each once. Skips what has been done.

        The memory suffices for the microbatches in flight; with GPipe it grows in the first round.
        It is allocated first, so that a device that has too little fails before programs are
        compiled, which takes most of the time. A lack of memory raises JaxRuntimeError (see
        `recompute_more`), or OutOfDeviceMemory if all layers recompute everything already.
        """
        if not self.serves(dropout):
            self.release()
            policies = enumerate(self.choose_remat(dropout))
            options = [self.program(part, dropout, remat) for part, remat in policies]
            self.programs = StagePrograms((self._stored.layout, dropout), options, {})
            self._has_run = False
        if self._released:
            self._call_with_parts(self._allocate)
            self._released = False
        if run and not self._has_run:
            self._call_with_parts(self._compile)
            self._has_run = True

    def serves(self, dropout: bool) -> bool:
        wanted = self._stored.layout, dropout
        return self.programs is not None and self.programs.made_for == wanted

    def _call_with_parts(self, call: Callable[[int], None]) -> None:
        """Calls a function with the index of every part, in a thread for each stage. The parts of a
        stage keep their order, because the collectives of a mesh must always be dispatched in the
        same order."""

        def call_with_parts_of(stage: int) -> None:
            for part in range(stage, len(self._backbone.parts), len(self.stages)):
                call(part)

        in_threads(call_with_parts_of, range(len(self.stages)))

    def _allocate(self, part: int) -> None:
        options, residuals = self.programs.options[part], self.programs.residuals
        if part not in residuals:
            arguments = self.forward_arguments(part, *self.empty_inputs(part))
            shapes = forward.eval_shape(options, *arguments)[2]
            residuals[part] = _zeros_like(shapes, self._backbone.homes[part])
        self._spent[part] = [residuals[part]() for _ in range(self._in_flight[part])]
        jax.block_until_ready(self._spent[part])

    def _compile(self, part: int) -> None:
        """Compiles the programs of a part, if that has not been done ahead, and runs each with an
        empty microbatch, which adds nothing to the state."""
        options, inputs = self.programs.options[part], self.empty_inputs(part)
        is_missing = self._backbone.homes[part].is_local and self.programs is not self._ahead
        if is_missing:
            spent = self._spent[part][-1]
            compiled(forward_into.lower(options, spent, *self.forward_arguments(part, *inputs)))
        out, residuals = self.forward(part, *inputs)
        if is_missing:
            compiled(backward.lower(options, *self._backward_arguments(part, residuals, out.x)))
        self.backward(part, residuals, out.x)
        jax.block_until_ready(self._stored.states[part])

    def warm_moves(self) -> None:
        """Moves empty arrays between neighbouring parts once. Between processes, programs move
        them, and nothing may be compiled while stages exchange arrays."""
        homes = self._backbone.homes
        for one, other in zip(homes, homes[1:], strict=False):
            moved = one.move(self._empty_passed(one), other, P(DATA))
            jax.block_until_ready((moved, other.move(moved.x, one, P(DATA))))

    def program(
        self, part: int, dropout: bool, remat: str | tuple[str, ...] = "full"
    ) -> StageOptions:
        backbone = self._backbone
        adapters = self._stored.layout.tree.adapters
        options = forward_options(backbone, self._options, adapters, dropout)
        return StageOptions(
            backbone.config,
            options._replace(remat=remat, sharding=backbone.homes[part].weights),
            backbone.parts[part],
            backbone.homes[part],
            self._stored.layouts[part],
        )

    def recompute_more(self) -> None:
        """Prepares for another call of `compile` after a device ran out of memory. All stages
        recompute more, because it is not known which one ran out. Accumulators may be lost."""
        self._leaner_by += 1
        self.programs, self._ahead, self._has_run = None, None, False
        self.release()

    @cached_property
    def _in_flight(self) -> list[int]:
        """For each part, the most microbatches between their passes in a long round. For GPipe,
        which holds all microbatches of a round, this is 1."""
        stages, parts = len(self.stages), len(self._backbone.parts)
        return list(residuals_in_flight(self._options.schedule, stages, parts // stages))

    def choose_remat(self, dropout: bool) -> list[str | tuple[str, ...]]:
        """The remat policy of each part. Raises OutOfDeviceMemory if more recomputation is
        impossible."""
        policies = self._first_choice(dropout)
        for _ in range(self._leaner_by):
            pairs = zip(policies, self._backbone.parts, strict=True)
            before = [per_layer(of_part, part.layers) for of_part, part in pairs]
            policies = [leaner(of_part) or of_part for of_part in before]
            if policies == before:
                raise microbatch_too_large(self._options.shape.tokens)
        return policies

    def _first_choice(self, dropout: bool) -> list[str | tuple[str, ...]]:
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
        adapters = self._stored.layout.tree.adapters
        forward = forward_options(backbone, self._options, adapters, dropout)
        stages, parts, in_flight = len(self.stages), len(backbone.parts), self._in_flight
        held = [self._held(i) for i in range(parts)]
        microbatch, policies = empty_microbatch(self._options.shape), []
        for i, (part, home) in enumerate(zip(backbone.parts, backbone.homes, strict=True)):
            weights, pools = zip(*held[i % stages :: stages], strict=True)
            config = home.device_config(backbone.config, part.layers)
            of_device = Backbone(config, abstract_weights(config, backbone.compute_dtype), "")
            room = step_room(weights, pools, memory)
            room -= size_of(config, backbone.compute_dtype).decoded_bytes
            room -= int(exchanged_bytes(self._gradient_bytes(i % stages, stages), self._replicas))
            if home.weights.fsdp > 1:
                # One layer's weights are gathered while another layer's are used. The last part
                # gathers the head too.
                head = config.vocab_size * config.hidden_size * backbone.compute_dtype.itemsize
                layer = bytes_of(of_device.weights["layers"]) // part.layers
                room -= max(2 * layer, head * part.is_last)
            adapters = home.device_adapters(
                held[i][1], self._stored.layouts[i].tree.adapters, config
            )
            policies.append(
                choose_remat(
                    of_device,
                    forward,
                    adapters,
                    microbatch,
                    slots=self._empty_table(),
                    room=room,
                    in_flight=sum(in_flight[i % stages :: stages]),
                )
            )
        return policies

    def _gradient_bytes(self, first: int, stages: int) -> int:
        """Bytes of the gradients of all parts of a stage, as if they were not divided among
        devices."""
        specs = [layout.tree.accumulators for layout in self._stored.summed[first::stages]]
        return sum(np.dtype(x.dtype).itemsize * math.prod(x.shape) for x in jax.tree.leaves(specs))

    def _held(self, part: int) -> tuple[Any, Any]:
        home, weights = self._backbone.homes[part], self._backbone.weights[part]
        pools, specs = self._stored.states[part].adapters, self._stored.layouts[part].tree
        divided = home.weight_specs(weights), home.leaf_specs(specs.adapters)
        return home.of_one_device((weights, pools), divided)

    def empty_inputs(self, part: int) -> tuple[Microbatch, SlotTable, Passed | None]:
        home = self._backbone.homes[part]
        microbatch = _stacked([empty_microbatch(self._options.shape)] * self.shards)
        passed = self._empty_passed(home) if part > 0 else None
        return home.put(microbatch, P(DATA)), home.put(self._empty_table(), P()), passed

    def _empty_passed(self, home: StageMesh) -> Passed:
        shape, width = self._options.shape, self._backbone.config.hidden_size
        x = (self.shards, shape.tokens, width), self._backbone.compute_dtype
        finite = np.ones((self.shards, shape.chunks), bool)
        return Passed(*home.run(_zeros((x,), DATA, home)), home.put(finite, P(DATA)))

    def _empty_table(self) -> SlotTable:
        return slot_table({}, None, self.slots)


def _stacked(microbatches: Sequence[Microbatch]) -> Microbatch:
    return jax.tree.map(lambda *shards: np.stack(shards), *microbatches)


def _zeros_like(residuals: Any, home: StageMesh) -> Callable[[], list[jax.Array]]:
    shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves(residuals))
    return partial(home.run, _zeros(shapes, AXES, home))


@cache
def _zeros(shapes: tuple[tuple[Any, ...], ...], axes: tuple[str, ...], home: StageMesh) -> Any:
    @partial(jax.jit, out_shardings=home.shardings([P(axes)] * len(shapes)))
    def zeros() -> list[jax.Array]:
        return [jnp.zeros(*shape) for shape in shapes]

    return zeros
