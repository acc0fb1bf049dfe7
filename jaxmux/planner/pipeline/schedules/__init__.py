"""Pipeline schedules as values, which are made, checked and simulated without a device.

A generator takes a `Workload`, the stream of microbatches with their times on every stage, and
returns a `PipelineSchedule`:

    microbatches = round_robin_microbatches(tasks=4, steps=10)
    workload = uniform_workload(microbatches, forward=[1] * 4, backward=[1] * 4)
    schedule = one_forward_one_backward(workload)
    validate(schedule)
    print(schedule, simulate_lockstep(schedule, workload).bubble_ratio())
"""

from .generators import (
    gpipe,
    interleaved,
    lorapp,
    one_f_one_b_depth,
    one_forward_one_backward,
    template,
    template_order,
)
from .named import (
    STREAMING,
    TASK_BY_TASK,
    microbatches_in_flight,
    residuals_in_flight,
    round_table,
    schedule_rounds,
)
from .schedule import (
    BACKWARD,
    FORWARD,
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    Update,
    Workload,
    round_robin_microbatches,
    simulate_asynchronous,
    simulate_lockstep,
    uniform_workload,
)
from .stream_order import Ended, Pass, Sent, StreamOrder, streaming, walk
from .tick_layout import TickRule
from .validate import IllegalSchedule, validate

__all__ = [
    "BACKWARD",
    "Ended",
    "FORWARD",
    "IllegalSchedule",
    "Pass",
    "PipelineSchedule",
    "STREAMING",
    "ScheduledMicrobatch",
    "Sent",
    "Simulation",
    "StreamOrder",
    "TASK_BY_TASK",
    "TickRule",
    "Update",
    "Workload",
    "gpipe",
    "interleaved",
    "lorapp",
    "microbatches_in_flight",
    "one_f_one_b_depth",
    "one_forward_one_backward",
    "residuals_in_flight",
    "round_robin_microbatches",
    "round_table",
    "schedule_rounds",
    "simulate_asynchronous",
    "simulate_lockstep",
    "streaming",
    "template",
    "template_order",
    "uniform_workload",
    "validate",
    "walk",
]
