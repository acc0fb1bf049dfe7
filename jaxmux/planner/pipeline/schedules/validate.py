"""Checks that a schedule is legal, from its tables alone. Shares no code with the generators."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from .schedule import PipelineSchedule, Update

_MOST_REPORTED = 20

# The tick of each ("F" or "B", virtual stage, microbatch).
_Ticks = dict[tuple[str, int, int], int]


class IllegalSchedule(ValueError):
    """A pipeline schedule cannot run, or would train the tasks wrongly. The message lists up to 20
    violations."""


def validate(schedule: PipelineSchedule, buffer_limit: Sequence[int] | None = None) -> None:
    """Raises IllegalSchedule unless a schedule can run and trains every task correctly:

    - The four tables have the same shape.
    - Every microbatch runs exactly once forward and once backward on every virtual stage.
    - Every pass runs in a later tick than the pass whose output it uses.
    - Every (task, step) has exactly one update. On each stage it comes in or after the tick of the
      last backward pass of its global batch, and before the first forward pass of later steps.
    - The microbatches in flight on a stage fit into its buffers, if `buffer_limit` is not None.
    """
    problems = list(_shape_problems(schedule)) or list(_count_problems(schedule))
    if not problems:
        ticks = {(letter, v, m): tick for letter, _, tick, v, m in _table_entries(schedule)}
        problems = [
            *_dependency_problems(schedule, ticks),
            *_update_problems(schedule, ticks),
            *_buffer_problems(schedule, buffer_limit),
        ]
    if problems:
        more = len(problems) - _MOST_REPORTED
        lines = problems[:_MOST_REPORTED] + ([f"and {more} more"] if more > 0 else [])
        raise IllegalSchedule("\n".join(lines))


def _shape_problems(schedule: PipelineSchedule) -> Iterator[str]:
    shape = schedule.forward_microbatch.shape
    for name in ("backward_microbatch", "forward_virtual_stage", "backward_virtual_stage"):
        if getattr(schedule, name).shape != shape:
            yield f"{name} has shape {getattr(schedule, name).shape}, forward_microbatch {shape}"


def _table_entries(schedule: PipelineSchedule) -> Iterator[tuple[str, int, int, int, int]]:
    """(direction, stage, tick, virtual stage, microbatch) of every entry of the tables."""
    for direction, microbatch, virtual_stage in (
        ("F", schedule.forward_microbatch, schedule.forward_virtual_stage),
        ("B", schedule.backward_microbatch, schedule.backward_virtual_stage),
    ):
        for stage, tick in np.argwhere(microbatch != -1).tolist():
            v, m = int(virtual_stage[stage, tick]), int(microbatch[stage, tick])
            yield direction, stage, tick, v, m


def _count_problems(schedule: PipelineSchedule) -> Iterator[str]:
    stages, virtual, count = schedule.stages, schedule.virtual_stages, len(schedule.microbatches)
    seen: dict[tuple[str, int, int], int] = {}
    for direction, stage, tick, v, m in _table_entries(schedule):
        where = f"stage {stage}, tick {tick}: {direction} of microbatch {m}"
        if not 0 <= m < count:
            yield f"{where}: there are {count} microbatches"
            continue
        if not 0 <= v < virtual or v % stages != stage:
            yield f"{where}: the stage has no virtual stage {v}"
            continue
        if (direction, v, m) in seen:
            yield f"{where} ran before, in tick {seen[direction, v, m]}"
        seen.setdefault((direction, v, m), tick)
    for direction, v, m in product("FB", range(virtual), range(count)):
        if (direction, v, m) not in seen:
            where = f"stage {v % stages}, virtual stage {v}"
            yield f"{where}: {direction} of microbatch {m} is in no tick"


def _producer(
    schedule: PipelineSchedule, direction: str, v: int, m: int
) -> tuple[str, int, int] | None:
    """The op whose output this op uses; None for the first forward pass of a microbatch."""
    if direction == "F":
        return ("F", v - 1, m) if v else None
    last = v == schedule.virtual_stages - 1
    return ("F", v, m) if last else ("B", v + 1, m)


def _dependency_problems(schedule: PipelineSchedule, ticks: _Ticks) -> Iterator[str]:
    for (direction, v, m), tick in ticks.items():
        source = _producer(schedule, direction, v, m)
        if source is not None and ticks[source] >= tick:
            yield (
                f"stage {v % schedule.stages}, tick {tick}: {direction} of microbatch {m} needs "
                f"its {source[0]} on stage {source[1] % schedule.stages}, which runs in tick "
                f"{ticks[source]}"
            )


def _update_problems(schedule: PipelineSchedule, ticks: _Ticks) -> Iterator[str]:
    members: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for m, microbatch in enumerate(schedule.microbatches):
        for task, step in zip(microbatch.tasks, microbatch.steps, strict=True):
            members[task][step].append(m)
    updates = defaultdict(list)
    for update in schedule.updates:
        updates[update.task, update.step].append(update)
    for task, step in updates:
        if step not in members[task]:
            yield f"task {task}: updates after step {step}, of which there is no microbatch"
    for task, steps in members.items():
        for step, microbatches in steps.items():
            present = updates[task, step]
            if len(present) != 1 or len(present[0].ticks) != schedule.stages:
                yield (
                    f"task {task}, step {step} (microbatches {microbatches}): "
                    f"{len(present)} updates, expected one with a tick for each of "
                    f"{schedule.stages} stages"
                )
                continue
            later = [m for other, of_step in steps.items() if other > step for m in of_step]
            yield from _order_problems(schedule, ticks, present[0], microbatches, later)


def _order_problems(
    schedule: PipelineSchedule,
    ticks: _Ticks,
    update: Update,
    microbatches: Sequence[int],
    later: Sequence[int],
) -> Iterator[str]:
    """Yields the microbatches of the update's step that run too late, and the microbatches of later
    steps that run too early."""
    for v in range(schedule.virtual_stages):
        stage = v % schedule.stages
        at = update.ticks[stage]
        name = f"stage {stage}, tick {at}: update of task {update.task} after step {update.step}"
        for m in microbatches:
            if ticks["B", v, m] > at:
                yield f"{name} comes before B of its microbatch {m} in tick {ticks['B', v, m]}"
        for m in later:
            if ticks["F", v, m] <= at:
                yield (
                    f"{name} is too late for F of microbatch {m} of a later step in tick "
                    f"{ticks['F', v, m]}"
                )


def _buffer_problems(
    schedule: PipelineSchedule, buffer_limit: Sequence[int] | None
) -> Iterator[str]:
    if buffer_limit is None:
        return
    if len(buffer_limit) != schedule.stages:
        yield f"buffer_limit has {len(buffer_limit)} entries for {schedule.stages} stages"
        return
    taken = [0] * schedule.stages
    # The backward pass comes first in its tick.
    entries = sorted(_table_entries(schedule), key=lambda entry: (entry[2], entry[0]))
    for direction, stage, tick, _, m in entries:
        size = schedule.microbatches[m].buffers
        taken[stage] += size if direction == "F" else -size
        if direction == "F" and taken[stage] > buffer_limit[stage]:
            yield (
                f"stage {stage}, tick {tick}: with microbatch {m}, residuals take {taken[stage]} "
                f"of {buffer_limit[stage]} buffers"
            )
