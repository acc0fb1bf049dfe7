"""Pipeline schedules as values: made, proven legal, simulated and drawn without any device.

load = uniform_workload(round_robin_jobs(tasks=4, steps=10), forward=[1] * 4, backward=[1] * 4)
schedule = template(load)
validate(schedule)
print(schedule, simulate_lockstep(schedule, load).bubble_ratio())

`picture.draw_schedule` is not imported here: it alone needs matplotlib.
"""

from .bounds import least_makespan, least_paired_ticks
from .classic import gpipe, interleaved, one_forward_one_backward
from .layout import TickRule
from .lorapp import batch_lora, lorapp, split_minibatches
from .schedule import Schedule, Update
from .simulate import Simulation, simulate_asynchronous, simulate_lockstep
from .tables import TickTables, tick_tables
from .template import template, template_order
from .trace import chrome_trace
from .validate import IllegalSchedule, validate
from .workload import Job, Workload, round_robin_jobs, uniform_workload

__all__ = [
    "IllegalSchedule",
    "Job",
    "Schedule",
    "Simulation",
    "TickRule",
    "TickTables",
    "Update",
    "Workload",
    "batch_lora",
    "chrome_trace",
    "gpipe",
    "interleaved",
    "least_makespan",
    "least_paired_ticks",
    "lorapp",
    "one_forward_one_backward",
    "round_robin_jobs",
    "simulate_asynchronous",
    "simulate_lockstep",
    "split_minibatches",
    "template",
    "template_order",
    "tick_tables",
    "uniform_workload",
    "validate",
]
