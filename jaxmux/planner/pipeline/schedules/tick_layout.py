"""Puts the ordered ops of every stage into ticks: each op into the first tick in which it can
run."""

from collections import defaultdict
from typing import Literal

import numpy as np

from ...errors import PlanningError
from .greedy_orders import Op
from .schedule import NONE, PipelineSchedule, Update, Workload

# The rule by which passes (ops) may share a tick; an argument of schedule generators.
# - "single": every stage runs one pass, forward or backward. This rule keeps the fewest
#   microbatches in flight.
# - "paired": every stage runs a forward pass, a backward pass or both.
# - "alternating": all stages run forward passes in one tick and backward passes in the next.
#
# In lockstep a tick takes as long as its slowest stage. Let F and B be the times of a forward and a
# backward pass on a stage. With "single" ticks, forward passes on some stages share a tick with
# backward passes on others, so a microbatch takes 2 max(F, B) of every stage's time. With "paired"
# and "alternating" ticks a microbatch takes F + B, but nearly twice as many microbatches are in
# flight and need buffers. With "alternating" ticks a microbatch returns to the first stage one tick
# earlier than with "paired" ticks, because its first backward pass directly follows its last
# forward pass. But stages exchange messages twice as often.
TickRule = Literal["single", "paired", "alternating"]


def lay_out(
    workload: Workload, orders: list[list[Op]], rule: TickRule = "single"
) -> PipelineSchedule:
    """Returns the schedule in which every stage runs its ops in order, each as early as
    possible."""
    _check_buffers(workload, orders)
    ticks = _ticks_of(workload, orders, rule)
    stages, length = workload.stages, 1 + int(ticks.max())
    microbatches = np.full((2, stages, length), NONE, np.int32)
    virtual_stages = np.full((2, stages, length), NONE, np.int32)
    for direction, virtual_stage, microbatch in np.ndindex(*ticks.shape):
        tick = ticks[direction, virtual_stage, microbatch]
        microbatches[direction, virtual_stage % stages, tick] = microbatch
        virtual_stages[direction, virtual_stage % stages, tick] = virtual_stage
    return PipelineSchedule(
        microbatches=workload.microbatches,
        forward_microbatch=microbatches[0],
        backward_microbatch=microbatches[1],
        forward_virtual_stage=virtual_stages[0],
        backward_virtual_stage=virtual_stages[1],
        updates=_updates(workload, ticks[1]),
        virtual_per_stage=workload.virtual_per_stage,
    )


def _ticks_of(workload: Workload, orders: list[list[Op]], rule: TickRule) -> np.ndarray:
    """int [2, V, M]: the tick of each forward pass (index 0) and backward pass (index 1)."""
    shape = (workload.virtual_stages, len(workload.microbatches))
    done = [np.full(shape, NONE).tolist() for _ in range(2)]
    last = workload.virtual_stages - 1

    def is_ready(op: Op, tick: int) -> bool:
        if not op.backward:
            if op.virtual_stage == 0:
                return True
            return 0 <= done[0][op.virtual_stage - 1][op.microbatch] < tick
        if op.virtual_stage == last:
            return 0 <= done[0][last][op.microbatch] < tick
        return 0 <= done[1][op.virtual_stage + 1][op.microbatch] < tick

    def choose(stage: int, tick: int, backward: bool | None) -> list[Op]:
        ops, start = orders[stage], following[stage]
        chosen: list[Op] = []
        for op in ops[start : start + (2 if rule == "paired" else 1)]:
            if not is_ready(op, tick) or (chosen and not _can_pair(workload, chosen[0], op)):
                break
            chosen.append(op)
        return [op for op in chosen if backward is None or op.backward == backward]

    following = [0] * workload.stages
    left = sum(map(len, orders))
    tick, backward = 0, None if rule != "alternating" else False
    while left:
        # If no stage has an op in the direction that is due, run ops in the other direction.
        for direction in (backward,) if backward is None else (backward, not backward):
            chosen = [choose(stage, tick, direction) for stage in range(workload.stages)]
            if any(chosen):
                break
        else:
            stuck = [str(ops[at]) for ops, at in zip(orders, following, strict=True) if ops[at:]]
            raise PlanningError(f"the stages wait for each other in tick {tick}: {stuck}")
        for stage, ops in enumerate(chosen):
            for op in ops:
                done[op.backward][op.virtual_stage][op.microbatch] = tick
            following[stage] += len(ops)
            left -= len(ops)
        tick, backward = tick + 1, None if direction is None else not direction
    return np.array(done)


def _can_pair(workload: Workload, first: Op, second: Op) -> bool:
    """Whether two ops may share a tick: they have different directions and no update is due between
    them."""
    if first.backward == second.backward:
        return False
    if second.backward:
        return True
    microbatches = workload.microbatches
    finished = dict(microbatches[first.microbatch].global_batches)
    following = microbatches[second.microbatch].global_batches
    return all(finished.get(task, step) == step for task, step in following)


def _check_buffers(workload: Workload, orders: list[list[Op]]) -> None:
    if workload.buffer_limit is None:
        return
    for stage, (ops, limit) in enumerate(zip(orders, workload.buffer_limit, strict=True)):
        taken = 0
        for op in ops:
            size = workload.microbatches[op.microbatch].buffers
            taken += -size if op.backward else size
            if taken > limit:
                raise PlanningError(
                    f"stage {stage}: no room for microbatch {op.microbatch} within {limit} buffers "
                    "before a backward pass frees one"
                )


def _updates(workload: Workload, backward: np.ndarray) -> tuple[Update, ...]:
    """All updates, each in the tick of the last backward pass of its global batch. `backward`, int
    [V, M], has the tick of each backward pass."""
    members = defaultdict(list)
    for index, microbatch in enumerate(workload.microbatches):
        for batch in microbatch.global_batches:
            members[batch].append(index)
    by_stage = backward.reshape(workload.virtual_per_stage, workload.stages, -1).max(axis=0)
    updates = [
        Update(task, step, tuple(by_stage[:, microbatches].max(axis=1).tolist()))
        for (task, step), microbatches in members.items()
    ]
    return tuple(sorted(updates, key=lambda u: (u.ticks[0], u.task, u.step)))
