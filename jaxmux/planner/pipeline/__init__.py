"""Plans which tasks share microbatches and when each stage of a pipeline runs each microbatch.

`make_plan` returns a `Plan`. It uses `groupings`, which lists ways to group the tasks and estimates
which of them are worth simulating; `pipeline_plan`, which packs the groups and takes the fastest
grouping; and `schedules`, which makes, checks and simulates the schedule.
"""

from .make_plan import (
    Plan,
    SmallerMicrobatches,
    TaskLoad,
    make_plan,
    plan_with,
    shared_pool,
    try_smaller_microbatches,
)
from .pipeline_plan import grouping_of_share, grouping_of_tasks, pack_in_groups

__all__ = [
    "Plan",
    "SmallerMicrobatches",
    "TaskLoad",
    "grouping_of_share",
    "grouping_of_tasks",
    "make_plan",
    "pack_in_groups",
    "plan_with",
    "shared_pool",
    "try_smaller_microbatches",
]
