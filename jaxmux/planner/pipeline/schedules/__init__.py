"""Pipeline schedules as values: made, proven legal and simulated without any device.

workload = uniform_workload(round_robin_microbatches(tasks=4, steps=10), [1] * 4, [1] * 4)
schedule = template(workload)
validate(schedule)
print(schedule, simulate_lockstep(schedule, workload).bubble_ratio())
"""

from .bounds import least_makespan, least_paired_ticks
from .classic import gpipe, interleaved, one_forward_one_backward
from .layout import TickRule
from .lorapp import batch_lora, lorapp, split_minibatches
from .schedule import PipelineSchedule, Update
from .simulate import Simulation, simulate_asynchronous, simulate_lockstep
from .template import template, template_order
from .validate import IllegalSchedule, validate
from .workload import ScheduledMicrobatch, Workload, round_robin_microbatches, uniform_workload

__all__ = [
    "IllegalSchedule",
    "PipelineSchedule",
    "ScheduledMicrobatch",
    "Simulation",
    "TickRule",
    "Update",
    "Workload",
    "batch_lora",
    "gpipe",
    "interleaved",
    "least_makespan",
    "least_paired_ticks",
    "lorapp",
    "one_forward_one_backward",
    "round_robin_microbatches",
    "simulate_asynchronous",
    "simulate_lockstep",
    "split_minibatches",
    "template",
    "template_order",
    "uniform_workload",
    "validate",
]
