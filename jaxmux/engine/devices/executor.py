"""The interface between the engine and its devices, and the executor of one device."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxmux.data.microbatch import Microbatch
from jaxmux.errors import fits
from jaxmux.models import (
    Backbone,
    SlotTable,
    Weights,
    keep_small_arrays_together,
)
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.peft import Layout

from ..engine_options import EngineOptions
from ..rounds.results import DispatchedPass
from ..rounds.rounds import (
    Dispatch,
    ReplicaInput,
    RoundPlan,
    SampleIndices,
    empty_microbatch,
    fill_microbatches,
    shares_of_replicas,
    slot_table,
)
from ..state.stored_state import StoredState
from ..state.train_state import TrainState
from ..state.updates import DueUpdates, UpdateStats, update
from ..tasks.prepared_task import PreparedTask
from .programs import (
    TrainingStep,
    accumulate,
    accumulate_arguments,
    compile_accumulate,
    evaluate,
    forward_options,
    refuse_implementations,
)
from .size_ahead import DeviceSizeAhead, ProgramsAhead


class RoundOutcome(NamedTuple):
    """The result of a call of `Executor.run`.

    Attributes:
      updates: by the slots of an update that was due, its results on the device.
      ahead: indices of the microbatches of the following round that have ended.
      lost: True if the device ran out of memory and the accumulated gradients were lost. Slots that
        have not been updated begin their global batches again.
    """

    updates: dict[tuple[int, ...], UpdateStats]
    ahead: tuple[int, ...] = ()
    lost: bool = False


class DispatchedLosses(NamedTuple):
    """A measurement of held-out losses that has been dispatched.

    Attributes:
      losses: function that waits for the losses, float32 [T]: the sum of the cross entropies of the
        measured samples in nats, divided by the number of target tokens of all held-out samples of
        the task; NaN if the forward pass was not finite.
      tokens: by slot, number of tokens of the chunks that hold the measured samples, with padding.
    """

    losses: Callable[[], np.ndarray]
    tokens: Mapping[int, int]


class Executor(Protocol):
    """Runs the compiled programs. The engine decides what is trained; an executor decides where and
    when. The state of the tasks is in the `StoredState` that the executor was created with.
    `dropout` tells whether the pool has dropout.

    Attributes:
      remat: the remat policy of every layer, or one for all, with which the training programs are
        compiled; None before they are.
      dispatch: divides the samples of a round among the replicas; None if there is only one.
    """

    replicas: Sequence[ReplicaInput]
    dispatch: Dispatch | None

    @property
    def remat(self) -> str | tuple[str, ...] | None: ...

    def refuse_implementations(self, dropout: bool) -> None:
        """Raises PlanningError if an implementation that the options name cannot serve the state on
        this device."""
        ...

    def run(
        self,
        plan: RoundPlan,
        done: list[int],
        stop: Callable[[], bool],
        due: Callable[[tuple[int, ...]], DueUpdates],
        following: Callable[[], RoundPlan | None],
    ) -> RoundOutcome:
        """Dispatches microbatches and updates of a round, and returns before they are finished.

        Args:
          done: indices of its microbatches that earlier calls have dispatched. The call appends
            those that it dispatches, even if it ends in an exception.
          stop: function that is called after every microbatch. Once it returns True, no further
            microbatch begins and no further update is dispatched.
          due: function that returns an update's arrays for the given slots, which may be empty. It
            may wait for the results of earlier rounds.
          following: function that returns the round after this one, or None if there is none. The
            call may begin its microbatches. If it was not stopped, the next call is given this
            round; microbatches that have begun end in that call, or in `settle`.
        """
        ...

    def marker(self) -> Any:
        """Small arrays that are ready when the devices of the last part of every replica have
        finished all dispatched microbatches."""
        ...

    def take_passes(self) -> list[DispatchedPass]: ...

    def settle(self) -> tuple[int, ...]:
        """Finishes the microbatches of the following round that have begun, so that tasks can be
        changed, and discards the round. Returns the indices of its microbatches that have ended, in
        this call and before."""
        ...

    def collect(self) -> None:
        """Moves the gradients of all replicas into the `StoredState`, so that they can be read.
        Later sums then have another order."""
        ...

    def recover(self) -> None:
        """Prepares for another try after the outcome of `run` was `lost`: empties the accumulators,
        and lets layers recompute more from now on."""
        ...

    def evaluate(
        self, tasks: Mapping[int, PreparedTask], samples: SampleIndices
    ) -> DispatchedLosses:
        """Dispatches a measurement of the losses of tasks on some of their held-out samples, with
        their current adapters and without dropout."""
        ...

    def try_memory(self, dropout: bool) -> bool:
        """Tries whether the programs that have been compiled ahead for the state get their memory.
        On several devices they are run once, because none may be loaded while stages exchange
        arrays. Returns False if `warm_up` has to prepare programs: none have been compiled ahead
        for this state, or those of several devices need too much. Raises JaxRuntimeError if the
        only device has too little."""
        ...

    def warm_up(self, none_due: DueUpdates, dropout: bool) -> bool:
        """Compiles all programs and runs them once, so that no later round, update or measurement
        compiles anything while the state keeps its size. `none_due` has all optimizer kinds that
        tasks may have. Returns False if accumulators and losses are empty now, because the devices
        ran out of memory and layers recompute more."""
        ...

    def release(self) -> None:
        """Frees the memory that the executor keeps from round to round besides the state. The next
        round allocates it again. Call it only between two rounds, after `settle`."""
        ...


# Number of rounds after a compilation in which the host waits for the device before each update.
_TRIAL_ROUNDS = 8


class SingleDevice:
    """Runs rounds on the default device: the `Executor` of one device. Forward and backward pass of
    a microbatch are one program. If the device runs out of memory, it is compiled again with more
    recomputation."""

    def __init__(
        self,
        backbone: Backbone,
        options: EngineOptions,
        stored: StoredState,
        programs: ProgramsAhead | DeviceSizeAhead | None = None,
    ):
        """Creates an executor; nothing is compiled yet. Without `programs`, programs are compiled
        when they are needed."""
        self._backbone = backbone
        self._options = options
        self._stored = stored
        self._programs = programs
        # The compiled training step, and the layout and dropout for which it is compiled.
        self._step: TrainingStep | None = None
        self._compiled_for: tuple[Layout, bool] | None = None
        # How often the device ran out of memory, and the number of remaining trial rounds.
        self._leaner_by = 0
        self._trial_rounds = 0
        self._guard: jax.Array | None = None
        # The layout of the state for which the measurement of held-out losses is compiled.
        self._measured_for: Layout | None = None
        self.replicas = (ReplicaInput(options.shape, place=_placed),)
        self.dispatch = None

    @property
    def remat(self) -> str | tuple[str, ...] | None:
        if self._step is None or self._compiled_for[0] != self._stored.layout:
            return None
        return self._step.forward.remat

    @property
    def _state(self) -> TrainState:
        (state,) = self._stored.states
        return state

    @property
    def _layers(self) -> Weights:
        return self._backbone.weights["layers"]

    def refuse_implementations(self, dropout: bool) -> None:
        refuse_implementations(self._backbone, self._options, dropout, self._state)

    def run(
        self,
        plan: RoundPlan,
        done: list[int],
        stop: Callable[[], bool],
        due: Callable[[tuple[int, ...]], DueUpdates],
        following: Callable[[], RoundPlan | None],
    ) -> RoundOutcome:
        slots, outcome = jax.device_put(plan.slots), RoundOutcome({})
        left = list(plan.updates)
        for i in range(len(done), len(plan.microbatches) + 1):
            while left and left[0].after < i:
                numbers = due(left[0].slots)
                # A GPU reports only afterwards that it ran out of memory. Before the update, the
                # round can still be repeated.
                if self._trial_rounds and not fits(jax.block_until_ready, self._state.loss):
                    return outcome._replace(lost=True)
                state, stats = update(self._state, self._stored.layout, numbers, self._layers)
                self._stored.states = [state]
                outcome.updates[left.pop(0).slots] = stats
            if i == len(plan.microbatches):
                break
            if not fits(self._accumulate, plan.microbatches[i].arrays, slots, plan.dropout):
                return outcome._replace(lost=True)
            done.append(i)
            if stop():
                return outcome
        tried = self._trial_rounds and not plan.updates
        if tried and not fits(jax.block_until_ready, self._state.loss):
            return outcome._replace(lost=True)
        self._trial_rounds = max(0, self._trial_rounds - 1)
        return outcome

    def marker(self) -> jax.Array:
        return self._stored.marker()

    def _accumulate(self, microbatch: Microbatch, slots: SlotTable, dropout: bool) -> None:
        wanted = self._stored.layout, dropout
        if self._step is None or self._compiled_for != wanted:
            self._trial_rounds = _TRIAL_ROUNDS
            if self._guard is None:
                self._guard = keep_small_arrays_together()
            self._step = self._compiled_ahead(dropout) or compile_accumulate(
                self._backbone,
                self._options,
                dropout,
                self._state,
                microbatch,
                slots,
                self._leaner_by,
            )
            self._compiled_for = wanted
        arguments = accumulate_arguments(
            self._backbone, self._step.forward, self._state, microbatch, slots
        )
        if self._step.is_read:
            _, _, *arrays = arguments
            accumulators, loss = self._step.program(*arrays)
        else:
            accumulators, loss = accumulate(*arguments)
        self._stored.states = [self._state._replace(accumulators=accumulators, loss=loss)]

    def _compiled_ahead(self, dropout: bool) -> TrainingStep | None:
        if self._programs is None or self._leaner_by:
            return None
        return self._programs.training_step(self._stored.layout, dropout)

    def take_passes(self) -> list[DispatchedPass]:
        return []

    def settle(self) -> tuple[int, ...]:
        return ()

    def collect(self) -> None:
        pass

    def recover(self) -> None:
        self._leaner_by += 1
        self._step = None
        self._stored.empty_accumulators()

    def evaluate(
        self, tasks: Mapping[int, PreparedTask], samples: SampleIndices
    ) -> DispatchedLosses:
        if self._programs:
            self._programs.wait_for_evaluation()
        backbone, capacity = self._backbone, len(self._state.loss)
        forward = forward_options(backbone, self._options, self._state.adapters)
        table = jax.device_put(slot_table(tasks, None, capacity))
        losses, tokens = np.zeros(capacity, np.float32), Counter()
        batches = {slot: task.eval_samples for slot, task in tasks.items()}
        shares = shares_of_replicas(batches, samples, self.dispatch)
        for microbatch in fill_microbatches(batches, self.replicas, shares):
            weights, adapters = backbone.weights, self._state.adapters
            config, arrays = backbone.config, _placed(microbatch.arrays)
            if self._measured_for != self._stored.layout:
                compiled(evaluate.lower(config, forward, weights, adapters, losses, arrays, table))
                self._measured_for = self._stored.layout
            losses = evaluate(config, forward, weights, adapters, losses, arrays, table)
            tokens.update(microbatch.tokens)
        return DispatchedLosses(lambda: jax.device_get(losses), tokens)

    def try_memory(self, dropout: bool) -> bool:
        if not isinstance(self._programs, DeviceSizeAhead):
            return False
        return self._programs.try_memory(self._stored.layout, dropout)

    def warm_up(self, none_due: DueUpdates, dropout: bool) -> bool:
        microbatch = _placed([empty_microbatch(self._options.shape)])
        table = jax.device_put(slot_table({}, None, len(none_due.due)))
        while not (
            fits(self._accumulate, microbatch, table, dropout)
            and fits(jax.block_until_ready, self._state.loss)
        ):
            self.recover()
        state, _ = update(self._state, self._stored.layout, none_due, self._layers, warm=True)
        self._stored.states = [state]
        self.marker()
        forward = forward_options(self._backbone, self._options, state.adapters)
        none = np.zeros(len(none_due.due), np.float32)
        weights = self._backbone.weights
        evaluate(self._backbone.config, forward, weights, state.adapters, none, microbatch, table)
        return not self._leaner_by

    def release(self) -> None:
        pass


def _placed(microbatches: Sequence[Microbatch]) -> Microbatch:
    (microbatch,) = microbatches
    return jax.device_put(microbatch)
