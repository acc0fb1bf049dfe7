"""Lays ordered ops out on the lockstep clock: each in the first tick in which it can run."""

from collections import defaultdict
from typing import Literal

import numpy as np

from ...errors import PlanningError
from .buffer_ring import BufferRing, first_fit
from .orders import Op
from .schedule import NONE, PipelineSchedule, Update
from .workload import Workload

# What the stages do in a tick: each one op, "single"; each a forward, a backward or both, "paired";
# or all of them forwards in one tick and backwards in the next, "alternating".
TickRule = Literal["single", "paired", "alternating"]


def lay_out(load: Workload, orders: list[list[Op]], rule: TickRule = "single") -> PipelineSchedule:
    """The schedule in which every stage takes its ops in the given order, each as early as it can.

    A tick is as long as its slowest stage. With single ops, forwards of some stages meet backwards
    of others, and a job takes 2 max(F, B). With paired and with alternating ticks it takes F + B,
    however different the two are; but it is in flight for nearly twice as many jobs, and needs as
    many more buffers. Alternating ticks have it back one job sooner, for twice the permutes: its
    first backward comes in the tick after its last forward, in place of a whole F + B later.

    Args:
      load: the workload.
      orders: by stage, its ops in order. The orders of all stages together must have no cycle.
      rule: of the ticks.

    Raises:
      PlanningError: the orders have a cycle, or need more buffers than there are.
    """
    ticks = _ticks_of(load, orders, rule)
    stages, length = load.stages, 1 + int(ticks.max())
    mb = np.full((2, stages, length), NONE, np.int32)
    chunk = np.zeros((2, stages, length), np.int32)
    for direction, virtual, job in np.ndindex(*ticks.shape):
        at = direction, virtual % stages, ticks[direction, virtual, job]
        mb[at] = job
        chunk[at] = virtual // stages
    return PipelineSchedule(
        jobs=load.jobs,
        forward_mb=mb[0],
        backward_mb=mb[1],
        forward_chunk=chunk[0],
        backward_chunk=chunk[1],
        residual_slot=_residual_slots(load, orders),
        activation_slot=_activation_slots(load, ticks[0]),
        gradient_slot=_gradient_slots(load, *ticks),
        updates=_updates(load, ticks[1]),
    )


def _ticks_of(load: Workload, orders: list[list[Op]], rule: TickRule) -> np.ndarray:
    """int[2, V, M]: the tick of each forward (0) and backward (1)."""
    shape = (load.virtual_stages, len(load.jobs))
    done = [np.full(shape, NONE).tolist() for _ in range(2)]
    last = load.virtual_stages - 1

    def is_ready(op: Op, tick: int) -> bool:
        if not op.backward:
            return op.virtual == 0 or 0 <= done[0][op.virtual - 1][op.job] < tick
        if op.virtual == last:
            return 0 <= done[0][last][op.job] < tick
        return 0 <= done[1][op.virtual + 1][op.job] < tick

    def choose(stage: int, tick: int, backward: bool | None) -> list[Op]:
        ops, start = orders[stage], following[stage]
        chosen: list[Op] = []
        for op in ops[start : start + (2 if rule == "paired" else 1)]:
            if not is_ready(op, tick) or (chosen and not _can_pair(load, chosen[0], op)):
                break
            chosen.append(op)
        return [op for op in chosen if backward is None or op.backward == backward]

    following = [0] * load.stages
    left = sum(map(len, orders))
    tick, backward = 0, None if rule != "alternating" else False
    while left:
        # Where no stage has an op of the kind that is due, the other kind need not wait.
        for kind in (backward,) if backward is None else (backward, not backward):
            chosen = [choose(stage, tick, kind) for stage in range(load.stages)]
            if any(chosen):
                break
        else:
            stuck = [str(ops[at]) for ops, at in zip(orders, following, strict=True) if ops[at:]]
            raise PlanningError(f"the stages wait for each other in tick {tick}: {stuck}")
        for stage, ops in enumerate(chosen):
            for op in ops:
                done[op.backward][op.virtual][op.job] = tick
            following[stage] += len(ops)
            left -= len(ops)
        tick, backward = tick + 1, None if kind is None else not kind
    return np.array(done)


def _can_pair(load: Workload, first: Op, second: Op) -> bool:
    """Whether the two may share a tick: one of each kind, and no update due in between."""
    if first.backward == second.backward:
        return False
    if second.backward:
        return True
    finished = dict(load.jobs[first.job].batches)
    return all(finished.get(task, step) == step for task, step in load.jobs[second.job].batches)


def _residual_slots(load: Workload, orders: list[list[Op]]) -> np.ndarray:
    """Slots by the order of the ops alone: an order that fits the limit does so in any layout."""
    slots = np.full((load.virtual_stages, len(load.jobs)), NONE, np.int32)
    for stage, ops in enumerate(orders):
        ring = BufferRing(load.buffer_limit[stage] if load.buffer_limit else None)
        for op in ops:
            size = load.jobs[op.job].buffers
            if op.backward:
                ring.free(slots[op.virtual, op.job], size)
            elif ring.find(size) is None:
                raise PlanningError(
                    f"stage {stage}: no room for job {op.job} within {load.buffer_limit[stage]} "
                    "buffers before a backward frees one"
                )
            else:
                slots[op.virtual, op.job] = ring.take(size)
    return slots


def _activation_slots(load: Workload, forward: np.ndarray) -> np.ndarray:
    sent = np.vstack([forward[:1], forward[:-1]])
    slots = _inbox_slots(load, sent, forward)
    slots[0] = NONE
    return slots


def _gradient_slots(load: Workload, forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    sent = np.vstack([backward[1:], forward[-1:]])
    return _inbox_slots(load, sent, backward)


def _inbox_slots(load: Workload, sent: np.ndarray, used: np.ndarray) -> np.ndarray:
    slots = np.full(sent.shape, NONE, np.int32)
    for stage in range(load.stages):
        keys = [
            (v, j)
            for v in range(stage, load.virtual_stages, load.stages)
            for j in range(len(load.jobs))
            if sent[v, j] < used[v, j]
        ]
        waits = [(int(sent[k]) + 1, int(used[k]), load.jobs[k[1]].buffers) for k in keys]
        for key, slot in zip(keys, first_fit(waits), strict=True):
            slots[key] = slot
    return slots


def _updates(load: Workload, backward: np.ndarray) -> tuple[Update, ...]:
    """Every update at the earliest: in the tick of the global batch's last backward."""
    members = defaultdict(list)
    for j, job in enumerate(load.jobs):
        for batch in job.batches:
            members[batch].append(j)
    by_stage = backward.reshape(load.chunks, load.stages, -1).max(axis=0)
    updates = [
        Update(task, step, tuple(by_stage[:, jobs].max(axis=1).tolist()))
        for (task, step), jobs in members.items()
    ]
    return tuple(sorted(updates, key=lambda u: (u.ticks[0], u.task, u.step)))
