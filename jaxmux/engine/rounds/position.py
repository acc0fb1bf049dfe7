"""The rounds that come next, packed in a thread ahead of the device; how far the current round has
come, and what has begun of the round after it."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jaxmux.data import Prefetch

from ..devices.executor import Executor
from ..engine_options import EngineOptions
from ..state.slots import Slots
from .rounds import Due, RoundPlan, SampleIndices, TaskGroups, training_rounds


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


class RoundPosition:
    """The current round, its dispatched microbatches, and the round after it.

    An executor may begin the following round before the current one has ended. If it is stopped
    then, the rest of that round is planned anew without the samples that have been trained.

    Attributes:
      current: the current round; None between two rounds.
      done: indices of its microbatches that have been dispatched.
      following: the round after it, if the executor may have begun it.
      begun_ahead: whether the executor may have begun the current round while the round before it
        was trained, and has not been given it again.
    """

    def __init__(self, stream: RoundStream):
        """Creates a position between two rounds.

        Args:
          stream: plans the rounds.
        """
        self.current: RoundPlan | None = None
        self.done: list[int] = []
        self.following: RoundPlan | None = None
        self.begun_ahead = False
        self._stream = stream
        # By slot, indices of the samples of a global batch whose gradients were in the accumulators
        # when the current round began; and of the samples of the following round that have been
        # trained, although it was stopped.
        self._accumulated: dict[int, list[int]] = {}
        self._accumulated_ahead: dict[int, list[int]] = {}

    def prepare(self, live: Mapping[int, int]) -> None:
        """Lets the next round be packed, between two rounds.

        Args:
          live: by slot, the next step of every live task.
        """
        if live:
            self._stream.begin(live, self._accumulated)

    def begin(self, live: Mapping[int, int]) -> RoundPlan:
        """The current round, which is planned if there is none.

        Args:
          live: by slot, the next step of every live task.
        """
        self.current = self.current or self._stream.next(live, self._accumulated)
        self.begun_ahead = False
        return self.current

    def plan_following(self, live: Mapping[int, int]) -> RoundPlan | None:
        """The round after the current one; None if there is none, or if it may not begin yet.

        Args:
          live: by slot, the step after the current round of every task that is live as far as is
            known.
        """
        if self._accumulated_ahead:
            # A part of it has been trained before the current round was stopped.
            return None
        self.following = self._stream.next(live, self._accumulated_after_round()) if live else None
        return self.following

    def stop(self, updates: tuple[Due, ...], ahead: Sequence[int]) -> None:
        """Notes that the executor was stopped within the current round.

        Args:
          updates: the updates of the round that have not been dispatched.
          ahead: indices of the microbatches of the following round that have been trained.
        """
        self.current = self.current._replace(updates=updates)
        self._forget_following(ahead)

    def end(self, ahead: Sequence[int]) -> None:
        """Notes that all updates of the current round have been dispatched. The following round, if
        there is one, becomes the current one.

        Args:
          ahead: indices of its microbatches that have been dispatched.
        """
        self._accumulated = self._accumulated_after_round()
        self.current, self.following = self.following, None
        self.done, self.begun_ahead = list(ahead), self.current is not None
        self._add_what_is_ahead()

    def settle(self, ended: Sequence[int]) -> None:
        """Notes that what had begun ahead of the current round has ended. The rest of the round is
        planned anew.

        Args:
          ended: indices of its microbatches that have been trained.
        """
        self.following, self.current = self.current, None
        self._forget_following(ended)
        self._add_what_is_ahead()
        self.done, self.begun_ahead = [], False

    def begin_again(self) -> None:
        """Forgets the current round and all gradients, which were lost."""
        self.done, self.current, self.following, self.begun_ahead = [], None, None, False
        self._accumulated, self._accumulated_ahead = {}, {}
        self._stream.close()

    def discard_plans(self) -> None:
        """Discards the rounds that are planned and have not begun, because tasks change."""
        if not self.begun_ahead:
            self.current = None
        self._stream.close()

    def accumulated(self, number: int) -> list[int]:
        """The samples of a slot's unfinished global batch whose gradients are accumulated,
        ascending.

        Args:
          number: number of the slot.
        """
        plan, before = self.current, self._accumulated.get(number, ())
        if plan is None:
            return sorted(before)
        ahead = self._accumulated_ahead.get(number, ())
        if number in plan.ends and not any(number in due.slots for due in plan.updates):
            # The global batch is complete, and its update is dispatched.
            return sorted(ahead)
        return sorted([*before, *_samples(plan, self.done, number), *ahead])

    def goes_on(self, number: int) -> bool:
        """Whether rounds before the current one have begun a slot's global batch.

        Args:
          number: number of the slot.
        """
        return bool(self._accumulated.get(number))

    def renumber(self, numbers: Mapping[int, int], stream: RoundStream) -> None:
        """Takes note of new numbers of the slots, between two rounds.

        Args:
          numbers: by old number, the new one of every slot that has a task.
          stream: plans the rounds from now on.
        """
        self._accumulated = {
            numbers[old]: samples for old, samples in self._accumulated.items() if old in numbers
        }
        self.discard_plans()
        self._stream = stream

    def restore(self, number: int, accumulated: Sequence[int]) -> None:
        """Sets the result of `accumulated` for a slot, between two rounds.

        Args:
          number: number of the slot.
          accumulated: indices of samples; empty also for a slot whose task has left.
        """
        self._accumulated[number] = list(accumulated)

    def _accumulated_after_round(self) -> dict[int, list[int]]:
        """What `_accumulated` is after the current round."""
        plan = self.current
        kept = {n: samples for n, samples in self._accumulated.items() if n not in plan.steps}
        goes_on = (number for number in plan.steps if number not in plan.ends)
        return kept | {
            number: [
                *self._accumulated.get(number, ()),
                *_samples(plan, range(len(plan.microbatches)), number),
            ]
            for number in goes_on
        }

    def _add_what_is_ahead(self) -> None:
        """Counts what has been trained of a stopped round as trained before the next one."""
        for number, samples in self._accumulated_ahead.items():
            self._accumulated.setdefault(number, []).extend(samples)
        self._accumulated_ahead = {}

    def _forget_following(self, ended: Sequence[int]) -> None:
        """Forgets the following round, of which these microbatches have been trained."""
        if self.following is None:
            return
        for i in ended:
            samples: SampleIndices = self.following.microbatches[i].samples
            for number, own in samples.items():
                self._accumulated_ahead.setdefault(number, []).extend(own)
        self.following = None
        self._stream.close()


def _samples(plan: RoundPlan, microbatches: Iterable[int], number: int) -> Iterator[int]:
    """The samples of a slot in the microbatches of a round with these indices."""
    return (i for m in microbatches for i in plan.microbatches[m].samples.get(number, ()))
