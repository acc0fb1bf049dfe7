"""What the engine asks of the devices: an executor runs rounds and evaluates held-out samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from .due_updates import DueUpdates, UpdateStats
from .prepared_task import PreparedTask
from .replica_input import ReplicaInput
from .round_record import DispatchedPass
from .rounds import Dispatch, RoundPlan, SampleIndices


class RoundOutcome(NamedTuple):
    """How far a call of `Executor.run` came.

    Attributes:
      updates: by the slots of an update that was due, its results on the device.
      ahead: indices of the microbatches of the following round that have ended.
      lost: True if the accumulated gradients were lost, because the device ran out of memory. Slots
        that have not been updated begin their global batches again.
    """

    updates: dict[tuple[int, ...], UpdateStats]
    ahead: tuple[int, ...] = ()
    lost: bool = False


class Measurement(NamedTuple):
    """A measurement of held-out losses that has been dispatched.

    Attributes:
      losses: function that waits for the losses: float32 [T], the sum of the cross entropies of the
        measured samples in nats, divided by the number of target tokens of all held-out samples of
        the task; NaN if the forward pass was not finite.
      tokens: by slot, number of tokens of the chunks that hold the measured samples, with padding.
    """

    losses: Callable[[], np.ndarray]
    tokens: Mapping[int, int]


class Executor(Protocol):
    """Runs the compiled programs. The engine decides what is trained, an executor where and when.

    The state of the tasks lies in the `StoredState` that the executor was created with.

    Attributes:
      remat: the remat policy of every layer, or one policy for all layers, with which the training
        programs are compiled; None before they are.
      replicas: what each replica trains at a time.
      dispatch: divides the samples of a round among the replicas; None if there is only one.
    """

    @property
    def remat(self) -> str | tuple[str, ...] | None: ...

    @property
    def replicas(self) -> Sequence[ReplicaInput]: ...

    @property
    def dispatch(self) -> Dispatch | None: ...

    def refuse_implementations(self, dropout: bool) -> None:
        """Checks that the implementations that the options name can serve the state.

        Args:
          dropout: whether the pool has dropout.

        Raises:
          PlanningError: an implementation cannot serve this device, these dtypes or sizes.
        """
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
          plan: the round.
          done: indices of its microbatches that earlier calls have dispatched. The call appends
            those that it dispatches, also if it ends in an exception.
          stop: function that is called after every microbatch. Once it returns True, no further
            microbatch begins and no further update is dispatched.
          due: function that returns an update's numbers for the given slots, of which there may be
            none. It may wait for the results of earlier rounds.
          following: function that returns the round after this one, or None if there is none. The
            call may begin its microbatches. If it was not stopped, the next call is given this
            round; microbatches that have begun end in that call, or in `settle`.
        """
        ...

    def marker(self) -> Any:
        """Small arrays that are ready when the dispatched microbatches have ended on the devices of
        the last part of every replica."""
        ...

    def take_passes(self) -> list[DispatchedPass]:
        """The passes that have been given to the stages of pipelines since the last call."""
        ...

    def settle(self) -> tuple[int, ...]:
        """Ends the microbatches of the following round that have begun, so that tasks can be
        changed. The round itself is forgotten.

        Returns:
          The indices of its microbatches that have ended, in this call and before.
        """
        ...

    def collect(self) -> None:
        """Moves the gradients of all replicas into the `StoredState`, so that they can be read.
        Later sums then have another order."""
        ...

    def recover(self) -> None:
        """Prepares for another try after a call of `run` whose outcome was `lost`: the accumulators
        become empty, and from now on layers recompute more."""
        ...

    def evaluate(self, tasks: Mapping[int, PreparedTask], samples: SampleIndices) -> Measurement:
        """Dispatches a measurement of the losses of held-out samples of tasks, with their current
        adapters, without dropout.

        Args:
          tasks: by slot, the tasks.
          samples: by slot, the indices of the held-out samples that are measured.
        """
        ...

    def try_memory(self, dropout: bool) -> bool:
        """Tries whether there is memory for the programs that have been compiled ahead for the
        state. Those of several devices are run once, because none may be loaded while stages
        exchange arrays.

        Args:
          dropout: whether the pool has dropout.

        Returns:
          False if no programs have been compiled ahead for this state, or those of several devices
          need too much; then `warm_up` prepares others.

        Raises:
          jax.errors.JaxRuntimeError: the only device has too little memory.
        """
        ...

    def warm_up(self, none_due: DueUpdates, dropout: bool) -> bool:
        """Compiles all programs and runs them once, so that no later round, update or measurement
        compiles anything while the state keeps its size.

        Args:
          none_due: no update, with all optimizer kinds that tasks may have.
          dropout: whether the pool has dropout.

        Returns:
          True if the state keeps its bits; False if accumulators and losses are empty, because the
          devices ran out of memory and layers recompute more now.
        """
        ...

    def release(self) -> None:
        """Frees the memory that the executor keeps from round to round besides the state. The next
        round takes it again. Between two rounds only, after `settle`."""
        ...
