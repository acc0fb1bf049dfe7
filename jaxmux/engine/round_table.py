"""The tables that pipelines follow, by the name of their schedule."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmux.planner.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    PipelineSchedule,
    ScheduledMicrobatch,
    gpipe,
    interleaved,
    one_forward_one_backward,
    template,
    template_order,
    uniform_workload,
    validate,
)

SCHEDULES = ("1f1b", "lorapp", "template", "gpipe", "interleaved")
# Schedules whose rounds follow each other without a gap, in the order of a `StreamOrder`.
STREAMING = ("1f1b", "lorapp")
# Schedules for which every task has microbatches of its own and is updated by itself.
TASK_BY_TASK = ("lorapp", "template")


class RoundTable(NamedTuple):
    """The passes of a round.

    Attributes:
      schedule: the table, which `validate` has checked.
      order: for each microbatch of the table, its index in the round.
    """

    schedule: PipelineSchedule
    order: Sequence[int]


def round_table(
    schedule: str, stages: int, parts: int, samples: Sequence[Mapping[int, Sequence[int]]]
) -> RoundTable:
    """The passes of a round in a pipeline that is empty before and after it.

    Args:
      schedule: one of `SCHEDULES`. "lorapp" differs from "1f1b" only where rounds follow each
        other.
      stages: number of stages.
      parts: number of parts of the backbone, a multiple of `stages`.
      samples: by slot, the samples of each microbatch.
    """
    buckets = {slots: i for i, slots in enumerate(dict.fromkeys(map(tuple, samples)))}
    microbatches = [
        ScheduledMicrobatch(tuple(own), (0,) * len(own), buckets[tuple(own)]) for own in samples
    ]
    # With the template, a stage has room for as many microbatches as can make it faster.
    limit = [2 * stages - 1] * stages if schedule == "template" else None
    workload = uniform_workload(microbatches, [FORWARD] * stages, [BACKWARD] * stages, limit)
    order = range(len(microbatches))
    if schedule == "gpipe":
        table = gpipe(workload)
    elif schedule == "interleaved":
        table = interleaved(workload, parts // stages)
    elif schedule == "template":
        table, order = template(workload, "asynchronous"), template_order(workload)
    else:
        table = one_forward_one_backward(workload)
    validate(table, limit)
    return RoundTable(table, order)
