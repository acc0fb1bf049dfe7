"""The order of the passes in an endless 1F1B pipeline, whose microbatches become known one round at
a time; and the order in which the host can dispatch the passes of any schedule."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from .greedy_orders import Op
from .schedule import BACKWARD, FORWARD, PipelineSchedule, Workload
from .tick_layout import lay_out


class Pass(NamedTuple):
    """One forward or backward pass of a microbatch through a virtual stage."""

    forward: bool
    virtual_stage: int
    microbatch: int


class Sent(NamedTuple):
    """The result of a pass goes to the stage that uses it. A program that sends between processes
    makes both devices wait for each other. A result is therefore sent only when its pass has ended,
    after the other passes that began before this end."""

    result_of: Pass


def walk(schedule: PipelineSchedule) -> Iterator[Pass | Sent]:
    """Yields the passes of a legal schedule, tick by tick. Within a tick, a stage's backward pass
    comes first, and results are sent at the end."""
    for tick in range(schedule.ticks):
        results = []
        for stage in range(schedule.stages):
            for is_forward, microbatches, virtual_stages in (
                (False, schedule.backward_microbatch, schedule.backward_virtual_stage),
                (True, schedule.forward_microbatch, schedule.forward_virtual_stage),
            ):
                microbatch = int(microbatches[stage, tick])
                if microbatch < 0:
                    continue
                step = Pass(is_forward, int(virtual_stages[stage, tick]), microbatch)
                yield step
                if step.virtual_stage != (schedule.virtual_stages - 1 if is_forward else 0):
                    results.append(Sent(step))
        yield from results


class Ended(NamedTuple):
    """A microbatch has ended; tasks whose global batches are complete can be updated."""

    microbatch: int


# The order follows a simulated clock, on which a backward pass takes twice as long as a forward
# pass. The next pass is the one that can start first; if two can start together, it is the backward
# pass. When a pass has ended on this clock, its result is sent and its microbatch may end. The
# order is therefore good although the host dispatches everything long before it runs.
class StreamOrder:
    """Decides which pass of which stage is dispatched next in an endless 1F1B pipeline
    (PipeDream-Flush, Narayanan et al. 2021, without the flush). Microbatches are numbered from 0.
    `begun` is the number of microbatches whose first forward pass has been dispatched, `ended` the
    number of those that have ended."""

    def __init__(self, stages: int):
        self._forwards = [0] * stages
        self._backwards = [0] * stages
        # For each stage, the time at which its dispatched passes have ended, and the times at which
        # the inputs of its next forward and backward passes arrive.
        self._free = [0.0] * stages
        self._forward_inputs: list[deque[float]] = [deque() for _ in range(stages)]
        self._backward_inputs: list[deque[float]] = [deque() for _ in range(stages)]
        # Passes whose results have not been sent, each with the time at which it ends.
        self._results: list[tuple[float, Pass]] = []
        # End times of the microbatches whose last backward pass has been dispatched.
        self._ends: deque[float] = deque()

    @property
    def begun(self) -> int:
        return self._forwards[0]

    @property
    def ended(self) -> int:
        return self._backwards[0] - len(self._ends)

    def next(self, allowed: int) -> Pass | Sent | Ended | None:
        """Returns the next pass, which then counts as dispatched, the next result to send, or the
        next end of a microbatch; None if there is nothing to do. `allowed` is the number of
        microbatches that may begin so far, including those that have begun."""
        self._forward_inputs[0] = deque([0.0] * (self.begun < allowed))
        # Among passes that could start together, late stages go first, because other stages wait
        # for them.
        stages = reversed(range(len(self._free)))
        possible = [(*start, stage) for stage in stages for start in self._starts(stage)]
        start, forward, stage = min(possible, key=itemgetter(0), default=(math.inf, True, 0))
        end, result_of = min(self._results, key=itemgetter(0), default=(math.inf, None))
        if result_of and end <= start:
            self._results.remove((end, result_of))
            return Sent(result_of)
        if self._ends and self._ends[0] < start:
            self._ends.popleft()
            return Ended(self.ended - 1)
        if not possible:
            return None
        return self._forward(stage) if forward else self._backward(stage)

    def _starts(self, stage: int) -> Iterator[tuple[float, bool]]:
        """Yields the times at which the stage's next backward and forward passes could start, each
        with whether it is a forward pass."""
        free, in_flight = self._free[stage], self._forwards[stage] - self._backwards[stage]
        if self._backward_inputs[stage]:
            yield max(free, self._backward_inputs[stage][0]), False
        if self._forward_inputs[stage] and in_flight < len(self._free) - stage:
            yield max(free, self._forward_inputs[stage][0]), True

    def _forward(self, stage: int) -> Pass:
        end = max(self._free[stage], self._forward_inputs[stage].popleft()) + FORWARD
        step = Pass(True, stage, self._forwards[stage])
        if stage + 1 == len(self._free):
            self._backward_inputs[stage].append(end)
        else:
            self._forward_inputs[stage + 1].append(end)
            self._results.append((end, step))
        self._free[stage] = end
        self._forwards[stage] += 1
        return step

    def _backward(self, stage: int) -> Pass:
        end = max(self._free[stage], self._backward_inputs[stage].popleft()) + BACKWARD
        step = Pass(False, stage, self._backwards[stage])
        if stage == 0:
            self._ends.append(end)
        else:
            self._backward_inputs[stage - 1].append(end)
            self._results.append((end, step))
        self._free[stage] = end
        self._backwards[stage] += 1
        return step


def streaming(workload: Workload, rounds: Sequence[int] | None = None) -> PipelineSchedule:
    """Returns the 1F1B schedule of a stream of rounds, in the order in which training runs it. A
    microbatch begins when all microbatches before it have begun and each of its tasks has been
    updated. `rounds`, if given, has the index of each microbatch's round, ascending. Then later
    microbatches, up to the end of the next round, pass a microbatch that waits for an update
    (LoRAPP, mLoRA 3.2)."""
    stages, count = workload.stages, len(workload.microbatches)
    # `needed`: for each microbatch, the number of microbatches that must have ended before it
    # begins.
    # `current`: for each task, the step and the index of its last microbatch so far.
    # `before`: for each task, the index of the last microbatch of its previous step.
    needed, current, before = [], {}, {}
    for index, microbatch in enumerate(workload.microbatches):
        for task, step in microbatch.global_batches:
            known, last = current.get(task, (step, -1))
            if known != step:
                before[task] = last
            current[task] = step, index
        tasks = (task for task, _ in microbatch.global_batches)
        needed.append(1 + max((before.get(task, -1) for task in tasks), default=-1))
    order, rows = StreamOrder(stages), [[] for _ in range(stages)]
    # The microbatches that have begun, in the order in which `order` numbers them; and the
    # microbatches that may come next.
    begun: list[int] = []
    waiting = deque(range(count) if rounds is None else ())
    known, ended = -1, set[int]()
    while order.ended < count:
        if rounds is not None and not waiting:
            later = (i for i in range(count) if rounds[i] > known)
            # All rounds before the last known one have ended.
            if ended.issuperset(i for i in range(count) if rounds[i] < known):
                following = next((rounds[i] for i in later), None)
                waiting.extend(i for i in range(count) if rounds[i] == following)
                known = known if following is None else following
        candidates = list(waiting) if rounds is not None else list(islice(waiting, 1))
        first = next((i for i in candidates if needed[i] - 1 in ended or not needed[i]), None)
        step = order.next(order.begun + (first is not None))
        if isinstance(step, Ended):
            ended.add(begun[step.microbatch])
        elif isinstance(step, Pass):
            if step.forward and step.virtual_stage == 0:
                waiting.remove(first)
                begun.append(first)
            op = Op(not step.forward, step.virtual_stage, begun[step.microbatch])
            rows[step.virtual_stage].append(op)
    return lay_out(workload, rows)
