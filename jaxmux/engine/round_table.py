"""The tables that pipelines follow, by the name of their schedule."""

from collections.abc import Mapping, Sequence

from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    gpipe,
    interleaved,
    one_forward_one_backward,
    uniform_workload,
    validate,
)

SCHEDULES = ("1f1b", "gpipe", "interleaved")

# A backward pass takes about twice as long as a forward pass.
_FORWARD, _BACKWARD = 1.0, 2.0


def round_table(
    schedule: str, stages: int, parts: int, samples: Sequence[Mapping[int, Sequence[int]]]
) -> PipelineSchedule:
    """The passes of a round in a pipeline that is empty before and after it.

    Args:
      schedule: one of `SCHEDULES`.
      stages: number of stages.
      parts: number of parts of the backbone, a multiple of `stages`.
      samples: by slot, the samples of each microbatch.
    """
    microbatches = [ScheduledMicrobatch(tuple(own), (0,) * len(own)) for own in samples]
    workload = uniform_workload(microbatches, [_FORWARD] * stages, [_BACKWARD] * stages)
    if schedule == "gpipe":
        table = gpipe(workload)
    elif schedule == "interleaved":
        table = interleaved(workload, parts // stages)
    else:
        table = one_forward_one_backward(workload)
    validate(table)
    return table
