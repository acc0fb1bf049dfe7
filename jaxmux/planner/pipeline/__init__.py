"""Plans which tasks share microbatches and when each stage of a pipeline runs each microbatch.

`make_plan` returns a `Plan`. It uses three modules: `groupings` lists ways to group the tasks and
estimates which are worth simulating; `pipeline_plan` packs the groups and takes the fastest
grouping; `schedules` makes, checks and simulates the schedule.
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
