"""The schedules of `RunOptions.schedule`, as plans show them and training runs them.

With "auto", "1f1b" and "lorapp", rounds stream: a microbatch of the next round begins as soon as
its tasks are updated. With the other schedules, the pipeline is empty between two rounds, and every
round has its own table.
"""

from collections.abc import Sequence
from functools import cache

from ...devices import AUTO_SCHEDULE, INTERLEAVED
from .generators import gpipe, interleaved, one_forward_one_backward, template, template_order
from .greedy_orders import Op
from .schedule import (
    BACKWARD,
    FORWARD,
    PipelineSchedule,
    ScheduledMicrobatch,
    Workload,
    uniform_workload,
)
from .stream_order import Pass, streaming, walk
from .tick_layout import lay_out
from .validate import validate

LORAPP, TEMPLATE, GPIPE = "lorapp", "template", "gpipe"
STREAMING = (AUTO_SCHEDULE, "1f1b", LORAPP)
# Schedules in which every task has its own microbatches and updates. With "auto" the planner
# chooses groups of tasks; with the other schedules all tasks are packed together.
TASK_BY_TASK = (LORAPP, TEMPLATE)


def schedule_rounds(
    name: str, workload: Workload, rounds: Sequence[int], parts_per_stage: int = 1
) -> PipelineSchedule:
    """Returns the schedule of a stream of rounds, in the order in which training runs it. `rounds`
    has the index of each microbatch's round, ascending."""
    if name in STREAMING:
        return streaming(workload, rounds if name == LORAPP else None)
    rows: list[list[Op]] = [[] for _ in range(workload.stages)]
    for index in dict.fromkeys(rounds):
        members = [i for i, of_round in enumerate(rounds) if of_round == index]
        microbatches = [workload.microbatches[i] for i in members]
        table, order = round_table(name, microbatches, workload.stages, parts_per_stage)
        for step in walk(table):
            if isinstance(step, Pass):
                microbatch = members[order[step.microbatch]]
                op = Op(not step.forward, step.virtual_stage, microbatch)
                rows[step.virtual_stage % workload.stages].append(op)
    if parts_per_stage > 1:
        workload = workload.with_virtual_stages(parts_per_stage)
    return lay_out(workload, rows)


def round_table(
    name: str,
    microbatches: Sequence[ScheduledMicrobatch],
    stages: int,
    parts_per_stage: int = 1,
) -> tuple[PipelineSchedule, Sequence[int]]:
    """Returns the passes of a round in a pipeline that is empty before and after the round, and for
    each microbatch of the table its index in the round. All microbatches count as equally long,
    because the host dispatches a round before it runs."""
    # With the template, more microbatches in flight than this limit would not shorten the round.
    limit = [2 * stages - 1] * stages if name == TEMPLATE else None
    workload = uniform_workload(microbatches, [FORWARD] * stages, [BACKWARD] * stages, limit)
    order: Sequence[int] = range(len(microbatches))
    if name == GPIPE:
        table = gpipe(workload)
    elif name == INTERLEAVED:
        table = interleaved(workload, parts_per_stage)
    elif name == TEMPLATE:
        table, order = template(workload, "asynchronous"), template_order(workload)
    else:
        table = one_forward_one_backward(workload)
    validate(table, limit)
    return table, order


@cache
def residuals_in_flight(name: str, stages: int, parts_per_stage: int = 1) -> tuple[int, ...]:
    """Returns, for each part of the backbone, the most microbatches that are between their forward
    and their backward pass in a long round. With GPipe this is the whole round, which counts as
    1."""
    parts = stages * parts_per_stage
    if name == GPIPE:
        return (1,) * parts
    # In an interleaved pipeline, the peaks depend on the number of microbatches modulo S.
    counts = range(4 * parts, 4 * parts + (stages if parts_per_stage > 1 else 1))
    peaks = [
        round_table(name, [ScheduledMicrobatch((0,), (0,))] * count, stages, parts_per_stage)[0]
        .virtual_peak_buffers()
        .tolist()
        for count in counts
    ]
    return tuple(map(max, zip(*peaks, strict=True)))


def microbatches_in_flight(name: str, stages: int, parts_per_stage: int = 1) -> tuple[float, ...]:
    """Returns, for each stage, the most microbatches in flight, for `ReplicaCosts.in_flight`. A
    microbatch in one part of a stage counts as a fraction."""
    of_parts = residuals_in_flight(name, stages, parts_per_stage)
    return tuple(sum(of_parts[stage::stages]) / parts_per_stage for stage in range(stages))
