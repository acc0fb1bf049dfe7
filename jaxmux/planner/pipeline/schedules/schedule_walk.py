"""Walks a pipeline schedule: the passes of all stages in an order in which the host can dispatch
them."""

from collections.abc import Iterator
from typing import NamedTuple

from .schedule import PipelineSchedule


class Pass(NamedTuple):
    """One pass of a microbatch through a virtual stage.

    Attributes:
      forward: True for a forward pass, False for a backward pass.
      virtual_stage: the virtual stage, a part of the model.
      microbatch: index of the microbatch in the schedule.
    """

    forward: bool
    virtual_stage: int
    microbatch: int


class Sent(NamedTuple):
    """The result of a pass goes to the stage that uses it.

    A program that sends between processes keeps both devices waiting for each other. So a result is
    sent when its pass has ended, behind the other passes that began before.

    Attributes:
      result_of: the pass: any but the forward pass of the last virtual stage and the backward pass
        of the first one, whose results stay.
    """

    result_of: Pass


def walk(schedule: PipelineSchedule) -> Iterator[Pass | Sent]:
    """Yields the passes of a schedule, tick by tick; within a tick a stage's backward pass comes
    first. Results are sent at the end of the tick.

    Every pass comes after those whose outputs it uses, and the passes of a stage come in the order
    of its row. A device runs what is dispatched to it in order, so each stage follows its row at
    its own pace.

    Args:
      schedule: a legal schedule (see `validate`).
    """
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
