"""Rounds packed in a thread, ahead of the device."""

import time
from collections.abc import Mapping

from jaxmux.data import Prefetch

from .engine_options import EngineOptions
from .executor import Executor
from .rounds import RoundPlan, SampleIndices, training_rounds
from .slots import Slots
from .task_groups import TaskGroups


class RoundStream:
    """The next rounds of the live tasks. A thread packs them ahead of the device.

    Attributes:
      seconds_waited: seconds that `next` has waited for rounds to be packed.
    """

    def __init__(self, slots: Slots, options: EngineOptions, executor: Executor):
        """Creates a stream; the first call of `begin` or `next` starts its thread.

        Args:
          slots: the slots, with the tasks that are trained.
          options: the options of the engine.
          executor: the executor, which places the microbatches.
        """
        self.seconds_waited = 0.0
        self._slots = slots
        self._options = options
        self._executor = executor
        self._groups = TaskGroups(executor.replicas)
        self._rounds: Prefetch[RoundPlan] | None = None
        # The slots whose tasks have a global batch in the round that follows.
        self._following: set[int] = set()

    def resized(
        self, options: EngineOptions, executor: Executor, numbers: Mapping[int, int]
    ) -> "RoundStream":
        """Ends this stream; returns one that goes on with other sizes.

        Args:
          options: the options of the engine.
          executor: the executor, which places the microbatches.
          numbers: by old number, the new one of every slot that has a task.
        """
        self.close()
        other = RoundStream(self._slots, options, executor)
        other.seconds_waited = self.seconds_waited
        other._groups = self._groups.renumbered(executor.replicas, numbers)
        return other

    def begin(self, live: Mapping[int, int], accumulated: SampleIndices) -> None:
        """Lets the thread pack the next rounds of the live tasks, if it does not already.

        Args:
          live: by slot, the next step of every live task.
          accumulated: by slot, indices of the samples of these steps whose gradients are in the
            accumulators already.
        """
        if self._rounds is not None and self._following == live.keys():
            return
        # Tasks that end as planned leave the stream by themselves; others make it begin again.
        self.close()
        tasks = {number: self._slots[number].prepared for number in live}
        self._groups.begin_anew(tasks)
        self._following = set(live)
        self._rounds = Prefetch(
            training_rounds(
                tasks,
                live,
                self._slots.pool,
                self._executor.replicas,
                self._options.packing,
                self._executor.dispatch,
                accumulated,
                self._options.round_tokens,
                self._groups,
            )
        )

    def next(self, live: Mapping[int, int], accumulated: SampleIndices) -> RoundPlan:
        """The next round of the live tasks; arguments as for `begin`."""
        self.begin(live, accumulated)
        asked = time.perf_counter()
        following = next(self._rounds)
        self.seconds_waited += time.perf_counter() - asked
        self._following = {
            number
            for number, step in following.steps.items()
            if number not in following.ends or step + 1 < self._slots[number].steps
        }
        return following

    def close(self) -> None:
        """Ends the thread; the next call of `begin` or `next` starts it again."""
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None
