"""The order in which each stage runs its ops, from a greedy simulation of all stages. All
generators but GPipe are settings of this simulation; GPipe's order is fixed."""

import dataclasses
import heapq
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...errors import PlanningError
from .schedule import Workload, independent_series


class Op(NamedTuple):
    """The forward or backward pass of one microbatch on one virtual stage."""

    backward: bool
    virtual_stage: int
    microbatch: int


@dataclasses.dataclass(frozen=True)
class LaunchRule:
    """The rule by which a free stage chooses its next op.

    Attributes:
      in_flight: for each stage, the most microbatches in flight; None for no limit.
      unit_times: whether every op takes one unit of time, for stages that run in lockstep. If
        False, the workload's times determine an order for asynchronous stages.
      skip_blocked: whether later microbatches may pass a microbatch that waits for a task's update.
      forward_first: number of stages, from the first, that prefer forward passes.
    """

    in_flight: Sequence[int] | None = None
    unit_times: bool = True
    skip_blocked: bool = False
    forward_first: int = 0


def greedy_orders(workload: Workload, rule: LaunchRule) -> list[list[Op]]:
    """Returns the ops of each stage in the order in which greedy stages start them. A microbatch is
    launched when it runs forward on virtual stage 0. It is launched only after each of its tasks
    has finished the backward passes of its previous global batch there: LoRAFusion's bubble lemma
    (5.2). Raises PlanningError if the buffers are too few for the pipeline to go on."""
    simulation = _GreedyStages(workload, rule)
    simulation.run()
    return simulation.orders


class _GreedyStages:
    """The state of all stages during the simulation. A microbatch's rank is its position in the
    order of launches. In Megatron's interleaved order, a series of S microbatches goes through one
    virtual stage of a stage, then through the next one. A series is shorter if an update must come
    in between."""

    def __init__(self, workload: Workload, rule: LaunchRule):
        self.workload = workload
        self.rule = rule
        self.orders: list[list[Op]] = [[] for _ in range(workload.stages)]
        self._durations = _whole_durations(workload, rule.unit_times)
        # A heap of the ops that are running, by the time at which they end.
        self._running: list[tuple[int, Op]] = []
        self._busy = [False] * workload.stages
        self._free_buffers = list(workload.buffer_limit or [np.inf] * workload.stages)
        self._in_flight = [0] * workload.stages
        all_series = independent_series(workload, workload.stages)
        # For each rank, the index of the microbatch's series and the position in this series.
        self._place = [(n, i) for n, series in enumerate(all_series) for i in range(len(series))]
        # Forward passes in the order in which every stage runs them: (sort key, rank, part). Part p
        # of a stage is virtual stage p · S + stage.
        self._forwards = sorted(
            ((series, part, i), rank, part)
            for rank, (series, i) in enumerate(self._place)
            for part in range(workload.virtual_per_stage)
        )
        # For each stage, the number of its forward passes that have started.
        self._forwards_started = [0] * workload.stages
        self._launched: list[int] = []
        self._rank: dict[int, int] = {}
        self._waiting = list(range(len(workload.microbatches)))
        # For each global batch, the number of its microbatches that have not finished their last
        # backward pass.
        self._unfinished = Counter(
            batch for microbatch in workload.microbatches for batch in microbatch.global_batches
        )
        self._previous = _previous_global_batches(self._unfinished)
        # Forward passes of virtual stages other than 0 whose input has arrived.
        self._ready_forwards: set[Op] = set()
        # For each stage, a heap of the backward passes whose input has arrived.
        self._ready_backwards: list[list[tuple[tuple[int, int, int], Op]]] = [
            [] for _ in self._busy
        ]

    def run(self) -> None:
        now = 0
        while True:
            for stage in range(self.workload.stages):
                if not self._busy[stage]:
                    self._start_next(stage, now)
            if not self._running:
                break
            now = self._running[0][0]
            while self._running and self._running[0][0] == now:
                self._finish(heapq.heappop(self._running)[1])
        done = sum(map(len, self.orders))
        if done < 2 * self.workload.virtual_stages * len(self.workload.microbatches):
            raise PlanningError(
                f"the pipeline stops with {done} ops done: buffer_limit="
                f"{self.workload.buffer_limit} is too small for {self.workload.virtual_per_stage} "
                "virtual stages per stage"
            )

    def _start_next(self, stage: int, now: int) -> None:
        ready = self._ready_backwards[stage]
        prefers_forward = stage < self.rule.forward_first or not ready
        op = self._next_forward(stage) if prefers_forward else None
        if op is not None:
            self._start_forward(stage, op)
        elif ready:
            _, op = heapq.heappop(ready)
        else:
            return
        self._busy[stage] = True
        self.orders[stage].append(op)
        duration = self._durations[op.backward][op.microbatch][op.virtual_stage]
        heapq.heappush(self._running, (now + duration, op))

    def _next_forward(self, stage: int) -> Op | None:
        if self._forwards_started[stage] == len(self._forwards):
            return None
        limit = self.rule.in_flight
        if limit is not None and self._in_flight[stage] >= limit[stage]:
            return None
        _, rank, part = self._forwards[self._forwards_started[stage]]
        virtual_stage = part * self.workload.stages + stage
        if virtual_stage == 0:
            microbatch = self._next_to_launch()
            op = None if microbatch is None else Op(False, 0, microbatch)
        elif rank < len(self._launched):
            op = Op(False, virtual_stage, self._launched[rank])
            op = op if op in self._ready_forwards else None
        else:
            op = None
        if op is None or self._buffers(op) > self._free_buffers[stage]:
            return None
        return op

    def _next_to_launch(self) -> int | None:
        candidates = self._waiting if self.rule.skip_blocked else self._waiting[:1]
        return next((m for m in candidates if not self._needs_update(m)), None)

    def _needs_update(self, microbatch: int) -> bool:
        batches = self.workload.microbatches[microbatch].global_batches
        previous = (self._previous[batch] for batch in batches if batch in self._previous)
        return any(self._unfinished[batch] for batch in previous)

    def _start_forward(self, stage: int, op: Op) -> None:
        self._forwards_started[stage] += 1
        self._in_flight[stage] += 1
        self._free_buffers[stage] -= self._buffers(op)
        if op.virtual_stage == 0:
            self._waiting.remove(op.microbatch)
            self._rank[op.microbatch] = len(self._launched)
            self._launched.append(op.microbatch)

    def _finish(self, op: Op) -> None:
        stage = op.virtual_stage % self.workload.stages
        self._busy[stage] = False
        if not op.backward:
            if op.virtual_stage + 1 < self.workload.virtual_stages:
                self._ready_forwards.add(Op(False, op.virtual_stage + 1, op.microbatch))
            else:
                self._add_ready_backward(op.virtual_stage, op.microbatch)
            return
        self._in_flight[stage] -= 1
        self._free_buffers[stage] += self._buffers(op)
        if op.virtual_stage:
            self._add_ready_backward(op.virtual_stage - 1, op.microbatch)
        else:
            self._unfinished.subtract(self.workload.microbatches[op.microbatch].global_batches)

    def _add_ready_backward(self, virtual_stage: int, microbatch: int) -> None:
        series, i = self._place[self._rank[microbatch]]
        stages = self.workload.stages
        # Backward passes go through the virtual stages of a stage in descending order.
        key = (series, -(virtual_stage // stages), i)
        op = Op(True, virtual_stage, microbatch)
        heapq.heappush(self._ready_backwards[virtual_stage % stages], (key, op))

    def _buffers(self, op: Op) -> int:
        return self.workload.microbatches[op.microbatch].buffers


def _whole_durations(workload: Workload, unit: bool) -> tuple[list[list[int]], list[list[int]]]:
    """Forward and backward times as whole numbers, so that ops that end together compare equal."""
    if unit:
        ones = np.ones(np.shape(workload.forward), int).tolist()
        return ones, ones
    times = workload.forward, workload.backward
    scale = 2.0**30 / max(np.max(time) for time in times)
    forward, backward = (np.maximum(np.rint(time * scale).astype(int), 1) for time in times)
    return forward.tolist(), backward.tolist()


def _previous_global_batches(batches: Counter) -> dict[tuple[int, int], tuple[int, int]]:
    """For each (task, step), the task's previous global batch. The first global batch of a task has
    none and is left out."""
    ordered = sorted(batches)
    return {
        batch: previous
        for previous, batch in zip(ordered, ordered[1:], strict=False)
        if previous[0] == batch[0]
    }
