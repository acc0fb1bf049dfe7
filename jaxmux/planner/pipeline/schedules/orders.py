"""In which order each stage takes its work: a greedy dispatcher over simulated time.

Schedules are made in two steps. This one decides the order of the ops on every stage, `layout` the
ticks that they fall in. All generators but GPipe, whose order is fixed, are settings of this
dispatcher.
"""

import dataclasses
import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import PlanningError
from .buffer_ring import BufferRing
from .workload import Workload, microbatch_groups


class Op(NamedTuple):
    """Forward or backward of one job on one virtual stage."""

    backward: bool
    virtual: int
    job: int


@dataclasses.dataclass(frozen=True)
class LaunchRule:
    """How a stage that becomes free chooses its next op.

    Attributes:
      in_flight: by stage, most ops with forward done and backward not; None for no such limit. The
        workload's buffer limit holds besides.
      unit_times: every op takes one unit of time: the order suits a lockstep clock. Otherwise the
        workload's times: the order suits stages that run at their own pace.
      skip_blocked: where the next job of the stream must wait for a task's update, launch the next
        one that need not.
      forward_first: the first this many stages prefer a forward to a backward if it may start.
    """

    in_flight: Sequence[int] | None = None
    unit_times: bool = True
    skip_blocked: bool = False
    forward_first: int = 0


def greedy_orders(load: Workload, policy: LaunchRule) -> list[list[Op]]:
    """The ops of each stage in the order in which a greedy dispatcher starts them.

    A free stage runs the earliest backward that is ready, else its next forward if a slot is free
    (the other way round on stages that the policy names).
    A job is launched (starts forward on virtual stage 0) only when, for each of its tasks, all jobs
    of the task's global batch before have finished backward there; on the other stages they have
    then finished too (LoRAFusion 5.2's bubble lemma, per stage).

    Raises:
      PlanningError: the work comes to a stop because buffers are too few.
    """
    dispatcher = _Dispatcher(load, policy)
    dispatcher.run()
    return dispatcher.orders


class _Dispatcher:
    def __init__(self, load: Workload, policy: LaunchRule):
        self.load = load
        self.policy = policy
        self.orders: list[list[Op]] = [[] for _ in range(load.stages)]
        self._times = _whole_times(load, policy.unit_times)
        self._events: list[tuple[int, Op]] = []
        self._busy = [False] * load.stages
        self._rings = [BufferRing(limit) for limit in load.buffer_limit or [None] * load.stages]
        self._slots: dict[tuple[int, int], int] = {}
        self._in_flight = [0] * load.stages
        # A job's rank is its place in the order of launches. In Megatron's order a run of S jobs
        # goes through one chunk, then the same jobs through the next. A run ends early where an
        # update must come in between.
        runs = microbatch_groups(load, load.stages)
        self._place = [(run, i) for run, jobs in enumerate(runs) for i in range(len(jobs))]
        self._turns = sorted(
            ((run, chunk, i), rank, chunk)
            for rank, (run, i) in enumerate(self._place)
            for chunk in range(load.chunks)
        )
        self._turn = [0] * load.stages
        self._launched: list[int] = []
        self._rank: dict[int, int] = {}
        self._waiting = list(range(len(load.jobs)))
        # Jobs of each global batch that have yet to finish.
        self._open = Counter(batch for job in load.jobs for batch in job.batches)
        self._before = _batches_before(self._open)
        self._arrived: set[Op] = set()
        # By stage a heap of the backwards that are ready.
        self._backwards: list[list[tuple[tuple[int, int, int], Op]]] = [[] for _ in self._busy]

    def run(self) -> None:
        now = 0
        while True:
            for stage in range(self.load.stages):
                if not self._busy[stage]:
                    self._dispatch(stage, now)
            if not self._events:
                break
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                self._finish(heapq.heappop(self._events)[1])
        if sum(map(len, self.orders)) < 2 * self.load.virtual_stages * len(self.load.jobs):
            raise PlanningError(
                f"the pipeline stops with {sum(map(len, self.orders))} ops done: buffer_limit="
                f"{self.load.buffer_limit} is too small for {self.load.chunks} chunks a stage"
            )

    def _dispatch(self, stage: int, now: int) -> None:
        op = self._next_forward(stage) if stage < self.policy.forward_first else None
        if op is None and self._backwards[stage]:
            op = self._backwards[stage][0][1]
        if op is None:
            op = self._next_forward(stage)
        if op is None:
            return
        if op.backward:
            heapq.heappop(self._backwards[stage])
        else:
            self._start_forward(stage, op)
        self._busy[stage] = True
        self.orders[stage].append(op)
        heapq.heappush(self._events, (now + self._times[op.backward][op.job][op.virtual], op))

    def _next_forward(self, stage: int) -> Op | None:
        if self._turn[stage] == len(self._turns):
            return None
        limit = self.policy.in_flight
        if limit is not None and self._in_flight[stage] >= limit[stage]:
            return None
        _, rank, chunk = self._turns[self._turn[stage]]
        virtual = chunk * self.load.stages + stage
        if virtual == 0:
            job = self._launchable()
            op = None if job is None else Op(False, 0, job)
        else:
            op = Op(False, virtual, self._launched[rank]) if rank < len(self._launched) else None
            op = op if op in self._arrived else None
        if op is None or self._rings[stage].find(self.load.jobs[op.job].buffers) is None:
            return None
        return op

    def _launchable(self) -> int | None:
        for job in self._waiting:
            if not self._needs_update(job):
                return job
            if not self.policy.skip_blocked:
                return None
        return None

    def _needs_update(self, job: int) -> bool:
        before = (self._before.get(batch) for batch in self.load.jobs[job].batches)
        return any(self._open[batch] for batch in before if batch is not None)

    def _start_forward(self, stage: int, op: Op) -> None:
        self._turn[stage] += 1
        self._in_flight[stage] += 1
        size = self.load.jobs[op.job].buffers
        self._slots[op.virtual, op.job] = self._rings[stage].take(size)
        if op.virtual == 0:
            self._waiting.remove(op.job)
            self._rank[op.job] = len(self._launched)
            self._launched.append(op.job)

    def _finish(self, op: Op) -> None:
        stage = op.virtual % self.load.stages
        self._busy[stage] = False
        if not op.backward:
            if op.virtual + 1 < self.load.virtual_stages:
                self._arrived.add(Op(False, op.virtual + 1, op.job))
            else:
                self._backward_ready(op.virtual, op.job)
            return
        self._in_flight[stage] -= 1
        slot = self._slots.pop((op.virtual, op.job))
        self._rings[stage].free(slot, self.load.jobs[op.job].buffers)
        if op.virtual:
            self._backward_ready(op.virtual - 1, op.job)
        else:
            self._open.subtract(self.load.jobs[op.job].batches)

    def _backward_ready(self, virtual: int, job: int) -> None:
        run, i = self._place[self._rank[job]]
        stages = self.load.stages
        turn = (run, -(virtual // stages), i)
        heapq.heappush(self._backwards[virtual % stages], (turn, Op(True, virtual, job)))


def _whole_times(load: Workload, unit: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Forward and backward times as whole numbers, so that ops that end together compare equal."""
    if unit:
        ones = np.ones(np.shape(load.forward), int).tolist()
        return ones, ones
    scale = 2.0**30 / max(np.max(load.forward), np.max(load.backward))
    forward, backward = (np.rint(t * scale).astype(int) for t in (load.forward, load.backward))
    return np.maximum(forward, 1).tolist(), np.maximum(backward, 1).tolist()


def _batches_before(batches: Counter) -> dict[tuple[int, int], tuple[int, int]]:
    """For each (task, step) the task's global batch before it; none for a task's first."""
    ordered = sorted(batches)
    return {
        batch: before
        for before, batch in zip(ordered, ordered[1:], strict=False)
        if before[0] == batch[0]
    }
