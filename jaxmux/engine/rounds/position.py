"""The next rounds, which a thread packs ahead of the device, and the progress within the current
round and the next one, of which a part may be dispatched early."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..devices.executor import Executor
from ..engine_options import EngineOptions
from ..state.slots import Slots
from .rounds import Due, RoundPlan, SampleIndices, TaskGroups, training_rounds

T = TypeVar("T")


class Prefetch(Iterator[T]):
    """Iterates over `items` while a background thread computes the next ones.

    If `items` raises an exception, `next` raises it in place of the next item. After `close`, the
    items that were computed ahead are lost. To continue, a caller must create `items` again, from
    the item after the last one that it received.
    """

    def __init__(self, items: Iterable[T], depth: int = 2):
        """Starts the thread, which computes at most `depth` + 1 items ahead; `depth` is at least
        1."""
        self._items = iter(items)
        self._executor = ThreadPoolExecutor(1)
        self._ahead: deque[Future[T]] = deque()
        for _ in range(depth + 1):
            self._compute_another()

    def __next__(self) -> T:
        if not self._ahead:
            raise StopIteration
        # The end of `items`, or its exception, stays first in the queue, so that later calls raise
        # it again.
        item = self._ahead[0].result()
        self._ahead.popleft()
        self._compute_another()
        return item

    def close(self) -> None:
        """Stops the thread, waits for its end, and drops the items that were computed ahead."""
        self._executor.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _compute_another(self) -> None:
        self._ahead.append(self._executor.submit(next, self._items))


class RoundStream:
    """The next rounds of the live tasks. A thread packs them ahead of the device.

    Attributes:
      seconds_waited: seconds that `next` has waited for rounds to be packed.
    """

    def __init__(self, slots: Slots, options: EngineOptions, executor: Executor):
        self.seconds_waited = 0.0
        self._slots = slots
        self._options = options
        self._executor = executor
        self._groups = TaskGroups(executor.replicas)
        self._rounds: Prefetch[RoundPlan] | None = None
        # The slots whose tasks have a turn in the next round.
        self._following: set[int] = set()

    def resized(
        self, options: EngineOptions, executor: Executor, numbers: Mapping[int, int]
    ) -> "RoundStream":
        """Ends this stream, and returns one that continues with other sizes. `numbers` maps the old
        number of every occupied slot to its new one."""
        self.close()
        other = RoundStream(self._slots, options, executor)
        other.seconds_waited = self.seconds_waited
        other._groups = self._groups.renumbered(executor.replicas, numbers)
        return other

    def begin(self, live: Mapping[int, int], accumulated: SampleIndices) -> None:
        """Has the thread pack the next rounds of the live tasks, unless it does so already. `live`
        has the next step of every live task by slot, and `accumulated` the indices of the samples
        of these steps whose gradients have been accumulated."""
        if self._rounds is not None and self._following == live.keys():
            return
        # The stream knows when tasks end as planned; any other change needs a new stream.
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
        if self._rounds is not None:
            self._rounds.close()
            self._rounds = None


class RoundPosition:
    """The current round, its dispatched microbatches, and the round after it.

    An executor may start microbatches of the following round before the current one has ended. If
    it is stopped then, the rest of that round is planned again without the samples that were
    trained.

    Attributes:
      current: the current round; None between two rounds.
      done: indices of its microbatches that have been dispatched.
      following: the round after it, if the executor may have begun it.
      begun_ahead: whether the executor may have begun the current round during the round before,
        and has not been called for it since.
    """

    def __init__(self, stream: RoundStream):
        self.current: RoundPlan | None = None
        self.done: list[int] = []
        self.following: RoundPlan | None = None
        self.begun_ahead = False
        self._stream = stream
        # By slot, indices of samples in the task's global batch: those whose gradients were in the
        # accumulators when the current round began; and those of the following round that were
        # trained before a stop.
        self._accumulated: dict[int, list[int]] = {}
        self._accumulated_ahead: dict[int, list[int]] = {}

    def prepare(self, live: Mapping[int, int]) -> None:
        """Has the next round packed, between two rounds. `live` is as for `RoundStream.begin`."""
        if live:
            self._stream.begin(live, self._accumulated)

    def begin(self, live: Mapping[int, int]) -> RoundPlan:
        self.current = self.current or self._stream.next(live, self._accumulated)
        self.begun_ahead = False
        return self.current

    def plan_following(self, live: Mapping[int, int]) -> RoundPlan | None:
        """The round after the current one; None if there is none, or if it may not begin yet.
        `live` has, by slot, the step of each task after the current round, as far as it is
        known."""
        if self._accumulated_ahead:
            # Part of the following round was trained before a stop.
            return None
        self.following = self._stream.next(live, self._accumulated_after_round()) if live else None
        return self.following

    def stop(self, updates: tuple[Due, ...], ahead: Sequence[int]) -> None:
        """Notes that the executor was stopped within the current round, before it dispatched these
        updates. It has trained the microbatches `ahead` of the following round."""
        self.current = self.current._replace(updates=updates)
        self._forget_following(ahead)

    def end(self, ahead: Sequence[int]) -> None:
        """Notes that all updates of the current round have been dispatched. The following round, if
        there is one, becomes the current one; `ahead` are the indices of its dispatched
        microbatches."""
        self._accumulated = self._accumulated_after_round()
        self.current, self.following = self.following, None
        self.done, self.begun_ahead = list(ahead), self.current is not None
        self._add_what_is_ahead()

    def settle(self, ended: Sequence[int]) -> None:
        """Notes that all started microbatches of the current round have ended; `ended` are their
        indices. The rest of the round is planned again."""
        self.following, self.current = self.current, None
        self._forget_following(ended)
        self._add_what_is_ahead()
        self.done, self.begun_ahead = [], False

    def begin_again(self) -> None:
        self.done, self.current, self.following, self.begun_ahead = [], None, None, False
        self._accumulated, self._accumulated_ahead = {}, {}
        self._stream.close()

    def discard_plans(self) -> None:
        """Discards planned rounds that have not begun, because tasks change."""
        if not self.begun_ahead:
            self.current = None
        self._stream.close()

    def accumulated(self, number: int) -> list[int]:
        """Indices of the samples in a slot's unfinished global batch whose gradients are
        accumulated, ascending."""
        plan, before = self.current, self._accumulated.get(number, ())
        if plan is None:
            return sorted(before)
        ahead = self._accumulated_ahead.get(number, ())
        if number in plan.ends and not any(number in due.slots for due in plan.updates):
            # The global batch is complete, and its update is dispatched.
            return sorted(ahead)
        return sorted([*before, *_samples(plan, self.done, number), *ahead])

    def goes_on(self, number: int) -> bool:
        """Whether rounds before the current one have begun a slot's global batch."""
        return bool(self._accumulated.get(number))

    def renumber(self, numbers: Mapping[int, int], stream: RoundStream) -> None:
        """Renumbers the slots between two rounds; `numbers` maps each old number to the new one."""
        self._accumulated = {
            numbers[old]: samples for old, samples in self._accumulated.items() if old in numbers
        }
        self.discard_plans()
        self._stream = stream

    def restore(self, number: int, accumulated: Sequence[int]) -> None:
        """Sets the result of `accumulated` for a slot, between two rounds."""
        self._accumulated[number] = list(accumulated)

    def _accumulated_after_round(self) -> dict[int, list[int]]:
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
        """Adds samples that were trained before a stop to the accumulated ones."""
        for number, samples in self._accumulated_ahead.items():
            self._accumulated.setdefault(number, []).extend(samples)
        self._accumulated_ahead = {}

    def _forget_following(self, ended: Sequence[int]) -> None:
        """Discards the following round, but remembers the samples of its trained microbatches
        `ended`."""
        if self.following is None:
            return
        for i in ended:
            samples: SampleIndices = self.following.microbatches[i].samples
            for number, trained in samples.items():
                self._accumulated_ahead.setdefault(number, []).extend(trained)
        self.following = None
        self._stream.close()


def _samples(plan: RoundPlan, microbatches: Iterable[int], number: int) -> Iterator[int]:
    return (i for m in microbatches for i in plan.microbatches[m].samples.get(number, ()))
