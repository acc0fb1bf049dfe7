"""Proves a schedule legal from its tables alone. Shares no code with what makes schedules."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from .schedule import PipelineSchedule

_MOST_REPORTED = 20


class IllegalSchedule(ValueError):
    """The executor could not run this schedule, or would train something else with it."""


def validate(schedule: PipelineSchedule, buffer_limit: Sequence[int] | None = None) -> None:
    """Checks everything that the contract of `Schedule` asks for.

    - Every job runs exactly once forward and once backward on every virtual stage.
    - An op runs at least one tick after the op whose output it takes.
    - A task's update on a stage comes in or after the tick of the last backward of its global
      batch there, and before the tick of the first forward of its next one.
    - Jobs that wait at the same time on a stage, for their backward or in one of the inboxes, are
      in different slots, and residuals are within the limit.

    Args:
      schedule: the schedule.
      buffer_limit: residual slots of each stage; None for no limit.

    Raises:
      IllegalSchedule: names stage, tick and microbatch of every violation, up to 20.
    """
    problems = list(_shape_problems(schedule)) or [
        *_count_problems(schedule),
    ]
    if not problems:
        ticks = _collect_ticks(schedule)
        problems = [
            *_dependency_problems(schedule, ticks),
            *_update_problems(schedule, ticks),
            *_residual_problems(schedule, ticks, buffer_limit),
            *_inbox_problems(schedule, ticks),
        ]
    if problems:
        more = len(problems) - _MOST_REPORTED
        lines = problems[:_MOST_REPORTED] + ([f"and {more} more"] if more > 0 else [])
        raise IllegalSchedule("\n".join(lines))


# {("F" or "B", virtual stage, job): tick}
_Ticks = dict[tuple[str, int, int], int]


def _shape_problems(schedule: PipelineSchedule) -> Iterator[str]:
    shape = schedule.forward_mb.shape
    for name in ("backward_mb", "forward_chunk", "backward_chunk"):
        if getattr(schedule, name).shape != shape:
            yield f"{name} has shape {getattr(schedule, name).shape}, forward_mb {shape}"
    virtual = schedule.residual_slot.shape[0]
    if virtual == 0 or virtual % shape[0]:
        yield f"residual_slot has {virtual} virtual stages for {shape[0]} stages"
    for name in ("residual_slot", "activation_slot", "gradient_slot"):
        if getattr(schedule, name).shape != (virtual, len(schedule.jobs)):
            yield (
                f"{name} has shape {getattr(schedule, name).shape}, expected "
                f"{(virtual, len(schedule.jobs))}"
            )


def _table_entries(schedule: PipelineSchedule) -> Iterator[tuple[str, int, int, int, int]]:
    """(kind, stage, tick, chunk, microbatch) of every entry of the two tables."""
    for kind, table, chunks in (
        ("F", schedule.forward_mb, schedule.forward_chunk),
        ("B", schedule.backward_mb, schedule.backward_chunk),
    ):
        for stage, tick in np.argwhere(table != -1).tolist():
            yield kind, stage, tick, int(chunks[stage, tick]), int(table[stage, tick])


def _count_problems(schedule: PipelineSchedule) -> Iterator[str]:
    stages, virtual, jobs = schedule.stages, schedule.virtual_stages, len(schedule.jobs)
    seen: dict[tuple[str, int, int], int] = {}
    for kind, stage, tick, chunk, mb in _table_entries(schedule):
        where = f"stage {stage}, tick {tick}: {kind} of microbatch {mb}"
        if not 0 <= mb < jobs:
            yield f"{where}: there are {jobs} microbatches"
            continue
        if not 0 <= chunk * stages + stage < virtual:
            yield f"{where}: there is no chunk {chunk}"
            continue
        key = kind, chunk * stages + stage, mb
        if key in seen:
            yield f"{where} ran before, in tick {seen[key]}"
        seen.setdefault(key, tick)
    for kind in "FB":
        for v in range(virtual):
            for mb in range(jobs):
                if (kind, v, mb) not in seen:
                    yield (
                        f"stage {v % stages}, chunk {v // stages}: {kind} of microbatch {mb} is in "
                        "no tick"
                    )


def _collect_ticks(schedule: PipelineSchedule) -> _Ticks:
    return {
        (kind, chunk * schedule.stages + stage, mb): tick
        for kind, stage, tick, chunk, mb in _table_entries(schedule)
    }


def _producer(
    schedule: PipelineSchedule, kind: str, v: int, mb: int
) -> tuple[str, int, int] | None:
    """The op whose output an op takes."""
    if kind == "F":
        return ("F", v - 1, mb) if v else None
    last = v == schedule.virtual_stages - 1
    return ("F", v, mb) if last else ("B", v + 1, mb)


def _dependency_problems(schedule: PipelineSchedule, ticks: _Ticks) -> Iterator[str]:
    for (kind, v, mb), tick in ticks.items():
        source = _producer(schedule, kind, v, mb)
        if source is not None and ticks[source] >= tick:
            yield (
                f"stage {v % schedule.stages}, tick {tick}: {kind} of microbatch {mb} needs its "
                f"{source[0]} on stage {source[1] % schedule.stages}, which runs in tick "
                f"{ticks[source]}"
            )


def _update_problems(schedule: PipelineSchedule, ticks: _Ticks) -> Iterator[str]:
    members: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for mb, job in enumerate(schedule.jobs):
        for task, step in zip(job.tasks, job.steps, strict=True):
            members[task][step].append(mb)
    updates = defaultdict(list)
    for update in schedule.updates:
        updates[update.task, update.step].append(update)
    for task, step in updates:
        if step not in members[task]:
            yield f"task {task}: updates after step {step}, of which there is no microbatch"
    for task, steps in members.items():
        for step, mbs in steps.items():
            found = updates[task, step]
            if len(found) != 1 or len(found[0].ticks) != schedule.stages:
                yield (
                    f"task {task}, step {step} (microbatches {mbs}): {len(found)} updates, "
                    f"expected one with a tick for each of {schedule.stages} stages"
                )
                continue
            later = [mb for other, own in steps.items() if other > step for mb in own]
            yield from _update_order(schedule, ticks, found[0], mbs, later)


def _update_order(schedule, ticks: _Ticks, update, before, after) -> Iterator[str]:
    for v in range(schedule.virtual_stages):
        stage = v % schedule.stages
        at = update.ticks[stage]
        name = f"stage {stage}, tick {at}: update of task {update.task} after step {update.step}"
        for mb in before:
            if ticks["B", v, mb] > at:
                yield (f"{name} comes before B of its microbatch {mb} in tick {ticks['B', v, mb]}")
        for mb in after:
            if ticks["F", v, mb] <= at:
                yield (
                    f"{name} is too late for F of microbatch {mb} of a later step in tick "
                    f"{ticks['F', v, mb]}"
                )


# A wait is (stage, first, last, first slot, slots, microbatch). Times are twice the tick, so that
# the forward of a tick lies after its backward.
_Wait = tuple[int, int, int, int, int, int]


def _residual_problems(
    schedule: PipelineSchedule, ticks: _Ticks, limit: Sequence[int] | None
) -> Iterator[str]:
    if limit is not None and len(limit) != schedule.stages:
        yield f"buffer_limit has {len(limit)} entries for {schedule.stages} stages"
        return
    waits = []
    for v in range(schedule.virtual_stages):
        for mb, job in enumerate(schedule.jobs):
            stage, slot = v % schedule.stages, int(schedule.residual_slot[v, mb])
            begin, end = ticks["F", v, mb], ticks["B", v, mb]
            waits.append((stage, 2 * begin + 1, 2 * end, slot, job.buffers, mb))
            if limit is not None and slot + job.buffers > limit[stage]:
                yield (
                    f"stage {stage}, tick {begin}: microbatch {mb} takes residual slots up to "
                    f"{slot + job.buffers - 1} of {limit[stage]}"
                )
    yield from _slot_problems("residual", waits)


def _inbox_problems(schedule: PipelineSchedule, ticks: _Ticks) -> Iterator[str]:
    for name, kind, slots in (
        ("activation", "F", schedule.activation_slot),
        ("gradient", "B", schedule.gradient_slot),
    ):
        waits = []
        for v in range(schedule.virtual_stages):
            for mb, job in enumerate(schedule.jobs):
                source = _producer(schedule, kind, v, mb)
                if source is not None and ticks[source] < ticks[kind, v, mb]:
                    stage, slot = v % schedule.stages, int(slots[v, mb])
                    first, last = 2 * ticks[source] + 2, 2 * ticks[kind, v, mb] + 1
                    waits.append((stage, first, last, slot, job.buffers, mb))
        yield from _slot_problems(name, waits)


def _slot_problems(ring: str, waits: list[_Wait]) -> Iterator[str]:
    """Reports waits whose slots are taken: sweeps through time with the owner of every slot."""
    owner: dict[tuple[int, int], tuple[int, int]] = {}
    for stage, first, last, slot, size, mb in sorted(waits, key=lambda wait: wait[1]):
        if slot < 0:
            yield f"stage {stage}, tick {first // 2}: microbatch {mb} has no {ring} slot"
            continue
        for taken in range(slot, slot + size):
            until, holder = owner.get((stage, taken), (-1, -1))
            if until >= first:
                yield (
                    f"stage {stage}, tick {first // 2}: {ring} slot {taken} of microbatch {mb} is "
                    f"held by microbatch {holder} until tick {until // 2}"
                )
            owner[stage, taken] = last, mb
